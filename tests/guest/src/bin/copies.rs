// SPDX-License-Identifier: MIT OR Apache-2.0
//! The endpoint's engine moves data between channels, and touches nothing else.

use std::{
    fs,
    process::ExitCode,
    time::{Duration, Instant},
};

use guest::{
    abi::*,
    call::{Record, number},
    ktap, machine,
    mapping::{PAGE, pattern},
    pci::Function,
    promises,
    session::{Channel, SOON, Session, export, played, signals, softdev},
    wait,
};
use nix::errno::Errno;
use serde_json::json;
use std::os::fd::{AsFd, AsRawFd};

fn copy(session: &Session, from: u32, from_offset: u64, to: u32, to_offset: u64, bytes: u32) -> Result<(), Errno> {
    let mut copy = pcieipc_copy { from, to, from_offset, to_offset, bytes, timeout_ms: 5000, ..Record::new() };
    session.node.call(number::COPY, &mut copy)
}

fn endpoint_of(session: &Session) -> serde_json::Value {
    played(session.info().serial)["endpoint"].clone()
}

fn rings(session: &Session) -> u64 {
    played(session.info().serial)["rings"].as_u64().unwrap()
}

fn a_copy_moves_exactly_its_bytes_and_counts_them() {
    let session = Session::nth(0);
    assert_ne!(session.info().ep_flags & PCIEIPC_EP_DMA_ENGINE, 0);
    let [from, to] = [0; 2].map(|_| session.create(1 << 20, 0).unwrap());
    let [source, ..] = from.export().unwrap().maps();
    let target_export = to.export().unwrap();
    let [target, ..] = target_export.maps();
    for (round, (at, bytes)) in (1..).zip([(0usize, 8usize), (4088, 16), (0, 1 << 20), (12_288, 65_536)]) {
        source.fill(round);
        target.fill(99);
        let before = (session.info().dma_bytes, played(session.info().serial)["dma_bytes"].as_u64().unwrap());
        copy(&session, from.id(), at as u64, to.id(), at as u64, bytes as u32).unwrap();
        let seen = to.data();
        for offset in (0..seen.len()).step_by(8) {
            let seed = if (at..at + bytes).contains(&offset) { round } else { 99 };
            assert_eq!(seen.load(offset), pattern(seed, offset), "round {round}, offset {offset}");
        }
        let after = (session.info().dma_bytes, played(session.info().serial)["dma_bytes"].as_u64().unwrap());
        assert_eq!((after.0 - before.0, after.1 - before.1), (bytes as u64, bytes as u64), "the module and the endpoint count");
    }
}

fn the_engine_writes_into_another_endpoints_channel() {
    let [writer, reader] = [0, 1].map(Session::nth);
    let own = writer.create(1 << 18, 0).unwrap();
    let remote = reader.create(1 << 18, 0).unwrap();
    let export = remote.export().unwrap();
    let imported = import(&writer, export.as_fd().as_raw_fd());
    let [source, ..] = own.export().unwrap().maps();
    for round in 1..20 {
        source.fill(round);
        copy(&writer, own.id(), 0, imported, 0, 1 << 18).unwrap();
        assert_eq!(remote.data().differences(round), 0, "round {round}");
    }
    remote.destroy().unwrap();
    let refused = copy(&writer, own.id(), 0, imported, 0, 8);
    assert!(refused.is_err(), "a channel that its reader destroyed is no destination");
}

fn import(session: &Session, fd: i32) -> u32 {
    session.node.get(number::CHANNEL_IMPORT, pcieipc_channel_fd { fd, ..Record::new() }).channel
}

fn the_endpoint_knows_each_ring_while_it_lives_and_no_longer() {
    let session = Session::nth(0);
    assert_eq!(rings(&session), 0);
    let channels: Vec<Channel> = (0..5).map(|_| session.create(1 << 16, 0).unwrap()).collect();
    let pieces: u64 = channels.iter().map(|channel| u64::from(channel.made.segments)).sum();
    assert_eq!(rings(&session), pieces);
    channels[0].destroy().unwrap();
    assert_eq!(rings(&session), pieces - u64::from(channels[0].made.segments));
    let serial = session.info().serial;
    drop(channels);
    drop(session);
    assert!(wait::until(SOON, || played(serial)["rings"] == 0), "closing the session clears them");
}

