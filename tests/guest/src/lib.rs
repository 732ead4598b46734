// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the programs that judge the module share. They know `uapi/pcieipc.h` and the documents, not the library.

#[rustfmt::skip]
pub mod abi;
pub mod call;
pub mod ktap;
pub mod machine;
pub mod mapping;
pub mod pci;
pub mod session;
pub mod stall;
pub mod wait;
