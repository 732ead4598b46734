// SPDX-License-Identifier: MIT OR Apache-2.0
//! What each rank does in one collective, as data.
//!
//! An algorithm is a pure function from a [`Shape`] to one [`Plan`] a rank. A plan is a short program: [`Step`]s in
//! phases. The buffers are cut into shards and the shards into chunks of one record each; *window* `w` is chunk `w` of every
//! shard. All steps of a phase run for window `w`, and the phases are skewed: at tick `t` a rank runs its last phase on
//! window `t - P + 1`, ..., its first phase on window `t`. So while one chunk is being answered, the next ones travel, and
//! the order of all steps is fixed, which is what lets a checker prove that the program ends.
//!
//! One kind of step expresses everything. A step takes the chunk from all its sources, combines them in the order in which
//! they are listed, and stores the result to all its targets:
//!
//! | sources | targets | the field calls it |
//! |---|---|---|
//! | input | link | send |
//! | link | output | receive and copy |
//! | link, input | output | receive and reduce |
//! | link, input | link | receive, reduce and send on |
//! | link | output, link | receive, copy and send on |
//! | nothing | link | signal |
//! | link | nothing | wait |

mod all_reduce;
mod shape;

pub use all_reduce::{one_shot, ring, two_shot};
pub use shape::{Shape, shard_range};

use crate::error::Rank;

/// What a group computes together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Collective {
    /// Every rank gets the combination of all inputs.
    AllReduce = 1,
    /// Rank `r` gets block `r` of the combination of all inputs.
    ReduceScatter = 2,
    /// Every rank gets the blocks of all ranks, in rank order.
    AllGather = 3,
    /// The root gets the combination of all inputs.
    Reduce = 4,
    /// Every rank gets the root's input.
    Broadcast = 5,
    /// Rank `r` gets block `r` of every rank, in rank order.
    AllToAll = 6,
    /// One rank sends, another receives.
    SendReceive = 7,
    /// Nobody leaves before all have come.
    Barrier = 8,
}

/// How a collective is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Algorithm {
    /// Every rank sends all it has to every other and combines everything itself: one hop, for small messages.
    OneShot = 1,
    /// Every rank owns a shard: fan out, reduce, broadcast. Two hops, least traffic.
    TwoShot = 2,
    /// One rank combines everything and sends the result back.
    Star = 3,
    /// Shards travel around a ring, twice: every link carries the same.
    Ring = 4,
    /// Pairs at distance 1, 2, 4, ... exchange what they have.
    RecursiveDoubling = 5,
    /// Reduce inside each part of a tree, across the parts, and back down.
    Hierarchical = 6,
}

impl Algorithm {
    /// Whether every element is combined in rank order, which makes its bits independent of the algorithm.
    pub fn adds_in_rank_order(self) -> bool {
        matches!(self, Self::OneShot | Self::TwoShot | Self::Star)
    }
}

/// How elements lie in a record or in scratch memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// As in the user's buffers.
    Element,
    /// As a partial result: 16-bit floats as f32, everything else as it is.
    Partial,
}

/// Where a step takes a chunk from. Offsets are those of the shard's first element, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// This rank's input buffer.
    Input(usize),
    /// This rank's output buffer.
    Output(usize),
    /// This rank's partial results of the window, numbered.
    Scratch(usize),
    /// The next record from a peer.
    Link {
        /// Who sent it.
        from: Rank,
        /// How the elements lie in it.
        form: Form,
    },
}

/// Where a step stores a chunk to. Offsets are those of the shard's first element, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// This rank's output buffer.
    Output(usize),
    /// This rank's partial results of the window, numbered.
    Scratch(usize),
    /// A record to a peer.
    Link {
        /// To whom.
        to: Rank,
        /// How the elements lie in it.
        form: Form,
    },
}

/// Combine all sources in the order listed, store to all targets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Step {
    /// The number that the records of this step carry, so that the reader can tell a shard from another.
    pub shard: u16,
    /// Length of the shard in elements. A step of length 0 carries no data and runs once: a signal or a wait.
    pub len: usize,
    /// From where.
    pub sources: Vec<Source>,
    /// To where.
    pub targets: Vec<Target>,
    /// Whether the result is final: an average is divided here.
    pub finish: bool,
}

/// Everything that one rank does in one collective.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// What is computed.
    pub collective: Collective,
    /// How.
    pub algorithm: Algorithm,
    /// By whom.
    pub rank: Rank,
    /// With how many.
    pub ranks: usize,
    /// Elements of the input buffer.
    pub input: usize,
    /// Elements of the output buffer.
    pub output: usize,
    /// Elements of one record.
    pub chunk: usize,
    /// How many numbered scratch places a window has.
    pub scratch: usize,
    /// How many records a link must hold, so that nobody waits in a cycle.
    pub depth: usize,
    /// The steps, phase by phase; a phase may be empty for a rank.
    pub phases: Vec<Vec<Step>>,
}

impl Plan {
    /// How many windows the longest shard is cut into; at least 1.
    pub fn windows(&self) -> usize {
        let longest = self.phases.iter().flatten().map(|s| s.len).max().unwrap_or(0);
        longest.div_ceil(self.chunk).max(1)
    }

    /// How many ticks the whole program takes.
    pub fn ticks(&self) -> usize {
        self.windows() + self.phases.len().saturating_sub(1)
    }

    /// The steps in the order in which the rank runs them, each with its window.
    pub fn program(&self) -> impl Iterator<Item = (usize, &Step)> {
        let (windows, phases) = (self.windows(), self.phases.len());
        (0..self.ticks())
            .flat_map(move |tick| {
                (0..phases).rev().filter_map(move |p| {
                    let window = tick.checked_sub(p)?;
                    (window < windows).then_some((window, p))
                })
            })
            .flat_map(move |(window, p)| self.phases[p].iter().map(move |s| (window, s)))
            .filter(move |(window, s)| self.span(s, *window).is_some())
    }

    /// The part of the step's shard in a window: offset from the shard's start and length, or nothing when the step does
    /// not run in that window.
    pub fn span(&self, step: &Step, window: usize) -> Option<(usize, usize)> {
        if step.len == 0 {
            return (window == 0).then_some((0, 0));
        }
        let start = window * self.chunk;
        (start < step.len).then(|| (start, self.chunk.min(step.len - start)))
    }
}

impl Step {
    /// A step without data: nothing is stored before the peer has come this far.
    pub(crate) fn signal(to: Rank) -> Self {
        Self { shard: 0, len: 0, sources: vec![], targets: vec![Target::Link { to, form: Form::Element }], finish: false }
    }

    /// Waits for a signal.
    pub(crate) fn wait(from: Rank) -> Self {
        Self { shard: 0, len: 0, sources: vec![Source::Link { from, form: Form::Element }], targets: vec![], finish: false }
    }
}
