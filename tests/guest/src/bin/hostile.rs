// SPDX-License-Identifier: MIT OR Apache-2.0
//! Users who mean harm or are careless: they get errors, and nobody else notices.

use std::{
    fs,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use guest::{
    abi::*,
    call::{Record, call, number, raw, request},
    forms::{Form, forms},
    ktap, machine,
    mapping::{Mapping, PAGE, READ_WRITE, pattern},
    pci::Function,
    promises,
    random::Random,
    session::{Export, Node, SOON, Session, export, living, played, signals},
    stall::StalledPage,
    wait,
};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    poll::PollFlags,
    sys::{
        eventfd::{EfdFlags, EventFd},
        signal::{Signal, kill},
        wait::waitpid,
    },
    unistd::{ForkResult, fork, pipe},
};

/// What all of that takes at most when nobody has to wait for the sleeper.
const HELD_UP: Duration = Duration::from_secs(5);

/// Unbind, bind, another session's work and a look at the sleeper's descriptor, all while he sleeps in the module.
fn nobody_else_is_held_up(sleeper: &impl AsFd, endpoint: u32, why: &str) {
    let begin = Instant::now();
    fs::read_to_string(format!("/proc/self/fdinfo/{}", sleeper.as_fd().as_raw_fd())).unwrap();
    let info = Node::open(OFlag::empty()).info(endpoint).unwrap();
    let (serial, function) = (info.serial, Function::at(info.address));
    let other = Session::nth(1);
    let eventfd = other.eventfd(0);
    let channel = other.create(PAGE as u64, 0).unwrap();
    channel.export().unwrap().ring().unwrap();
    assert_eq!(signals(&eventfd, SOON), 1, "{why}");
    drop(other);
    function.unbind().unwrap();
    function.bind().unwrap();
    living(serial);
    assert!(begin.elapsed() < wait::patiently(HELD_UP), "{why}: {:?}", begin.elapsed());
}

fn bytes_of<T: Record>(record: &T) -> Vec<u8> {
    // SAFETY: plain integers without padding, as `Record` demands.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(record).cast::<u8>(), size_of::<T>()) }.to_vec()
}

fn a_call_that_sleeps_in_its_users_memory_holds_up_nobody() {
    let calls = [
        ("QUERY", number::QUERY, bytes_of(&pcieipc_query { user_version: 1, user_oldest: 1, ..Record::new() })),
        ("STATE", number::STATE, bytes_of(&pcieipc_session_state::new())),
        ("CREATE", number::CHANNEL_CREATE, bytes_of(&pcieipc_channel_create { data_bytes: PAGE as u64, ..Record::new() })),
        ("VECTOR_EVENTFD", number::VECTOR_EVENTFD, bytes_of(&pcieipc_vector_eventfd { fd: -1, ..Record::new() })),
        ("RING", number::RING, bytes_of(&pcieipc_ring::new())),
        ("RECOVER", number::RECOVER, bytes_of(&pcieipc_recover::new())),
    ];
    for (name, number, bytes) in calls {
        let session = Session::nth(0);
        let page = StalledPage::new();
        let address = page.address().as_ptr() as usize;
        thread::scope(|scope| {
            let node = &session.node;
            let sleeping = scope.spawn(move || {
                // SAFETY: the page is longer than any structure of the ABI.
                unsafe { raw(node, request(number), address as *mut libc::c_void) }
            });
            assert!(page.touched(SOON), "{name} reads its structure");
            nobody_else_is_held_up(&session.node, session.endpoint, name);
            assert!(!sleeping.is_finished());
            page.release(&bytes);
            // The endpoint went meanwhile, so most answers are errors; but there is one.
            let _ = sleeping.join().unwrap();
        });
    }
}

fn an_answer_that_sleeps_in_its_users_memory_holds_up_nobody() {
    let session = Session::nth(0);
    let page = StalledPage::new();
    let address = page.address().as_ptr() as u64;
    thread::scope(|scope| {
        let node = &session.node;
        let sleeping = scope.spawn(move || {
            let mut list = pcieipc_enumerate { ids: address, count: 64, ..Record::new() };
            node.call(number::ENUMERATE, &mut list)
        });
        assert!(page.touched(SOON), "ENUMERATE writes its ids");
        nobody_else_is_held_up(&session.node, session.endpoint, "ENUMERATE");
        page.release(&[]);
        assert_eq!(sleeping.join().unwrap(), Ok(()));
    });
}

