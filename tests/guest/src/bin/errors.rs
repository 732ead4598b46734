// SPDX-License-Identifier: MIT OR Apache-2.0
//! PCI errors and resets: told, recovered from, and the channels' memory is still there.

use std::{
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    process::ExitCode,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use guest::{
    abi::*,
    aer::{self, BAD_TLP, COMPLETION_TIMEOUT, MALFORMED_TLP},
    call::{Record, number},
    ktap, machine,
    mapping::{PAGE, READ_WRITE},
    pci::Function,
    promises,
    session::{Node, SOON, Session, living, played, signals, softdev},
    wait,
};
use nix::{errno::Errno, fcntl::OFlag, poll::PollFlags};
use serde_json::json;

/// How long an endpoint that does not answer may take to come back, as `errors.toml` says.
const MISSING: Duration = Duration::from_secs(4);

/// Has the kernel find an error in the endpoint's AER registers.
fn inject(session: &Session, uncorrectable: u32, correctable: u32) {
    aer::inject(session.info().address, uncorrectable, correctable);
}

fn recover(session: &Session) -> Result<u64, Errno> {
    let mut recovered = pcieipc_recover::new();
    session.node.call(number::RECOVER, &mut recovered).map(|()| recovered.generation)
}

fn kinds(events: &[pcieipc_event], kind: u32) -> Vec<&pcieipc_event> {
    events.iter().filter(|event| event.kind == kind).collect()
}

const LIVE: u64 = PCIEIPC_STATE_LIVE as u64;
const RECOVERING: u64 = PCIEIPC_STATE_RECOVERING as u64;
const GONE: u64 = PCIEIPC_STATE_GONE as u64;

/// The changes of state that they tell.
fn changes(events: &[pcieipc_event]) -> Vec<(u64, u64)> {
    kinds(events, PCIEIPC_EVENT_STATE).iter().map(|event| (event.detail[0], event.detail[1])).collect()
}

fn correctable_errors_are_counted_and_told_and_nothing_else_happens() {
    let session = Session::nth(0);
    let eventfd = session.eventfd(0);
    let (before, state) = (session.info().correctable, session.state());
    session.node.events();
    for count in 1..=5 {
        // One at a time, because the hardware shows two at once as one.
        inject(&session, 0, BAD_TLP);
        assert!(wait::until(SOON, || session.info().correctable == before + count), "{}", session.info().correctable);
    }
    let mut told = Vec::new();
    let all = wait::until(SOON, || {
        told.extend(session.node.events());
        kinds(&told, PCIEIPC_EVENT_CORRECTABLE).iter().map(|event| event.detail[0]).sum::<u64>() == 5
    });
    assert!(all, "{told:?}");
    assert_eq!(kinds(&told, PCIEIPC_EVENT_CORRECTABLE).last().unwrap().detail[1], before + 5);
    assert_eq!(kinds(&told, PCIEIPC_EVENT_STATE).len(), 0, "{told:?}");
    assert_eq!(session.state(), state);
    session.ring(0).unwrap();
    assert_eq!(signals(&eventfd, SOON), 1);
}

/// What any error or reset that the endpoint survives must look like.
fn survived(severity: Option<u64>, cause: impl Fn(&Session)) {
    let session = Session::nth(0);
    let channel = session.create(1 << 18, 1).unwrap();
    let other = session.create(1 << 18, 1).unwrap();
    let export = channel.export().unwrap();
    let [writer, tail, ..] = export.maps();
    let (reader, reader_tail) = (channel.data(), channel.tail());
    let eventfd = session.eventfd(1);
    let space = export.eventfd();
    let old = session.attached.generation;
    writer.fill(1);
    session.node.events();
    let (serial, life) = (session.info().serial, played(session.info().serial)["life"].as_u64());

    let begin = Instant::now();
    cause(&session);
    let lives = |(state, generation): (u32, u64)| state == PCIEIPC_STATE_LIVE && generation > old;
    assert!(wait::until(2 * SOON, || lives(session.state())), "{:?}", session.state());
    println!("# lives again after {} ms", begin.elapsed().as_millis());
    let generation = session.state().1;
    assert!(signals(&eventfd, SOON) > 0, "the reader is woken");
    assert!(signals(&space, SOON) > 0, "the writer is woken");
    let mut events = Vec::new();
    wait::until(SOON, || {
        events.extend(session.node.events());
        kinds(&events, PCIEIPC_EVENT_STATE).len() >= 2
    });
    assert_eq!(changes(&events), [(LIVE, RECOVERING), (RECOVERING, LIVE)], "{events:?}");
    let severities: Vec<u64> = kinds(&events, PCIEIPC_EVENT_ERROR).iter().map(|event| event.detail[0]).collect();
    assert_eq!(severities, Vec::from_iter(severity), "{events:?}");

    assert_eq!(session.create(PAGE as u64, 0).map(drop), Err(Errno::ESTALE), "the session belongs to the old life");
    assert_eq!(session.ring(1), Err(Errno::ESTALE));
    assert_eq!(session.session_state().unwrap().attached_generation, old);
    assert_eq!(recover(&session), Ok(generation));
    assert_eq!(session.session_state().unwrap().attached_generation, generation);
    assert_eq!(recover(&session), Ok(generation), "once more is no harm");

    assert_eq!(reader.differences(1), 0, "the channel's memory is as it was");
    writer.fill(2);
    tail.store(0, 77);
    assert_eq!((reader.differences(2), reader_tail.load(0)), (0, 77), "and still shared");
    signals(&eventfd, Duration::ZERO);
    session.ring(1).unwrap();
    assert_eq!(signals(&eventfd, SOON), 1, "doorbells work");
    export.ring().unwrap();
    assert_eq!(signals(&eventfd, SOON), 1, "the writer's, too");
    assert!(!wait::polled(&export, PollFlags::POLLIN, Duration::ZERO).contains(PollFlags::POLLHUP));
    let copy = pcieipc_copy { from: channel.id(), to: other.id(), bytes: 1 << 18, timeout_ms: 5000, ..Record::new() };
    session.node.get(number::COPY, copy);
    assert_eq!(other.data().differences(2), 0, "the engine reaches the rings again");
    let rings = u64::from(channel.made.segments + other.made.segments);
    assert_eq!(played(serial)["rings"], rings, "and knows exactly them");
    println!("# life {life:?}, now {}", played(serial)["life"]);
}

fn a_non_fatal_error_is_survived() {
    survived(Some(1), |session| inject(session, COMPLETION_TIMEOUT, 0));
}

fn a_fatal_error_resets_the_link_and_is_survived() {
    survived(Some(2), |session| inject(session, MALFORMED_TLP, 0));
}

fn a_function_reset_is_survived() {
    survived(None, |session| session.function().reset().unwrap());
}

fn an_administrators_reset_is_survived_and_reported() {
    let watcher = Node::open(OFlag::empty());
    survived(None, |session| {
        let admin = pcieipc_admin { action: PCIEIPC_ADMIN_RESET, endpoint: session.endpoint, ..Record::new() };
        session.node.get(number::ADMIN, admin);
    });
    let events = watcher.events();
    let done = kinds(&events, PCIEIPC_EVENT_ADMIN);
    assert_eq!(done.iter().map(|event| (event.detail[0], event.detail[1])).collect::<Vec<_>>(), [(1, 0)], "{events:?}");
}

fn errors_after_errors_are_survived() {
    for _ in 0..5 {
        a_fatal_error_resets_the_link_and_is_survived();
        a_non_fatal_error_is_survived();
    }
}

fn an_error_in_the_middle_of_a_copy_ends_it_and_nothing_lands_later() {
    let session = Session::nth(0);
    let [from, to] = [0; 2].map(|_| session.create(1 << 20, 0).unwrap());
    let [source, ..] = from.export().unwrap().maps();
    let [target, ..] = to.export().unwrap().maps();
    let endpoint = played(session.info().serial)["endpoint"].clone();
    source.fill(1);
    softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": 200_000}));
    thread::scope(|scope| {
        let copying = scope.spawn(|| {
            let mut copy = pcieipc_copy { from: from.id(), to: to.id(), bytes: 1 << 20, timeout_ms: 10_000, ..Record::new() };
            session.node.call(number::COPY, &mut copy)
        });
        thread::sleep(Duration::from_millis(300));
        inject(&session, MALFORMED_TLP, 0);
        let outcome = copying.join().unwrap();
        assert!(matches!(outcome, Err(Errno::EIO | Errno::ESTALE | Errno::EREMOTEIO | Errno::ENOENT)), "{outcome:?}");
    });
    assert!(wait::until(SOON, || session.state().0 == PCIEIPC_STATE_LIVE && session.state().1 > session.attached.generation));
    target.fill(2);
    recover(&session).unwrap();
    thread::sleep(Duration::from_millis(300));
    assert_eq!(target.differences(2), 0, "no byte of the old copy lands in the new life");
    softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": 0}));
}

fn a_reset_ends_copies_of_other_endpoints_into_its_memory_before_it_begins() {
    let [reader, writer] = [0, 1].map(Session::nth);
    let mut made = pcieipc_channel_create { data_bytes: 1 << 20, flags: PCIEIPC_CHANNEL_DEVICE_MEMORY, ..Record::new() };
    reader.node.call(number::CHANNEL_CREATE, &mut made).unwrap();
    let exported = reader.node.get(number::CHANNEL_EXPORT, pcieipc_channel_fd { channel: made.channel, ..Record::new() });
    // SAFETY: the kernel has just made this descriptor for us.
    let exported = unsafe { OwnedFd::from_raw_fd(exported.fd) };
    let import = pcieipc_channel_fd { fd: exported.as_raw_fd(), ..Record::new() };
    let to = writer.node.get(number::CHANNEL_IMPORT, import).channel;
    let from = writer.create(1 << 20, 0).unwrap();
    let copy = pcieipc_copy { from: from.id(), to, bytes: 1 << 20, timeout_ms: 10_000, ..Record::new() };
    let copies = || writer.node.call(number::COPY, &mut { copy });
    assert_eq!(copies(), Ok(()));

    let (serial, engine) = (writer.info().serial, played(writer.info().serial)["endpoint"].clone());
    let (function, state) = (reader.function(), writer.state());
    softdev(&json!({"cmd": "slow", "endpoint": engine, "bytes_per_s": 200_000}));
    thread::scope(|scope| {
        let copying = scope.spawn(copies);
        assert!(wait::until(SOON, || played(serial)["busy"] == true), "{}", played(serial));
        function.reset().unwrap();
        // An engine that were in the middle would find nobody there, and say so.
        assert_eq!(copying.join().unwrap(), Err(Errno::EIO));
    });
    softdev(&json!({"cmd": "slow", "endpoint": engine, "bytes_per_s": 0}));
    assert_eq!(copies(), Err(Errno::ESTALE), "the reader has not recovered");
    recover(&reader).unwrap();
    assert_eq!(copies(), Ok(()));
    assert_eq!(writer.state(), state, "the writer's endpoint lives on as it did");
}

fn an_endpoint_that_died_in_its_recovery_is_dead_and_comes_back_by_removal() {
    let session = Session::nth(0);
    let (serial, function) = (session.info().serial, session.function());
    let endpoint = played(serial)["endpoint"].clone();
    // The reset of the link takes a second, and in the meantime the endpoint dies.
    inject(&session, MALFORMED_TLP, 0);
    assert!(wait::until(SOON, || session.state().0 == PCIEIPC_STATE_RECOVERING));
    softdev(&json!({"cmd": "die", "endpoint": endpoint}));
    let eventfd = session.eventfd(0);
    let over = |state| [PCIEIPC_STATE_DEAD, PCIEIPC_STATE_GONE].contains(&state);
    // The kernel waits a minute for the endpoint to come out of the reset; only then is it lost.
    assert!(wait::until(Duration::from_secs(90), || over(session.state().0)), "{:?}", session.state());
    assert!(signals(&eventfd, SOON) > 0);
    assert_eq!(recover(&session), Err(Errno::ENODEV));
    function.remove().unwrap();
    softdev(&json!({"cmd": "revive", "endpoint": endpoint}));
    Function::rescan().unwrap();
    let next = Session::on(Node::open(OFlag::empty()), living(serial));
    let eventfd = next.eventfd(0);
    next.ring(0).unwrap();
    assert_eq!(signals(&eventfd, SOON), 1);
}

/// Everything that touches the endpoint, from threads, while its function is reset again and again. The endpoint itself counts what
/// reaches it while it is to be left alone.
fn no_access_falls_into_a_reset_or_an_error() {
    const ROUNDS: u64 = 8;
    let session = Session::nth(0);
    let (serial, function) = (session.info().serial, session.function());
    let [from, to] = [0; 2].map(|_| session.create(PAGE as u64, 0).unwrap());
    let export = from.export().unwrap();
    let before = played(serial);
    let over = AtomicBool::new(false);
    let again = |act: &dyn Fn() -> Result<(), Errno>| {
        while !over.load(Ordering::Relaxed) {
            // Calls fail in a reset and until the session recovers; what they answer does not matter here.
            let _ = act();
            thread::sleep(Duration::from_micros(200));
        }
    };
    // A doorbell's page becomes the device's again by a new mapping only, so each serves for a while: over the end of a life now and then.
    let store = || {
        let mut bell = pcieipc_doorbell::new();
        session.node.call(number::DOORBELL_MAP, &mut bell)?;
        let page = session.node.map(bell.map_offset, PAGE, READ_WRITE)?;
        for _ in 0..100 {
            page.store32(bell.page_offset as usize, bell.value as u32);
            thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    };
    let copy = pcieipc_copy { from: from.id(), to: to.id(), bytes: 4096, timeout_ms: 1000, ..Record::new() };
    thread::scope(|scope| {
        scope.spawn(|| again(&|| session.ring(0)));
        scope.spawn(|| again(&|| export.ring()));
        scope.spawn(|| again(&store));
        scope.spawn(|| again(&|| session.node.call(number::COPY, &mut { copy })));
        scope.spawn(|| again(&|| session.create(PAGE as u64, 1)?.destroy()));
        scope.spawn(|| again(&|| session.node.info(session.endpoint).map(drop)));
        scope.spawn(|| again(&|| recover(&session).map(drop)));
        for _ in 0..ROUNDS {
            function.reset().unwrap();
            thread::sleep(Duration::from_millis(30));
            // No memory is switched off in it, so whatever was stored would get there.
            let generation = session.state().1;
            inject(&session, COMPLETION_TIMEOUT, 0);
            assert!(wait::until(2 * SOON, || session.state().1 > generation), "{:?}", session.state());
            thread::sleep(Duration::from_millis(30));
        }
        over.store(true, Ordering::Relaxed);
    });
    let after = played(serial);
    let more = |key: &str| after[key].as_u64().unwrap() - before[key].as_u64().unwrap();
    println!(
        "# {} resets and {ROUNDS} errors, {} accesses, {} of them in a reset; {} doorbells, {} of them off the bus",
        more("life"),
        more("accesses"),
        more("touched_in_reset"),
        more("doorbells"),
        more("rung_off_the_bus")
    );
    assert!(more("life") >= ROUNDS && more("accesses") > 10 * ROUNDS, "the endpoint was reset and used");
    assert!(more("doorbells") > 10 * ROUNDS, "it was rung");
    assert_eq!((more("touched_in_reset"), more("rung_off_the_bus")), (0, 0));
}

fn errors_of_one_endpoint_leave_its_sibling_alone() {
    let [session, sibling] = [0, 1].map(Session::nth);
    let eventfd = sibling.eventfd(0);
    let before = sibling.state();
    inject(&session, COMPLETION_TIMEOUT, 0);
    let lives = || session.state().0 == PCIEIPC_STATE_LIVE && session.state().1 > session.attached.generation;
    assert!(wait::until(2 * SOON, lives), "{:?}", session.state());
    assert_eq!(sibling.state(), before);
    sibling.ring(0).unwrap();
    assert_eq!(signals(&eventfd, SOON), 1);
}

fn two_reads_that_fail_are_nothing() {
    let session = Session::nth(0);
    let (serial, before) = (session.info().serial, session.state());
    session.node.events();
    misread(&session, 2);
    assert!(wait::until(SOON, || played(serial)["misreads"] == 0), "nobody looks at the endpoint: {}", played(serial));
    thread::sleep(Duration::from_millis(100));
    let events = session.node.events();
    assert_eq!((session.state(), kinds(&events, PCIEIPC_EVENT_STATE).len()), (before, 0), "{events:?}");
}

/// The next reads of its ids give all-ones, and those alone, so the kernel can still read the errors that are injected.
fn misread(session: &Session, count: u32) {
    let endpoint = played(session.info().serial)["endpoint"].clone();
    softdev(&json!({"cmd": "misread", "endpoint": endpoint, "count": count}));
}

fn becomes_recovering(session: &Session) {
    let generation = session.attached.generation;
    assert!(wait::until(SOON, || session.state() == (PCIEIPC_STATE_RECOVERING, generation)), "{:?}", session.state());
}

fn one_that_does_not_answer_is_off_the_bus_and_gone_when_its_time_is_over() {
    let session = Session::nth(0);
    let (serial, function) = (session.info().serial, session.function());
    let channel = session.create(1 << 18, 1).unwrap();
    let eventfd = session.eventfd(0);
    let export = channel.export().unwrap();
    session.node.events();
    misread(&session, u32::MAX);
    becomes_recovering(&session);
    let begin = Instant::now();
    assert!(signals(&eventfd, SOON) > 0, "whoever sleeps is told at once");
    let eio = Err(Errno::EIO);
    assert_eq!((session.ring(1), export.ring(), recover(&session).map(drop)), (eio, eio, eio));
    assert_eq!(session.create(PAGE as u64, 0).map(drop), eio);
    let polled = wait::polled(&export, PollFlags::POLLPRI, SOON);
    assert!(polled.contains(PollFlags::POLLPRI) && !polled.contains(PollFlags::POLLHUP), "{polled:?}");
    assert!(wait::until(SOON, || function.command().unwrap() & 4 == 0), "it may not master the bus");
    assert!(begin.elapsed() < MISSING, "this machine is too slow to look in time");
    assert_eq!(session.state().0, PCIEIPC_STATE_RECOVERING);

    assert!(wait::until(MISSING + SOON, || session.state().0 == PCIEIPC_STATE_GONE), "{:?}", session.state());
    let took = begin.elapsed();
    println!("# gone after {} ms", took.as_millis());
    // It was missing a moment before it was seen here.
    assert!(took + Duration::from_millis(200) > MISSING, "it had {MISSING:?} to come back");
    assert!(signals(&eventfd, SOON) > 0);
    assert_eq!(recover(&session), Err(Errno::ENODEV));
    let events = session.node.events();
    assert_eq!(changes(&events), [(LIVE, RECOVERING), (RECOVERING, GONE)], "{events:?}");
    assert_eq!(kinds(&events, PCIEIPC_EVENT_ERROR).iter().map(|event| event.detail[0]).collect::<Vec<_>>(), [3], "{events:?}");
    misread(&session, 0);
    thread::sleep(Duration::from_millis(300));
    assert_eq!(session.state().0, PCIEIPC_STATE_GONE, "it does not come back by itself any more");
    function.remove().unwrap();
    Function::rescan().unwrap();
    living(serial);
}

fn one_that_answers_again_in_time_begins_a_new_life_by_a_reset() {
    survived(None, |session| {
        let serial = session.info().serial;
        let life = || played(serial)["life"].as_u64().unwrap();
        let before = life();
        misread(session, u32::MAX);
        becomes_recovering(session);
        misread(session, 0);
        assert!(wait::until(SOON, || life() == before + 1), "{}", played(serial));
    });
}

fn one_that_lost_its_power_for_a_moment_gets_its_configuration_back() {
    survived(None, |session| {
        let endpoint = played(session.info().serial)["endpoint"].clone();
        softdev(&json!({"cmd": "die", "endpoint": endpoint}));
        becomes_recovering(session);
        softdev(&json!({"cmd": "revive", "endpoint": endpoint}));
    });
}

/// A port with DPC takes the link down before the kernel hears of the error, and then it looks as if the endpoint were gone. `answer`
/// is how the link comes back when the recovery has begun.
fn silent_before_its_error(session: &Session, silence: impl FnOnce(), error: impl FnOnce(), answer: impl FnOnce()) {
    let [from, to] = [0; 2].map(|_| session.create(1 << 20, 0).unwrap());
    let serial = session.info().serial;
    let endpoint = played(serial)["endpoint"].clone();
    softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": 200_000}));
    thread::scope(|scope| {
        let copying = scope.spawn(|| {
            let mut copy = pcieipc_copy { from: from.id(), to: to.id(), bytes: 1 << 20, timeout_ms: 10_000, ..Record::new() };
            session.node.call(number::COPY, &mut copy)
        });
        assert!(wait::until(SOON, || played(serial)["busy"] == true), "{}", played(serial));
        silence();
        becomes_recovering(session);
        assert_eq!(copying.join().unwrap(), Err(Errno::EIO));
    });
    thread::sleep(Duration::from_millis(50));
    assert_eq!(session.state(), (PCIEIPC_STATE_RECOVERING, session.attached.generation));
    let watcher = Node::open(OFlag::O_NONBLOCK);
    error();
    let begun = wait::until(SOON, || !kinds(&watcher.events(), PCIEIPC_EVENT_ERROR).is_empty());
    assert!(begun, "the kernel's recovery begins");
    answer();
    softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": 0}));
    for channel in [from, to] {
        channel.destroy().unwrap();
    }
}

fn one_that_fell_silent_before_its_error_was_reported_is_survived() {
    survived(Some(2), |session| {
        let error = || inject(session, MALFORMED_TLP, 0);
        silent_before_its_error(session, || misread(session, u32::MAX), error, || misread(session, 0));
    });
}

fn one_whose_port_took_the_link_down_before_the_error_was_reported_is_survived() {
    survived(Some(2), |session| {
        let endpoint = played(session.info().serial)["endpoint"].clone();
        let play = |what: &str| drop(softdev(&json!({"cmd": what, "endpoint": endpoint})));
        let error = || aer::inject(session.function().port().unwrap(), MALFORMED_TLP, 0);
        silent_before_its_error(session, || play("die"), error, || play("revive"));
    });
}

fn a_worse_link_and_its_return_are_events_with_before_and_after() {
    let session = Session::nth(0);
    let endpoint = played(session.info().serial)["endpoint"].clone();
    let limit = SOON + Duration::from_millis(session.node.query().link_sample_ms.into());
    let best = session.info();
    assert_eq!((best.link_speed, best.link_width), (4, 16), "as the endpoint says");
    session.node.events();
    for (before, now) in [((4u64, 16u64), (1u64, 1u64)), ((1, 1), (4, 16))] {
        softdev(&json!({"cmd": "link", "endpoint": endpoint, "speed": now.0, "width": now.1}));
        let mut events = Vec::new();
        let told = wait::until(limit, || {
            events.extend(session.node.events());
            !kinds(&events, PCIEIPC_EVENT_LINK).is_empty()
        });
        assert!(told, "{events:?}");
        let event = kinds(&events, PCIEIPC_EVENT_LINK)[0];
        let word = |(speed, width): (u64, u64)| speed | width << 8;
        assert_eq!((event.detail[0], event.detail[1]), (word(before), word(now)));
        let info = session.info();
        assert_eq!((u64::from(info.link_speed), u64::from(info.link_width)), now);
        assert_eq!((info.link_speed_max, info.link_width_max), (4, 16));
        assert_eq!(session.status.load(16) & 0xffff, word(now), "the status page");
    }
    assert_eq!(session.state().0, PCIEIPC_STATE_LIVE);
}

fn a_reader_blocked_while_the_endpoint_is_reset_wakes() {
    let session = Session::nth(0);
    session.node.events();
    thread::scope(|scope| {
        let fd = session.node.as_fd();
        let poller = scope.spawn(move || wait::polled(fd, PollFlags::POLLIN, SOON));
        let function = session.function();
        thread::sleep(Duration::from_millis(100));
        assert!(!poller.is_finished());
        function.reset().unwrap();
        let woken = poller.join().unwrap();
        assert!(woken.contains(PollFlags::POLLIN) && !woken.contains(PollFlags::POLLHUP), "{woken:?}");
    });
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            correctable_errors_are_counted_and_told_and_nothing_else_happens,
            a_non_fatal_error_is_survived,
            a_fatal_error_resets_the_link_and_is_survived,
            a_function_reset_is_survived,
            an_administrators_reset_is_survived_and_reported,
            no_access_falls_into_a_reset_or_an_error,
            errors_after_errors_are_survived,
            an_error_in_the_middle_of_a_copy_ends_it_and_nothing_lands_later,
            a_reset_ends_copies_of_other_endpoints_into_its_memory_before_it_begins,
            errors_of_one_endpoint_leave_its_sibling_alone,
            two_reads_that_fail_are_nothing,
            one_that_does_not_answer_is_off_the_bus_and_gone_when_its_time_is_over,
            one_that_answers_again_in_time_begins_a_new_life_by_a_reset,
            one_that_lost_its_power_for_a_moment_gets_its_configuration_back,
            one_that_fell_silent_before_its_error_was_reported_is_survived,
            one_whose_port_took_the_link_down_before_the_error_was_reported_is_survived,
            a_worse_link_and_its_return_are_events_with_before_and_after,
            a_reader_blocked_while_the_endpoint_is_reset_wakes,
            an_endpoint_that_died_in_its_recovery_is_dead_and_comes_back_by_removal,
        ],
        machine::repair,
    )
}
