// SPDX-License-Identifier: MIT OR Apache-2.0
//! From a doorbell to the one who waits.

use std::{
    io::{Read, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::UnixStream,
    },
    process::ExitCode,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use guest::{
    abi::*,
    call::{Record, call, number},
    ktap, machine,
    mapping::PAGE,
    promises,
    session::{Export, SOON, Session, played, signals, softdev},
    wait,
};
use nix::{
    errno::Errno,
    poll::PollFlags,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        eventfd::EventFd,
        wait::waitpid,
    },
    unistd::{ForkResult, fork},
};
use serde_json::json;

/// Long enough that a wake-up which should not come would have come.
const QUIET: Duration = Duration::from_millis(200);

fn a_doorbell_wakes_the_eventfd_of_its_vector_and_no_other() {
    let session = Session::nth(0);
    let eventfds: Vec<EventFd> = (0..session.attached.vectors).map(|vector| session.eventfd(vector)).collect();
    assert_eq!(session.attached.vectors, 7, "vector 7 belongs to the driver");
    for vector in 0..session.attached.vectors {
        session.ring(vector).unwrap();
        assert_eq!(signals(&eventfds[vector as usize], SOON), 1, "vector {vector}");
        assert!(eventfds.iter().all(|eventfd| signals(eventfd, Duration::ZERO) == 0), "another than vector {vector}");
    }
}

fn every_doorbell_is_a_signal_and_is_counted() {
    let session = Session::nth(0);
    let eventfd = session.eventfd(2);
    let before = session.info();
    let status = session.status.load(8);
    let mut woken = 0;
    for _ in 0..200 {
        session.ring(2).unwrap();
        woken += signals(&eventfd, SOON);
    }
    assert_eq!(woken, 200);
    let after = session.info();
    assert_eq!((after.doorbells - before.doorbells, after.interrupts - before.interrupts), (200, 200));
    assert_eq!(session.status.load(8) - status, 200, "the status page counts interrupts");
    assert_eq!(session.session_state().unwrap().doorbells, 200);
}

fn a_blocked_reader_of_an_eventfd_wakes() {
    let session = Session::nth(0);
    let eventfd = EventFd::new().unwrap();
    session.set_eventfd(0, eventfd.as_fd().as_raw_fd(), 0).unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| (eventfd.read().unwrap(), Instant::now()));
        thread::sleep(QUIET);
        assert!(!reader.is_finished());
        let rung = Instant::now();
        session.ring(0).unwrap();
        let (count, woken) = reader.join().unwrap();
        assert_eq!(count, 1);
        println!("# woken after {} us", woken.duration_since(rung).as_micros());
        assert!(woken.duration_since(rung) < wait::patiently(SOON));
    });
}

fn epoll_wakes_once_for_each_vector_that_rang() {
    let session = Session::nth(0);
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    let eventfds: Vec<EventFd> = (0..4).map(|vector| session.eventfd(vector)).collect();
    for (vector, eventfd) in (0..).zip(&eventfds) {
        epoll.add(eventfd, EpollEvent::new(EpollFlags::EPOLLIN, vector)).unwrap();
    }
    for vector in [3, 1] {
        session.ring(vector).unwrap();
        let mut events = [EpollEvent::empty(); 4];
        let limit = EpollTimeout::try_from(wait::patiently(SOON)).unwrap();
        assert_eq!(epoll.wait(&mut events, limit), Ok(1));
        assert_eq!(events[0].data(), u64::from(vector));
        eventfds[vector as usize].read().unwrap();
    }
}