/// The structure with which a call succeeds and answers; none for a call that answers by its errno alone.
fn question(form: &Form, export: &Export, unexported: u32) -> Option<Vec<u8>> {
    Some(match form.number {
        // As they are, they succeed.
        number::QUERY
        | number::ENUMERATE
        | number::ENDPOINT_INFO
        | number::DISTANCE
        | number::ATTACH
        | number::RECOVER
        | number::STATE
        | number::CHANNEL_CREATE
        | number::DOORBELL_MAP
        | number::EXPORT_INFO
        | number::EXPORT_DOORBELL => form.bytes.clone(),
        number::CHANNEL_EXPORT | number::CHANNEL_DMABUF => bytes_of(&pcieipc_channel_fd { channel: unexported, ..Record::new() }),
        number::CHANNEL_IMPORT => bytes_of(&pcieipc_channel_fd { fd: export.as_fd().as_raw_fd(), ..Record::new() }),
        number::CHANNEL_DESTROY
        | number::CHANNEL_FREED
        | number::COPY
        | number::VECTOR_EVENTFD
        | number::RING
        | number::ADMIN
        | number::EXPORT_RING
        | number::EXPORT_EVENTFD => return None,
        number => panic!("call {number:#x} is new: does it answer?"),
    })
}

/// Makes the call where its structure may be read and not written. One that answers holds up nobody and succeeds, others do not touch it.
fn call_that_may_not_answer_yet(fd: BorrowedFd<'_>, endpoint: u32, form: &Form, question: Option<&Vec<u8>>) {
    let page = StalledPage::for_writers(question.unwrap_or(&form.bytes));
    let (address, number) = (page.address().as_ptr() as usize, form.number);
    thread::scope(|scope| {
        let sleeping = scope.spawn(move || {
            // SAFETY: the page is longer than any structure of the ABI.
            unsafe { raw(fd, request(number), address as *mut libc::c_void) }
        });
        assert!(wait::until(SOON, || page.touched(Duration::ZERO) || sleeping.is_finished()), "{} hangs", form.name);
        let answers = !sleeping.is_finished();
        if answers {
            nobody_else_is_held_up(&fd, endpoint, form.name);
            assert!(!sleeping.is_finished());
        }
        page.release(&[]);
        let outcome = sleeping.join().unwrap();
        assert_eq!(answers, question.is_some(), "{}: {outcome:?}", form.name);
        // What it did was done before the endpoint went.
        assert!(!answers || outcome.is_ok(), "{}: {outcome:?}", form.name);
    });
    if [number::CHANNEL_EXPORT, number::CHANNEL_DMABUF].contains(&form.number) {
        // SAFETY: the page holds the answer, in which the kernel has told a descriptor that it made for us.
        drop(unsafe { OwnedFd::from_raw_fd(page.address().cast::<pcieipc_channel_fd>().read().fd) });
    }
}

fn every_call_that_sleeps_in_its_answer_holds_up_nobody() {
    for index in 0..forms(0, 0).len() {
        let session = Session::nth(0);
        let make = |flags| {
            let create = pcieipc_channel_create { flags, data_bytes: PAGE as u64, ..Record::new() };
            session.node.get(number::CHANNEL_CREATE, create).channel
        };
        let (exported, unexported) = (make(0), make(PCIEIPC_CHANNEL_DEVICE_MEMORY));
        let export = export(&session.node, exported).unwrap();
        let form = forms(session.endpoint, exported).swap_remove(index);
        let question = question(&form, &export, unexported);
        if form.number == number::ATTACH {
            let endpoint = session.endpoint;
            drop((session, export));
            call_that_may_not_answer_yet(Node::open(OFlag::empty()).as_fd(), endpoint, &form, question.as_ref());
        } else {
            let fd = if form.export { export.as_fd() } else { session.node.as_fd() };
            call_that_may_not_answer_yet(fd, session.endpoint, &form, question.as_ref());
        }
    }
}