fn four_mib_are_one_piece_where_memory_is_plenty_and_more_are_few() {
    let session = Session::nth(0);
    for (mib, most) in [(1, 1), (4, 1), (16, 4), (64, 16)] {
        let channel = session.create(mib << 20, 0).unwrap();
        assert!((1..=most).contains(&channel.made.segments), "{mib} MiB in {} pieces", channel.made.segments);
    }
}

/// An order of the engine takes 4 MiB at most, and one piece of a ring's memory.
fn a_copy_in_pieces_is_whole_and_rings_once_behind_the_last() {
    let [writer, other] = [0, 1].map(Session::nth);
    copies_in_pieces(&writer, &writer);
    let far = pcieipc_distance { from: writer.endpoint, to: other.endpoint, ..Record::new() };
    if writer.node.get(number::DISTANCE, far).p2p == 1 {
        copies_in_pieces(&writer, &other);
    }
}

fn copies_in_pieces(writer: &Session, reader: &Session) {
    const BYTES: usize = 16 << 20;
    let own = writer.create(BYTES as u64, 0).unwrap();
    let remote = reader.create(BYTES as u64, 2).unwrap();
    let eventfd = reader.eventfd(2);
    let export = remote.export().unwrap();
    let to = if writer.endpoint == reader.endpoint { remote.id() } else { import(writer, export.as_fd().as_raw_fd()) };
    let [source, ..] = own.export().unwrap().maps();
    let [target, ..] = export.maps();
    let mut copy =
        pcieipc_copy { flags: PCIEIPC_COPY_RING, from: own.id(), to, bytes: BYTES as u32, timeout_ms: 10_000, ..Record::new() };
    // Half a second in all, so that whoever is woken too early sees what is missing.
    let endpoint = endpoint_of(writer);
    softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": 2 * BYTES}));
    for round in 1..4 {
        source.fill(round);
        target.fill(99);
        std::thread::scope(|scope| {
            let woken = scope.spawn(|| (signals(&eventfd, SOON), remote.data().differences(round)));
            writer.node.call(number::COPY, &mut copy).unwrap();
            assert_eq!(woken.join().unwrap(), (1, 0), "round {round}: signals, and words that were missing then");
        });
        assert_eq!(signals(&eventfd, Duration::from_millis(50)), 0, "round {round}: rung once");
    }
    softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": 0}));
}

/// Memory in several pieces, as it is where no IOMMU makes one of them: every other one of some that were given back.
fn a_ring_in_several_pieces_is_told_piece_by_piece_and_copied_whole() {
    const BYTES: usize = 16 << 20;
    let session = Session::nth(0);
    let scattered = |session: &Session| {
        let blocks: Vec<u32> = (0..16).map(|_| session.create(4 << 20, 0).unwrap().id()).collect();
        for channel in blocks.iter().copied().skip(1).step_by(2) {
            session.node.get(number::CHANNEL_DESTROY, pcieipc_channel { channel, ..Record::new() });
        }
        let made = session.create(BYTES as u64, 3).unwrap();
        for channel in blocks.into_iter().step_by(2) {
            session.node.get(number::CHANNEL_DESTROY, pcieipc_channel { channel, ..Record::new() });
        }
        made.made
    };
    let before = rings(&session);
    let [from, to] = [0; 2].map(|_| scattered(&session));
    println!("# 16 MiB in {} and {} pieces", from.segments, to.segments);
    if fs::read_dir("/sys/kernel/iommu_groups").is_ok_and(|mut groups| groups.next().is_some()) {
        assert_eq!((from.segments, to.segments), (1, 1), "an IOMMU makes one piece of all");
    } else {
        assert!(from.segments > 1 && to.segments > 1, "memory in one piece proves nothing");
    }
    assert_eq!(rings(&session) - before, u64::from(from.segments + to.segments), "the endpoint knows each piece");
    let eventfd = session.eventfd(3);
    let export = |channel: &pcieipc_channel_create| export(&session.node, channel.channel).unwrap();
    let [source, ..] = export(&from).maps();
    let [target, ..] = export(&to).maps();
    // Borders of pieces, orders of the engine and areas lie at different places when the offsets differ.
    for (round, (from_offset, to_offset)) in (1..).zip([(0, 0), (64, 8), (8192, (4 << 20) - 8), ((4 << 20) + 4096, 64)]) {
        let bytes = BYTES - usize::max(from_offset, to_offset);
        source.fill(round);
        target.fill(99);
        let mut copy = pcieipc_copy {
            flags: PCIEIPC_COPY_RING,
            from: from.channel,
            to: to.channel,
            from_offset: from_offset as u64,
            to_offset: to_offset as u64,
            bytes: bytes as u32,
            timeout_ms: 10_000,
            ..Record::new()
        };
        session.node.call(number::COPY, &mut copy).unwrap();
        assert_eq!(signals(&eventfd, SOON), 1, "rung once, behind the last piece");
        for offset in (0..BYTES).step_by(8) {
            let copied = (to_offset..to_offset + bytes).contains(&offset);
            let expected = if copied { pattern(round, offset - to_offset + from_offset) } else { pattern(99, offset) };
            assert_eq!(target.load(offset), expected, "round {round}, offset {offset:#x}");
        }
    }
    for channel in [from.channel, to.channel] {
        session.node.get(number::CHANNEL_DESTROY, pcieipc_channel { channel, ..Record::new() });
    }
    assert_eq!(rings(&session), before, "and forgets each");
}

