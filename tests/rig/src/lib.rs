// SPDX-License-Identifier: MIT OR Apache-2.0
//! Boots a kernel in QEMU with soft endpoints, runs one command line in it, and judges what came out.
//!
//! A test is a TOML file (see [`spec::Spec`]). [`vm::run`] boots it and gives a [`verdict::Verdict`]: the results that the guest's
//! program printed (KTAP or libtest lines), its exit code, and everything in the kernel's log that a healthy kernel
//! never says. While it runs, the guest may ask the host for things over [`host_link`]: hot-plug, faults of an endpoint, files kept.

pub mod accelerator;
pub mod after;
pub mod clock;
pub mod control;
pub mod error;
pub mod guest;
pub mod host_link;
pub mod initramfs;
pub mod ivshmem;
pub mod kernel;
pub mod kernel_log;
pub mod machine;
pub mod process;
pub mod results;
pub mod spec;
pub mod verdict;
pub mod vm;

pub use error::{Error, Result};
