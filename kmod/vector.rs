// SPDX-License-Identifier: GPL-2.0

//! One interrupt vector, from the hard interrupt to a user's eventfd.

use crate::{endpoint::Endpoint, eventfd::EventFd, limits, trace};
use kernel::{
    bindings, irq, new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, SpinLockIrq,
    },
};

/// Length of the window in which interrupts are counted to tell a storm, in nanoseconds.
const STORM_WINDOW_NS: u64 = 100_000_000;

/// Who is signalled.
struct Target {
    eventfd: Option<EventFd>,
    masked: bool,
    /// Fired while masked.
    pending: bool,
}

/// A vector of an endpoint.
#[pin_data]
pub(crate) struct Vector {
    /// Its number.
    pub(crate) index: u32,
    count: Atomic<u64>,
    #[pin]
    target: SpinLockIrq<Target>,
    window_start: Atomic<u64>,
    window_count: Atomic<u32>,
    /// The interrupt is disabled because of a storm.
    storm: Atomic<u32>,
    /// The interrupt's number while it is requested, 0 otherwise.
    irq: Atomic<u32>,
}

impl Vector {
    /// Vector number `index`, with nobody to signal.
    pub(crate) fn new(index: u32) -> impl PinInit<Self> {
        pin_init!(Self {
            index,
            count: Atomic::new(0),
            target <- new_spinlock_irq!(Target { eventfd: None, masked: false, pending: false }, "pcieipc_vector"),
            window_start: Atomic::new(0),
            window_count: Atomic::new(0),
            storm: Atomic::new(0),
            irq: Atomic::new(0),
        })
    }

    /// Interrupts so far.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Remembers which interrupt this is.
    pub(crate) fn set_irq(&self, irq: u32) {
        self.irq.store(irq, Relaxed);
    }

    /// Sets who is signalled, where `eventfd` is given, and masks or unmasks, in one step: an eventfd that comes masked is not signalled
    /// before, one that goes not after. Unmasking signals once if the vector fired meanwhile. What is to be dropped without the lock is returned.
    pub(crate) fn direct(&self, eventfd: Option<Option<EventFd>>, masked: bool) -> Option<EventFd> {
        let mut target = self.target.lock();
        let old = eventfd.and_then(|new| core::mem::replace(&mut target.eventfd, new));
        target.masked = masked;
        if !masked && core::mem::replace(&mut target.pending, false) {
            if let Some(eventfd) = &target.eventfd {
                eventfd.signal();
            }
        }
        drop(target);
        old
    }

    /// Back to nobody and unmasked, when a session ends.
    pub(crate) fn clear(&self) {
        let mut target = self.target.lock();
        let old = target.eventfd.take();
        target.masked = false;
        target.pending = false;
        drop(target);
        drop(old);
    }

    /// Signals whatever the mask says: the endpoint changed its state.
    pub(crate) fn wake(&self) {
        if let Some(eventfd) = &self.target.lock().eventfd {
            eventfd.signal();
        }
    }

    /// The hard interrupt. Returns true when it began to count as a storm.
    fn fire(&self) -> bool {
        self.count.add(1, Relaxed);
        {
            let mut target = self.target.lock();
            if target.masked {
                target.pending = true;
            } else if let Some(eventfd) = &target.eventfd {
                eventfd.signal();
            }
        }
        self.is_storm()
    }

    fn is_storm(&self) -> bool {
        let limit = limits::storm_interrupts();
        // SAFETY: Reads the monotonic clock.
        limit != 0 && self.is_storm_at(limit, || unsafe { bindings::ktime_get() } as u64)
    }

