// SPDX-License-Identifier: MIT OR Apache-2.0
//! Proves a group's plans before they run.
//!
//! The plans are run on symbols instead of numbers. Links are queues that hold [`Plan::depth`] records, every rank runs its
//! program in order, and a step waits until all its records and all its room are there. In such a network *whether* all ranks
//! end and *what* they compute does not depend on who runs when (no step ever chooses by what has come so far), so one run
//! stands for all. It proves, for these plans and counts:
//!
//! - no wait in a cycle: the run ends;
//! - the right value: each output element combines the input of every rank exactly once (or is the one input element that the
//!   collective asks for), is finished once, and is never rounded on the way; also when input and output are the same memory;
//! - every record is read by the step that it was meant for, and all links are empty at the end. So a next call starts as the
//!   first did, whatever its plan is, and any sequence of calls is proved with its members;
//! - no link needs more room than [`Plan::depth`] says, and scratch is bounded;
//! - a barrier, and any call that moves nothing but sending: nobody leaves before it has heard, by records, that all have come;
//! - registered buffers: every access to a peer's memory is ordered, by records, against every conflicting one, against the
//!   owner's own writing before the call and against its reading and reuse after it. Room on a link is not counted as order.

mod memory;
mod order;

use std::collections::{HashMap, VecDeque};

use super::{Collective, Form, Move, Plan, Source, Step, Target};
use crate::error::Rank;
use memory::{Memory, Value};
use order::{Access, Clock, Order};

/// What a check found about plans that are right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proof {
    /// Steps of all ranks together.
    pub steps: usize,
    /// The most records that any link held.
    pub depth: usize,
    /// Whether every element was combined in rank order, so that its bits do not depend on the algorithm.
    pub rank_order: bool,
    /// Elements carried by each link, `from * ranks + to`; signals carry none.
    pub carried: Vec<usize>,
    /// Whether input and output may be the same memory.
    pub in_place: bool,
}

/// Why plans are wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Flaw {
    /// The plans are not those of one group and call.
    #[error("the plans do not belong together: {0}")]
    Unrelated(String),
    /// A step names a place that does not exist.
    #[error("rank {rank}, phase {phase}: {what}")]
    Place {
        /// Whose step.
        rank: Rank,
        /// In which phase.
        phase: usize,
        /// What is wrong.
        what: String,
    },
    /// Ranks wait for each other for ever.
    #[error("the ranks wait in a cycle: {0}")]
    Cycle(String),
    /// A record reaches a step that it was not meant for.
    #[error("rank {rank}, phase {phase}, window {window}: the next record from rank {from} is {got}, expected {want}")]
    Record {
        /// Whose step.
        rank: Rank,
        /// In which phase.
        phase: usize,
        /// In which window.
        window: usize,
        /// Who sent it.
        from: Rank,
        /// What was sent.
        got: String,
        /// What the step reads.
        want: String,
    },
    /// Records are left over.
    #[error("{count} records from rank {from} to rank {to} are never read")]
    Unread {
        /// Who sent them.
        from: Rank,
        /// To whom.
        to: Rank,
        /// How many.
        count: usize,
    },
    /// An element of an output is not what the collective promises.
    #[error("rank {rank}, output elements {start}..{end}: {what}{}", if *.in_place { " (in place)" } else { "" })]
    Wrong {
        /// Whose output.
        rank: Rank,
        /// First element.
        start: usize,
        /// One past the last element.
        end: usize,
        /// What is wrong.
        what: String,
        /// Whether it is so only when input and output are the same memory.
        in_place: bool,
    },
    /// A rank leaves a barrier too early.
    #[error("rank {rank} leaves and no record says that rank {of} has come")]
    Early {
        /// Who leaves.
        rank: Rank,
        /// Of whom it has not heard.
        of: Rank,
    },
    /// Two ranks touch the same memory and nothing orders them.
    #[error("{0}")]
    Race(String),
}

