// SPDX-License-Identifier: GPL-2.0

//! The status page: one word tells a reader in user space the state and the generation, without a system call.

use crate::{memory::Pages, uapi};
use core::ptr::NonNull;
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Relaxed, Release},
        Arc,
    },
};

/// A status page, mapped read-only by users and written by the module only.
pub(crate) struct Status {
    /// # Invariants
    ///
    /// Points to the first bytes of `pages`, which are a `pcieipc_status`.
    record: NonNull<uapi::pcieipc_status>,
    pages: Arc<Pages>,
}

// SAFETY: The record is accessed through atomics only and lives as long as `pages`.
unsafe impl Send for Status {}
// SAFETY: As above.
unsafe impl Sync for Status {}

impl Status {
    /// A page that says `state` and `generation`.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory.
    pub(crate) fn new(state: u32, generation: u64) -> Result<Self> {
        let pages = Pages::uncharged(1, -1)?;
        let record = pages.address().ok_or(ENOMEM)?.cast();
        // INVARIANT: `address` is the start of the page, which is larger than the record and aligned for it.
        let status = Self { record, pages };
        status.set(state, generation);
        Ok(status)
    }

    fn word_cell(&self) -> &Atomic<u64> {
        // SAFETY: By the invariant the field is valid, and the kernel accesses it atomically only.
        unsafe { Atomic::from_ptr(&raw mut (*self.record.as_ptr()).word) }
    }

    fn interrupts_cell(&self) -> &Atomic<u64> {
        // SAFETY: As in `word_cell`.
        unsafe { Atomic::from_ptr(&raw mut (*self.record.as_ptr()).interrupts) }
    }

    fn link_cell(&self) -> &Atomic<u32> {
        // SAFETY: As in `word_cell`.
        unsafe { Atomic::from_ptr(&raw mut (*self.record.as_ptr()).link) }
    }

    /// State and generation now.
    pub(crate) fn word(&self) -> u64 {
        // SYNC POINT: pairs with the release in `set`.
        self.word_cell().load(Acquire)
    }

    /// The state now.
    pub(crate) fn state(&self) -> u32 {
        uapi::status_state(self.word())
    }

    /// The generation now.
    pub(crate) fn generation(&self) -> u64 {
        uapi::status_generation(self.word())
    }

    /// Stores state and generation. Whoever is woken after this sees it.
    pub(crate) fn set(&self, state: u32, generation: u64) {
        // SYNC POINT: readers, in user space too, load with acquire after their last look at a ring.
        self.word_cell().store(uapi::status_word(state, generation), Release);
    }

    /// Counts one interrupt.
    pub(crate) fn count_interrupt(&self) {
        self.interrupts_cell().add(1, Relaxed);
    }

    /// Interrupts so far.
    pub(crate) fn interrupts(&self) -> u64 {
        self.interrupts_cell().load(Relaxed)
    }

    /// Stores the link as sampled.
    pub(crate) fn set_link(&self, link: u32) {
        self.link_cell().store(link, Relaxed);
    }

    /// The link as last sampled.
    pub(crate) fn link(&self) -> u32 {
        self.link_cell().load(Relaxed)
    }

    /// The page, for mapping.
    pub(crate) fn pages(&self) -> &Arc<Pages> {
        &self.pages
    }

    /// Whether a session of generation `attached` may use the endpoint.
    ///
    /// # Errors
    ///
    /// `EIO` recovering, `ENODEV` dead or gone, `ESTALE` another generation.
    pub(crate) fn check(&self, attached: u64) -> Result {
        let word = self.word();
        match uapi::status_state(word) {
            uapi::state::LIVE if uapi::status_generation(word) == attached => Ok(()),
            uapi::state::LIVE => Err(ESTALE),
            uapi::state::RECOVERING => Err(EIO),
            _ => Err(ENODEV),
        }
    }
}
