// SPDX-License-Identifier: MIT OR Apache-2.0
//! The collectives as calls that return at once.

use std::{sync::Arc, time::Instant};

use super::{
    Executor,
    arguments::Arguments,
    request::{Buffer, Failed, Outcome, Request, Started},
};
use crate::{
    error::{Rank, Result},
    link::Links,
    reduce::{Element, Op},
    registered::Registered,
};

/// The elements of a buffer, while its arguments are made.
fn slice<B: Buffer>(buffer: &mut B) -> &mut [B::Element] {
    // SAFETY: readable, writable and nobody else's, as every Buffer promises; borrowed as long as the buffer.
    unsafe { buffer.elements().as_mut() }
}

/// Each begins a call and returns; the call goes on in [`Executor::progress`], in every wait, and in blocking calls, which queue
/// behind it. It is over by its deadline. All ranks start the same calls in the same order. An error gives the buffers back: nothing
/// was begun.
impl<L: Links> Executor<L> {
    fn start<B: Send + 'static>(
        &mut self,
        mut buffers: B,
        arguments: impl FnOnce(&mut B) -> Result<Arguments>,
        deadline: Instant,
    ) -> Started<B> {
        let arguments = match arguments(&mut buffers) {
            Ok(arguments) => arguments,
            Err(error) => return Err(Failed { error, buffers: Some(buffers) }),
        };
        let outcome = Arc::new(Outcome::default());
        let end = outcome.clone();
        match self.launch(arguments, deadline, Box::new(move |answer| end.set(buffers, answer))) {
            Ok(()) => {
                // The first records leave now; a failure is told by the request.
                let _ = self.progress();
                Ok(Request { outcome })
            }
            Err((error, end)) => {
                // Nothing begun: the buffers come back through the outcome.
                end(Err(error.clone()));
                Err(Request { outcome }.refusal(error))
            }
        }
    }

    /// Begins [`Executor::all_reduce`].
    ///
    /// ```
    /// use std::time::{Duration, Instant};
    /// use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    ///
    /// let ranks: Vec<_> = loopback::group(2, 4, 4096).into_iter().map(|links| std::thread::spawn(move || {
    ///     let mut executor = Executor::new(links, Options::default()).unwrap();
    ///     let soon = Instant::now() + Duration::from_secs(5);
    ///     let first = executor.start_all_reduce(vec![1.0f32; 1000], Op::Sum, soon).unwrap();
    ///     let second = executor.start_all_reduce(vec![2i64; 10], Op::Prod, soon).unwrap();
    ///     // ... compute, and call `executor.progress()` now and then ...
    ///     (executor.wait(second).unwrap()[0], executor.wait(first).unwrap()[0])
    /// })).collect();
    /// for rank in ranks {
    ///     assert_eq!(rank.join().unwrap(), (4, 2.0));
    /// }
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_all_reduce<B: Buffer>(&mut self, buffer: B, op: Op, deadline: Instant) -> Started<B> {
        self.start(buffer, |b| Ok(Arguments::all_reduce(slice(b), op)), deadline)
    }

    /// Begins [`Executor::all_reduce_into`].
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_all_reduce_into<I: Buffer, O: Buffer<Element = I::Element>>(
        &mut self,
        (input, output): (I, O),
        op: Op,
        deadline: Instant,
    ) -> Started<(I, O)> {
        self.start((input, output), |(i, o)| Arguments::all_reduce_into(slice(i), slice(o), op), deadline)
    }

    /// Begins [`Executor::all_reduce_registered`].
    ///
    /// # Errors
    /// `Argument`.
    #[expect(clippy::result_large_err, reason = "the error gives the buffer back")]
    pub fn start_all_reduce_registered<T: Element>(
        &mut self,
        buffer: Registered<T>,
        op: Op,
        deadline: Instant,
    ) -> Started<Registered<T>> {
        let group = self.group();
        self.start(buffer, |b| Arguments::all_reduce_registered(group, b, op), deadline)
    }

    /// Begins [`Executor::reduce_scatter`].
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_reduce_scatter<I: Buffer, O: Buffer<Element = I::Element>>(
        &mut self,
        (input, output): (I, O),
        op: Op,
        deadline: Instant,
    ) -> Started<(I, O)> {
        let group = self.group();
        self.start((input, output), |(i, o)| Arguments::reduce_scatter(group, slice(i), slice(o), op), deadline)
    }

    /// Begins [`Executor::all_gather`].
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_all_gather<I: Buffer, O: Buffer<Element = I::Element>>(
        &mut self,
        (input, output): (I, O),
        deadline: Instant,
    ) -> Started<(I, O)> {
        let group = self.group();
        self.start((input, output), |(i, o)| Arguments::all_gather(group, slice(i), slice(o)), deadline)
    }

    /// Begins [`Executor::all_to_all`].
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_all_to_all<I: Buffer, O: Buffer<Element = I::Element>>(
        &mut self,
        (input, output): (I, O),
        deadline: Instant,
    ) -> Started<(I, O)> {
        let group = self.group();
        self.start((input, output), |(i, o)| Arguments::all_to_all(group, slice(i), slice(o)), deadline)
    }

    /// Begins [`Executor::reduce`].
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_reduce<I: Buffer, O: Buffer<Element = I::Element>>(
        &mut self,
        (input, output): (I, O),
        op: Op,
        root: Rank,
        deadline: Instant,
    ) -> Started<(I, O)> {
        let group = self.group();
        self.start((input, output), |(i, o)| Arguments::reduce(group, slice(i), slice(o), op, root), deadline)
    }

    /// Begins [`Executor::broadcast`].
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_broadcast<B: Buffer>(&mut self, buffer: B, root: Rank, deadline: Instant) -> Started<B> {
        let group = self.group();
        self.start(buffer, |b| Arguments::broadcast(group, slice(b), root), deadline)
    }

    /// Begins [`Executor::send`].
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_send<B: Buffer>(&mut self, data: B, to: Rank, deadline: Instant) -> Started<B> {
        let group = self.group();
        self.start(data, |b| Arguments::send(group, slice(b), to), deadline)
    }

    /// Begins [`Executor::receive`].
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_receive<B: Buffer>(&mut self, buffer: B, from: Rank, deadline: Instant) -> Started<B> {
        let group = self.group();
        self.start(buffer, |b| Arguments::receive(group, slice(b), from), deadline)
    }

    /// Begins [`Executor::barrier`].
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_barrier(&mut self, deadline: Instant) -> Started<()> {
        self.start((), |()| Ok(Arguments::barrier()), deadline)
    }
}