fn a_writer_in_another_process_wakes_the_reader_and_its_data_is_there() {
    let session = Session::nth(0);
    let channel = session.create(16 * PAGE as u64, 1).unwrap();
    let (data, tail, head) = (channel.data(), channel.tail(), channel.head());
    let eventfd = session.eventfd(1);
    let export = channel.export().unwrap();
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    // SAFETY: the child uses only memory and descriptors of its own, and leaves without unwinding.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let [data, tail, head, _] = export.maps();
            let mut byte = [0];
            for round in 1..=50u64 {
                data.fill(round);
                tail.store(0, round);
                export.ring().unwrap();
                // The reader answers when it has seen it.
                theirs.read_exact(&mut byte).unwrap();
                assert_eq!(head.load(0), round);
            }
            theirs.write_all(&[1]).unwrap();
            // SAFETY: leaves at once.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            ours.set_read_timeout(Some(wait::patiently(SOON))).unwrap();
            for round in 1..=50u64 {
                assert_eq!(signals(&eventfd, SOON), 1, "round {round}");
                assert_eq!((tail.load(0), data.differences(round)), (round, 0), "round {round}");
                head.store(0, round);
                ours.write_all(&[0]).unwrap();
            }
            ours.read_exact(&mut [0]).expect("the writer saw every head");
            // It inherited the session's descriptor: while it lives, the endpoint stays taken.
            waitpid(child, None).unwrap();
        }
    }
}

fn writers_in_three_processes_have_a_channel_each_on_one_reader() {
    const ROUNDS: u64 = 30;
    let session = Session::nth(0);
    let channels: Vec<_> = (0..3).map(|vector| session.create(4 * PAGE as u64, vector).unwrap()).collect();
    let eventfds: Vec<EventFd> = (0..3).map(|vector| session.eventfd(vector)).collect();
    let read: Vec<_> = channels.iter().map(|channel| (channel.data(), channel.tail(), channel.head())).collect();
    let exports: Vec<Export> = channels.iter().map(|channel| channel.export().unwrap()).collect();
    let mut children = Vec::new();
    for (number, export) in exports.iter().enumerate() {
        // SAFETY: the child uses only memory and descriptors of its own, and leaves without unwinding.
        if let ForkResult::Parent { child } = unsafe { fork() }.unwrap() {
            children.push(child);
            continue;
        }
        let [data, tail, head, _] = export.maps();
        for round in 1..=ROUNDS {
            data.fill(round * 3 + number as u64);
            tail.store(0, round);
            let seen = export.ring().is_ok() && wait::until(SOON, || head.load(0) == round);
            if !seen {
                // SAFETY: leaves at once.
                unsafe { libc::_exit(1) }
            }
        }
        // SAFETY: leaves at once.
        unsafe { libc::_exit(0) }
    }
    for round in 1..=ROUNDS {
        // Each writes at its own pace; nobody overwrites what another wrote.
        for (number, ((data, tail, head), eventfd)) in read.iter().zip(&eventfds).enumerate() {
            assert_eq!(signals(eventfd, SOON), 1, "writer {number}, round {round}");
            assert_eq!((tail.load(0), data.differences(round * 3 + number as u64)), (round, 0), "writer {number}");
            head.store(0, round);
        }
    }
    for child in children {
        assert_eq!(waitpid(child, None), Ok(nix::sys::wait::WaitStatus::Exited(child, 0)));
    }
    assert_eq!(session.session_state().unwrap().channels, 3);
}

fn freed_space_wakes_a_writer_in_poll_and_on_its_eventfd() {
    let session = Session::nth(0);
    let channel = session.create(PAGE as u64, 0).unwrap();
    let export = channel.export().unwrap();
    let eventfd = export.eventfd();
    thread::scope(|scope| {
        let poller = scope.spawn(|| wait::polled(&export, PollFlags::POLLOUT | PollFlags::POLLIN, SOON));
        thread::sleep(Duration::from_millis(50));
        channel.freed().unwrap();
        let woken = poller.join().unwrap();
        assert!(woken.intersects(PollFlags::POLLOUT | PollFlags::POLLIN), "{woken:?}");
        assert!(!woken.intersects(PollFlags::POLLHUP | PollFlags::POLLERR), "{woken:?}");
    });
    assert_eq!(signals(&eventfd, SOON), 1);
}

fn a_masked_vector_counts_and_signals_once_when_unmasked() {
    let session = Session::nth(0);
    let eventfd = session.eventfd(0);
    session.set_eventfd(0, -2, PCIEIPC_VECTOR_MASK).unwrap();
    let before = session.info().interrupts;
    // A message is an edge: rings that follow too fast may be taken as one interrupt, so each waits for the one before.
    for count in 1..=3 {
        session.ring(0).unwrap();
        assert!(wait::until(SOON, || session.info().interrupts == before + count), "masked interrupts are counted");
    }
    assert_eq!(signals(&eventfd, QUIET), 0, "but signal nothing");
    session.set_eventfd(0, -2, 0).unwrap();
    assert_eq!(signals(&eventfd, SOON), 1);
    assert_eq!(signals(&eventfd, QUIET), 0);
    session.ring(0).unwrap();
    assert_eq!(signals(&eventfd, SOON), 1);
}

