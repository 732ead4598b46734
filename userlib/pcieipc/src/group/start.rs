// SPDX-License-Identifier: MIT OR Apache-2.0
//! The collectives of a group as calls that return at once.

use std::time::{Duration, Instant};

use super::{Group, engine::Calls};
use crate::{
    error::{Error, Rank, Result},
    executor::{Buffer, Failed, Request, Started},
    reduce::{Element, Op},
    registered::Registered,
};

/// Calls in flight. Each is over within its timeout, counted from here. They go on in every wait and every blocking call of the group, in
/// [`Group::progress`], and in the group's own thread where [`super::GroupOptions::helper_thread`] asks for one. All ranks start the
/// same calls in the same order, mixed with blocking ones as they like. When one fails, all in flight end with the same error.
/// An error of a method here gives the buffers back: nothing was begun.
impl Group {
    fn start<B>(&mut self, timeout: Duration, call: impl FnOnce(&mut Calls, Instant) -> Started<B>) -> Started<B> {
        // The child's copies of the buffers, if it is one, go with the call.
        self.council.at_home().map_err(|error| Failed { error, buffers: None })?;
        let calls = self.engine.get();
        let started = call(calls, Instant::now() + timeout);
        let why = started.as_ref().err().map(|failed| &failed.error).or(calls.failure()).map(Error::to_string);
        if let Some(why) = why {
            calls.links().abort(&why);
        }
        self.engine.leave();
        started
    }

    /// Begins [`Group::all_reduce`]. The buffer is a vector, or memory that is lent ([`crate::executor::Lent`]); it comes back from
    /// [`Request::wait`].
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use pcieipc::{group::{Group, GroupOptions}, reduce::Op};
    /// # fn main() -> pcieipc::Result<()> {
    /// # let (layer_1, layer_2, second) = (vec![1.0f32; 4096], vec![1.0f32; 4096], Duration::from_secs(1));
    /// let mut group = Group::meet(GroupOptions::new(0, 2, "/run/user/1000/my-group"))?;
    /// let first = group.start_all_reduce(layer_2, Op::Sum, second)?;
    /// let second = group.start_all_reduce(layer_1, Op::Sum, second)?;
    /// // ... compute ...
    /// let layer_2 = first.wait(&mut group)?;
    /// let layer_1 = second.wait(&mut group)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_all_reduce<B: Buffer>(&mut self, buffer: B, op: Op, timeout: Duration) -> Started<B> {
        self.start(timeout, |calls, deadline| calls.start_all_reduce(buffer, op, deadline))
    }

    /// Begins [`Group::all_reduce_into`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let request = group.start_all_reduce_into((vec![1.0f32], vec![0.0]), Op::Sum, second).unwrap();
    ///     let (input, output) = request.wait(&mut group).unwrap();
    ///     assert_eq!((input, output), (vec![1.0], vec![2.0]));
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_all_reduce_into<I: Buffer, O: Buffer<Element = I::Element>>(
        &mut self,
        buffers: (I, O),
        op: Op,
        timeout: Duration,
    ) -> Started<(I, O)> {
        self.start(timeout, |calls, deadline| calls.start_all_reduce_into(buffers, op, deadline))
    }

    /// Begins [`Group::all_reduce_registered`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let mut gradients = group.register::<f32>(1 << 16, second).unwrap();
    ///     gradients.fill(1.0);
    ///     let request = group.start_all_reduce_registered(gradients, Op::Sum, second).unwrap();
    ///     let gradients = request.wait(&mut group).unwrap();
    ///     assert_eq!(gradients[5], 2.0);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    #[expect(clippy::result_large_err, reason = "the error gives the buffer back")]
    pub fn start_all_reduce_registered<T: Element>(
        &mut self,
        buffer: Registered<T>,
        op: Op,
        timeout: Duration,
    ) -> Started<Registered<T>> {
        if let Err(error) = self.owns(&buffer) {
            return Err(Failed { error, buffers: Some(buffer) });
        }
        self.start(timeout, |calls, deadline| calls.start_all_reduce_registered(buffer, op, deadline))
    }

    /// Begins [`Group::reduce_scatter`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let request = group.start_reduce_scatter((vec![1u8, 5], vec![0]), Op::Sum, second).unwrap();
    ///     assert_eq!(request.wait(&mut group).unwrap().1, [[2], [10]][group.rank()]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_reduce_scatter<I: Buffer, O: Buffer<Element = I::Element>>(
        &mut self,
        buffers: (I, O),
        op: Op,
        timeout: Duration,
    ) -> Started<(I, O)> {
        self.start(timeout, |calls, deadline| calls.start_reduce_scatter(buffers, op, deadline))
    }

    /// Begins [`Group::all_gather`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let request = group.start_all_gather((vec![group.rank() as i32], vec![9; 2]), second).unwrap();
    ///     assert_eq!(request.wait(&mut group).unwrap().1, [0, 1]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_all_gather<I: Buffer, O: Buffer<Element = I::Element>>(
        &mut self,
        buffers: (I, O),
        timeout: Duration,
    ) -> Started<(I, O)> {
        self.start(timeout, |calls, deadline| calls.start_all_gather(buffers, deadline))
    }

    /// Begins [`Group::all_to_all`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let from = [vec![1, 2], vec![3, 4]][group.rank()].clone();
    ///     let request = group.start_all_to_all((from, vec![0; 2]), second).unwrap();
    ///     assert_eq!(request.wait(&mut group).unwrap().1, [[1, 3], [2, 4]][group.rank()]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_all_to_all<I: Buffer, O: Buffer<Element = I::Element>>(
        &mut self,
        buffers: (I, O),
        timeout: Duration,
    ) -> Started<(I, O)> {
        self.start(timeout, |calls, deadline| calls.start_all_to_all(buffers, deadline))
    }

    /// Begins [`Group::reduce`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let request = group.start_reduce((vec![2.5], vec![0.0]), Op::Sum, 1, second).unwrap();
    ///     let (_, sum) = request.wait(&mut group).unwrap();
    ///     assert!(group.rank() == 0 || sum == [5.0]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_reduce<I: Buffer, O: Buffer<Element = I::Element>>(
        &mut self,
        buffers: (I, O),
        op: Op,
        root: Rank,
        timeout: Duration,
    ) -> Started<(I, O)> {
        self.start(timeout, |calls, deadline| calls.start_reduce(buffers, op, root, deadline))
    }

    /// Begins [`Group::broadcast`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let request = group.start_broadcast(vec![group.rank() as f64], 1, second).unwrap();
    ///     assert_eq!(request.wait(&mut group).unwrap(), [1.0]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_broadcast<B: Buffer>(&mut self, buffer: B, root: Rank, timeout: Duration) -> Started<B> {
        self.start(timeout, |calls, deadline| calls.start_broadcast(buffer, root, deadline))
    }

    /// Begins [`Group::send`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let request = match group.rank() {
    ///         0 => group.start_send(vec![42u64], 1, second).unwrap(),
    ///         _ => group.start_receive(vec![0u64], 0, second).unwrap(),
    ///     };
    ///     assert_eq!(request.wait(&mut group).unwrap(), [42]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_send<B: Buffer>(&mut self, data: B, to: Rank, timeout: Duration) -> Started<B> {
        self.start(timeout, |calls, deadline| calls.start_send(data, to, deadline))
    }

    /// Begins [`Group::receive`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let request = if group.rank() == 0 {
    ///         group.start_send(vec![7u8], 1, second).unwrap()
    ///     } else {
    ///         group.start_receive(vec![0u8], 0, second).unwrap()
    ///     };
    ///     assert_eq!(request.wait(&mut group).unwrap(), [7]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_receive<B: Buffer>(&mut self, buffer: B, from: Rank, timeout: Duration) -> Started<B> {
        self.start(timeout, |calls, deadline| calls.start_receive(buffer, from, deadline))
    }

    /// Begins [`Group::barrier`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let request = group.start_barrier(second).unwrap();
    ///     request.wait(&mut group).unwrap();
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_barrier(&mut self, timeout: Duration) -> Started<()> {
        self.start(timeout, |calls, deadline| calls.start_barrier(deadline))
    }

    /// Goes on with the calls in flight, without waiting; says how many are left. For callers that compute in between and have no
    /// helper thread.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let request = group.start_all_reduce(vec![1u32; 100_000], Op::Sum, second).unwrap();
    ///     while group.progress().unwrap() > 0 {
    ///         // Compute a little.
    ///     }
    ///     assert!(request.is_done());
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// What made a call fail; all in flight have then ended with it.
    pub fn progress(&mut self) -> Result<usize> {
        self.run(Calls::progress)
    }
}

