// SPDX-License-Identifier: MIT OR Apache-2.0
//! The endpoint goes away under live mappings and blocked readers: by unbind, by removal, by playing dead.

use std::{
    cell::Cell,
    fs,
    os::fd::{AsFd, AsRawFd},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use guest::{
    abi::*,
    call::{Record, number},
    ktap, machine,
    mapping::{Mapping, PAGE},
    pci::Function,
    promises,
    session::{Channel, Export, Node, SOON, Session, living, played, signals, softdev},
    wait,
};
use nix::{
    errno::Errno,
    fcntl::OFlag,
    poll::PollFlags,
    sys::eventfd::{EfdFlags, EventFd},
};
use serde_json::json;

const DATA: usize = 64 * PAGE;

/// How an endpoint goes, and how the next test gets it back.
struct Way {
    /// Somebody says that it goes.
    announced: bool,
    go: fn(&Function, u64),
    come_back: fn(&Function, u64),
}

const UNBIND: Way =
    Way { announced: true, go: |function, _| function.unbind().unwrap(), come_back: |function, _| function.bind().unwrap() };

const REMOVE: Way =
    Way { announced: true, go: |function, _| function.remove().unwrap(), come_back: |_, _| Function::rescan().unwrap() };

const DIE: Way = Way {
    announced: false,
    go: |_, serial| drop(softdev(&json!({"cmd": "die", "endpoint": played(serial)["endpoint"]}))),
    come_back: |function, serial| {
        // Dead, it can only be taken out and put in again.
        function.remove().unwrap();
        softdev(&json!({"cmd": "revive", "endpoint": played(serial)["endpoint"]}));
        Function::rescan().unwrap();
    },
};

/// How long an endpoint that does not answer may take to come back, where no parameter says otherwise.
const MISSING: Duration = Duration::from_secs(2);

/// How long the module may take: at once, or from the next look at the link on where only all-ones tell.
fn bound(session: &Session) -> Duration {
    SOON + MISSING + Duration::from_millis(session.node.query().link_sample_ms.into())
}

/// A session with a channel that a writer has mapped, and everything mapped.
struct Scene<'a> {
    session: &'a Session,
    channel: Channel<'a>,
    export: Export,
    reader: [Mapping; 3],
    writer: [Mapping; 4],
    /// What the data holds.
    written: Cell<u64>,
}

impl<'a> Scene<'a> {
    fn new(session: &'a Session) -> Self {
        let channel = session.create(DATA as u64, 1).unwrap();
        let export = channel.export().unwrap();
        let reader = [channel.data(), channel.tail(), channel.head()];
        let writer = export.maps();
        writer[0].fill(7);
        Self { session, channel, export, reader, writer, written: Cell::new(7) }
    }

    /// All of it is still ordinary memory, shared as before.
    fn assert_memory_lives(&self) {
        assert_eq!(self.reader[0].differences(self.written.get()), 0, "what was written stays");
        for round in [self.written.get() + 1, self.written.get() + 2] {
            self.written.set(round);
            self.writer[0].fill(round);
            self.writer[1].store(0, round);
            self.reader[2].store(0, round);
            assert_eq!(self.reader[0].differences(round), 0);
            assert_eq!((self.reader[1].load(0), self.writer[2].load(0)), (round, round));
        }
    }

    fn assert_calls_say_gone(&self) {
        let enodev = Err(Errno::ENODEV);
        let (session, node) = (self.session, &self.session.node);
        assert_eq!(session.create(PAGE as u64, 0).map(drop), enodev, "create");
        assert_eq!(session.ring(0), enodev, "ring");
        assert_eq!(self.export.ring(), enodev, "the writer's ring");
        assert_eq!(node.call(number::RECOVER, &mut pcieipc_recover::new()), enodev, "recover");
        let copy = pcieipc_copy {
            from: self.channel.id(),
            to: self.channel.id(),
            to_offset: PAGE as u64,
            bytes: 8,
            timeout_ms: 1000,
            ..Record::new()
        };
        assert_eq!(node.call(number::COPY, &mut { copy }), enodev, "copy");
    }
}