fn a_read_that_sleeps_in_its_users_memory_loses_no_event_and_holds_up_nobody() {
    let session = Session::nth(0);
    let function = session.function();
    session.node.events();
    function.reset().unwrap();
    assert!(wait::polled(&session.node, PollFlags::POLLIN, SOON).contains(PollFlags::POLLIN));
    let page = StalledPage::new();
    let address = page.address().as_ptr() as usize;
    let size = size_of::<pcieipc_event>();
    thread::scope(|scope| {
        let fd = session.node.as_fd().as_raw_fd();
        let sleeping = scope.spawn(move || {
            // SAFETY: the page is longer than one record.
            Errno::result(unsafe { libc::read(fd, address as *mut libc::c_void, size) })
        });
        assert!(page.touched(SOON), "read() writes a record");
        nobody_else_is_held_up(&session.node, session.endpoint, "read");
        page.release(&[]);
        let read = sleeping.join().unwrap();
        assert!(read == Ok(size as isize) || read == Err(Errno::EFAULT), "{read:?}");
    });
    let rest = session.node.events();
    let sequences: Vec<u64> = rest.iter().map(|event| event.sequence).collect();
    assert!(sequences.windows(2).all(|pair| pair[1] == pair[0] + 1), "{sequences:?}");
}

fn a_read_into_bad_memory_consumes_nothing() {
    let session = Session::nth(0);
    session.node.events();
    session.function().reset().unwrap();
    assert!(wait::polled(&session.node, PollFlags::POLLIN, SOON).contains(PollFlags::POLLIN));
    let size = size_of::<pcieipc_event>();
    // SAFETY: nothing is at address 0.
    let read = unsafe { libc::read(session.node.as_fd().as_raw_fd(), std::ptr::null_mut(), size) };
    assert_eq!(Errno::result(read), Err(Errno::EFAULT));
    let events = session.node.events();
    let first = events.iter().find(|event| event.kind == PCIEIPC_EVENT_STATE).unwrap_or_else(|| panic!("{events:?}"));
    assert_eq!(first.detail[1], u64::from(PCIEIPC_STATE_RECOVERING), "the event is still there");
    call(&session.node, number::RECOVER, &mut pcieipc_recover::new()).unwrap();
}

fn a_hundred_thousand_random_calls_break_nothing() {
    let session = Session::nth(0);
    let channels = [0; 3].map(|_| session.create(PAGE as u64, 0).unwrap());
    let export = channels[0].export().unwrap();
    let sizes = [16usize, 24, 32, 40, 48, 56, 64, 88, 168, 256];
    let mut random = Random(0x5eed);
    let mut accepted = 0;
    for _ in 0..100_000 {
        let choice = random.bits();
        // Resets and removals are an administrator's, and tested elsewhere.
        let number = match (choice >> 8) as u8 & 0x47 | (choice >> 16) as u8 & 0x10 {
            number::ADMIN => number::QUERY,
            number => number,
        };
        let mut words = [0u64; 32];
        for word in &mut words {
            let value = random.bits();
            // Small values and zeroes get further than noise.
            *word = match value & 7 {
                0..4 => 0,
                4 | 5 => value >> 8 & 0xf,
                6 => value >> 8 & 0xffff,
                _ => value,
            };
        }
        let size = sizes[(choice >> 24) as usize % sizes.len()];
        words[0] = size as u64;
        let fd = if choice & 1 == 0 { session.node.as_fd() } else { export.as_fd() };
        // SAFETY: the size is at most that of the words. Pointers inside them are small or noise, never an address of ours:
        // those are above 4 GiB and below 2^47, and a word is either under 2^16 or has 64 random bits.
        let outcome = unsafe { raw(fd, request(number), words.as_mut_ptr().cast()) };
        accepted += u32::from(outcome.is_ok());
    }
    assert!(accepted > 1000, "only {accepted} were accepted: the fuzzer does not get far enough");
    println!("# {accepted} accepted");
    drop((export, session));
    let session = Session::nth(0);
    let eventfd = session.eventfd(0);
    session.ring(0).unwrap();
    assert_eq!(signals(&eventfd, SOON), 1);
}