impl<B> Request<B> {
    /// Waits until the call is over and gives its buffers back. The call's own timeout bounds the wait.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let request = group.start_all_reduce(vec![1.0f32], Op::Sum, second).unwrap();
    ///     // ... compute ...
    ///     assert_eq!(request.wait(&mut group).unwrap(), [2.0]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// What the call answered, with the buffers; `Argument` when the call is not of this group.
    pub fn wait(self, group: &mut Group) -> Result<B, Failed<B>> {
        if !self.is_done() {
            // A failure is in the answer too.
            let _ = group.run(|calls| calls.drive(&|| self.is_done(), None));
        }
        self.answer()
    }

    /// Waits for this long at most; says whether the call is over.
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let request = group.start_barrier(second).unwrap();
    ///     while !request.wait_for(&mut group, Duration::from_millis(1)) {
    ///         // Somebody is late.
    ///     }
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn wait_for(&self, group: &mut Group, at_most: Duration) -> bool {
        if !self.is_done() {
            let _ = group.run(|calls| calls.drive(&|| self.is_done(), Some(Instant::now() + at_most)));
        }
        self.is_done()
    }

    /// Goes on with the calls in flight, without waiting; says whether this one is over. With a helper thread only a look.
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let request = group.start_barrier(second).unwrap();
    ///     while !request.test(&mut group) {
    ///         std::thread::yield_now();
    ///     }
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn test(&self, group: &mut Group) -> bool {
        if !self.is_done() && !group.engine.is_helped() {
            let _ = group.run(Calls::progress);
        }
        self.is_done()
    }
}
