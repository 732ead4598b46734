// SPDX-License-Identifier: MIT OR Apache-2.0
//! stress SECONDS SEED: users and an administrator at once, at random. It proves nothing by its answers but that they come;
//! the kernel's log is judged by whoever runs the machine.

use std::{
    os::fd::{AsFd, AsRawFd},
    process::ExitCode,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use guest::{
    abi::*,
    call::{Record, call, number},
    machine,
    mapping::PAGE,
    pci::Function,
    random::Random,
    session::{Node, SOON, Session, signals, softdev},
    wait,
};
use nix::{errno::Errno, fcntl::OFlag, poll::PollFlags};
use serde_json::json;

/// Everything a user does, on whichever endpoint is free, while it is taken away now and then.
fn use_endpoints(random: &mut Random, counts: &[AtomicU64; 2]) {
    let node = Node::open(OFlag::O_NONBLOCK);
    let endpoints = node.endpoints();
    if endpoints.is_empty() {
        thread::sleep(Duration::from_millis(1));
        return;
    }
    let endpoint = endpoints[random.below(endpoints.len() as u64) as usize];
    let Ok(attached) = node.attach(endpoint, 0) else {
        thread::sleep(Duration::from_millis(1));
        return;
    };
    let Ok(status) = node.map(attached.status_offset, PAGE, nix::sys::mman::ProtFlags::PROT_READ) else { return };
    let session = Session { node, endpoint, attached, status };
    let channels: Vec<_> = (0..3).filter_map(|_| session.create((PAGE as u64) << random.below(6), 0).ok()).collect();
    let exports: Vec<_> = channels.iter().filter_map(|channel| channel.export().ok()).collect();
    let maps: Vec<_> = exports.iter().filter_map(|export| export.info().ok().map(|_| export.maps())).collect();
    for step in 0..40 {
        let outcome = match random.below(8) {
            0 => session.ring(random.below(8) as u32),
            1 => exports.first().map_or(Ok(()), |export| export.ring()),
            2 if channels.len() >= 2 => {
                let mut copy = pcieipc_copy {
                    from: channels[0].id(),
                    to: channels[1].id(),
                    bytes: random.below(PAGE as u64) as u32 + 1,
                    timeout_ms: 100,
                    ..Record::new()
                };
                session.node.call(number::COPY, &mut copy)
            }
            3 => channels.first().map_or(Ok(()), |channel| channel.freed()),
            4 => {
                let eventfd = nix::sys::eventfd::EventFd::new();
                eventfd.and_then(|eventfd| session.set_eventfd(random.below(7) as u32, eventfd.as_fd().as_raw_fd(), 0))
            }
            5 => {
                maps.iter().for_each(|maps| maps[0].store(0, step));
                session.node.events();
                call(&session.node, number::RECOVER, &mut pcieipc_recover::new())
            }
            6 => session.session_state().map(drop),
            _ => {
                wait::polled(&session.node, PollFlags::POLLIN, Duration::from_millis(1));
                session.node.info(endpoint).map(drop)
            }
        };
        counts[usize::from(outcome.is_err())].fetch_add(1, Ordering::Relaxed);
        let known = [
            Errno::EIO,
            Errno::ESTALE,
            Errno::ENODEV,
            Errno::ENOENT,
            Errno::EINVAL,
            Errno::EBUSY,
            Errno::EAGAIN,
            Errno::ETIMEDOUT,
            Errno::EREMOTEIO,
        ];
        assert!(outcome.is_ok() || outcome.is_err_and(|error| known.contains(&error)), "{outcome:?}");
    }
    if random.below(2) == 0 {
        let _ = channels.first().map(|channel| channel.destroy());
    }
}

/// Everything an administrator does. Errors are as they come: two of his actions may meet.
fn administer(random: &mut Random) {
    let functions = Function::soft_endpoints();
    if let Some(function) = functions.get(random.below(functions.len().max(1) as u64) as usize) {
        let _ = match random.below(6) {
            0 => function.unbind(),
            1 => function.reset(),
            2 => function.remove(),
            3 => function.bind(),
            _ => {
                for function in functions.iter().filter(|function| !function.bound()) {
                    let _ = function.bind();
                }
                Ok(())
            }
        };
    }
    if random.below(2) == 0 {
        let _ = Function::rescan();
    }
    if random.below(4) == 0 {
        let endpoint = random.below(2);
        softdev(&json!({"cmd": "repeat", "endpoint": endpoint, "count": 3, "times": 20}));
        softdev(&json!({"cmd": "drop", "endpoint": endpoint, "count": 2}));
        softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": random.below(3) * 10_000}));
    }
    thread::sleep(Duration::from_millis(random.below(30)));
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).filter_map(|argument| argument.parse().ok());
    let (seconds, seed) = (arguments.next().unwrap_or(20), arguments.next().unwrap_or(1));
    println!("KTAP version 1\n1..2\n# seed {seed}");
    let (over, counts) = (AtomicBool::new(false), [const { AtomicU64::new(0) }; 2]);
    let end = Instant::now() + Duration::from_secs(seconds);
    let (over, counts) = (&over, &counts);
    let calm = thread::scope(|scope| {
        let mut users = Vec::new();
        for user in 0..3 {
            let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (user + 1));
            users.push(scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    use_endpoints(&mut random, counts);
                }
            }));
        }
        let mut random = Random(seed.wrapping_mul(0xd134_2543_de82_ef95) | 1);
        users.push(scope.spawn(move || {
            while Instant::now() < end {
                administer(&mut random);
            }
            over.store(true, Ordering::Relaxed);
        }));
        users.into_iter().all(|user| user.join().is_ok())
    });
    let [good, bad] = counts;
    println!("# {} calls succeeded, {} were refused", good.load(Ordering::Relaxed), bad.load(Ordering::Relaxed));
    println!("{} 1 users_and_an_administrator_at_once_get_only_errors_of_the_document", if calm { "ok" } else { "not ok" });
    let works = std::panic::catch_unwind(|| {
        machine::repair();
        let session = Session::nth(0);
        let eventfd = session.eventfd(0);
        session.ring(0).unwrap_or_else(|error| panic!("{error}"));
        signals(&eventfd, SOON) == 1
    });
    let works = works.is_ok_and(|works| works);
    println!("{} 2 everything_works_afterwards", if works { "ok" } else { "not ok" });
    if calm && works { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