fn a_copy_that_takes_too_long_is_etimedout_and_the_next_one_works() {
    let session = Session::nth(0);
    let [from, to] = [0; 2].map(|_| session.create(1 << 20, 0).unwrap());
    let [source, ..] = from.export().unwrap().maps();
    source.fill(5);
    let endpoint = endpoint_of(&session);
    softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": 1000}));
    let mut slow = pcieipc_copy { from: from.id(), to: to.id(), bytes: 1 << 20, timeout_ms: 200, ..Record::new() };
    let begin = Instant::now();
    assert_eq!(session.node.call(number::COPY, &mut slow), Err(Errno::ETIMEDOUT));
    assert!(begin.elapsed().as_millis() >= 200 && begin.elapsed() < wait::patiently(SOON), "{:?}", begin.elapsed());
    softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": 0}));
    copy(&session, from.id(), 0, to.id(), 0, 1 << 20).unwrap();
    assert_eq!(to.data().differences(5), 0);
}

fn a_silent_endpoint_makes_a_copy_time_out_not_hang() {
    let session = Session::nth(0);
    let [from, to] = [0; 2].map(|_| session.create(1 << 16, 0).unwrap());
    let (serial, function, endpoint) = (session.info().serial, session.function(), endpoint_of(&session));
    softdev(&json!({"cmd": "silence", "endpoint": endpoint}));
    let mut copy = pcieipc_copy { from: from.id(), to: to.id(), bytes: 8, timeout_ms: 300, ..Record::new() };
    let begin = Instant::now();
    let outcome = session.node.call(number::COPY, &mut copy);
    assert!(matches!(outcome, Err(Errno::ETIMEDOUT | Errno::ENODEV | Errno::EIO)), "{outcome:?}");
    assert!(begin.elapsed() < wait::patiently(SOON));
    function.remove().unwrap();
    softdev(&json!({"cmd": "revive", "endpoint": endpoint}));
    Function::rescan().unwrap();
    guest::session::living(serial);
}

fn death_in_the_middle_of_a_copy_is_an_error_within_its_time() {
    let session = Session::nth(0);
    let [from, to] = [0; 2].map(|_| session.create(1 << 20, 0).unwrap());
    let (serial, function, endpoint) = (session.info().serial, session.function(), endpoint_of(&session));
    softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": 100_000}));
    std::thread::scope(|scope| {
        let begin = Instant::now();
        let copying = scope.spawn(|| copy(&session, from.id(), 0, to.id(), 0, 1 << 20));
        std::thread::sleep(std::time::Duration::from_millis(300));
        softdev(&json!({"cmd": "die", "endpoint": endpoint}));
        let outcome = copying.join().unwrap();
        assert!(matches!(outcome, Err(Errno::ENODEV | Errno::ETIMEDOUT | Errno::EREMOTEIO | Errno::EIO)), "{outcome:?}");
        println!("# {outcome:?} after {} ms", begin.elapsed().as_millis());
        assert!(begin.elapsed() < wait::patiently(2 * SOON));
    });
    function.remove().unwrap();
    softdev(&json!({"cmd": "revive", "endpoint": endpoint}));
    Function::rescan().unwrap();
    guest::session::living(serial);
}

