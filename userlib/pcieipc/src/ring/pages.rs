// SPDX-License-Identifier: MIT OR Apache-2.0
//! The page that one side writes and the other reads.

use super::{
    Stop, Violation,
    slot::{SLOTS, Slot},
    sync::{AtomicU8, AtomicU32, AtomicU64, Ordering, full_fence},
};

/// Bytes of the text that explains an error word; a model checker would only be slowed down by them.
const REASON_BYTES: usize = if cfg!(loom) { 1 } else { 192 };

const CLOSED: u32 = 1;
const ABORTED: u32 = 2;

/// A field on a cache line of its own.
#[repr(C, align(64))]
#[derive(Debug, Default)]
struct Line<T>(T);

/// The tail page (written by the writer) or the head page (written by the reader). All zero when the ring is made.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct IndexPage {
    index: Line<Index>,
    armed: Line<AtomicU32>,
    error: Line<AtomicU64>,
    reason: [AtomicU8; REASON_BYTES],
    /// The writer's, for short records; nothing in a head page.
    slots: [Slot; SLOTS],
}

/// How far its owner is.
#[derive(Debug, Default)]
struct Index {
    /// In bytes of the data area.
    bytes: AtomicU64,
    /// In records, those in slots included; of a reader only.
    records: AtomicU64,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<IndexPage>() == 4096 && align_of::<IndexPage>() == 64);

/// What one side tells the other in its error word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// It left in order; what it wrote before is good.
    Closed,
    /// It called abort, or gave up because a call of its own failed; the reason is beside the word.
    Aborted {
        /// The rank that did.
        by: u32,
    },
}

impl Notice {
    fn encode(self) -> u64 {
        let (code, rank) = match self {
            Self::Closed => (CLOSED, 0),
            Self::Aborted { by } => (ABORTED, by),
        };
        u64::from(code) | u64::from(rank) << 32
    }

    fn decode(word: u64) -> Result<Option<Self>, Violation> {
        let rank = (word >> 32) as u32;
        match word as u32 {
            0 if rank == 0 => Ok(None),
            CLOSED => Ok(Some(Self::Closed)),
            ABORTED => Ok(Some(Self::Aborted { by: rank })),
            _ => Err(Violation::BadNotice { word }),
        }
    }
}

impl Default for IndexPage {
    fn default() -> Self {
        Self {
            index: Line(Index::default()),
            armed: Line(AtomicU32::new(0)),
            error: Line(AtomicU64::new(0)),
            reason: std::array::from_fn(|_| AtomicU8::new(0)),
            slots: std::array::from_fn(|_| Slot::default()),
        }
    }
}

/// What the page's owner does.
impl IndexPage {
    /// Publishes an index: pairs with [`IndexPage::index`] of the other side, (A) or (B).
    pub(super) fn publish(&self, index: u64) {
        self.index.0.bytes.store(index, Ordering::Release);
    }

    /// Publishes how many records were given back: pairs with [`IndexPage::records`] of the other side, (I).
    pub(super) fn publish_records(&self, records: u64) {
        self.index.0.records.store(records, Ordering::Release);
    }

    /// Says that the owner is about to sleep; it must look at the other side's index once more after this. (C), (D)
    pub(super) fn arm(&self, number: u32) {
        self.armed.0.store(number, Ordering::Relaxed);
        full_fence();
    }

    /// Says that the owner is awake.
    pub(super) fn disarm(&self) {
        self.armed.0.store(0, Ordering::Relaxed);
    }

    /// Ends the ring. The first abort stays; it is not replaced by what follows from it.
    pub(super) fn post(&self, notice: Notice, reason: &str) {
        if self.error.0.load(Ordering::Relaxed) as u32 > CLOSED {
            return;
        }
        let mut end = reason.len().min(REASON_BYTES - 1);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        for (to, byte) in self.reason.iter().zip(reason.as_bytes()[..end].iter().chain([&0])) {
            to.store(*byte, Ordering::Relaxed);
        }
        self.error.0.store(notice.encode(), Ordering::Release);
    }
}

/// What the other side does.
impl IndexPage {
    /// Reads the index once; everything stored before its publication is visible after this. (A), (B)
    pub(super) fn index(&self) -> u64 {
        self.index.0.bytes.load(Ordering::Acquire)
    }

    /// Reads once how many records were given back; their loads are over. (I)
    pub(super) fn records(&self) -> u64 {
        self.index.0.records.load(Ordering::Acquire)
    }

    /// The slot for the record of this number, which its owner writes and the other side reads.
    pub(super) fn slot(&self, number: u64) -> &Slot {
        &self.slots[Slot::of(number)]
    }

    /// The number under which the owner sleeps, 0 when it is awake; called after an index was published. (C), (D)
    pub(super) fn sleeper(&self) -> u32 {
        full_fence();
        self.asleep()
    }

    /// The same, when the fence was made already.
    pub(super) fn asleep(&self) -> u32 {
        self.armed.0.load(Ordering::Relaxed)
    }

    /// Reads the error word. (E), (F)
    pub(super) fn notice(&self) -> Result<Option<Notice>, Violation> {
        Notice::decode(self.error.0.load(Ordering::Acquire))
    }

    /// The error word as an error, except for [`Notice::Closed`], after which what was written before still counts; says
    /// whether it is that.
    pub(super) fn check(&self) -> Result<bool, Stop> {
        match self.notice()? {
            None => Ok(false),
            Some(Notice::Closed) => Ok(true),
            Some(notice) => Err(Stop::Notice(notice)),
        }
    }

    /// The text beside the error word, with everything unprintable replaced.
    pub(super) fn reason(&self) -> String {
        let bytes: Vec<u8> = self.reason.iter().map(|b| b.load(Ordering::Relaxed)).take_while(|b| *b != 0).collect();
        String::from_utf8_lossy(&bytes).chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
    }
}