fn without_an_eventfd_nothing_is_signalled_any_more() {
    let session = Session::nth(0);
    let eventfd = session.eventfd(0);
    session.set_eventfd(0, -1, 0).unwrap();
    let before = session.info().interrupts;
    session.ring(0).unwrap();
    assert!(wait::until(SOON, || session.info().interrupts == before + 1));
    assert_eq!(signals(&eventfd, QUIET), 0);
}

fn the_next_session_is_not_rung_by_what_the_last_one_left() {
    let session = Session::nth(0);
    let old = session.eventfd(0);
    let endpoint = session.endpoint;
    drop(session);
    let session = Session::on(guest::session::Node::open(nix::fcntl::OFlag::empty()), endpoint);
    let new = session.eventfd(0);
    session.ring(0).unwrap();
    assert_eq!(signals(&new, SOON), 1);
    assert_eq!(signals(&old, Duration::ZERO), 0);
}

fn dropped_delayed_and_repeated_doorbells_neither_hang_nor_break_anything() {
    let session = Session::nth(0);
    let eventfd = session.eventfd(0);
    let endpoint = played(session.info().serial)["endpoint"].clone();
    softdev(&json!({"cmd": "drop", "endpoint": endpoint, "count": 1}));
    session.ring(0).unwrap();
    assert_eq!(signals(&eventfd, QUIET), 0);
    softdev(&json!({"cmd": "delay", "endpoint": endpoint, "count": 1, "ms": 2000}));
    session.ring(0).unwrap();
    assert_eq!(signals(&eventfd, Duration::from_millis(100)), 0);
    assert_eq!(signals(&eventfd, SOON), 1);
    softdev(&json!({"cmd": "repeat", "endpoint": endpoint, "count": 1, "times": 5}));
    session.ring(0).unwrap();
    assert!(signals(&eventfd, SOON) >= 1);
    thread::sleep(QUIET);
    signals(&eventfd, Duration::ZERO);
    session.ring(0).unwrap();
    assert_eq!(signals(&eventfd, SOON), 1, "all is as before");
}

fn an_export_needs_vector_0_in_its_ring_call() {
    let session = Session::nth(0);
    let channel = session.create(PAGE as u64, 3).unwrap();
    let export = channel.export().unwrap();
    let eventfd = session.eventfd(3);
    assert_eq!(call(&export, number::EXPORT_RING, &mut pcieipc_ring { vector: 3, ..Record::new() }), Err(Errno::EINVAL));
    export.ring().unwrap();
    assert_eq!(signals(&eventfd, SOON), 1);
}

fn an_export_sent_over_a_socket_works_after_its_sender_is_gone() {
    let session = Session::nth(0);
    let channel = session.create(PAGE as u64, 0).unwrap();
    let eventfd = session.eventfd(0);
    let (sender, receiver) = UnixStream::pair().unwrap();
    let export = channel.export().unwrap();
    send(&sender, &export);
    drop((export, sender));
    let received = receive(&receiver);
    received.maps()[0].fill(9);
    received.ring().unwrap();
    assert_eq!(signals(&eventfd, SOON), 1);
    assert_eq!(channel.data().differences(9), 0);
}

fn send(socket: &UnixStream, export: &Export) {
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    let fds = [export.as_fd().as_raw_fd()];
    let iov = [std::io::IoSlice::new(&[0])];
    sendmsg::<()>(socket.as_raw_fd(), &iov, &[ControlMessage::ScmRights(&fds)], MsgFlags::empty(), None).unwrap();
}

