// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc snapshot`: all that a host says, in one file.

use std::{
    fs::Permissions,
    io::{self, BufWriter},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use pcieipc::topology::{Archive, CaptureOptions, Live, capture};

use crate::failure::{Failure, with_remedy};

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
        self.write(&archive).map_err(|e| Failure::Run(format!("{}: {}", self.file.display(), with_remedy(&e))))?;
        if self.json {
            let saved = serde_json::json!({ "ok": true, "file": self.file, "files": archive.entries().count() });
            println!("{saved}");
            return Ok(ExitCode::SUCCESS);
        }
        eprintln!("{}: {} files; look inside with `tar tzf` before you send it", self.file.display(), archive.entries().count());
        Ok(ExitCode::SUCCESS)
    }

    /// Whole or not at all: an older snapshot of this name stays until the new one is complete. With serial numbers in it, it is for its owner
    /// alone.
    fn write(&self, archive: &Archive) -> io::Result<()> {
        let folder = self.file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // What is no ordinary file (a pipe, /dev/stdout) is written as it is.
        if self.file.metadata().is_ok_and(|m| !m.is_file()) {
            return archive.write(BufWriter::new(std::fs::File::create(&self.file)?));
        }
        let file = tempfile::Builder::new().prefix(".pcieipc-").suffix(".partial").tempfile_in(folder)?;
        archive.write(BufWriter::new(file.as_file()))?;
        if !self.serials {
            // What any other file would have.
            file.as_file().set_permissions(Permissions::from_mode(0o666 & !mask()?))?;
        }
        file.as_file().sync_all()?;
        file.persist(&self.file).map_err(|e| e.error)?;
        Ok(())
    }
}

/// The mask that new files of this process are made with; the kernel shows it, and asking for it in the old way would change it.
fn mask() -> io::Result<u32> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|l| l.strip_prefix("Umask:")).and_then(|m| u32::from_str_radix(m.trim(), 8).ok());
    Ok(mask.unwrap_or(0o022))
}
