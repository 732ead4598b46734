// SPDX-License-Identifier: MIT OR Apache-2.0
//! Promises of the ring protocol, checked against a queue over arbitrary sequences, and against arbitrary peers.

use std::{collections::VecDeque, ptr::NonNull, sync::atomic::Ordering};

use pcieipc::{
    link::RecordHeader,
    ring::{IndexPage, Memory, Private, Reader, Writer},
};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Send {
        len: usize,
        shorten: usize,
    },
    Receive,
    Peek,
    /// The writer hears of what the reader gave back.
    Hear,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0usize..8128, 0usize..3).prop_map(|(len, shorten)| Step::Send { len, shorten }),
        2 => (0usize..200).prop_map(|len| Step::Send { len, shorten: 0 }),
        4 => Just(Step::Receive),
        1 => Just(Step::Peek),
        2 => Just(Step::Hear),
    ];
    prop::collection::vec(step, 1..400)
}

fn byte(number: u32, at: usize) -> u8 {
    (number as usize).wrapping_mul(31).wrapping_add(at.wrapping_mul(7)) as u8
}

fn header(number: u32) -> RecordHeader {
    RecordHeader { epoch: number, step: number as u16, shard: !(number as u16), call: !number, crc: number ^ 0x5555 }
}

fn bytes(payload: &pcieipc::link::Shared<'_>) -> Vec<u8> {
    // SAFETY: nobody writes the record while these single-threaded tests read it.
    unsafe { std::slice::from_raw_parts(payload.as_ptr(), payload.len()) }.to_vec()
}

proptest! {
    /// From any starting index, the wrap of 64 bits included, a ring with its slots is a queue.
    #[test]
    fn records_arrive_complete_and_in_order(steps in steps(), lines_before_wrap in 0u64..600) {
        let (w, r) = Private::pair(16 << 10);
        let start = 0u64.wrapping_sub(lines_before_wrap * 64);
        let (mut writer, mut reader) = (Writer::starting_at(w, start), Reader::starting_at(r, start));
        let mut queue = VecDeque::new();
        let mut number = 0u32;
        for step in steps {
            match step {
                Step::Send { len, shorten } => {
                    let Some(mut payload) = writer.try_reserve(len).unwrap() else {
                        prop_assert!(!queue.is_empty(), "a record that may be sent fits into an empty ring");
                        continue;
                    };
                    prop_assert_eq!(payload.len(), len);
                    let payload_at = payload.as_mut_ptr() as usize % 64;
                    for at in 0..len {
                        // SAFETY: inside the reserved payload.
                        unsafe { payload.as_mut_ptr().add(at).write(byte(number, at)) };
                    }
                    let within_its_line = match writer.reserved_offset() {
                        Some(_) if len <= 32 => 32,
                        None if len <= 24 => 40,
                        _ => 0,
                    };
                    prop_assert_eq!(payload_at, within_its_line);
                    let len = len - shorten.min(len);
                    prop_assert!(!writer.commit(header(number), len), "nobody sleeps");
                    queue.push_back((number, len));
                    number += 1;
                }
                Step::Hear => writer.hear(reader.given_back()).unwrap(),
                Step::Receive | Step::Peek => {
                    let got = reader.try_receive().unwrap();
                    match (got, queue.front()) {
                        (None, None) => {}
                        (Some((h, payload)), Some(&(number, len))) => {
                            prop_assert_eq!(h, header(number));
                            prop_assert_eq!(payload.as_ptr() as usize % 8, 0);
                            prop_assert_eq!(bytes(&payload), (0..len).map(|at| byte(number, at)).collect::<Vec<_>>());
                            if matches!(step, Step::Receive) {
                                prop_assert!(!reader.release(), "nobody sleeps");
                                queue.pop_front();
                            }
                        }
                        (got, want) => prop_assert!(false, "got {got:?}, want {want:?}"),
                    }
                }
            }
        }
    }

    /// Whatever a writer puts into its memory, the reader answers with a record inside the data area or an error; it never
    /// reads outside and never runs on.
    #[test]
    fn a_reader_survives_any_writer(
        tails in prop::collection::vec(tail(), 1..20),
        lines in prop::collection::vec(line(), 1..40),
        slots in prop::collection::vec(slot(), 20),
    ) {
        let (w, r) = Private::pair(16 << 10);
        let evil = w.clone();
        let mut reader = Reader::new(r);
        for (i, words) in lines.iter().enumerate() {
            for (j, word) in words.iter().enumerate() {
                let at = (i * 64 + j * 8) % evil.data_bytes();
                // SAFETY: inside the data area, single-threaded.
                unsafe { evil.data().add(at).cast::<u64>().write(*word) };
            }
        }
        let (from, to) = (evil.data().as_ptr() as usize, evil.data().as_ptr() as usize + evil.data_bytes());
        for (tail, slot) in tails.into_iter().zip(slots.chunks(2).cycle()) {
            raw_index(evil.tail()).store(tail, Ordering::Release);
            for (place, words) in slot.iter().enumerate() {
                for (at, word) in words.iter().enumerate() {
                    raw_word(evil.tail(), SLOT_AT[place] + at * 8).store(*word, Ordering::Release);
                }
            }
            for _ in 0..4 {
                match reader.try_receive() {
                    Ok(Some((_, payload))) => {
                        let start = payload.as_ptr() as usize;
                        prop_assert!(start >= from && start + payload.len() <= to || is_in_a_slot(evil.tail(), start, payload.len()));
                        let _ = reader.release();
                    }
                    Ok(None) => break,
                    Err(_) => break,
                }
            }
        }
    }

    /// Whatever a reader puts into its page, the writer hands out room inside the data area or an error.
    #[test]
    fn a_writer_survives_any_reader(
        heads in prop::collection::vec((tail(), given_back(), given_back()), 1..40),
        len in prop_oneof![0usize..8128, 0usize..2000],
    ) {
        let (w, r) = Private::pair(16 << 10);
        let mut writer = Writer::new(w);
        let (from, to) = (r.data().as_ptr() as usize, r.data().as_ptr() as usize + r.data_bytes());
        for (head, records, heard) in heads {
            if let Ok(Some(mut payload)) = writer.try_reserve(len) {
                let start = payload.as_mut_ptr() as usize;
                prop_assert!(start >= from && start + payload.len() <= to || is_in_a_slot(r.tail(), start, payload.len()));
                let _ = writer.commit(header(1), len);
            }
            raw_index(r.head()).store(head, Ordering::Release);
            raw_word(r.head(), 8).store(records, Ordering::Release);
            let _ = writer.hear(heard);
        }
    }
}