/// Runs the plans of all ranks, in rank order, on symbols.
///
/// ```
/// # use pcieipc::plan::{self, Algorithm, Collective, Shape, Tree};
/// # let plan = plan::build(Collective::AllReduce, Algorithm::TwoShot, Shape::new(4, 1000, 64), 0, &Tree::flat(4)).unwrap();
/// let mut plans: Vec<_> = (0..4)
///     .map(|rank| plan::build(Collective::AllReduce, Algorithm::TwoShot, Shape::new(4, 1000, 64), rank, &Tree::flat(4)).unwrap())
///     .collect();
/// assert!(plan::check(&plans).is_ok());
/// plans[2].phases[0].pop();
/// assert!(plan::check(&plans).is_err(), "somebody waits for that record");
/// ```
///
/// # Errors
/// The first [`Flaw`] found.
pub fn check(plans: &[Plan]) -> Result<Proof, Flaw> {
    related(plans)?;
    for plan in plans {
        for (phase, step) in plan.phases.iter().enumerate().flat_map(|(p, steps)| steps.iter().map(move |s| (p, s))) {
            places(plan, phase, step)?;
        }
    }
    let mut proof = Group::new(plans, false).run()?;
    // Where a rank's input and output have the same length, users pass the same memory for both.
    if plans[0].collective.reduces() && plans.iter().all(|p| p.input == p.output) || plans[0].collective == Collective::Broadcast
    {
        proof.in_place = true;
        Group::new(plans, true).run()?;
    }
    Ok(proof)
}

/// Runs several calls as one program a rank, without waiting for all ranks between them, all on the same buffers: what a rank writes
/// before its next call must not be what another still reads.
///
/// # Errors
/// The first [`Flaw`] found.
#[cfg(test)]
pub(super) fn check_in_a_row(calls: &[Vec<Plan>]) -> Result<(), Flaw> {
    let mut links = HashMap::new();
    let mut next: Vec<(usize, usize)> = vec![(0, 0); calls[0].len()];
    let mut groups: Vec<Group<'_>> = calls.iter().map(|plans| Group::new(plans, false)).collect();
    let mut order = Order::new(calls[0].len(), calls.iter().any(|plans| watched(plans)), false);
    loop {
        let mut moved = false;
        // The highest rank first and one step each, so that ranks are as far apart as the links let them be.
        for rank in (0..next.len()).rev() {
            let steps = if rank % 2 == 1 { usize::MAX } else { 1 };
            for _ in 0..steps {
                let (call, step) = next[rank];
                let Some(group) = groups.get_mut(call) else { break };
                std::mem::swap(&mut group.links, &mut links);
                std::mem::swap(&mut group.order, &mut order);
                if group.begun[rank].is_none() {
                    group.begin(rank);
                }
                let (moves, result) = match group.programs[rank].get(step) {
                    Some(&run) if group.blocked_by(rank, run.step).is_some() => (false, Ok(())),
                    Some(&run) => {
                        next[rank].1 += 1;
                        group.next[rank] += 1;
                        (true, group.fire(rank, run))
                    }
                    None => {
                        next[rank] = (call + 1, 0);
                        (true, group.leave(rank))
                    }
                };
                std::mem::swap(&mut group.order, &mut order);
                std::mem::swap(&mut group.links, &mut links);
                result?;
                moved |= moves;
                if !moves {
                    break;
                }
            }
        }
        if !moved {
            break;
        }
    }
    if links.values().any(|l| !l.is_empty()) {
        return Err(Flaw::Cycle("records are left over between calls".into()));
    }
    groups.into_iter().try_for_each(|group| group.end().map(drop))
}

fn related(plans: &[Plan]) -> Result<(), Flaw> {
    let Some(first) = plans.first() else { return Err(Flaw::Unrelated("there are none".into())) };
    for (rank, plan) in plans.iter().enumerate() {
        let same = (plan.collective, plan.algorithm, plan.shape, plan.depth)
            == (first.collective, first.algorithm, first.shape, first.depth);
        if !same || plan.phases.len() != first.phases.len() {
            return Err(Flaw::Unrelated(format!("rank {rank} has another call, shape, depth or number of phases than rank 0")));
        }
        if plan.rank != rank || plans.len() != plan.ranks() {
            return Err(Flaw::Unrelated(format!(
                "plan {rank} of {} is that of rank {} of {}",
                plans.len(),
                plan.rank,
                plan.ranks()
            )));
        }
        if plan.shape.chunk == 0 {
            return Err(Flaw::Unrelated("chunks of no elements".into()));
        }
    }
    Ok(())
}

