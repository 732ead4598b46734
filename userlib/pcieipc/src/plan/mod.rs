// SPDX-License-Identifier: MIT OR Apache-2.0
//! What each rank does in one collective, as data.
//!
//! An algorithm is a pure function from a [`Shape`] to one [`Plan`] a rank. A plan is a short program: [`Step`]s in
//! phases. The buffers are cut into shards and the shards into chunks of one record each; *window* `w` is chunk `w` of every
//! shard. All steps of a phase run for window `w`, and the phases are skewed: at tick `t` a rank runs its last phase on
//! window `t - P + 1`, ..., its first phase on window `t`. So while one chunk is being answered, the next ones travel, and
//! the order of all steps is fixed, which is what lets [`check()`] prove that the program ends.
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
mod blocks;
mod check;
mod direct;
mod doubling;
mod hierarchical;
mod ring;
mod rooted;
mod shape;
mod shares;
mod step;
mod tree;

pub use check::{Flaw, Proof, check};
pub use pcieipc_reduce::Form;
pub use shape::{Shape, shard_range};
pub use shares::Shares;
pub use step::{Source, Step, Target};
pub use tree::Tree;

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
    /// One rank sends, another receives; the others take no part.
    SendReceive = 7,
    /// Nobody leaves before all have come.
    Barrier = 8,
}

impl Collective {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Reduce,
        Self::Broadcast,
        Self::AllToAll,
        Self::SendReceive,
        Self::Barrier,
    ];

    /// Whether it does arithmetic.
    ///
    /// ```
    /// use pcieipc::plan::Collective;
    /// assert!(Collective::ReduceScatter.reduces() && !Collective::AllGather.reduces());
    /// ```
    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
    }

    /// The name that users read and write.
    ///
    /// ```
    /// use pcieipc::plan::Collective;
    /// assert_eq!(Collective::AllToAll.name().parse(), Ok(Collective::AllToAll));
    /// ```
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
            Self::Reduce => "reduce",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all-to-all",
            Self::SendReceive => "send-receive",
            Self::Barrier => "barrier",
        }
    }
}

impl std::fmt::Display for Collective {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Collective {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|c| c.name() == s).ok_or_else(|| format!("no collective is called {s}"))
    }
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
    /// Straight from the peers' registered buffers, in two hops where elements are combined for all; records only signal.
    Direct = 7,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::OneShot, Self::TwoShot, Self::Star, Self::Ring, Self::RecursiveDoubling, Self::Hierarchical, Self::Direct];

    /// Whether every element is combined in rank order, which makes its bits independent of the algorithm.
    ///
    /// ```
    /// use pcieipc::plan::Algorithm;
    /// assert!(Algorithm::TwoShot.adds_in_rank_order() && !Algorithm::Ring.adds_in_rank_order());
    /// ```
    pub fn adds_in_rank_order(self) -> bool {
        matches!(self, Self::OneShot | Self::TwoShot | Self::Star | Self::Direct)
    }

    /// The name that users read and write.
    ///
    /// ```
    /// use pcieipc::plan::Algorithm;
    /// assert_eq!(Algorithm::RecursiveDoubling.name().parse(), Ok(Algorithm::RecursiveDoubling));
    /// ```
    pub fn name(self) -> &'static str {
        match self {
            Self::OneShot => "one-shot",
            Self::TwoShot => "two-shot",
            Self::Star => "star",
            Self::Ring => "ring",
            Self::RecursiveDoubling => "recursive-doubling",
            Self::Hierarchical => "hierarchical",
            Self::Direct => "direct",
        }
    }
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Algorithm {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|a| a.name() == s).ok_or_else(|| format!("no algorithm is called {s}"))
    }
}

/// Everything that one rank does in one collective.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// What is computed.
    pub collective: Collective,
    /// How.
    pub algorithm: Algorithm,
    /// For which arguments; the same on all ranks.
    pub shape: Shape,
    /// By whom.
    pub rank: Rank,
    /// Elements of this rank's input buffer.
    pub input: usize,
    /// Elements of this rank's output buffer.
    pub output: usize,
    /// How many numbered scratch places a window has on this rank.
    pub scratch: usize,
    /// How many records a link must hold, so that nobody waits in a cycle; the same on all ranks.
    pub depth: usize,
    /// The steps, phase by phase; a phase may be empty for a rank, but all ranks have as many phases.
    pub phases: Vec<Vec<Step>>,
}

