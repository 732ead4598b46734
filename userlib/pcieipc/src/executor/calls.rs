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
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let mut sum = [0.0; 2];
    /// alone.all_reduce_into(&[1.0, 2.0], &mut sum, Op::Sum, soon)?;
    /// assert_eq!(sum, [1.0, 2.0]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn all_reduce_into<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, deadline: Instant) -> Result<()> {
        self.call(Arguments::all_reduce_into(input, output, op)?, deadline)
    }

    /// Like [`Self::all_reduce`] for a buffer whose type is known only at run time; it need not be aligned.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let mut bytes = 3u16.to_ne_bytes();
    /// alone.all_reduce_bytes(&mut bytes, pcieipc::reduce::Kind::U16, Op::Prod, soon)?;
    /// assert_eq!(u16::from_ne_bytes(bytes), 3);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
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
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op, registered};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// # let mut buffer = registered::in_one_process::<f32>(1, 100)?.remove(0);
    /// buffer.fill(2.0);
    /// alone.all_reduce_registered(&mut buffer, Op::Sum, soon)?;
    /// assert_eq!(buffer[99], 2.0);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` for a buffer of another group.
    pub fn all_reduce_registered<T: Element>(&mut self, buffer: &mut Registered<T>, op: Op, deadline: Instant) -> Result<()> {
        let group = self.group();
        if let Some(result) = self.call_short(&Arguments::all_reduce_alone(group, buffer, op)?, deadline) {
            return result;
        }
        self.call(Arguments::all_reduce_registered(group, buffer, op)?, deadline)
    }

    /// Like [`Self::broadcast`], straight from the root's registered buffer.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op, registered};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// # let mut buffer = registered::in_one_process::<f32>(1, 100)?.remove(0);
    /// buffer.fill(2.0);
    /// alone.broadcast_registered(&mut buffer, 0, soon)?;
    /// assert_eq!(buffer[99], 2.0);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` for a buffer of another group.
    pub fn broadcast_registered<T: Element>(&mut self, buffer: &mut Registered<T>, root: Rank, deadline: Instant) -> Result<()> {
        self.call(Arguments::broadcast_registered(self.group(), buffer, root)?, deadline)
    }

    /// Like [`Self::all_gather`], straight between registered buffers of one block for each rank: this rank's block is the input and is in its
    /// place already.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op, registered};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// # let mut buffer = registered::in_one_process::<f32>(1, 100)?.remove(0);
    /// buffer.fill(2.0);
    /// alone.all_gather_registered(&mut buffer, soon)?;
    /// assert_eq!(buffer[99], 2.0);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` for a buffer of another group or without whole blocks.
    pub fn all_gather_registered<T: Element>(&mut self, buffer: &mut Registered<T>, deadline: Instant) -> Result<()> {
        self.call(Arguments::all_gather_registered(self.group(), buffer)?, deadline)
    }

    /// Like [`Self::reduce_scatter`], straight from registered inputs, which stay as they are.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op, registered};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// # let mut buffer = registered::in_one_process::<f32>(1, 100)?.remove(0);
    /// buffer.fill(2.0);
    /// let mut block = [0.0; 100];
    /// alone.reduce_scatter_registered(&mut buffer, &mut block, Op::Sum, soon)?;
    /// assert_eq!(block[99], 2.0);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` for a buffer of another group.
    pub fn reduce_scatter_registered<T: Element>(
        &mut self,
        input: &mut Registered<T>,
        output: &mut [T],
        op: Op,
        deadline: Instant,
    ) -> Result<()> {
        self.call(Arguments::reduce_scatter_registered(self.group(), input, output, op)?, deadline)
    }

    /// All-reduces several buffers, in the order given and overlapped: the gradients of a model, bucket by bucket.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let (mut weights, mut biases) = ([1i32; 100], [2i32; 3]);
    /// alone.all_reduce_many(&mut [&mut weights, &mut biases], Op::Sum, soon)?;
    /// assert_eq!(biases, [2; 3]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` before anything is sent. Any of the buffers may be half overwritten.
    pub fn all_reduce_many<T: Element>(&mut self, buffers: &mut [&mut [T]], op: Op, deadline: Instant) -> Result<()> {
        let arguments = buffers.iter_mut().map(|buffer| Arguments::all_reduce(buffer, op)).collect();
        self.call_all(arguments, deadline)
    }

    /// Combines blocks: `input` holds one block for each rank, `output` gets this rank's block of the combination.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let mut block = [0u8; 2];
    /// alone.reduce_scatter(&[1, 5], &mut block, Op::Sum, soon)?;
    /// assert_eq!(block, [1, 5]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn reduce_scatter<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, deadline: Instant) -> Result<()> {
        self.call(Arguments::reduce_scatter(self.group(), input, output, op)?, deadline)
    }

    /// Collects blocks: `output` gets the inputs of all ranks, in rank order.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let mut all = [0];
    /// alone.all_gather(&[7], &mut all, soon)?;
    /// assert_eq!(all, [7]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn all_gather<T: Element>(&mut self, input: &[T], output: &mut [T], deadline: Instant) -> Result<()> {
        self.call(Arguments::all_gather(self.group(), input, output)?, deadline)
    }

    /// Exchanges blocks: block `p` of `input` goes to rank `p`, which finds it as the block of this rank.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let mut blocks = [0; 2];
    /// alone.all_to_all(&[1, 2], &mut blocks, soon)?;
    /// assert_eq!(blocks, [1, 2]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn all_to_all<T: Element>(&mut self, input: &[T], output: &mut [T], deadline: Instant) -> Result<()> {
        self.call(Arguments::all_to_all(self.group(), input, output)?, deadline)
    }

    /// Combines the inputs of all ranks; `output` is stored to at the root only and may be empty elsewhere.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let mut sum = [0.0];
    /// alone.reduce(&[2.5], &mut sum, Op::Sum, 0, soon)?;
    /// assert_eq!(sum, [2.5]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn reduce<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, root: Rank, deadline: Instant) -> Result<()> {
        self.call(Arguments::reduce(self.group(), input, output, op, root)?, deadline)
    }

    /// Gives every rank the root's buffer in place of its own.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let mut weights = [4.0];
    /// alone.broadcast(&mut weights, 0, soon)?;
    /// assert_eq!(weights, [4.0]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn broadcast<T: Element>(&mut self, buffer: &mut [T], root: Rank, deadline: Instant) -> Result<()> {
        self.call(Arguments::broadcast(self.group(), buffer, root)?, deadline)
    }

    /// Sends a message to one rank, which must call [`Self::receive`]; the others take no part.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut ranks = loopback::group(2, 4, 4096).into_iter().map(|links| Executor::new(links, Options::default()).unwrap());
    /// # let (mut zero, mut one) = (ranks.next().unwrap(), ranks.next().unwrap());
    /// zero.send(&[1u8, 2, 3], 1, soon)?;
    /// let mut message = [0u8; 3];
    /// one.receive(&mut message, 0, soon)?;
    /// assert_eq!(message, [1, 2, 3]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` when `to` is this rank.
    pub fn send<T: Element>(&mut self, data: &[T], to: Rank, deadline: Instant) -> Result<()> {
        self.call(Arguments::send(self.group(), data, to)?, deadline)
    }

    /// Receives a message from one rank, which must call [`Self::send`] with as many elements.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut ranks = loopback::group(2, 4, 4096).into_iter().map(|links| Executor::new(links, Options::default()).unwrap());
    /// # let (mut zero, mut one) = (ranks.next().unwrap(), ranks.next().unwrap());
    /// one.send(&[0.5f32], 0, soon)?;
    /// let mut message = [0.0f32];
    /// zero.receive(&mut message, 1, soon)?;
    /// assert_eq!(message, [0.5]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`]; `Argument` when `from` is this rank.
    pub fn receive<T: Element>(&mut self, buffer: &mut [T], from: Rank, deadline: Instant) -> Result<()> {
        self.call(Arguments::receive(self.group(), buffer, from)?, deadline)
    }

    /// Waits until all ranks have called it.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// alone.barrier(soon)?; // nobody else to wait for
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Self::all_reduce`].
    pub fn barrier(&mut self, deadline: Instant) -> Result<()> {
        self.call(Arguments::barrier(), deadline)
    }
}