/// All places of a step exist, and it does not store twice to one.
fn places(plan: &Plan, phase: usize, step: &Step) -> Result<(), Flaw> {
    let bad = |what: String| Err(Flaw::Place { rank: plan.rank, phase, what });
    let peer = |r: Rank| r < plan.ranks() && r != plan.rank;
    for source in &step.sources {
        let fits = match *source {
            Source::Input(start) => start + step.len <= plan.input,
            Source::Output(start) => start + step.len <= plan.output,
            Source::Scratch(number) => number < plan.scratch,
            Source::Link { from, .. } | Source::Signal(from) => peer(from),
            Source::PeerInput { of, start } => {
                let blocks = if plan.collective == Collective::ReduceScatter { plan.ranks() } else { 1 };
                peer(of) && start + step.len <= blocks * plan.shape.count
            }
            Source::PeerOutput { of, start } => peer(of) && start + step.len <= plan.shape.count,
        };
        if !fits {
            return bad(format!("{source:?} with {} elements is outside", step.len));
        }
    }
    for (i, target) in step.targets.iter().enumerate() {
        let fits = match *target {
            Target::Output(start) => start + step.len <= plan.output,
            Target::Scratch(number) => number < plan.scratch,
            Target::Link { to, .. } | Target::Signal(to) => peer(to),
        };
        if !fits {
            return bad(format!("{target:?} with {} elements is outside", step.len));
        }
        if step.targets[..i].contains(target) {
            return bad(format!("{target:?} is stored to twice"));
        }
    }
    // An executor asks a link for one record and for room for one at a time.
    let of = |source: &Source| match *source {
        Source::Link { from, .. } | Source::Signal(from) => Some(from),
        _ => None,
    };
    let to = |target: &Target| match *target {
        Target::Link { to, .. } | Target::Signal(to) => Some(to),
        _ => None,
    };
    let (ins, outs): (Vec<Rank>, Vec<Rank>) =
        (step.sources.iter().filter_map(of).collect(), step.targets.iter().filter_map(to).collect());
    for (way, ranks) in [("from", &ins), ("to", &outs)] {
        if let Some(rank) = (1..ranks.len()).find(|&i| ranks[..i].contains(&ranks[i])).map(|i| ranks[i]) {
            return bad(format!("two records {way} rank {rank} in one step"));
        }
    }
    let data = |s: &&Source| !matches!(s, Source::Signal(_));
    if (step.len > 0) != step.sources.iter().any(|s| data(&s))
        || (step.len > 0) != step.targets.iter().any(|t| !matches!(t, Target::Signal(_)))
    {
        return bad("a step with data needs a source and a target, one without neither".into());
    }
    if step.sources.iter().filter(data).count() > plan.ranks() || step.targets.len() > plan.ranks() + 1 {
        return bad("more sources or targets than there are ranks".into());
    }
    Ok(())
}

/// Whether all wait for all: in a barrier, and where nothing is to be moved but arguments are still to be compared.
fn meets(plan: &Plan) -> bool {
    plan.collective == Collective::Barrier || plan.shape.count == 0 && plan.collective != Collective::SendReceive
}

/// Whether it matters what records put in order.
fn watched(plans: &[Plan]) -> bool {
    let mut sources = plans.iter().flat_map(|p| p.phases.iter().flatten()).flat_map(|step| &step.sources);
    plans.first().is_some_and(meets) || sources.any(|s| matches!(s, Source::PeerInput { .. } | Source::PeerOutput { .. }))
}

/// A record on a link.
struct Record {
    shard: u16,
    len: usize,
    /// None for a signal.
    form: Option<Form>,
    value: Value,
    clock: Clock,
}

/// All ranks at some point of their programs.
struct Group<'a> {
    plans: &'a [Plan],
    in_place: bool,
    programs: Vec<Vec<Move<'a>>>,
    next: Vec<usize>,
    links: HashMap<(Rank, Rank), VecDeque<Record>>,
    memory: Vec<Memory>,
    order: Order,
    /// When each rank began, on its own clock.
    begun: Vec<Option<u32>>,
    proof: Proof,
}

