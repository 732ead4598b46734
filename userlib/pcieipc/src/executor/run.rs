// SPDX-License-Identifier: MIT OR Apache-2.0
//! One plan on its way: acquire a step's records and room, combine, publish, go on.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    MAX_RANKS,
    arguments::{Arguments, mismatch},
    checksum::{checksum, corrupt},
    stores::{LONG, Stores, Way},
    trace::{Marks, Trace, now},
};
use crate::{
    control::{Defence, is_without},
    error::{Error, Rank, Result},
    link::{Links, RecordHeader, Want},
    plan::{Algorithm, Form, Plan, Source, Step, Target},
    reduce::{self, In, Isa, Out},
    ring::is_newer,
};

/// Combining chunks of so many bytes and more takes longer than waking those who sleep for a record before it.
pub const WORK: usize = 16 << 10;

/// A plan, and what is known of how it stores.
pub type Planned = (Arc<Plan>, Arc<Stores>);

/// A call that has begun. It holds its place, so it can stop wherever it would have to wait, and go on later.
#[derive(Debug)]
pub struct Run {
    plan: Arc<Plan>,
    arguments: Arguments,
    epoch: u32,
    word: u32,
    windows: usize,
    tick: usize,
    /// Phases are run from the last to the first, so that old chunks leave before new ones come.
    phase: usize,
    step: usize,
    sent: [u32; MAX_RANKS],
    received: [u32; MAX_RANKS],
    /// What stopped it; nothing when that is a call before it.
    want: Option<Want>,
    marks: Marks,
    /// Whether records carry checksums.
    checked: bool,
    /// What its plan knows of storing, how this call does, and the time of its loops if it is timed.
    stores: Arc<Stores>,
    way: Way,
    spent: Duration,
}

/// What a run does where it can not go on.
#[derive(Debug, Clone, Copy)]
pub enum Pace {
    /// It waits until then.
    Until(Instant),
    /// It stops, also at links that calls before it still use.
    Try(Busy),
}

/// What a run works with.
#[derive(Debug)]
pub struct Tools<'a, L> {
    pub links: &'a mut L,
    pub isa: Isa,
    pub scratch: &'a mut Vec<u64>,
    pub trace: Option<&'a mut Trace>,
    pub volume: &'a mut Volume,
}

/// Bytes that a rank's processor loaded and stored to combine and copy: through rings, in its buffers and in scratch memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Volume {
    /// Loaded.
    pub loaded: u64,
    /// Stored.
    pub stored: u64,
}

/// Links that calls before this one still use: a bit for each peer. Records of one link are never out of order, so a call
/// takes a link only when all calls before it are through with it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Busy {
    to: u32,
    from: u32,
}

/// How many records a run sends to and receives from each peer.
#[derive(Debug, Clone, Copy, Default)]
pub struct Traffic {
    sent: [u32; MAX_RANKS],
    received: [u32; MAX_RANKS],
}

impl Traffic {
    pub fn of(plan: &Plan) -> Self {
        let mut traffic = Self::default();
        for now in plan.program() {
            for source in &now.step.sources {
                if let Source::Link { from, .. } | Source::Signal(from) = *source {
                    traffic.received[from] += 1;
                }
            }
            for target in &now.step.targets {
                if let Target::Link { to, .. } | Target::Signal(to) = *target {
                    traffic.sent[to] += 1;
                }
            }
        }
        traffic
    }
}

/// A record that a step reads: from whom, what it says, where it lies, and its length.
type Held = (Rank, RecordHeader, *const u8, usize);