fn is_over(state: u32) -> bool {
    [PCIEIPC_STATE_DEAD, PCIEIPC_STATE_GONE].contains(&state)
}

fn mappings_stay_memory_and_everybody_is_told(way: &Way) {
    let session = Session::nth(0);
    let (info, limit) = (session.info(), bound(&session));
    let function = session.function();
    let scene = Scene::new(&session);
    let (state, generation) = session.state();
    assert_eq!((state, generation), (PCIEIPC_STATE_LIVE, session.attached.generation));
    assert_eq!(scene.writer[3].load(0), session.status.load(0), "the writer sees the reader's status");
    session.node.events();
    let vectors: Vec<EventFd> = (0..session.attached.vectors).map(|vector| session.eventfd(vector)).collect();
    let space = scene.export.eventfd();
    let watcher = Node::open(OFlag::empty());

    let begin = Instant::now();
    (way.go)(&function, info.serial);
    assert!(wait::until(limit, || is_over(session.state().0)), "the status page says {:?}", session.state());
    println!("# status page after {} ms", begin.elapsed().as_millis());
    let (state, _) = session.state();
    assert_eq!(scene.writer[3].load(0), session.status.load(0), "the writer's status page");
    assert!(vectors.iter().all(|eventfd| signals(eventfd, SOON) > 0), "every vector's eventfd");
    assert!(signals(&space, SOON) > 0, "the writer's eventfd");
    assert!(wait::polled(&session.node, PollFlags::POLLIN, SOON).contains(PollFlags::POLLHUP), "the session hangs up");
    assert!(wait::polled(&scene.export, PollFlags::POLLIN, SOON).contains(PollFlags::POLLHUP), "the export hangs up");
    let events = session.node.events();
    let ours = |event: &&pcieipc_event| event.kind == PCIEIPC_EVENT_STATE && event.endpoint == session.endpoint;
    let last = events.iter().rfind(ours).unwrap_or_else(|| panic!("no state event in {events:?}"));
    assert_eq!(last.detail[1], u64::from(state), "{events:?}");
    assert!(events.windows(2).all(|pair| pair[0].sequence < pair[1].sequence), "{events:?}");
    assert!(watcher.events().iter().any(|event| ours(&event)), "a session that is not attached is told, too");
    scene.assert_calls_say_gone();
    scene.assert_memory_lives();
    let state = session.session_state().unwrap();
    assert!(is_over(state.state) && state.locked_bytes >= DATA as u64, "{state:?}");

    (way.come_back)(&function, info.serial);
    let returned = living(info.serial);
    assert_ne!(returned, session.endpoint, "ids are never used again");
    assert!(is_over(session.state().0), "the old session does not come back to life");
    let added = watcher.events().into_iter().find(|event| event.kind == PCIEIPC_EVENT_ADDED && event.endpoint == returned);
    let added = added.expect("an ADDED event");
    assert_eq!((added.detail[0], added.detail[1]), (info.serial, u64::from(session.endpoint)));
    scene.assert_memory_lives();
    let next = Session::on(Node::open(OFlag::empty()), returned);
    assert!(next.attached.generation > session.attached.generation);
    let eventfd = next.eventfd(0);
    next.ring(0).unwrap();
    assert_eq!(signals(&eventfd, SOON), 1, "the returned endpoint works");
    Scene::new(&next).assert_memory_lives();
    scene.assert_memory_lives();
}

