// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc topo`: the PCIe tree as text, picture or data.

use std::process::ExitCode;

use clap::ValueEnum;

use crate::{
    failure::Failure,
    host_source::HostSource,
    topo::{dot, matrix, svg, text},
};
use pcieipc::topology::{Host, Topology, nccl_xml};

/// Notes that are listed beside a drawing.
const SHOWN_NOTES: usize = 10;
/// A matrix of more cards is no use to anybody, and grows with their square.
const MOST_COMPARED: usize = 512;

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
    /// Distances between accelerators and network adapters, in the letters of `nvidia-smi topo -m`
    Matrix,
    /// Distances between them with the reasons, and the bandwidth to expect
    Paths,
    /// A picture for a report
    Svg,
    /// Graphviz
    Dot,
    /// NCCL's topology file, for NCCL_TOPO_FILE
    Nccl,
}

impl Topo {
    pub fn run(self) -> Result<ExitCode, Failure> {
        let source = self.source.open()?;
        let tree = Topology::read(source.as_ref());
        let format = if self.json { Format::Json } else { self.format };
        match format {
            Format::Text => print!("{}", text::draw(&tree, self.all)),
            Format::Matrix | Format::Paths if matrix::members(&tree).len() > MOST_COMPARED => {
                let members = matrix::members(&tree).len();
                return Err(Failure::Use(format!(
                    "{members} accelerators and network adapters: the matrix and the paths compare at most {MOST_COMPARED}; take --json"
                )));
            }
            Format::Matrix => print!("{}", matrix::draw(&tree)),
            Format::Paths => print!("{}", matrix::paths(&tree)),
            Format::Svg => {
                let host = Host::read(source.as_ref());
                let title =
                    if host.machine.is_empty() { "PCIe tree".to_owned() } else { format!("PCIe tree of {}", host.machine) };
                println!("{}", svg::draw(&tree, &title, &text::shown(&tree, self.all)));
            }
            Format::Dot => print!("{}", dot::draw(&tree, &text::shown(&tree, self.all))),
            Format::Nccl => {
                let host = Host::read(source.as_ref());
                println!("{}", nccl_xml(&tree, &host).map_err(|e| Failure::Run(e.to_string()))?);
            }
            Format::Json => println!("{}", serde_json::to_string_pretty(&tree).map_err(|e| Failure::Run(e.to_string()))?),
        }
        if format != Format::Json {
            tree.missing.iter().for_each(|missing| eprintln!("not known from this source: {missing}"));
            tree.notes.iter().take(SHOWN_NOTES).for_each(|note| eprintln!("note: /{}: {}", note.path, note.problem));
            if tree.notes.len() > SHOWN_NOTES {
                eprintln!("note: … and {} more (--json shows all)", tree.notes.len() - SHOWN_NOTES);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
