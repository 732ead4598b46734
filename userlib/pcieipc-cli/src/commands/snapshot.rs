// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc snapshot`: all that a host says, in one file.

use std::{fs::File, io::BufWriter, path::PathBuf, process::ExitCode};

use pcieipc::topology::{CaptureOptions, Live, capture};

use crate::failure::Failure;

/// Save all that this host says about its PCIe tree into one file, without secrets or serial numbers
#[derive(clap::Args)]
pub struct Snapshot {
    /// File to write, a .tar.gz
    file: PathBuf,
    /// Keep serial numbers, hardware addresses and the whole kernel command line
    #[arg(long)]
    serials: bool,
    /// Read all of configuration space; a few devices do not take that well
    #[arg(long)]
    whole_config: bool,
    /// Save a host whose /sys and /proc are mounted below this folder
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

impl Snapshot {
    pub fn run(self) -> Result<ExitCode, Failure> {
        let archive = capture(&Live::at(&self.root), CaptureOptions { serials: self.serials, whole_config: self.whole_config });
        let failed = |e: std::io::Error| Failure::Run(format!("{}: {e}", self.file.display()));
        let file = File::create(&self.file).map_err(failed)?;
        archive.write(BufWriter::new(file)).map_err(failed)?;
        eprintln!("{}: {} files; look inside with `tar tzf` before you send it", self.file.display(), archive.entries().count());
        Ok(ExitCode::SUCCESS)
    }
}
