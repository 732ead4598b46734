// SPDX-License-Identifier: MIT OR Apache-2.0
//! The pcieipc command.

mod commands;
mod failure;
mod host_source;
mod module;
mod topo;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Exchange and all-reduce gradients over PCIe, and keep going when the PCIe tree misbehaves.
#[derive(Parser)]
#[command(version, after_help = "Exit codes: 0 done; 1 the run failed; 2 bad use or bad input.")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Doctor(commands::doctor::Doctor),
    Info(commands::info::Info),
    Snapshot(commands::snapshot::Snapshot),
    Topo(commands::topo::Topo),
}

fn main() -> ExitCode {
    let json;
    let outcome = match Arguments::parse().command {
        Command::Doctor(command) => {
            json = command.json;
            command.run()
        }
        Command::Info(command) => {
            json = command.json;
            command.run().map(|()| ExitCode::SUCCESS)
        }
        Command::Snapshot(command) => {
            json = false;
            command.run()
        }
        Command::Topo(command) => {
            json = command.json;
            command.run()
        }
    };
    failure::exit_code(outcome, json)
}