/// An index as a broken peer might write it: often plausible, sometimes anything.
fn tail() -> impl Strategy<Value = u64> {
    prop_oneof![4 => (0u64..600).prop_map(|l| l * 64), 1 => any::<u64>(), 1 => 0u64..40_000]
}

/// A header line as a broken peer might write it.
fn line() -> impl Strategy<Value = [u64; 4]> {
    let kind = prop_oneof![4 => Just(0x5049_5043u64), 2 => Just(0x5049_5053u64), 1 => any::<u32>().prop_map(u64::from)];
    let len = prop_oneof![4 => 0u64..200, 2 => (0u64..256).prop_map(|l| l * 64), 1 => any::<u32>().prop_map(u64::from)];
    let position = prop_oneof![8 => (0u64..300).prop_map(|l| l * 64), 1 => any::<u64>()];
    (kind, len, position).prop_map(|(kind, len, position)| [kind | len << 32, 0, 0, position])
}

/// Where the slots of a page are.
const SLOT_AT: [usize; 2] = [384, 384 + 1856];

/// Records given back, as a broken peer might say it.
fn given_back() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0u64..40, 1 => any::<u64>()]
}

/// A slot's header as a broken peer might write it.
fn slot() -> impl Strategy<Value = [u64; 5]> {
    let kind = prop_oneof![4 => Just(0x5049_504cu64), 2 => Just(0x5049_504du64), 1 => any::<u32>().prop_map(u64::from)];
    let len = prop_oneof![4 => 0u64..200, 2 => 1780u64..1800, 1 => any::<u32>().prop_map(u64::from)];
    let number = prop_oneof![8 => 0u64..8, 1 => any::<u64>()];
    (kind, len, number, given_back()).prop_map(|(kind, len, number, heard)| [kind | len << 32, 0, 0, number, heard])
}

/// Whether bytes lie in the payload of one of a page's slots.
fn is_in_a_slot(page: &IndexPage, start: usize, len: usize) -> bool {
    let page = NonNull::from(page).as_ptr() as usize;
    SLOT_AT.iter().any(|at| start >= page + at + 40 && start + len <= page + at + 1856)
}

/// A word of a page that belongs to somebody else.
fn raw_word(page: &IndexPage, at: usize) -> &std::sync::atomic::AtomicU64 {
    // SAFETY: a page is 4096 bytes of atomics, and `at` is a multiple of 8 below that.
    unsafe { NonNull::from(page).cast::<u8>().add(at).cast().as_ref() }
}

/// The index of a page that belongs to somebody else, as a hostile process reaches it.
fn raw_index(page: &IndexPage) -> &std::sync::atomic::AtomicU64 {
    // SAFETY: the index is the page's first field (its layout is documented), and atomic.
    unsafe { NonNull::from(page).cast().as_ref() }
}