    fn is_storm_at(&self, limit: u32, clock: impl FnOnce() -> u64) -> bool {
        // Every 256th interrupt, or less where few are a storm, looks at the clock: the window is long against that.
        let count = self.window_count.fetch_add(1, Relaxed).wrapping_add(1);
        if count % limit.min(256) != 0 {
            return false;
        }
        let now = clock();
        let start = self.window_start.load(Relaxed);
        if now.wrapping_sub(start) > STORM_WINDOW_NS {
            self.window_start.store(now, Relaxed);
            self.window_count.store(0, Relaxed);
            return false;
        }
        count >= limit
    }

    /// Disables the interrupt without waiting for a handler that runs.
    fn quench(&self) {
        let irq = self.irq.load(Relaxed);
        if irq != 0 && self.storm.xchg(1, Relaxed) == 0 {
            // SAFETY: Called from the handler of this interrupt, so it is requested.
            unsafe { bindings::disable_irq_nosync(irq) };
        }
    }

    /// Enables the interrupt again after a storm. Returns true when there was one.
    ///
    /// # Safety
    ///
    /// The interrupt is requested, and not being freed.
    pub(crate) unsafe fn rekindle(&self) -> bool {
        if self.storm.load(Relaxed) == 0 {
            return false;
        }
        self.window_count.store(0, Relaxed);
        self.window_start.store(0, Relaxed);
        self.storm.store(0, Relaxed);
        // SAFETY: Disabled once by `quench`; requested by the requirements of this function.
        unsafe { bindings::enable_irq(self.irq.load(Relaxed)) };
        true
    }
}

/// The handler of one vector.
pub(crate) struct Handler {
    /// Whose vector it is.
    pub(crate) endpoint: Arc<Endpoint>,
    /// Its number.
    pub(crate) index: usize,
}

impl irq::Handler for Handler {
    fn handle(&self) -> irq::IrqReturn {
        let endpoint = &*self.endpoint;
        let raised = endpoint.acknowledge(self.index);
        if raised.engine {
            endpoint.engine_finished();
        }
        if raised.user {
            endpoint.status.count_interrupt();
            trace::interrupt(endpoint.id, self.index as u32);
        }
        // An engine that shares the vector with the doorbell signals nobody.
        let signals = raised.user || raised.engine && endpoint.profile.engine_vector.is_some();
        if let Some(vector) = endpoint.vector(self.index) {
            // An interrupt for which the device has no reason takes as long as one for which it has.
            let storm = if signals { vector.fire() } else { vector.is_storm() };
            if storm {
                vector.quench();
                endpoint.storm(vector.index);
            }
        }
        // The vector is nobody else's. What is not handled the kernel counts, and disables for good; storms are told, and end.
        irq::IrqReturn::Handled
    }
}

#[kunit_tests(pcieipc_vector)]
mod tests {
    use super::*;

    /// Whether one of `count` interrupts, evenly within `nanoseconds`, counts as a storm over 1000.
    fn storms(count: u64, nanoseconds: u64) -> Result<bool> {
        let vector = KBox::pin_init(Vector::new(0), GFP_KERNEL)?;
        let start = 10 * STORM_WINDOW_NS;
        Ok((0..count).any(|number| vector.is_storm_at(1000, || start + number * nanoseconds / count)))
    }

    #[test]
    fn too_many_interrupts_in_a_window_are_a_storm() -> Result {
        assert!(storms(2000, STORM_WINDOW_NS)?);
        Ok(())
    }

    #[test]
    fn the_same_number_over_a_longer_time_is_none() -> Result {
        assert!(!storms(2000, 10 * STORM_WINDOW_NS)?);
        assert!(!storms(999, STORM_WINDOW_NS)?);
        Ok(())
    }

    #[test]
    fn a_masked_vector_keeps_one_signal_for_later() -> Result {
        let vector = KBox::pin_init(Vector::new(0), GFP_KERNEL)?;
        drop(vector.direct(None, true));
        vector.fire();
        vector.fire();
        assert!(vector.target.lock().pending);
        assert_eq!(vector.count(), 2);
        drop(vector.direct(None, false));
        assert!(!vector.target.lock().pending);
        Ok(())
    }
}