fn receive(socket: &UnixStream) -> Export {
    use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
    use std::os::fd::{FromRawFd, OwnedFd};
    let mut byte = [0];
    let mut iov = [std::io::IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!(i32);
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut iov, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC).unwrap();
    let Some(ControlMessageOwned::ScmRights(fds)) = message.cmsgs().unwrap().next() else { panic!("no descriptor came") };
    // SAFETY: the kernel has just put this descriptor into our table.
    Export(unsafe { OwnedFd::from_raw_fd(fds[0]) })
}

/// Somebody spins on what wakes him and looks at the status page and at the events as soon as it does, before whoever wakes has gone on.
fn whoever_a_change_of_state_wakes_finds_the_word_and_the_event_already_there() {
    const ROUNDS: usize = 200;
    let session = Session::nth(0);
    let function = session.function();
    let channel = session.create(PAGE as u64, 1).unwrap();
    let export = channel.export().unwrap();
    let [.., writers_status] = export.maps();
    let (first, last, space) = (session.eventfd(0), session.eventfd(session.attached.vectors - 1), export.eventfd());
    let polled = || wait::polled(&session.node, PollFlags::POLLIN, Duration::ZERO).contains(PollFlags::POLLIN);
    let ways: [(&str, &(dyn Fn() -> bool + Sync)); 4] = [
        ("the first vector's eventfd", &|| first.read().is_ok()),
        ("the last vector's eventfd", &|| last.read().is_ok()),
        ("the writer's eventfd", &|| space.read().is_ok()),
        ("poll", &polled),
    ];
    for (name, woken) in (0..ROUNDS).map(|round| ways[round % ways.len()]) {
        let generation = session.state().1;
        session.node.events();
        for eventfd in [&first, &last, &space] {
            signals(eventfd, Duration::ZERO);
        }
        let (over, spins) = (AtomicBool::new(false), AtomicU32::new(0));
        thread::scope(|scope| {
            let in_vain = wait::Over(&over);
            let spinning = scope.spawn(|| {
                while !woken() {
                    spins.fetch_add(1, Ordering::Relaxed);
                    if over.load(Ordering::Relaxed) {
                        return None;
                    }
                }
                Some((session.status.load(0), writers_status.load(0), session.node.events()))
            });
            assert!(wait::until(SOON, || spins.load(Ordering::Relaxed) > 0));
            function.reset().unwrap();
            wait::until(SOON, || spinning.is_finished());
            drop(in_vain);
            let (word, writers_word, events) = spinning.join().unwrap().unwrap_or_else(|| panic!("{name}: nobody is woken"));
            // It may live again by then.
            for word in [word, writers_word] {
                let (state, now) = ((word & 0xff) as u32, word >> 8);
                assert!(state == PCIEIPC_STATE_RECOVERING || now > generation, "{name}: the word is still {word:#x}");
            }
            let told = |event: &pcieipc_event| {
                event.kind == PCIEIPC_EVENT_STATE
                    && event.generation == generation
                    && event.detail[1] == u64::from(PCIEIPC_STATE_RECOVERING)
            };
            assert!(events.iter().any(told), "{name}: the event is not there: {events:?}");
        });
        let recovered = wait::until(SOON, || session.node.call(number::RECOVER, &mut pcieipc_recover::new()).is_ok());
        assert!(recovered, "{:?}", session.state());
    }
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            a_doorbell_wakes_the_eventfd_of_its_vector_and_no_other,
            every_doorbell_is_a_signal_and_is_counted,
            a_blocked_reader_of_an_eventfd_wakes,
            epoll_wakes_once_for_each_vector_that_rang,
            a_writer_in_another_process_wakes_the_reader_and_its_data_is_there,
            writers_in_three_processes_have_a_channel_each_on_one_reader,
            freed_space_wakes_a_writer_in_poll_and_on_its_eventfd,
            a_masked_vector_counts_and_signals_once_when_unmasked,
            without_an_eventfd_nothing_is_signalled_any_more,
            whoever_a_change_of_state_wakes_finds_the_word_and_the_event_already_there,
            the_next_session_is_not_rung_by_what_the_last_one_left,
            dropped_delayed_and_repeated_doorbells_neither_hang_nor_break_anything,
            an_export_needs_vector_0_in_its_ring_call,
            an_export_sent_over_a_socket_works_after_its_sender_is_gone,
        ],
        machine::repair,
    )
}
