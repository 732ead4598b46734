// SPDX-License-Identifier: MIT OR Apache-2.0
//! A storm of interrupts of a device whose interrupts are acknowledged. It is the soft endpoint under other ids, which a profile describes. The register
//! that gives the reason of an interrupt counts doorbells in truth, so until the first has been rung there is none.

use std::{fs, process::ExitCode, time::Duration};

use guest::{
    abi::*,
    call::{Record, number},
    ktap,
    pci::Function,
    promises,
    session::{SOON, Session, played, signals, softdev},
    wait,
};
use serde_json::json;

const PROFILE: &str = "/sys/kernel/config/pcieipc/acknowledged";
const FIELDS: [(&str, &str); 10] = [
    ("vendor", "0x1d0f"),
    ("device", "0x9999"),
    ("vectors", "7"),
    ("doorbell_offset", "0x3000"),
    ("doorbell_stride", "4"),
    ("user_dma", "0"),
    ("ack_bar", "0"),
    ("ack_status", "0x40"),
    ("ack_clear", "0x40"),
    ("enable", "1"),
];

fn a_storm_of_interrupts_for_which_a_device_has_no_reason_is_masked_told_and_over() {
    fs::create_dir(PROFILE).unwrap();
    for (field, value) in FIELDS {
        fs::write(format!("{PROFILE}/{field}"), value).unwrap_or_else(|error| panic!("{field}: {error}"));
    }
    let [function] = &Function::with_device("0x9999")[..] else { panic!("one device is expected") };
    function.bind_by_override().unwrap();
    let session = Session::nth(0);
    let (eventfd, serial) = (session.eventfd(5), session.info().serial);
    session.node.events();
    let mut storms = Vec::new();
    softdev(&json!({"cmd": "flood", "endpoint": played(serial)["endpoint"], "vector": 5, "count": 100_000, "us": 10}));
    let told = wait::until(6 * SOON, || {
        storms.extend(session.node.events().into_iter().filter(|event| event.kind == PCIEIPC_EVENT_STORM));
        storms.len() >= 3
    });
    let sent = &played(serial)["interrupts"];
    println!("# {} storms in {sent} interrupts", storms.len());
    assert!(told, "{storms:?} in {sent} interrupts");
    assert!(storms.iter().all(|event| event.detail[0] == 5));
    assert_eq!((session.info().interrupts, signals(&eventfd, Duration::ZERO)), (0, 0), "none of them was a doorbell");
    function.reset().unwrap();
    let recovered = wait::until(SOON, || session.node.call(number::RECOVER, &mut pcieipc_recover::new()).is_ok());
    assert!(recovered, "{:?}", session.state());
    signals(&eventfd, Duration::ZERO);
    let works = wait::until(SOON, || {
        session.ring(5).unwrap();
        signals(&eventfd, Duration::from_millis(500)) > 0
    });
    assert!(works, "the vector stays masked");
}

fn main() -> ExitCode {
    ktap::main(promises![a_storm_of_interrupts_for_which_a_device_has_no_reason_is_masked_told_and_over], || ())
}
