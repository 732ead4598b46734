// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-reduce loops under a seeded schedule of faults.
//!
//! [`schedule`] says what happens; [`run`] starts the ranks ([`crew`], [`rank`]), has [`play`] do it to the machine, and collects who
//! saw what when in one [`record::Record`] a fault. [`judge`] compares each with what its kind must look like; [`report`] and
//! [`figure`] sum them up.

pub mod command;
pub mod crew;
pub mod figure;
pub mod inputs;
pub mod judge;
pub mod machine;
pub mod play;
pub mod rank;
pub mod record;
pub mod report;
pub mod run;
pub mod schedule;
pub mod words;

/// Nanoseconds of CLOCK_MONOTONIC, which all processes of a machine and its kernel share.
pub fn now_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    now.map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}
