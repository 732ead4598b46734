// SPDX-License-Identifier: MIT OR Apache-2.0
//! The collectives of a group beyond all-reduce. All ranks make the same calls in the same order; each can fail as
//! [`Group::all_reduce`] does. The input stays as it is, also on an error.

use std::time::{Duration, Instant};

use super::Group;
use crate::{
    error::{Rank, Result},
    reduce::{Element, Op},
};

impl Group {
    /// All-reduces several buffers, in the order given: the gradients of a model, bucket by bucket.
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; buffers after the one that failed are untouched.
    pub fn all_reduce_many<T: Element>(&mut self, buffers: &mut [&mut [T]], op: Op, timeout: Duration) -> Result<()> {
        let result = self.executor.all_reduce_many(buffers, op, Instant::now() + timeout);
        self.tell(result)
    }

    /// Combines blocks: `input` holds one block for each rank, `output` gets this rank's block of the combination.
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when the lengths do not fit.
    pub fn reduce_scatter<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, timeout: Duration) -> Result<()> {
        let result = self.executor.reduce_scatter(input, output, op, Instant::now() + timeout);
        self.tell(result)
    }

    /// Collects blocks: `output` gets the inputs of all ranks, in rank order.
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when the lengths do not fit.
    pub fn all_gather<T: Element>(&mut self, input: &[T], output: &mut [T], timeout: Duration) -> Result<()> {
        let result = self.executor.all_gather(input, output, Instant::now() + timeout);
        self.tell(result)
    }

    /// Exchanges blocks: block `p` of `input` goes to rank `p`, which finds it as the block of this rank.
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when the lengths do not fit.
    pub fn all_to_all<T: Element>(&mut self, input: &[T], output: &mut [T], timeout: Duration) -> Result<()> {
        let result = self.executor.all_to_all(input, output, Instant::now() + timeout);
        self.tell(result)
    }

    /// Combines the inputs of all ranks; `output` is stored to at the root only and may be empty elsewhere.
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when the lengths do not fit.
    pub fn reduce<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, root: Rank, timeout: Duration) -> Result<()> {
        let result = self.executor.reduce(input, output, op, root, Instant::now() + timeout);
        self.tell(result)
    }

    /// Gives every rank the root's buffer in place of its own.
    ///
    /// # Errors
    /// As for [`Group::all_reduce`].
    pub fn broadcast<T: Element>(&mut self, buffer: &mut [T], root: Rank, timeout: Duration) -> Result<()> {
        let result = self.executor.broadcast(buffer, root, Instant::now() + timeout);
        self.tell(result)
    }

    /// Sends a message to one rank, which must call [`Group::receive`] with as many elements; the others take no part.
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when `to` is this rank.
    pub fn send<T: Element>(&mut self, data: &[T], to: Rank, timeout: Duration) -> Result<()> {
        let result = self.executor.send(data, to, Instant::now() + timeout);
        self.tell(result)
    }

    /// Receives a message from one rank, which must call [`Group::send`] with as many elements.
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when `from` is this rank.
    pub fn receive<T: Element>(&mut self, buffer: &mut [T], from: Rank, timeout: Duration) -> Result<()> {
        let result = self.executor.receive(buffer, from, Instant::now() + timeout);
        self.tell(result)
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    /// As for [`Group::all_reduce`].
    pub fn barrier(&mut self, timeout: Duration) -> Result<()> {
        let result = self.executor.barrier(Instant::now() + timeout);
        self.tell(result)
    }
}
