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
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let request = alone.start_all_reduce_into((vec![1.0f32], vec![0.0]), Op::Sum, soon)?;
    /// let (_input, output) = alone.wait(request)?;
    /// assert_eq!(output, [1.0]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
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
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op, registered};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// # let mut buffer = registered::in_one_process::<f32>(1, 100)?.remove(0);
    /// let request = alone.start_all_reduce_registered(buffer, Op::Sum, soon)?;
    /// let buffer = alone.wait(request)?;
    /// assert_eq!(buffer[0], 0.0);
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
        deadline: Instant,
    ) -> Started<Registered<T>> {
        let group = self.group();
        self.start(buffer, |b| Arguments::all_reduce_registered(group, b, op), deadline)
    }

    /// Begins [`Executor::reduce_scatter`].
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let request = alone.start_reduce_scatter((vec![1u8, 5], vec![0; 2]), Op::Sum, soon)?;
    /// assert_eq!(alone.wait(request)?.1, [1, 5]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
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
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let request = alone.start_all_gather((vec![7], vec![0]), soon)?;
    /// assert_eq!(alone.wait(request)?.1, [7]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
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
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let request = alone.start_all_to_all((vec![1, 2], vec![0; 2]), soon)?;
    /// assert_eq!(alone.wait(request)?.1, [1, 2]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
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
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let request = alone.start_reduce((vec![2.5], vec![0.0]), Op::Sum, 0, soon)?;
    /// assert_eq!(alone.wait(request)?.1, [2.5]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
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
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let request = alone.start_broadcast(vec![4.0], 0, soon)?;
    /// assert_eq!(alone.wait(request)?, [4.0]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_broadcast<B: Buffer>(&mut self, buffer: B, root: Rank, deadline: Instant) -> Started<B> {
        let group = self.group();
        self.start(buffer, |b| Arguments::broadcast(group, slice(b), root), deadline)
    }

    /// Begins [`Executor::send`].
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut ranks = loopback::group(2, 4, 4096).into_iter().map(|links| Executor::new(links, Options::default()).unwrap());
    /// # let (mut zero, mut one) = (ranks.next().unwrap(), ranks.next().unwrap());
    /// let request = zero.start_send(vec![1u8, 2, 3], 1, soon)?;
    /// let mut message = [0u8; 3];
    /// one.receive(&mut message, 0, soon)?;
    /// zero.wait(request)?;
    /// assert_eq!(message, [1, 2, 3]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_send<B: Buffer>(&mut self, data: B, to: Rank, deadline: Instant) -> Started<B> {
        let group = self.group();
        self.start(data, |b| Arguments::send(group, slice(b), to), deadline)
    }

    /// Begins [`Executor::receive`].
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut ranks = loopback::group(2, 4, 4096).into_iter().map(|links| Executor::new(links, Options::default()).unwrap());
    /// # let (mut zero, mut one) = (ranks.next().unwrap(), ranks.next().unwrap());
    /// let request = zero.start_receive(vec![0.0f32], 1, soon)?;
    /// one.send(&[0.5f32], 0, soon)?;
    /// assert_eq!(zero.wait(request)?, [0.5]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_receive<B: Buffer>(&mut self, buffer: B, from: Rank, deadline: Instant) -> Started<B> {
        let group = self.group();
        self.start(buffer, |b| Arguments::receive(group, slice(b), from), deadline)
    }

    /// Begins [`Executor::barrier`].
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let request = alone.start_barrier(soon)?;
    /// alone.wait(request)?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`.
    pub fn start_barrier(&mut self, deadline: Instant) -> Started<()> {
        self.start((), |()| Ok(Arguments::barrier()), deadline)
    }
}
