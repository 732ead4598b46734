// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc bind` and `pcieipc unbind`: endpoints as the files in /etc/pcieipc say.

use std::path::PathBuf;

use serde_json::json;

use crate::{
    binding::{
        config::Config,
        host::{Done, Host},
    },
    failure::Failure,
};

/// What both commands take.
#[derive(Debug, clap::Args)]
struct Files {
    /// A file, or a folder whose *.toml files are read in the order of their names
    #[arg(long, value_name = "PATH", default_value = "/etc/pcieipc")]
    config: PathBuf,
    /// Another place than /sys, for tests
    #[arg(long, value_name = "FOLDER", default_value = "/sys", hide = true)]
    sys: PathBuf,
    /// One JSON object on standard output instead of text
    #[arg(long)]
    json: bool,
}

/// Bind the functions that /etc/pcieipc/*.toml names to the module, with their profiles; as root
#[derive(Debug, clap::Args)]
pub struct Bind {
    #[command(flatten)]
    files: Files,
    /// Only read the files and say what they ask for
    #[arg(long)]
    check: bool,
}

/// Give back the functions that /etc/pcieipc/*.toml names, and remove their profiles; as root
#[derive(Debug, clap::Args)]
pub struct Unbind {
    #[command(flatten)]
    files: Files,
}

impl Bind {
    pub fn json(&self) -> bool {
        self.files.json
    }

    pub fn run(self) -> Result<(), Failure> {
        let config = Config::read(&self.files.config)?;
        if self.check {
            let profiles = config.profiles.keys().map(|name| Done::Absent(format!("profile {name} to be enabled")));
            let endpoints = config.endpoints.iter().map(|e| Done::Absent(format!("{} to be bound", e.which)));
            return self.files.tell(profiles.chain(endpoints).collect());
        }
        let host = Host::at(&self.files.sys);
        let asked = !config.profiles.is_empty() || !config.endpoints.is_empty();
        if asked && !host.has_driver() {
            return Err(Failure::Run("the module is not loaded: modprobe pcieipc".into()));
        }
        let mut done: Vec<Done> = config.profiles.iter().map(|(name, profile)| host.profile(name, profile)).collect();
        done.extend(config.endpoints.iter().flat_map(|endpoint| host.bind(endpoint)));
        self.files.tell(done)
    }
}

impl Unbind {
    pub fn json(&self) -> bool {
        self.files.json
    }

    pub fn run(self) -> Result<(), Failure> {
        let config = Config::read(&self.files.config)?;
        let host = Host::at(&self.files.sys);
        let mut done: Vec<Done> = config.endpoints.iter().flat_map(|endpoint| host.release(endpoint)).collect();
        done.extend(config.profiles.keys().map(|name| host.remove_profile(name)));
        self.files.tell(done)
    }
}

impl Files {
    /// A line for each thing. What failed does not keep the rest from being done, and fails the command.
    fn tell(&self, done: Vec<Done>) -> Result<(), Failure> {
        let failed: Vec<&str> = done.iter().filter(|d| matches!(d, Done::Failed(_))).map(Done::text).collect();
        if self.json {
            let lines: Vec<_> = done.iter().map(|d| json!({ "outcome": d.word(), "text": d.text() })).collect();
            println!("{}", json!({ "ok": failed.is_empty(), "steps": lines }));
        } else if done.is_empty() {
            println!("{}: nothing to bind", self.config.display());
        } else {
            done.iter().for_each(|d| println!("{:<8} {}", d.word(), d.text()));
        }
        match &failed[..] {
            [] => Ok(()),
            [one] => Err(Failure::Told((*one).to_owned())),
            many => Err(Failure::Told(format!("{} of {} failed; the first: {}", many.len(), done.len(), many[0]))),
        }
    }
}
