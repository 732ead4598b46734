// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which algorithm and chunk a collective takes, by what the simulator says of this machine.
//!
//! [`Calibration::measure`] takes a second or two and gives a few whole numbers; [`store`] keeps them for this machine, and [`stored_or_measured`]
//! does both on first use. From them, the tree of
//! ranks and the size of a message, [`Tuner::choice`] is a pure function, so all ranks that hold the same numbers choose
//! the same. Ranks compare the numbers when they meet. Only plans that add in rank order are candidates: a choice never changes bits.
//!
//! ```no_run
//! use pcieipc::group::{Group, GroupOptions};
//!
//! # fn main() -> pcieipc::Result<()> {
//! // What is stored for this machine, which is measured first where nothing is.
//! let group = Group::meet(GroupOptions::new(0, 2, "/run/user/1000/my-group").tuned(&[]))?;
//! # Ok(())
//! # }
//! ```

mod cache;
mod measure;
mod ways;

pub use cache::{key, store, stored, stored_or_measured};
pub(crate) use cache::{key_in, on_first_use};
pub use ways::Ways;

use serde::{Deserialize, Serialize};

use crate::{
    plan::{self, Algorithm, Collective, Plan, Shape, Tree},
    sim::{self, Machine, Processes},
};

/// Payloads of a record, in bytes, among which the tuner chooses.
pub const CHUNKS: [usize; 3] = [64 << 10, 128 << 10, 256 << 10];

/// Payloads of a record, in bytes, at which rates are measured: short ones move more slowly, since their lines come one by one from another
/// processor's cache.
pub const RECORDS: [usize; 6] = [1 << 10, 4 << 10, 16 << 10, CHUNKS[0], CHUNKS[1], CHUNKS[2]];

/// A candidate must be faster than the default by so many percent of the default's time.
const MARGIN: f64 = 0.05;

/// Windows of the longest chunk beyond which larger messages behave alike.
const WINDOWS: usize = 8;

/// The windows into which a message is cut at most on the model, so that a choice takes milliseconds; those of the shortest chunk at the largest size.
const MOST_WINDOWS: usize = WINDOWS * CHUNKS[CHUNKS.len() - 1] / CHUNKS[0];

/// What a machine's processors and memory do for a group. Whole numbers, so that they are the same wherever they are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Nanoseconds of a step besides its bytes.
    pub step_ns: u32,
    /// Nanoseconds that a record takes to a rank that is nearest.
    pub hop_ns: u32,
    /// Processors that ranks share.
    pub processors: u32,
    /// Megabytes (10⁶) a second that a rank loads or stores with records of [`RECORDS`] bytes.
    pub megabytes: [u32; RECORDS.len()],
}

impl Calibration {
    /// Whether the numbers can be those of a machine.
    ///
    /// ```
    /// # use pcieipc::{plan::{Algorithm, Collective, Tree}, tune::{Calibration, Choice, Tuner}};
    /// # let calibration = Calibration { step_ns: 300, hop_ns: 200, processors: 8, megabytes: [2_000, 4_000, 8_000, 9_000, 10_000, 9_000] };
    /// # let tuner = Tuner::new(Tree::flat(4), 4, calibration);
    /// # let default = Choice { algorithm: Algorithm::TwoShot, chunk: 128 << 10 };
    /// assert!(calibration.is_plausible());
    /// assert!(!Calibration { processors: 0, ..calibration }.is_plausible());
    /// ```
    pub fn is_plausible(&self) -> bool {
        (1..=100_000_000).contains(&self.step_ns)
            && self.hop_ns <= 100_000_000
            && (1..=65_536).contains(&self.processors)
            && self.megabytes.iter().all(|m| (1..=10_000_000).contains(m))
    }

    /// The model of ranks whose records are so long.
    fn processes(&self, record: usize) -> Processes {
        Processes {
            step_us: f64::from(self.step_ns) / 1e3,
            hop_us: f64::from(self.hop_ns) / 1e3,
            gbps: self.rate(record),
            processors: self.processors as usize,
        }
    }

    /// Gigabytes a second with records of so many bytes. Between two sizes that were measured, the time of a byte lies as far between theirs
    /// as the size, in doublings; beyond them it is that of the nearest.
    fn rate(&self, record: usize) -> f64 {
        let ns = |at: usize| 1e3 / f64::from(self.megabytes[at]);
        let next = RECORDS.iter().position(|size| *size >= record).unwrap_or(RECORDS.len() - 1);
        let Some(last) = next.checked_sub(1).filter(|_| record < RECORDS[next]) else { return 1.0 / ns(next) };
        let doublings = |from: usize, to: usize| (to as f64 / from as f64).log2();
        let part = doublings(RECORDS[last], record) / doublings(RECORDS[last], RECORDS[next]);
        1.0 / (ns(last) + (ns(next) - ns(last)) * part)
    }
}

