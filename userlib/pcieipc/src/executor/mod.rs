// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs plans over any [`Links`].

mod arguments;
mod calls;
mod checksum;
mod choice;
mod flight;
mod request;
mod run;
mod short;
mod start;
mod stores;
mod trace;

use std::{collections::VecDeque, sync::Arc, time::Instant};

use crate::{
    error::{Error, Rank, Result},
    link::Links,
    plan::{self, Algorithm, Collective, Form, Plan, Shape, Shares, Tree},
    reduce::{Isa, Kind},
    tune::{self, Calibration},
};

use arguments::{Arguments, Group};
use flight::Flight;
pub use request::{Buffer, Failed, Lent, Request, Started};
pub use run::Volume;
use run::{Pace, Planned, Run, Tools};
use short::Short;
pub use trace::{Event, Totals, Trace};

/// The largest group that an executor serves.
pub const MAX_RANKS: usize = 16;

/// How collectives are run. All ranks of a group must hold the same; they compare it in every record.
#[derive(Debug, Clone)]
pub struct Options {
    /// This algorithm wherever the collective has it, instead of the default choice. Those that do not add in rank order
    /// give other bits.
    pub algorithm: Option<Algorithm>,
    /// Payload of one record of a long message, in bytes; small enough that a chunk stays in the processor's cache.
    pub chunk: usize,
    /// Bytes of a shard after which peers are told that they can copy it from a registered buffer.
    pub direct_chunk: usize,
    /// Up to so many bytes, a message goes to every rank at once ([`Algorithm::OneShot`]).
    pub one_shot_up_to: usize,
    /// Which ranks are near each other, for [`Algorithm::Hierarchical`]; all alike if there is none. A group that shrinks keeps
    /// what it says of the ranks that are left.
    pub tree: Option<Tree>,
    /// What was measured of this machine: sizes then take what [`crate::tune`] predicts to be fastest, unless `algorithm` is given.
    /// Without it the fixed bounds above hold.
    pub calibration: Option<Calibration>,
    /// Checked mode: every record carries a CRC-32C over its place in the call and its payload; the reader copies it, compares the
    /// copy, and combines only what matched. What does not match is `Corrupt`, naming rank, record and shard. Registered buffers go
    /// through rings then. Costs a copy and two passes over the data.
    pub checked: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            algorithm: None,
            chunk: 128 << 10,
            direct_chunk: 4 << 20,
            one_shot_up_to: 8 << 10,
            tree: None,
            calibration: None,
            checked: false,
        }
    }
}

/// What a plan depends on, apart from the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key {
    collective: Collective,
    algorithm: Algorithm,
    chunk: usize,
    kind: Kind,
    count: usize,
    root: Rank,
    peer: Rank,
}

/// So many all-reduces lie between two looks at the links. Enough that the looks cost nothing.
const BETWEEN_LOOKS: u32 = 64;

/// One rank's end of the collectives of a group.
///
/// Calls are made in the same order on all ranks. After an error the links hold what the failed call left behind, so every
/// further call answers the same until the group recovers with new links.
#[derive(Debug)]
pub struct Executor<L> {
    links: L,
    options: Options,
    tree: Tree,
    shares: Shares,
    isa: Isa,
    epoch: u32,
    /// All-reduces begun, and the number of the call at which the links were looked at last.
    reductions: u32,
    looked_at: Option<u32>,
    /// When somebody who only asks for calls in flight was last told whether all peers are there.
    surveyed: Instant,
    /// Messages sent to and received from each rank: those calls are not made by all ranks, so they count for themselves.
    messages: [(u32, u32); MAX_RANKS],
    /// What ended it.
    failure: Option<Error>,
    plans: Vec<(Key, Planned)>,
    /// The last call, if it was a short all-reduce.
    last_short: Option<Short>,
    /// What was chosen for a collective and class of sizes, with this tree.
    choices: Vec<((Collective, usize), tune::Choice)>,
    /// What the links of endpoints carry, and what was measured of this machine, where the group has learnt that.
    ways: Option<tune::Ways>,
    learnt: Option<Calibration>,
    scratch: Vec<u64>,
    /// Calls that were started and are not over, in order.
    flights: VecDeque<Flight>,
    trace: Option<Trace>,
    volume: Volume,
}