fn blocked_readers_wake(way: &Way) {
    let session = Session::nth(0);
    let (serial, limit) = (session.info().serial, bound(&session));
    let function = session.function();
    let scene = Scene::new(&session);
    session.node.events();
    let eventfd = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).unwrap();
    session.set_eventfd(0, eventfd.as_fd().as_raw_fd(), 0).unwrap();
    let export = &scene.export;
    thread::scope(|scope| {
        let spinning = scope.spawn(|| wait::until(2 * limit, || is_over(session.state().0)));
        let on_eventfd = scope.spawn(|| eventfd.read().unwrap());
        let in_poll = scope.spawn(|| wait::polled(&session.node, PollFlags::POLLIN, 2 * limit));
        let writer = scope.spawn(|| wait::polled(export, PollFlags::empty(), 2 * limit));
        thread::sleep(Duration::from_millis(100));
        assert!(!(on_eventfd.is_finished() || in_poll.is_finished() || writer.is_finished() || spinning.is_finished()));
        let begin = Instant::now();
        (way.go)(&function, serial);
        assert!(spinning.join().unwrap(), "one who spins on the status page");
        assert!(on_eventfd.join().unwrap() > 0);
        assert!(in_poll.join().unwrap().contains(PollFlags::POLLIN), "one in poll");
        assert!(writer.join().unwrap().contains(PollFlags::POLLHUP), "a writer in poll");
        let took = begin.elapsed();
        println!("# all woken after {} ms", took.as_millis());
        assert!(took < limit, "woken after {took:?}");
    });
    (way.come_back)(&function, serial);
    living(serial);
}

fn a_reader_blocked_in_read_gets_the_event(way: &Way) {
    let session = Session::nth(0);
    let (serial, limit) = (session.info().serial, bound(&session));
    let function = session.function();
    session.node.events();
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            loop {
                let event = session.node.read_event().unwrap();
                if event.endpoint == session.endpoint && event.kind == PCIEIPC_EVENT_STATE && is_over(event.detail[1] as u32) {
                    return event;
                }
            }
        });
        thread::sleep(Duration::from_millis(100));
        assert!(!reader.is_finished());
        (way.go)(&function, serial);
        assert!(wait::until(limit, || reader.is_finished()), "read() goes on blocking");
        let event = reader.join().unwrap();
        // One that died may as well have been silenced by an error that the kernel would have told of.
        let former = if way.announced { PCIEIPC_STATE_LIVE } else { PCIEIPC_STATE_RECOVERING };
        assert_eq!((event.detail[0], event.generation > 0), (u64::from(former), true));
    });
    (way.come_back)(&function, serial);
    living(serial);
}

fn the_endpoint_is_told_of_no_ring_any_more(way: &Way) {
    let session = Session::nth(0);
    let serial = session.info().serial;
    let function = session.function();
    let rings = || played(serial)["rings"].as_u64().unwrap();
    assert_eq!(rings(), 0);
    let scene = Scene::new(&session);
    assert!(rings() >= 1, "a channel's memory is in the ring table");
    (way.go)(&function, serial);
    assert!(wait::until(bound(&session), || is_over(session.state().0)));
    if played(serial)["state"] == "live" {
        assert_eq!(rings(), 0);
        let master = function.exists().then(|| function.command().unwrap() & 4);
        assert_ne!(master, Some(4), "it may not master the bus any more");
    }
    (way.come_back)(&function, serial);
    living(serial);
    assert_eq!(rings(), 0);
    drop(scene);
}

fn sessions_close_in_any_order_after_the_endpoint_went(way: &Way) {
    for exports_last in [true, false] {
        let session = Session::nth(0);
        let serial = session.info().serial;
        let function = session.function();
        let channel = session.create(DATA as u64, 0).unwrap();
        let export = channel.export().unwrap();
        let [writer, ..] = export.maps();
        let reader = channel.data();
        (way.go)(&function, serial);
        assert!(wait::until(bound(&session), || is_over(session.state().0)));
        if exports_last {
            drop(session);
            writer.fill(3);
            assert_eq!(reader.differences(3), 0, "mappings outlive the session");
            assert!(wait::polled(&export, PollFlags::POLLIN, SOON).contains(PollFlags::POLLHUP));
            drop((export, reader, writer));
        } else {
            drop((reader, writer, export));
            drop(session);
        }
        (way.come_back)(&function, serial);
        living(serial);
    }
}

