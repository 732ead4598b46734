// SPDX-License-Identifier: GPL-2.0

//! A reference to a user's eventfd. It stays valid when the user closes the descriptor.

use core::ptr::NonNull;
use kernel::{bindings, error::from_err_ptr, prelude::*};

/// An eventfd to be signalled.
pub(crate) struct EventFd(NonNull<bindings::eventfd_ctx>);

// SAFETY: The context is reference-counted and may be used and put from any thread.
unsafe impl Send for EventFd {}
// SAFETY: `signal` is safe to call concurrently.
unsafe impl Sync for EventFd {}

impl EventFd {
    /// Takes a reference to the eventfd that the caller has open as `fd`.
    ///
    /// # Errors
    ///
    /// `EBADF` when it is not open, `EINVAL` when it is no eventfd.
    pub(crate) fn from_fd(fd: i32) -> Result<Self> {
        // SAFETY: Looks `fd` up in the caller's table; any number is allowed.
        let context = from_err_ptr(unsafe { bindings::eventfd_ctx_fdget(fd) })?;
        Ok(Self(NonNull::new(context).ok_or(EINVAL)?))
    }

    /// Adds one to its counter and wakes its readers. May be called from a hard interrupt.
    pub(crate) fn signal(&self) {
        // SAFETY: `self` holds a reference.
        unsafe { bindings::eventfd_signal_mask(self.0.as_ptr(), 0) };
    }
}

impl Drop for EventFd {
    fn drop(&mut self) {
        // SAFETY: Gives back the reference that `from_fd` took.
        unsafe { bindings::eventfd_ctx_put(self.0.as_ptr()) };
    }
}
