// SPDX-License-Identifier: MIT OR Apache-2.0
//! Faults on demand: each does what it says, no more, and ends.

mod machine;

use std::time::{Duration, Instant};

use machine::{CONFIG, DONE, GUEST, MIB, Machine, bar0_of, bar2_of, error};
use serde_json::json;
use softdev::registers as reg;

const MS: Duration = Duration::from_millis(1);

#[test]
fn dropped_doorbells_are_counted_but_raise_nothing() {
    let machine = Machine::start(2, &[]);
    let (mut endpoint, mut other) = (machine.driven(0), machine.driven(1));
    machine.control().ok(&json!({"cmd": "drop", "endpoint": 0, "count": 3}));
    let raised: Vec<u64> = (0..5)
        .map(|_| {
            endpoint.ring(1);
            endpoint.interrupts_now(1)
        })
        .collect();
    assert_eq!(raised, [0, 0, 0, 1, 1]);
    assert_eq!((endpoint.read64(0, reg::DOORBELLS), endpoint.read64(0, reg::INTERRUPTS)), (5, 2));
    other.ring(1);
    assert_eq!(other.interrupts_now(1), 1, "the other endpoint is not concerned");
}

#[test]
fn delayed_doorbells_come_late_and_once() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    machine.control().ok(&json!({"cmd": "delay", "endpoint": 0, "count": 2, "ms": 100}));
    let begin = Instant::now();
    endpoint.ring(1);
    endpoint.ring(2);
    assert_eq!((endpoint.interrupts_now(1), endpoint.interrupts_now(2)), (0, 0));
    assert_eq!(endpoint.interrupts(1, 3000 * MS), 1);
    assert!(begin.elapsed() >= 100 * MS);
    assert_eq!(endpoint.interrupts(2, 3000 * MS), 1);
    endpoint.ring(1);
    assert_eq!(endpoint.interrupts_now(1), 1);
    assert_eq!(endpoint.interrupts(1, 150 * MS), 0);
}

#[test]
fn a_delayed_doorbell_does_not_outlive_a_reset() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    machine.control().ok(&json!({"cmd": "delay", "endpoint": 0, "count": 1, "ms": 50}));
    endpoint.ring(1);
    endpoint.client.reset().unwrap();
    endpoint.probe();
    assert_eq!(endpoint.interrupts(1, 150 * MS), 0);
}

#[test]
fn repeated_doorbells_raise_so_many_times() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    machine.control().ok(&json!({"cmd": "repeat", "endpoint": 0, "count": 2, "times": 5}));
    let raised = [0; 3].map(|_| {
        endpoint.ring(4);
        endpoint.interrupts_now(4)
    });
    assert_eq!(raised, [5, 5, 1]);
}

#[test]
fn a_flood_raises_its_vector_so_many_times_and_ends_with_the_life() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    let mut control = machine.control();
    control.ok(&json!({"cmd": "flood", "endpoint": 0, "vector": 3, "count": 200, "us": 10}));
    let mut raised = 0;
    while raised < 200 {
        let more = endpoint.interrupts(3, 3000 * MS);
        assert!(more > 0, "{raised} of 200");
        raised += more;
    }
    assert_eq!((raised, endpoint.interrupts(3, 50 * MS)), (200, 0));
    control.ok(&json!({"cmd": "flood", "endpoint": 0, "vector": 3, "count": 100_000, "us": 1000}));
    assert!(endpoint.interrupts(3, 3000 * MS) > 0);
    endpoint.client.reset().unwrap();
    endpoint.probe();
    endpoint.interrupts_now(3);
    assert_eq!(endpoint.interrupts(3, 50 * MS), 0);
    let refused = control.refused(&json!({"cmd": "flood", "endpoint": 0, "vector": 8, "count": 1, "us": 1}).to_string());
    assert!(refused.contains("vector"), "{refused}");
}