/// What an old payload may look like at worst: in each of its lines a record that is complete, a lap of the ring later.
#[test]
fn an_old_payload_that_looks_like_the_next_record_is_never_taken_for_it() {
    let (w, r) = Private::pair(16 << 10);
    let capacity = w.data_bytes() as u64;
    let (mut writer, mut reader) = (Writer::new(w), Reader::new(r));
    writer.without_slots();
    let data = writer.memory().data().as_ptr() as usize;
    let (mut sent, mut received) = (0u32, 0u32);
    let mut lengths = (0..).map(|i: usize| [1000, 64, 7000, 8, 320, 4096, 0][i % 7] + 64 * (i / 7 % 5));
    let mut len = lengths.next().unwrap();
    for _ in 0..200 {
        // Until it is full, so that the writer can not clear the next header's place either.
        while let Some(mut room) = writer.try_reserve(len).unwrap() {
            let start = room.as_mut_ptr() as usize - data;
            for at in (0..len / 64 * 64).step_by(64) {
                let place = (start + at) as u64;
                for lap in 0..8 {
                    // Each word of the line in another lap, so that some are near.
                    let forged = if lap == 0 { 0x5049_5043 } else { (place + capacity * (u64::from(sent) / 10 + lap)) | 3 };
                    // SAFETY: inside the reserved payload, aligned.
                    unsafe { room.as_mut_ptr().add(at + lap as usize * 8).cast::<u64>().write(forged.to_le()) };
                }
            }
            assert!(!writer.commit(header(sent), len));
            sent += 1;
            len = lengths.next().unwrap();
        }
        while received < sent {
            assert_eq!(reader.try_receive().unwrap().expect("it was sent").0, header(received));
            assert!(!reader.release());
            received += 1;
        }
        for _ in 0..100 {
            assert!(reader.try_receive().unwrap().is_none(), "nothing was sent");
        }
    }
}

/// A mover publishes by the tail alone, and may do so after records that told of themselves.
#[test]
fn records_that_tell_of_themselves_and_others_arrive_in_order() {
    let (w, r) = Private::pair(16 << 10);
    let (mut writer, mut reader) = (Writer::new(w), Reader::new(r));
    writer.keep_apart();
    for number in 0..500 {
        writer.try_reserve(100).unwrap().expect("all before were given back");
        if number % 3 == 0 {
            let line = writer.header_line(header(number), 100).unwrap();
            let at = writer.reserved_offset().unwrap() as usize;
            // SAFETY: the header line of the reserved record.
            unsafe { writer.memory().data().add(at).cast::<[u8; 64]>().write(line) };
            assert!(!writer.publish(100));
        } else {
            assert!(!writer.commit(header(number), 100));
        }
        // Who sees no record in the header looks at the tail now and then.
        let found = (0..64).find_map(|_| reader.try_receive().unwrap().map(|(h, _)| h));
        assert_eq!(found, Some(header(number)));
        assert!(!reader.release());
    }
}

/// Between two that answer each other, each record says what was given back, so all of them lie in slots, whatever else went before;
/// without an answer they soon go through the ring, and come in order all the same.
#[test]
fn short_records_that_are_answered_lie_in_slots() {
    let ((a, b), (c, d)) = (Private::pair(16 << 10), Private::pair(16 << 10));
    let (mut there, mut at_the_other) = (Writer::new(a), Reader::new(b));
    let (mut back, mut here) = (Writer::new(c), Reader::new(d));
    fn exchange(
        writer: &mut Writer<Private>,
        hears: &Reader<Private>,
        reader: &mut Reader<Private>,
        number: u32,
        len: usize,
    ) -> bool {
        writer.hear(hears.heard()).unwrap();
        writer.acknowledge(hears.given_back());
        writer.try_reserve(len).unwrap().unwrap();
        assert!(writer.commit_only(header(number), len));
        assert_eq!(reader.try_receive().unwrap().unwrap().0, header(number));
        let _ = reader.release();
        reader.is_by_slot()
    }
    // One way only: some find the slots given back when they look, but most do not know it.
    let by_slot = (0..160).filter(|number| exchange(&mut there, &here, &mut at_the_other, *number, 100)).count();
    assert!((4..80).contains(&by_slot), "{by_slot}");
    // Long ones between.
    for number in 160..200 {
        assert!(!exchange(&mut there, &here, &mut at_the_other, number, 4000));
    }
    let mut by_slot = [0; 2];
    for number in 0..100 {
        by_slot[0] += usize::from(exchange(&mut there, &here, &mut at_the_other, 200 + number, 1792));
        by_slot[1] += usize::from(exchange(&mut back, &at_the_other, &mut here, number, 1792));
    }
    assert!(by_slot[0] >= 100 - 16 && by_slot[1] == 100, "{by_slot:?}");
}