/// What a collective takes at a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// How.
    pub algorithm: Algorithm,
    /// Payload of one record, in bytes.
    pub chunk: usize,
}

/// A choice and what spoke for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// What is taken.
    pub choice: Choice,
    /// What would be taken without a calibration.
    pub default: Choice,
    /// Each candidate with its predicted microseconds, in the order in which ties are broken; the default is the first.
    pub candidates: Vec<(Choice, f64)>,
}

/// Chooses for one group.
#[derive(Debug, Clone)]
pub struct Tuner {
    tree: Tree,
    ranks: usize,
    calibration: Calibration,
    ways: Option<Ways>,
}

impl Tuner {
    /// For ranks that are near each other as the tree says; it must cover `ranks`.
    ///
    /// ```
    /// # use pcieipc::{plan::{Algorithm, Collective, Tree}, tune::{Calibration, Choice, Tuner}};
    /// # let calibration = Calibration { step_ns: 300, hop_ns: 200, processors: 8, megabytes: [2_000, 4_000, 8_000, 9_000, 10_000, 9_000] };
    /// # let tuner = Tuner::new(Tree::flat(4), 4, calibration);
    /// # let default = Choice { algorithm: Algorithm::TwoShot, chunk: 128 << 10 };
    /// assert_eq!(tuner.choice(Collective::AllGather, 1 << 20, default), default, "there is one plan in rank order");
    /// ```
    pub fn new(tree: Tree, ranks: usize, calibration: Calibration) -> Self {
        Self { tree, ranks, calibration, ways: None }
    }

    /// With records that engines of the endpoints carry: over the endpoints' links, in both directions. Without this, processors carry them
    /// through memory, and links do not matter.
    ///
    /// ```
    /// # use pcieipc::{plan::{Algorithm, Collective, Tree}, tune::{Calibration, Choice, Tuner}};
    /// # let calibration = Calibration { step_ns: 300, hop_ns: 200, processors: 8, megabytes: [2_000, 4_000, 8_000, 9_000, 10_000, 9_000] };
    /// # let tuner = Tuner::new(Tree::flat(4), 4, calibration);
    /// # let default = Choice { algorithm: Algorithm::TwoShot, chunk: 128 << 10 };
    /// use pcieipc::tune::Ways;
    /// let slow = Ways { links: vec![500; 4], up: (0..4).map(|rank| vec![rank]).collect() };
    /// let us = |tuner: &Tuner| tuner.explain(Collective::AllReduce, 1 << 20, default).candidates[0].1;
    /// assert!(us(&tuner.clone().over(Some(slow))) > us(&tuner));
    /// ```
    pub fn over(mut self, ways: Option<Ways>) -> Self {
        self.ways = ways.filter(|w| w.is_sound(self.ranks));
        self
    }

    /// The size that stands for all that choose alike: the next power of two, up to where larger ones behave alike.
    ///
    /// ```
    /// # use pcieipc::{plan::{Algorithm, Collective, Tree}, tune::{Calibration, Choice, Tuner}};
    /// # let calibration = Calibration { step_ns: 300, hop_ns: 200, processors: 8, megabytes: [2_000, 4_000, 8_000, 9_000, 10_000, 9_000] };
    /// # let tuner = Tuner::new(Tree::flat(4), 4, calibration);
    /// # let default = Choice { algorithm: Algorithm::TwoShot, chunk: 128 << 10 };
    /// assert_eq!((tuner.class(1), tuner.class(3000), tuner.class(4096)), (64, 4096, 4096));
    /// ```
    pub fn class(&self, bytes: usize) -> usize {
        let most = (self.ranks.max(1) * WINDOWS * CHUNKS[CHUNKS.len() - 1]).next_power_of_two();
        if bytes >= most { most } else { bytes.next_power_of_two().max(64) }
    }

    /// What a message of `bytes` takes: the default unless another is predicted to be clearly faster. Collectives with one plan in
    /// rank order keep it, and the default chunk.
    ///
    /// ```
    /// # use pcieipc::{plan::{Algorithm, Collective, Tree}, tune::{Calibration, Choice, Tuner}};
    /// # let calibration = Calibration { step_ns: 300, hop_ns: 200, processors: 8, megabytes: [2_000, 4_000, 8_000, 9_000, 10_000, 9_000] };
    /// # let tuner = Tuner::new(Tree::flat(4), 4, calibration);
    /// # let default = Choice { algorithm: Algorithm::TwoShot, chunk: 128 << 10 };
    /// let choice = tuner.choice(Collective::AllReduce, 64, default);
    /// assert!(choice.algorithm.adds_in_rank_order());
    /// ```
    pub fn choice(&self, collective: Collective, bytes: usize, default: Choice) -> Choice {
        self.explain(collective, bytes, default).choice
    }