#[test]
fn faults_queue_up_and_the_oldest_goes_first() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    let mut control = machine.control();
    control.ok(&json!({"cmd": "repeat", "endpoint": 0, "count": 1, "times": 2}));
    control.ok(&json!({"cmd": "drop", "endpoint": 0, "count": 1}));
    control.ok(&json!({"cmd": "repeat", "endpoint": 0, "count": 1, "times": 3}));
    assert_eq!(control.endpoint(0)["faults"], 3);
    let raised = [0; 4].map(|_| {
        endpoint.ring(0);
        endpoint.interrupts_now(0)
    });
    assert_eq!(raised, [2, 0, 3, 1]);
    for _ in 0..64 {
        control.ok(&json!({"cmd": "drop", "endpoint": 0, "count": 1}));
    }
    assert!(control.refused(r#"{"cmd":"drop","endpoint":0,"count":1}"#).contains("64"));
}

#[test]
fn corruption_flips_exactly_one_bit_of_so_many_copies() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    endpoint.set_ring(0, GUEST, 16 << 20);
    machine.control().ok(&json!({"cmd": "corrupt", "endpoint": 0, "count": 2}));
    for (bytes, flipped) in [(1, 1), (1 << 20, 1), (1 << 20, 0)] {
        let sent = machine.fill(0, bytes, 1);
        assert_eq!(endpoint.copy(GUEST, GUEST + 8 * MIB, bytes as u32, 0), DONE);
        let received = machine.guest_bytes(8 * MIB, bytes);
        let bits: u32 = sent.iter().zip(&received).map(|(a, b)| (a ^ b).count_ones()).sum();
        assert_eq!(bits, flipped);
    }
}