/// The plan of `rank`, or `None` where the collective has no such algorithm. `tree` is looked at by
/// [`Algorithm::Hierarchical`] only.
///
/// ```
/// use pcieipc::plan::{self, Algorithm, Collective, Shape, Tree};
///
/// let shape = Shape::new(4, 1000, 64);
/// let plans: Vec<_> = (0..4)
///     .map(|rank| plan::build(Collective::AllReduce, Algorithm::TwoShot, shape, rank, &Tree::flat(4)).unwrap())
///     .collect();
/// let proof = plan::check(&plans).unwrap();
/// assert!(proof.rank_order);
/// ```
pub fn build(collective: Collective, algorithm: Algorithm, shape: Shape, rank: Rank, tree: &Tree) -> Option<Plan> {
    use {Algorithm as A, Collective as C};
    let plan = match (collective, algorithm) {
        (C::AllReduce, A::OneShot) => all_reduce::one_shot(shape, rank),
        (C::AllReduce, A::TwoShot) => all_reduce::two_shot(shape, rank),
        (C::AllReduce, A::Star) => all_reduce::star(shape, rank),
        (C::AllReduce, A::Ring) => ring::all_reduce(shape, rank),
        (C::AllReduce, A::RecursiveDoubling) => doubling::all_reduce(shape, rank),
        (C::AllReduce, A::Hierarchical) => hierarchical::all_reduce(shape, rank, tree),
        (C::AllReduce, A::Direct) => direct::all_reduce(shape, rank),
        (C::ReduceScatter, A::TwoShot) => blocks::reduce_scatter(shape, rank),
        (C::ReduceScatter, A::Direct) => direct::reduce_scatter(shape, rank),
        (C::ReduceScatter, A::Ring) => ring::reduce_scatter(shape, rank),
        (C::AllGather, A::TwoShot) => blocks::all_gather(shape, rank),
        (C::AllGather, A::Direct) => direct::all_gather(shape, rank),
        (C::AllGather, A::Ring) => ring::all_gather(shape, rank),
        (C::AllToAll, A::TwoShot) => blocks::all_to_all(shape, rank),
        (C::Reduce, A::Star) => rooted::reduce_star(shape, rank),
        (C::Reduce, A::TwoShot) => rooted::reduce_two_shot(shape, rank),
        (C::Reduce, A::Hierarchical) => hierarchical::reduce(shape, rank, tree),
        (C::Broadcast, A::Star) => rooted::broadcast_star(shape, rank),
        (C::Broadcast, A::TwoShot) => rooted::broadcast_two_shot(shape, rank),
        (C::Broadcast, A::Direct) => direct::broadcast(shape, rank),
        (C::Broadcast, A::Ring) => ring::broadcast(shape, rank),
        (C::Broadcast, A::Hierarchical) => hierarchical::broadcast(shape, rank, tree),
        (C::SendReceive, A::OneShot) => rooted::send_receive(shape, rank),
        (C::Barrier, A::OneShot) => Plan::meet(Collective::Barrier, Algorithm::OneShot, shape, rank),
        (C::Barrier, A::RecursiveDoubling) => doubling::barrier(shape, rank),
        _ => return None,
    };
    Some(plan)
}

impl Plan {
    /// How many ranks take part.
    ///
    /// ```
    /// # use pcieipc::plan::{self, Algorithm, Collective, Shape, Tree};
    /// # let plan = plan::build(Collective::AllReduce, Algorithm::TwoShot, Shape::new(4, 1000, 64), 0, &Tree::flat(4)).unwrap();
    /// assert_eq!(plan.ranks(), 4);
    /// ```
    pub fn ranks(&self) -> usize {
        self.shape.ranks
    }

    /// How many windows the longest shard is cut into; at least 1.
    ///
    /// ```
    /// # use pcieipc::plan::{self, Algorithm, Collective, Shape, Tree};
    /// # let plan = plan::build(Collective::AllReduce, Algorithm::TwoShot, Shape::new(4, 1000, 64), 0, &Tree::flat(4)).unwrap();
    /// assert_eq!(plan.windows(), 4); // 250 elements a shard, 64 a record
    /// ```
    pub fn windows(&self) -> usize {
        let longest = self.phases.iter().flatten().map(|s| s.len).max().unwrap_or(0);
        longest.div_ceil(self.shape.chunk).max(1)
    }

