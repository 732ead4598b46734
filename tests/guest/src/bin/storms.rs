// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device that interrupts without end costs its own vector, and no other. In a machine of its own, whose module calls very few
//! interrupts a storm: how many come through in a second depends on how busy the host is.

use std::{
    process::{Command, ExitCode},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use guest::{
    abi::*,
    call::{Record, number},
    ktap, machine,
    mapping::{PAGE, READ_WRITE},
    promises,
    session::{SOON, Session, signals},
    wait,
};
use nix::sys::eventfd::EventFd;

/// A ring of the vector that had the storm comes through again.
fn is_over(session: &Session, eventfd: &EventFd) {
    signals(eventfd, Duration::ZERO);
    let works = wait::until(SOON, || {
        session.ring(5).unwrap();
        signals(eventfd, Duration::from_millis(500)) > 0
    });
    assert!(works, "the vector stays masked");
}

fn a_storm_of_interrupts_is_masked_told_and_over() {
    let session = Session::nth(0);
    let (eventfd, calm) = (session.eventfd(5), session.eventfd(4));
    session.node.events();
    // A mapped doorbell has no rate limit.
    let bell = session.node.get(number::DOORBELL_MAP, pcieipc_doorbell { vector: 5, ..Record::new() });
    let page = session.node.map(bell.map_offset, PAGE, READ_WRITE).unwrap();
    let mut storms = Vec::new();
    let told = wait::until(6 * SOON, || {
        (0..500).for_each(|_| page.store32(bell.page_offset as usize, bell.value as u32));
        storms.extend(session.node.events().into_iter().filter(|event| event.kind == PCIEIPC_EVENT_STORM));
        !storms.is_empty()
    });
    assert!(told, "{} interrupts and no storm is told", session.info().interrupts);
    assert_eq!(storms[0].detail[0], 5);
    session.ring(4).unwrap();
    assert_eq!(signals(&calm, SOON), 1, "another vector is not concerned");
    is_over(&session, &eventfd);
    assert_eq!(session.state().0, PCIEIPC_STATE_LIVE);
}

/// Lines in the kernel's log about vectors that were masked.
fn lines() -> usize {
    let log = Command::new("dmesg").output().unwrap();
    String::from_utf8_lossy(&log.stdout).lines().filter(|line| line.contains("fired too often")).count()
}

fn storms_without_end_do_not_fill_the_kernels_log() {
    let session = Session::nth(0);
    let eventfd = session.eventfd(5);
    session.node.events();
    let bell = session.node.get(number::DOORBELL_MAP, pcieipc_doorbell { vector: 5, ..Record::new() });
    let page = session.node.map(bell.map_offset, PAGE, READ_WRITE).unwrap();
    let (before, begin) = (lines(), Instant::now());
    let mut storms = 0;
    wait::until(6 * SOON, || {
        (0..100).for_each(|_| page.store32(bell.page_offset as usize, bell.value as u32));
        storms += session.node.events().into_iter().filter(|event| event.kind == PCIEIPC_EVENT_STORM).count();
        storms >= 60
    });
    // Ten in five seconds.
    let allowed = 10 * (begin.elapsed().as_secs() as usize / 5 + 2);
    let told = lines() - before;
    println!("# {storms} storms, {told} lines in {} ms", begin.elapsed().as_millis());
    assert!(storms > 0, "without a storm this shows nothing");
    assert!(told <= allowed, "{told} lines");
    is_over(&session, &eventfd);
}

/// Resets while vectors are masked: what unmasks them has to wait for the next life.
fn a_storm_that_a_reset_falls_into_is_over_after_it() {
    let session = Session::nth(0);
    let function = session.function();
    let eventfd = session.eventfd(5);
    let mut storms = 0;
    for _ in 0..20 {
        // A mapping of a former life does not reach the device any more.
        let bell = session.node.get(number::DOORBELL_MAP, pcieipc_doorbell { vector: 5, ..Record::new() });
        let page = session.node.map(bell.map_offset, PAGE, READ_WRITE).unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    page.store32(bell.page_offset as usize, bell.value as u32);
                }
            });
            thread::sleep(Duration::from_millis(50));
            function.reset().unwrap();
            over.store(true, Ordering::Relaxed);
        });
        let recovered = wait::until(SOON, || session.node.call(number::RECOVER, &mut pcieipc_recover::new()).is_ok());
        assert!(recovered, "{:?}", session.state());
        storms += session.node.events().into_iter().filter(|event| event.kind == PCIEIPC_EVENT_STORM).count();
    }
    println!("# {storms} storms told");
    assert!(storms > 0, "without a storm this shows nothing");
    is_over(&session, &eventfd);
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            a_storm_of_interrupts_is_masked_told_and_over,
            storms_without_end_do_not_fill_the_kernels_log,
            a_storm_that_a_reset_falls_into_is_over_after_it,
        ],
        machine::repair,
    )
}