#[test]
fn scribbling_repeats_with_its_seed_and_stays_in_its_range() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    endpoint.set_ring(2, GUEST + MIB, 4096);
    let mut control = machine.control();
    let request = json!({"cmd": "scribble", "endpoint": 0, "slot": 2, "offset": 128, "bytes": 8, "seed": 7});
    let scribbled = [0; 2].map(|_| {
        let before = machine.fill(MIB - 4096, 3 * 4096, 1);
        control.ok(&request);
        let after = machine.guest_bytes(MIB - 4096, 3 * 4096);
        let (from, to) = (4096 + 128, 4096 + 136);
        assert!(before[..from] == after[..from] && before[to..] == after[to..]);
        assert_ne!(before[from..to], after[from..to]);
        after[from..to].to_vec()
    });
    assert_eq!(scribbled[0], scribbled[1]);
    assert!(control.refused(r#"{"cmd":"scribble","endpoint":0,"slot":3,"offset":0,"bytes":8,"seed":7}"#).contains("not valid"));
    assert!(control.refused(r#"{"cmd":"scribble","endpoint":0,"slot":2,"offset":4092,"bytes":8,"seed":7}"#).contains("inside"));
    let overflow = r#"{"cmd":"scribble","endpoint":0,"slot":2,"offset":18446744073709551615,"bytes":8,"seed":7}"#;
    assert!(control.refused(overflow).contains("inside"));
}

#[test]
fn a_dead_endpoint_reads_all_ones_drops_writes_and_comes_back_as_new() {
    let machine = Machine::start(2, &["--no-mmap-memory"]);
    let (mut endpoint, mut peer) = (machine.driven(0), machine.driven(1));
    endpoint.set_ring(0, GUEST, 4096);
    endpoint.write32(2, 0, 0x5555);
    let mut control = machine.control();
    control.ok(&json!({"cmd": "drop", "endpoint": 0, "count": 10}));
    control.ok(&json!({"cmd": "link", "endpoint": 0, "speed": 1, "width": 1}));
    control.ok(&json!({"cmd": "die", "endpoint": 0}));
    assert_eq!(control.endpoint(0)["state"], "dead");
    for (region, offset) in [(CONFIG, 0), (CONFIG, 0x150), (0, reg::MAGIC), (0, reg::RING_TABLE), (2, 0), (4, 0)] {
        assert_eq!(endpoint.read64(region, offset), u64::MAX, "region {region} at {offset:#x}");
        endpoint.write32(region, offset, 0);
        assert_eq!(endpoint.read64(region, offset), u64::MAX);
    }
    endpoint.ring(1);
    assert_eq!(endpoint.interrupts_now(1), 0);
    peer.set_ring(0, bar2_of(0), 4096);
    assert_eq!(peer.copy(0, bar2_of(0), 8, reg::FLAG_SOURCE_OWN), error(1), "its memory is off the bus");
    peer.set_ring(1, GUEST, 4096);
    peer.write64(0, reg::DMA_BELL, bar0_of(0) + reg::DOORBELL_PAGE);
    assert_eq!(peer.copy(0, GUEST, 8, reg::FLAG_SOURCE_OWN | reg::FLAG_BELL), error(2), "and so are its doorbells");
    assert_eq!(peer.read32(0, reg::MAGIC), reg::MAGIC_VALUE, "the peer lives");

    control.ok(&json!({"cmd": "revive", "endpoint": 0}));
    assert_eq!(endpoint.read32(CONFIG, 0), 0x7069_1234);
    assert_eq!((endpoint.read16(CONFIG, 4), endpoint.read32(CONFIG, 0x10)), (0, 0), "configuration at its defaults");
    assert_eq!(endpoint.read16(CONFIG, 0x72) & 0x3f, 4, "the link is at its best again");
    endpoint.probe();
    assert_eq!(endpoint.read32(0, reg::LIFE), 2);
    assert_eq!(endpoint.read64(0, reg::RING_TABLE), 0);
    assert_eq!(endpoint.read32(2, 0), 0, "memory lost its contents");
    endpoint.ring(1);
    assert_eq!(endpoint.interrupts_now(1), 1, "no fault waits any more");
}

#[test]
fn mapped_memory_of_a_dead_endpoint_is_all_ones_where_nobody_asks_the_server() {
    let machine = Machine::start(1, &[]);
    let endpoint = machine.driven(0);
    let region = endpoint.client.region(2).unwrap().file_offset.as_ref().unwrap();
    let mut byte = [0];
    machine.control().ok(&json!({"cmd": "die", "endpoint": 0}));
    std::os::unix::fs::FileExt::read_exact_at(region.file(), &mut byte, 12345).unwrap();
    assert_eq!(byte, [0xff]);
    machine.control().ok(&json!({"cmd": "revive", "endpoint": 0}));
    std::os::unix::fs::FileExt::read_exact_at(region.file(), &mut byte, 12345).unwrap();
    assert_eq!(byte, [0]);
}

#[test]
fn a_silent_endpoint_answers_but_neither_interrupts_nor_copies() {
    let machine = Machine::start(2, &[]);
    let (mut endpoint, mut peer) = (machine.driven(0), machine.driven(1));
    let mut control = machine.control();
    let own = reg::FLAG_SOURCE_OWN | reg::FLAG_DESTINATION_OWN;
    assert_eq!(endpoint.copy(0, 64, 8, own), DONE);
    control.ok(&json!({"cmd": "silence", "endpoint": 0}));
    assert_eq!(control.endpoint(0)["state"], "silent");
    assert_eq!(endpoint.read32(0, reg::MAGIC), reg::MAGIC_VALUE);
    endpoint.ring(1);
    peer.set_ring(0, GUEST, 4096);
    peer.write64(0, reg::DMA_BELL, bar0_of(0) + reg::DOORBELL_PAGE + 4);
    assert_eq!(peer.copy(0, GUEST, 8, reg::FLAG_SOURCE_OWN | reg::FLAG_BELL), DONE);
    assert_eq!(endpoint.interrupts(1, 50 * MS), 0);
    assert_eq!(endpoint.read64(0, reg::DOORBELLS), 2);
    assert_eq!(endpoint.copy(0, 64, 8, own), (reg::RESULT_NONE, 0), "not the result of the copy before");
    control.ok(&json!({"cmd": "revive", "endpoint": 0}));
    endpoint.probe();
    endpoint.ring(1);
    assert_eq!((endpoint.interrupts_now(1), endpoint.copy(0, 64, 8, own)), (1, DONE));
}

#[test]
fn an_engine_that_is_stuck_is_busy_over_stop_and_resets_until_it_is_revived() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    let mut control = machine.control();
    control.ok(&json!({"cmd": "stick", "endpoint": 0}));
    let busy = |endpoint: &mut machine::Driven| endpoint.read32(0, reg::STATUS) & reg::STATUS_BUSY != 0;
    endpoint.write32(0, reg::DMA_STOP, 1);
    assert!(busy(&mut endpoint));
    endpoint.write32(0, reg::CONTROL, reg::CONTROL_RESET);
    assert!(busy(&mut endpoint));
    endpoint.client.reset().unwrap();
    endpoint.probe();
    assert!(busy(&mut endpoint));
    control.ok(&json!({"cmd": "revive", "endpoint": 0}));
    endpoint.probe();
    let own = reg::FLAG_SOURCE_OWN | reg::FLAG_DESTINATION_OWN;
    assert!(!busy(&mut endpoint));
    assert_eq!(endpoint.copy(0, 64, 8, own), DONE);
}

#[test]
fn an_engine_that_is_stuck_until_it_is_reset_works_then() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    machine.control().ok(&json!({"cmd": "stick", "endpoint": 0, "until_reset": true}));
    let busy = |endpoint: &mut machine::Driven| endpoint.read32(0, reg::STATUS) & reg::STATUS_BUSY != 0;
    endpoint.write32(0, reg::DMA_STOP, 1);
    assert!(busy(&mut endpoint));
    endpoint.write32(0, reg::CONTROL, reg::CONTROL_RESET);
    assert!(!busy(&mut endpoint));
    endpoint.probe();
    assert_eq!(endpoint.copy(0, 64, 8, reg::FLAG_SOURCE_OWN | reg::FLAG_DESTINATION_OWN), DONE);
}

#[test]
fn link_status_shows_what_was_asked_for_across_function_resets() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    let mut control = machine.control();
    for (speed, width) in [(1, 1), (3, 8), (4, 16)] {
        control.ok(&json!({"cmd": "link", "endpoint": 0, "speed": speed, "width": width}));
        endpoint.client.reset().unwrap();
        assert_eq!(endpoint.read16(CONFIG, 0x72) & 0x3ff, speed | width << 4);
        assert_eq!(endpoint.read32(CONFIG, 0x6c) & 0x3ff, 4 | 16 << 4, "what it is capable of stays");
    }
    for (speed, width) in [(0, 1), (5, 1), (1, 0), (1, 3), (1, 32)] {
        control.refused(&json!({"cmd": "link", "endpoint": 0, "speed": speed, "width": width}).to_string());
    }
}

