// SPDX-License-Identifier: GPL-2.0

//! PCI error recovery and resets: LIVE → RECOVERING → LIVE in a new generation, or DEAD.
//!
//! `pci::Driver` has no place for `pci_error_handlers`, so the adapter here sets them and leaves the rest to
//! `pci::Adapter`. All callbacks but that for correctable errors run under the device lock; unbind may fall between two of them.

use crate::{
    clock::now_ms,
    driver::{Bound, Driver},
    endpoint::Endpoint,
    engine,
    hardware::Hardware,
    limits, registry,
    uapi::{kind, state},
};
use core::mem::offset_of;
use kernel::{bindings, device, driver, pci, prelude::*, str::CStr, sync::atomic::Relaxed, types::Opaque};

/// `pci::Adapter` with error handlers.
pub(crate) struct Adapter;

// SAFETY: As for `pci::Adapter<Driver>`: `pci_driver` is a C structure that embeds a `device_driver` there, and `Bound` is the
// driver's private data.
unsafe impl driver::DriverLayout for Adapter {
    type DriverType = bindings::pci_driver;
    type DriverData<'bound> = Bound<'bound>;
    const DEVICE_DRIVER_OFFSET: usize = offset_of!(bindings::pci_driver, driver);
}

// SAFETY: Registering and unregistering are left to `pci::Adapter`.
unsafe impl driver::RegistrationOps for Adapter {
    unsafe fn register(pdrv: &Opaque<Self::DriverType>, name: &'static CStr, module: &'static ThisModule) -> Result {
        // SAFETY: The structure is not registered yet, so its fields may be set.
        unsafe {
            (*pdrv.get()).err_handler = &raw const HANDLERS;
            (*pdrv.get()).shutdown = Some(shutdown);
            (*pdrv.get()).driver.pm = &raw const POWER.0;
        }
        // SAFETY: By the requirements of this function.
        unsafe { <pci::Adapter<Driver> as driver::RegistrationOps>::register(pdrv, name, module) }
    }

    unsafe fn unregister(pdrv: &Opaque<Self::DriverType>) {
        // SAFETY: By the requirements of this function.
        unsafe { <pci::Adapter<Driver> as driver::RegistrationOps>::unregister(pdrv) }
    }
}

static HANDLERS: bindings::pci_error_handlers = bindings::pci_error_handlers {
    error_detected: Some(error_detected),
    mmio_enabled: Some(mmio_enabled),
    slot_reset: Some(slot_reset),
    reset_prepare: Some(reset_prepare),
    reset_done: Some(reset_done),
    resume: Some(resume),
    cor_error_detected: Some(correctable),
};

/// Calls `work` with the endpoint of a device, if the driver is still bound to it.
///
/// # Safety
///
/// `pdev` is valid and its device lock held, as in a callback of the PCI core.
unsafe fn with_endpoint<R>(pdev: *mut bindings::pci_dev, otherwise: R, work: impl FnOnce(&Endpoint) -> R) -> R {
    // SAFETY: By the requirements of this function. The private data is set when probe has succeeded and cleared when the
    // driver is unbound, both under the device lock.
    unsafe {
        if (*pdev).dev.driver_data.is_null() {
            return otherwise;
        }
        let device = &*pdev.cast::<pci::Device<device::CoreInternal<'_>>>();
        let bound = device.as_ref().drvdata_borrow::<Bound<'_>>();
        work(bound.endpoint())
    }
}

impl Endpoint {
    /// The device is in trouble, or about to be reset: nothing more goes to it, and it stops mastering the bus.
    pub(crate) fn suspend(&self) {
        let mut hardware = self.hardware.lock();
        // Whoever called this says what becomes of it.
        hardware.missing_since = None;
        if self.status.state() == state::LIVE {
            self.leave(&mut hardware);
        }
        if hardware.engine.is_busy() {
            hardware.engine.abort(EIO);
        }
        self.silence();
        drop(hardware);
        // Before this returns, so that nobody's access falls into the reset.
        self.keep_others_off();
    }

    /// LIVE ends, and nobody touches the device any more when this returns.
    pub(crate) fn leave(&self, hardware: &mut Hardware) {
        let generation = self.status.generation();
        self.change(hardware, state::RECOVERING, generation);
        // Whoever saw the old state without the lock, a doorbell or an interrupt, has made its access when this returns.
        // SAFETY: Callers may sleep, as the lock that they hold is a mutex, and are under no RCU read lock.
        unsafe { bindings::synchronize_rcu() };
    }

