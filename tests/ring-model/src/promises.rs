// SPDX-License-Identifier: MIT OR Apache-2.0
//! A writer and a reader that sleep whenever they find nothing to do. A lost wake-up is a deadlock, which the checker reports;
//! so is an access to a payload that is not ordered against the other side's.

use loom::{
    cell::UnsafeCell,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use crate::{
    link::RecordHeader,
    ring::{Memory, Notice, Private, Reader, Stop, Writer, full_fence},
};

/// Where the 64 bits of the indices wrap after one line, and after half of the ring.
const LAST_LINE: u64 = 0u64.wrapping_sub(64);
const LAST_HALF: u64 = 0u64.wrapping_sub(8192);

/// An eventfd: remembers a ring until it is waited for.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    news: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.news.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.news.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// Two places of payload that the checker watches, beside the ring's own memory that it does not see.
struct Places([UnsafeCell<u32>; 2]);

// SAFETY: that accesses are ordered is what is checked.
unsafe impl Sync for Places {}
// SAFETY: as above.
unsafe impl Send for Places {}

struct Shared {
    reader_bell: Bell,
    writer_bell: Bell,
    places: Places,
}

/// Room for a record, for which the writer sleeps as `sleep` in transport/links.rs does: who has said so looks again by the same call as before, and
/// waits only if that finds nothing.
fn reserve(writer: &mut Writer<Private>, shared: &Shared, len: usize) {
    while writer.try_reserve(len).unwrap().is_none() {
        writer.arm();
        let again = writer.try_reserve(len).unwrap().is_some(); // second look for room
        if !again {
            shared.writer_bell.wait();
        }
        writer.disarm();
        if again {
            return;
        }
    }
}

/// The next record, for which the reader sleeps in the same way.
fn next(reader: &mut Reader<Private>, shared: &Shared) -> RecordHeader {
    loop {
        if let Some((header, _)) = reader.try_receive().unwrap() {
            return header;
        }
        reader.arm();
        let again = reader.try_receive().unwrap().is_some(); // second look for a record
        if !again {
            shared.reader_bell.wait();
        }
        reader.disarm();
    }
}

/// Room for a record and its payload.
fn fill(writer: &mut Writer<Private>, shared: &Shared, number: u32, len: usize) {
    reserve(writer, shared, len);
    // SAFETY: that nobody else has this place now is what is checked.
    shared.places.0[number as usize % 2].with_mut(|place| unsafe { *place = number });
}

fn header(number: u32) -> RecordHeader {
    RecordHeader { epoch: number, ..Default::default() }
}

fn send(writer: &mut Writer<Private>, shared: &Shared, number: u32, len: usize) {
    fill(writer, shared, number, len);
    if writer.commit(header(number), len) {
        shared.reader_bell.ring();
    }
}

fn receive(reader: &mut Reader<Private>, shared: &Shared, number: u32) {
    let header = next(reader, shared);
    assert_eq!(header.epoch, number);
    // SAFETY: as in `send`.
    shared.places.0[number as usize % 2].with(|place| assert_eq!(unsafe { *place }, number));
    if reader.release() {
        shared.writer_bell.ring();
    }
}

/// As [`send`], by a mover that writes the header line itself and publishes by the tail alone.
fn send_moved(writer: &mut Writer<Private>, shared: &Shared, number: u32, len: usize) {
    fill(writer, shared, number, len);
    store_line(writer, number, len, 0);
    if writer.publish(len) {
        shared.reader_bell.ring();
    }
}

/// As [`send`], of short records that are followed by one fence for all, as a rank that sends to several makes it before it waits: after the
/// second of them.
fn send_short(writer: &mut Writer<Private>, shared: &Shared, number: u32, len: usize) {
    fill(writer, shared, number, len);
    assert!(writer.commit_only(header(number), len));
    if number % 2 == 1 {
        full_fence(); // of all short records
        if writer.must_ring() {
            shared.reader_bell.ring();
        }
    }
}

/// The header line of the reserved record, with these flags in its position word.
fn store_line(writer: &Writer<Private>, number: u32, len: usize, flags: u64) {
    let (line, offset) = (writer.header_line(header(number), len).unwrap(), writer.reserved_offset().unwrap());
    let position = u64::from_le_bytes(line[24..32].try_into().unwrap());
    // SAFETY: the reserved record's header line, of which the checker has the position word.
    unsafe { writer.memory().data().add(offset as usize).cast::<[u8; 24]>().write(line[..24].try_into().unwrap()) };
    writer.memory().position(offset).store((position | flags).to_le(), Ordering::Release);
}

fn shared() -> Arc<Shared> {
    let places = Places([UnsafeCell::new(u32::MAX), UnsafeCell::new(u32::MAX)]);
    Arc::new(Shared { reader_bell: Bell::default(), writer_bell: Bell::default(), places })
}

/// Without slots: all that is sent goes through the ring.
fn pair(start: u64) -> (Writer<Private>, Reader<Private>) {
    let (w, r) = Private::pair(16 << 10);
    let mut writer = Writer::starting_at(w, start);
    writer.without_slots();
    (writer, Reader::starting_at(r, start))
}

/// With slots.
fn whole_pair(start: u64) -> (Writer<Private>, Reader<Private>) {
    let (w, r) = Private::pair(16 << 10);
    (Writer::starting_at(w, start), Reader::starting_at(r, start))
}

/// Either of them: what holds of records in the ring and of those in slots alike.
type Make = fn(u64) -> (Writer<Private>, Reader<Private>);

fn check(promise: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(promise);
}

fn model(records: u32, len: usize, start: u64, send: fn(&mut Writer<Private>, &Shared, u32, usize)) {
    model_on(records, len, start, |_| {}, send);
}

fn model_on(
    records: u32,
    len: usize,
    start: u64,
    before: fn(&Writer<Private>),
    send: fn(&mut Writer<Private>, &Shared, u32, usize),
) {
    check(move || {
        let shared = shared();
        let theirs = shared.clone();
        let (mut writer, mut reader) = pair(start);
        before(&writer);
        let sender = thread::spawn(move || {
            for number in 0..records {
                send(&mut writer, &theirs, number, len);
            }
        });
        for number in 0..records {
            receive(&mut reader, &shared, number);
        }
        sender.join().unwrap();
    });
}

/// Half of the ring each, so that the third record needs the room of the first.
#[test]
fn no_wake_up_is_lost_and_no_room_is_used_before_it_was_given_back() {
    model(3, 8128, 0, send);
}

#[test]
fn what_is_received_was_complete_when_it_was_published() {
    model(2, 100, 0, send);
}

#[test]
fn a_tiny_record_is_complete_when_its_line_is() {
    model(2, 8, 0, send);
}

#[test]
fn what_a_mover_wrote_is_complete_when_the_tail_says_so() {
    model(2, 100, 0, send_moved);
}

/// The second record begins where the indices start again, and the third needs the room of the first.
#[test]
fn all_that_holds_where_the_indices_wrap() {
    model(3, 8128, LAST_HALF, send);
}

/// One line is left before the data area and the indices wrap, so that the first record comes after a skip.
#[test]
fn a_record_behind_a_skip_is_complete_when_its_line_is() {
    model(2, 100, LAST_LINE, send);
}

/// Four lines are left, so that the skip comes second, when the reader believes what lies where it looks. At the start of the data area, which nobody
/// cleared, lies an old payload that looks like the record there.
#[test]
fn what_lies_behind_a_skip_that_is_believed_is_the_record_that_was_stored_before_it() {
    model_on(2, 100, 0u64.wrapping_sub(256), |writer| writer.memory().position(0).store(3, Ordering::Relaxed), send);
}

#[test]
fn a_record_that_a_mover_put_behind_a_skip_is_complete_when_the_tail_says_so() {
    model(2, 100, LAST_LINE, send_moved);
}

#[test]
fn one_fence_after_several_short_records_loses_no_wake_up() {
    model(2, 8, 0, send_short);
}

/// What is between two looks of [`receive`]'s kind, for readers that may find that nothing comes any more.
fn look(reader: &mut Reader<Private>, shared: &Shared, mut got: impl FnMut(u32)) -> bool {
    match reader.try_receive().unwrap() {
        Some((header, _)) => {
            let number = header.epoch;
            // SAFETY: as in `send`.
            shared.places.0[number as usize % 2].with(|place| assert_eq!(unsafe { *place }, number));
            got(number);
            if reader.release() {
                shared.writer_bell.ring();
            }
            true
        }
        None => false,
    }
}

/// A writer that ends while it sends its second record: `step` is how far it comes. Whoever watches over processes rings once it is gone.
fn dying_writer(step: usize, make: Make) {
    check(move || {
        let shared = shared();
        let theirs = shared.clone();
        let (mut writer, mut reader) = make(0);
        let gone = Arc::new(AtomicBool::new(false));
        let its_end = gone.clone();
        let sender = thread::spawn(move || {
            send(&mut writer, &theirs, 0, 100);
            if step > 0 {
                fill(&mut writer, &theirs, 1, 100);
            }
            if step > 1 && writer.reserved_offset().is_some() {
                // The position word tells that it is complete; the tail was not stored any more.
                store_line(&writer, 1, 100, 1);
            } else if step > 1 {
                // In a slot that is all of it, but for the reader's bell.
                assert!(writer.commit_only(header(1), 100));
            }
            its_end.store(true, Ordering::Release);
            theirs.reader_bell.ring();
        });
        let mut received = Vec::new();
        loop {
            let ended = gone.load(Ordering::Acquire);
            if look(&mut reader, &shared, |number| received.push(number)) {
                continue;
            }
            if ended {
                break;
            }
            reader.arm();
            if reader.try_receive().unwrap().is_none() && !gone.load(Ordering::Acquire) {
                shared.reader_bell.wait();
            }
            reader.disarm();
        }
        sender.join().unwrap();
        // Whole records, and all that were complete.
        let complete: &[u32] = if step > 1 { &[0, 1] } else { &[0] };
        assert_eq!(received, complete);
    });
}

#[test]
fn of_a_writer_that_dies_between_two_records_the_first_is_received() {
    dying_writer(0, pair);
}

#[test]
fn of_a_writer_that_dies_in_a_payload_nothing_of_it_is_received() {
    dying_writer(1, pair);
}

#[test]
fn of_a_writer_that_dies_before_it_stores_the_tail_the_complete_record_is_received() {
    dying_writer(2, pair);
}

#[test]
fn of_a_writer_that_dies_between_two_records_in_slots_the_first_is_received() {
    dying_writer(0, whole_pair);
}

#[test]
fn of_a_writer_that_dies_in_a_payload_in_a_slot_nothing_of_it_is_received() {
    dying_writer(1, whole_pair);
}

#[test]
fn of_a_writer_that_dies_before_it_rings_the_record_in_the_slot_is_received() {
    dying_writer(2, whole_pair);
}

fn leaving_writer(make: Make) {
    check(move || {
        let shared = shared();
        let theirs = shared.clone();
        let (mut writer, mut reader) = make(0);
        let sender = thread::spawn(move || {
            // Short, so that no fence lies between; the first record of a ring is told of by the tail alone.
            fill(&mut writer, &theirs, 0, 8);
            assert!(writer.commit_only(header(0), 8));
            writer.post(Notice::Closed, "");
            theirs.reader_bell.ring();
        });
        let mut received = 0;
        loop {
            if look(&mut reader, &shared, |_| received += 1) {
                continue;
            }
            if reader.is_closed() {
                break;
            }
            reader.arm();
            if reader.try_receive().unwrap().is_none() && !reader.is_closed() {
                shared.reader_bell.wait();
            }
            reader.disarm();
        }
        assert_eq!(received, 1);
        sender.join().unwrap();
    });
}

#[test]
fn what_was_written_before_the_writer_left_is_received_before_its_leaving_is_believed() {
    leaving_writer(pair);
}

#[test]
fn what_was_in_a_slot_before_the_writer_left_is_received_before_its_leaving_is_believed() {
    leaving_writer(whole_pair);
}

#[test]
fn what_the_reader_gave_back_before_it_left_is_seen_with_its_leaving() {
    check(|| {
        let shared = shared();
        let theirs = shared.clone();
        let (mut writer, mut reader) = pair(0);
        let receiver = thread::spawn(move || {
            receive(&mut reader, &theirs, 0);
            reader.post(Notice::Closed, "");
            theirs.writer_bell.ring();
        });
        send(&mut writer, &shared, 0, 100);
        loop {
            writer.try_reserve(8).unwrap();
            if writer.is_closed() {
                break;
            }
            let _ = writer.is_drained();
            writer.arm();
            writer.try_reserve(8).unwrap();
            if !writer.is_closed() {
                shared.writer_bell.wait();
            }
            writer.disarm();
        }
        assert_eq!(writer.is_drained(), Ok(true));
        receiver.join().unwrap();
    });
}

/// Each life of a group has rings of its own; what is left of the one before can still store to its own ring and ring the reader's bell.
#[test]
fn a_writer_of_the_life_before_that_goes_on_neither_reaches_the_new_ring_nor_takes_its_wake_up() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(|| {
        let shared = shared();
        let (theirs, old) = (shared.clone(), shared.clone());
        let (mut before, mut reader_before) = pair(0);
        // It sleeps as the old life ends.
        reader_before.arm();
        let late = thread::spawn(move || {
            assert!(before.try_reserve(8).unwrap().is_some());
            if before.commit(header(7), 8) {
                old.reader_bell.ring();
            }
        });
        let (mut writer, mut reader) = pair(0);
        let sender = thread::spawn(move || send(&mut writer, &theirs, 0, 8));
        receive(&mut reader, &shared, 0);
        sender.join().unwrap();
        late.join().unwrap();
    });
}

