// SPDX-License-Identifier: MIT OR Apache-2.0
//! The seam between executors and transports: one record link to and from every peer.
//!
//! An executor sees links and never a system call. Transports (`/dev/pcieipc`, shared memory, an in-process fake for tests)
//! implement [`Links`]. Memory that a peer can write is handed out as [`Shared`] and [`SharedMut`], which never become
//! ordinary slices: the other process may write at any time.

use std::{marker::PhantomData, ptr::NonNull, time::Instant};

use crate::{
    error::{EndpointRef, Rank, Result},
    plan::Shares,
};

/// What every record says about itself. The reader compares all of it before it uses the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct RecordHeader {
    /// The number of the collective call within its group; compared with wrapping arithmetic.
    pub epoch: u32,
    /// The sender's step within its plan.
    pub step: u16,
    /// The shard that the payload belongs to.
    pub shard: u16,
    /// A hash of operation, type, count and plan; ranks that disagree see it differ.
    pub call: u32,
    /// CRC-32C of the payload in checked mode, otherwise 0.
    pub crc: u32,
}

/// Bytes that a peer may write while we read them.
#[derive(Debug, Clone, Copy)]
pub struct Shared<'a> {
    ptr: NonNull<u8>,
    len: usize,
    life: PhantomData<&'a ()>,
}

/// Bytes that we may write and a peer may read.
#[derive(Debug)]
pub struct SharedMut<'a> {
    ptr: NonNull<u8>,
    len: usize,
    life: PhantomData<&'a mut ()>,
}

impl Shared<'_> {
    /// ```
    /// use pcieipc::link::Shared;
    ///
    /// let bytes = [1u8, 2, 3];
    /// // SAFETY: the array outlives it.
    /// let shared = unsafe { Shared::new(std::ptr::NonNull::from(&bytes).cast(), 3) };
    /// assert_eq!(shared.len(), 3);
    /// ```
    ///
    /// # Safety
    /// `ptr` must stay mapped and readable for `len` bytes during the lifetime.
    pub unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, len, life: PhantomData }
    }
    /// Start of the bytes; only for copies and kernels that tolerate concurrent writers.
    ///
    /// ```
    /// # use pcieipc::link::{Shared, SharedMut};
    /// # let mut bytes = [7u8; 3];
    /// # let place = std::ptr::NonNull::from(&mut bytes).cast::<u8>();
    /// # // SAFETY: the array outlives it.
    /// # let mut room = unsafe { SharedMut::new(place, 3) };
    /// # // SAFETY: as above.
    /// # let shared = unsafe { Shared::new(place, 3) };
    /// let mut copy = [0u8; 3];
    /// // SAFETY: both sides have three bytes.
    /// unsafe { shared.as_ptr().copy_to_nonoverlapping(copy.as_mut_ptr(), shared.len()) };
    /// assert_eq!(copy, [7; 3]);
    /// ```
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }
    /// How many bytes.
    ///
    /// ```
    /// # use pcieipc::link::{Shared, SharedMut};
    /// # let mut bytes = [7u8; 3];
    /// # let place = std::ptr::NonNull::from(&mut bytes).cast::<u8>();
    /// # // SAFETY: the array outlives it.
    /// # let mut room = unsafe { SharedMut::new(place, 3) };
    /// # // SAFETY: as above.
    /// # let shared = unsafe { Shared::new(place, 3) };
    /// assert_eq!(shared.len(), 3);
    /// ```
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether there are none.
    ///
    /// ```
    /// # use pcieipc::link::{Shared, SharedMut};
    /// # let mut bytes = [7u8; 3];
    /// # let place = std::ptr::NonNull::from(&mut bytes).cast::<u8>();
    /// # // SAFETY: the array outlives it.
    /// # let mut room = unsafe { SharedMut::new(place, 3) };
    /// # // SAFETY: as above.
    /// # let shared = unsafe { Shared::new(place, 3) };
    /// assert!(!shared.is_empty());
    /// ```
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl SharedMut<'_> {
    /// ```
    /// use pcieipc::link::SharedMut;
    ///
    /// let mut bytes = [0u8; 3];
    /// // SAFETY: the array outlives it, and nobody else uses it.
    /// let room = unsafe { SharedMut::new(std::ptr::NonNull::from(&mut bytes).cast(), 3) };
    /// assert_eq!(room.len(), 3);
    /// ```
    ///
    /// # Safety
    /// `ptr` must stay mapped and writable for `len` bytes during the lifetime, and nobody else in this process may use it.
    pub unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, len, life: PhantomData }
    }
    /// Start of the bytes.
    ///
    /// ```
    /// # use pcieipc::link::{Shared, SharedMut};
    /// # let mut bytes = [7u8; 3];
    /// # let place = std::ptr::NonNull::from(&mut bytes).cast::<u8>();
    /// # // SAFETY: the array outlives it.
    /// # let mut room = unsafe { SharedMut::new(place, 3) };
    /// # // SAFETY: as above.
    /// # let shared = unsafe { Shared::new(place, 3) };
    /// // SAFETY: three bytes are there.
    /// unsafe { room.as_mut_ptr().write_bytes(1, 3) };
    /// assert_eq!(bytes, [1; 3]);
    /// ```
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }
    /// How many bytes.
    ///
    /// ```
    /// # use pcieipc::link::{Shared, SharedMut};
    /// # let mut bytes = [7u8; 3];
    /// # let place = std::ptr::NonNull::from(&mut bytes).cast::<u8>();
    /// # // SAFETY: the array outlives it.
    /// # let mut room = unsafe { SharedMut::new(place, 3) };
    /// # // SAFETY: as above.
    /// # let shared = unsafe { Shared::new(place, 3) };
    /// assert_eq!(room.len(), 3);
    /// ```
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether there are none.
    ///
    /// ```
    /// # use pcieipc::link::{Shared, SharedMut};
    /// # let mut bytes = [7u8; 3];
    /// # let place = std::ptr::NonNull::from(&mut bytes).cast::<u8>();
    /// # // SAFETY: the array outlives it.
    /// # let mut room = unsafe { SharedMut::new(place, 3) };
    /// # // SAFETY: as above.
    /// # let shared = unsafe { Shared::new(place, 3) };
    /// assert!(!room.is_empty());
    /// ```
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// What a rank that can not go on waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// The next record from a rank.
    Record(Rank),
    /// Room on a link.
    Room {
        /// To whom.
        to: Rank,
        /// For a record of so many bytes.
        len: usize,
    },
}

