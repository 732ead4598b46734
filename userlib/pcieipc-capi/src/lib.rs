// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C interface of pcieipc: `libpcieipc.so` and `pcieipc.h`.
//!
//! Every function returns a [`pcieipc_status`] and stores what it makes behind a pointer. No function unwinds into C: a bug
//! that would is reported as [`pcieipc_status::Internal`]. After an error, [`pcieipc_last_error`] has its text, for the
//! calling thread.
#![allow(non_camel_case_types, clippy::missing_safety_doc)]

mod buffer;
mod collectives;
mod group;
mod start;
mod status;

pub use buffer::*;
pub use collectives::*;
pub use group::*;
pub use start::*;
pub use status::*;
