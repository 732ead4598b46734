// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measuring collectives: one process a rank, checked results, comparable times.

mod answers;
mod contest;
mod peers;
pub mod picture;
mod seat;
pub mod steps;
mod table;
pub mod timeline;
pub mod trace;
mod verdict;

pub use contest::Contest;
pub use seat::{Seat, take};
pub use table::Table;
pub use verdict::Verdict;

use std::{
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use pcieipc::tune::Calibration;
use serde::{Deserialize, Serialize};

use crate::{failure::Failure, ranks::Mover, scratch::Scratch, supervisor::Interruption};

/// Which memory the buffers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// The process's own; data goes through rings.
    Ordinary,
    /// Registered once; peers read it where it lies.
    Registered,
}

/// What carries the records.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Over {
    /// Shared memory.
    Shm,
    /// The module's channels.
    Kmod {
        /// Endpoint of each rank.
        endpoints: Vec<u32>,
        /// Who moves records.
        mover: Mover,
    },
}

/// What is measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// How many ranks.
    pub ranks: usize,
    /// Over what.
    pub over: Over,
    /// The collective's name.
    pub collective: String,
    /// The type's name.
    pub kind: String,
    /// The operation's name.
    pub op: String,
    /// Root, where there is one.
    pub root: usize,
    /// The algorithm's name, if it is not the default one.
    pub algorithm: Option<String>,
    /// What was measured of this machine, to choose by.
    pub calibration: Option<Calibration>,
    /// Whether records carry checksums.
    pub checked: bool,
    /// Which memory.
    pub memory: Memory,
    /// Bytes of the larger buffer of each row.
    pub sizes: Vec<usize>,
    /// How long each size is measured, five times over.
    pub time: Duration,
    /// Whether results are checked.
    pub check: bool,
    /// Whether the memory's own speed is measured beside: the same loads and stores on private memory.
    pub limit: bool,
    /// Instead of measuring, this many calls of the first size are traced.
    pub trace: Option<usize>,
}

/// One way of passing buffers at one size.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Timing {
    /// Seconds a call on the slowest rank: the median of five repeats.
    pub seconds: f64,
    /// Elements of all ranks that are not what they must be, before and after what is timed.
    pub wrong: u64,
    /// Bytes stored (to rings, buffers and scratch memory) for each byte of a rank's result, as counted where they are stored.
    pub stored: f64,
    /// System calls of the library a call and rank, as counted where they are made.
    pub syscalls: f64,
    /// Context switches a call and rank, as the kernel counts them for the process.
    pub switches: f64,
    /// Seconds a call and rank that a rank waited for records and room.
    pub waiting: f64,
    /// Seconds that it combined and copied.
    pub combining: f64,
    /// Seconds that it published records and gave them back.
    pub publishing: f64,
}

/// One size.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Row {
    /// Bytes of the larger buffer.
    pub bytes: usize,
    /// Elements of it.
    pub count: usize,
    /// With two buffers.
    pub out_of_place: Option<Timing>,
    /// With one buffer.
    pub in_place: Option<Timing>,
    /// Seconds that the same loads and stores take on private memory, all ranks at once.
    pub limit: Option<f64>,
}

/// Runs the job, one process a rank.
///
/// # Errors
/// Run when a rank fails; its own words are on standard error.
pub fn measure(job: &Job, interruption: &Interruption) -> Result<Table, Failure> {
    let meeting = Scratch::new()?;
    let mut crew = start(job, &meeting, |rank| rank == 0)?;
    let mut rows = Vec::new();
    if let Some(stdout) = crew.0.first_mut().and_then(|c| c.stdout.take()) {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            rows.push(serde_json::from_str(&line).map_err(|e| Failure::Run(format!("rank 0 wrote {line:?}: {e}")))?);
            if interruption.came() {
                return Err(Failure::Run("interrupted".into()));
            }
        }
    }
    crew.end()?;
    Ok(Table { job: job.clone(), rows })
}

/// Starts a process for each rank; `heard` says whose standard output is read.
fn start(job: &Job, meeting: &Scratch, heard: impl Fn(usize) -> bool) -> Result<Crew, Failure> {
    let program = std::env::current_exe().map_err(|e| Failure::Run(format!("finding this program: {e}")))?;
    let mut children: Vec<Child> = Vec::new();
    let result = (0..job.ranks).try_for_each(|rank| {
        let seat = Seat { rank, meeting: PathBuf::from(meeting.path()), job: job.clone() };
        let mut child = Command::new(&program)
            .arg(crate::commands::bench_rank::NAME)
            .stdin(Stdio::piped())
            .stdout(if heard(rank) { Stdio::piped() } else { Stdio::null() })
            .spawn()?;
        let line = serde_json::to_vec(&seat)?;
        let told = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(&line));
        children.push(child);
        told
    });
    let crew = Crew(children);
    result.map_err(|e| Failure::Run(format!("starting the ranks: {e}")))?;
    Ok(crew)
}

/// The rank processes; none outlives it.
struct Crew(Vec<Child>);

impl Crew {
    fn end(mut self) -> Result<(), Failure> {
        for (rank, child) in self.0.iter_mut().enumerate() {
            let status = child.wait().map_err(|e| Failure::Run(format!("waiting for rank {rank}: {e}")))?;
            if !status.success() {
                return Err(Failure::Run(format!("rank {rank} ended with {status}")));
            }
        }
        Ok(())
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A job for tests of what is made of its rows.
#[cfg(test)]
fn sample(collective: &str, ranks: usize) -> Job {
    Job {
        ranks,
        over: Over::Shm,
        collective: collective.into(),
        kind: "f32".into(),
        op: "sum".into(),
        root: 1,
        algorithm: None,
        calibration: None,
        checked: false,
        memory: Memory::Ordinary,
        sizes: vec![],
        time: Duration::ZERO,
        check: true,
        limit: false,
        trace: None,
    }
}