/// A writer that sends so many records and then aborts, to a reader that may have got them and must learn of the abort.
fn aborting_writer(records: u32, make: Make) {
    check(move || {
        let shared = shared();
        let theirs = shared.clone();
        let (mut writer, mut reader) = make(0);
        let aborter = thread::spawn(move || {
            for number in 0..records {
                fill(&mut writer, &theirs, number, 8);
                assert!(writer.commit_only(header(number), 8));
            }
            writer.post(Notice::Aborted { by: 3 }, "");
            theirs.reader_bell.ring();
        });
        let mut received = 0;
        let mut take =
            |reader: &mut Reader<Private>| match reader.try_receive().map(|record| record.map(|(header, _)| header.epoch)) {
                Ok(Some(number)) => {
                    assert_eq!(number, received);
                    // SAFETY: as in `send`.
                    shared.places.0[number as usize % 2].with(|place| assert_eq!(unsafe { *place }, number));
                    received += 1;
                    assert!(!reader.release(), "the writer does not sleep");
                    Ok(true)
                }
                Ok(None) => Ok(false),
                Err(stop) => Err(stop),
            };
        let stop = loop {
            match take(&mut reader) {
                Ok(true) => continue,
                Ok(false) => {}
                Err(stop) => break stop,
            }
            reader.arm();
            let again = take(&mut reader);
            if again == Ok(false) {
                shared.reader_bell.wait();
            }
            reader.disarm();
            if let Err(stop) = again {
                break stop;
            }
        };
        assert_eq!(stop, Stop::Notice(Notice::Aborted { by: 3 }));
        assert!(received <= records);
        aborter.join().unwrap();
    });
}

