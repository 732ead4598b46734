// SPDX-License-Identifier: MIT OR Apache-2.0
//! Some calls, traced step by step on every rank.

use std::io::{Read, Write};

use pcieipc::{Result, executor::Event};
use serde::{Deserialize, Serialize};

use super::{
    Job, Memory,
    answers::Number,
    seat::{Bench, WAIT, straight, two},
};
use crate::{failure::Failure, scratch::Scratch, supervisor::Interruption};

/// Steps that a rank keeps; of longer runs the last ones.
const MOST: usize = 100_000;

/// A step as it travels from a rank to the command. Times are nanoseconds of the host's monotonic clock.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Step {
    /// The number of the call.
    pub call: u32,
    /// The step's phase.
    pub phase: u16,
    /// Which chunk of every shard.
    pub window: u32,
    /// The shard.
    pub shard: u16,
    /// Bytes of the chunk.
    pub bytes: u32,
    /// When the rank first looked whether it can run.
    pub begun: u64,
    /// When all was there.
    pub ready: u64,
    /// When it was combined and stored.
    pub combined: u64,
    /// When it was published.
    pub ended: u64,
}

/// What one rank did.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankTrace {
    /// Whose.
    pub rank: usize,
    /// Its steps, oldest first.
    pub steps: Vec<Step>,
    /// Steps that were no longer kept.
    pub lost: u64,
}

impl From<Event> for Step {
    fn from(event: Event) -> Self {
        let Event { call, phase, window, shard, bytes, begun, ready, combined, ended, .. } = event;
        Self { call, phase, window, shard, bytes, begun, ready, combined, ended }
    }
}

/// What all ranks did.
#[derive(Debug)]
pub struct Recording {
    /// Of what.
    pub job: Job,
    /// Rank by rank.
    pub ranks: Vec<RankTrace>,
}

/// A rank's part: some calls to warm up, then the traced ones; writes its steps to standard output.
pub(super) fn record<T: Number>(bench: &mut Bench, job: &Job, calls: usize) -> std::result::Result<(), Failure> {
    let bytes = job.sizes.first().copied().unwrap_or(0);
    let (count, block) = bench.counts::<T>(bytes);
    let (collective, op, root) = (bench.collective, bench.op, bench.root);
    if job.memory == Memory::Registered {
        let mut buffer = bench.group.register::<T>(count, WAIT)?;
        let mut output = vec![T::default(); block];
        around(bench, calls, |bench| straight(&mut bench.group, collective, op, root, &mut buffer, &mut output))?;
    } else {
        let (input, mut output) = bench.buffers::<T>(count, block);
        around(bench, calls, |bench| two(&mut bench.group, collective, op, root, &input, &mut output))?;
    }
    let Some(trace) = bench.group.stop_trace() else { return Ok(()) };
    let steps = trace.events().into_iter().map(Step::from).collect();
    let told = RankTrace { rank: bench.group.rank(), steps, lost: trace.lost() };
    // Nobody ends while another still needs it.
    bench.group.barrier(WAIT)?;
    let text = serde_json::to_string(&told).map_err(|e| Failure::Run(e.to_string()))?;
    writeln!(std::io::stdout().lock(), "{text}").map_err(|e| Failure::Run(format!("the parent is gone: {e}")))
}

fn around(bench: &mut Bench, calls: usize, mut call: impl FnMut(&mut Bench) -> Result<()>) -> Result<()> {
    for _ in 0..3 {
        call(bench)?;
    }
    bench.group.barrier(WAIT)?;
    bench.group.start_trace(MOST);
    (0..calls).try_for_each(|_| call(bench))
}

/// Runs the job's calls, one process a rank, and collects what each did.
///
/// # Errors
/// Run when a rank fails; its own words are on standard error.
pub fn run(job: &Job, interruption: &Interruption) -> std::result::Result<Recording, Failure> {
    let meeting = Scratch::new()?;
    let mut crew = super::start(job, &meeting, |_| true)?;
    let mut ranks: Vec<RankTrace> = Vec::new();
    for (rank, child) in crew.0.iter_mut().enumerate() {
        let mut text = String::new();
        if let Some(mut stdout) = child.stdout.take() {
            stdout.read_to_string(&mut text).map_err(|e| Failure::Run(format!("reading from rank {rank}: {e}")))?;
        }
        if interruption.came() {
            return Err(Failure::Run("interrupted".into()));
        }
        if !text.is_empty() {
            ranks.push(serde_json::from_str(&text).map_err(|e| Failure::Run(format!("rank {rank} wrote no steps: {e}")))?);
        }
    }
    crew.end()?;
    Ok(Recording { job: job.clone(), ranks })
}

impl Recording {
    /// When the first step began.
    pub fn start(&self) -> u64 {
        self.steps().map(|(_, step)| step.begun).min().unwrap_or(0)
    }

    /// All steps with their ranks.
    pub fn steps(&self) -> impl Iterator<Item = (usize, &Step)> {
        self.ranks.iter().flat_map(|of| of.steps.iter().map(|step| (of.rank, step)))
    }

    /// Microseconds that each rank waited, combined and published, over the steps that were kept.
    pub fn totals(&self, rank: usize) -> [f64; 3] {
        let mut totals = [0.0; 3];
        for (_, step) in self.steps().filter(|(of, _)| *of == rank) {
            let parts = [(step.begun, step.ready), (step.ready, step.combined), (step.combined, step.ended)];
            totals.iter_mut().zip(parts).for_each(|(sum, (from, to))| *sum += to.saturating_sub(from) as f64 / 1e3);
        }
        totals
    }

    /// The trace event format that Perfetto and Chrome read: a process a rank, its steps one after the other, and in each step what it did.
    pub fn perfetto(&self) -> serde_json::Value {
        use serde_json::json;
        let start = self.start();
        let us = |at: u64| at.saturating_sub(start) as f64 / 1e3;
        let mut events = Vec::new();
        for of in &self.ranks {
            events.push(
                json!({ "ph": "M", "name": "process_name", "pid": of.rank, "args": { "name": format!("rank {}", of.rank) } }),
            );
            events.push(json!({ "ph": "M", "name": "process_sort_index", "pid": of.rank, "args": { "sort_index": of.rank } }));
            events.push(json!({ "ph": "M", "name": "thread_name", "pid": of.rank, "tid": 0, "args": { "name": "steps" } }));
        }
        for (rank, step) in self.steps() {
            let mut slice = |name: String, from: u64, to: u64, args: serde_json::Value| {
                let duration = to.saturating_sub(from) as f64 / 1e3;
                events.push(json!({
                    "ph": "X", "cat": "pcieipc", "name": name, "pid": rank, "tid": 0, "ts": us(from), "dur": duration, "args": args,
                }));
            };
            let args = json!({ "call": step.call, "phase": step.phase, "window": step.window, "shard": step.shard, "bytes": step.bytes });
            slice(format!("phase {}", step.phase), step.begun, step.ended, args);
            slice("wait".into(), step.begun, step.ready, json!({}));
            slice("combine".into(), step.ready, step.combined, json!({ "bytes": step.bytes }));
            slice("publish".into(), step.combined, step.ended, json!({}));
        }
        json!({
            "displayTimeUnit": "ns",
            "otherData": { "collective": self.job.collective, "ranks": self.job.ranks, "type": self.job.kind },
            "traceEvents": events,
        })
    }
}
