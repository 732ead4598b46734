// SPDX-License-Identifier: GPL-2.0

//! Pages that outlive the device: owned by this module, counted into user mappings, mapped for DMA elsewhere.
//!
//! They are ordinary pages with a reference count each, so `get_user_pages` works on a mapping of them, and a user, or a
//! pin that a user took, may hold them longer than the module does.

use crate::{
    accounting::{Charge, KEPT_PAGES, LIVE_PAGES},
    inline,
};
use core::ptr::NonNull;
use kernel::{
    bindings,
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc,
    },
};

/// Largest contiguous piece that is tried: 4 MiB.
const MAX_ORDER: u32 = 10;

/// Whole pages, zeroed when they were made.
pub(crate) struct Pages {
    /// # Invariants
    ///
    /// Each is a page that this object holds one reference to.
    pages: KVVec<NonNull<bindings::page>>,
    /// 1 when the references are not given back.
    kept: Atomic<u32>,
    /// Held for what it does when it is dropped.
    _charge: Option<Charge>,
}

// SAFETY: Pages are reference-counted and not tied to a thread; the vector is not changed after construction.
unsafe impl Send for Pages {}
// SAFETY: As above; the methods only read the vector.
unsafe impl Sync for Pages {}

impl Pages {
    /// Allocates `count` pages close to NUMA node `node` (-1 for anywhere), charged to the caller.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory or over RLIMIT_MEMLOCK, `ENOSPC` over the module's limit.
    pub(crate) fn charged(count: usize, node: i32) -> Result<Arc<Self>> {
        let charge = Charge::new(count)?;
        Self::allocate(count, node, Some(charge))
    }

    /// Allocates pages that nobody is charged for, for the module's own records.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory.
    pub(crate) fn uncharged(count: usize, node: i32) -> Result<Arc<Self>> {
        Self::allocate(count, node, None)
    }

    fn allocate(count: usize, node: i32, charge: Option<Charge>) -> Result<Arc<Self>> {
        // The list is not charged to the cgroup, the pages are: over the limit it would call the OOM killer, and they give ENOMEM.
        let mut pages = Self { pages: KVVec::with_capacity(count, GFP_KERNEL)?, kept: Atomic::new(0), _charge: charge };
        let mut order = MAX_ORDER;
        while pages.pages.len() < count {
            order = order.min((count - pages.pages.len()).ilog2());
            match allocate_block(order, node) {
                Some(first) => pages.adopt(first, order)?,
                None if order > 0 => order -= 1,
                None => return Err(ENOMEM),
            }
        }
        Ok(Arc::new(pages, GFP_KERNEL_ACCOUNT)?)
    }

    fn adopt(&mut self, first: NonNull<bindings::page>, order: u32) -> Result {
        if order > 0 {
            // SAFETY: `first` is the head of a non-compound block of this order that nobody else has.
            unsafe { bindings::split_page(first.as_ptr(), order) };
        }
        for index in 0..1usize << order {
            // SAFETY: The block has that many pages; on this architecture `struct page`s of a block are adjacent.
            let page = unsafe { first.add(index) };
            LIVE_PAGES.fetch_add(1, Relaxed);
            // INVARIANT: After the split each page has one reference, which passes to the vector.
            self.pages.push(page, GFP_KERNEL)?;
        }
        Ok(())
    }

    /// From now on nobody else gets these pages, ever: something may write into them that nothing stops.
    pub(crate) fn keep(&self) {
        if self.kept.xchg(1, Relaxed) == 0 {
            KEPT_PAGES.fetch_add(self.pages.len() as i64, Relaxed);
        }
    }

    /// Number of pages.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.pages.len() as u64 * PAGE_SIZE as u64
    }

    /// One page.
    pub(crate) fn page(&self, index: usize) -> Option<NonNull<bindings::page>> {
        self.pages.get(index).copied()
    }

    /// The pages as the array of pointers that functions of the kernel take; they do not write to it.
    pub(crate) fn as_ptr(&self) -> *mut *mut bindings::page {
        self.pages.as_ptr().cast_mut().cast()
    }

    /// Where the first page lies in the kernel's address space.
    pub(crate) fn address(&self) -> Option<NonNull<u8>> {
        let first = self.page(0)?;
        // SAFETY: A page of ours, allocated without __GFP_HIGHMEM.
        NonNull::new(unsafe { inline::page_address(first.as_ptr()) }.cast())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.kept.load(Relaxed) != 0 {
            return;
        }
        for page in self.pages.iter() {
            LIVE_PAGES.fetch_sub(1, Relaxed);
            // SAFETY: By the invariant this gives back the reference that the vector held; the page lives on while others,
            // a pin for example, hold theirs.
            unsafe { bindings::__free_pages(page.as_ptr(), 0) };
        }
    }
}

fn allocate_block(order: u32, node: i32) -> Option<NonNull<bindings::page>> {
    // Without NORETRY a cgroup over its limit would have the OOM killer called on its behalf.
    const NORETRY: u32 = 1 << bindings::___GFP_NORETRY_BIT;
    let flags = bindings::GFP_KERNEL_ACCOUNT | bindings::__GFP_ZERO | bindings::__GFP_NOWARN | NORETRY;
    // SAFETY: A node of -1 means anywhere; otherwise it is a device's node, which is online.
    NonNull::new(unsafe { bindings::alloc_pages_node_noprof(node, flags, order) })
}
