// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device that interrupts without end costs its own vector, and no other. In a machine of its own, whose module calls very few
//! interrupts a storm: how many come through in a second depends on how busy the host is.

use std::{
    fs,
    process::{Command, ExitCode},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use guest::{
    abi::*,
    call::{Record, number},
    ktap, machine,
    mapping::{PAGE, READ_WRITE},
    pci::Function,
    promises,
    session::{SOON, Session, played, signals, softdev},
    wait,
};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::eventfd::EventFd,
    unistd::Pid,
};
use serde_json::json;

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

/// Runs what follows in this thread on these processors only.
fn run_on(processors: impl Fn(usize) -> bool) {
    let mut set = CpuSet::new();
    // Those that the machine has not are of no concern.
    (0..CpuSet::count()).filter(|&processor| processors(processor)).for_each(|processor| set.set(processor).unwrap());
    sched_setaffinity(Pid::from_raw(0), &set).unwrap();
}

/// The processor that a vector of a function interrupts.
fn processor_of(function: &Function, vector: usize) -> usize {
    let list = fs::read_dir(format!("/sys/bus/pci/devices/{}/msi_irqs", function.address())).unwrap();
    let mut irqs: Vec<u32> = list.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
    irqs.sort_unstable();
    let path = format!("/proc/irq/{}/effective_affinity_list", irqs[vector]);
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

/// The endpoint itself interrupts without end. What comes through is bounded, a thread on the same processor keeps most of it, and so does
/// another vector.
fn a_storm_starves_neither_its_processor_nor_another_vector() {
    const LIMIT: u64 = 20;
    const ROUNDS: usize = 5;
    const SPAN: Duration = Duration::from_secs(1);
    machine::reload(c"storm_interrupts=20 link_sample_ms=200");
    let session = Session::nth(0);
    let (calm, function, serial) = (session.eventfd(4), session.function(), session.info().serial);
    let endpoint = played(serial)["endpoint"].clone();
    let processor = processor_of(&function, 5);
    // So that this thread is not what the other one shares its processor with.
    run_on(|other| other != processor);
    session.node.events();
    let sent = || played(serial)["interrupts"].as_u64().unwrap();
    let (progress, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let measured = || {
        let before = progress.load(Ordering::Relaxed);
        thread::sleep(SPAN);
        progress.load(Ordering::Relaxed) - before
    };
    let (mut quiet, mut stormy) = (0, 0);
    thread::scope(|scope| {
        let _counted = wait::Over(&over);
        scope.spawn(|| {
            run_on(|own| own == processor);
            while !over.load(Ordering::Relaxed) {
                progress.fetch_add(1, Ordering::Relaxed);
            }
        });
        for _ in 0..ROUNDS {
            quiet += measured();
            let (interrupts, messages, begin) = (session.info().interrupts, sent(), Instant::now());
            softdev(&json!({"cmd": "flood", "endpoint": endpoint, "vector": 5, "count": 100_000, "us": 10}));
            stormy += measured();
            // What the reset before said.
            signals(&calm, Duration::ZERO);
            session.ring(4).unwrap();
            assert_eq!(signals(&calm, SOON), 1, "another vector is not served in the storm");
            // That ends the storm, too.
            function.reset().unwrap();
            let (span, came) = (begin.elapsed(), session.info().interrupts - interrupts);
            let (messages, windows) = (sent() - messages, span.as_millis() as u64 / 100 + 2);
            println!("# {came} of {messages} interrupts came in {} ms", span.as_millis());
            // Fewer than the limit in each tenth of a second are no storm, and one that is over may come twice as far until it is seen.
            assert!(came <= 2 * LIMIT * windows, "{came} interrupts in {span:?}");
            assert!(messages > 2 * LIMIT * windows, "this machine is too slow for a storm");
            let recovered = wait::until(SOON, || session.node.call(number::RECOVER, &mut pcieipc_recover::new()).is_ok());
            assert!(recovered, "{:?}", session.state());
        }
    });
    println!("# in the storm {} % of what a thread does without", stormy * 100 / quiet);
    assert!(stormy * 4 > quiet, "{stormy} of {quiet}");
    let storms = session.node.events().into_iter().filter(|event| event.kind == PCIEIPC_EVENT_STORM).count();
    assert!(storms >= ROUNDS, "{storms} storms told");
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            a_storm_of_interrupts_is_masked_told_and_over,
            storms_without_end_do_not_fill_the_kernels_log,
            a_storm_that_a_reset_falls_into_is_over_after_it,
            a_storm_starves_neither_its_processor_nor_another_vector,
        ],
        machine::repair,
    )
}