impl<L: Links> Executor<L> {
    /// An executor over these links.
    ///
    /// ```
    /// use pcieipc::{executor::{Executor, Options}, loopback, plan::Tree};
    ///
    /// let links = loopback::group(1, 4, 4096).remove(0);
    /// assert_eq!(Executor::new(links, Options::default())?.ranks(), 1);
    /// let of_two = Options { tree: Some(Tree::flat(2)), ..Options::default() };
    /// assert!(Executor::new(loopback::group(1, 4, 4096).remove(0), of_two).is_err());
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument` for more than [`MAX_RANKS`] ranks, for none, for links that can not carry a record, or a tree of other ranks.
    pub fn new(links: L, options: Options) -> Result<Self> {
        let (rank, ranks) = (links.rank(), links.ranks());
        if ranks == 0 || ranks > MAX_RANKS || rank >= ranks {
            return Err(Error::Argument(format!("rank {rank} of {ranks}: a group has 1 to {MAX_RANKS} ranks")));
        }
        if links.max_record() < 64 {
            return Err(Error::Argument(format!("records of {} bytes are too short", links.max_record())));
        }
        let tree = options.tree.clone().unwrap_or_else(|| Tree::flat(ranks));
        if !tree.covers(ranks) {
            return Err(Error::Argument(format!("the tree {tree} does not hold each of {ranks} ranks once")));
        }
        let messages = [(0, 0); MAX_RANKS];
        if let Some(calibration) = options.calibration.filter(|c| !c.is_plausible()) {
            return Err(Error::Argument(format!("{calibration:?} is no machine's; measure again with `pcieipc tune --again`")));
        }
        let (isa, plans, choices, scratch) = (Isa::detect(), Vec::new(), Vec::new(), Vec::new());
        Ok(Self {
            links,
            options,
            tree,
            shares: Shares::default(),
            isa,
            epoch: 0,
            reductions: 0,
            looked_at: None,
            surveyed: Instant::now(),
            messages,
            failure: None,
            plans,
            last_short: None,
            choices,
            ways: None,
            learnt: None,
            scratch,
            flights: VecDeque::new(),
            trace: None,
            volume: Volume::default(),
        })
    }

    /// Plans from now on for ranks that are near each other as the tree says; all alike if there is none. All ranks call it with the same tree
    /// between two collectives.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut ranks = loopback::group(2, 4, 4096).into_iter().map(|links| Executor::new(links, Options::default()).unwrap());
    /// # let (mut zero, mut one) = (ranks.next().unwrap(), ranks.next().unwrap());
    /// use pcieipc::plan::Tree;
    /// zero.set_tree(Some(Tree::groups(&[1, 1])))?;
    /// assert!(zero.set_tree(Some(Tree::flat(3))).is_err());
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument` for a tree of other ranks.
    pub fn set_tree(&mut self, tree: Option<Tree>) -> Result<()> {
        let ranks = self.links.ranks();
        let tree = tree.unwrap_or_else(|| Tree::flat(ranks));
        if !tree.covers(ranks) {
            return Err(Error::Argument(format!("the tree {tree} does not hold each of {ranks} ranks once")));
        }
        if tree != self.tree {
            self.tree = tree;
            self.plans.clear();
            self.last_short = None;
            self.choices.clear();
        }
        Ok(())
    }

    /// Which ranks are near each other, as the present plans have it.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut ranks = loopback::group(2, 4, 4096).into_iter().map(|links| Executor::new(links, Options::default()).unwrap());
    /// # let (mut zero, mut one) = (ranks.next().unwrap(), ranks.next().unwrap());
    /// assert_eq!(zero.tree().to_string(), "(0 1)");
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Gives the ranks these shards of a two-shot all-reduce from now on. All ranks call it with the same shares between two
    /// collectives.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// use pcieipc::plan::Shares;
    /// alone.set_shares(Shares::for_rates(&[8.0]));
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn set_shares(&mut self, shares: Shares) {
        if shares != self.shares {
            self.shares = shares;
            self.plans.clear();
            self.last_short = None;
        }
    }

