// SPDX-License-Identifier: MIT OR Apache-2.0
//! The collectives as methods.

use std::time::Instant;

use super::{Arguments, Executor};
use crate::{
    error::{Error, Rank, Result},
    link::Links,
    reduce::{Element, Kind, Op},
    registered::Registered,
};

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
        self.call(Arguments::all_reduce(buffer, op), deadline)
    }

    /// Like [`Self::all_reduce`], but leaves the input as it is.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn all_reduce_into<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, deadline: Instant) -> Result<()> {
        self.call(Arguments::all_reduce_into(input, output, op)?, deadline)
    }

    /// Like [`Self::all_reduce`] for a buffer whose type is known only at run time; it need not be aligned.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` when the length is not a multiple of the element's size.
    pub fn all_reduce_bytes(&mut self, buffer: &mut [u8], kind: Kind, op: Op, deadline: Instant) -> Result<()> {
        if buffer.len() % kind.size() != 0 {
            return Err(Error::Argument(format!("{} bytes are not a whole number of {kind} elements", buffer.len())));
        }
        self.call(Arguments::in_place(crate::plan::Collective::AllReduce, kind, buffer).with_op(op), deadline)
    }

    /// Like [`Self::all_reduce`], straight between registered buffers.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` for a buffer of another group.
    pub fn all_reduce_registered<T: Element>(&mut self, buffer: &mut Registered<T>, op: Op, deadline: Instant) -> Result<()> {
        self.call(Arguments::all_reduce_registered(self.group(), buffer, op)?, deadline)
    }

    /// All-reduces several buffers, in the order given and overlapped: the gradients of a model, bucket by bucket.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` before anything is sent. Any of the buffers may be half overwritten.
    pub fn all_reduce_many<T: Element>(&mut self, buffers: &mut [&mut [T]], op: Op, deadline: Instant) -> Result<()> {
        let arguments = buffers.iter_mut().map(|buffer| Arguments::all_reduce(buffer, op)).collect();
        self.call_all(arguments, deadline)
    }

    /// Combines blocks: `input` holds one block for each rank, `output` gets this rank's block of the combination.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn reduce_scatter<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, deadline: Instant) -> Result<()> {
        self.call(Arguments::reduce_scatter(self.group(), input, output, op)?, deadline)
    }

    /// Collects blocks: `output` gets the inputs of all ranks, in rank order.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn all_gather<T: Element>(&mut self, input: &[T], output: &mut [T], deadline: Instant) -> Result<()> {
        self.call(Arguments::all_gather(self.group(), input, output)?, deadline)
    }

    /// Exchanges blocks: block `p` of `input` goes to rank `p`, which finds it as the block of this rank.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn all_to_all<T: Element>(&mut self, input: &[T], output: &mut [T], deadline: Instant) -> Result<()> {
        self.call(Arguments::all_to_all(self.group(), input, output)?, deadline)
    }

    /// Combines the inputs of all ranks; `output` is stored to at the root only and may be empty elsewhere.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn reduce<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, root: Rank, deadline: Instant) -> Result<()> {
        self.call(Arguments::reduce(self.group(), input, output, op, root)?, deadline)
    }

    /// Gives every rank the root's buffer in place of its own.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn broadcast<T: Element>(&mut self, buffer: &mut [T], root: Rank, deadline: Instant) -> Result<()> {
        self.call(Arguments::broadcast(self.group(), buffer, root)?, deadline)
    }

    /// Sends a message to one rank, which must call [`Self::receive`]; the others take no part.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` when `to` is this rank.
    pub fn send<T: Element>(&mut self, data: &[T], to: Rank, deadline: Instant) -> Result<()> {
        self.call(Arguments::send(self.group(), data, to)?, deadline)
    }

    /// Receives a message from one rank, which must call [`Self::send`] with as many elements.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` when `from` is this rank.
    pub fn receive<T: Element>(&mut self, buffer: &mut [T], from: Rank, deadline: Instant) -> Result<()> {
        self.call(Arguments::receive(self.group(), buffer, from)?, deadline)
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn barrier(&mut self, deadline: Instant) -> Result<()> {
        self.call(Arguments::barrier(), deadline)
    }
}
