// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc info`: the module, its ABI, the endpoints and their states.

use crate::{failure::Failure, module};

/// Show the module, its ABI version, and the endpoints with their states
#[derive(clap::Args)]
pub struct Info {
    /// One JSON object on standard output instead of text
    #[arg(long)]
    pub json: bool,
}

impl Info {
    pub fn run(self) -> Result<(), Failure> {
        module::reachable().map_err(|obstacle| Failure::Run(obstacle.to_string()))?;
        if self.json {
            println!("{}", serde_json::json!({ "ok": true, "node": module::NODE }));
        } else {
            println!("{} can be opened", module::NODE);
        }
        Ok(())
    }
}
