// SPDX-License-Identifier: GPL-2.0

//! An endpoint that does not answer any more, and nobody has said why.
//!
//! It may have been pulled out, or have died. It may as well be that a port took its link down because of an error (DPC), or that firmware looks at
//! one first (EDR): the kernel's recovery then begins a moment later, and brings it back. From here all of these look alike. So it is
//! RECOVERING first, off the bus and reached by nobody, and what comes next decides:
//!
//! - the kernel's recovery, a reset or a sleep, all by [`Endpoint::suspend`], take over as with any other endpoint;
//! - hot-plug says that it was removed, or its driver is unbound: GONE at once;
//! - it answers again: its configuration is restored, it is reset, and begins a new life;
//! - none of these for `missing_ms`: GONE, and that is final.
//!
//! Whoever finds it missing notes that under `hardware`; the monitor looks after it.

use crate::{
    clock::now_ms,
    endpoint::{pci_raw, Endpoint},
    hardware::{Hardware, UNHEARD},
    inline, limits,
    uapi::{kind, state},
};
use kernel::{
    bindings,
    prelude::*,
    sync::{atomic::Relaxed, MutexGuard},
    time::{delay::fsleep, Delta},
};

/// So many reads of its ids in a row have to fail before a device counts as missing, and this long is between them.
const LOOKS: u32 = 3;
const BETWEEN_LOOKS: Delta = Delta::from_millis(2);

