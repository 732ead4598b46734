// SPDX-License-Identifier: MIT OR Apache-2.0
//! The register file, and what each kind of reset leaves of it.

mod machine;

use machine::{CONFIG, DONE, GUEST, Machine, error};
use softdev::registers as reg;

const ALL_WRITABLE: [(u64, usize); 7] = [
    (reg::DMA_SRC, 8),
    (reg::DMA_DST, 8),
    (reg::DMA_LEN, 4),
    (reg::DMA_FLAGS, 4),
    (reg::DMA_VECTOR, 4),
    (reg::DMA_BELL, 8),
    (reg::DMA_BELL_VALUE, 4),
];

#[test]
fn identity_registers_read_what_the_document_says() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    assert_eq!(&endpoint.read::<4>(0, reg::MAGIC), b"PIPC");
    assert_eq!(endpoint.read32(0, reg::VERSION), 1);
    assert_eq!(endpoint.read32(0, reg::FEATURES), 8 | 64 << 8 | 1 << 16 | 1 << 17);
    assert_eq!(endpoint.read32(0, reg::STATUS), 1);
    assert_eq!(endpoint.read32(0, reg::LIFE), 1);
}

#[test]
fn bars_answer_only_while_memory_space_is_enabled() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.connect(0);
    for (bar, offset) in [(0, reg::MAGIC), (2, 0), (4, 0)] {
        assert_eq!(endpoint.read32(bar, offset), u32::MAX);
    }
    endpoint.write32(2, 0, 0x1234_5678);
    endpoint.write16(CONFIG, 0x04, 0x0002);
    assert_eq!(endpoint.read32(0, reg::MAGIC), reg::MAGIC_VALUE);
    assert_eq!(endpoint.read32(2, 0), 0, "the write was dropped");
}

#[test]
fn undefined_offsets_read_zero_and_read_only_ones_ignore_writes() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    let writable = |at: u64| {
        at == reg::CONTROL
            || at == reg::DMA_START
            || at == reg::DMA_STOP
            || ALL_WRITABLE.iter().any(|&(start, bytes)| (start..start + bytes as u64).contains(&at))
            || (reg::RING_TABLE..reg::RING_TABLE + 64 * 32).contains(&at)
            || (reg::DOORBELL_PAGE..reg::DOORBELL_PAGE + 32).contains(&at)
    };
    let defined = |at: u64| at < 0x28 || (0x40..0x60).contains(&at);
    for at in (0..reg::BAR0_BYTES).step_by(4).filter(|&at| !writable(at)) {
        let before = endpoint.read32(0, at);
        assert!(defined(at) || before == 0, "{at:#x} reads {before:#x}");
        endpoint.write32(0, at, !before);
        assert_eq!(endpoint.read32(0, at), before, "{at:#x} was written");
    }
}

#[test]
fn wide_registers_take_one_8_byte_or_two_4_byte_stores() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    for (at, bytes) in ALL_WRITABLE {
        let value = 0x0102_0304_0506_0708_u64.wrapping_mul(at | 1);
        if bytes == 4 {
            endpoint.write32(0, at, value as u32);
            assert_eq!(endpoint.read32(0, at), value as u32);
            continue;
        }
        endpoint.write64(0, at, value);
        assert_eq!(endpoint.read64(0, at), value);
        endpoint.write32(0, at, !value as u32);
        endpoint.write32(0, at + 4, (!value >> 32) as u32);
        assert_eq!(endpoint.read64(0, at), !value);
        assert_eq!(endpoint.read32(0, at + 4), (!value >> 32) as u32);
    }
    endpoint.client.region_write(0, reg::DMA_LEN, &[9]).unwrap();
    endpoint.client.region_write(0, reg::DMA_LEN + 1, &[9; 4]).unwrap();
    endpoint.client.region_write(0, reg::DMA_LEN, &[9; 16]).unwrap();
    let expected = 0x0102_0304_0506_0708_u64.wrapping_mul(reg::DMA_LEN | 1) as u32;
    assert_eq!(endpoint.read32(0, reg::DMA_LEN), expected, "stores of other sizes are ignored");
}

