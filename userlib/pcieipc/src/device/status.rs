// SPDX-License-Identifier: MIT OR Apache-2.0
//! The status page: an endpoint's state without a system call.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::State;
use crate::{abi::*, sys::Mapping, topology::LinkState};

/// A mapped status page, written by the kernel.
#[derive(Debug)]
pub struct Status(Mapping);

/// State and generation, read at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusWord {
    /// The state.
    pub state: State,
    /// The life that the state belongs to.
    pub generation: u64,
}

impl StatusWord {
    pub(super) fn from_word(word: u64) -> Self {
        Self { state: State::from_code((word & 0xff) as u32), generation: word >> 8 }
    }
}

impl Status {
    /// `None` when the mapping is too short.
    pub(super) fn new(mapping: Mapping) -> Option<Self> {
        (mapping.bytes() >= size_of::<pcieipc_status>()).then_some(Self(mapping))
    }

    /// State and generation now. The kernel stores them before it wakes anybody, so what a woken rank reads is not older
    /// than what woke it.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// println!("{:?}", session.status().word().state);
    /// # Ok(())
    /// # }
    /// ```
    pub fn word(&self) -> StatusWord {
        StatusWord::from_word(self.load(std::mem::offset_of!(pcieipc_status, word)))
    }

    /// Interrupts that the endpoint raised in this life.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// println!("{}", session.status().interrupts());
    /// # Ok(())
    /// # }
    /// ```
    pub fn interrupts(&self) -> u64 {
        self.load(std::mem::offset_of!(pcieipc_status, interrupts))
    }

    /// The link as last sampled; `None` while it is down or unknown.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// if let Some(link) = session.status().link() {
    ///     println!("{link}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn link(&self) -> Option<LinkState> {
        let at = std::mem::offset_of!(pcieipc_status, link);
        // SAFETY: as in `load`, for a word of 32 bits.
        let word = unsafe { AtomicU32::from_ptr(self.0.start().as_ptr().add(at).cast()) }.load(Ordering::Relaxed);
        LinkState::from_fields(word & 0xff, word >> 8 & 0xff)
    }

    fn load(&self, offset: usize) -> u64 {
        // SAFETY: `new` checked that the structure lies inside the mapping, which is page-aligned and mapped while `self`
        // lives; an atomic load does not need write access.
        unsafe { AtomicU64::from_ptr(self.0.start().as_ptr().add(offset).cast()) }.load(Ordering::Acquire)
    }
}