    /// The device works again: a new life. Its rings are told again when the session recovers.
    pub(crate) fn resume(&self) {
        let mut hardware = self.hardware.lock();
        if !hardware.is_bound() || self.status.state() != state::RECOVERING {
            return;
        }
        if !self.answers() {
            let generation = self.status.generation();
            self.change(&mut hardware, state::DEAD, generation);
            // Whoever restored its configuration may have let it master the bus.
            self.silence();
            return;
        }
        // Not every recovery resets the device, and some devices keep their registers over a reset. What they remember is not
        // valid any more: memory of rings that ended meanwhile, and a copy that the error cut off, belong to others by now.
        self.clear_all_slots();
        if engine::restart(self).is_err() {
            // It holds on to an order of its former life, so it does not get the bus.
            let generation = self.status.generation();
            self.change(&mut hardware, state::DEAD, generation);
            return;
        }
        if !self.is_quiet() {
            dev_warn!(self.pdev, "what it began on the bus does not end; remove and rescan the device\n");
            let generation = self.status.generation();
            self.change(&mut hardware, state::DEAD, generation);
            return;
        }
        self.unsilence();
        self.change(&mut hardware, state::LIVE, registry::next_generation());
    }

    /// Tells correctable errors that were not told yet, unless enough was told in this second. The monitor calls it too, so that
    /// the last ones of a burst are told when it is over.
    pub(crate) fn report_correctable(&self) {
        // The lock is held until it is told, so that totals are told in their order and none twice.
        let mut brake = self.correctable.lock();
        let total = self.counters.correctable.load(Relaxed);
        if let Some(since) = brake.release(total, now_ms() / 1000, limits::correctable_per_second()) {
            self.tell(kind::CORRECTABLE, [since, total, 0, 0]);
        }
    }

    /// Nothing more will come of the device until it is removed.
    pub(crate) fn die(&self) {
        let mut hardware = self.hardware.lock();
        let generation = self.status.generation();
        self.change(&mut hardware, state::DEAD, generation);
        self.silence();
        drop(hardware);
        self.keep_others_off();
    }
}

extern "C" fn error_detected(pdev: *mut bindings::pci_dev, channel: bindings::pci_channel_state_t) -> bindings::pci_ers_result_t {
    const FROZEN: u32 = bindings::pci_channel_io_frozen;
    const LOST: u32 = bindings::pci_channel_io_perm_failure;
    // SAFETY: A callback of the PCI core.
    unsafe {
        with_endpoint(pdev, bindings::pci_ers_result_PCI_ERS_RESULT_DISCONNECT, |endpoint| {
            let severity = match channel {
                FROZEN => 2,
                LOST => 3,
                _ => 1,
            };
            dev_info!(endpoint.pdev, "error of severity {severity} reported\n");
            endpoint.tell(kind::ERROR, [severity, 0, 0, 0]);
            match channel {
                LOST => {
                    endpoint.die();
                    bindings::pci_ers_result_PCI_ERS_RESULT_DISCONNECT
                }
                FROZEN => {
                    endpoint.suspend();
                    bindings::pci_ers_result_PCI_ERS_RESULT_NEED_RESET
                }
                _ => {
                    endpoint.suspend();
                    bindings::pci_ers_result_PCI_ERS_RESULT_CAN_RECOVER
                }
            }
        })
    }
}

extern "C" fn mmio_enabled(pdev: *mut bindings::pci_dev) -> bindings::pci_ers_result_t {
    // SAFETY: A callback of the PCI core.
    unsafe {
        with_endpoint(pdev, bindings::pci_ers_result_PCI_ERS_RESULT_DISCONNECT, |endpoint| {
            if endpoint.answers() {
                bindings::pci_ers_result_PCI_ERS_RESULT_RECOVERED
            } else {
                bindings::pci_ers_result_PCI_ERS_RESULT_NEED_RESET
            }
        })
    }
}

extern "C" fn slot_reset(pdev: *mut bindings::pci_dev) -> bindings::pci_ers_result_t {
    // SAFETY: A callback of the PCI core. The state was saved in probe; saving it again keeps it for the next time.
    unsafe {
        with_endpoint(pdev, bindings::pci_ers_result_PCI_ERS_RESULT_DISCONNECT, |endpoint| {
            // A driver that was bound between two phases has not seen the error.
            endpoint.suspend();
            bindings::pci_restore_state(pdev);
            bindings::pci_save_state(pdev);
            // What was saved may have been saved since by the PCI core, mastering.
            endpoint.silence();
            if endpoint.answers() {
                bindings::pci_ers_result_PCI_ERS_RESULT_RECOVERED
            } else {
                bindings::pci_ers_result_PCI_ERS_RESULT_DISCONNECT
            }
        })
    }
}