    /// The links, for those who look after them.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// use pcieipc::link::Links;
    /// assert_eq!(alone.links().max_record(), 4096);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn links(&mut self) -> &mut L {
        &mut self.links
    }

    /// Gives the links back.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// use pcieipc::link::Links;
    /// assert_eq!(alone.into_links().ranks(), 1);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn into_links(self) -> L {
        self.links
    }

    /// This rank.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut ranks = loopback::group(2, 4, 4096).into_iter().map(|links| Executor::new(links, Options::default()).unwrap());
    /// # let (mut zero, mut one) = (ranks.next().unwrap(), ranks.next().unwrap());
    /// assert_eq!((zero.rank(), one.rank()), (0, 1));
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn rank(&self) -> Rank {
        self.links.rank()
    }

    /// Bytes loaded and stored until now.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// alone.all_reduce_into(&[1.0f32; 100], &mut [0.0; 100], Op::Sum, soon)?;
    /// assert_eq!(alone.volume().stored, 400);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn volume(&self) -> Volume {
        self.volume
    }

    /// How many ranks there are.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut ranks = loopback::group(2, 4, 4096).into_iter().map(|links| Executor::new(links, Options::default()).unwrap());
    /// # let (mut zero, mut one) = (ranks.next().unwrap(), ranks.next().unwrap());
    /// assert_eq!(zero.ranks(), 2);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn ranks(&self) -> usize {
        self.links.ranks()
    }

    fn call(&mut self, arguments: Arguments, deadline: Instant) -> Result<()> {
        if !self.flights.is_empty() {
            return self.call_all(vec![arguments], deadline);
        }
        if let Some(result) = self.call_short(&arguments, deadline) {
            return result;
        }
        let mut run = self.begin(arguments)?;
        let Self { links, isa, scratch, trace, volume, .. } = self;
        let tools = Tools { links, isa: *isa, scratch, trace: trace.as_mut(), volume };
        let result = run.advance(tools, Pace::Until(deadline));
        let result = result.and_then(|_| self.links.confirm());
        result.map_err(|error| self.fail(error))
    }

    /// Makes a call that needs no plan, see [`Executor::short`].
    fn call_short(&mut self, arguments: &Arguments, deadline: Instant) -> Option<Result<()>> {
        if !self.flights.is_empty() {
            return None;
        }
        self.links.until(deadline);
        let result = self.short(arguments, deadline)?;
        Some(result.map_err(|error| self.fail(error)))
    }

    /// A call, planned and numbered.
    fn begin(&mut self, arguments: Arguments) -> Result<Run> {
        if let Some(failure) = &self.failure {
            let why = format!("an earlier collective of this group failed ({failure}); recover or shrink the group first");
            return Err(Error::Argument(why));
        }
        if arguments.collective == Collective::AllReduce && self.look_is_due() {
            self.look_at_links()?;
        }
        let planned = self.plan(&arguments)?;
        let plan = &planned.0;
        if (plan.input, plan.output) != (arguments.input_count, arguments.output_count) {
            return Err(Error::Argument(format!(
                "a plan for {} in and {} out does not fit the buffers",
                plan.input, plan.output
            )));
        }
        let number = self.number(&arguments);
        let run = Run::new(planned, arguments, number, self.options.checked);
        self.last_short = Short::of(run.plan(), run.arguments(), run.word());
        Ok(run)
    }

    /// If the next all-reduce is one at which all ranks look, however each of them makes it.
    fn look_is_due(&self) -> bool {
        self.reductions % BETWEEN_LOOKS == 0
    }

    /// Takes the shards that rank 0 found to fit the links at the look before, and has it look again. Before it took part in that
    /// call, rank 0 had said what it found; so whoever has ended that call reads it, and all ranks own other shards from the same
    /// call on, without a word to each other. What was said for this look is overwritten only when all have read it.
    fn look_at_links(&mut self) -> Result<()> {
        if let Some(last) = self.looked_at.filter(|last| *last != self.epoch) {
            // With that many calls in flight nobody gains by a further one.
            self.drive_past(last)?;
        }
        self.looked_at = Some(self.epoch);
        let look = self.reductions / BETWEEN_LOOKS;
        if let Some(shares) = self.links.told_shares(look) {
            self.set_shares(shares);
        }
        if self.links.rank() == 0 {
            self.links.tell_shares(look.wrapping_add(1));
        }
        Ok(())
    }

    /// After rank 0 has looked at the links at once, for all: what the next look is to find. All ranks call it at the same point.
    pub(crate) fn tell_next_look(&mut self) {
        if self.links.rank() == 0 {
            self.links.tell_shares(self.reductions.div_ceil(BETWEEN_LOOKS));
        }
    }

    /// The shards that the ranks own in two-shot all-reduces.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback};
    /// let alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// assert!(alone.shares().are_equal());
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn shares(&self) -> Shares {
        self.shares
    }

    fn group(&self) -> Group {
        Group { rank: self.links.rank(), ranks: self.links.ranks() }
    }

    /// The number of this call, by which ranks see that they are in the same one.
    fn number(&mut self, arguments: &Arguments) -> u32 {
        if arguments.collective == Collective::AllReduce {
            self.reductions = self.reductions.wrapping_add(1);
        }
        let (from, to) = (arguments.root, arguments.peer);
        let counter = if arguments.collective != Collective::SendReceive {
            &mut self.epoch
        } else if from == self.links.rank() {
            &mut self.messages[to].0
        } else {
            &mut self.messages[from].1
        };
        let number = *counter;
        *counter = number.wrapping_add(1);
        number
    }

    fn plan(&mut self, arguments: &Arguments) -> Result<Planned> {
        let Arguments { collective, kind, count, root, peer, .. } = *arguments;
        let tune::Choice { algorithm, chunk } =
            self.choose(collective, count.saturating_mul(kind.size()), self.is_direct(arguments));
        let key = Key { collective, algorithm, chunk, kind, count, root, peer };
        if let Some(at) = self.plans.iter().rposition(|(k, _)| *k == key) {
            return Ok(self.plans[at].1.clone());
        }
        let planned = (Arc::new(self.make(key)?), Arc::default());
        // A training step uses a few dozen shapes again and again.
        if self.plans.len() >= 64 {
            self.plans.remove(0);
        }
        self.plans.push((key, planned.clone()));
        Ok(planned)
    }

    /// Whether ranks may read each other's buffers where they lie. A checksum of such a buffer would not prove what is read of it.
    fn is_direct(&self, arguments: &Arguments) -> bool {
        arguments.place != 0 && !self.options.checked
    }

    /// The plan for a call, with chunks so small that a link holds as many as the plan needs.
    fn make(&self, key: Key) -> Result<Plan> {
        // Partial results are the longest form, so a chunk of them must fit into a record too.
        let size = key.kind.size_as(Form::Partial);
        let direct = key.algorithm == Algorithm::Direct;
        let mut bytes = if direct { self.options.direct_chunk.max(64) } else { key.chunk.clamp(64, self.links.max_record()) };
        loop {
            let (ranks, align) = (self.ranks(), 64 / key.kind.size());
            bytes = bytes / 64 * 64;
            let owned = (key.collective, key.algorithm) == (Collective::AllReduce, Algorithm::TwoShot);
            let shares = if owned { self.shares } else { Shares::default() };
            let (root, peer) = (key.root, key.peer);
            let shape = Shape { align, root, peer, shares, ..Shape::new(ranks, key.count, bytes / size) };
            let Some(plan) = plan::build(key.collective, key.algorithm, shape, self.rank(), &self.tree) else {
                return Err(Error::Argument(format!("{} has no {} algorithm", key.collective, key.algorithm)));
            };
            let room = self.links.depth(if direct { 0 } else { bytes });
            if plan.depth <= room {
                self.prove(&plan)?;
                return Ok(plan);
            }
            if bytes <= 64 {
                return Err(Error::Argument(format!(
                    "{} {} among {ranks} ranks keeps {} records on a link and these links hold {room}; make the rings larger",
                    key.algorithm, key.collective, plan.depth
                )));
            }
            bytes = (bytes / 2).max(64);
        }
    }

    /// Runs the checker on the plans of all ranks, for a count of a few windows: all further windows repeat the first ones.
    fn prove(&self, plan: &Plan) -> Result<()> {
        let whole = plan.shape.ranks * plan.shape.chunk;
        let windows = plan.shape.count / whole;
        let shape = Shape { count: plan.shape.count - windows.saturating_sub(3) * whole, ..plan.shape };
        let build = |rank| plan::build(plan.collective, plan.algorithm, shape, rank, &self.tree);
        let plans: Option<Vec<Plan>> = (0..shape.ranks).map(build).collect();
        let proof = plan::check(&plans.unwrap_or_default());
        proof.map(drop).map_err(|flaw| Error::Argument(format!("the plan for this call is wrong, please report it: {flaw}")))
    }
}

#[cfg(test)]
mod balance_tests;
#[cfg(test)]
mod checked_tests;
#[cfg(test)]
mod nudge_tests;
#[cfg(test)]
mod tests;
