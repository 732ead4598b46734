// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs plans over any [`Links`].

mod arguments;
mod run;

use std::{sync::Arc, time::Instant};

use crate::{
    error::{Error, Rank, Result},
    link::Links,
    plan::{self, Algorithm, Collective, Form, Plan, Shape},
    reduce::{Element, Isa, Kind, Op},
};

use arguments::Arguments;
use run::Run;

/// The largest group that an executor serves.
pub const MAX_RANKS: usize = 16;

/// How collectives are run. All ranks of a group must hold the same; they compare it in every record.
#[derive(Debug, Clone)]
pub struct Options {
    /// Always this algorithm, instead of the default choice. Those that do not add in rank order give other bits.
    pub algorithm: Option<Algorithm>,
    /// Payload of one record of a long message, in bytes; small enough that a chunk stays in the processor's cache.
    pub chunk: usize,
    /// Up to so many bytes, a message goes to every rank at once ([`Algorithm::OneShot`]).
    pub one_shot_up_to: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { algorithm: None, chunk: 32 << 10, one_shot_up_to: 8 << 10 }
    }
}

/// What a plan depends on, apart from the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key {
    collective: Collective,
    algorithm: Algorithm,
    kind: Kind,
    count: usize,
}

/// One rank's end of the collectives of a group.
///
/// Calls are made in the same order on all ranks. After an error the links hold what the failed call left behind, so every
/// further call answers the same until the group recovers with new links.
#[derive(Debug)]
pub struct Executor<L> {
    links: L,
    options: Options,
    isa: Isa,
    epoch: u32,
    failed: bool,
    plans: Vec<(Key, Arc<Plan>)>,
    scratch: Vec<u64>,
}

impl<L: Links> Executor<L> {
    /// An executor over these links.
    ///
    /// # Errors
    /// `Argument` for more than [`MAX_RANKS`] ranks, for none, or for links that can not carry a record.
    pub fn new(links: L, options: Options) -> Result<Self> {
        let (rank, ranks) = (links.rank(), links.ranks());
        if ranks == 0 || ranks > MAX_RANKS || rank >= ranks {
            return Err(Error::Argument(format!("rank {rank} of {ranks}: a group has 1 to {MAX_RANKS} ranks")));
        }
        if links.max_record() < 64 {
            return Err(Error::Argument(format!("records of {} bytes are too short", links.max_record())));
        }
        Ok(Self { links, options, isa: Isa::detect(), epoch: 0, failed: false, plans: Vec::new(), scratch: Vec::new() })
    }

    /// The links, for those who look after them.
    pub fn links(&mut self) -> &mut L {
        &mut self.links
    }

    /// Gives the links back.
    pub fn into_links(self) -> L {
        self.links
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.links.rank()
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.links.ranks()
    }

    /// Combines the buffers of all ranks, element by element; every rank gets the result in place of its own.
    ///
    /// # Errors
    /// `Timeout`, `PeerDied`, `EndpointRecovering`, `EndpointGone`, `Aborted` from the links; `Mismatch` when ranks disagree on
    /// the call; `Corrupt` when a record is not what the plan says. The buffer may then be half overwritten.
    pub fn all_reduce<T: Element>(&mut self, buffer: &mut [T], op: Op, deadline: Instant) -> Result<()> {
        let (count, pointer) = (buffer.len(), buffer.as_mut_ptr().cast::<u8>());
        // SAFETY: the slice is exclusively borrowed during the call, and every bit pattern is a T.
        let arguments = unsafe { Arguments::new(Collective::AllReduce, T::KIND, op, pointer, count, pointer, count) };
        self.call(arguments, deadline)
    }

