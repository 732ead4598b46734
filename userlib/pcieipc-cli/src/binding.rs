// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an administrator's files say is bound to the module, and how that is done.

pub mod config;
pub mod host;
