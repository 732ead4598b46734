// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc snapshot`: all that a host says, in one file.

use std::{fs::File, io::BufWriter, path::PathBuf, process::ExitCode, time::Duration};

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
    /// Look a second time after this many seconds, so that rates of errors can be told; 0 looks once
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    sample: f64,
    /// Say what was saved as JSON
    #[arg(long)]
    pub json: bool,
    /// Save a host whose /sys and /proc are mounted below this folder
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

impl Snapshot {
    pub fn run(self) -> Result<ExitCode, Failure> {
        if !(0.0..=3600.0).contains(&self.sample) {
            return Err(Failure::Use("--sample takes 0 to 3600 seconds".into()));
        }
        let options = CaptureOptions { serials: self.serials, whole_config: self.whole_config };
        let mut archive = capture(&Live::at(&self.root), options);
        if self.sample > 0.0 {
            std::thread::sleep(Duration::from_secs_f64(self.sample));
            archive.add_second_look(&capture(&Live::at(&self.root), options), self.sample);
        }
        let failed = |e: std::io::Error| Failure::Run(format!("{}: {e}", self.file.display()));
        let file = File::create(&self.file).map_err(failed)?;
        archive.write(BufWriter::new(file)).map_err(failed)?;
        if self.json {
            let saved = serde_json::json!({ "ok": true, "file": self.file, "files": archive.entries().count() });
            println!("{saved}");
            return Ok(ExitCode::SUCCESS);
        }
        eprintln!("{}: {} files; look inside with `tar tzf` before you send it", self.file.display(), archive.entries().count());
        Ok(ExitCode::SUCCESS)
    }
}
