// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-reduces of one short record, again and again with the same arguments: what [`super::run`] does with their plan, without looking
//! anything up. A few hundred nanoseconds are most of such a call.

use std::time::Instant;

use super::{Executor, MAX_RANKS, arguments::Arguments, run::Run, stores::LONG};
use crate::{
    error::{Rank, Result},
    link::{Links, RecordHeader},
    plan::{Algorithm, Collective, Form, Plan},
    reduce::{self, In, Kind, Op, Out},
};

/// A call whose plan was proved and is the one that [`Executor::short`] follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Short {
    kind: Kind,
    op: Op,
    count: usize,
    place: u64,
    word: u32,
}

impl Short {
    /// If the call is one.
    pub fn of(plan: &Plan, arguments: &Arguments, word: u32) -> Option<Self> {
        let &Arguments { kind, op, count, place, .. } = arguments;
        let one_record = count > 0 && count <= plan.shape.chunk && count * kind.size() < LONG;
        let short = (plan.collective, plan.algorithm) == (Collective::AllReduce, Algorithm::OneShot) && plan.ranks() > 1;
        (short && one_record).then_some(Self { kind, op, count, place, word })
    }
}

impl<L: Links> Executor<L> {
    /// Makes the call if it is like the last short one; nothing where it is another.
    pub(super) fn short(&mut self, arguments: &Arguments, deadline: Instant) -> Option<Result<()>> {
        if self.look_is_due() {
            return None;
        }
        let last = self.last_short?;
        let &Arguments { kind, op, count, place, .. } = arguments;
        let same = arguments.collective == Collective::AllReduce && last == Short { kind, op, count, place, word: last.word };
        let plain = self.failure.is_none() && self.trace.is_none() && !self.options.checked;
        if same && plain && (arguments.input_count, arguments.output_count) == (count, count) {
            // The places of two ranks' inputs are a line, those of all that there may be are sixteen.
            Some(match self.links.ranks() {
                2 => self.one_shot::<2>(last.word, arguments, deadline),
                _ => self.one_shot::<MAX_RANKS>(last.word, arguments, deadline),
            })
        } else {
            None
        }
    }

    /// Of up to `MOST` ranks.
    fn one_shot<const MOST: usize>(&mut self, word: u32, arguments: &Arguments, deadline: Instant) -> Result<()> {
        let (n, rank) = (self.links.ranks(), self.links.rank());
        let &Arguments { kind, op, count, .. } = arguments;
        let bytes = count * kind.size();
        // Before anything is sent: what is stored behind a message waits until the message has left.
        let mut ins = [In { ptr: arguments.input, form: Form::Element }; MOST];
        let own = RecordHeader { epoch: self.number(arguments), step: 0, shard: 0, call: word, crc: 0 };
        for to in (1..n).map(|d| (rank + d) % n) {
            let mut room = self.links.reserve(to, bytes, deadline)?;
            // SAFETY: the room is as long as asked for; the input is borrowed by the caller and as long as its arguments say.
            unsafe { arguments.input.copy_to_nonoverlapping(room.as_mut_ptr(), bytes) };
            self.links.commit(to, own, bytes)?;
        }
        for (from, place) in ins.iter_mut().enumerate().take(n).filter(|(from, _)| *from != rank) {
            let (header, payload) = self.links.receive(from, deadline)?;
            let (ptr, len) = (payload.as_ptr(), payload.len());
            if (header, len) != (own, bytes) {
                return self.another(arguments, own.epoch, from, header, len);
            }
            place.ptr = ptr;
        }
        self.volume.loaded += ((n + 1) * bytes) as u64;
        self.volume.stored += (n * bytes) as u64;
        let out = Out::new(arguments.output, Form::Element);
        // SAFETY: input and output are borrowed by the caller and as long as its arguments say; records stay where they are until they are
        // released, and are as long as was compared above. Output and input are the same memory or do not overlap.
        unsafe { reduce::fold(self.isa, kind, op, &ins[..n], &[out], count, Some(n)) };
        for from in (0..n).filter(|from| *from != rank) {
            self.links.release(from)?;
        }
        self.links.confirm()
    }

    /// What is wrong with a record that is not the one that was due.
    #[cold]
    fn another(&mut self, arguments: &Arguments, number: u32, from: Rank, header: RecordHeader, len: usize) -> Result<()> {
        let plan = self.plan(arguments)?;
        let bytes = arguments.count * arguments.kind.size();
        let run = Run::new(plan, arguments.clone(), number, false);
        match run.plan().phases.last().and_then(|steps| steps.first()) {
            Some(step) => run.check(self.links.rank(), from, header, len, step, bytes),
            None => Ok(()),
        }
    }
}
