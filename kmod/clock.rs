// SPDX-License-Identifier: GPL-2.0

//! The monotonic clock.

use kernel::bindings;

/// Milliseconds since the machine started, without those in which it slept.
pub(crate) fn now_ms() -> u64 {
    // SAFETY: Reads the clock.
    unsafe { bindings::ktime_get() as u64 / 1_000_000 }
}
