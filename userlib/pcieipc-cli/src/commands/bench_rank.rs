// SPDX-License-Identifier: MIT OR Apache-2.0
//! The hidden command that is one rank of a benchmark: a job on standard input, rank 0's rows on standard output.

use std::io;

use crate::{bench, failure::Failure};

/// What the parent calls it by.
pub const NAME: &str = "bench-rank";

/// One rank of a benchmark; started by `pcieipc bench`
#[derive(Debug, clap::Args)]
pub struct BenchRank {}

impl BenchRank {
    pub fn run(self) -> Result<(), Failure> {
        // A rank never outlives its parent.
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)
            .map_err(|error| Failure::Run(format!("prctl(PR_SET_PDEATHSIG): {error}")))?;
        let seat: bench::Seat = serde_json::from_reader(io::stdin().lock())
            .map_err(|error| Failure::Use(format!("no job on standard input ({error}); this command is for pcieipc itself")))?;
        bench::take(&seat)
    }
}
