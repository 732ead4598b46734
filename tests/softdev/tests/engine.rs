// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine: what it copies, where it refuses, whom it tells.

mod machine;

use std::{
    os::{fd::AsRawFd, unix::fs::FileExt},
    time::{Duration, Instant},
};

use machine::{CONFIG, DONE, GUEST, MIB, Machine, PAGE, bar0_of, bar2_of, error};
use softdev::registers as reg;

const SOURCE: u64 = GUEST;
const TARGET: u64 = GUEST + 8 * MIB;
const ONE_SECOND: Duration = Duration::from_secs(1);

fn with_rings(machine: &Machine) -> machine::Driven {
    let mut endpoint = machine.driven(0);
    endpoint.set_ring(0, SOURCE, 4 << 20);
    endpoint.set_ring(1, TARGET, 4 << 20);
    endpoint
}

#[test]
fn a_copy_between_two_rings_moves_every_byte_and_no_other() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = with_rings(&machine);
    for (bytes, seed) in [(1, 1), (4, 2), (4097, 3), (65_536, 4), (65_537, 5), (4 << 20, 6)] {
        let sent = machine.fill(0, 4 * MIB, seed);
        machine.guest.write_all_at(&vec![0xaa; 6 << 20], 7 * MIB).unwrap();
        assert_eq!(endpoint.copy(SOURCE, TARGET, bytes, 0), DONE);
        let bytes = bytes as usize;
        let around = machine.guest_bytes(7 * MIB, 6 * MIB);
        let (before, rest) = around.split_at(MIB as usize);
        assert!(rest[..bytes] == sent[..bytes], "{bytes} bytes");
        assert!(before.iter().chain(&rest[bytes..]).all(|&byte| byte == 0xaa), "{bytes} bytes spilled");
    }
    assert_eq!(endpoint.read64(0, reg::DMA_BYTES), 1 + 4 + 4097 + 65_536 + 65_537 + (4 << 20));
    assert_eq!(endpoint.read64(0, reg::DMA_ERRORS), 0);
}

#[test]
fn own_memory_is_source_and_destination_by_offset() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = with_rings(&machine);
    let sent = machine.fill(0, 10_000, 1);
    assert_eq!(endpoint.copy(SOURCE, 0x1234, 10_000, reg::FLAG_DESTINATION_OWN), DONE);
    assert_eq!(endpoint.read::<10_000>(2, 0x1234).to_vec(), sent);
    assert_eq!(endpoint.copy(0x1234, 0x20_0000, 10_000, reg::FLAG_SOURCE_OWN | reg::FLAG_DESTINATION_OWN), DONE);
    assert_eq!(endpoint.copy(0x20_0000, TARGET, 10_000, reg::FLAG_SOURCE_OWN), DONE);
    assert_eq!(machine.guest_bytes(8 * MIB, 10_000), sent);
}

#[test]
fn registers_answer_and_count_while_the_engine_works() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = with_rings(&machine);
    machine.control().ok(&serde_json::json!({"cmd": "slow", "endpoint": 0, "bytes_per_s": 4 << 20}));
    let begin = Instant::now();
    endpoint.start_copy(SOURCE, TARGET, 1 << 20, 0);
    assert!(begin.elapsed() < Duration::from_millis(200), "DMA_START waited");
    assert_eq!(endpoint.read32(0, reg::STATUS), reg::STATUS_READY | reg::STATUS_BUSY);
    assert_eq!(endpoint.read32(0, reg::DMA_RESULT), reg::RESULT_BUSY);
    assert_ne!(endpoint.read16(CONFIG, 0x6a) & 1 << 5, 0, "transactions pending");
    endpoint.ring(2);
    assert_eq!(endpoint.interrupts(2, ONE_SECOND), 1);
    endpoint.start_copy(0, 0, 0, 0);
    assert_eq!(endpoint.finish(), DONE, "a start while busy is ignored");
    let took = begin.elapsed();
    assert!((Duration::from_millis(240)..Duration::from_secs(3)).contains(&took), "1 MiB at 4 MiB/s took {took:?}");
    assert_eq!(endpoint.read16(CONFIG, 0x6a) & 1 << 5, 0);
    assert_eq!(endpoint.read32(0, reg::STATUS), reg::STATUS_READY);
}