#[test]
fn the_ring_table_holds_64_slots() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    for slot in 0..64 {
        endpoint.set_ring(slot, GUEST + slot * 0x1000, 0x1000);
    }
    for slot in 0..64 {
        let at = reg::RING_TABLE + slot * 32;
        assert_eq!(endpoint.read64(0, at), GUEST + slot * 0x1000);
        assert_eq!([8, 12, 16, 20].map(|field| endpoint.read32(0, at + field)), [0x1000, 1 << 16, 1, 0]);
    }
    assert_eq!(endpoint.copy(GUEST, GUEST + 63 * 0x1000, 0x1000, 0), DONE);
    endpoint.write64(0, reg::RING_TABLE + 63 * 32, 0);
    assert_eq!(endpoint.read64(0, reg::RING_TABLE + 63 * 32), GUEST + 63 * 0x1000, "a valid slot does not change");
    endpoint.clear_ring(63);
    assert_eq!(endpoint.copy(GUEST, GUEST + 63 * 0x1000, 0x1000, 0), error(2));
}

/// Leaves nothing at its default.
fn use_it(endpoint: &mut machine::Driven) {
    endpoint.probe();
    endpoint.set_ring(5, GUEST, 0x1000);
    assert_eq!(endpoint.copy(GUEST, 0, 8, reg::FLAG_DESTINATION_OWN), DONE);
    endpoint.write64(0, reg::DMA_BELL, 7);
    endpoint.ring(0);
    assert_eq!(endpoint.interrupts_now(0), 1);
}

fn assert_as_new(endpoint: &mut machine::Driven) {
    for (at, bytes) in ALL_WRITABLE {
        let value = if bytes == 8 { endpoint.read64(0, at) } else { endpoint.read32(0, at).into() };
        assert_eq!(value, 0, "{at:#x}");
    }
    assert_eq!(endpoint.read32(0, reg::DMA_RESULT), reg::RESULT_NONE);
    assert_eq!(endpoint.read::<32>(0, reg::RING_TABLE + 5 * 32), [0; 32]);
}

#[test]
fn function_reset_clears_registers_and_configuration_and_counts_a_life() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    for (life, by_configuration) in [(2, true), (3, false)] {
        use_it(&mut endpoint);
        let bars = [0x10, 0x18, 0x1c, 0x20].map(|at| endpoint.read32(CONFIG, at));
        if by_configuration {
            let control = endpoint.read16(CONFIG, 0x68);
            endpoint.write16(CONFIG, 0x68, control | 1 << 15);
            assert_eq!(endpoint.read16(CONFIG, 0x68) & 1 << 15, 0);
        } else {
            endpoint.client.reset().unwrap();
        }
        assert_eq!([0x04, 0x42].map(|at| endpoint.read16(CONFIG, at)), [0, 7]);
        // The BARs are QEMU's and stay.
        assert_eq!([0x10, 0x18, 0x1c, 0x20].map(|at| endpoint.read32(CONFIG, at)), bars);
        endpoint.write16(CONFIG, 0x04, 0x0002);
        assert_eq!(endpoint.read32(0, reg::LIFE), life);
        assert_eq!(endpoint.read32(0, reg::CONTROL), 0);
        assert_as_new(&mut endpoint);
        for counter in [reg::DOORBELLS, reg::INTERRUPTS, reg::DMA_BYTES, reg::DMA_ERRORS] {
            assert_eq!(endpoint.read64(0, counter), 0);
        }
    }
    use_it(&mut endpoint);
}

#[test]
fn control_reset_clears_rings_and_engine_only() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    for control in [reg::CONTROL_RESET, reg::CONTROL_RESET | reg::CONTROL_ENGINE] {
        use_it(&mut endpoint);
        endpoint.write32(0, reg::CONTROL, control);
        assert_eq!(endpoint.read32(0, reg::CONTROL), control & reg::CONTROL_ENGINE);
        assert_as_new(&mut endpoint);
        assert_eq!(endpoint.read32(0, reg::LIFE), 1);
        assert_eq!(endpoint.read16(CONFIG, 0x04), 6);
    }
    assert_eq!((endpoint.read64(0, reg::DOORBELLS), endpoint.read64(0, reg::DMA_BYTES)), (2, 16));
}
