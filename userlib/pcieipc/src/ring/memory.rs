// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where a ring lies.

use std::{ptr::NonNull, sync::Arc};

use super::{IndexPage, LINE, MIN_DATA_BYTES, sync::AtomicU64};

/// Where in a header line its position word is.
#[cfg(not(loom))]
const POSITION_AT: usize = 24;

/// The three pieces of a ring, as one side has them mapped.
///
/// # Safety
/// - `data` gives the same pointer for the life of the value: 64-byte aligned, mapped and readable for `data_bytes` bytes,
///   and writable when the value belongs to a [`super::Writer`].
/// - `data_bytes` is constant, a power of two, and at least [`MIN_DATA_BYTES`].
/// - The page that this side writes (the tail page of a writer, the head page of a reader) is mapped writable, and no other
///   value in any process writes it.
pub unsafe trait Memory {
    /// Start of the data area.
    fn data(&self) -> NonNull<u8>;
    /// Its size in bytes.
    fn data_bytes(&self) -> usize;
    /// The page that the writer writes.
    fn tail(&self) -> &IndexPage;
    /// The page that the reader writes.
    fn head(&self) -> &IndexPage;
    /// The position word of the header line at a place of the data area, a multiple of 64 below its size.
    #[cfg(not(loom))]
    #[doc(hidden)]
    fn position(&self, place: u64) -> &AtomicU64 {
        assert!(place % LINE as u64 == 0 && place < self.data_bytes() as u64);
        // SAFETY: the line lies inside the data area, which is aligned and mapped while the value lives; the word in it is 8-byte
        // aligned. A reader only loads from it.
        unsafe { AtomicU64::from_ptr(self.data().add(place as usize + POSITION_AT).cast().as_ptr()) }
    }
    /// The model checker watches its own atomics only.
    #[cfg(loom)]
    fn position(&self, place: u64) -> &AtomicU64;
}

/// A ring in this process's own memory: for threads, tests and model checks.
#[derive(Debug, Clone)]
pub struct Private(Arc<Pieces>);

#[derive(Debug)]
struct Pieces {
    data: NonNull<u8>,
    bytes: usize,
    tail: IndexPage,
    head: IndexPage,
    #[cfg(loom)]
    positions: Vec<AtomicU64>,
}

// SAFETY: the data area is only reached through raw pointers under the ring protocol; the pages are atomics.
unsafe impl Send for Pieces {}
// SAFETY: as above.
unsafe impl Sync for Pieces {}

impl Private {
    /// A ring of `data_bytes`, rounded up to a power of two and to [`MIN_DATA_BYTES`]; returned once for each side.
    ///
    /// ```
    /// use pcieipc::ring::{Memory, Private};
    /// let (writers, readers) = Private::pair(100_000);
    /// assert_eq!((writers.data_bytes(), readers.data_bytes()), (1 << 17, 1 << 17));
    /// ```
    pub fn pair(data_bytes: usize) -> (Self, Self) {
        let bytes = data_bytes.max(MIN_DATA_BYTES).next_power_of_two();
        let lines = vec![[0u64; LINE / 8]; bytes / LINE + 1].into_boxed_slice();
        let data = NonNull::from(Box::leak(lines)).cast::<u8>();
        let ring = Self(Arc::new(Pieces {
            data,
            bytes,
            tail: IndexPage::default(),
            head: IndexPage::default(),
            #[cfg(loom)]
            positions: (0..bytes / LINE).map(|_| AtomicU64::new(0)).collect(),
        }));
        (ring.clone(), ring)
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        let lines = NonNull::slice_from_raw_parts(self.data.cast::<[u64; LINE / 8]>(), self.bytes / LINE + 1);
        // SAFETY: leaked from a box of this very type and length in `pair`, and freed only here.
        drop(unsafe { Box::from_raw(lines.as_ptr()) });
    }
}

// SAFETY: the allocation lives as long as the Arc and has one line more than `bytes`, so that it can be aligned up; which
// side a clone serves is decided by the one call of `pair`.
unsafe impl Memory for Private {
    fn data(&self) -> NonNull<u8> {
        let skew = self.0.data.as_ptr().align_offset(LINE);
        // SAFETY: fewer than LINE bytes ahead, inside the allocation.
        unsafe { self.0.data.add(skew) }
    }
    fn data_bytes(&self) -> usize {
        self.0.bytes
    }
    fn tail(&self) -> &IndexPage {
        &self.0.tail
    }
    fn head(&self) -> &IndexPage {
        &self.0.head
    }
    #[cfg(loom)]
    fn position(&self, place: u64) -> &AtomicU64 {
        &self.0.positions[place as usize / LINE]
    }
}
