// SPDX-License-Identifier: MIT OR Apache-2.0
//! The side that writes records.

use std::ptr::NonNull;

use super::{LINE, Memory, Notice, RECORD_HEADER_BYTES, Stop, Violation, max_record, record};
use crate::link::{RecordHeader, SharedMut};

/// The one writer of a ring.
#[derive(Debug)]
pub struct Writer<M: Memory> {
    memory: M,
    capacity: u64,
    /// Where the next record goes: the truth, of which the tail page has a copy for the reader.
    tail: u64,
    /// The reader's index as last seen and checked.
    head: u64,
    reserved: Option<Reserved>,
    /// The reader's closing was seen, so it is no news any more.
    closed: bool,
    /// The sleeper's number that was rung last.
    rung: u32,
    /// The number of our own next sleep.
    sleep: u32,
}

#[derive(Debug, Clone, Copy)]
struct Reserved {
    skip: u64,
    len: usize,
}

impl<M: Memory> Writer<M> {
    /// A writer on a ring that nobody has used, both of whose pages are zero.
    pub fn new(memory: M) -> Self {
        Self::starting_at(memory, 0)
    }

    /// A writer whose indices start at `index`, a multiple of 64; the reader must start there too, and neither may be used
    /// before both are made.
    pub fn starting_at(memory: M, index: u64) -> Self {
        let index = index & !(LINE as u64 - 1);
        let capacity = memory.data_bytes() as u64;
        memory.tail().publish(index);
        Self { memory, capacity, tail: index, head: index, reserved: None, closed: false, rung: 0, sleep: 0 }
    }

    /// The longest payload of one record.
    pub fn max_record(&self) -> usize {
        max_record(self.memory.data_bytes())
    }

    /// The ring's memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The payload of a record of `len` bytes, or `None` when there is no room for it yet. A reservation that was not
    /// published is forgotten.
    ///
    /// # Errors
    /// What the reader's error word says; a reader's index that is impossible; a `len` that never fits.
    pub fn try_reserve(&mut self, len: usize) -> Result<Option<SharedMut<'_>>, Stop> {
        self.reserved = None;
        let max = self.max_record();
        if len > max {
            return Err(Stop::TooLong { len, max });
        }
        let span = record::span(len);
        let to_wrap = self.capacity - self.place(self.tail);
        let skip = if span > to_wrap { to_wrap } else { 0 };
        self.closed = self.memory.head().check()?;
        if self.free() < span + skip {
            self.refresh()?;
            if self.free() < span + skip {
                return Ok(None);
            }
        }
        self.reserved = Some(Reserved { skip, len });
        let payload = self.at(self.tail.wrapping_add(skip), RECORD_HEADER_BYTES);
        // SAFETY: `span` bytes from the record's start lie before the wrap and are free: the reader gave them back (B) or
        // never had them. They stay mapped while `memory` lives, and this writer is the only one in the ring.
        Ok(Some(unsafe { SharedMut::new(payload, len) }))
    }

    /// Where in the data area the reserved record starts, header included; `None` without a reservation.
    pub fn reserved_offset(&self) -> Option<u64> {
        self.reserved.map(|r| self.place(self.tail.wrapping_add(r.skip)))
    }

    /// The header line of the reserved record, for a mover that writes header and payload itself; see [`Writer::publish`].
    pub fn header_line(&self, header: RecordHeader, len: usize) -> Option<[u8; RECORD_HEADER_BYTES]> {
        let reserved = self.reserved?;
        let mut line = [0; RECORD_HEADER_BYTES];
        let words = record::encode(self.tail.wrapping_add(reserved.skip), header, len.min(reserved.len));
        for (to, word) in line.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        Some(line)
    }

    /// Writes the header of the reserved record and publishes it with the first `len` bytes of its payload. Says whether the
    /// reader sleeps and has to be rung. Without a reservation nothing happens.
    #[must_use = "a sleeping reader has to be rung"]
    pub fn commit(&mut self, header: RecordHeader, len: usize) -> bool {
        let Some(reserved) = self.reserved else { return false };
        let start = self.tail.wrapping_add(reserved.skip);
        let len = len.min(reserved.len);
        // SAFETY: the reserved room starts with a header line; it is 64-byte aligned and writable.
        unsafe { record::store(self.at(start, 0), record::encode(start, header, len)) };
        self.publish(len)
    }

    /// Publishes the reserved record, whose header and payload are in place already. Says whether the reader has to be rung.
    #[must_use = "a sleeping reader has to be rung"]
    pub fn publish(&mut self, len: usize) -> bool {
        let Some(reserved) = self.reserved.take() else { return false };
        if reserved.skip > 0 {
            // SAFETY: the room up to the wrap is reserved too, is at least one line, and is 64-byte aligned and writable.
            unsafe { record::store(self.at(self.tail, 0), record::encode_skip(self.tail, reserved.skip)) };
        }
        self.tail = self.tail.wrapping_add(reserved.skip + record::span(len.min(reserved.len)));
        self.memory.tail().publish(self.tail);
        let sleeper = self.memory.head().sleeper();
        if sleeper == 0 || sleeper == self.rung {
            return false;
        }
        self.rung = sleeper;
        true
    }

    /// The bell was not rung after all: the next record asks for it again.
    pub fn unrung(&mut self) {
        self.rung = 0;
    }

    /// Tells the reader that this side sleeps until there is room; [`Writer::has_news`] must be asked after this.
    pub fn arm(&mut self) {
        self.sleep = self.sleep.wrapping_add(1).max(1);
        self.memory.tail().arm(self.sleep);
    }

    /// Tells the reader that this side is awake.
    pub fn disarm(&mut self) {
        self.memory.tail().disarm();
    }

    /// Whether the reader gave back room, or ended the ring, since it was last looked at.
    pub fn has_news(&self) -> bool {
        self.memory.head().index() != self.head || !(self.closed || matches!(self.memory.head().notice(), Ok(None)))
    }

    /// Whether the reader had left in order when it was last asked for. What it did before that was seen too.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// What the reader says in its error word.
    ///
    /// # Errors
    /// The word is not one of the protocol's.
    pub fn peer_notice(&self) -> Result<Option<Notice>, Violation> {
        self.memory.head().notice()
    }

    /// The text that the reader put beside its error word.
    pub fn peer_reason(&self) -> String {
        self.memory.head().reason()
    }

    /// Ends the ring; the reader has to be rung.
    pub fn post(&mut self, notice: Notice, reason: &str) {
        self.memory.tail().post(notice, reason);
    }

    /// Whether the reader has given back everything.
    ///
    /// # Errors
    /// As for [`Writer::try_reserve`].
    pub fn is_drained(&mut self) -> Result<bool, Stop> {
        self.refresh()?;
        Ok(self.head == self.tail)
    }

    fn free(&self) -> u64 {
        self.capacity - self.tail.wrapping_sub(self.head)
    }

    fn refresh(&mut self) -> Result<(), Violation> {
        let index = self.memory.head().index();
        if index % LINE as u64 != 0 {
            return Err(Violation::Misaligned { index });
        }
        if index.wrapping_sub(self.head) > self.tail.wrapping_sub(self.head) {
            return Err(Violation::IndexOutOfRange { index, from: self.head, to: self.tail });
        }
        self.head = index;
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
