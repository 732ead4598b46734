// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ends this process at a given step of a protocol, as SIGKILL does.

use std::sync::atomic::{AtomicU32, Ordering};

/// Steps until the end; 0 for never.
static LEFT: AtomicU32 = AtomicU32::new(0);

/// This process ends at the `number`th step from now on, counted from 1.
pub fn arm(number: u32) {
    LEFT.store(number, Ordering::Relaxed);
}

/// Whether the step did not come.
pub fn is_armed() -> bool {
    LEFT.load(Ordering::Relaxed) > 0
}

/// A step.
pub fn step() {
    if LEFT.load(Ordering::Relaxed) > 0 && LEFT.fetch_sub(1, Ordering::Relaxed) == 1 {
        let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
    }
}
