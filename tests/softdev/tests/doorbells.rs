// SPDX-License-Identifier: MIT OR Apache-2.0
//! Doorbells become MSI-X messages.

mod machine;

use machine::{CONFIG, Machine};
use softdev::registers as reg;

#[test]
fn a_4_byte_store_to_a_doorbell_sends_its_vector_once() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    for vector in 0..8 {
        endpoint.write32(0, reg::DOORBELL_PAGE + 4 * vector, vector as u32 * 77);
        let fired: Vec<u64> = (0..8).map(|other| endpoint.interrupts_now(other)).collect();
        let expected: Vec<u64> = (0..8).map(|other| u64::from(other == vector)).collect();
        assert_eq!(fired, expected);
    }
    assert_eq!((endpoint.read64(0, reg::DOORBELLS), endpoint.read64(0, reg::INTERRUPTS)), (8, 8));
}

#[test]
fn nothing_but_an_aligned_4_byte_store_to_the_eight_doorbells_rings() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    let page = reg::DOORBELL_PAGE;
    endpoint.client.region_write(0, page, &[1]).unwrap();
    endpoint.client.region_write(0, page, &[1, 1]).unwrap();
    endpoint.client.region_write(0, page, &[1; 8]).unwrap();
    endpoint.client.region_write(0, page + 2, &[1; 4]).unwrap();
    endpoint.write32(0, page + 4 * 8, 1);
    endpoint.write32(0, page - 4, 1);
    endpoint.write32(0, page + 0xffc, 1);
    assert_eq!(endpoint.read32(0, page), 0, "doorbells read zero");
    assert_eq!(endpoint.read64(0, reg::DOORBELLS), 0);
    assert!((0..8).all(|vector| endpoint.interrupts_now(vector) == 0));
}

#[test]
fn messages_need_bus_mastering_and_msix() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    for (command, msix, sent) in [(0x0002, 0x8000, 0), (0x0006, 0, 0), (0x0006, 0x8000, 1)] {
        endpoint.write16(CONFIG, 0x04, command);
        endpoint.write16(CONFIG, 0x42, msix);
        endpoint.ring(1);
        assert_eq!(endpoint.interrupts_now(1), sent, "command {command:#x}, MSI-X control {msix:#x}");
    }
    assert_eq!((endpoint.read64(0, reg::DOORBELLS), endpoint.read64(0, reg::INTERRUPTS)), (3, 1));
}