    /// How many ticks the whole program takes.
    ///
    /// ```
    /// # use pcieipc::plan::{self, Algorithm, Collective, Shape, Tree};
    /// # let plan = plan::build(Collective::AllReduce, Algorithm::TwoShot, Shape::new(4, 1000, 64), 0, &Tree::flat(4)).unwrap();
    /// assert_eq!(plan.ticks(), plan.windows() + plan.phases.len() - 1);
    /// ```
    pub fn ticks(&self) -> usize {
        self.windows() + self.phases.len().saturating_sub(1)
    }

    /// The steps in the order in which the rank runs them, each with its window and the part of the shard that it moves
    /// (offset from the shard's start, length).
    ///
    /// ```
    /// # use pcieipc::plan::{self, Algorithm, Collective, Shape, Tree};
    /// # let plan = plan::build(Collective::AllReduce, Algorithm::TwoShot, Shape::new(4, 1000, 64), 0, &Tree::flat(4)).unwrap();
    /// for now in plan.program() {
    ///     println!("window {}: {} elements from {:?} to {:?}", now.window, now.len, now.step.sources, now.step.targets);
    /// }
    /// ```
    pub fn program(&self) -> impl Iterator<Item = Move<'_>> {
        let (windows, phases) = (self.windows(), self.phases.len());
        (0..self.ticks())
            .flat_map(move |tick| (0..phases).rev().filter_map(move |phase| Some((tick.checked_sub(phase)?, phase))))
            .filter(move |(window, _)| *window < windows)
            .flat_map(move |(window, phase)| self.phases[phase].iter().map(move |step| (window, phase, step)))
            .filter_map(move |(window, phase, step)| {
                let (offset, len) = self.span(step, window)?;
                Some(Move { window, phase, step, offset, len })
            })
    }

    /// The part of the step's shard in a window: offset from the shard's start and length, or nothing when the step does
    /// not run in that window.
    ///
    /// ```
    /// # use pcieipc::plan::{self, Algorithm, Collective, Shape, Tree};
    /// # let plan = plan::build(Collective::AllReduce, Algorithm::TwoShot, Shape::new(4, 1000, 64), 0, &Tree::flat(4)).unwrap();
    /// let step = &plan.phases[0][0];
    /// assert_eq!((plan.span(step, 0), plan.span(step, 3)), (Some((0, 64)), Some((192, 58))));
    /// ```
    pub fn span(&self, step: &Step, window: usize) -> Option<(usize, usize)> {
        if step.len == 0 {
            let runs = if step.last { self.windows() - 1 } else { 0 };
            return (window == runs).then_some((0, 0));
        }
        let start = window * self.shape.chunk;
        (start < step.len).then(|| (start, self.shape.chunk.min(step.len - start)))
    }

    /// A plan whose buffers hold `shape.count` elements on this rank.
    pub(crate) fn new(
        collective: Collective,
        algorithm: Algorithm,
        shape: Shape,
        rank: Rank,
        depth: usize,
        phases: Vec<Vec<Step>>,
    ) -> Self {
        Self { collective, algorithm, shape, rank, input: shape.count, output: shape.count, scratch: 0, depth, phases }
    }

    /// Nothing to move, but all ranks still compare their arguments and wait for each other.
    pub(crate) fn meet(collective: Collective, algorithm: Algorithm, shape: Shape, rank: Rank) -> Self {
        let phases = vec![shape.peers(rank).map(Step::signal).collect(), shape.peers(rank).map(Step::wait).collect()];
        Self::new(collective, algorithm, Shape { count: 0, ..shape }, rank, 1, phases)
    }
}

/// A step in a window, as [`Plan::program`] lists it.
#[derive(Debug, Clone, Copy)]
pub struct Move<'a> {
    /// Which chunk of every shard.
    pub window: usize,
    /// The step's phase.
    pub phase: usize,
    /// The step.
    pub step: &'a Step,
    /// Elements from the shard's start.
    pub offset: usize,
    /// Elements moved.
    pub len: usize,
}

#[cfg(test)]
mod tests;
