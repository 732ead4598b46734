// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the programs that judge the module share. They know `uapi/pcieipc.h` and the documents, not the library.

#[rustfmt::skip]
pub mod abi;
pub mod aer;
pub mod call;
pub mod forms;
pub mod injection;
pub mod ktap;
pub mod machine;
pub mod mapping;
pub mod pci;
pub mod random;
pub mod session;
pub mod stall;
pub mod tally;
pub mod vfio;
pub mod wait;
