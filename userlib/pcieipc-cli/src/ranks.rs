// SPDX-License-Identifier: MIT OR Apache-2.0
//! One process a rank: what it is told, what it answers, and who watches over all of them.
//!
//! The parent re-executes its own binary once for each rank. A rank reads one [`Job`] from its standard input and writes one
//! [`Report`] a line to its standard output; when the parent dies the kernel ends the rank.

mod crew;
mod job;
mod report;

pub use crew::{Crew, Ending, Heard};
pub use job::{Algorithm, Asked, Job, Mover, Rehearsal, Transport};
pub use report::{Counters, Lost, Report, TensorDone, now_ns};
