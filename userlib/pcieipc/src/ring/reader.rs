// SPDX-License-Identifier: MIT OR Apache-2.0
//! The side that reads records.

use std::ptr::NonNull;

use super::{
    LINE, Memory, Notice, RECORD_HEADER_BYTES, Stop, Violation,
    record::{self, Entry},
};
use crate::link::{RecordHeader, Shared};

/// Bytes of a record that is not there yet whose lines are asked for: its header and the payload of a small message.
const EXPECTED: usize = LINE + 256;

/// Asks the cache for a line; has no effect on what is read.
fn prefetch(line: NonNull<u8>) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    // SAFETY: every x86-64 processor has it, and it never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    let _ = line;
}

/// The one reader of a ring.
#[derive(Debug)]
pub struct Reader<M: Memory> {
    memory: M,
    capacity: u64,
    /// Where the oldest record that was not given back starts: the truth, of which the head page has a copy for the writer.
    head: u64,
    /// The writer's index as last seen and checked.
    tail: u64,
    /// The record at `head`, read once and checked.
    current: Option<Current>,
    /// The writer's closing was seen, so it is no news any more.
    closed: bool,
    rung: u32,
    sleep: u32,
}

#[derive(Debug, Clone, Copy)]
struct Current {
    header: RecordHeader,
    len: usize,
    span: u64,
}

impl<M: Memory> Reader<M> {
    /// A reader on a ring that it has not read from, both of whose pages started as zero.
    pub fn new(memory: M) -> Self {
        Self::starting_at(memory, 0)
    }

    /// A reader whose indices start at `index`, a multiple of 64; see [`super::Writer::starting_at`].
    pub fn starting_at(memory: M, index: u64) -> Self {
        let index = index & !(LINE as u64 - 1);
        let capacity = memory.data_bytes() as u64;
        memory.head().publish(index);
        Self { memory, capacity, head: index, tail: index, current: None, closed: false, rung: 0, sleep: 0 }
    }

    /// The ring's memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The oldest record that was not given back, or `None` when the writer has published nothing more. The same record until
    /// [`Reader::release`].
    ///
    /// # Errors
    /// What the writer's error word says; an index or a record that is impossible.
    pub fn try_receive(&mut self) -> Result<Option<(RecordHeader, Shared<'_>)>, Stop> {
        self.closed = self.memory.tail().check()?;
        if self.current.is_none() && !self.next()? {
            self.expect();
            return Ok(None);
        }
        let Some(current) = self.current else { return Ok(None) };
        let payload = self.at(self.head, RECORD_HEADER_BYTES);
        // SAFETY: `next` checked that the whole record lies inside the data area, which stays mapped while `memory` lives.
        Ok(Some((current.header, unsafe { Shared::new(payload, current.len) })))
    }

    /// Gives the current record's room back. Says whether the writer sleeps and has to be rung. Nothing happens when no
    /// record is current.
    #[must_use = "a sleeping writer has to be rung"]
    pub fn release(&mut self) -> bool {
        let Some(current) = self.current.take() else { return false };
        self.head = self.head.wrapping_add(current.span);
        self.memory.head().publish(self.head);
        let sleeper = self.memory.tail().sleeper();
        if sleeper == 0 || sleeper == self.rung {
            return false;
        }
        self.rung = sleeper;
        true
    }

    /// The writer was not rung after all: the next release asks for it again.
    pub fn unrung(&mut self) {
        self.rung = 0;
    }

    /// Tells the writer that this side sleeps until there is a record; [`Reader::has_news`] must be asked after this.
    pub fn arm(&mut self) {
        self.sleep = self.sleep.wrapping_add(1).max(1);
        self.memory.head().arm(self.sleep);
    }

    /// Tells the writer that this side is awake.
    pub fn disarm(&mut self) {
        self.memory.head().disarm();
    }

    /// Whether the writer published something, or ended the ring, since it was last looked at.
    pub fn has_news(&self) -> bool {
        self.memory.tail().index() != self.tail || !(self.closed || matches!(self.memory.tail().notice(), Ok(None)))
    }

    /// Whether the writer had left in order when it was last asked for. What it did before that was seen too.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// What the writer says in its error word.
    ///
    /// # Errors
    /// The word is not one of the protocol's.
    pub fn peer_notice(&self) -> Result<Option<Notice>, Violation> {
        self.memory.tail().notice()
    }

    /// The text that the writer put beside its error word.
    pub fn peer_reason(&self) -> String {
        self.memory.tail().reason()
    }

    /// Ends the ring; the writer has to be rung.
    pub fn post(&mut self, notice: Notice, reason: &str) {
        self.memory.head().post(notice, reason);
    }

    /// Reads the header at `head` once; false when nothing is published there.
    fn next(&mut self) -> Result<bool, Violation> {
        loop {
            if self.head == self.tail {
                self.refresh()?;
                if self.head == self.tail {
                    return Ok(false);
                }
            }
            let to_wrap = self.capacity - self.place(self.head);
            // SAFETY: `head` is a multiple of 64 below the size of the data area after `place`, so a whole line is there.
            match unsafe {
                record::load(self.at(self.head, 0), self.head, self.tail.wrapping_sub(self.head), to_wrap, self.capacity)
            }? {
                Entry::Record { header, len, span } => {
                    self.current = Some(Current { header, len, span });
                    return Ok(true);
                }
                // After a skip the head is at the start of the data area, where another one is refused: at most two turns.
                Entry::Skip { span } => self.head = self.head.wrapping_add(span),
            }
        }
    }

    /// Asks for the lines in which the next record will begin. A short record then comes with the tail that tells of it, instead of after
    /// it: a writer's store takes them away again, and the next look asks anew.
    fn expect(&self) {
        let to_wrap = (self.capacity - self.place(self.head)) as usize;
        for offset in (0..EXPECTED.min(to_wrap)).step_by(LINE) {
            prefetch(self.at(self.head, offset));
        }
    }

    fn refresh(&mut self) -> Result<(), Violation> {
        let index = self.memory.tail().index();
        if index % LINE as u64 != 0 {
            return Err(Violation::Misaligned { index });
        }
        let (from, most) = (self.tail, self.capacity - self.tail.wrapping_sub(self.head));
        if index.wrapping_sub(from) > most {
            return Err(Violation::IndexOutOfRange { index, from, to: from.wrapping_add(most) });
        }
        self.tail = index;
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