macro_rules! ways {
    ($way:ident: $($promise:ident = $proof:ident),* $(,)?) => {$(
        fn $promise() {
            $proof(&$way);
        }
    )*};
}

ways! { UNBIND:
    unbind_leaves_mappings_as_memory_and_tells_everybody = mappings_stay_memory_and_everybody_is_told,
    unbind_wakes_blocked_readers = blocked_readers_wake,
    unbind_wakes_a_reader_in_read = a_reader_blocked_in_read_gets_the_event,
    unbind_clears_the_ring_table = the_endpoint_is_told_of_no_ring_any_more,
    unbind_lets_sessions_close_in_any_order = sessions_close_in_any_order_after_the_endpoint_went,
}

ways! { REMOVE:
    removal_leaves_mappings_as_memory_and_tells_everybody = mappings_stay_memory_and_everybody_is_told,
    removal_wakes_blocked_readers = blocked_readers_wake,
    removal_wakes_a_reader_in_read = a_reader_blocked_in_read_gets_the_event,
    removal_clears_the_ring_table = the_endpoint_is_told_of_no_ring_any_more,
    removal_lets_sessions_close_in_any_order = sessions_close_in_any_order_after_the_endpoint_went,
}

ways! { DIE:
    death_leaves_mappings_as_memory_and_tells_everybody = mappings_stay_memory_and_everybody_is_told,
    death_wakes_blocked_readers = blocked_readers_wake,
    death_wakes_a_reader_in_read = a_reader_blocked_in_read_gets_the_event,
    death_lets_sessions_close_in_any_order = sessions_close_in_any_order_after_the_endpoint_went,
}

/// One that lost its power forgets its ring table by itself. This one only does not answer to who asks for its ids, and is told all the
/// same, when its driver lets go of it.
fn death_clears_the_ring_table() {
    let session = Session::nth(0);
    let (serial, function) = (session.info().serial, session.function());
    let rings = || played(serial)["rings"].as_u64().unwrap();
    let scene = Scene::new(&session);
    misread(serial, u32::MAX);
    assert!(wait::until(MISSING + 2 * SOON, || session.state().0 == PCIEIPC_STATE_GONE), "{:?}", session.state());
    assert!(rings() >= 1, "nobody touches the registers of one that is missing");
    function.remove().unwrap();
    assert_eq!((rings(), &played(serial)["mastering"]), (0, &json!(false)));
    misread(serial, 0);
    Function::rescan().unwrap();
    living(serial);
    drop(scene);
}

/// Whether an access of its own that the kernel does not expect finds no memory.
fn is_kept_out(session: &Session) -> bool {
    session.info().iommu == PCIEIPC_IOMMU_TRANSLATING
}

fn pending(serial: u64, on: bool) {
    softdev(&json!({"cmd": "pending", "endpoint": played(serial)["endpoint"], "on": on}));
}

fn an_unbind_takes_the_endpoint_off_the_bus_then_waits_for_what_it_began_and_then_unmaps() {
    let session = Session::nth(0);
    let (serial, function, kept_out) = (session.info().serial, session.function(), is_kept_out(&session));
    let scene = Scene::new(&session);
    let mapped = || played(serial)["mapped_bytes"].as_u64().unwrap();
    let before = mapped();
    pending(serial, true);
    thread::scope(|scope| {
        let unbinding = scope.spawn(|| function.unbind().unwrap());
        assert!(wait::until(SOON, || played(serial)["mastering"] == false));
        assert_eq!((mapped(), unbinding.is_finished()), (before, false), "it does not wait");
        pending(serial, false);
    });
    let after = mapped();
    assert_eq!(after + DATA as u64 <= before, kept_out, "{before} bytes were mapped, {after} are");
    drop(scene);
    function.bind().unwrap();
    living(serial);
}

