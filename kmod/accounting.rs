// SPDX-License-Identifier: GPL-2.0

//! Who pays for memory: RLIMIT_MEMLOCK of the user who made it, and the module's own limits.
//!
//! The charge is on the user and not on the process or the session, because an exported channel outlives both. The memory
//! cgroup is charged by the allocators, for what is no page of a channel too.

use crate::{inline, limits};
use core::ptr::NonNull;
use kernel::{
    bindings,
    page::PAGE_SIZE,
    prelude::*,
    sync::atomic::{Atomic, Relaxed},
};

/// Bytes of all data areas that live now.
static TOTAL: Atomic<u64> = Atomic::new(0);

/// Pages that the module holds now, whoever pays; for the state in debugfs and for leak checks.
pub(crate) static LIVE_PAGES: Atomic<i64> = Atomic::new(0);

/// Of these, those that nobody gets any more, because a device may still reach them.
pub(crate) static KEPT_PAGES: Atomic<i64> = Atomic::new(0);

/// A user of the machine, whatever processes are theirs.
pub(crate) struct User(NonNull<bindings::user_struct>);

// SAFETY: A `user_struct` is reference-counted and its counter atomic; both may be used from any thread.
unsafe impl Send for User {}
// SAFETY: As above.
unsafe impl Sync for User {}

impl User {
    /// That of the calling process.
    ///
    /// # Errors
    ///
    /// `EINVAL` without one, which no process is.
    pub(crate) fn current() -> Result<Self> {
        Ok(Self(NonNull::new(inline::current_user()).ok_or(EINVAL)?))
    }
}

impl PartialEq for User {
    fn eq(&self, other: &Self) -> bool {
        // There is one for each user as long as somebody refers to it.
        self.0 == other.0
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // SAFETY: Gives back the reference that `current_user` took.
        unsafe { bindings::free_uid(self.0.as_ptr()) };
    }
}

/// A number of pages charged to a user, given back when dropped.
pub(crate) struct Charge {
    user: User,
    pages: i64,
    bytes: u64,
}

impl Charge {
    /// Charges `pages` to the caller's user.
    ///
    /// # Errors
    ///
    /// `ENOMEM` over RLIMIT_MEMLOCK (CAP_IPC_LOCK passes), `ENOSPC` over the module's limit for all.
    pub(crate) fn new(pages: usize) -> Result<Self> {
        let bytes = pages as u64 * PAGE_SIZE as u64;
        let limit = limits::total_bytes();
        let total = TOTAL.fetch_add(bytes, Relaxed) + bytes;
        if total > limit {
            TOTAL.fetch_sub(bytes, Relaxed);
            limits::say(|| pr_info!("refused {bytes} bytes: over max_total_bytes={limit}, {} in use\n", total - bytes));
            return Err(ENOSPC);
        }
        let charge = Self { user: User::current()?, pages: pages as i64, bytes };
        let held = charge.counter().fetch_add(charge.pages, Relaxed) + charge.pages;
        let limit = inline::memlock_limit();
        // Asked only where it matters: the question is audited, and an answer of no would be on record for nothing.
        // SAFETY: Asks about the calling task.
        let unlimited = || unsafe { bindings::capable(bindings::CAP_IPC_LOCK as i32) };
        if held as u64 > (limit / PAGE_SIZE) as u64 && !unlimited() {
            limits::say(|| {
                pr_info!(
                    "refused {bytes} bytes: over RLIMIT_MEMLOCK of {limit} bytes (ulimit -l), {} in use by this user\n",
                    (held - charge.pages) as u64 * PAGE_SIZE as u64
                )
            });
            return Err(ENOMEM);
        }
        Ok(charge)
    }

    fn counter(&self) -> &Atomic<i64> {
        // SAFETY: `user` holds a reference, so the counter is valid; the kernel accesses it atomically only.
        unsafe { Atomic::from_ptr(&raw mut (*self.user.0.as_ptr()).locked_vm.counter) }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.counter().fetch_sub(self.pages, Relaxed);
        TOTAL.fetch_sub(self.bytes, Relaxed);
    }
}

/// Bytes of all channels that live now.
pub(crate) fn total_bytes() -> u64 {
    TOTAL.load(Relaxed)
}
