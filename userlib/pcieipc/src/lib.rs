// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exchange and all-reduce gradients over PCIe, and keep going when the tree misbehaves.

pub mod error;
pub mod link;

pub use error::{Error, Result};