#[test]
fn an_abort_wakes_a_sleeping_reader() {
    aborting_writer(0, whole_pair);
}

#[test]
fn an_abort_behind_records_in_the_ring_wakes_a_sleeping_reader() {
    aborting_writer(2, pair);
}

#[test]
fn an_abort_behind_records_in_slots_wakes_a_sleeping_reader() {
    aborting_writer(2, whole_pair);
}

/// Sends a record that lies in a slot if one is free, and else in the ring, for room in which it sleeps; only a slot's payload is watched.
fn send_by_slot(writer: &mut Writer<Private>, shared: &Shared, number: u32, len: usize) {
    reserve(writer, shared, len);
    if writer.reserved_offset().is_none() {
        // SAFETY: that nobody else has this slot now is what is checked.
        shared.places.0[number as usize % 2].with_mut(|place| unsafe { *place = number });
    }
    assert!(writer.commit_only(header(number), len));
    full_fence(); // of a record in a slot
    if writer.must_ring() {
        shared.reader_bell.ring();
    }
}

fn receive_by_slot(reader: &mut Reader<Private>, shared: &Shared, number: u32) {
    let header = next(reader, shared);
    assert_eq!(header.epoch, number);
    if reader.is_by_slot() {
        // SAFETY: as in `send_by_slot`.
        shared.places.0[number as usize % 2].with(|place| assert_eq!(unsafe { *place }, number));
    }
    if reader.release() {
        shared.writer_bell.ring();
    }
}

