// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the programs of this crate share.

pub mod ktap;
pub mod process;
pub mod reference;
