// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a rank tells its parent.

use serde::{Deserialize, Serialize};

use crate::gradients::Judgement;

/// CLOCK_MONOTONIC in nanoseconds: the same clock in every process of a machine.
pub fn now_ns() -> u64 {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

/// What a group's transport has counted so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Doorbells rung by this rank.
    pub doorbells: u64,
    /// Interrupts of this rank's endpoint.
    pub interrupts: u64,
    /// Times that this rank slept and was woken.
    pub wakeups: u64,
    /// Bytes that this rank's endpoint moved by its DMA engine.
    pub dma_bytes: u64,
}

impl Counters {
    /// What was counted since `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            doorbells: self.doorbells.saturating_sub(before.doorbells),
            interrupts: self.interrupts.saturating_sub(before.interrupts),
            wakeups: self.wakeups.saturating_sub(before.wakeups),
            dma_bytes: self.dma_bytes.saturating_sub(before.dma_bytes),
        }
    }

    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            doorbells: self.doorbells + other.doorbells,
            interrupts: self.interrupts + other.interrupts,
            wakeups: self.wakeups + other.wakeups,
            dma_bytes: self.dma_bytes + other.dma_bytes,
        }
    }
}

/// One tensor reduced by one rank.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct TensorDone {
    /// Its place in the job's list.
    pub index: usize,
    /// Whether this was after the group shrank.
    pub shrunk: bool,
    /// Start of the call, see [`now_ns`].
    pub start_ns: u64,
    /// End of the call.
    pub end_ns: u64,
    /// Counted during the call.
    pub counters: Counters,
    /// Compared with the float64 sum, if that was asked for.
    pub judgement: Option<Judgement>,
    /// A digest of the result: equal on all ranks when all hold the same bits.
    pub digest: u64,
}

/// The typed error that a rank got when another was lost.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Lost {
    /// The error's name: `EndpointGone`, `PeerDied`, ...
    pub kind: String,
    /// Its text.
    pub text: String,
    /// When the interrupted call had started.
    pub start_ns: u64,
    /// When it came back.
    pub at_ns: u64,
}

/// One line from a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "report")]
pub enum Report {
    /// All ranks have met.
    Met {
        /// When the rank started.
        start_ns: u64,
        /// When they had met.
        at_ns: u64,
    },
    /// Tensors read and reduced so far; now and then.
    Progress {
        /// Two for each tensor: read, reduced.
        steps: usize,
    },
    /// A tensor is reduced, looked at and written.
    Tensor(TensorDone),
    /// A round of the rehearsal went well.
    Round {
        /// Counted from 1.
        number: u64,
        /// When it began.
        start_ns: u64,
        /// When it ended.
        end_ns: u64,
    },
    /// A round of the rehearsal came back with a typed error.
    Lost(Lost),
    /// The survivors are a group again.
    Shrunk {
        /// When shrinking began.
        start_ns: u64,
        /// When it was done.
        at_ns: u64,
        /// Who is left, by their old numbers.
        members: Vec<usize>,
    },
    /// The job can not be done.
    Failed {
        /// The error's name.
        kind: String,
        /// Its text.
        text: String,
        /// Whether the arguments were bad.
        bad_use: bool,
    },
    /// The job is done.
    Done {
        /// Counted during the whole job.
        counters: Counters,
    },
}