fn an_engine_that_holds_on_to_its_order_over_a_reset_makes_its_endpoint_dead() {
    let session = Session::nth(0);
    let [from, to] = [0; 2].map(|_| session.create(1 << 20, 0).unwrap());
    let (serial, function, endpoint) = (session.info().serial, session.function(), endpoint_of(&session));
    let eventfd = session.eventfd(0);
    softdev(&json!({"cmd": "stick", "endpoint": endpoint}));
    let mut copy = pcieipc_copy { from: from.id(), to: to.id(), bytes: 1 << 20, timeout_ms: 200, ..Record::new() };
    let begin = Instant::now();
    assert_eq!(session.node.call(number::COPY, &mut copy), Err(Errno::ENODEV));
    assert!(begin.elapsed() < wait::patiently(SOON));
    assert_eq!(session.state().0, PCIEIPC_STATE_DEAD);
    assert!(signals(&eventfd, SOON) > 0, "whoever sleeps is told");
    assert_eq!(played(serial)["mastering"], false, "it does not get the bus again");
    assert_eq!(session.ring(0), Err(Errno::ENODEV));
    for channel in [from, to] {
        channel.destroy().unwrap();
    }
    assert_eq!(played(serial)["mastering"], false, "not for the end of its rings either");
    function.remove().unwrap();
    softdev(&json!({"cmd": "revive", "endpoint": endpoint}));
    Function::rescan().unwrap();
    guest::session::living(serial);
}

/// Its engine does not stop and loses the bus, and forgets its order at the reset that follows. Returns what COPY said.
fn copy_until_it_is_reset(session: &Session) -> Result<(), Errno> {
    let [from, to] = [0; 2].map(|_| session.create(1 << 20, 0).unwrap());
    softdev(&json!({"cmd": "stick", "endpoint": endpoint_of(session), "until_reset": true}));
    let mut copy = pcieipc_copy { from: from.id(), to: to.id(), bytes: 1 << 20, timeout_ms: 200, ..Record::new() };
    let outcome = session.node.call(number::COPY, &mut copy);
    for channel in [from, to] {
        channel.destroy().unwrap();
    }
    outcome
}

/// How many pages of two rings nobody gets any more where nothing keeps the endpoint from memory.
fn kept_of(session: &Session) -> u64 {
    if session.info().iommu == PCIEIPC_IOMMU_TRANSLATING { 0 } else { 2 * (1 << 20) / PAGE as u64 }
}

fn an_engine_that_forgets_its_order_at_a_reset_gets_the_bus_again() {
    let session = Session::nth(0);
    let before = machine::module_state("pages");
    assert_eq!(copy_until_it_is_reset(&session), Err(Errno::ETIMEDOUT));
    assert_eq!((session.state().0, machine::module_state("pages")), (PCIEIPC_STATE_LIVE, before));
    let [from, to] = [0; 2].map(|_| session.create(1 << 16, 0).unwrap());
    copy(&session, from.id(), 0, to.id(), 0, 1 << 16).unwrap();
}

fn an_endpoint_whose_transactions_do_not_end_gets_the_bus_no_more_whatever_its_engine_says() {
    let session = Session::nth(0);
    let (serial, function, endpoint, kept) =
        (session.info().serial, session.function(), endpoint_of(&session), kept_of(&session));
    let before = machine::module_state("pages");
    softdev(&json!({"cmd": "pending", "endpoint": endpoint, "on": true}));
    assert_eq!(copy_until_it_is_reset(&session), Err(Errno::ENODEV));
    assert_eq!((session.state().0, &played(serial)["mastering"]), (PCIEIPC_STATE_DEAD, &json!(false)));
    assert_eq!(machine::module_state("pages"), before + kept, "{before} pages before");
    function.remove().unwrap();
    softdev(&json!({"cmd": "revive", "endpoint": endpoint}));
    Function::rescan().unwrap();
    guest::session::living(serial);
}

fn an_endpoint_that_does_not_answer_when_its_engine_is_reset_is_missing_not_quiet() {
    // So that nobody looks at it but the copy.
    machine::reload(c"doorbell_map=1 link_sample_ms=60000");
    let session = Session::nth(0);
    let (serial, endpoint, kept) = (session.info().serial, endpoint_of(&session), kept_of(&session));
    let before = machine::module_state("pages");
    softdev(&json!({"cmd": "misread", "endpoint": endpoint, "count": u32::MAX}));
    assert_eq!(copy_until_it_is_reset(&session), Err(Errno::EIO));
    assert_eq!((session.state().0, &played(serial)["mastering"]), (PCIEIPC_STATE_RECOVERING, &json!(false)));
    assert_eq!(machine::module_state("pages"), before + kept, "{before} pages before");
    softdev(&json!({"cmd": "misread", "endpoint": endpoint, "count": 0}));
    let lives = || session.state().0 == PCIEIPC_STATE_LIVE;
    assert!(wait::until(SOON, lives), "{:?}", session.state());
    drop(session);
    {
        let session = Session::nth(0);
        let [from, to] = [0; 2].map(|_| session.create(1 << 16, 0).unwrap());
        copy(&session, from.id(), 0, to.id(), 0, 1 << 16).unwrap();
    }
    machine::reload(c"doorbell_map=1");
}

