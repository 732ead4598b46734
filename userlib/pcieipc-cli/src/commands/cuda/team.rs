// SPDX-License-Identifier: MIT OR Apache-2.0
//! The processes of one side: how each is started.

use std::{path::Path, process::Command, time::Duration};

use super::bench::size;
use crate::failure::Failure;

/// How the library's communicators are made, beside their path and types.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Making {
    /// Device memory for what copy engines bring, between two devices with NVLink, such as 64MiB; without it kernels do all
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size)]
    pub staging: u64,
    /// Most blocks of a call: each takes a multiprocessor
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub blocks: u32,
    /// No kernel is made resident before the one before it is done
    #[arg(long)]
    pub no_overlap: bool,
    /// After every call all ranks compare their results
    #[arg(long)]
    pub checked: bool,
    /// How long a call waits for the others
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = humantime::parse_duration)]
    pub deadline: Duration,
}

/// One process a rank.
#[derive(Debug, Clone, Copy)]
pub struct Team<'a> {
    /// `ours` or `nccl`.
    pub side: &'a str,
    /// How many ranks.
    pub ranks: usize,
    /// As `--path` has it.
    pub path: &'a str,
    /// Element types, by name, separated by commas.
    pub kinds: &'a str,
    /// The longest tensor in bytes.
    pub largest: u64,
    /// As said.
    pub making: Making,
}

impl Team<'_> {
    /// The commands that start its workers, which meet in `directory`.
    pub fn workers(&self, directory: &Path) -> Result<Vec<Command>, Failure> {
        let program = std::env::current_exe().map_err(|e| Failure::Run(format!("can not find this program: {e}")))?;
        let make = |rank: usize| {
            let mut command = Command::new(&program);
            command.args(["cuda", "worker", "--side", self.side, "--path", self.path, "--kinds", self.kinds]);
            command.args(["--rank", &rank.to_string(), "--ranks", &self.ranks.to_string()]);
            command.args(["--largest", &self.largest.to_string(), "--staging", &self.making.staging.to_string()]);
            command.args(["--blocks", &self.making.blocks.to_string()]);
            command.arg("--deadline").arg(humantime::format_duration(self.making.deadline).to_string());
            if self.making.no_overlap {
                command.arg("--no-overlap");
            }
            if self.making.checked {
                command.arg("--checked");
            }
            command.arg("--directory").arg(directory);
            command
        };
        Ok((0..self.ranks).map(make).collect())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::commands::cuda::worker::Worker;

    #[derive(Parser)]
    struct Program {
        #[command(subcommand)]
        command: Cuda,
    }
    #[derive(clap::Subcommand)]
    enum Cuda {
        Cuda {
            #[command(subcommand)]
            command: Only,
        },
    }
    #[derive(clap::Subcommand)]
    enum Only {
        Worker(Worker),
    }

    #[test]
    fn a_worker_understands_all_that_it_is_started_with() {
        let making =
            Making { staging: 64 << 20, blocks: 5, no_overlap: true, checked: true, deadline: Duration::from_millis(2500) };
        let team = Team { side: "ours", ranks: 3, path: "device", kinds: "f32,u8", largest: 77, making };
        let commands = team.workers(Path::new("/a place")).unwrap();
        assert_eq!(commands.len(), 3);
        for (rank, command) in commands.iter().enumerate() {
            let arguments = std::iter::once(command.get_program()).chain(command.get_args());
            let Cuda::Cuda { command: Only::Worker(worker) } = Program::try_parse_from(arguments).unwrap().command;
            assert_eq!((worker.side.as_str(), worker.rank, worker.ranks), ("ours", rank, 3));
            assert_eq!((worker.path.as_str(), worker.kinds.as_str(), worker.largest), ("device", "f32,u8", 77));
            assert_eq!((worker.making.staging, worker.making.blocks, worker.making.no_overlap), (64 << 20, 5, true));
            assert!(worker.making.checked);
            assert_eq!(worker.making.deadline, Duration::from_millis(2500));
            assert_eq!(worker.directory, Path::new("/a place"));
        }
    }
}
