// SPDX-License-Identifier: MIT OR Apache-2.0
//! One plan on its way: acquire a step's records and room, combine, publish, go on.

use std::{sync::Arc, time::Instant};

use super::{
    MAX_RANKS,
    arguments::{Arguments, mismatch},
};
use crate::{
    error::{Error, Rank, Result},
    link::{Links, RecordHeader},
    plan::{Algorithm, Form, Plan, Source, Step, Target},
    reduce::{self, In, Isa, Out},
};

/// Chunks of so many bytes and more are streamed to the rank that reads them next.
const STREAM_FROM: usize = 2048;

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
    sent: [u16; MAX_RANKS],
    received: [u16; MAX_RANKS],
}

impl Run {
    pub fn new(plan: Arc<Plan>, arguments: Arguments, epoch: u32) -> Self {
        let word = arguments.word(&plan);
        let (windows, phase) = (plan.windows(), plan.phases.len().saturating_sub(1));
        Self { plan, arguments, epoch, word, windows, tick: 0, phase, step: 0, sent: [0; MAX_RANKS], received: [0; MAX_RANKS] }
    }

    /// Runs until the end (`true`) or, without a deadline, until it would have to wait (`false`).
    pub fn advance<L: Links>(
        &mut self,
        links: &mut L,
        isa: Isa,
        scratch: &mut Vec<u64>,
        deadline: Option<Instant>,
    ) -> Result<bool> {
        let plan = self.plan.clone();
        let (phases, ticks) = (plan.phases.len(), self.windows + plan.phases.len().saturating_sub(1));
        let words = self.scratch_bytes(1) * plan.scratch * phases / 8;
        if scratch.len() < words {
            scratch.resize(words, 0);
        }
        while self.tick < ticks {
            let window = self.tick.checked_sub(self.phase).filter(|&w| w < self.windows);
            let steps = plan.phases.get(self.phase).map_or(&[][..], Vec::as_slice);
            if let (Some(window), Some(step)) = (window, steps.get(self.step)) {
                if let Some((offset, len)) = plan.span(step, window) {
                    if !self.step(links, isa, scratch, step, window, offset, len, deadline)? {
                        return Ok(false);
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
        Ok(true)
    }

    /// Bytes of `places` scratch places, each starting on a cache line.
    fn scratch_bytes(&self, places: usize) -> usize {
        places * (self.plan.shape.chunk * self.arguments.kind.size_as(Form::Partial)).next_multiple_of(64)
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
        deadline: Option<Instant>,
    ) -> Result<bool> {
        let kind = self.arguments.kind;
        let scratch: *mut u8 = scratch.as_mut_ptr().cast();
        // Each window in flight has scratch places of its own, and no more windows are in flight than there are phases.
        let lane = window % self.plan.phases.len() * self.plan.scratch;
        let place = |number: usize| scratch.wrapping_add(self.scratch_bytes(lane + number));

        let mut ins = [In { ptr: std::ptr::null(), form: Form::Element }; MAX_RANKS];
        let mut inputs = 0;
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
                Source::Signal(from) => match self.record(links, from, step, 0, deadline)? {
                    Some(_) => continue,
                    None => return Ok(false),
                },
                Source::Link { from, form } => match self.record(links, from, step, len * kind.size_as(form), deadline)? {
                    Some(ptr) => In { ptr, form },
                    None => return Ok(false),
                },
            };
            inputs += 1;
        }
        let mut outs = [Out::new(std::ptr::null_mut(), Form::Element); MAX_RANKS + 1];
        // Below that, the other rank waits for the stores rather than for the lines.
        let long = len * kind.size() >= STREAM_FROM;
        let direct = self.plan.algorithm == Algorithm::Direct;
        let mut outputs = 0;
        for target in &step.targets {
            outs[outputs] = match *target {
                Target::Output(start) => {
                    let ptr = self.arguments.output.wrapping_add((start + offset) * kind.size());
                    Out { stream: direct && long, ..Out::new(ptr, Form::Element) }
                }
                Target::Scratch(number) => Out::new(place(number), Form::Partial),
                Target::Signal(to) => match room(links, to, 0, deadline)? {
                    Some(_) => continue,
                    None => return Ok(false),
                },
                Target::Link { to, form } => match room(links, to, len * kind.size_as(form), deadline)? {
                    Some(ptr) => Out { ptr, form, stream: long },
                    None => return Ok(false),
                },
            };
            outputs += 1;
        }
        let divisor = step.finish.then_some(self.plan.ranks());
        let (ins, outs) = (&ins[..inputs], &outs[..outputs]);
        if !(in_place(ins, outs)) {
            // SAFETY:
            // - input and output are borrowed by the caller of the collective for as long as this run lives, and a step's span lies
            //   inside them: the plan was checked and its lengths are those of the buffers;
            // - peers' registered buffers stay mapped while their owner's borrow of its own lasts, and are as long as this one;
            // - scratch was sized for all lanes and places in `advance`;
            // - records stay where they are until released and reservations until committed (`Links`), and their lengths are
            //   checked: received ones above, reserved ones by the contract of `reserve`;
            // - plans store to a place that they also read only at the same offset.
            unsafe { reduce::fold(isa, kind, self.arguments.op, ins, outs, len, divisor) };
        }
        for target in &step.targets {
            let (to, bytes) = match *target {
                Target::Link { to, form } => (to, len * kind.size_as(form)),
                Target::Signal(to) => (to, 0),
                _ => continue,
            };
            let header = RecordHeader { epoch: self.epoch, step: self.sent[to], shard: step.shard, call: self.word, crc: 0 };
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
    fn record<L: Links>(
        &self,
        links: &mut L,
        from: Rank,
        step: &Step,
        want: usize,
        deadline: Option<Instant>,
    ) -> Result<Option<*const u8>> {
        let (header, payload) = match deadline {
            Some(deadline) => links.receive(from, deadline)?,
            None => match links.try_receive(from)? {
                Some(record) => record,
                None => return Ok(None),
            },
        };
        let (ptr, len) = (payload.as_ptr(), payload.len());
        self.check(links.rank(), from, header, len, step, want)?;
        Ok(Some(ptr))
    }

    /// Where a peer's registered buffer lies, from element `at` on.
    fn peer(&self, of: Rank, at: usize, output: bool) -> Result<In> {
        let (inputs, outputs) = self.arguments.peers;
        let start = if output { outputs } else { inputs }[of];
        if start.is_null() {
            return Err(Error::Argument(format!(
                "{} works on registered buffers only, and that of rank {of} is not",
                self.plan.algorithm
            )));
        }
        Ok(In { ptr: start.wrapping_add(at * self.arguments.kind.size()), form: Form::Element })
    }

    /// Compares all that a record says about itself with what the plan expects.
    fn check(&self, rank: Rank, from: Rank, header: RecordHeader, len: usize, step: &Step, want: usize) -> Result<()> {
        if header.call != self.word {
            return Err(mismatch(rank, from, self.word, header.call));
        }
        if header.epoch != self.epoch {
            return Err(Error::Mismatch {
                rank,
                peer: from,
                what: "how many collectives were called before",
                ours: self.epoch.to_string(),
                theirs: header.epoch.to_string(),
            });
        }
        if header.step != self.received[from] || header.shard != step.shard || len != want {
            return Err(Error::Corrupt {
                rank,
                peer: from,
                what: format!(
                    "record {} of shard {} with {len} bytes, where record {} of shard {} with {want} bytes was due",
                    header.step, header.shard, self.received[from], step.shard
                ),
            });
        }
        Ok(())
    }
}

/// Room for a record to a peer; nothing if it would have to be waited for.
fn room<L: Links>(links: &mut L, to: Rank, bytes: usize, deadline: Option<Instant>) -> Result<Option<*mut u8>> {
    Ok(match deadline {
        Some(deadline) => Some(links.reserve(to, bytes, deadline)?.as_mut_ptr()),
        None => links.try_reserve(to, bytes)?.map(|mut room| room.as_mut_ptr()),
    })
}

/// Whether the step would only copy a chunk onto itself.
fn in_place(ins: &[In], outs: &[Out]) -> bool {
    matches!((ins, outs), ([i], [o]) if std::ptr::eq(i.ptr, o.ptr) && i.form == o.form)
}
