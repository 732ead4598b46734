// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the parent tells a rank.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use crate::gradients::Number;

/// Everything that one rank needs to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// The process that hears the reports; without it the rank ends.
    pub parent: u32,
    /// This rank.
    pub rank: usize,
    /// The private directory in which the ranks meet.
    pub meeting: PathBuf,
    /// Over what.
    pub transport: Transport,
    /// How.
    pub algorithm: Algorithm,
    /// Whether every record carries a checksum.
    pub checked: bool,
    /// The longest that one call may wait.
    pub timeout: Duration,
    /// The gradient file of every rank.
    pub inputs: Vec<PathBuf>,
    /// Names and types of the tensors to reduce, in order.
    pub tensors: Vec<(String, Number)>,
    /// Where this rank writes the sum: a file that starts with the header of its input and has room for the data.
    pub output: Option<PathBuf>,
    /// Whether this rank compares what it got with the float64 sum.
    pub check: bool,
    /// What to go through after the tensors.
    pub rehearsal: Option<Rehearsal>,
}

/// What `--transport` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Asked {
    /// /dev/pcieipc when it has a free endpoint for every rank, otherwise shared memory; says which and why
    Auto,
    /// Channels of /dev/pcieipc, one endpoint a rank
    Kmod,
    /// Shared memory: no module, no hardware
    Shm,
}

/// The way that the ranks' records take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub enum Transport {
    /// Plain shared memory.
    Shm,
    /// Channels of `/dev/pcieipc`, this rank on that endpoint.
    Kmod {
        /// The module's id of it.
        endpoint: u32,
        /// Who moves the records.
        mover: Mover,
    },
}

/// Who moves records over channels of `/dev/pcieipc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mover {
    /// The processor stores them into the reader's ring
    Processor,
    /// The writer's endpoint copies them there with its DMA engine
    Engine,
}

/// The algorithms that the command offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// What is predicted to be fastest for this machine and its tree (`pcieipc tune`); small messages in one shot, else two shots, where
    /// nothing was measured
    Auto,
    /// Every rank owns a shard: fan out, reduce, broadcast
    TwoShot,
    /// Shards travel around a ring, twice
    Ring,
}

/// A loss on purpose: reduce over and over until a rank is lost, shrink, and reduce again.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Rehearsal {
    /// Whom the parent is going to take away.
    pub victim: usize,
    /// Give up when nothing has happened for so long.
    pub patience: Duration,
}