impl<'a> Group<'a> {
    fn new(plans: &'a [Plan], in_place: bool) -> Self {
        let n = plans.len();
        let programs: Vec<Vec<Move<'a>>> = plans.iter().map(|p| p.program().collect()).collect();
        let steps = programs.iter().map(Vec::len).sum();
        Self {
            plans,
            in_place,
            programs,
            next: vec![0; n],
            links: HashMap::new(),
            memory: (0..n).map(|rank| Memory::new(rank, in_place)).collect(),
            order: Order::new(n, watched(plans), in_place),
            begun: vec![None; n],
            proof: Proof { steps, depth: 0, rank_order: true, carried: vec![0; n * n], in_place: false },
        }
    }

    fn run(mut self) -> Result<Proof, Flaw> {
        (0..self.plans.len()).for_each(|rank| self.begin(rank));
        loop {
            let mut moved = false;
            for rank in 0..self.plans.len() {
                while let Some(&next) = self.programs[rank].get(self.next[rank]) {
                    if self.blocked_by(rank, next.step).is_some() {
                        break;
                    }
                    self.fire(rank, next)?;
                    self.next[rank] += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        self.ended()?;
        (0..self.plans.len()).try_for_each(|rank| self.leave(rank))?;
        self.end()
    }

    fn begin(&mut self, rank: Rank) {
        self.begun[rank] = Some(self.order.begin(rank, &self.plans[rank]));
    }

    /// The rank is done: its buffers are its own again, and where all wait for all, it has heard of all.
    fn leave(&mut self, rank: Rank) -> Result<(), Flaw> {
        let plan = &self.plans[rank];
        self.order.end(rank, plan)?;
        let known = |of: Rank| self.begun[of].is_some_and(|time| self.order.knows(rank, of, time));
        match (0..self.plans.len()).find(|&of| meets(plan) && !known(of)) {
            Some(of) => Err(Flaw::Early { rank, of }),
            None => Ok(()),
        }
    }

    /// For whom the step waits, and for what.
    fn blocked_by(&self, rank: Rank, step: &Step) -> Option<(Rank, &'static str)> {
        let held = |from, to| self.links.get(&(from, to)).map_or(0, VecDeque::len);
        let empty = step.sources.iter().find_map(|s| match *s {
            Source::Link { from, .. } | Source::Signal(from) if held(from, rank) == 0 => Some((from, "a record")),
            _ => None,
        });
        empty.or_else(|| {
            step.targets.iter().find_map(|t| match *t {
                Target::Link { to, .. } | Target::Signal(to) if held(rank, to) >= self.plans[rank].depth => Some((to, "room")),
                _ => None,
            })
        })
    }

    fn fire(&mut self, rank: Rank, Move { window, phase, step, offset, len }: Move<'a>) -> Result<(), Flaw> {
        let plan = &self.plans[rank];
        let place = |what: String| Flaw::Place { rank, phase, what };
        let lane = window % plan.phases.len();
        // First all records, so that the accesses below are ordered after what the senders did.
        let mut records: HashMap<Rank, VecDeque<Record>> = HashMap::new();
        for source in &step.sources {
            let expected = match *source {
                Source::Link { from, form } => Some((from, len, Some(form))),
                Source::Signal(from) => Some((from, 0, None)),
                _ => None,
            };
            if let Some((from, len, form)) = expected {
                let Some(record) = self.links.get_mut(&(from, rank)).and_then(VecDeque::pop_front) else {
                    return Err(place(format!("takes two records from rank {from} at once")));
                };
                if (record.shard, record.len, record.form) != (step.shard, len, form) {
                    let say = |shard, len, form: Option<Form>| match form {
                        Some(form) => format!("shard {shard}, {len} elements, {form:?}"),
                        None => format!("a signal for shard {shard}"),
                    };
                    let (got, want) = (say(record.shard, record.len, record.form), say(step.shard, len, form));
                    return Err(Flaw::Record { rank, phase, window, from, got, want });
                }
                self.order.receive(rank, &record.clock);
                if form.is_some() {
                    records.entry(from).or_default().push_back(record);
                }
            }
        }
        let mut values = Vec::with_capacity(step.sources.len());
        for source in &step.sources {
            values.push(match *source {
                Source::Signal(_) => continue,
                Source::Input(start) => {
                    self.order.touch(Access::reads(rank, rank, true, start + offset, len))?;
                    self.memory[rank].input(start + offset, len).map_err(place)?
                }
                Source::Output(start) => {
                    self.order.touch(Access::reads(rank, rank, false, start + offset, len))?;
                    self.memory[rank].output(start + offset, len).map_err(place)?
                }
                Source::Scratch(number) => self.memory[rank].scratch(lane, number, len).map_err(place)?,
                Source::Link { from, .. } => match records.get_mut(&from).and_then(VecDeque::pop_front) {
                    Some(record) => record.value,
                    None => return Err(place("a record is missing".into())),
                },
                Source::PeerInput { of, start } => {
                    self.order.touch(Access::reads(rank, of, true, start + offset, len))?;
                    self.memory[of].input(start + offset, len).map_err(place)?
                }
                Source::PeerOutput { of, start } => {
                    self.order.touch(Access::reads(rank, of, false, start + offset, len))?;
                    self.memory[of].output(start + offset, len).map_err(place)?
                }
            });
        }
        let value = Value::combine(values, step.finish, plan.collective.reduces()).map_err(place)?;
        for target in &step.targets {
            let rounds = matches!(target, Target::Output(_) | Target::Link { form: Form::Element, .. });
            if rounds && !value.exact() {
                return Err(place(format!("{target:?} would round a partial result")));
            }
            match *target {
                Target::Output(start) => {
                    self.order.touch(Access::writes(rank, rank, false, start + offset, len))?;
                    self.memory[rank].store_output(start + offset, len, value.clone()).map_err(place)?;
                }
                Target::Scratch(number) => self.memory[rank].store_scratch(lane, number, len, value.clone()),
                Target::Link { to, form } => {
                    self.proof.carried[rank * self.plans.len() + to] += len;
                    let clock = self.order.send(rank);
                    self.send(rank, to, Record { shard: step.shard, len, form: Some(form), value: value.clone(), clock })?;
                }
                Target::Signal(_) => {}
            }
        }
        for target in &step.targets {
            if let Target::Signal(to) = *target {
                let clock = self.order.send(rank);
                self.send(rank, to, Record { shard: step.shard, len: 0, form: None, value: value.clone(), clock })?;
            }
        }
        Ok(())
    }

    fn send(&mut self, rank: Rank, to: Rank, record: Record) -> Result<(), Flaw> {
        let link = self.links.entry((rank, to)).or_default();
        link.push_back(record);
        self.proof.depth = self.proof.depth.max(link.len());
        if link.len() > self.plans[rank].depth {
            return Err(Flaw::Place { rank, phase: 0, what: format!("a step sends two records to rank {to} at once") });
        }
        Ok(())
    }

    /// Everybody is done and nothing is left over.
    fn ended(&self) -> Result<(), Flaw> {
        let mut waits = Vec::new();
        for (rank, program) in self.programs.iter().enumerate() {
            if let Some(stuck) = program.get(self.next[rank]) {
                let (on, what) = self.blocked_by(rank, stuck.step).unwrap_or((rank, "nothing"));
                waits.push(format!(
                    "rank {rank} in phase {} of window {} waits for {what} of rank {on}",
                    stuck.phase, stuck.window
                ));
            }
        }
        if !waits.is_empty() {
            return Err(Flaw::Cycle(waits.join("; ")));
        }
        for (&(from, to), link) in &self.links {
            if !link.is_empty() {
                return Err(Flaw::Unread { from, to, count: link.len() });
            }
        }
        Ok(())
    }

    /// Everybody is done, nothing is left over, and all outputs are right.
    fn end(mut self) -> Result<Proof, Flaw> {
        self.ended()?;
        for (rank, plan) in self.plans.iter().enumerate() {
            self.proof.rank_order &= self.memory[rank].verify(plan, self.in_place)?;
        }
        Ok(self.proof)
    }
}

#[cfg(test)]
mod tests;
