// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ring protocol: one writer, one reader, records of a header and a payload. No system call and no I/O.
//!
//! A ring is three pieces of memory. The writer writes the *data area* and its *tail page*; the reader writes its *head page*.
//! Nobody else writes any of them, and transports map each piece read-only where it is not written. Indices count bytes since
//! the ring was made, are multiples of 64 and wrap modulo 2⁶⁴; the place in the data area is the index modulo its size, a
//! power of two. They are compared by wrapping subtraction only.
//!
//! # Fields, who writes them, and what each access pairs with
//!
//! Both pages have the same layout ([`IndexPage`]), each field on a cache line of its own.
//!
//! | field | written by | ordering of the store | pairs with |
//! |---|---|---|---|
//! | `tail.index` | writer | Release, after the record's last byte | (A) the reader's Acquire load before it reads the record |
//! | `head.index` | reader | Release, after the record's last load | (B) the writer's Acquire load before it overwrites the room |
//! | `head.armed` | reader | Relaxed, then a SeqCst fence, then looks at `tail.index` | (C) the writer's SeqCst fence between its store of `tail.index` and its load of `head.armed` |
//! | `tail.armed` | writer | Relaxed, then a SeqCst fence, then looks at `head.index` | (D) the reader's SeqCst fence between its store of `head.index` and its load of `tail.armed` |
//! | `tail.error` | writer | Release, after `tail.reason` | (E) the reader's Acquire load, which comes before every look at `tail.index` |
//! | `head.error` | reader | Release, after `head.reason` | (F) the writer's Acquire load, which comes before every look at `head.index` |
//! | position word of a record's header | writer | Release, after the rest of the record | (G) the reader's Acquire load before it reads the rest |
//! | position word of a slot | writer | Release, after the rest of the record | (H) the reader's Acquire load before it reads the rest |
//! | `head.records` | reader | Release, after the record's last load | (I) the writer's Acquire load before it overwrites a slot |
//! | record header and payload | writer | plain | (A) or (G) and, before the room is used again, (B) |
//!
//! (G) is why a short message arrives with the first line that the reader gets: a position word that is marked as complete stands for the
//! tail. Where the next header will be lies an old payload that may look like anything, so the writer clears that word before it
//! completes the record before it, if that room is free, and says so in the word; otherwise the reader waits for the tail. A mover that
//! does not store in order marks nothing.
//!
//! A record in a slot (`slot.rs`) is in none of the ring's room; the numbers of records, which both sides count, order it among those that are. What was
//! given back of one direction is also told by the records in slots of the other, which (H) orders like (I). (C) holds for a slot's position
//! word as for `tail.index`; nobody sleeps until a slot is free.
//!
//! (C) and (D) are the store-buffering pattern: each side stores one word and loads the other's, so Release and Acquire alone
//! would let both loads see the old values and a wake-up would be lost. With both fences at least one side sees the other.
//!
//! An armed word is 0 when its owner is awake, otherwise a number that changes each time it goes to sleep. The other side
//! rings at most once for each number, so that a slow sleeper is not rung once a record.
//!
//! # The other side is hostile
//!
//! Everything that the other side can write is read once into a local, checked against what is possible, and only then used:
//! an index must be a multiple of 64, must not run backwards, must not run past what was written or freed; a record must lie
//! inside what the index covers and inside the data area, must carry its own position, and a skip must end at the wrap.
//! Anything else is a [`Violation`] and ends the ring. The payload itself can change under the reader's eyes: it is handed
//! out as [`crate::link::Shared`], never as a slice.

mod memory;
mod pages;
mod reader;
mod record;
mod slot;
mod sync;
mod writer;

pub use memory::{Memory, Private};
pub use pages::{IndexPage, Notice};
pub use reader::Reader;
pub use record::RECORD_HEADER_BYTES;
pub use sync::full_fence;
pub use writer::Writer;

/// Alignment of indices, records and payloads: one cache line.
pub const LINE: usize = 64;

/// The smallest data area: room for two records of a page each, with their headers.
pub const MIN_DATA_BYTES: usize = 16 << 10;

/// The longest payload of one record in a data area of `data_bytes`.
///
/// A record is contiguous, so up to one record's length is skipped at the wrap; half of the area always fits.
///
/// ```
/// assert_eq!(pcieipc::ring::max_record(1 << 20), (1 << 19) - 64);
/// ```
pub const fn max_record(data_bytes: usize) -> usize {
    data_bytes / 2 - RECORD_HEADER_BYTES
}

/// Whether modular epoch `a` is later than `b`: at most 2³¹ − 1 steps ahead of it.
///
/// ```
/// use pcieipc::ring::is_newer;
/// assert!(is_newer(0, u32::MAX) && !is_newer(u32::MAX, 0));
/// ```
pub const fn is_newer(a: u32, b: u32) -> bool {
    let ahead = a.wrapping_sub(b);
    ahead != 0 && ahead < 1 << 31
}

/// The rule of the protocol that the other side broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// An index is not a multiple of 64.
    #[error("index {index:#x} is not a multiple of 64")]
    Misaligned {
        /// What was read.
        index: u64,
    },
    /// An index ran backwards or past what is possible.
    #[error("index {index:#x} lies outside {from:#x} to {to:#x}")]
    IndexOutOfRange {
        /// What was read.
        index: u64,
        /// The lowest value that is possible.
        from: u64,
        /// The highest value that is possible.
        to: u64,
    },
    /// What should be a record is none.
    #[error("no record at index {index:#x}: kind {kind:#x}, position {position:#x}")]
    NotARecord {
        /// Where.
        index: u64,
        /// The kind word.
        kind: u32,
        /// The position that it carries.
        position: u64,
    },
    /// A record is longer than what the index covers, or crosses the end of the data area.
    #[error("record at index {index:#x} of {len} bytes does not fit into {room} bytes")]
    RecordTooLong {
        /// Where.
        index: u64,
        /// Its length.
        len: usize,
        /// What there is.
        room: u64,
    },
    /// A skip does not end at the wrap.
    #[error("skip at index {index:#x} of {len} bytes does not end at the wrap")]
    BadSkip {
        /// Where.
        index: u64,
        /// Its length.
        len: usize,
    },
    /// The error word holds an unknown code.
    #[error("error word {word:#x} is unknown")]
    BadNotice {
        /// What was read.
        word: u64,
    },
}

/// Why a ring can not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Stop {
    /// The other side broke the protocol.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// The other side said so in its error word.
    #[error("the other side ended the ring: {0:?}")]
    Notice(Notice),
    /// The record is longer than [`max_record`].
    #[error("a record of {len} bytes is longer than {max}")]
    TooLong {
        /// What was asked for.
        len: usize,
        /// What is possible.
        max: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::is_newer;

    #[test]
    fn epochs_compare_across_the_wrap() {
        assert!(is_newer(1, 0));
        assert!(is_newer(0, u32::MAX));
        assert!(is_newer(5, u32::MAX - 5));
        assert!(!is_newer(0, 0));
        assert!(!is_newer(u32::MAX, 0));
        assert!(!is_newer(0, 1));
    }
}
