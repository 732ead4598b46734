// SPDX-License-Identifier: MIT OR Apache-2.0
//! The side that reads records.

use std::ptr::NonNull;

use super::{
    LINE, Memory, Notice, Stop, Violation,
    record::{self, COMPLETE, Entry, NEXT_CLEARED},
    slot,
    sync::Ordering,
};
use crate::link::{RecordHeader, Shared};

/// Of so many looks for a record, one is at the tail too.
const LOOKS_AT_TAIL: u32 = 64;

/// Whether one index is later than another that is at most a ring away.
fn is_after(a: u64, b: u64) -> bool {
    (a.wrapping_sub(b) as i64) > 0
}

/// The one reader of a ring and of the slots beside it.
#[derive(Debug)]
pub struct Reader<M: Memory> {
    memory: M,
    capacity: u64,
    /// Where the oldest record that was not given back starts: the truth, of which the head page has a copy for the writer.
    head: u64,
    /// Up to where records are known to be there.
    tail: u64,
    /// The writer's index as last seen and checked; behind `tail` when a record was seen before it.
    seen: u64,
    /// Whether the position word at `head` can tell that a record is there: the record before it said that it was cleared.
    believes: bool,
    /// Looks at the position word in vain.
    looks: u32,
    /// About to sleep.
    armed: bool,
    /// The record at `head`, read once and checked.
    current: Option<Current>,
    /// Records that were given back, of which the head page has a copy too; the number of the next one.
    number: u64,
    /// Whether the last record was in a slot, where the next one is looked for first then.
    by_slot: bool,
    /// How many lines the last record in a slot had: the next is like it most often.
    lines: usize,
    /// What the writer's side said last that it gave back of the ring in the other direction.
    heard: u64,
    /// The writer's closing was seen, so it is no news any more.
    closed: bool,
    rung: u32,
    sleep: u32,
}

#[derive(Debug, Clone, Copy)]
struct Current {
    header: RecordHeader,
    payload: usize,
    len: usize,
    /// What it takes of the ring; nothing where it is in a slot.
    span: Option<u64>,
}

impl<M: Memory> Reader<M> {
    /// A reader on a ring that it has not read from, both of whose pages started as zero.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// assert!(reader.try_receive()?.is_none());
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn new(memory: M) -> Self {
        Self::starting_at(memory, 0)
    }

    /// A reader whose indices start at `index`, a multiple of 64; see [`super::Writer::starting_at`].
    ///
    /// ```
    /// # use pcieipc::ring::{Private, Reader, Writer};
    /// let (a, b) = Private::pair(1 << 14);
    /// let start = 0u64.wrapping_sub(64); // one line before the indices wrap
    /// let (writer, mut reader) = (Writer::starting_at(a, start), Reader::starting_at(b, start));
    /// assert!(reader.try_receive()?.is_none());
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn starting_at(memory: M, index: u64) -> Self {
        let index = index & !(LINE as u64 - 1);
        let capacity = memory.data_bytes() as u64;
        memory.head().publish(index);
        Self {
            memory,
            capacity,
            head: index,
            tail: index,
            seen: index,
            believes: false,
            looks: 0,
            armed: false,
            current: None,
            number: 0,
            by_slot: false,
            lines: 0,
            heard: 0,
            closed: false,
            rung: 0,
            sleep: 0,
        }
    }

    /// The ring's memory.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// use pcieipc::ring::Memory;
    /// assert_eq!(reader.memory().data_bytes(), 1 << 14);
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The oldest record that was not given back, or `None` when the writer has published nothing more. The same record until
    /// [`Reader::release`].
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.try_reserve(8)?;
    /// let _ = writer.commit(RecordHeader::default(), 8); // true: ring the reader
    /// let (header, payload) = reader.try_receive()?.unwrap();
    /// assert_eq!((header, payload.len()), (RecordHeader::default(), 8));
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    ///
    /// # Errors
    /// What the writer's error word says; an index or a record that is impossible.
    pub fn try_receive(&mut self) -> Result<Option<(RecordHeader, Shared<'_>)>, Stop> {
        self.closed = self.memory.tail().check()?;
        if self.current.is_none() && !self.next()? {
            return Ok(None);
        }
        Ok(self.current())
    }

    /// The record that was received last and not given back; no look at the ring.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.try_reserve(8)?;
    /// let _ = writer.commit(RecordHeader::default(), 8);
    /// assert!(reader.current().is_none());
    /// reader.try_receive()?;
    /// assert!(reader.current().is_some());
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn current(&self) -> Option<(RecordHeader, Shared<'_>)> {
        let current = self.current?;
        let payload = match current.span {
            Some(_) => self.at(self.head, current.payload),
            None => self.memory.tail().slot(self.number).payload(current.payload),
        };
        // SAFETY: `next` checked that the whole record lies inside the data area or the slot, which stay mapped while `memory` lives.
        Some((current.header, unsafe { Shared::new(payload, current.len) }))
    }

