// SPDX-License-Identifier: MIT OR Apache-2.0
//! The pcieipc command.

#[macro_use]
mod standard_streams;

mod bench;
mod binding;
mod bus;
mod commands;
mod demo;
mod failure;
mod gradients;
mod group;
mod host_source;
mod live;
mod member;
mod module;
mod ranks;
mod scratch;
mod supervisor;
mod tally;
mod topo;
mod transport;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Exchange and all-reduce gradients over PCIe, and keep going when the PCIe tree misbehaves.
#[derive(Parser)]
#[command(name = "pcieipc", version, after_help = "Exit codes: 0 done; 1 the run failed; 2 bad use or bad input.")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(commands::bench::Bench),
    #[command(hide = true)]
    BenchRank(commands::bench_rank::BenchRank),
    Bind(commands::bind::Bind),
    Cuda(commands::cuda::Cuda),
    Demo(commands::demo::Demo),
    Doctor(commands::doctor::Doctor),
    #[command(hide = true)]
    Generate(commands::generate::Generate),
    Heal(commands::heal::Heal),
    Info(commands::info::Info),
    Inject(commands::inject::Inject),
    Plan(commands::plan::Plan),
    #[command(hide = true)]
    Rank(commands::rank::Rank),
    Reduce(commands::reduce::Reduce),
    Simulate(commands::simulate::Simulate),
    Snapshot(commands::snapshot::Snapshot),
    #[command(hide = true)]
    Sweep(commands::sweep::Sweep),
    Topo(commands::topo::Topo),
    Trace(commands::trace::Trace),
    Tune(commands::tune::Tune),
    Unbind(commands::bind::Unbind),
    Watch(commands::watch::Watch),
}

fn main() -> ExitCode {
    supervisor::survive_file_size_limit();
    let done = |()| ExitCode::SUCCESS;
    let (json, outcome) = match Arguments::parse().command {
        Command::Bench(command) => (command.json, command.run().map(done)),
        Command::BenchRank(command) => (false, command.run().map(done)),
        Command::Bind(command) => (command.json(), command.run().map(done)),
        Command::Cuda(command) => (command.json(), command.run()),
        Command::Demo(command) => (command.json, command.run().map(done)),
        Command::Doctor(command) => (command.json, command.run()),
        Command::Generate(command) => (false, command.run().map(done)),
        Command::Heal(command) => (command.json, command.run().map(done)),
        Command::Info(command) => (command.json, command.run().map(done)),
        Command::Inject(command) => (command.json, command.run().map(done)),
        Command::Plan(command) => (command.json, command.run().map(done)),
        Command::Rank(command) => (false, command.run().map(done)),
        Command::Reduce(command) => (command.json, command.run().map(done)),
        Command::Simulate(command) => (command.json, command.run().map(done)),
        Command::Snapshot(command) => (command.json, command.run()),
        Command::Sweep(command) => (false, command.run().map(done)),
        Command::Topo(command) => (command.json, command.run()),
        Command::Trace(command) => (command.json, command.run().map(done)),
        Command::Tune(command) => (command.json, command.run().map(done)),
        Command::Unbind(command) => (command.json(), command.run().map(done)),
        Command::Watch(command) => (command.json, command.run()),
    };
    failure::exit_code(outcome, json)
}
