// SPDX-License-Identifier: MIT OR Apache-2.0
//! What records put in order, by vector clocks: accesses to registered buffers, and who has come before who leaves.

use std::rc::Rc;

use super::Flaw;
use crate::{error::Rank, plan::Plan};

/// How far a rank knows every other to be.
pub type Clock = Rc<[u32]>;

/// A read or write of a registered buffer.
#[derive(Debug, Clone, Copy)]
pub struct Access {
    by: Rank,
    of: Rank,
    input: bool,
    write: bool,
    start: usize,
    end: usize,
    /// The accessing rank's own count at that time.
    time: u32,
}

impl Access {
    pub fn reads(by: Rank, of: Rank, input: bool, start: usize, len: usize) -> Self {
        Self { by, of, input, write: false, start, end: start + len, time: 0 }
    }

    pub fn writes(by: Rank, of: Rank, input: bool, start: usize, len: usize) -> Self {
        Self { by, of, input, write: true, start, end: start + len, time: 0 }
    }
}

/// The order of all accesses so far. Idle where nothing asks for it.
#[derive(Debug)]
pub struct Order {
    watched: bool,
    in_place: bool,
    clocks: Vec<Vec<u32>>,
    /// Accesses by the buffer's owner.
    accesses: Vec<Vec<Access>>,
    nothing: Clock,
}

impl Order {
    pub fn new(ranks: usize, watched: bool, in_place: bool) -> Self {
        let clocks = vec![vec![0; ranks]; ranks];
        Self { watched, in_place, clocks, accesses: vec![vec![]; ranks], nothing: Rc::new([]) }
    }

    /// The owner wrote its input, and still used its output, before the call. Answers when it began, on its own clock.
    pub fn begin(&mut self, rank: Rank, plan: &Plan) -> u32 {
        self.clocks[rank][rank] += 1;
        let time = self.clocks[rank][rank];
        self.accesses[rank].extend(Self::whole(rank, plan).map(|access| Access { time, ..access }));
        time
    }

    /// Whether a rank has heard, from the other or through others, of what that one did at a time of its own clock.
    pub fn knows(&self, rank: Rank, of: Rank, time: u32) -> bool {
        self.clocks[rank][of] >= time
    }

    /// After the call the owner reads its output and writes both again.
    pub fn end(&mut self, rank: Rank, plan: &Plan) -> Result<(), Flaw> {
        Self::whole(rank, plan).into_iter().try_for_each(|access| self.touch(access))
    }

    fn whole(rank: Rank, plan: &Plan) -> [Access; 2] {
        [Access::writes(rank, rank, true, 0, plan.input), Access::writes(rank, rank, false, 0, plan.output)]
    }

    pub fn send(&mut self, rank: Rank) -> Clock {
        if !self.watched {
            return self.nothing.clone();
        }
        let clock = self.clocks[rank].as_slice().into();
        // What the sender does from now on is not vouched for by this record.
        self.clocks[rank][rank] += 1;
        clock
    }

    pub fn receive(&mut self, rank: Rank, clock: &Clock) {
        for (known, heard) in self.clocks[rank].iter_mut().zip(clock.iter()) {
            *known = (*known).max(*heard);
        }
    }

    /// Adds an access; a conflicting one that did not happen before it is a race.
    pub fn touch(&mut self, access: Access) -> Result<(), Flaw> {
        if !self.watched || access.start == access.end {
            return Ok(());
        }
        let clock = &self.clocks[access.by];
        let same_memory = |a: &Access, b: &Access| a.input == b.input || self.in_place;
        let race = self.accesses[access.of].iter().find(|other| {
            (access.write || other.write)
                && other.by != access.by
                && same_memory(&access, other)
                && other.start < access.end
                && access.start < other.end
                && other.time > clock[other.by]
        });
        if let Some(other) = race {
            return Err(Flaw::Race(format!(
                "rank {} {} the buffers of rank {} at {}..{} and nothing orders that after rank {} {} {}..{}",
                access.by,
                if access.write { "writes" } else { "reads" },
                access.of,
                access.start,
                access.end,
                other.by,
                if other.write { "wrote" } else { "read" },
                other.start,
                other.end
            )));
        }
        let time = clock[access.by];
        self.accesses[access.of].push(Access { time, ..access });
        Ok(())
    }
}