    /// Like [`Self::all_reduce`], but leaves the input as it is, also on an error.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` when the lengths differ.
    pub fn all_reduce_into<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, deadline: Instant) -> Result<()> {
        if input.len() != output.len() {
            return Err(Error::Argument(format!(
                "{} elements in, {} out: an all-reduce keeps the length",
                input.len(),
                output.len()
            )));
        }
        let (from, to, count) = (input.as_ptr().cast(), output.as_mut_ptr().cast(), input.len());
        // SAFETY: both slices are borrowed during the call, the output exclusively, and every bit pattern is a T.
        let arguments = unsafe { Arguments::new(Collective::AllReduce, T::KIND, op, from, count, to, count) };
        self.call(arguments, deadline)
    }

    /// Like [`Self::all_reduce`] for a buffer whose type is known only at run time; it need not be aligned.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` when the length is not a multiple of the element's size.
    pub fn all_reduce_bytes(&mut self, buffer: &mut [u8], kind: Kind, op: Op, deadline: Instant) -> Result<()> {
        if buffer.len() % kind.size() != 0 {
            return Err(Error::Argument(format!("{} bytes are not a whole number of {kind} elements", buffer.len())));
        }
        let (count, pointer) = (buffer.len() / kind.size(), buffer.as_mut_ptr());
        // SAFETY: the slice is exclusively borrowed during the call; kernels do not need alignment.
        let arguments = unsafe { Arguments::new(Collective::AllReduce, kind, op, pointer, count, pointer, count) };
        self.call(arguments, deadline)
    }

    fn call(&mut self, arguments: Arguments, deadline: Instant) -> Result<()> {
        if self.failed {
            return Err(Error::Argument("an earlier collective of this group failed; recover or shrink the group first".into()));
        }
        let result = self.run(arguments, deadline);
        self.failed = result.is_err();
        result
    }

    fn run(&mut self, arguments: Arguments, deadline: Instant) -> Result<()> {
        let plan = self.plan(&arguments)?;
        if (plan.input, plan.output) != (arguments.input_count, arguments.output_count) {
            return Err(Error::Argument(format!(
                "a plan for {} in and {} out does not fit the buffers",
                plan.input, plan.output
            )));
        }
        let mut run = Run::new(plan, arguments, self.epoch);
        self.epoch = self.epoch.wrapping_add(1);
        run.advance(&mut self.links, self.isa, &mut self.scratch, Some(deadline))?;
        self.links.confirm()
    }

    fn plan(&mut self, arguments: &Arguments) -> Result<Arc<Plan>> {
        let Arguments { collective, kind, input_count: count, .. } = *arguments;
        let bytes = count * kind.size();
        let default = if bytes <= self.options.one_shot_up_to { Algorithm::OneShot } else { Algorithm::TwoShot };
        let algorithm = self.options.algorithm.unwrap_or(default);
        let key = Key { collective, algorithm, kind, count };
        if let Some((_, plan)) = self.plans.iter().find(|(k, _)| *k == key) {
            return Ok(plan.clone());
        }
        let plan = Arc::new(self.make(key)?);
        // A training step uses a few dozen shapes again and again.
        if self.plans.len() >= 64 {
            self.plans.remove(0);
        }
        self.plans.push((key, plan.clone()));
        Ok(plan)
    }

    fn make(&self, key: Key) -> Result<Plan> {
        // Partial results are the longest form, so a chunk of them must fit into a record too.
        let size = key.kind.size_as(Form::Partial);
        let largest = self.links.max_record();
        let mut bytes = self.options.chunk.clamp(64, largest) / 64 * 64;
        loop {
            let shape = Shape { ranks: self.ranks(), count: key.count, chunk: bytes / size, align: 64 / key.kind.size() };
            let plan = match key.algorithm {
                Algorithm::OneShot => plan::one_shot(shape, self.rank()),
                Algorithm::TwoShot => plan::two_shot(shape, self.rank()),
                Algorithm::Ring => plan::ring(shape, self.rank()),
                other => return Err(Error::Argument(format!("no executor runs {other:?} yet"))),
            };
            if plan.depth <= self.links.depth(bytes) {
                return Ok(plan);
            }
            if bytes <= 64 {
                return Err(Error::Argument(format!(
                    "{:?} among {} ranks keeps {} records on a link and these links hold {}; make the rings larger",
                    key.algorithm,
                    self.ranks(),
                    plan.depth,
                    self.links.depth(bytes)
                )));
            }
            bytes = (bytes / 2).next_multiple_of(64).max(64);
        }
    }
}

#[cfg(test)]
mod tests;
