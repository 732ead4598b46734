// SPDX-License-Identifier: MIT OR Apache-2.0
//! The atomics that both sides share: the standard library's, or the model checker's under `cfg(loom)`.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
