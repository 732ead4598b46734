// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc topo`: the PCIe tree as text, picture or data.

use std::process::ExitCode;

use clap::ValueEnum;

use crate::{
    failure::Failure,
    host_source::HostSource,
    topo::{matrix, text},
};
use pcieipc::topology::Topology;

/// Draw the PCIe tree: switches, cards, links, distances
#[derive(clap::Args)]
pub struct Topo {
    #[command(flatten)]
    source: HostSource,
    /// What to print
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// One JSON object on standard output, the same as --format json
    #[arg(long)]
    pub json: bool,
    /// Show functions that are no cards too
    #[arg(long)]
    all: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A tree for the terminal
    Text,
    /// Everything that is known, as JSON
    Json,
    /// Distances between accelerators and network adapters
    Matrix,
}

impl Topo {
    pub fn run(self) -> Result<ExitCode, Failure> {
        let source = self.source.open()?;
        let tree = Topology::read(source.as_ref());
        let format = if self.json { Format::Json } else { self.format };
        match format {
            Format::Text => print!("{}", text::draw(&tree, self.all)),
            Format::Matrix => print!("{}", matrix::draw(&tree)),
            Format::Json => println!("{}", serde_json::to_string_pretty(&tree).map_err(|e| Failure::Run(e.to_string()))?),
        }
        for missing in tree.missing.iter().filter(|_| format != Format::Json) {
            eprintln!("not known from this source: {missing}");
        }
        Ok(ExitCode::SUCCESS)
    }
}