#[test]
fn a_stopped_engine_is_idle_within_10_ms() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = with_rings(&machine);
    machine.control().ok(&serde_json::json!({"cmd": "slow", "endpoint": 0, "bytes_per_s": 1}));
    for (register, value) in [(reg::DMA_STOP, 1), (reg::CONTROL, 0)] {
        endpoint.write32(0, reg::CONTROL, reg::CONTROL_ENGINE);
        endpoint.start_copy(SOURCE, TARGET, 1 << 20, reg::FLAG_INTERRUPT);
        assert_eq!(endpoint.read32(0, reg::DMA_RESULT), reg::RESULT_BUSY);
        endpoint.write32(0, register, value);
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(endpoint.read32(0, reg::STATUS), reg::STATUS_READY);
        assert_eq!(endpoint.finish(), error(5));
        assert_eq!(endpoint.interrupts_now(0), 0, "a stopped copy raises nothing");
    }
}

#[test]
fn the_engine_does_not_start_unless_it_is_enabled() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = with_rings(&machine);
    endpoint.write32(0, reg::CONTROL, 0);
    endpoint.start_copy(SOURCE, TARGET, 1, 0);
    assert_eq!(endpoint.read32(0, reg::DMA_RESULT), reg::RESULT_NONE);
}

#[test]
fn each_failure_has_its_code_and_moves_nothing() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = with_rings(&machine);
    machine.guest.write_all_at(&[0xaa; 4096], 8 * MIB).unwrap();
    let own = reg::FLAG_DESTINATION_OWN;
    endpoint.set_ring(2, 0x7_0000_0000, 4096);
    for (source, target, bytes, flags, code, why) in [
        (0x7_0000_0000, TARGET, 4096, 0, 1, "no memory at the source"),
        (SOURCE, reg::BAR2_BYTES - 1, 2, own, 1, "past the end of own memory"),
        (SOURCE, u64::MAX, 2, own, 1, "offset that overflows"),
        (SOURCE + 4 * MIB - 1, TARGET, 2, 0, 2, "source half outside its slot"),
        (SOURCE, TARGET - 1, 2, 0, 2, "target half before its slot"),
        (SOURCE, u64::MAX, 2, 0, 2, "bus address that overflows"),
        (SOURCE, bar2_of(0), 2, 0, 2, "a memory BAR that is in no slot"),
        (SOURCE, TARGET, 0, 0, 3, "no bytes"),
        (SOURCE, TARGET, reg::DMA_MAX_BYTES + 1, 0, 3, "too many bytes"),
        (SOURCE, TARGET - PAGE, 2, reg::FLAG_ARBITRARY, 2, "arbitrary addresses are not allowed by this server"),
    ] {
        assert_eq!(endpoint.copy(source, target, bytes, flags), error(code), "{why}");
    }
    assert_eq!(endpoint.read64(0, reg::DMA_ERRORS), 10);
    endpoint.write16(CONFIG, 0x04, 0x0002);
    assert_eq!(endpoint.copy(SOURCE, TARGET, 4, 0), error(4), "no bus mastering");
    assert_eq!(endpoint.copy(0, 64, 4, reg::FLAG_SOURCE_OWN | own), DONE, "own memory needs no bus");
    endpoint.write16(CONFIG, 0x04, 0x0006);
    endpoint.clear_ring(1);
    assert_eq!(endpoint.copy(SOURCE, TARGET, 4, 0), error(2), "a slot that is not valid any more");
    assert_eq!(machine.guest_bytes(8 * MIB, 4096), [0xaa; 4096]);
}

#[test]
fn arbitrary_addresses_need_the_servers_option() {
    let machine = Machine::start(1, &["--user-dma", "arbitrary"]);
    let mut endpoint = machine.driven(0);
    let sent = machine.fill(0, 100, 1);
    assert_eq!(endpoint.copy(SOURCE, TARGET, 100, 0), error(2));
    assert_eq!(endpoint.copy(SOURCE, TARGET, 100, reg::FLAG_ARBITRARY), DONE);
    assert_eq!(machine.guest_bytes(8 * MIB, 100), sent);
}

#[test]
fn the_end_of_a_copy_raises_its_vector_after_the_data_and_the_result() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = with_rings(&machine);
    endpoint.write32(0, reg::DMA_VECTOR, 7);
    for round in 0..50 {
        let sent = machine.fill(0, MIB, round);
        endpoint.start_copy(SOURCE, TARGET, 1 << 20, reg::FLAG_INTERRUPT);
        assert_eq!(endpoint.interrupts(7, ONE_SECOND), 1);
        assert!(machine.guest_bytes(8 * MIB, MIB) == sent, "the interrupt came before the data");
        assert_eq!(endpoint.read32(0, reg::DMA_RESULT), reg::RESULT_DONE);
    }
    endpoint.start_copy(SOURCE, TARGET, 0, reg::FLAG_INTERRUPT);
    assert_eq!(endpoint.interrupts(7, ONE_SECOND), 1, "a failure is told, too");
    endpoint.write32(0, reg::DMA_VECTOR, 8);
    assert_eq!(endpoint.copy(SOURCE, TARGET, 1, reg::FLAG_INTERRUPT), DONE);
    assert_eq!(endpoint.read64(0, reg::INTERRUPTS), 51);
}

