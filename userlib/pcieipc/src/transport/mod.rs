// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rings between processes, made into [`crate::link::Links`].
//!
//! What all transports share is in [`RankLinks`]: waiting with a bound, watching peers and endpoints while it waits, and the
//! answers when something ends. A [`Wire`] brings what differs: the memory, the bells and the endpoints' status.

pub(crate) mod board;
pub mod kmod;
mod links;
mod patience;
pub mod shm;

pub use links::{Peer, RankLinks};

use std::{os::fd::BorrowedFd, ptr::NonNull, time::Instant};

use crate::{
    device::Event,
    error::{EndpointRef, Rank, Result},
    ring::{Memory, RECORD_HEADER_BYTES},
    topology::LinkState,
};

/// What happened on a rank's links since they were made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Records sent.
    pub records: u64,
    /// Bytes of payload sent.
    pub bytes: u64,
    /// Times that a peer was rung because it slept.
    pub doorbells: u64,
    /// Times that this rank went to sleep.
    pub sleeps: u64,
    /// Times that a bell, and not the end of a time slice, ended the sleep.
    pub wakeups: u64,
    /// Bytes that this rank's endpoint moved by its engine.
    pub dma_bytes: u64,
}

/// A link that is slower or narrower than when the group's present links were made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Degraded {
    /// Whose endpoint.
    pub rank: Rank,
    /// Which one.
    pub endpoint: EndpointRef,
    /// Before.
    pub before: LinkState,
    /// Now.
    pub now: LinkState,
}

/// What differs between transports.
pub trait Wire: Send + std::fmt::Debug {
    /// The ring that this rank writes, as it has it mapped.
    type Tx: Memory + Send + std::fmt::Debug;
    /// The ring that this rank reads, as it has it mapped.
    type Rx: Memory + Send + std::fmt::Debug;

    /// Wakes the reader of our ring to `peer`.
    ///
    /// # Errors
    /// The doorbell can not be rung; endpoint errors are told apart from others.
    fn ring_reader(&mut self, peer: Rank) -> Result<()>;
    /// Wakes the writer of the ring from `peer`, which waits for room.
    ///
    /// # Errors
    /// As for [`Wire::ring_reader`].
    fn ring_writer(&mut self, peer: Rank) -> Result<()>;
    /// Looks at the status of every endpoint of the group, without a system call.
    ///
    /// # Errors
    /// EndpointRecovering, EndpointGone; LinkDegraded where that was asked for.
    fn status(&self) -> Result<()>;
    /// The endpoint of a rank, where it has one.
    fn endpoint(&self, _rank: Rank) -> Option<EndpointRef> {
        None
    }
    /// Links that are slower or narrower than when the group's links were made; no system call.
    fn degraded(&self) -> Vec<Degraded> {
        Vec::new()
    }
    /// Readable when the kernel has something to say; a sleeper wakes then.
    fn news(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Takes in what it has to say.
    fn hear(&mut self) {}
    /// What was heard since the last call, and what waits.
    fn events(&mut self) -> Vec<Event> {
        Vec::new()
    }
    /// What the link of each rank carries, in any unit, where links limit the collectives; no system call.
    fn rates(&self) -> Option<Vec<f64>> {
        None
    }
    /// Ranks whose endpoint is not live in the generation that the group met with.
    fn not_live(&self) -> Vec<Rank> {
        Vec::new()
    }
    /// The longest payload that [`Wire::carry`] takes.
    fn longest(&self) -> usize {
        usize::MAX
    }
    /// Memory outside the ring in which a record's payload to `peer` is put before an engine moves it into the ring; `None` where
    /// the processor writes rings itself. The same place until [`Wire::carry`].
    fn staging(&mut self, _peer: Rank) -> Option<NonNull<u8>> {
        None
    }
    /// Moves header and payload from the staging memory to `offset` of the ring's data area; returns when they are there, by `by` at the
    /// latest.
    ///
    /// # Errors
    /// What the engine or the endpoint answered; Timeout when the time was up before either can be blamed; Device with `NoRing` when the peer
    /// has let go of the ring.
    fn carry(
        &mut self,
        _peer: Rank,
        _offset: u64,
        _header: [u8; RECORD_HEADER_BYTES],
        _len: usize,
        _by: Option<Instant>,
    ) -> Result<()> {
        Ok(())
    }
    /// Whether the own endpoint does not do what it is told, though its status says that it lives.
    fn is_idle(&self) -> bool {
        false
    }
    /// Bytes moved by [`Wire::carry`].
    fn carried(&self) -> u64 {
        0
    }
}
