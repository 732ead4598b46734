// SPDX-License-Identifier: MIT OR Apache-2.0
//! How many system calls this library made: every wrapper of this module counts its own.

use std::sync::atomic::{AtomicU64, Ordering};

static CALLS: AtomicU64 = AtomicU64::new(0);

/// System calls made by this library in this process until now, by all its threads: waits, bells, `sched_yield`, ioctls. Those of the
/// allocator, of meetings and of reading the tree are not among them.
///
/// ```
/// let before = pcieipc::sys::calls();
/// pcieipc::sys::yield_now();
/// assert!(pcieipc::sys::calls() > before);
/// ```
pub fn calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

/// One more; called where a system call is made.
pub(super) fn made_one() {
    CALLS.fetch_add(1, Ordering::Relaxed);
}

/// Lets another process run.
pub fn yield_now() {
    made_one();
    std::thread::yield_now();
}
