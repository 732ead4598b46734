// SPDX-License-Identifier: MIT OR Apache-2.0
//! A place for a short record in the writer's page. Two of them are used in turn, again and again, so that their lines stay in the nearest
//! caches of both sides, which those of a long ring do not.

use std::{
    ptr::NonNull,
    sync::atomic::{AtomicU64 as Word, Ordering},
};

use super::{LINE, Violation, sync};
use crate::link::RecordHeader;

/// How many a page has.
pub(super) const SLOTS: usize = 2;
/// The room of one, header included: with the fields before them two fill a page of 4096 bytes.
const SLOT_BYTES: usize = 1856;
/// The longest payload.
pub(super) const SLOT_PAYLOAD: usize = SLOT_BYTES - LINE;

/// Up to so many lines a reader asks for all of them while it looks at the first: a payload of 256 bytes took 0.53 µs in place of 0.56 with it
/// on two processors that are far from each other, one of 1 KiB 0.98 to 1.05 in place of 0.86.
const SOON: usize = 5;

/// The header's first word says where the payload is.
const RECORD: u32 = 0x5049_504c;
const TINY: u32 = 0x5049_504d;

/// Where the payload of a record that fits into the header's line is.
pub(super) const TINY_AT: usize = 40;

/// Which word tells that the record is there.
#[cfg(not(loom))]
const POSITION: usize = 3;
/// Which word tells what was given back.
const GIVEN_BACK: usize = 4;

/// Where a payload that is at most so long lies in a slot.
pub(super) const fn payload_at(len: usize) -> usize {
    if len <= LINE - TINY_AT { TINY_AT } else { LINE }
}

/// The memory of a slot: a header line as in the data area, then the payload. Its owner alone writes it.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Slot {
    /// Not the model checker's: what lies here is ordered by the position word.
    words: [Word; SLOT_BYTES / 8],
    #[cfg(loom)]
    position: sync::AtomicU64,
}

/// What a slot's header says.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub header: RecordHeader,
    pub payload: usize,
    pub len: usize,
    /// Records of the ring in the other direction that the writer had given back.
    pub given_back: u64,
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            words: std::array::from_fn(|_| Word::new(0)),
            #[cfg(loom)]
            position: sync::AtomicU64::new(0),
        }
    }
}

impl Slot {
    /// Which of the slots takes the record of this number.
    pub fn of(number: u64) -> usize {
        (number % SLOTS as u64) as usize
    }

    /// Where a payload lies; `offset` is at most [`LINE`].
    pub fn payload(&self, offset: usize) -> NonNull<u8> {
        // SAFETY: inside the slot, which is longer than a line.
        unsafe { NonNull::from(&self.words).cast::<u8>().add(offset) }
    }

    fn position(&self) -> &sync::AtomicU64 {
        #[cfg(not(loom))]
        return &self.words[POSITION];
        #[cfg(loom)]
        return &self.position;
    }

    /// Stores the header of a record whose payload is in place, and so publishes it. Records count from 0, their words from 1: a slot
    /// starts as zero. (H)
    pub fn publish(&self, number: u64, entry: Entry) {
        let Entry { header, payload, len, given_back } = entry;
        let kind = if payload == TINY_AT { TINY } else { RECORD };
        let words = [
            u64::from(kind) | (len as u64) << 32,
            u64::from(header.epoch) | u64::from(header.step) << 32 | u64::from(header.shard) << 48,
            u64::from(header.call) | u64::from(header.crc) << 32,
        ];
        for (to, word) in self.words.iter().zip(words) {
            to.store(word.to_le(), Ordering::Relaxed);
        }
        self.words[GIVEN_BACK].store(given_back.to_le(), Ordering::Relaxed);
        self.position().store(number.wrapping_add(1).to_le(), sync::Ordering::Release);
    }

    /// Whether the record of this number is here. (H)
    #[inline]
    pub fn has(&self, number: u64) -> bool {
        u64::from_le(self.position().load(sync::Ordering::Acquire)) == number.wrapping_add(1)
    }

    /// Asks for the lines of a payload that will be here, behind the first: those that the writer has just stored come then, and those that
    /// it has not are here as they were. Not for many, which it would lose again before it has stored them all.
    #[inline]
    pub fn expect(&self, lines: usize) {
        if lines <= SOON {
            (1..lines).for_each(|line| sync::fetch(self.payload(0).as_ptr().wrapping_add(line * LINE)));
        }
    }

    /// Reads the header of the record that is here once, and checks it.
    pub fn load(&self, number: u64) -> Result<Entry, Violation> {
        let word = |at: usize| u64::from_le(self.words[at].load(Ordering::Relaxed));
        let (first, second, third, given_back) = (word(0), word(1), word(2), word(GIVEN_BACK));
        let (kind, len) = (first as u32, (first >> 32) as usize);
        let (payload, most) = match kind {
            RECORD => (LINE, SLOT_PAYLOAD),
            TINY => (TINY_AT, LINE - TINY_AT),
            _ => return Err(Violation::NotARecord { index: number, kind, position: number }),
        };
        if len > most {
            return Err(Violation::RecordTooLong { index: number, len, room: most as u64 });
        }
        let header = RecordHeader {
            epoch: second as u32,
            step: (second >> 32) as u16,
            shard: (second >> 48) as u16,
            call: third as u32,
            crc: (third >> 32) as u32,
        };
        Ok(Entry { header, payload, len, given_back })
    }
}