impl Run {
    #[inline]
    pub fn new((plan, stores): Planned, arguments: Arguments, epoch: u32, checked: bool) -> Self {
        // What is read again for its checksum stays in the cache, so there is nothing to try.
        let way = stores.next(if checked { 0 } else { arguments.count * arguments.kind.size() });
        let word = arguments.word(&plan);
        let (windows, phase) = (plan.windows(), plan.phases.len().saturating_sub(1));
        Self {
            plan,
            arguments,
            epoch,
            word,
            windows,
            tick: 0,
            phase,
            step: 0,
            sent: [0; MAX_RANKS],
            received: [0; MAX_RANKS],
            want: None,
            marks: Marks::default(),
            checked,
            stores,
            way,
            spent: Duration::ZERO,
        }
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    pub fn arguments(&self) -> &Arguments {
        &self.arguments
    }

    /// What all its records carry.
    pub fn word(&self) -> u32 {
        self.word
    }

    /// Its number within the group, or among the messages of two ranks.
    pub fn number(&self) -> u32 {
        self.epoch
    }

    /// What stopped it last.
    pub fn want(&self) -> Option<Want> {
        self.want
    }

    /// The links that were busy before it and those that it still uses itself.
    pub fn holds(&self, whole: &Traffic, before: Busy) -> Busy {
        let bits = |done: &[u32; MAX_RANKS], all: &[u32; MAX_RANKS]| {
            done.iter().zip(all).enumerate().filter(|(_, (d, a))| d < a).fold(0, |bits, (rank, _)| bits | 1 << rank)
        };
        Busy { to: before.to | bits(&self.sent, &whole.sent), from: before.from | bits(&self.received, &whole.received) }
    }

    /// Runs until the end (`true`) or, at [`Pace::Try`], until it would have to wait (`false`).
    pub fn advance<L: Links>(&mut self, tools: Tools<'_, L>, pace: Pace) -> Result<bool> {
        let Tools { links, isa, scratch, trace, volume } = tools;
        let mut trace = if cfg!(pcieipc_without = "trace") { None } else { trace };
        let plan = self.plan.clone();
        let (phases, ticks) = (plan.phases.len(), self.windows + plan.phases.len().saturating_sub(1));
        let words = self.scratch_bytes() * (plan.scratch * phases + self.most_held()) / 8;
        if scratch.len() < words {
            scratch.resize(words, 0);
        }
        while self.tick < ticks {
            let window = self.tick.checked_sub(self.phase).filter(|&w| w < self.windows);
            let steps = plan.phases.get(self.phase).map_or(&[][..], Vec::as_slice);
            if let (Some(window), Some(step)) = (window, steps.get(self.step)) {
                if let Some((offset, len)) = plan.span(step, window) {
                    let trace = trace.as_deref_mut();
                    if trace.is_some() && self.marks.begun == 0 {
                        self.marks.begun = now();
                    }
                    if !self.step(links, isa, scratch, step, window, offset, len, pace, trace.is_some(), volume)? {
                        return Ok(false);
                    }
                    if let Some(trace) = trace {
                        let marks = std::mem::take(&mut self.marks);
                        trace.add(self.event(marks, self.phase, window, step.shard, len * self.arguments.kind.size()));
                    }
                }
                self.step += 1;
            } else {
                self.step = 0;
                if self.phase == 0 {
                    self.phase = phases.saturating_sub(1);
                    self.tick += 1;
                } else {
                    self.phase -= 1;
                }
            }
        }
        if self.way.timed {
            self.stores.took(self.way, self.spent);
        }
        Ok(true)
    }

    /// How many records a step reads at most, each of which needs a place of its own in checked mode.
    fn most_held(&self) -> usize {
        let links = |step: &Step| step.sources.iter().filter(|s| matches!(s, Source::Link { .. } | Source::Signal(_))).count();
        if self.checked { self.plan.phases.iter().flatten().map(links).max().unwrap_or(0) } else { 0 }
    }

    /// Bytes of a scratch place; each starts on a cache line.
    fn scratch_bytes(&self) -> usize {
        (self.plan.shape.chunk * self.arguments.kind.size_as(Form::Partial)).next_multiple_of(64)
    }

    #[expect(clippy::too_many_arguments)]
    fn step<L: Links>(
        &mut self,
        links: &mut L,
        isa: Isa,
        scratch: &mut [u64],
        step: &Step,
        window: usize,
        offset: usize,
        len: usize,
        pace: Pace,
        traced: bool,
        volume: &mut Volume,
    ) -> Result<bool> {
        let kind = self.arguments.kind;
        let scratch: *mut u8 = scratch.as_mut_ptr().cast();
        // Each window in flight has scratch places of its own, and no more windows are in flight than there are phases.
        let lane = window % self.plan.phases.len() * self.plan.scratch;
        let unit = self.scratch_bytes();
        let place = |number: usize| scratch.wrapping_add(unit * (lane + number));

        let mut ins = [In { ptr: std::ptr::null(), form: Form::Element }; MAX_RANKS];
        let mut inputs = 0;
        let mut held: [Option<(usize, Held)>; MAX_RANKS] = [None; MAX_RANKS];
        for source in &step.sources {
            ins[inputs] = match *source {
                Source::Input(start) => {
                    In { ptr: self.arguments.input.wrapping_add((start + offset) * kind.size()), form: Form::Element }
                }
                Source::Output(start) => {
                    In { ptr: self.arguments.output.wrapping_add((start + offset) * kind.size()), form: Form::Element }
                }
                Source::Scratch(number) => In { ptr: place(number), form: Form::Partial },
                Source::PeerInput { of, start } => self.peer(of, start + offset, false)?,
                Source::PeerOutput { of, start } => self.peer(of, start + offset, true)?,
                Source::Signal(from) => match self.record(links, from, step, 0, pace)? {
                    Some(record) => {
                        held[from] = Some((MAX_RANKS, record));
                        continue;
                    }
                    None => return Ok(false),
                },
                Source::Link { from, form } => match self.record(links, from, step, len * kind.size_as(form), pace)? {
                    Some(record) => {
                        held[from] = Some((inputs, record));
                        In { ptr: record.2, form }
                    }
                    None => return Ok(false),
                },
            };
            inputs += 1;
        }
        let mut outs = [Out::new(std::ptr::null_mut(), Form::Element); MAX_RANKS + 1];
        let past = self.way.past && len * kind.size() >= LONG;
        let direct = self.plan.algorithm == Algorithm::Direct;
        let mut outputs = 0;
        let mut targets = [std::ptr::null(); MAX_RANKS];
        for target in &step.targets {
            outs[outputs] = match *target {
                Target::Output(start) => {
                    let ptr = self.arguments.output.wrapping_add((start + offset) * kind.size());
                    Out { stream: direct && past, ..Out::new(ptr, Form::Element) }
                }
                Target::Scratch(number) => Out::new(place(number), Form::Partial),
                Target::Signal(to) => match self.room(links, to, 0, pace)? {
                    Some(_) => continue,
                    None => return Ok(false),
                },
                Target::Link { to, form } => match self.room(links, to, len * kind.size_as(form), pace)? {
                    Some(ptr) => {
                        targets[to] = ptr.cast_const();
                        Out { ptr, form, stream: past }
                    }
                    None => return Ok(false),
                },
            };
            outputs += 1;
        }
        if traced {
            self.marks.ready = now();
        }
        if self.checked {
            let copies = self.plan.phases.len() * self.plan.scratch;
            for (copy, (input, record)) in held.iter().flatten().enumerate() {
                let here = self.verify(links.rank(), record, scratch.wrapping_add(unit * (copies + copy)))?;
                if let Some(input) = ins.get_mut(*input) {
                    input.ptr = here;
                }
            }
        }
        let divisor = step.finish.then_some(self.plan.ranks());
        let (ins, outs) = (&ins[..inputs], &outs[..outputs]);
        if !(in_place(ins, outs)) {
            volume.loaded += ins.iter().map(|i| len * kind.size_as(i.form)).sum::<usize>() as u64;
            volume.stored += outs.iter().map(|o| len * kind.size_as(o.form)).sum::<usize>() as u64;
            if len * kind.size() >= WORK {
                links.nudge()?;
            }
            let begun = self.way.timed.then(Instant::now);
            // SAFETY:
            // - input and output are borrowed by the caller of the collective for as long as this run lives, and a step's span lies
            //   inside them: the plan was checked and its lengths are those of the buffers;
            // - peers' registered buffers stay mapped while their owner's borrow of its own lasts, and are as long as this one;
            // - scratch was sized for all lanes and places in `advance`;
            // - records stay where they are until released and reservations until committed (`Links`), and their lengths are
            //   checked: received ones above, reserved ones by the contract of `reserve`;
            // - plans store to a place that they also read only at the same offset.
            unsafe { reduce::fold(isa, kind, self.arguments.op, ins, outs, len, divisor) };
            self.spent += begun.map_or(Duration::ZERO, |begun| begun.elapsed());
        }
        if traced {
            self.marks.combined = now();
        }
        for target in &step.targets {
            let (to, bytes) = match *target {
                Target::Link { to, form } => (to, len * kind.size_as(form)),
                Target::Signal(to) => (to, 0),
                _ => continue,
            };
            let mut header =
                RecordHeader { epoch: self.epoch, step: self.sent[to] as u16, shard: step.shard, call: self.word, crc: 0 };
            if self.checked {
                let stored = targets[to];
                // SAFETY: the room that was reserved for this record above, just stored by this rank; nobody else writes it.
                header.crc = unsafe { checksum(links.rank(), to, header, stored, bytes) };
            }
            links.commit(to, header, bytes)?;
            self.sent[to] = self.sent[to].wrapping_add(1);
        }
        for source in &step.sources {
            if let Source::Link { from, .. } | Source::Signal(from) = *source {
                links.release(from)?;
                self.received[from] = self.received[from].wrapping_add(1);
            }
        }
        Ok(true)
    }

    /// The next record from a peer, checked; nothing if it would have to be waited for.
    fn record<L: Links>(&mut self, links: &mut L, from: Rank, step: &Step, want: usize, pace: Pace) -> Result<Option<Held>> {
        let (header, payload) = match pace {
            Pace::Until(deadline) => links.receive(from, deadline)?,
            Pace::Try(busy) if busy.from & 1 << from != 0 => {
                self.want = None;
                return Ok(None);
            }
            Pace::Try(_) => match links.try_receive(from)? {
                Some(record) => record,
                None => {
                    self.want = Some(Want::Record(from));
                    return Ok(None);
                }
            },
        };
        let (ptr, len) = (payload.as_ptr(), payload.len());
        if let Err(error) = self.check(links.rank(), from, header, len, step, want) {
            // What a record says of itself is believed only if all of it is whole.
            // SAFETY: the record stays mapped until it is released; whatever the sum is, the payload is not used.
            let whole = !self.checked || header.crc == unsafe { checksum(from, links.rank(), header, ptr, len) };
            return Err(if whole { error } else { corrupt(links.rank(), from, header, len) });
        }
        Ok(Some((from, header, ptr, len)))
    }

    /// Copies a record to memory that nobody else can write, and compares the copy with the record's checksum; gives the copy.
    fn verify(&self, rank: Rank, &(from, header, ptr, len): &Held, copy: *mut u8) -> Result<*const u8> {
        // SAFETY: the record's length is the one that the plan expects, for which `advance` has made a place; its pages stay
        // mapped until it is released. If its writer changes it meanwhile, the copy does not match.
        let whole = unsafe {
            std::ptr::copy_nonoverlapping(ptr, copy, len);
            checksum(from, rank, header, copy, len) == header.crc
        };
        if whole || is_without(Defence::Checksum) { Ok(copy) } else { Err(corrupt(rank, from, header, len)) }
    }

    /// Room for a record to a peer; nothing if it would have to be waited for.
    fn room<L: Links>(&mut self, links: &mut L, to: Rank, len: usize, pace: Pace) -> Result<Option<*mut u8>> {
        Ok(match pace {
            Pace::Until(deadline) => Some(links.reserve(to, len, deadline)?.as_mut_ptr()),
            Pace::Try(busy) if busy.to & 1 << to != 0 => {
                self.want = None;
                None
            }
            Pace::Try(_) => match links.try_reserve(to, len)? {
                Some(mut room) => Some(room.as_mut_ptr()),
                None => {
                    self.want = Some(Want::Room { to, len });
                    None
                }
            },
        })
    }

    /// Where a peer's registered buffer lies, from element `at` on.
    fn peer(&self, of: Rank, at: usize, output: bool) -> Result<In> {
        let start = self.arguments.peers.as_ref().map_or(std::ptr::null(), |places| places.0[of]);
        if start.is_null() {
            return Err(Error::Argument(format!(
                "{} works on registered buffers only, and that of rank {of} is not",
                self.plan.algorithm
            )));
        }
        let skipped = if output { 0 } else { of * self.arguments.peer_stride };
        Ok(In { ptr: start.wrapping_add(skipped + at * self.arguments.kind.size()), form: Form::Element })
    }

    /// Compares all that a record says about itself with what the plan expects.
    pub fn check(&self, rank: Rank, from: Rank, header: RecordHeader, len: usize, step: &Step, want: usize) -> Result<()> {
        if header.call != self.word {
            return Err(mismatch(rank, from, self.word, header.call));
        }
        if self.checked && is_newer(self.epoch, header.epoch) {
            let what = format!(
                "a record of call {} in call {}: it came twice, or the ranks do not make the same calls",
                header.epoch, self.epoch
            );
            return Err(Error::Corrupt { rank, peer: from, what, endpoint: None });
        }
        if header.epoch != self.epoch {
            return Err(Error::Mismatch {
                rank,
                peer: from,
                what: "how many collectives were called before",
                ours: self.epoch.to_string(),
                theirs: header.epoch.to_string(),
                endpoint: None,
            });
        }
        if header.step != self.received[from] as u16 || header.shard != step.shard || len != want {
            return Err(Error::Corrupt {
                rank,
                peer: from,
                what: format!(
                    "record {} of shard {} with {len} bytes, where record {} of shard {} with {want} bytes was due",
                    header.step, header.shard, self.received[from] as u16, step.shard
                ),
                endpoint: None,
            });
        }
        Ok(())
    }
}

/// Whether the step would only copy a chunk onto itself.
fn in_place(ins: &[In], outs: &[Out]) -> bool {
    matches!((ins, outs), ([i], [o]) if std::ptr::eq(i.ptr, o.ptr) && i.form == o.form)
}
