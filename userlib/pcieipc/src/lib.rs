// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exchange and all-reduce gradients over PCIe, and keep going when the tree misbehaves.
//!
//! Ranks are processes of one host, at most sixteen. They meet in a directory ([`group`]), each gets a ring to and from every other, over
//! `/dev/pcieipc` or plain shared memory ([`transport`]), and then they call collectives together:
//!
//! ```
//! use std::time::Duration;
//! use pcieipc::{group, reduce::Op};
//!
//! // Ranks as threads, to try it. As processes, each calls `Group::meet(GroupOptions::new(rank, ranks, directory))`.
//! group::of_threads(2, |mut group| {
//!     let bound = Duration::from_secs(10);
//!     let mut gradients = vec![1.0f32; 4096];
//!     group.all_reduce(&mut gradients, Op::Sum, bound).unwrap();
//!     assert_eq!(gradients[0], 2.0);
//!
//!     // Or in flight, while this rank computes:
//!     let request = group.start_all_reduce(gradients, Op::Average, bound).unwrap();
//!     // ...
//!     let gradients = request.wait(&mut group).unwrap();
//!     assert_eq!(gradients[0], 2.0);
//! })?;
//! # Ok::<(), pcieipc::Error>(())
//! ```
//!
//! Every call gives the right result or a typed [`Error`] that says who and what, within its bound.
//!
//! # The way of a gradient
//!
//! ```text
//!   rank 0                                                          rank 1
//!  ┌──────────────────────────┐                                    ┌──────────────────────────┐
//!  │ Group::all_reduce(x)     │                                    │ Group::all_reduce(x)     │
//!  │   plan: checked data     │                                    │   the same plan's other  │
//!  │   ┌────────────────────┐ │                                    │   half, step by step     │
//!  │   │ step: take sources │ │                                    │                          │
//!  │   │  combine (reduce)  │ │    ring 0 → 1, mapped by both      │                          │
//!  │   │  store to targets ─┼─┼──▶ ┌───────┬─────────┬─ ─ ─┐       │                          │
//!  │   └────────────────────┘ │    │header │ payload │     │ ──────┼▶ a source of its step    │
//!  │            ▲             │    └───────┴─────────┴─ ─ ─┘       │                          │
//!  │            │             │    tail page: written by 0 ───────▶│ looks at the tail,       │
//!  │            │             │    head page: written by 1 ◀───────│ gives room back          │
//!  │            │             │                                    │                          │
//!  │            └─────────────┼──────────── ring 1 → 0 ◀───────────┼─ its records             │
//!  └──────────────────────────┘                                    └──────────────────────────┘
//!        only if the other sleeps: ring its doorbell ── eventfd, or endpoint → MSI-X → module → eventfd
//! ```
//!
//! 1. [`plan::build`] makes what each rank does, as data; [`plan::check`] proves it right before it is first used.
//! 2. [`executor`] runs the plan's steps over any [`link::Links`], several calls at once if they were started and not waited for.
//! 3. [`reduce`] combines elements straight from the rings' memory into the next ring, with the processor's vectors.
//! 4. [`ring`] moves records; a side that finds its ring ready makes no system call.
//! 5. [`registered`] buffers leave the rings out: peers read them where they lie.

// For the test support that unit tests share with the programs in `tests`.
#[cfg(test)]
extern crate self as pcieipc;

pub mod abi;
mod control;
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
// What this project's own crates share, and no part of the interface.
#[doc(hidden)]
pub mod sys;
pub mod topology;
// What groups are made of; what users see of it is exported from there.
#[doc(hidden)]
pub mod transport;
pub mod tune;

pub use error::{Error, Result};
/// Element types, operations and the arithmetic: a crate of its own, because it takes longest to compile and changes least.
pub use pcieipc_reduce as reduce;
