// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whatever is taken from a running engine is gone when the taking away returns.

mod machine;

use std::{os::unix::fs::FileExt, time::Duration};

use machine::{CONFIG, Driven, GUEST, MIB, Machine};
use softdev::registers as reg;

/// Starts long copies, takes something away in the middle, and looks whether the target still changes.
fn no_byte_lands_after(name: &str, take: fn(&Machine, &mut Driven), give_back: fn(&Machine, &mut Driven)) {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    let mut interrupted = 0;
    for round in 0..40 {
        endpoint.set_ring(0, GUEST, 4 << 20);
        endpoint.set_ring(1, GUEST + 8 * MIB, 4 << 20);
        machine.fill(0, 4 * MIB, round);
        machine.guest.write_all_at(&vec![!round; 4 << 20], 8 * MIB).unwrap();
        // Slow enough that the middle is hit, fast enough that many chunks would still come.
        machine.control().ok(&serde_json::json!({"cmd": "slow", "endpoint": 0, "bytes_per_s": 200 << 20}));
        endpoint.start_copy(GUEST, GUEST + 8 * MIB, 4 << 20, 0);
        std::thread::sleep(Duration::from_micros(500 + 200 * u64::from(round % 8)));
        take(&machine, &mut endpoint);
        let at_once = machine.guest_bytes(8 * MIB, 4 * MIB);
        std::thread::sleep(Duration::from_millis(4));
        assert!(at_once == machine.guest_bytes(8 * MIB, 4 * MIB), "{name}: bytes landed afterwards, round {round}");
        let untouched = at_once.iter().rev().take_while(|&&byte| byte == !round).count();
        interrupted += u32::from((4096..(4 << 20) - 4096).contains(&untouched));
        give_back(&machine, &mut endpoint);
    }
    assert!(interrupted >= 10, "{name}: only {interrupted} of 40 rounds hit a running copy");
}

#[test]
fn unmapped_memory() {
    no_byte_lands_after(
        "dma_unmap",
        |_, endpoint| endpoint.client.dma_unmap(GUEST + 8 * MIB, 4 * MIB).unwrap(),
        |machine, endpoint| {
            use std::os::fd::AsRawFd;
            assert_eq!(endpoint.finish(), machine::error(1));
            endpoint.client.dma_map(8 * MIB, GUEST + 8 * MIB, 4 * MIB, machine.guest.as_raw_fd()).unwrap();
        },
    );
}

#[test]
fn a_ring_slot() {
    no_byte_lands_after(
        "RING_VALID",
        |_, endpoint| endpoint.clear_ring(1),
        |_, endpoint| {
            assert_eq!(endpoint.finish(), machine::error(2));
        },
    );
}

#[test]
fn bus_mastering() {
    no_byte_lands_after(
        "command register",
        |_, endpoint| endpoint.write16(CONFIG, 4, 2),
        |_, endpoint| {
            assert_eq!(endpoint.finish(), machine::error(4));
            endpoint.write16(CONFIG, 4, 6);
        },
    );
}

#[test]
fn the_enable_bit() {
    no_byte_lands_after(
        "CONTROL",
        |_, endpoint| endpoint.write32(0, reg::CONTROL, 0),
        |_, endpoint| {
            assert_eq!(endpoint.finish(), machine::error(5));
            endpoint.write32(0, reg::CONTROL, reg::CONTROL_ENGINE);
        },
    );
}

#[test]
fn function_reset() {
    no_byte_lands_after("reset", |_, endpoint| endpoint.client.reset().unwrap(), |_, endpoint| endpoint.probe());
}

#[test]
fn power() {
    no_byte_lands_after(
        "die",
        |machine, _| drop(machine.control().ok(&serde_json::json!({"cmd": "die", "endpoint": 0}))),
        |machine, endpoint| {
            machine.control().ok(&serde_json::json!({"cmd": "revive", "endpoint": 0}));
            endpoint.probe();
        },
    );
}
