// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc cuda`: what the devices of this host can do, and how fast.

mod bench;
mod beside;
mod check;
mod compile;
mod crew;
mod nccl;
mod numbers;
mod nvml;
mod order;
mod probe;
mod product;
mod side;
mod team;
mod trace;
mod tune;
mod worker;

use std::process::ExitCode;

use crate::failure::Failure;

/// Look at CUDA devices and the paths between them, and measure all-reduce of their memory
#[derive(clap::Args)]
pub struct Cuda {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Probe(probe::Probe),
    Bench(bench::Bench),
    Beside(beside::Beside),
    Check(check::Check),
    Compile(compile::Compile),
    Trace(trace::Trace),
    Tune(tune::Tune),
    #[command(hide = true)]
    Worker(worker::Worker),
}

impl Cuda {
    /// Whether failures are told as JSON too.
    pub fn json(&self) -> bool {
        match &self.command {
            Command::Probe(command) => command.json,
            Command::Bench(_)
            | Command::Beside(_)
            | Command::Check(_)
            | Command::Compile(_)
            | Command::Trace(_)
            | Command::Tune(_)
            | Command::Worker(_) => false,
        }
    }

    pub fn run(self) -> Result<ExitCode, Failure> {
        match self.command {
            Command::Probe(command) => command.run(),
            Command::Bench(command) => command.run(),
            Command::Beside(command) => command.run(),
            Command::Check(command) => command.run(),
            Command::Compile(command) => command.run(),
            Command::Trace(command) => command.run(),
            Command::Tune(command) => command.run(),
            Command::Worker(command) => command.run(),
        }
    }
}
