// SPDX-License-Identifier: MIT OR Apache-2.0
//! The hidden command that cleans up after a run which could not: it is told paths on standard input and removes them when that ends.

use std::io::{self, BufRead};

use crate::{failure::Failure, scratch};

/// What the parent calls it by.
pub const NAME: &str = "sweep";

/// Removes what a run has left behind; started by the other commands
#[derive(Debug, clap::Args)]
pub struct Sweep {}

impl Sweep {
    pub fn run(self) -> Result<(), Failure> {
        let mut paths = Vec::new();
        let mut lines = io::stdin().lock().split(b'\0');
        // An error of the pipe is its end.
        while let Some(Ok(path)) = lines.next() {
            paths.push(path);
        }
        for path in paths {
            scratch::remove(&path).map_err(|error| Failure::Run(error.to_string()))?;
        }
        Ok(())
    }
}