fn pages_that_a_device_may_still_reach_are_kept_from_everybody() {
    let pages = || machine::module_state("pages");
    let session = Session::nth(0);
    let (serial, function, kept_out) = (session.info().serial, session.function(), is_kept_out(&session));
    let before = pages();
    session.create(DATA as u64, 0).unwrap();
    pending(serial, true);
    function.unbind().unwrap();
    drop(session);
    pending(serial, false);
    function.bind().unwrap();
    living(serial);
    let left = if kept_out { 0 } else { (DATA / PAGE) as u64 };
    assert!(wait::until(SOON, || pages() == before + left), "{} pages, before {before}, and {left} are to be kept", pages());
    Scene::new(&Session::nth(0)).assert_memory_lives();
}

fn one_whose_transactions_outlast_its_reset_is_dead_and_off_the_bus() {
    let session = Session::nth(0);
    let (serial, function) = (session.info().serial, session.function());
    pending(serial, true);
    function.reset().unwrap();
    assert_eq!((session.state().0, &played(serial)["mastering"]), (PCIEIPC_STATE_DEAD, &json!(false)));
    drop(session);
    function.remove().unwrap();
    pending(serial, false);
    Function::rescan().unwrap();
    Scene::new(&Session::on(Node::open(OFlag::empty()), living(serial))).assert_memory_lives();
}

fn misread(serial: u64, count: u32) {
    softdev(&json!({"cmd": "misread", "endpoint": played(serial)["endpoint"], "count": count}));
}

fn pages_of_one_that_does_not_answer_are_kept_from_everybody() {
    let pages = || machine::module_state("pages");
    let session = Session::nth(0);
    let (serial, kept_out) = (session.info().serial, is_kept_out(&session));
    let before = pages();
    let channel = session.create(DATA as u64, 0).unwrap();
    misread(serial, u32::MAX);
    assert!(wait::until(SOON, || session.state().0 == PCIEIPC_STATE_RECOVERING), "{:?}", session.state());
    channel.destroy().unwrap();
    let left = if kept_out { 0 } else { (DATA / PAGE) as u64 };
    assert_eq!(session.state().0, PCIEIPC_STATE_RECOVERING, "this machine is too slow to look in time");
    assert_eq!(pages(), before + left, "{before} pages before");
    misread(serial, 0);
    assert!(wait::until(SOON, || session.state().0 == PCIEIPC_STATE_LIVE), "{:?}", session.state());
    drop(session);
    // In its new life nothing of the former one is on its way.
    let session = Session::nth(0);
    let before = pages();
    session.create(DATA as u64, 0).unwrap().destroy().unwrap();
    assert_eq!(pages(), before);
    Scene::new(&session).assert_memory_lives();
}

/// It stops answering and, before anybody looks at it, its ring is given back: it has not heard of that, and has the bus.
fn pages_of_one_whose_silence_nobody_has_noticed_are_kept_from_everybody() {
    machine::reload(c"link_sample_ms=60000 missing_ms=60000");
    let (pages, kept) = (|| machine::module_state("pages"), || machine::module_state("kept"));
    let session = Session::nth(0);
    let (serial, kept_out) = (session.info().serial, is_kept_out(&session));
    let before = (pages(), kept());
    let channels = [0; 3].map(|_| session.create(DATA as u64, 0).unwrap());
    misread(serial, u32::MAX);
    assert_eq!((session.state().0, &played(serial)["mastering"]), (PCIEIPC_STATE_LIVE, &json!(true)), "somebody has looked");
    let left = if kept_out { 0 } else { (channels.len() * DATA / PAGE) as u64 };
    channels.into_iter().for_each(|channel| channel.destroy().unwrap());
    assert_eq!((pages(), kept()), (before.0 + left, before.1 + left));
    // Nobody gets a further ring to lose.
    assert_eq!(session.state().0, PCIEIPC_STATE_RECOVERING);
    assert_eq!(session.create(DATA as u64, 0).map(drop).unwrap_err(), Errno::EIO);
    misread(serial, 0);
    assert!(wait::until(SOON, || session.state().0 == PCIEIPC_STATE_LIVE), "{:?}", session.state());
    drop(session);
    let (session, before) = (Session::nth(0), (pages(), kept()));
    session.create(DATA as u64, 0).unwrap().destroy().unwrap();
    assert_eq!((pages(), kept()), before, "one that answers hears of it");
    Scene::new(&session).assert_memory_lives();
    drop(session);
    machine::reload(c"");
}

