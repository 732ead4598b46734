// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exchange and all-reduce gradients over PCIe, and keep going when the tree misbehaves.

pub mod abi;
pub mod device;
pub mod doctor;
pub mod error;
pub mod executor;
pub mod group;
pub mod link;
pub mod loopback;
pub mod plan;
pub mod registered;
pub mod ring;
pub mod sim;
pub mod sys;
pub mod topology;
pub mod transport;
pub mod tune;

pub use error::{Error, Result};
/// Element types, operations and the arithmetic: a crate of its own, because it takes longest to compile and changes least.
pub use pcieipc_reduce as reduce;
