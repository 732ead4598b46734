// SPDX-License-Identifier: MIT OR Apache-2.0
//! A PCIe endpoint in software, served to QEMU over vfio-user. docs/soft-endpoint.md describes what it does.

pub mod bus;
pub mod config;
pub mod control;
pub mod endpoint;
pub mod engine;
pub mod fabric;
pub mod haunting;
pub mod interrupts;
pub mod memory;
pub mod registers;
pub mod ring_table;
pub mod server;
pub mod timer;
