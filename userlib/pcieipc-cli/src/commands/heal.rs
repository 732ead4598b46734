// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc heal`: the sequence that an operator would go through by hand, with each step's result.

use std::{path::PathBuf, time::Duration};

use serde_json::json;

use crate::{
    bus::{
        DRIVER, Function, Sysfs, address_of,
        heal::{self, Bench, Host, Options, Outcome, Step},
    },
    failure::Failure,
};

/// Bring a function back: wait, reset, remove, rescan, rebind, each followed by a test, until one passes
#[derive(Debug, clap::Args)]
#[command(after_help = "As root. Stops at the first test that passes, so a function that works is left alone.")]
pub struct Heal {
    /// PCI address, or the id that `pcieipc info` shows
    endpoint: String,
    /// Say what would be done; only test
    #[arg(long)]
    dry_run: bool,
    /// Also where another driver than pcieipc has it
    #[arg(long)]
    force: bool,
    /// The longest that a recovery or a return is waited for; the kernel gives up on a recovery after about 65 s
    #[arg(long, value_name = "TIME", default_value = "90s", value_parser = humantime::parse_duration)]
    timeout: Duration,
    /// One JSON object on standard output instead of text
    #[arg(long)]
    pub json: bool,
    /// The host's /sys and /dev stand below this folder
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

impl Heal {
    pub fn run(self) -> Result<(), Failure> {
        let sysfs = Sysfs::at(&self.root);
        let function = sysfs.function(address_of(&self.endpoint)?);
        if !self.force {
            refuse_others(&function)?;
        }
        let bench = Host::new(sysfs, function.clone());
        let options = Options { dry_run: self.dry_run, patience: self.timeout };
        let json = self.json;
        let (steps, healthy) = heal::heal(&bench, options, &mut |step| {
            if !json {
                println!("{}", line(step));
            }
        });
        if json {
            let address = function.address.to_string();
            println!("{}", json!({ "ok": healthy || self.dry_run, "address": address, "healthy": healthy, "steps": steps }));
        }
        if healthy || self.dry_run {
            return Ok(());
        }
        let why = steps.last().map_or("", |step| &step.text);
        let text = format!("{} is not healed: {why}{}", function.address, advice(&bench));
        Err(if json { Failure::Told(text) } else { Failure::Run(text) })
    }
}

/// A reset or a removal would take it away from a driver that did not ask for it.
fn refuse_others(function: &Function) -> Result<(), Failure> {
    match function.driver() {
        Some(driver) if driver != DRIVER => Err(Failure::Use(format!(
            "{} belongs to the driver {driver}; its own tools may heal it without taking it away, --force takes it away",
            function.address
        ))),
        _ => Ok(()),
    }
}

fn advice(bench: &dyn Bench) -> &'static str {
    if bench.exists() { "; see dmesg, and `pcieipc doctor`" } else { "" }
}

fn line(step: &Step) -> String {
    let outcome = match step.outcome {
        Outcome::Done => "ok",
        Outcome::Skipped => "not needed",
        Outcome::Failed => "FAILED",
        Outcome::Planned => "would",
    };
    let took = if step.seconds >= 0.1 { format!(" ({:.1} s)", step.seconds) } else { String::new() };
    format!("{:<8}{outcome:<12}{}{took}", step.step, step.text)
}
