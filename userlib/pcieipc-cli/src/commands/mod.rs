// SPDX-License-Identifier: MIT OR Apache-2.0
//! One file a command.

pub mod bench;
pub mod bench_rank;
pub mod bind;
pub mod cuda;
pub mod demo;
pub mod doctor;
pub mod generate;
pub mod heal;
pub mod info;
pub mod inject;
pub mod plan;
pub mod rank;
pub mod reduce;
pub mod simulate;
pub mod snapshot;
pub mod sweep;
pub mod topo;
pub mod trace;
pub mod tune;
pub mod watch;
mod workload;