/// The lengths of records that are sent one after the other, to a reader that sleeps whenever it finds none.
fn by_slots(start: u64, lengths: &'static [usize]) {
    check(move || {
        let shared = shared();
        let theirs = shared.clone();
        let (mut writer, mut reader) = whole_pair(start);
        let sender = thread::spawn(move || {
            for (number, len) in lengths.iter().enumerate() {
                send_by_slot(&mut writer, &theirs, number as u32, *len);
            }
        });
        for number in 0..lengths.len() as u32 {
            receive_by_slot(&mut reader, &shared, number);
        }
        sender.join().unwrap();
    });
}

#[test]
fn a_record_in_a_slot_is_complete_when_its_position_is() {
    by_slots(0, &[100, 8]);
}

#[test]
fn a_record_in_a_slot_comes_before_the_one_in_the_ring_that_was_sent_later() {
    by_slots(0, &[100, 4000]);
}

#[test]
fn a_record_in_the_ring_comes_before_the_one_in_a_slot_that_was_sent_later() {
    by_slots(0, &[4000, 100]);
}

/// The third record takes the first one's slot if the reader's page says that it was given back, and else goes through the ring.
#[test]
fn a_slot_is_used_again_only_when_the_readers_page_says_that_it_was_given_back() {
    by_slots(0, &[100, 100, 100]);
}

