// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device that interrupts without end costs its own vector, and no other. In a machine of its own, whose module calls very few
//! interrupts a storm: how many come through in a second depends on how busy the host is.

use std::{process::ExitCode, time::Duration};

use guest::{
    abi::*,
    call::{Record, number},
    ktap, machine,
    mapping::{PAGE, READ_WRITE},
    promises,
    session::{SOON, Session, signals},
    wait,
};

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
    signals(&eventfd, Duration::ZERO);
    let works = wait::until(SOON, || {
        session.ring(5).unwrap();
        signals(&eventfd, Duration::from_millis(500)) > 0
    });
    assert!(works, "the vector stays masked");
    assert_eq!(session.state().0, PCIEIPC_STATE_LIVE);
}

fn main() -> ExitCode {
    ktap::main(promises![a_storm_of_interrupts_is_masked_told_and_over], machine::repair)
}