#[test]
fn a_bell_rings_a_peers_doorbell_after_the_data() {
    let machine = Machine::start(2, &[]);
    let mut endpoint = with_rings(&machine);
    let mut peer = machine.driven(1);
    endpoint.write64(0, reg::DMA_BELL, bar0_of(1) + reg::DOORBELL_PAGE + 4 * 3);
    for round in 0..50 {
        let sent = machine.fill(0, MIB, round);
        endpoint.start_copy(SOURCE, TARGET, 1 << 20, reg::FLAG_BELL);
        assert_eq!(peer.interrupts(3, ONE_SECOND), 1);
        assert!(machine.guest_bytes(8 * MIB, MIB) == sent, "the bell rang before the data");
        assert_eq!(endpoint.finish(), DONE);
    }
    assert_eq!((peer.read64(0, reg::DOORBELLS), endpoint.read64(0, reg::DOORBELLS)), (50, 0));
}

#[test]
fn a_bell_in_host_memory_is_a_store_inside_a_ring() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = with_rings(&machine);
    endpoint.write32(0, reg::DMA_BELL_VALUE, 0xfeed_beef);
    endpoint.write64(0, reg::DMA_BELL, TARGET + 64);
    assert_eq!(endpoint.copy(SOURCE, TARGET, 4, reg::FLAG_BELL), DONE);
    assert_eq!(machine.guest_bytes(8 * MIB + 64, 4), 0xfeed_beef_u32.to_le_bytes());
    endpoint.write64(0, reg::DMA_BELL, TARGET - 4);
    assert_eq!(endpoint.copy(SOURCE, TARGET, 4, reg::FLAG_BELL), error(2));
    endpoint.write64(0, reg::DMA_BELL, bar0_of(1) + reg::DOORBELL_PAGE);
    assert_eq!(endpoint.copy(SOURCE, TARGET, 4, reg::FLAG_BELL), error(2), "no endpoint has that doorbell");
}

#[test]
fn a_peers_memory_is_reached_by_its_bus_address() {
    let machine = Machine::start(2, &[]);
    let mut endpoint = with_rings(&machine);
    let mut peer = machine.driven(1);
    let sent = machine.fill(0, 100_000, 9);
    endpoint.set_ring(2, bar2_of(1) + 0x1000, 0x10_0000);
    assert_eq!(endpoint.copy(SOURCE, bar2_of(1) + 0x1000, 100_000, 0), DONE);
    assert_eq!(peer.read::<100_000>(2, 0x1000).to_vec(), sent);
    assert_eq!(endpoint.copy(bar2_of(1) + 0x1000, TARGET, 100_000, 0), DONE);
    assert_eq!(machine.guest_bytes(8 * MIB, 100_000), sent);
    peer.write16(CONFIG, 0x04, 0);
    assert_eq!(endpoint.copy(SOURCE, bar2_of(1) + 0x1000, 4, 0), error(1), "a BAR that does not answer");
}

#[test]
fn thousands_of_single_page_maps_make_one_contiguous_range() {
    let machine = Machine::start(1, &[]);
    let mut endpoint = machine.connect(0);
    endpoint.probe();
    let (iova, pages) = (0xffff_f000_0000u64, 2048);
    for page in 0..pages {
        endpoint.client.dma_map((pages - 1 - page) * PAGE, iova + page * PAGE, PAGE, machine.guest.as_raw_fd()).unwrap();
    }
    endpoint.set_ring(0, iova, (pages * PAGE) as u32);
    let sent = machine.fill(0, pages * PAGE, 3);
    let half = (pages / 2 * PAGE) as u32;
    assert_eq!(endpoint.copy(iova, iova + u64::from(half), half, 0), DONE);
    for page in 0..pages / 2 {
        let (from, to) = ((pages - 1 - page) * PAGE, (pages / 2 - 1 - page) * PAGE);
        assert!(machine.guest_bytes(to, PAGE) == sent[from as usize..(from + PAGE) as usize], "page {page}");
    }
    endpoint.client.dma_unmap(iova + 5 * PAGE, PAGE).unwrap();
    assert_eq!(endpoint.copy(iova, 0, half, reg::FLAG_DESTINATION_OWN), error(1), "a hole in the range");
}
