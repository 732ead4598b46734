// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc trace`: what every rank did when, step by step.

use std::path::{Path, PathBuf};

use super::workload::Workload;
use crate::{
    bench::{self, Job, timeline},
    commands::bench::bytes,
    failure::Failure,
    supervisor::Interruption,
    tally::time,
};

/// Record every step of every rank of some calls: for Perfetto, and as a picture
#[derive(Debug, clap::Args)]
pub struct Trace {
    #[command(flatten)]
    workload: Workload,
    /// Bytes of the larger buffer
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = bytes)]
    bytes: usize,
    /// How many calls are recorded, after three that are not
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    calls: u32,
    /// Where the trace goes, in the JSON that ui.perfetto.dev and chrome://tracing open
    #[arg(long, value_name = "FILE.json", default_value = "trace.json")]
    output: PathBuf,
    /// Also draw it
    #[arg(long, value_name = "FILE.svg")]
    svg: Option<PathBuf>,
    /// One JSON object on standard output instead of the table: the totals
    #[arg(long)]
    pub json: bool,
}

impl Trace {
    pub fn run(self) -> Result<(), Failure> {
        let interruption = Interruption::catch()?;
        let job = Job { trace: Some(self.calls as usize), ..self.workload.job(vec![self.bytes])? };
        let recording = bench::trace::run(&job, &interruption)?;
        write(&self.output, &recording.perfetto().to_string())?;
        if let Some(file) = &self.svg {
            write(file, &timeline::draw(&recording))?;
        }
        let lost: u64 = recording.ranks.iter().map(|of| of.lost).sum();
        if self.json {
            let ranks: Vec<_> = recording
                .ranks
                .iter()
                .map(|of| {
                    let [waiting, combining, publishing] = recording.totals(of.rank);
                    serde_json::json!({
                        "rank": of.rank, "steps": of.steps.len(), "lost": of.lost,
                        "waiting_us": waiting, "combining_us": combining, "publishing_us": publishing,
                    })
                })
                .collect();
            println!("{}", serde_json::json!({ "ok": true, "output": self.output, "job": recording.job, "ranks": ranks }));
            return Ok(());
        }
        println!("{:>6}{:>10}{:>14}{:>14}{:>14}", "rank", "steps", "waiting", "combining", "publishing");
        for of in &recording.ranks {
            let [waiting, combining, publishing] = recording.totals(of.rank).map(|us| time(us / 1e6));
            println!("{:>6}{:>10}{waiting:>14}{combining:>14}{publishing:>14}", of.rank, of.steps.len());
        }
        if lost > 0 {
            println!("{lost} earlier steps were no longer kept: record fewer calls");
        }
        println!("{}: open it in ui.perfetto.dev", self.output.display());
        Ok(())
    }
}

fn write(file: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(file, text).map_err(|e| Failure::Run(format!("{}: {e}", file.display())))
}
