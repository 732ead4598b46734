// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-reduce of CUDA memory: straight between devices where that works, through host memory where it does not.
//!
//! The driver and the compiler are loaded when they are first used, so the same binary runs on hosts without CUDA.
//! A call returns when its kernel is enqueued; what became of it is told by [`Communicator::check`], [`Communicator::wait`] and
//! later calls. No call hangs: kernels give up at their deadline, when a peer has died, and after an abort.

pub mod choice;
pub mod communicator;
pub mod driver;
pub mod kernels;

#[allow(missing_docs)]
pub mod abi;
mod control;
mod mailbox;
pub mod proof;
mod registration;
pub mod trace;
mod watchdog;

pub use choice::Path;
pub use communicator::{Communicator, Options, PathChoice, Tensor};
pub use control::Shared as HostMemory;
pub use registration::Registration;