fn an_endpoint_that_its_reset_made_dead_is_off_the_bus_and_its_registers_are_left_alone() {
    let session = Session::nth(0);
    let [from, to] = [0; 2].map(|_| session.create(1 << 20, 0).unwrap());
    let rings: Vec<_> = (0..8).map(|_| session.create(4096, 1).unwrap()).collect();
    let (serial, function, endpoint) = (session.info().serial, session.function(), endpoint_of(&session));
    // It stops when it is told to, and is busy after the reset that follows.
    softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": 200_000}));
    softdev(&json!({"cmd": "stick", "endpoint": endpoint, "at_reset": true}));
    let mut copy = pcieipc_copy { from: from.id(), to: to.id(), bytes: 1 << 20, timeout_ms: 200, ..Record::new() };
    assert_eq!(session.node.call(number::COPY, &mut copy), Err(Errno::ENODEV));
    assert_eq!((session.state().0, &played(serial)["mastering"]), (PCIEIPC_STATE_DEAD, &json!(false)));
    // Somebody may reset it at any time, and its state does not tell.
    let accesses = || played(serial)["accesses"].as_u64().unwrap();
    let before = accesses();
    for ring in rings {
        ring.destroy().unwrap();
    }
    assert_eq!(session.ring(1), Err(Errno::ENODEV));
    drop(session);
    assert_eq!(accesses(), before);
    assert_eq!(played(serial)["mastering"], false, "not for the end of its rings either");
    function.remove().unwrap();
    softdev(&json!({"cmd": "revive", "endpoint": endpoint}));
    Function::rescan().unwrap();
    guest::session::living(serial);
}

fn unbind_in_the_middle_of_a_copy_waits_for_nobody_and_nothing_lands_later() {
    let session = Session::nth(0);
    let [from, to] = [0; 2].map(|_| session.create(1 << 20, 0).unwrap());
    let [source, ..] = from.export().unwrap().maps();
    let [target, ..] = to.export().unwrap().maps();
    source.fill(1);
    let (serial, function, endpoint) = (session.info().serial, session.function(), endpoint_of(&session));
    softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": 200_000}));
    std::thread::scope(|scope| {
        let copying = scope.spawn(|| copy(&session, from.id(), 0, to.id(), 0, 1 << 20));
        std::thread::sleep(std::time::Duration::from_millis(300));
        let begin = Instant::now();
        function.unbind().unwrap();
        println!("# unbind took {} ms", begin.elapsed().as_millis());
        assert!(begin.elapsed() < wait::patiently(SOON));
        target.fill(2);
        let outcome = copying.join().unwrap();
        assert!(matches!(outcome, Err(Errno::ENODEV | Errno::EREMOTEIO | Errno::EIO)), "{outcome:?}");
    });
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!(target.differences(2), 0, "no byte lands after unbind");
    softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": 0}));
    function.bind().unwrap();
    guest::session::living(serial);
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            a_copy_moves_exactly_its_bytes_and_counts_them,
            the_engine_writes_into_another_endpoints_channel,
            the_endpoint_knows_each_ring_while_it_lives_and_no_longer,
            four_mib_are_one_piece_where_memory_is_plenty_and_more_are_few,
            a_copy_in_pieces_is_whole_and_rings_once_behind_the_last,
            a_ring_in_several_pieces_is_told_piece_by_piece_and_copied_whole,
            a_copy_that_takes_too_long_is_etimedout_and_the_next_one_works,
            a_silent_endpoint_makes_a_copy_time_out_not_hang,
            death_in_the_middle_of_a_copy_is_an_error_within_its_time,
            an_engine_that_holds_on_to_its_order_over_a_reset_makes_its_endpoint_dead,
            an_engine_that_forgets_its_order_at_a_reset_gets_the_bus_again,
            an_endpoint_whose_transactions_do_not_end_gets_the_bus_no_more_whatever_its_engine_says,
            an_endpoint_that_does_not_answer_when_its_engine_is_reset_is_missing_not_quiet,
            an_endpoint_that_its_reset_made_dead_is_off_the_bus_and_its_registers_are_left_alone,
            unbind_in_the_middle_of_a_copy_waits_for_nobody_and_nothing_lands_later,
        ],
        machine::repair,
    )
}
