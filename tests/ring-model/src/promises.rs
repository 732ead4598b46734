// SPDX-License-Identifier: MIT OR Apache-2.0
//! A writer and a reader that sleep whenever they find nothing to do. A lost wake-up is a deadlock, which the checker reports;
//! so is an access to a payload that is not ordered against the other side's.

use loom::{
    cell::UnsafeCell,
    sync::{Arc, Condvar, Mutex},
    thread,
};

use crate::{
    link::RecordHeader,
    ring::{Memory, Notice, Private, Reader, Stop, Writer},
};

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

fn send(writer: &mut Writer<Private>, shared: &Shared, number: u32, len: usize) {
    while writer.try_reserve(len).unwrap().is_none() {
        writer.arm();
        if !writer.has_news() {
            shared.writer_bell.wait();
        }
        writer.disarm();
    }
    // SAFETY: that nobody else has this place now is what is checked.
    shared.places.0[number as usize % 2].with_mut(|place| unsafe { *place = number });
    if writer.commit(RecordHeader { epoch: number, ..Default::default() }, len) {
        shared.reader_bell.ring();
    }
}

fn receive(reader: &mut Reader<Private>, shared: &Shared, number: u32) {
    let header = loop {
        if let Some((header, _)) = reader.try_receive().unwrap() {
            break header;
        }
        reader.arm();
        if !reader.has_news() {
            shared.reader_bell.wait();
        }
        reader.disarm();
    };
    assert_eq!(header.epoch, number);
    // SAFETY: as in `send`.
    shared.places.0[number as usize % 2].with(|place| assert_eq!(unsafe { *place }, number));
    if reader.release() {
        shared.writer_bell.ring();
    }
}

/// As [`send`], by a mover that writes the header line itself and publishes by the tail alone.
fn send_moved(writer: &mut Writer<Private>, shared: &Shared, number: u32, len: usize) {
    assert!(writer.try_reserve(len).unwrap().is_some(), "there is room for all");
    // SAFETY: as in `send`.
    shared.places.0[number as usize % 2].with_mut(|place| unsafe { *place = number });
    let header = RecordHeader { epoch: number, ..Default::default() };
    let (line, offset) = (writer.header_line(header, len).unwrap(), writer.reserved_offset().unwrap());
    let position = u64::from_le_bytes(line[24..32].try_into().unwrap());
    // SAFETY: the reserved record's header line, of which the checker has the position word.
    unsafe { writer.memory().data().add(offset as usize).cast::<[u8; 24]>().write(line[..24].try_into().unwrap()) };
    writer.memory().position(offset).store(position.to_le(), loom::sync::atomic::Ordering::Relaxed);
    if writer.publish(len) {
        shared.reader_bell.ring();
    }
}

fn model(records: u32, len: usize, send: fn(&mut Writer<Private>, &Shared, u32, usize)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let (w, r) = Private::pair(16 << 10);
        let places = Places([UnsafeCell::new(u32::MAX), UnsafeCell::new(u32::MAX)]);
        let shared = Arc::new(Shared { reader_bell: Bell::default(), writer_bell: Bell::default(), places });
        let theirs = shared.clone();
        let mut reader = Reader::new(r);
        let mut writer = Writer::new(w);
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
    model(3, 8128, send);
}

#[test]
fn what_is_received_was_complete_when_it_was_published() {
    model(2, 100, send);
}

#[test]
fn a_tiny_record_is_complete_when_its_line_is() {
    model(2, 8, send);
}

#[test]
fn what_a_mover_wrote_is_complete_when_the_tail_says_so() {
    model(2, 100, send_moved);
}

#[test]
fn an_abort_wakes_a_sleeping_reader_and_is_seen_before_any_record() {
    loom::model(|| {
        let (w, r) = Private::pair(16 << 10);
        let (mut writer, mut reader) = (Writer::new(w), Reader::new(r));
        let bell = Arc::new(Bell::default());
        let theirs = bell.clone();
        let aborter = thread::spawn(move || {
            writer.post(Notice::Aborted { by: 3 }, "");
            theirs.ring();
        });
        loop {
            match reader.try_receive() {
                Ok(None) => {
                    reader.arm();
                    if !reader.has_news() {
                        bell.wait();
                    }
                    reader.disarm();
                }
                Ok(Some(_)) => unreachable!("nothing was sent"),
                Err(stop) => {
                    assert_eq!(stop, Stop::Notice(Notice::Aborted { by: 3 }));
                    break;
                }
            }
        }
        aborter.join().unwrap();
    });
}
