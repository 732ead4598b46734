// SPDX-License-Identifier: GPL-2.0

//! The module's own work queue, so that what an administrator asked for, and what looks after endpoints, is drained at exit and
//! never waits behind anybody else's work.

use core::ptr::NonNull;
use kernel::{
    bindings,
    prelude::*,
    sync::atomic::{Atomic, Relaxed},
    workqueue::Queue,
};

/// Address of the queue, 0 before `WorkQueue::new` and after its end.
static QUEUE: Atomic<usize> = Atomic::new(0);

/// Owns the queue; drains it when dropped.
pub(crate) struct WorkQueue(NonNull<bindings::workqueue_struct>);

// SAFETY: A work queue may be used and destroyed from any thread.
unsafe impl Send for WorkQueue {}
// SAFETY: There are no methods.
unsafe impl Sync for WorkQueue {}

impl WorkQueue {
    /// Makes the queue.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory.
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: The name is a C string without format characters.
        let queue = unsafe {
            bindings::alloc_workqueue_noprof(
                c"pcieipc".as_char_ptr(),
                bindings::wq_flags_WQ_UNBOUND | bindings::wq_flags_WQ_FREEZABLE,
                0,
            )
        };
        let queue = NonNull::new(queue).ok_or(ENOMEM)?;
        QUEUE.store(queue.as_ptr() as usize, Relaxed);
        Ok(Self(queue))
    }
}

impl Drop for WorkQueue {
    fn drop(&mut self) {
        QUEUE.store(0, Relaxed);
        // SAFETY: Made in `new`. Nothing queues any more: driver and node are gone.
        unsafe { bindings::destroy_workqueue(self.0.as_ptr()) };
    }
}

/// The queue, while the module is loaded.
pub(crate) fn get() -> Option<&'static Queue> {
    let queue = NonNull::new(QUEUE.load(Relaxed) as *mut bindings::workqueue_struct)?;
    // SAFETY: The queue lives as long as driver and node, and all callers are part of these.
    Some(unsafe { Queue::from_raw(queue.as_ptr()) })
}