/// One record link to and one from every peer, as one rank sees them.
///
/// Order: records of one link arrive complete and in the order sent. A record is at most [`Links::max_record`] bytes and
/// contiguous in memory. Every blocking call ends by `deadline` at the latest, with a typed error.
///
/// An executor holds records and reservations of several peers at once and reads them through their pointers. Asking again
/// for a record that was not released, or for room that was not committed, gives the same one again.
///
/// # Safety
/// The payload that [`Links::receive`] gives stays mapped and readable, at the same place, until [`Links::release`] for that
/// peer; the room that [`Links::reserve`] gives stays mapped and writable for the length asked for, at the same place and given
/// to nobody else, until [`Links::commit`] for that peer. Calls for other peers do not change that, nor does an error.
pub unsafe trait Links {
    /// This rank.
    fn rank(&self) -> Rank;
    /// How many ranks there are.
    fn ranks(&self) -> usize;
    /// The longest payload of one record, in bytes: at least 4096 and a multiple of 64.
    fn max_record(&self) -> usize;
    /// How many records of `len` bytes a link takes for certain before its reader has released any, wherever in the ring the
    /// writer stands. Plans are chosen so that they need no more. Depends on nothing that differs between ranks.
    fn depth(&self, len: usize) -> usize;

    /// Waits until a record of `len` bytes fits into the link to `to` and gives its payload, 64-byte aligned
    /// (32-byte aligned when it is tiny).
    ///
    /// # Errors
    /// Timeout, PeerDied, EndpointRecovering, EndpointGone, Aborted, Corrupt (the peer's index is impossible).
    fn reserve(&mut self, to: Rank, len: usize, deadline: Instant) -> Result<SharedMut<'_>>;
    /// Like [`Links::reserve`], but answers `None` at once when there is no room.
    ///
    /// # Errors
    /// As for [`Links::reserve`], less Timeout.
    fn try_reserve(&mut self, to: Rank, len: usize) -> Result<Option<SharedMut<'_>>>;
    /// Publishes the reserved record and wakes the reader if it sleeps; for a short record the latter may wait for [`Links::nudge`], or for what
    /// ends or waits.
    ///
    /// # Errors
    /// EndpointRecovering and EndpointGone when the doorbell can not be rung or the record can not be moved; Timeout when it was not moved
    /// by what [`Links::until`] said.
    fn commit(&mut self, to: Rank, header: RecordHeader, len: usize) -> Result<()>;