extern "C" fn resume(pdev: *mut bindings::pci_dev) {
    // SAFETY: A callback of the PCI core.
    unsafe { with_endpoint(pdev, (), Endpoint::resume) }
}

extern "C" fn reset_prepare(pdev: *mut bindings::pci_dev) {
    // SAFETY: A callback of the PCI core.
    unsafe { with_endpoint(pdev, (), Endpoint::suspend) }
}

extern "C" fn reset_done(pdev: *mut bindings::pci_dev) {
    // SAFETY: A callback of the PCI core, which has restored the configuration space.
    unsafe { with_endpoint(pdev, (), Endpoint::resume) }
}

extern "C" fn correctable(pdev: *mut bindings::pci_dev) {
    // The PCI core holds no device lock here, so unbind may run at the same time and free the driver's data. The registry's
    // reference outlives that.
    if let Some(endpoint) = registry::find_device(pdev) {
        endpoint.counters.correctable.add(1, Relaxed);
        endpoint.report_correctable();
    }
}

/// Operations of power management.
struct Power(bindings::dev_pm_ops);

// SAFETY: The structure is constant.
unsafe impl Sync for Power {}

/// Sleeping is like a reset: the PCI core saves and restores the configuration space, and the device begins a new life.
static POWER: Power = Power(bindings::dev_pm_ops {
    suspend: Some(sleep),
    resume: Some(wake),
    freeze: Some(sleep),
    thaw: Some(wake),
    poweroff: Some(sleep),
    restore: Some(wake),
    ..pin_init::zeroed()
});

extern "C" fn sleep(device: *mut bindings::device) -> i32 {
    // SAFETY: A callback for a device of our driver, which is on the PCI bus; the device lock is held.
    unsafe { with_endpoint(kernel::container_of!(device, bindings::pci_dev, dev), (), Endpoint::suspend) };
    0
}

extern "C" fn wake(device: *mut bindings::device) -> i32 {
    // SAFETY: As in `sleep`.
    unsafe { with_endpoint(kernel::container_of!(device, bindings::pci_dev, dev), (), Endpoint::resume) };
    0
}

/// The machine goes down or into another kernel: the device must not write into its memory.
extern "C" fn shutdown(pdev: *mut bindings::pci_dev) {
    // SAFETY: A callback of the PCI core.
    unsafe { with_endpoint(pdev, (), Endpoint::die) };
}

/// Turns many errors into few events: at most so many a second, none forgotten.
pub(crate) struct Brake {
    second: u64,
    told: u32,
    reported: u64,
}

impl Brake {
    /// Nothing told yet.
    pub(crate) const fn new() -> Self {
        Self { second: 0, told: 0, reported: 0 }
    }

    /// How many errors of `total` to tell now: those since the last time, or none when there are none or `limit` events were told
    /// in this second.
    fn release(&mut self, total: u64, second: u64, limit: u32) -> Option<u64> {
        let since = total.checked_sub(self.reported).filter(|since| *since > 0)?;
        if self.second != second {
            (self.second, self.told) = (second, 0);
        }
        if self.told >= limit {
            return None;
        }
        self.told += 1;
        self.reported = total;
        Some(since)
    }
}

#[kunit_tests(pcieipc_brake)]
mod tests {
    use super::*;

    #[test]
    fn many_errors_are_few_events_and_none_is_forgotten() {
        let mut brake = Brake::new();
        let (mut told, mut events) = (0, 0);
        for total in 1..=100u64 {
            if let Some(since) = brake.release(total, 5, 3) {
                told += since;
                events += 1;
            }
        }
        assert_eq!((told, events), (3, 3));
        // The next second tells what was held back.
        assert_eq!(brake.release(100, 6, 3), Some(97));
    }

    #[test]
    fn what_was_told_is_not_told_again() {
        let mut brake = Brake::new();
        assert_eq!(brake.release(5, 1, 3), Some(5));
        assert_eq!(brake.release(5, 2, 3), None);
        // A total from before, as of somebody who was held up.
        assert_eq!(brake.release(4, 2, 3), None);
        assert_eq!(brake.release(6, 2, 3), Some(1));
    }
}
