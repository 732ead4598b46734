// SPDX-License-Identifier: MIT OR Apache-2.0
//! One step: combine a chunk from all sources, store it to all targets.

use pcieipc_reduce::Form;

use crate::error::Rank;

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
    /// A record without data from a peer: it vouches for what the peer did before it.
    Signal(Rank),
    /// A peer's registered input buffer, read where it lies.
    PeerInput {
        /// Whose.
        of: Rank,
        /// The shard's first element there.
        start: usize,
    },
    /// A peer's registered output buffer, read where it lies.
    PeerOutput {
        /// Whose.
        of: Rank,
        /// The shard's first element there.
        start: usize,
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
    /// A record without data to a peer, sent after all else of the step is stored.
    Signal(Rank),
}

/// Combine all sources in the order listed, store to all targets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Step {
    /// The number that the records of this step carry, so that the reader can tell a shard from another.
    pub shard: u16,
    /// Length of the shard in elements. A step of length 0 carries no data and runs once, in the first window or the last.
    pub len: usize,
    /// For a step of length 0: whether it runs in the last window.
    pub last: bool,
    /// From where.
    pub sources: Vec<Source>,
    /// To where.
    pub targets: Vec<Target>,
    /// Whether the result is final: an average is divided here.
    pub finish: bool,
}

impl Source {
    /// The next record from a peer, in the user's form.
    pub(crate) fn element(from: Rank) -> Self {
        Self::Link { from, form: Form::Element }
    }
    /// The next record from a peer, a partial result.
    pub(crate) fn partial(from: Rank) -> Self {
        Self::Link { from, form: Form::Partial }
    }
}

impl Target {
    /// A record to a peer, in the user's form.
    pub(crate) fn element(to: Rank) -> Self {
        Self::Link { to, form: Form::Element }
    }
    /// A record to a peer, a partial result.
    pub(crate) fn partial(to: Rank) -> Self {
        Self::Link { to, form: Form::Partial }
    }
}

impl Step {
    /// Moves a shard without changing it.
    pub(crate) fn copy(shard: usize, len: usize, source: Source, targets: Vec<Target>) -> Self {
        Self { shard: shard as u16, len, sources: vec![source], targets, finish: false, last: false }
    }

    /// Combines a shard; the result is not final.
    pub(crate) fn combine(shard: usize, len: usize, sources: Vec<Source>, targets: Vec<Target>) -> Self {
        Self { shard: shard as u16, len, sources, targets, finish: false, last: false }
    }

    /// Combines a shard; the result is final.
    pub(crate) fn finish(shard: usize, len: usize, sources: Vec<Source>, targets: Vec<Target>) -> Self {
        Self { shard: shard as u16, len, sources, targets, finish: true, last: false }
    }

    /// Tells a peer that this rank has come so far.
    pub(crate) fn signal(to: Rank) -> Self {
        Self::combine(0, 0, vec![], vec![Target::Signal(to)])
    }

    /// Waits for a signal.
    pub(crate) fn wait(from: Rank) -> Self {
        Self::combine(0, 0, vec![Source::Signal(from)], vec![])
    }

    /// A step without data that runs after all windows have come through the phases before.
    pub(crate) fn at_the_end(self) -> Self {
        Self { last: true, ..self }
    }
}