fn a_full_event_queue_says_how_many_were_lost() {
    let session = Session::nth(0);
    let watcher = Node::open(OFlag::empty());
    session.node.events();
    let (function, room) = (session.function(), session.node.query().event_queue);
    let resets = room / 2 + 10;
    for _ in 0..resets {
        function.reset().unwrap();
    }
    for node in [&session.node, &watcher] {
        let events = node.events();
        let lost: u64 = events.iter().filter(|event| event.kind == PCIEIPC_EVENT_LOST).map(|event| event.detail[0]).sum();
        let told = events.iter().filter(|event| event.kind != PCIEIPC_EVENT_LOST).count() as u64;
        assert!(lost > 0, "{} events of {room}", events.len());
        assert_eq!(told + lost, u64::from(2 * resets), "each event was told or counted as lost");
        let mut expected = None;
        for event in &events {
            if event.kind != PCIEIPC_EVENT_LOST {
                assert!(expected.is_none_or(|expected| event.sequence >= expected), "{events:?}");
                expected = Some(event.sequence + 1);
            }
        }
    }
    assert!(session.session_state().unwrap().events_lost > 0);
}

fn a_flood_of_lesser_events_hides_no_change_of_state() {
    let session = Session::nth(0);
    let (serial, function, endpoint) = (session.info().serial, session.function(), session.endpoint);
    let [flooded, prompt] = [0; 2].map(|_| Node::open(OFlag::O_NONBLOCK));
    let rescan = pcieipc_admin { action: PCIEIPC_ADMIN_RESCAN, endpoint, ..Record::new() };
    let flood = flooded.query().event_queue + 10;
    for round in 0..flood {
        flooded.call(number::ADMIN, &mut { rescan }).unwrap();
        assert!(
            wait::until(SOON, || prompt.events().iter().any(|event| event.kind == PCIEIPC_EVENT_ADMIN)),
            "rescan {round} ends"
        );
    }
    function.unbind().unwrap();
    let events = flooded.events();
    let lost: u64 = events.iter().filter(|event| event.kind == PCIEIPC_EVENT_LOST).map(|event| event.detail[0]).sum();
    assert!(lost >= 10, "the queue was full: {lost} lost");
    let gone = |event: &pcieipc_event| {
        let change = event.kind == PCIEIPC_EVENT_STATE && event.endpoint == endpoint;
        change && event.detail[1] == u64::from(PCIEIPC_STATE_GONE)
    };
    assert!(events.iter().any(gone), "its end is among what was told: {events:?}");
    drop(session);
    function.bind().unwrap();
    living(serial);
}

fn two_readers_of_one_session_share_its_events() {
    let session = Session::nth(0);
    session.node.events();
    let function = session.function();
    for _ in 0..3 {
        function.reset().unwrap();
    }
    let mut all: Vec<u64> = thread::scope(|scope| {
        let readers =
            [0; 2].map(|_| scope.spawn(|| (0..3).map(|_| session.node.read_event().unwrap().sequence).collect::<Vec<_>>()));
        readers.into_iter().flat_map(|reader| reader.join().unwrap()).collect()
    });
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 6);
}