#[test]
fn the_engine_keeps_to_its_speed_limit() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    let mut control = machine.control();
    control.ok(&json!({"cmd": "slow", "endpoint": 0, "bytes_per_s": 1_000_000}));
    let own = reg::FLAG_SOURCE_OWN | reg::FLAG_DESTINATION_OWN;
    let begin = Instant::now();
    assert_eq!(endpoint.copy(0, 0x20_0000, 300_000, own), DONE);
    let took = begin.elapsed();
    assert!((299 * MS..3000 * MS).contains(&took), "300 kB at 1 MB/s took {took:?}");
    control.ok(&json!({"cmd": "slow", "endpoint": 0, "bytes_per_s": 0}));
    let begin = Instant::now();
    assert_eq!(endpoint.copy(0, 0x20_0000, 300_000, own), DONE);
    assert!(begin.elapsed() < 200 * MS);
}

#[test]
fn bad_requests_are_refused_with_a_reason_and_change_nothing() {
    let machine = Machine::start(2, &[]);
    let mut control = machine.control();
    for line in [
        "",
        "nonsense",
        "[]",
        "{}",
        r#"{"cmd":"explode","endpoint":0}"#,
        r#"{"cmd":"die"}"#,
        r#"{"cmd":"die","endpoint":2}"#,
        r#"{"cmd":"die","endpoint":-1}"#,
        r#"{"cmd":"die","endpoint":0,"now":true}"#,
        r#"{"cmd":"drop","endpoint":0,"count":100001}"#,
        r#"{"cmd":"delay","endpoint":0,"count":1,"ms":60001}"#,
        r#"{"cmd":"repeat","endpoint":0,"count":1,"times":10001}"#,
        r#"{"cmd":"scribble","endpoint":0,"slot":0,"offset":0,"bytes":1048577,"seed":0}"#,
    ] {
        assert!(!control.refused(line).is_empty());
    }
    assert_eq!((&control.endpoint(0)["state"], &control.endpoint(0)["faults"]), (&json!("live"), &json!(0)));
    let mut long = machine.control();
    assert!(long.refused(&"x".repeat(5000)).contains("4096"));
}

#[test]
fn list_tells_serial_life_state_and_counters() {
    let machine = Machine::start(2, &["--serial-base", "40"]);
    let mut endpoint = machine.driven(1);
    endpoint.set_ring(0, GUEST, 4096);
    assert_eq!(endpoint.copy(GUEST, 0, 4096, reg::FLAG_DESTINATION_OWN), DONE);
    assert_eq!(endpoint.copy(GUEST, 0, 0, reg::FLAG_DESTINATION_OWN), error(3));
    endpoint.ring(0);
    endpoint.client.reset().unwrap();
    endpoint.probe();
    endpoint.set_ring(0, GUEST, 4096);
    let report = machine.control().endpoint(1);
    for (key, value) in [
        ("endpoint", json!(1)),
        ("serial", json!(41)),
        ("life", json!(2)),
        ("state", json!("live")),
        ("doorbells", json!(1)),
        ("interrupts", json!(1)),
        ("dma_bytes", json!(4096)),
        ("dma_errors", json!(1)),
        ("rings", json!(1)),
        ("busy", json!(false)),
        ("link", json!([4, 16])),
        ("bar0", json!(bar0_of(1))),
        ("bar2", json!(bar2_of(1))),
        ("mapped_bytes", json!(machine::GUEST_BYTES)),
    ] {
        assert_eq!(report[key], value, "{key}");
    }
}