    /// Gives the current record's room back. Says whether the writer sleeps and has to be rung; it makes a full fence to know that, but not
    /// for a record in a slot, whose room no writer waits for ([`Reader::is_by_slot`]). Nothing happens when no record is current.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.try_reserve(8)?;
    /// let _ = writer.commit(RecordHeader::default(), 8); // true: ring the reader
    /// reader.try_receive()?;
    /// assert!(!reader.release(), "the writer does not sleep");
    /// assert!(reader.try_receive()?.is_none());
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    #[must_use = "a sleeping writer has to be rung"]
    pub fn release(&mut self) -> bool {
        let Some(current) = self.current.take() else { return false };
        self.number = self.number.wrapping_add(1);
        self.memory.head().publish_records(self.number);
        let Some(span) = current.span else { return false };
        self.head = self.head.wrapping_add(span);
        self.memory.head().publish(self.head);
        let sleeper = self.memory.tail().sleeper();
        if sleeper == 0 || sleeper == self.rung {
            return false;
        }
        self.rung = sleeper;
        true
    }

    /// The writer was not rung after all: the next release asks for it again.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// reader.unrung(); // the writer's bell is broken: the next release asks for it again
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn unrung(&mut self) {
        self.rung = 0;
    }

    /// Tells the writer that this side sleeps until there is a record; [`Reader::try_receive`] must be asked once more after this.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// reader.arm();
    /// if reader.try_receive()?.is_none() {
    ///     // ... sleep until the bell ...
    /// }
    /// reader.disarm();
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn arm(&mut self) {
        self.sleep = self.sleep.wrapping_add(1).max(1);
        self.armed = true;
        self.memory.head().arm(self.sleep);
    }

    /// Tells the writer that this side is awake.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// reader.arm();
    /// reader.disarm(); // awake again: nobody needs to ring
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn disarm(&mut self) {
        self.armed = false;
        self.memory.head().disarm();
    }

    /// Whether the last record came in a slot beside the ring.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// for len in [8, 8000] {
    ///     writer.try_reserve(len)?;
    ///     let _ = writer.commit(RecordHeader::default(), len); // true: ring the reader
    /// }
    /// reader.try_receive()?;
    /// assert!(reader.is_by_slot(), "a short one");
    /// let _ = reader.release();
    /// reader.try_receive()?;
    /// assert!(!reader.is_by_slot());
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn is_by_slot(&self) -> bool {
        self.by_slot
    }

    /// How many records were given back; what the writer of the ring in the other direction tells its reader, see
    /// [`Writer::acknowledge`](super::Writer::acknowledge).
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.try_reserve(8)?;
    /// let _ = writer.commit(RecordHeader::default(), 8); // true: ring the reader
    /// reader.try_receive()?;
    /// assert_eq!(reader.given_back(), 0);
    /// let _ = reader.release();
    /// assert_eq!(reader.given_back(), 1);
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn given_back(&self) -> u64 {
        self.number
    }

    /// How many records of the ring in the other direction the peer says it has given back, for [`Writer::hear`](super::Writer::hear).
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.acknowledge(7);
    /// writer.try_reserve(8)?;
    /// let _ = writer.commit(RecordHeader::default(), 8); // true: ring the reader
    /// reader.try_receive()?;
    /// assert_eq!(reader.heard(), 7);
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn heard(&self) -> u64 {
        self.heard
    }

    /// Whether the writer had left in order when it was last asked for. What it did before that was seen too.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.post(Notice::Closed, "");
    /// assert!(reader.try_receive()?.is_none() && reader.is_closed());
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// What the writer says in its error word.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// assert_eq!(reader.peer_notice()?, None);
    /// writer.post(Notice::Aborted { by: 3 }, "a watchdog");
    /// assert_eq!(reader.peer_notice()?, Some(Notice::Aborted { by: 3 }));
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    ///
    /// # Errors
    /// The word is not one of the protocol's.
    pub fn peer_notice(&self) -> Result<Option<Notice>, Violation> {
        self.memory.tail().notice()
    }

    /// The text that the writer put beside its error word.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// writer.post(Notice::Aborted { by: 3 }, "a watchdog");
    /// assert_eq!(reader.peer_reason(), "a watchdog");
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn peer_reason(&self) -> String {
        self.memory.tail().reason()
    }