fn one_that_is_gone_and_answers_again_is_taken_off_the_bus() {
    let session = Session::nth(0);
    let (serial, function) = (session.info().serial, session.function());
    misread(serial, u32::MAX);
    assert!(wait::until(MISSING + 2 * SOON, || session.state().0 == PCIEIPC_STATE_GONE), "{:?}", session.state());
    // As if it had not heard the first time.
    function.set_command(function.command().unwrap() | 4).unwrap();
    assert_eq!(played(serial)["mastering"], true);
    misread(serial, 0);
    assert!(wait::until(SOON, || played(serial)["mastering"] == false), "{}", played(serial));
    assert_eq!(session.state().0, PCIEIPC_STATE_GONE);
    function.remove().unwrap();
    Function::rescan().unwrap();
    living(serial);
}

fn the_death_of_a_peer_is_no_event_for_other_sessions_channels() {
    let [session, other] = [0, 1].map(Session::nth);
    let (serial, function) = (session.info().serial, session.function());
    let eventfd = other.eventfd(0);
    (REMOVE.go)(&function, serial);
    assert_eq!(other.state().0, PCIEIPC_STATE_LIVE);
    other.ring(0).unwrap();
    assert_eq!(signals(&eventfd, SOON), 1);
    Scene::new(&other).assert_memory_lives();
    assert!(!wait::polled(&other.node, PollFlags::POLLIN, Duration::ZERO).contains(PollFlags::POLLHUP));
    (REMOVE.come_back)(&function, serial);
    living(serial);
}

fn the_node_of_a_returned_endpoint_is_there_when_its_return_is_told() {
    let session = Session::nth(0);
    let (serial, function) = (session.info().serial, session.function());
    drop(session);
    for _ in 0..10 {
        function.unbind().unwrap();
        let watcher = Node::open(OFlag::empty());
        thread::scope(|scope| {
            let opened = scope.spawn(|| {
                loop {
                    let event = watcher.read_event().unwrap();
                    if event.kind == PCIEIPC_EVENT_ADDED {
                        return fs::File::open(format!("/dev/pcieipc{}", event.endpoint)).map(drop).map_err(|error| error.kind());
                    }
                }
            });
            function.bind().unwrap();
            assert_eq!(opened.join().unwrap(), Ok(()));
        });
        living(serial);
    }
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            unbind_leaves_mappings_as_memory_and_tells_everybody,
            unbind_wakes_blocked_readers,
            unbind_wakes_a_reader_in_read,
            unbind_clears_the_ring_table,
            unbind_lets_sessions_close_in_any_order,
            removal_leaves_mappings_as_memory_and_tells_everybody,
            removal_wakes_blocked_readers,
            removal_wakes_a_reader_in_read,
            removal_clears_the_ring_table,
            removal_lets_sessions_close_in_any_order,
            death_leaves_mappings_as_memory_and_tells_everybody,
            death_wakes_blocked_readers,
            death_wakes_a_reader_in_read,
            death_clears_the_ring_table,
            death_lets_sessions_close_in_any_order,
            an_unbind_takes_the_endpoint_off_the_bus_then_waits_for_what_it_began_and_then_unmaps,
            pages_that_a_device_may_still_reach_are_kept_from_everybody,
            one_whose_transactions_outlast_its_reset_is_dead_and_off_the_bus,
            pages_of_one_that_does_not_answer_are_kept_from_everybody,
            pages_of_one_whose_silence_nobody_has_noticed_are_kept_from_everybody,
            one_that_is_gone_and_answers_again_is_taken_off_the_bus,
            the_death_of_a_peer_is_no_event_for_other_sessions_channels,
            the_node_of_a_returned_endpoint_is_there_when_its_return_is_told,
        ],
        machine::repair,
    )
}
