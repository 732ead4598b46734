// SPDX-License-Identifier: MIT OR Apache-2.0
//! The pcieipc command.

use clap::Parser;

/// Exchange and all-reduce gradients over PCIe.
#[derive(Parser)]
#[command(version)]
struct Args {}

fn main() {
    let Args {} = Args::parse();
}
