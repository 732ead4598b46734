// SPDX-License-Identifier: MIT OR Apache-2.0
//! Interrupts without a reason of a device whose interrupts are acknowledged. It is the soft endpoint under other ids, which a profile describes. The register
//! that gives the reason of an interrupt counts doorbells in truth, so until the first has been rung there is none.

use std::{fs, process::ExitCode, time::Duration};

use guest::{
    abi::*,
    call::{Record, number},
    ktap, machine,
    pci::Function,
    promises,
    session::{SOON, Session, played, signals, softdev},
    wait,
};
use nix::sys::eventfd::EventFd;
use serde_json::json;

const PROFILE: &str = "/sys/kernel/config/pcieipc/acknowledged";
const FIELDS: [(&str, &str); 10] = [
    ("vendor", "0x1d0f"),
    ("device", "0x9999"),
    ("vectors", "1"),
    ("doorbell_offset", "0x3000"),
    ("doorbell_stride", "4"),
    ("user_dma", "0"),
    ("ack_bar", "0"),
    ("ack_status", "0x40"),
    ("ack_clear", "0x40"),
    ("enable", "1"),
];

/// The profile is there and the device bound by it; what was rung in a former life is not.
fn described() -> Function {
    fs::create_dir(PROFILE).unwrap();
    for (field, value) in FIELDS {
        fs::write(format!("{PROFILE}/{field}"), value).unwrap_or_else(|error| panic!("{field}: {error}"));
    }
    let [function] = &Function::with_device("0x9999")[..] else { panic!("one device is expected") };
    function.bind_by_override().unwrap();
    function.clone()
}

/// A ring comes through.
fn works(session: &Session, eventfd: &EventFd) {
    signals(eventfd, Duration::ZERO);
    let works = wait::until(SOON, || {
        session.ring(0).unwrap();
        signals(eventfd, Duration::from_millis(500)) > 0
    });
    assert!(works, "the vector stays masked");
}

fn reset(session: &Session, function: &Function) {
    function.reset().unwrap();
    let recovered = wait::until(SOON, || session.node.call(number::RECOVER, &mut pcieipc_recover::new()).is_ok());
    assert!(recovered, "{:?}", session.state());
}

fn a_storm_of_interrupts_for_which_a_device_has_no_reason_is_masked_told_and_over() {
    let function = described();
    let session = Session::nth(0);
    let (eventfd, serial) = (session.eventfd(0), session.info().serial);
    session.node.events();
    let mut storms = Vec::new();
    softdev(&json!({"cmd": "flood", "endpoint": played(serial)["endpoint"], "vector": 0, "count": 100_000, "us": 10}));
    let told = wait::until(6 * SOON, || {
        storms.extend(session.node.events().into_iter().filter(|event| event.kind == PCIEIPC_EVENT_STORM));
        storms.len() >= 3
    });
    let sent = &played(serial)["interrupts"];
    println!("# {} storms in {sent} interrupts", storms.len());
    assert!(told, "{storms:?} in {sent} interrupts");
    assert!(storms.iter().all(|event| event.detail[0] == 0));
    assert_eq!((session.info().interrupts, signals(&eventfd, Duration::ZERO)), (0, 0), "none of them was a doorbell");
    reset(&session, &function);
    works(&session, &eventfd);
}

/// The kernel's number of the first vector's interrupt.
fn first_irq(function: &Function) -> u32 {
    let list = fs::read_dir(format!("/sys/bus/pci/devices/{}/msi_irqs", function.address())).unwrap();
    list.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).min().unwrap()
}

/// How many interrupts came, on all processors.
fn came(irq: u32) -> u64 {
    let counts = fs::read_to_string(format!("/sys/kernel/irq/{irq}/per_cpu_count")).unwrap();
    counts.trim().split(',').map(|count| count.parse::<u64>().unwrap()).sum()
}

/// How many of them the kernel counts as handled by nobody. 100,000 in a row and it disables the vector for good, and says so in its log only.
fn unhandled(irq: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/irq/{irq}/spurious")).unwrap();
    let count = text.lines().find_map(|line| line.strip_prefix("unhandled ")?.parse().ok());
    count.unwrap_or_else(|| panic!("{text}"))
}

fn the_kernel_never_counts_an_interrupt_without_a_reason_as_one_that_nobody_handled() {
    fs::remove_dir(PROFILE).unwrap();
    machine::reload(c"storm_interrupts=0");
    let function = described();
    let session = Session::nth(0);
    let (eventfd, serial) = (session.eventfd(0), session.info().serial);
    // Doorbells that were rung before are a reason.
    reset(&session, &function);
    let irq = first_irq(&function);
    let before = came(irq);
    softdev(&json!({"cmd": "flood", "endpoint": played(serial)["endpoint"], "vector": 0, "count": 100_000, "us": 10}));
    let enough = wait::until(6 * SOON, || came(irq) >= before + 1000);
    println!("# {} interrupts, {} of them handled by nobody", came(irq) - before, unhandled(irq));
    assert!(enough, "too few for this to show anything");
    assert_eq!((unhandled(irq), session.info().interrupts), (0, 0));
    reset(&session, &function);
    works(&session, &eventfd);
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            a_storm_of_interrupts_for_which_a_device_has_no_reason_is_masked_told_and_over,
            the_kernel_never_counts_an_interrupt_without_a_reason_as_one_that_nobody_handled,
        ],
        || (),
    )
}
