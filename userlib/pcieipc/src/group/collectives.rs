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
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let (mut weights, mut biases) = ([1i32; 100], [2i32; 3]);
    ///     group.all_reduce_many(&mut [&mut weights, &mut biases], Op::Sum, second).unwrap();
    ///     assert_eq!((weights[99], biases[2]), (2, 4));
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]. The calls overlap, so any of the buffers may be half overwritten.
    pub fn all_reduce_many<T: Element>(&mut self, buffers: &mut [&mut [T]], op: Op, timeout: Duration) -> Result<()> {
        let by = self.clock.after(timeout);
        self.run(|calls| calls.all_reduce_many(buffers, op, by))
    }

    /// Combines blocks: `input` holds one block for each rank, `output` gets this rank's block of the combination.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let mut block = [0u8; 1];
    ///     group.reduce_scatter(&[1, 5], &mut block, Op::Sum, second).unwrap();
    ///     assert_eq!(block, [[2], [10]][group.rank()]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when the lengths do not fit.
    pub fn reduce_scatter<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, timeout: Duration) -> Result<()> {
        let by = self.clock.after(timeout);
        self.run(|calls| calls.reduce_scatter(input, output, op, by))
    }

    /// Collects blocks: `output` gets the inputs of all ranks, in rank order.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let mut all = [0; 2];
    ///     group.all_gather(&[group.rank() as i32 + 7], &mut all, second).unwrap();
    ///     assert_eq!(all, [7, 8]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when the lengths do not fit.
    pub fn all_gather<T: Element>(&mut self, input: &[T], output: &mut [T], timeout: Duration) -> Result<()> {
        let by = self.clock.after(timeout);
        self.run(|calls| calls.all_gather(input, output, by))
    }

    /// Exchanges blocks: block `p` of `input` goes to rank `p`, which finds it as the block of this rank.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let (from, mut to) = ([[1, 2], [3, 4]][group.rank()], [0; 2]);
    ///     group.all_to_all(&from, &mut to, second).unwrap();
    ///     assert_eq!(to, [[1, 3], [2, 4]][group.rank()]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when the lengths do not fit.
    pub fn all_to_all<T: Element>(&mut self, input: &[T], output: &mut [T], timeout: Duration) -> Result<()> {
        let by = self.clock.after(timeout);
        self.run(|calls| calls.all_to_all(input, output, by))
    }

    /// Combines the inputs of all ranks; `output` is stored to at the root only and may be empty elsewhere.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let mut sum = vec![0.0; if group.rank() == 1 { 1 } else { 0 }];
    ///     group.reduce(&[2.5], &mut sum, Op::Sum, 1, second).unwrap();
    ///     assert!(group.rank() == 0 || sum == [5.0]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when the lengths do not fit.
    pub fn reduce<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, root: Rank, timeout: Duration) -> Result<()> {
        let by = self.clock.after(timeout);
        self.run(|calls| calls.reduce(input, output, op, root, by))
    }

    /// Gives every rank the root's buffer in place of its own.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let mut weights = [group.rank() as f64 + 4.0];
    ///     group.broadcast(&mut weights, 1, second).unwrap();
    ///     assert_eq!(weights, [5.0]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`].
    pub fn broadcast<T: Element>(&mut self, buffer: &mut [T], root: Rank, timeout: Duration) -> Result<()> {
        let by = self.clock.after(timeout);
        self.run(|calls| calls.broadcast(buffer, root, by))
    }

    /// Sends a message to one rank, which must call [`Group::receive`] with as many elements; the others take no part.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let mut buffer = [0u64];
    ///     match group.rank() {
    ///         0 => group.send(&[42u64], 1, second).unwrap(),
    ///         _ => group.receive(&mut buffer, 0, second).unwrap(),
    ///     }
    ///     assert_eq!(buffer[0], 42 * group.rank() as u64);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when `to` is this rank.
    pub fn send<T: Element>(&mut self, data: &[T], to: Rank, timeout: Duration) -> Result<()> {
        let by = self.clock.after(timeout);
        self.run(|calls| calls.send(data, to, by))
    }

    /// Receives a message from one rank, which must call [`Group::send`] with as many elements.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     if group.rank() == 0 {
    ///         group.send(&[0.5f32], 1, second).unwrap();
    ///     } else {
    ///         let mut message = [0.0f32];
    ///         group.receive(&mut message, 0, second).unwrap();
    ///         assert_eq!(message, [0.5]);
    ///     }
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when `from` is this rank.
    pub fn receive<T: Element>(&mut self, buffer: &mut [T], from: Rank, timeout: Duration) -> Result<()> {
        let by = self.clock.after(timeout);
        self.run(|calls| calls.receive(buffer, from, by))
    }

    /// Waits until all ranks have called it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     group.barrier(second).unwrap();
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`].
    pub fn barrier(&mut self, timeout: Duration) -> Result<()> {
        self.run(|calls| calls.barrier(Instant::now() + timeout))
    }
}