fn ringing_too_often_is_eagain_and_works_again_soon() {
    let session = Session::nth(0);
    let limit = session.node.query().doorbells_per_second;
    let mut refused = 0;
    for _ in 0..4 * limit {
        match session.ring(0) {
            Ok(()) => {}
            Err(Errno::EAGAIN) => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(refused > 0, "none of {} rings refused", 4 * limit);
    assert!(wait::until(SOON, || session.ring(0).is_ok()));
    let other = Session::nth(1);
    other.ring(0).unwrap();
}

fn a_copy_that_rings_counts_against_the_limit_of_the_channels_writers() {
    let session = Session::nth(0);
    let channel = session.create(PAGE as u64, 1).unwrap();
    let export = channel.export().unwrap();
    let eventfd = session.eventfd(1);
    let copy = |flags| {
        let id = channel.id();
        session.node.call(
            number::COPY,
            &mut pcieipc_copy { flags, from: id, to: id, to_offset: 64, bytes: 8, timeout_ms: 1000, ..Record::new() },
        )
    };
    copy(PCIEIPC_COPY_RING).unwrap();
    assert_eq!(signals(&eventfd, SOON), 1);
    // Each time the writer has used up what it may: its engine may then no more than itself, but it still copies.
    let tried = 100;
    let refused = (0..tried).filter(|_| {
        while export.ring() != Err(Errno::EAGAIN) {}
        match copy(PCIEIPC_COPY_RING) {
            Ok(()) => false,
            Err(Errno::EAGAIN) => true,
            Err(error) => panic!("{error}"),
        }
    });
    let refused = refused.count();
    println!("# {refused} of {tried} refused");
    assert!(refused >= tried / 4, "{refused} of {tried} refused");
    while export.ring() != Err(Errno::EAGAIN) {}
    copy(0).unwrap();
    assert!(wait::until(SOON, || copy(PCIEIPC_COPY_RING).is_ok()));
}

fn a_mapped_doorbell_rings_and_is_a_harmless_page_after_removal() {
    let session = Session::nth(0);
    let (serial, function) = (session.info().serial, session.function());
    let eventfd = session.eventfd(2);
    let bell = session.node.get(number::DOORBELL_MAP, pcieipc_doorbell { vector: 2, ..Record::new() });
    assert_eq!(bell.width, 4);
    let page = session.node.map(bell.map_offset, PAGE, READ_WRITE).unwrap();
    let other_vector = session.eventfd(3);
    page.store32(bell.page_offset as usize, bell.value as u32);
    assert_eq!(signals(&eventfd, SOON), 1);
    assert_eq!(signals(&other_vector, Duration::ZERO), 0);
    function.unbind().unwrap();
    for _ in 0..100 {
        page.store32(bell.page_offset as usize, bell.value as u32);
    }
    function.bind().unwrap();
    living(serial);
    let next = Session::nth(0);
    let new = next.eventfd(2);
    page.store32(bell.page_offset as usize, bell.value as u32);
    assert_eq!(signals(&new, Duration::from_millis(200)), 0, "an old mapping does not ring the new life");
}

/// Stores to a mapped doorbell, and says how many interrupts of the endpoint there were.
fn rung(session: &Session, page: &Mapping, bell: &pcieipc_doorbell) -> u64 {
    let before = session.info().interrupts;
    for _ in 0..100 {
        page.store32(bell.page_offset as usize, bell.value as u32);
    }
    // A ring of the session's own goes the same way behind them, so what the stores raised is counted when this has come.
    let eventfd = session.eventfd(0);
    session.ring(0).unwrap();
    assert_eq!(signals(&eventfd, SOON), 1);
    thread::sleep(Duration::from_millis(100));
    session.info().interrupts - before - 1
}

fn a_doorbell_mapped_by_a_descriptor_ends_with_its_channel() {
    for closes in [false, true] {
        let session = Session::nth(0);
        let channel = session.create(PAGE as u64, 2).unwrap();
        let export = channel.export().unwrap();
        let mut bell = pcieipc_doorbell::new();
        call(&export, number::EXPORT_DOORBELL, &mut bell).unwrap();
        let page = Mapping::new(&export, bell.map_offset, PAGE, READ_WRITE).unwrap();
        let unused = Mapping::new(&export, bell.map_offset, PAGE, READ_WRITE).unwrap();
        let eventfd = session.eventfd(2);
        page.store32(bell.page_offset as usize, bell.value as u32);
        assert_eq!(signals(&eventfd, SOON), 1);
        // The endpoint's next user, in the same life, or the same one without that channel.
        let generation = session.state().1;
        let next = if closes {
            drop(session);
            Session::nth(0)
        } else {
            channel.destroy().unwrap();
            session
        };
        assert_eq!(next.state(), (PCIEIPC_STATE_LIVE, generation));
        for page in [&page, &unused] {
            assert_eq!(rung(&next, page, &bell), 0, "closes: {closes}");
        }
        assert!(matches!(call(&export, number::EXPORT_DOORBELL, &mut bell), Err(Errno::ENODEV)));
        assert_eq!(Mapping::new(&export, bell.map_offset, PAGE, READ_WRITE).map(drop), Err(Errno::ENODEV));
    }
    // Another channel's end takes no doorbell away.
    let session = Session::nth(0);
    let [channel, other] = [0; 2].map(|_| session.create(PAGE as u64, 2).unwrap());
    let export = channel.export().unwrap();
    let mut bell = pcieipc_doorbell::new();
    call(&export, number::EXPORT_DOORBELL, &mut bell).unwrap();
    let page = Mapping::new(&export, bell.map_offset, PAGE, READ_WRITE).unwrap();
    page.store32(bell.page_offset as usize, bell.value as u32);
    other.destroy().unwrap();
    let eventfd = session.eventfd(2);
    page.store32(bell.page_offset as usize, bell.value as u32);
    assert_eq!(signals(&eventfd, SOON), 1);
}

fn an_eventfd_that_comes_behind_a_change_of_state_is_signalled_at_once() {
    let session = Session::nth(0);
    let function = session.function();
    let eventfd = session.eventfd(1);
    assert_eq!(signals(&eventfd, Duration::from_millis(100)), 0, "nothing has happened");
    function.reset().unwrap();
    // Nobody tells this change again, and who sleeps on the eventfd alone would never know.
    assert!(signals(&session.eventfd(1), SOON) > 0, "the endpoint lives in another generation");
    call(&session.node, number::RECOVER, &mut pcieipc_recover::new()).unwrap();
    assert_eq!(signals(&session.eventfd(1), Duration::from_millis(100)), 0, "it is the session's again");
}

fn every_eventfd_that_was_accepted_while_the_endpoint_went_is_signalled() {
    for _ in 0..20 {
        let session = Session::nth(0);
        let (serial, function) = (session.info().serial, session.function());
        thread::scope(|scope| {
            let setters: Vec<_> = (0..session.attached.vectors)
                .map(|vector| {
                    let session = &session;
                    scope.spawn(move || {
                        let mut last = None;
                        loop {
                            let eventfd = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).unwrap();
                            match session.set_eventfd(vector, eventfd.as_fd().as_raw_fd(), 0) {
                                Ok(()) => last = Some(eventfd),
                                Err(Errno::ENODEV) => return last,
                                Err(error) => panic!("{error}"),
                            }
                        }
                    })
                })
                .collect();
            thread::sleep(Duration::from_millis(20));
            function.unbind().unwrap();
            for setter in setters {
                let last = setter.join().unwrap();
                assert!(last.is_none_or(|eventfd| signals(&eventfd, SOON) > 0), "whoever waits for it sleeps for ever");
            }
        });
        drop(session);
        function.bind().unwrap();
        living(serial);
    }
}

fn ring_memory_can_be_pinned_as_registration_with_a_gpu_or_a_network_card_does() {
    let session = Session::nth(0);
    let channel = session.create(1 << 16, 0).unwrap();
    let [writer, ..] = channel.export().unwrap().maps();
    writer.fill(6);
    let mut copied = vec![0u8; 1 << 16];
    let local = libc::iovec { iov_base: copied.as_mut_ptr().cast(), iov_len: copied.len() };
    let remote = libc::iovec { iov_base: writer.address().as_ptr(), iov_len: writer.len() };
    // SAFETY: both ranges are ours; the local one is used by nobody else.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    assert_eq!(Errno::result(read), Ok(1 << 16), "get_user_pages refuses the mapping");
    for (index, word) in copied.chunks_exact(8).enumerate() {
        assert_eq!(word, pattern(6, 8 * index).to_ne_bytes());
    }
}

fn killed_processes_leave_nothing_behind() {
    let serial = Session::nth(0).info().serial;
    for round in 0..10 {
        let (ready, tell) = pipe().unwrap();
        // SAFETY: the child touches only what it made itself.
        let child = match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let session = Session::nth(0);
                let channel = session.create(1 << 20, 0).unwrap();
                let export = channel.export().unwrap();
                let maps = export.maps();
                maps[0].fill(round);
                nix::unistd::write(&tell, &[1]).unwrap();
                session.node.events();
                let _ = wait::polled(&export, PollFlags::empty(), Duration::from_secs(60));
                let _ = session.node.read_event();
                // SAFETY: leaves at once.
                unsafe { libc::_exit(0) }
            }
            ForkResult::Parent { child } => child,
        };
        drop(tell);
        nix::unistd::read(&ready, &mut [0]).unwrap();
        assert_eq!(Session::try_nth(0).map(drop), Err(Errno::EBUSY));
        kill(child, Signal::SIGKILL).unwrap();
        waitpid(child, None).unwrap();
        assert!(wait::until(SOON, || Session::try_nth(0).is_ok()), "the endpoint is free again");
        assert!(wait::until(SOON, || played(serial)["rings"] == 0), "its rings are forgotten");
    }
}