/// The ring has one line before its end, so the second record lies behind a skip, which the reader may pass before it has seen the first.
#[test]
fn a_record_in_a_slot_comes_before_the_one_behind_a_skip_that_was_sent_later() {
    by_slots(LAST_LINE, &[100, 4000]);
}

#[test]
fn a_record_behind_a_skip_comes_before_the_one_in_a_slot_that_was_sent_later() {
    by_slots(LAST_LINE, &[4000, 100]);
}

/// The third record has a slot if the first one is known to be given back, and else needs room in the ring, for which its writer sleeps.
#[test]
fn a_short_record_waits_for_room_in_a_full_ring_where_no_slot_is_free() {
    by_slots(0, &[8128, 8128, 100]);
}

/// Two sides that send to each other, call by call, and tell each other with each record what they gave back: the third record of
/// both takes the first one's slot without a look at a page.
#[test]
fn a_slot_is_used_again_only_when_a_record_of_the_other_direction_says_that_it_was_given_back() {
    fn side(writer: &mut Writer<Private>, reader: &mut Reader<Private>, to: &Shared, from: &Shared) {
        for number in 0..3 {
            writer.hear(reader.heard()).unwrap();
            writer.acknowledge(reader.given_back());
            send_by_slot(writer, to, number, 100);
            receive_by_slot(reader, from, number);
            assert!(reader.is_by_slot());
        }
    }
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(|| {
        let (there, back) = (shared(), shared());
        let (theirs, ours) = (there.clone(), back.clone());
        let ((mut a, mut b), (mut c, mut d)) = (whole_pair(0), whole_pair(0));
        let other = thread::spawn(move || side(&mut c, &mut b, &ours, &theirs));
        side(&mut a, &mut d, &there, &back);
        other.join().unwrap();
    });
}
