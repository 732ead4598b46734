// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc trace`: what every rank did when, step by step.

use std::path::{Path, PathBuf};

use pcieipc::{
    plan::{Algorithm, Collective},
    reduce::{Kind, Op},
};

use crate::{
    bench::{self, Job, Memory, Over, timeline},
    commands::bench::bytes,
    failure::Failure,
    ranks::{Asked, Mover},
    supervisor::Interruption,
    tally::time,
    transport,
};

/// Record every step of every rank of some calls: for Perfetto, and as a picture
#[derive(Debug, clap::Args)]
pub struct Trace {
    /// How many ranks, one process each (1 to 16)
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    ranks: u8,
    /// all-reduce, reduce-scatter, all-gather, reduce, broadcast or all-to-all
    #[arg(long, default_value_t = Collective::AllReduce)]
    collective: Collective,
    /// Bytes of the larger buffer
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = bytes)]
    bytes: usize,
    /// How many calls are recorded, after three that are not
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    calls: u32,
    /// f64 f32 f16 bf16 i8 i16 i32 i64 u8 u16 u32 u64
    #[arg(long = "type", value_name = "TYPE", default_value_t = Kind::F32)]
    kind: Kind,
    /// sum, prod, min, max or avg
    #[arg(long, default_value_t = Op::Sum)]
    op: Op,
    /// The root of a reduce or broadcast
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    root: u8,
    /// Ordinary memory, or buffers registered once that all ranks can read (all-reduce only)
    #[arg(long, value_enum, default_value_t = Memory::Ordinary)]
    memory: Memory,
    /// one-shot, two-shot, star, ring, recursive-doubling or hierarchical, instead of the default choice
    #[arg(long)]
    algorithm: Option<Algorithm>,
    /// What carries the records
    #[arg(long, value_enum, default_value_t = Asked::Auto)]
    transport: Asked,
    /// With kmod: who moves the records
    #[arg(long, value_enum, default_value_t = Mover::Processor)]
    mover: Mover,
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
        let ranks = usize::from(self.ranks);
        if usize::from(self.root) >= ranks {
            return Err(Failure::Use(format!("there is no rank {} among {ranks}", self.root)));
        }
        if matches!(self.collective, Collective::SendReceive | Collective::Barrier) {
            return Err(Failure::Use(format!("{} is not recorded here; take all-reduce or another", self.collective)));
        }
        if self.memory == Memory::Registered && self.collective != Collective::AllReduce {
            return Err(Failure::Use("registered buffers are for all-reduce; leave --memory away".into()));
        }
        let interruption = Interruption::catch()?;
        let choice = transport::choose(self.transport, ranks, &[])?;
        eprintln!("transport: {} ({})", choice.name, choice.why);
        let over = if choice.endpoints.is_empty() {
            Over::Shm
        } else {
            Over::Kmod { endpoints: choice.endpoints.iter().map(|e| e.id.0).collect(), mover: self.mover }
        };
        let job = Job {
            ranks,
            over,
            collective: self.collective.name().into(),
            kind: self.kind.name().into(),
            op: self.op.name().into(),
            root: self.root.into(),
            algorithm: self.algorithm.map(|a| a.name().into()),
            calibration: None,
            checked: false,
            memory: self.memory,
            sizes: vec![self.bytes],
            time: std::time::Duration::ZERO,
            check: false,
            limit: false,
            trace: Some(self.calls as usize),
        };
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