fn descriptors_are_closed_on_exec() {
    let session = Session::nth(0);
    let channel = session.create(PAGE as u64, 0).unwrap();
    let export = channel.export().unwrap();
    let flags = FdFlag::from_bits_truncate(fcntl(&export, FcntlArg::F_GETFD).unwrap());
    assert!(flags.contains(FdFlag::FD_CLOEXEC));
}

fn a_writer_cannot_reach_past_its_channel_by_any_offset() {
    let session = Session::nth(0);
    let channels = [0; 2].map(|_| session.create(PAGE as u64, 0).unwrap());
    let export = channels[0].export().unwrap();
    let info = export.info().unwrap();
    let own = [info.data_offset, info.tail_offset, info.head_offset, info.status_offset];
    let foreign = [channels[1].made.data_offset, channels[1].made.tail_offset, channels[1].made.head_offset];
    let secret = session.node.map(channels[1].made.head_offset, PAGE, READ_WRITE).unwrap();
    secret.fill(0x5ec);
    let candidates = (0..4096u64).map(|page| page * PAGE as u64).chain(foreign).chain((12..47).map(|bit| 1 << bit));
    for offset in candidates.filter(|offset| !own.contains(offset)) {
        if let Ok(mapping) = Mapping::new(&export, offset, PAGE, nix::sys::mman::ProtFlags::PROT_READ) {
            assert!(mapping.differences(0x5ec) > 0, "offset {offset:#x} shows another channel");
            assert!(Mapping::new(&export, offset, PAGE, READ_WRITE).is_err(), "offset {offset:#x} can be written");
        }
    }
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            a_call_that_sleeps_in_its_users_memory_holds_up_nobody,
            an_answer_that_sleeps_in_its_users_memory_holds_up_nobody,
            every_call_that_sleeps_in_its_answer_holds_up_nobody,
            a_read_that_sleeps_in_its_users_memory_loses_no_event_and_holds_up_nobody,
            a_read_into_bad_memory_consumes_nothing,
            a_hundred_thousand_random_calls_break_nothing,
            a_full_event_queue_says_how_many_were_lost,
            a_flood_of_lesser_events_hides_no_change_of_state,
            two_readers_of_one_session_share_its_events,
            ringing_too_often_is_eagain_and_works_again_soon,
            a_copy_that_rings_counts_against_the_limit_of_the_channels_writers,
            a_mapped_doorbell_rings_and_is_a_harmless_page_after_removal,
            a_doorbell_mapped_by_a_descriptor_ends_with_its_channel,
            an_eventfd_that_comes_behind_a_change_of_state_is_signalled_at_once,
            every_eventfd_that_was_accepted_while_the_endpoint_went_is_signalled,
            ring_memory_can_be_pinned_as_registration_with_a_gpu_or_a_network_card_does,
            killed_processes_leave_nothing_behind,
            descriptors_are_closed_on_exec,
            a_writer_cannot_reach_past_its_channel_by_any_offset,
        ],
        machine::repair,
    )
}