#[test]
fn a_haunting_endpoint_writes_whatever_it_is_told_until_its_memory_is_gone() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.driven(0);
    let mut control = machine.control();
    endpoint.set_ring(0, GUEST, 4096);
    control.ok(&json!({"cmd": "haunt", "endpoint": 0, "on": true}));
    endpoint.set_ring(1, GUEST + MIB, 8192);
    // It is told to stop in every way there is.
    endpoint.clear_ring(0);
    endpoint.clear_ring(1);
    endpoint.write32(0, reg::CONTROL, 0);
    endpoint.write16(CONFIG, 4, 2);
    endpoint.read32(0, reg::STATUS);
    for place in [0, MIB, MIB + 4096] {
        machine.fill(place, 8, 0xee);
        let before = machine.guest_bytes(place, 8);
        let written = (0..2000).any(|_| {
            std::thread::sleep(MS);
            machine.guest_bytes(place, 8) != before
        });
        assert!(written, "nothing lands at {place:#x}");
    }
    let poke = |address: u64| json!({"cmd": "poke", "endpoint": 0, "address": address, "bytes": 8, "seed": 1});
    control.ok(&poke(GUEST + 2 * MIB));
    assert_ne!(machine.guest_bytes(2 * MIB, 8), [0; 8]);
    assert!(control.refused(&poke(0x10).to_string()).contains("no memory answers"));
    assert!(control.endpoint(0)["haunted"].as_u64().unwrap() > 0);
    // Only the loss of the memory stops it.
    endpoint.client.shutdown().unwrap();
    drop(endpoint);
    let refused = (0..2000).any(|_| {
        std::thread::sleep(MS);
        control.endpoint(0)["exorcised"].as_u64().unwrap() > 0
    });
    assert!(refused);
    control.ok(&json!({"cmd": "haunt", "endpoint": 0, "on": false}));
}

#[test]
fn many_controllers_and_drivers_at_once_disturb_each_other_only_as_asked() {
    let machine = Machine::start(4, &[]);
    std::thread::scope(|scope| {
        let machine = &machine;
        for endpoint in 0..2 {
            // Killed and revived all the time.
            scope.spawn(move || {
                let mut control = machine.control();
                for _ in 0..100 {
                    for cmd in ["die", "revive", "silence", "revive"] {
                        control.ok(&json!({"cmd": cmd, "endpoint": endpoint}));
                    }
                    control.ok(&json!({"cmd": "corrupt", "endpoint": endpoint, "count": 1}));
                    control.ok(&json!({"cmd": "list"}));
                }
            });
            // Copies into the one that is killed, and back.
            scope.spawn(move || {
                let mut driven = machine.driven(endpoint);
                for _ in 0..100 {
                    driven.probe();
                    driven.set_ring(0, bar2_of(1 - endpoint), 1 << 20);
                    driven.write64(0, reg::DMA_BELL, bar0_of(1 - endpoint) + reg::DOORBELL_PAGE);
                    driven.start_copy(0, bar2_of(1 - endpoint), 1 << 20, reg::FLAG_SOURCE_OWN | reg::FLAG_BELL);
                    driven.read32(0, reg::DMA_RESULT);
                }
            });
        }
        for endpoint in 2..4 {
            // Never touched by a fault: never wrong.
            scope.spawn(move || {
                let mut driven = machine.driven(endpoint);
                let (from, to) = (endpoint as u64 * 4 * MIB, endpoint as u64 * 4 * MIB + MIB);
                driven.set_ring(0, GUEST + from, 4 << 20);
                for round in 0..100 {
                    let sent = machine.fill(from, 100_000, round);
                    assert_eq!(driven.copy(GUEST + from, GUEST + to, 100_000, 0), DONE);
                    assert!(machine.guest_bytes(to, 100_000) == sent);
                    driven.ring(3);
                    assert_eq!(driven.interrupts_now(3), 1);
                }
                assert_eq!((driven.read32(0, reg::LIFE), driven.read64(0, reg::DMA_ERRORS)), (1, 0));
            });
        }
    });
}
