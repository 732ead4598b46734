// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--snapshot FILE`: the host that a command looks at.

use std::{fs::File, path::PathBuf};

use pcieipc::topology::{Archive, Live, Source};

use crate::failure::Failure;

/// Which host to look at.
#[derive(clap::Args, Clone, Debug)]
pub struct HostSource {
    /// Look at a saved host in place of this one: a snapshot
    #[arg(long, value_name = "FILE")]
    pub snapshot: Option<PathBuf>,
    /// Look at a host whose /sys and /proc are mounted below this folder
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    pub root: PathBuf,
}

impl HostSource {
    /// Opens the saved host, or this one.
    pub fn open(&self) -> Result<Box<dyn Source>, Failure> {
        let Some(path) = &self.snapshot else { return Ok(Box::new(Live::at(&self.root))) };
        let file = File::open(path).map_err(|e| Failure::Use(format!("{}: {e}", path.display())))?;
        let archive = Archive::read(file).map_err(|e| Failure::Use(format!("{}: {e}", path.display())))?;
        Ok(Box::new(archive))
    }

    /// Whether it is the running host.
    pub fn is_live(&self) -> bool {
        self.snapshot.is_none()
    }
}
