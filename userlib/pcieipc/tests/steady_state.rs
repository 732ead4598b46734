// SPDX-License-Identifier: MIT OR Apache-2.0
//! In steady state no system call is made by a side that finds its ring ready.

#[path = "support/no_system_calls.rs"]
mod no_system_calls;
mod support;

use std::{
    os::unix::process::ExitStatusExt,
    time::{Duration, Instant},
};

use no_system_calls::{FALSE, NONE_MADE, without_system_calls};
use pcieipc::{
    group::Group,
    link::{Links, RecordHeader},
};
use support::{Scratch, options, process, variables};

/// Two ranks in one process; what one sends the other finds ready.
fn two_ranks() -> (Group, Group) {
    let scratch = Scratch::new();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| Group::meet(options(1, 2, &scratch.0)).unwrap());
        (Group::meet(options(0, 2, &scratch.0)).unwrap(), second.join().unwrap())
    })
}

#[test]
fn sealed_process() {
    let Some(variables) = variables("sealed_process") else { return };
    let (mut a, mut b) = two_ranks();
    let deadline = Instant::now() + Duration::from_secs(60);
    let extra = variables["EXTRA"] == "1";
    without_system_calls(|| {
        if extra {
            // SAFETY: takes nothing.
            unsafe { libc::syscall(libc::SYS_getpid) };
        }
        let mut good = true;
        for number in 0..100_000u32 {
            let header = RecordHeader { epoch: number, ..Default::default() };
            let (from, to) = if number % 2 == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
            let (from, to) = (from.links(), to.links());
            let len = (number as usize * 97) % 9000;
            good &= from.reserve(to.rank(), len, deadline).is_ok();
            good &= from.commit(to.rank(), header, len).is_ok();
            good &= to.receive(from.rank(), deadline).is_ok_and(|(h, payload)| h == header && payload.len() == len);
            good &= to.release(from.rank()).is_ok();
            good &= from.confirm().is_ok() && to.confirm().is_ok();
        }
        good
    })
}

#[test]
fn a_hundred_thousand_records_are_sent_and_received_without_a_system_call() {
    let mut sealed = process("sealed_process", &[("EXTRA", "0".into())]);
    let status = sealed.child.wait().unwrap();
    assert_ne!(status.code(), Some(FALSE), "a record was lost");
    assert_eq!(status.code(), Some(NONE_MADE), "{status}");
}

#[test]
fn the_proof_notices_a_single_system_call() {
    let mut sealed = process("sealed_process", &[("EXTRA", "1".into())]);
    let status = sealed.child.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGSYS), "{status}");
}