    /// [`Self::choice`] with its reasons.
    ///
    /// ```
    /// # use pcieipc::{plan::{Algorithm, Collective, Tree}, tune::{Calibration, Choice, Tuner}};
    /// # let calibration = Calibration { step_ns: 300, hop_ns: 200, processors: 8, megabytes: [2_000, 4_000, 8_000, 9_000, 10_000, 9_000] };
    /// # let tuner = Tuner::new(Tree::flat(4), 4, calibration);
    /// # let default = Choice { algorithm: Algorithm::TwoShot, chunk: 128 << 10 };
    /// let explained = tuner.explain(Collective::AllReduce, 64 << 10, default);
    /// for (choice, us) in &explained.candidates {
    ///     println!("{choice:?}: {us} us");
    /// }
    /// assert_eq!(explained.candidates[0].0, explained.default);
    /// ```
    pub fn explain(&self, collective: Collective, bytes: usize, default: Choice) -> Explanation {
        let class = self.class(bytes);
        let algorithms: &[Algorithm] = match collective {
            Collective::AllReduce => &[Algorithm::OneShot, Algorithm::TwoShot, Algorithm::Star],
            Collective::Reduce | Collective::Broadcast => &[Algorithm::Star, Algorithm::TwoShot],
            _ => &[],
        };
        // Two ranks with a processor each were measured. Where ranks share processors, the model takes a sleeper's waking for work of every step.
        if self.ranks > self.calibration.processors as usize {
            return Explanation { choice: default, default, candidates: Vec::new() };
        }
        let mut candidates = Vec::new();
        let all = algorithms.iter().flat_map(|&algorithm| CHUNKS.map(|chunk| Choice { algorithm, chunk }));
        for choice in std::iter::once(default).chain(all.filter(|c| *c != default)) {
            // Records are no longer than the message, so a larger chunk would be the same plan.
            let needed = CHUNKS.iter().copied().find(|c| *c >= class).unwrap_or(usize::MAX);
            // Others than the default must be run on the model as they are, not with fewer, longer records.
            let windows = shard(choice.algorithm, self.ranks, class).div_ceil(choice.chunk.max(1));
            if choice != default && (choice.chunk > needed || windows > MOST_WINDOWS) {
                continue;
            }
            if let Some(us) = self.predict(collective, choice, class) {
                candidates.push((choice, us));
            }
        }
        let mut best = candidates.first().copied().filter(|(c, _)| *c == default);
        if let Some((_, usual)) = best {
            for &(choice, us) in &candidates {
                if us < usual * (1.0 - MARGIN) && best.is_none_or(|(_, least)| us < least) {
                    best = Some((choice, us));
                }
            }
        }
        Explanation { choice: best.map_or(default, |(c, _)| c), default, candidates }
    }

    /// Microseconds of a collective on the model, or `None` where there is no such plan.
    fn predict(&self, collective: Collective, choice: Choice, bytes: usize) -> Option<f64> {
        const ELEMENT: usize = 4;
        // Records are no longer than a shard.
        let record = choice.chunk.min(shard(choice.algorithm, self.ranks, bytes));
        let machine = Machine::of_processes(&self.tree, self.calibration.processes(record)).ok()?;
        let machine = self.ways.iter().fold(machine, Machine::over);
        time(&machine, &self.tree, self.ranks, (collective, choice), bytes / ELEMENT, ELEMENT)
    }
}

/// How much of a message is cut into records of its own.
fn shard(algorithm: Algorithm, ranks: usize, whole: usize) -> usize {
    match algorithm {
        Algorithm::OneShot | Algorithm::Star => whole,
        _ => whole.div_ceil(ranks.max(1)),
    }
}

/// Runs the plans of a choice on a machine.
fn time(
    machine: &Machine,
    tree: &Tree,
    ranks: usize,
    (collective, choice): (Collective, Choice),
    count: usize,
    element: usize,
) -> Option<f64> {
    let chunk = (choice.chunk / element).max(shard(choice.algorithm, ranks, count).div_ceil(MOST_WINDOWS));
    let shape = Shape { align: 64 / element, ..Shape::new(ranks, count, chunk) };
    let plans: Option<Vec<Plan>> = (0..ranks).map(|rank| plan::build(collective, choice.algorithm, shape, rank, tree)).collect();
    Some(sim::run(machine, &plans?, element)?.us)
}

#[cfg(test)]
mod tests;
