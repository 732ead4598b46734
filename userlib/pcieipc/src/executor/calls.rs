// SPDX-License-Identifier: MIT OR Apache-2.0
//! The collectives as methods.

use std::time::Instant;

use super::{Arguments, Executor};
use crate::{
    error::{Error, Rank, Result},
    link::Links,
    plan::Collective,
    reduce::{Element, Kind, Op},
    registered::Registered,
};

/// A length that does not fit.
fn lengths(what: &str, input: usize, output: usize) -> Error {
    Error::Argument(format!("{input} elements in and {output} out do not fit {what}"))
}

/// All calls can fail as [`Executor::all_reduce`] does. Where a method takes an input and an output, the input stays as it
/// is, also on an error; the output may then be half written.
impl<L: Links> Executor<L> {
    /// Combines the buffers of all ranks, element by element; every rank gets the result in place of its own.
    ///
    /// ```
    /// use std::time::{Duration, Instant};
    /// use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    ///
    /// let ranks: Vec<_> = loopback::group(2, 4, 4096).into_iter().map(|links| std::thread::spawn(move || {
    ///     let mut executor = Executor::new(links, Options::default()).unwrap();
    ///     let mut gradient = vec![1.0f32 + executor.rank() as f32; 1000];
    ///     executor.all_reduce(&mut gradient, Op::Sum, Instant::now() + Duration::from_secs(5)).unwrap();
    ///     gradient[0]
    /// })).collect();
    /// for rank in ranks {
    ///     assert_eq!(rank.join().unwrap(), 3.0);
    /// }
    /// ```
    ///
    /// # Errors
    /// `Timeout`, `PeerDied`, `EndpointRecovering`, `EndpointGone`, `Aborted` from the links; `Mismatch` when ranks disagree on
    /// the call; `Corrupt` when a record is not what the plan says; `Argument` for lengths that do not fit. The buffer may then
    /// be half overwritten.
    pub fn all_reduce<T: Element>(&mut self, buffer: &mut [T], op: Op, deadline: Instant) -> Result<()> {
        let arguments = Arguments::in_place(Collective::AllReduce, T::KIND, buffer).with_op(op);
        self.call(arguments, deadline)
    }

    /// Like [`Self::all_reduce`], but leaves the input as it is.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn all_reduce_into<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, deadline: Instant) -> Result<()> {
        if input.len() != output.len() {
            return Err(lengths("an all-reduce, which keeps the length", input.len(), output.len()));
        }
        let arguments = Arguments::between(Collective::AllReduce, input.len(), input, output).with_op(op);
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
        self.call(Arguments::in_place(Collective::AllReduce, kind, buffer).with_op(op), deadline)
    }

    /// Like [`Self::all_reduce`], straight between registered buffers.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` for a buffer of another group.
    pub fn all_reduce_registered<T: Element>(&mut self, buffer: &mut Registered<T>, op: Op, deadline: Instant) -> Result<()> {
        if buffer.ranks() != self.ranks() {
            return Err(Error::Argument(format!(
                "the buffer is registered among {} ranks, not {}",
                buffer.ranks(),
                self.ranks()
            )));
        }
        let (places, place) = (buffer.places(), u64::from(buffer.number()) + 1);
        let arguments = Arguments::in_place(Collective::AllReduce, T::KIND, buffer).with_op(op);
        self.call(Arguments { peers: (places, places), place, ..arguments }, deadline)
    }

    /// All-reduces several buffers, one after the other in the order given: the gradients of a model, bucket by bucket.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; buffers after the one that failed are untouched.
    pub fn all_reduce_many<T: Element>(&mut self, buffers: &mut [&mut [T]], op: Op, deadline: Instant) -> Result<()> {
        buffers.iter_mut().try_for_each(|buffer| self.all_reduce(buffer, op, deadline))
    }

    /// Combines blocks: `input` holds one block for each rank, `output` gets this rank's block of the combination.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn reduce_scatter<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, deadline: Instant) -> Result<()> {
        if input.len() != output.len() * self.ranks() {
            return Err(lengths("a reduce-scatter, which takes one block for each rank", input.len(), output.len()));
        }
        let arguments = Arguments::between(Collective::ReduceScatter, output.len(), input, output).with_op(op);
        self.call(arguments, deadline)
    }

    /// Collects blocks: `output` gets the inputs of all ranks, in rank order.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn all_gather<T: Element>(&mut self, input: &[T], output: &mut [T], deadline: Instant) -> Result<()> {
        if output.len() != input.len() * self.ranks() {
            return Err(lengths("an all-gather, which gives one block for each rank", input.len(), output.len()));
        }
        self.call(Arguments::between(Collective::AllGather, input.len(), input, output), deadline)
    }

    /// Exchanges blocks: block `p` of `input` goes to rank `p`, which finds it as the block of this rank.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn all_to_all<T: Element>(&mut self, input: &[T], output: &mut [T], deadline: Instant) -> Result<()> {
        if output.len() != input.len() || input.len() % self.ranks() != 0 {
            return Err(lengths("an all-to-all, which exchanges one block with each rank", input.len(), output.len()));
        }
        self.call(Arguments::between(Collective::AllToAll, input.len() / self.ranks(), input, output), deadline)
    }

    /// Combines the inputs of all ranks; `output` is stored to at the root only and may be empty elsewhere.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn reduce<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, root: Rank, deadline: Instant) -> Result<()> {
        self.member(root)?;
        let here = root == self.rank();
        if here && output.len() != input.len() {
            return Err(lengths("a reduce, which keeps the length", input.len(), output.len()));
        }
        let output = if here { output } else { &mut [] };
        let arguments = Arguments::between(Collective::Reduce, input.len(), input, output).with_op(op).with_ranks(root, 0);
        self.call(arguments, deadline)
    }

    /// Gives every rank the root's buffer in place of its own.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn broadcast<T: Element>(&mut self, buffer: &mut [T], root: Rank, deadline: Instant) -> Result<()> {
        self.member(root)?;
        let mut arguments = Arguments::in_place(Collective::Broadcast, T::KIND, buffer).with_ranks(root, 0);
        if root != self.rank() {
            arguments.input_count = 0;
        }
        self.call(arguments, deadline)
    }

    /// Sends a message to one rank, which must call [`Self::receive`]; the others take no part.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` when `to` is this rank.
    pub fn send<T: Element>(&mut self, data: &[T], to: Rank, deadline: Instant) -> Result<()> {
        self.other(to)?;
        let arguments = Arguments::between(Collective::SendReceive, data.len(), data, &mut []).with_ranks(self.rank(), to);
        self.call(arguments, deadline)
    }

    /// Receives a message from one rank, which must call [`Self::send`] with as many elements.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` when `from` is this rank.
    pub fn receive<T: Element>(&mut self, buffer: &mut [T], from: Rank, deadline: Instant) -> Result<()> {
        self.other(from)?;
        let arguments = Arguments::between(Collective::SendReceive, buffer.len(), &[], buffer).with_ranks(from, self.rank());
        self.call(arguments, deadline)
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn barrier(&mut self, deadline: Instant) -> Result<()> {
        self.call(Arguments::between::<u8>(Collective::Barrier, 0, &[], &mut []), deadline)
    }

    fn member(&self, rank: Rank) -> Result<()> {
        if rank < self.ranks() { Ok(()) } else { Err(Error::Argument(format!("no rank {rank} in a group of {}", self.ranks()))) }
    }

    fn other(&self, rank: Rank) -> Result<()> {
        self.member(rank)?;
        if rank == self.rank() { Err(Error::Argument("a message to oneself".into())) } else { Ok(()) }
    }
}