impl Endpoint {
    /// The lock under which the device may be touched, if it may and is there. One that is LIVE and does not answer is missing. A device
    /// that is being reset does not answer either, but it is not LIVE: the state changes under the same lock first.
    pub(crate) fn present(&self) -> Option<MutexGuard<'_, Hardware>> {
        let mut hardware = self.hardware.lock();
        if self.status.state() != state::LIVE || !hardware.is_bound() {
            return None;
        }
        if self.answers() {
            return Some(hardware);
        }
        if self.is_removed() {
            self.lose(hardware);
            return None;
        }
        self.miss(&mut hardware);
        drop(hardware);
        self.keep_others_off();
        None
    }

    /// It was LIVE and does not answer. The caller keeps others off it next, or leaves that to the monitor ([`Hardware::reached`]).
    pub(crate) fn miss(&self, hardware: &mut Hardware) {
        let limit = limits::missing_ms();
        dev_warn!(self.pdev, "does not answer; treated as removed unless it comes back within {limit} ms\n");
        hardware.missing_since = Some(now_ms());
        self.leave(hardware);
        self.silence();
    }

    /// Looks after an endpoint that is missing, if it is; the monitor calls it often. False when it is not missing (any more).
    pub(crate) fn look_after(&self) -> bool {
        let mut hardware = self.hardware.lock();
        let Some(since) = hardware.missing_since.filter(|_| self.is_missing(&hardware)) else {
            return false;
        };
        if core::mem::take(&mut hardware.reached) {
            drop(hardware);
            self.keep_others_off();
            return true;
        }
        let late = now_ms().saturating_sub(since) >= u64::from(limits::missing_ms());
        let answers = !self.is_removed() && self.answers();
        if answers {
            drop(hardware);
            self.renew();
        } else if late || self.is_removed() {
            self.lose(hardware);
        }
        true
    }

    fn is_missing(&self, hardware: &Hardware) -> bool {
        hardware.missing_since.is_some() && hardware.is_bound() && self.status.state() == state::RECOVERING
    }

    /// It is gone, for good.
    fn lose(&self, mut hardware: MutexGuard<'_, Hardware>) {
        dev_warn!(self.pdev, "no longer answers; treated as removed\n");
        hardware.missing_since = None;
        self.tell(kind::ERROR, [3, 0, 0, 0]);
        let generation = self.status.generation();
        self.change(&mut hardware, state::GONE, generation);
        // It may come back while nobody expects it any more.
        self.silence();
        drop(hardware);
        self.keep_others_off();
    }

    /// DEAD or GONE, for good, but it did not answer when it was taken off the bus: when it answers again it is taken off once more. Does
    /// nothing while somebody else holds its locks, as a reset does.
    pub(crate) fn silence_late(&self) {
        if self.restless.load(Relaxed) != UNHEARD || self.is_removed() {
            return;
        }
        // SAFETY: The device is valid as long as `self`, which holds a reference and outlives the lock.
        let Some(_lock) = (unsafe { Locked::new(self.pci()) }) else {
            return;
        };
        let hardware = self.hardware.lock();
        if hardware.is_bound() && matches!(self.status.state(), state::DEAD | state::GONE) && self.has_ids() {
            self.silence();
        }
    }

    /// It answers again. What became of it meanwhile nobody knows, so it gets its configuration back and is reset, where that can be done; it
    /// lives anew then, or is DEAD. Does nothing while somebody else holds the locks: a reset or the kernel's recovery, which take over, or unbind,
    /// which waits for the monitor.
    fn renew(&self) {
        // SAFETY: Both devices are valid, the endpoint holds references. The monitor runs no longer than the driver is bound.
        let locks = unsafe {
            let bridge = match &self.bridge {
                Some(bridge) => match Locked::new(pci_raw(bridge)) {
                    Some(lock) => Some(lock),
                    None => return,
                },
                None => None,
            };
            Locked::new(self.pci()).map(|lock| (lock, bridge))
        };
        let Some(_locks) = locks else {
            return;
        };
        if !self.is_missing(&self.hardware.lock()) {
            return;
        }
        dev_info!(self.pdev, "answers again\n");
        let pdev = self.pci();
        // SAFETY: The device lock is held, and the driver is bound: its state was saved in probe, or by a reset since. Saving it again
        // keeps it for the next time.
        unsafe {
            bindings::pci_restore_state(pdev);
            bindings::pci_save_state(pdev);
        }
        // What was saved may have been saved mastering.
        self.silence();
        // SAFETY: The device lock is held. This calls our own callbacks.
        let reset = unsafe { bindings::pci_reset_function_locked(pdev) };
        if self.is_missing(&self.hardware.lock()) {
            // There is no way to reset it (the error says so), so nobody was called.
            dev_info!(self.pdev, "cannot be reset ({reset})\n");
            self.suspend();
            self.resume();
        }
    }

    /// Whether hot-plug, or a recovery that failed, has given the device up.
    pub(crate) fn is_removed(&self) -> bool {
        // SAFETY: The endpoint holds a reference.
        unsafe { inline::pci_dev_is_disconnected(self.pci()) }
    }

    /// Whether the device still answers on the bus. One read may fail for other reasons, such as a completion that came too late, so
    /// only several in a row tell. Sleeps between them.
    pub(crate) fn answers(&self) -> bool {
        (0..LOOKS).any(|look| {
            if look > 0 {
                fsleep(BETWEEN_LOOKS);
            }
            self.has_ids()
        })
    }

    /// Whether one read of its ids succeeds.
    fn has_ids(&self) -> bool {
        let mut ids = 0;
        // SAFETY: `pdev` holds a reference; reading the configuration space of a device that was removed gives all-ones.
        let failed = unsafe { bindings::pci_read_config_dword(self.pci(), 0, &mut ids) } != 0;
        !failed && ids != !0
    }
}

/// The lock of a device and the right to its configuration space, taken only when nobody has them.
struct Locked(*mut bindings::pci_dev);

impl Locked {
    /// # Safety
    ///
    /// `pdev` is valid, and stays so while this lives.
    unsafe fn new(pdev: *mut bindings::pci_dev) -> Option<Self> {
        // SAFETY: By the requirements of this function.
        (unsafe { bindings::pci_dev_trylock(pdev) } != 0).then(|| Self(pdev))
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: Locked in `new`, and valid by its requirements.
        unsafe { bindings::pci_dev_unlock(self.0) };
    }
}
