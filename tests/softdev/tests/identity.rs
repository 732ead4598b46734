// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a kernel finds when it enumerates the endpoint.

mod machine;

use std::collections::BTreeMap;

use machine::{CONFIG, Driven, Machine, bar0_of};
use softdev::registers as reg;
use vfio_bindings::bindings::vfio::{VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_NUM_IRQS};

fn capabilities(endpoint: &mut Driven) -> BTreeMap<u8, u64> {
    let mut found = BTreeMap::new();
    let mut at = u64::from(endpoint.read::<1>(CONFIG, 0x34)[0]);
    while at != 0 {
        assert!(at >= 0x40 && at % 4 == 0 && found.len() < 16);
        let [id, next] = endpoint.read(CONFIG, at);
        assert_eq!(found.insert(id, at), None);
        at = next.into();
    }
    found
}

fn extended_capabilities(endpoint: &mut Driven) -> BTreeMap<u16, u64> {
    let mut found = BTreeMap::new();
    let mut at = 0x100;
    while at != 0 {
        assert!(at >= 0x100 && at % 4 == 0 && found.len() < 16);
        let header = endpoint.read32(CONFIG, at);
        assert_eq!(found.insert(header as u16, at), None);
        at = u64::from(header >> 20);
    }
    found
}

#[test]
fn ids_class_and_header_are_those_of_the_document() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.connect(0);
    assert_eq!(endpoint.read32(CONFIG, 0x00), 0x7069_1234);
    assert_eq!(endpoint.read32(CONFIG, 0x08) >> 8, 0x12_0000);
    assert_eq!(endpoint.read::<1>(CONFIG, 0x0e), [0], "one function, type 0 header");
    assert_eq!(endpoint.read16(CONFIG, 0x04), 0, "nothing is enabled after power-up");
    assert_ne!(endpoint.read16(CONFIG, 0x06) & 1 << 4, 0, "has capabilities");
    endpoint.write32(CONFIG, 0x00, u32::MAX);
    endpoint.write32(CONFIG, 0x08, u32::MAX);
    assert_eq!(endpoint.read32(CONFIG, 0x00), 0x7069_1234, "ids cannot be written");
    assert_eq!(endpoint.read32(CONFIG, 0x08) >> 8, 0x12_0000);
}

#[test]
fn bars_size_as_documented_and_hold_their_address() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.connect(0);
    for (at, sized) in
        [(0x10, 0xffff_c000), (0x14, 0), (0x18, 0xffc0_000c), (0x1c, 0xffff_ffff), (0x20, 0xffff_f000), (0x24, 0), (0x30, 0)]
    {
        endpoint.write32(CONFIG, at, u32::MAX);
        assert_eq!(endpoint.read32(CONFIG, at), sized, "BAR at {at:#x}");
    }
    endpoint.write32(CONFIG, 0x10, bar0_of(0) as u32);
    assert_eq!(u64::from(endpoint.read32(CONFIG, 0x10)), bar0_of(0));
    for (bar, bytes) in [(0, reg::BAR0_BYTES), (2, reg::BAR2_BYTES), (4, reg::BAR4_BYTES)] {
        assert_eq!(endpoint.client.region(bar).unwrap().size, bytes);
    }
}

#[test]
fn msix_has_8_vectors_with_table_and_pending_bits_in_bar_4() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    let at = capabilities(&mut endpoint)[&0x11];
    assert_eq!(endpoint.read16(CONFIG, at + 2) & 0x7ff, 7);
    assert_eq!(endpoint.read32(CONFIG, at + 4), 4);
    assert_eq!(endpoint.read32(CONFIG, at + 8), 0x804);
    for index in 0..VFIO_PCI_NUM_IRQS {
        let expected = if index == VFIO_PCI_MSIX_IRQ_INDEX { 8 } else { 0 };
        assert_eq!(endpoint.client.get_irq_info(index).unwrap().count, expected);
    }
    endpoint.write64(4, 16, 0xfee0_0000);
    assert_eq!(endpoint.read64(4, 16), 0xfee0_0000, "the table is memory");
    endpoint.write64(4, 0x800, u64::MAX);
    assert_eq!(endpoint.read64(4, 0x800), 0, "pending bits are not");
}

#[test]
fn express_power_management_aer_and_serial_number_are_there() {
    let machine = Machine::start(2, &["--serial-base", "0x1122334455667788"]);
    let mut endpoint = machine.driven(1);
    let found = capabilities(&mut endpoint);
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), [0x01, 0x10, 0x11]);
    let express = found[&0x10];
    assert_eq!(endpoint.read16(CONFIG, express + 2) & 0xff, 0x02, "version 2, endpoint");
    assert_ne!(endpoint.read32(CONFIG, express + 4) & 1 << 28, 0, "function-level reset");
    let capable = endpoint.read32(CONFIG, express + 0x0c);
    assert_eq!(u32::from(endpoint.read16(CONFIG, express + 0x12)) & 0x3ff, capable & 0x3ff, "the link is at its best");
    let found = extended_capabilities(&mut endpoint);
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), [0x01, 0x03]);
    let serial = found[&0x03];
    let number = u64::from(endpoint.read32(CONFIG, serial + 4)) | u64::from(endpoint.read32(CONFIG, serial + 8)) << 32;
    assert_eq!(number, 0x1122_3344_5566_7789);
    assert_eq!(endpoint.read64(0, reg::SERIAL), number);
}

#[test]
fn a_sleeping_function_answers_no_bar_and_keeps_its_context() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    let power = capabilities(&mut endpoint)[&0x01] + 4;
    endpoint.write16(CONFIG, power, 3);
    assert_eq!(endpoint.read32(0, reg::MAGIC), u32::MAX);
    endpoint.ring(0);
    assert_eq!(endpoint.interrupts_now(0), 0);
    endpoint.write16(CONFIG, power, 0);
    assert_eq!(endpoint.read32(0, reg::CONTROL), reg::CONTROL_ENGINE);
    assert_eq!(endpoint.read64(0, reg::DOORBELLS), 0);
}

#[test]
fn memory_is_mapped_unless_it_is_to_be_trapped() {
    for (arguments, mapped) in [(&[][..], true), (&["--no-mmap-memory"][..], false)] {
        let machine = Machine::start(1, arguments);
        let endpoint = machine.connect(0);
        let region = endpoint.client.region(2).unwrap();
        assert_eq!((region.file_offset.is_some(), region.sparse_areas.len()), (mapped, mapped.into()));
    }
}
