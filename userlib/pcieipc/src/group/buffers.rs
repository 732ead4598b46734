// SPDX-License-Identifier: MIT OR Apache-2.0
//! Buffers that all ranks of a group can read.

use std::{
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use super::{
    Group,
    join::OfTurn,
    message::{Message, Silence},
};
use crate::{
    error::{Error, Rank, Result},
    reduce::{Element, Op},
    registered::{Offer, Registered},
    sys::failed,
};

impl Group {
    /// Makes a buffer of `count` elements, all zero, that the other ranks can read where it lies. All ranks call it in the same
    /// order with the same arguments, once; then the buffer is used again and again. It belongs to the group as it is now:
    /// after [`Group::shrink`], register again.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use pcieipc::{group::{Group, GroupOptions}, reduce::Op};
    /// # fn main() -> pcieipc::Result<()> {
    /// let second = Duration::from_secs(1);
    /// let mut group = Group::meet(GroupOptions::new(0, 2, "/run/user/1000/my-group"))?;
    /// let mut gradients = group.register::<f32>(1 << 20, second)?;
    /// gradients.fill(1.0);
    /// group.all_reduce_registered(&mut gradients, Op::Sum, second)?;
    /// assert_eq!(gradients[0], 2.0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Mismatch` when ranks register different lengths, `Timeout`, `PeerDied`, `Corrupt`, `System` when there is no memory.
    pub fn register<T: Element>(&mut self, count: usize, timeout: Duration) -> Result<Registered<T>> {
        let (begun, rank, turn, number) = (Instant::now(), self.rank(), self.turn, self.registered);
        self.registered = number.wrapping_add(1);
        let bytes =
            count.checked_mul(size_of::<T>()).ok_or_else(|| Error::Argument(format!("{count} elements do not fit memory")))?;
        let offer = Offer::new(bytes)?;
        let unanswered = |peer: Rank, silence: Silence| match silence {
            Silence::Late => Error::Timeout { rank, peer, what: "registering a buffer", waited: begun.elapsed(), endpoint: None },
            Silence::Closed => Error::PeerDied { rank, peer, what: "registering a buffer", endpoint: None },
            Silence::Nonsense(what) => Error::Corrupt { rank, peer, what, endpoint: None },
            Silence::Full(error) => failed("recvmsg", "raise the limit of open files")(error),
        };
        let ours = Message::Buffer { turn, number, bytes };
        let contacts =
            || self.members.iter().enumerate().filter_map(|(new, &old)| Some((new, self.mesh.contacts.get(old)?.as_ref()?)));
        for (peer, contact) in contacts() {
            contact.send(&ours, &[offer.file()]).map_err(|silence| unanswered(peer, silence))?;
        }
        let mut files: Vec<Option<OwnedFd>> = self.members.iter().map(|_| None).collect();
        for (peer, contact) in contacts() {
            let silence = match contact.receive_of_turn(turn, begun + timeout) {
                Ok(OfTurn::Now(Message::Buffer { number: n, bytes: b, .. }, _)) if (n, b) != (number, bytes) => {
                    let say = |number, bytes| format!("buffer {number} of {bytes} bytes");
                    let (ours, theirs) = (say(number, bytes), say(n, b));
                    return Err(Error::Mismatch { rank, peer, what: "the buffer to register", ours, theirs, endpoint: None });
                }
                Ok(OfTurn::Now(Message::Buffer { .. }, mut fds)) if fds.len() == 1 => {
                    files[peer] = fds.pop();
                    continue;
                }
                Ok(OfTurn::Now(other, fds)) => Silence::Nonsense(format!("{other:?} with {} descriptors", fds.len())),
                Ok(OfTurn::Later) => Silence::Closed,
                Err(silence) => silence,
            };
            return Err(unanswered(peer, silence));
        }
        offer.join(rank, files, count, number, turn)
    }

    /// Like [`Group::all_reduce`], straight between registered buffers: no byte is copied through a ring.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let mut gradient = group.register::<f32>(100_000, second).unwrap();
    ///     gradient.fill(1.5);
    ///     group.all_reduce_registered(&mut gradient, Op::Sum, second).unwrap();
    ///     assert_eq!(gradient[99_999], 3.0);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` for a buffer of an earlier life of the group.
    pub fn all_reduce_registered<T: Element>(&mut self, buffer: &mut Registered<T>, op: Op, timeout: Duration) -> Result<()> {
        self.owns(buffer)?;
        let by = self.clock.after(timeout);
        self.run(|calls| calls.all_reduce_registered(buffer, op, by))
    }

    /// Like [`Group::broadcast`], straight from the root's registered buffer.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let mut weights = group.register::<f32>(5000, second).unwrap();
    ///     weights.fill(group.rank() as f32);
    ///     group.broadcast_registered(&mut weights, 1, second).unwrap();
    ///     assert_eq!(weights[4999], 1.0);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce_registered`].
    pub fn broadcast_registered<T: Element>(&mut self, buffer: &mut Registered<T>, root: Rank, timeout: Duration) -> Result<()> {
        self.owns(buffer)?;
        let by = self.clock.after(timeout);
        self.run(|calls| calls.broadcast_registered(buffer, root, by))
    }

    /// Like [`Group::all_gather`], straight between registered buffers with one block for each rank: this rank's block is the input and is in
    /// its place already.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let mut blocks = group.register::<u32>(2 * 1000, second).unwrap();
    ///     let rank = group.rank();
    ///     blocks[rank * 1000..][..1000].fill(rank as u32 + 7);
    ///     group.all_gather_registered(&mut blocks, second).unwrap();
    ///     assert_eq!((blocks[0], blocks[1999]), (7, 8));
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce_registered`]; `Argument` for a buffer without whole blocks.
    pub fn all_gather_registered<T: Element>(&mut self, buffer: &mut Registered<T>, timeout: Duration) -> Result<()> {
        self.owns(buffer)?;
        let by = self.clock.after(timeout);
        self.run(|calls| calls.all_gather_registered(buffer, by))
    }

    /// Like [`Group::reduce_scatter`], straight from registered inputs, which stay as they are.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let mut input = group.register::<u64>(2 * 300, second).unwrap();
    ///     input.fill(4);
    ///     let mut block = [0; 300];
    ///     group.reduce_scatter_registered(&mut input, &mut block, Op::Sum, second).unwrap();
    ///     assert_eq!((block[299], input[0]), (8, 4));
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce_registered`]; `Argument` when the lengths do not fit.
    pub fn reduce_scatter_registered<T: Element>(
        &mut self,
        input: &mut Registered<T>,
        output: &mut [T],
        op: Op,
        timeout: Duration,
    ) -> Result<()> {
        self.owns(input)?;
        let by = self.clock.after(timeout);
        self.run(|calls| calls.reduce_scatter_registered(input, output, op, by))
    }

    /// Whether the buffer belongs to the group as it is now.
    pub(super) fn owns<T: Element>(&self, buffer: &Registered<T>) -> Result<()> {
        if buffer.turn() == self.turn {
            return Ok(());
        }
        Err(Error::Argument("the buffer was registered before the group shrank; register it again".into()))
    }
}