    /// Waits for the next record from `from` and gives its header and payload; the record stays until [`Links::release`].
    ///
    /// # Errors
    /// As for [`Links::reserve`].
    fn receive(&mut self, from: Rank, deadline: Instant) -> Result<(RecordHeader, Shared<'_>)>;
    /// Like [`Links::receive`], but answers `None` at once when nothing is there.
    ///
    /// # Errors
    /// As for [`Links::receive`], less Timeout.
    fn try_receive(&mut self, from: Rank) -> Result<Option<(RecordHeader, Shared<'_>)>>;
    /// Gives the oldest record's room back to the writer.
    ///
    /// # Errors
    /// As for [`Links::commit`].
    fn release(&mut self, from: Rank) -> Result<()>;
    /// Wakes whoever sleeps and was sent something, where [`Links::commit`] has left that for later: called before long work, during which
    /// nobody is to sleep for want of it.
    ///
    /// # Errors
    /// As for [`Links::commit`].
    fn nudge(&mut self) -> Result<()> {
        Ok(())
    }

    /// Waits until one of these can be had, or the deadline. May end early, so that another thread can end it by ringing.
    ///
    /// # Errors
    /// As for [`Links::reserve`]; a passed deadline is not an error here.
    fn wait_for(&mut self, wants: &[Want], deadline: Instant) -> Result<()>;

    /// Looks again at the status of every endpoint and peer; called after the last load and before a result is called good.
    ///
    /// # Errors
    /// PeerDied, EndpointRecovering, EndpointGone, Aborted.
    fn confirm(&mut self) -> Result<()>;
    /// Looks for everything that would end a wait, the peers' processes too: for a caller that asks again and again instead of waiting.
    /// A system call, so not for each time.
    ///
    /// # Errors
    /// As for [`Links::confirm`].
    fn survey(&mut self) -> Result<()> {
        self.confirm()
    }

    /// What follows is to be over by then. Bounds what links wait for in [`Links::commit`], such as an engine that moves the record.
    fn until(&mut self, _deadline: Instant) {}
    /// The endpoint of a rank, where it has one.
    fn endpoint(&self, _rank: Rank) -> Option<EndpointRef> {
        None
    }

    /// Says to all ranks which shards of an all-reduce fit the links as this rank sees them now; called by rank 0 alone, and read by
    /// [`Links::told_shares`] for the same look. Links that know of no rates say that all shards are equal.
    fn tell_shares(&mut self, _look: u32) {}
    /// What rank 0 said for this look; nothing where ranks share no place for it.
    fn told_shares(&self, _look: u32) -> Option<Shares> {
        None
    }
}

/// Passes every call on, so that a group may choose its transport at run time.
macro_rules! forward {
    ($($to:ty),*) => { $(
        // SAFETY: the links inside keep the promise.
        unsafe impl<L: Links + ?Sized> Links for $to {
            fn rank(&self) -> Rank { (**self).rank() }
            fn ranks(&self) -> usize { (**self).ranks() }
            fn max_record(&self) -> usize { (**self).max_record() }
            fn depth(&self, len: usize) -> usize { (**self).depth(len) }
            fn reserve(&mut self, to: Rank, len: usize, deadline: Instant) -> Result<SharedMut<'_>> { (**self).reserve(to, len, deadline) }
            fn try_reserve(&mut self, to: Rank, len: usize) -> Result<Option<SharedMut<'_>>> { (**self).try_reserve(to, len) }
            fn commit(&mut self, to: Rank, header: RecordHeader, len: usize) -> Result<()> { (**self).commit(to, header, len) }
            fn receive(&mut self, from: Rank, deadline: Instant) -> Result<(RecordHeader, Shared<'_>)> { (**self).receive(from, deadline) }
            fn try_receive(&mut self, from: Rank) -> Result<Option<(RecordHeader, Shared<'_>)>> { (**self).try_receive(from) }
            fn release(&mut self, from: Rank) -> Result<()> { (**self).release(from) }
            fn nudge(&mut self) -> Result<()> { (**self).nudge() }
            fn wait_for(&mut self, wants: &[Want], deadline: Instant) -> Result<()> { (**self).wait_for(wants, deadline) }
            fn confirm(&mut self) -> Result<()> { (**self).confirm() }
            fn survey(&mut self) -> Result<()> { (**self).survey() }
            fn until(&mut self, deadline: Instant) { (**self).until(deadline) }
            fn endpoint(&self, rank: Rank) -> Option<EndpointRef> { (**self).endpoint(rank) }
            fn tell_shares(&mut self, look: u32) { (**self).tell_shares(look) }
            fn told_shares(&self, look: u32) -> Option<Shares> { (**self).told_shares(look) }
        }
    )* };
}
forward!(Box<L>, &mut L);