    /// Ends the ring; the writer has to be rung.
    ///
    /// ```
    /// # use pcieipc::{link::RecordHeader, ring::{Notice, Private, Reader, Writer}};
    /// # let (a, b) = Private::pair(1 << 14);
    /// # let (mut writer, mut reader) = (Writer::new(a), Reader::new(b));
    /// reader.post(Notice::Aborted { by: 1 }, "enough");
    /// assert!(writer.try_reserve(8).is_err());
    /// # Ok::<(), pcieipc::ring::Stop>(())
    /// ```
    pub fn post(&mut self, notice: Notice, reason: &str) {
        self.memory.head().post(notice, reason);
    }

    /// Finds the next record, which is in a slot or in the ring: of its number there is one only.
    fn next(&mut self) -> Result<bool, Violation> {
        // Most come where the one before came.
        if self.by_slot && self.next_in_slot()? {
            return Ok(true);
        }
        let in_ring = self.next_in_ring()?;
        if in_ring.is_none() && self.by_slot {
            return Ok(false);
        }
        // What the ring has may be the one after a record in a slot, which is seen by now.
        if self.next_in_slot()? {
            return Ok(true);
        }
        self.by_slot &= in_ring.is_none();
        self.current = in_ring;
        Ok(in_ring.is_some())
    }

    fn next_in_slot(&mut self) -> Result<bool, Violation> {
        let slot = self.memory.tail().slot(self.number);
        // SYNC POINT (H): pairs with the Release store in `Slot::publish`.
        if !slot.has(self.number) {
            // Its payload's lines come beside the header's then, not after it: to wait for another cache once is most of a short message.
            slot.expect(self.lines);
            return Ok(false);
        }
        let slot::Entry { header, payload, len, given_back } = slot.load(self.number)?;
        self.heard = given_back;
        self.by_slot = true;
        self.lines = (payload + len).div_ceil(LINE);
        self.current = Some(Current { header, payload, len, span: None });
        Ok(true)
    }

    /// Reads the header at `head` once; false when nothing is there.
    fn next_in_ring(&mut self) -> Result<Option<Current>, Violation> {
        loop {
            let place = self.place(self.head);
            // SYNC POINT (G): pairs with the Release store in `Writer::commit`.
            let mut position = u64::from_le(self.memory.position(place).load(Ordering::Acquire));
            let told = self.believes && position | NEXT_CLEARED == self.head | COMPLETE | NEXT_CLEARED;
            if !told {
                if self.head == self.tail {
                    self.looks = self.looks.wrapping_add(1);
                    // The tail's line is left to the writer most of the time. Who is about to sleep, or sees that the writer has left, looks
                    // at everything.
                    if self.believes && !self.armed && !self.closed && self.looks % LOOKS_AT_TAIL != 0 {
                        return Ok(None);
                    }
                    self.refresh()?;
                    if self.head == self.tail {
                        return Ok(None);
                    }
                }
                // What was read before the tail may be older than it.
                position = u64::from_le(self.memory.position(place).load(Ordering::Relaxed));
            }
            let to_wrap = self.capacity - place;
            let available = if told { to_wrap } else { self.tail.wrapping_sub(self.head) };
            // SAFETY: `head` is a multiple of 64 below the size of the data area after `place`, so a whole line is there.
            let entry = unsafe { record::load(self.at(self.head, 0), position, self.head, available, to_wrap, self.capacity) }?;
            self.believes = position & (COMPLETE | NEXT_CLEARED) == COMPLETE | NEXT_CLEARED;
            let (Entry::Record { span, .. } | Entry::Skip { span }) = entry;
            let end = self.head.wrapping_add(span);
            if is_after(end, self.tail) {
                self.tail = end;
            }
            match entry {
                Entry::Record { header, payload, len, span } => {
                    return Ok(Some(Current { header, payload, len, span: Some(span) }));
                }
                // After a skip the head is at the start of the data area, where another one is refused: at most two turns.
                Entry::Skip { .. } => self.head = end,
            }
        }
    }

    fn refresh(&mut self) -> Result<(), Violation> {
        let index = self.memory.tail().index();
        if index % LINE as u64 != 0 {
            return Err(Violation::Misaligned { index });
        }
        let (from, most) = (self.seen, self.head.wrapping_add(self.capacity).wrapping_sub(self.seen));
        if index.wrapping_sub(from) > most {
            return Err(Violation::IndexOutOfRange { index, from, to: from.wrapping_add(most) });
        }
        self.seen = index;
        if is_after(index, self.tail) {
            self.tail = index;
        }
        Ok(())
    }

    fn place(&self, index: u64) -> u64 {
        index & (self.capacity - 1)
    }

    fn at(&self, index: u64, offset: usize) -> NonNull<u8> {
        // SAFETY: `place` is below the size of the data area, and callers ask for offsets within a record that ends before
        // the wrap.
        unsafe { self.memory.data().add(self.place(index) as usize + offset) }
    }
}
