// SPDX-License-Identifier: GPL-2.0

//! Looks at an endpoint now and then: does it answer, what is its link, is a storm over? And at one that does not answer, more often.

use crate::{
    clock::now_ms,
    endpoint::Endpoint,
    limits, link, queue,
    uapi::{kind, state},
};
use kernel::{
    bindings, new_delayed_work, new_mutex,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex,
    },
    time::msecs_to_jiffies,
    workqueue::{DelayedWork, WorkItem},
};

/// However seldom links are sampled: so often it is looked whether somebody else has found the endpoint missing.
const LOOK_AFTER_MS: u64 = 250;

/// How often a missing endpoint is looked at.
const MISSING_MS: u64 = 50;

/// The work that looks, and then queues itself again.
#[pin_data]
pub(crate) struct Monitor {
    endpoint: Arc<Endpoint>,
    /// When the link is sampled next; only the work itself uses it.
    next_sample: Atomic<u64>,
    /// Interrupts of the endpoint are requested and may be enabled.
    #[pin]
    armed: Mutex<bool>,
    #[pin]
    work: DelayedWork<Monitor>,
}

kernel::impl_has_delayed_work! {
    impl HasDelayedWork<Self> for Monitor { self.work }
}

impl WorkItem for Monitor {
    type Pointer = Arc<Monitor>;

    fn run(this: Arc<Monitor>) {
        let missing = this.endpoint.look_after();
        if !missing && now_ms() >= this.next_sample.load(Relaxed) {
            this.look();
            this.next_sample.store(now_ms() + u64::from(limits::link_sample_ms()), Relaxed);
        }
        if *this.armed.lock() {
            this.queue(missing);
        }
    }
}

impl Monitor {
    fn queue(self: &Arc<Self>, missing: bool) {
        let left = self.next_sample.load(Relaxed).saturating_sub(now_ms());
        let delay = if missing { MISSING_MS } else { left.min(LOOK_AFTER_MS) };
        let delay = msecs_to_jiffies(delay as u32).max(1);
        // It is queued already when this fails, which is as good.
        if let Some(queue) = queue::get() {
            let _ = queue.enqueue_delayed(self.clone(), delay);
        }
    }

    fn look(&self) {
        self.endpoint.report_correctable();
        let endpoint = &self.endpoint;
        let sample = {
            // During recovery or reset the device may not be touched; neither begins while the lock is held.
            let Some(hardware) = endpoint.present() else {
                self.look_at_the_dead();
                return;
            };
            self.end_storms();
            // SAFETY: The endpoint holds a reference to the device.
            let sample = unsafe { link::sample(endpoint.pci()) };
            drop(hardware);
            sample
        };
        let Some(now) = sample else {
            return;
        };
        if let Some(before) = endpoint.link.update(now) {
            endpoint.status.set_link(now);
            endpoint.tell(kind::LINK, [u64::from(before), u64::from(now), 0, 0]);
        }
    }

    /// An engine that does not stop makes its endpoint DEAD in calls that hold locks, under which others can not be kept off it.
    fn look_at_the_dead(&self) {
        if self.endpoint.status.state() == state::DEAD {
            self.endpoint.keep_others_off();
        }
        self.endpoint.silence_late();
    }

    /// Enables vectors that a storm had masked, and tells it. That writes to the device, so the caller holds `hardware` of a
    /// device that lives; what was masked before a reset is enabled after it.
    fn end_storms(&self) {
        let storms = self.endpoint.storms.xchg(0, Relaxed);
        if storms == 0 {
            return;
        }
        let endpoint = &self.endpoint;
        for vector in Iterator::chain(endpoint.vectors.iter(), core::iter::once(&endpoint.engine_interrupt)) {
            let index = vector.index;
            if storms & 1 << (index & 63) == 0 {
                continue;
            }
            let armed = self.armed.lock();
            // SAFETY: While `armed` is true the interrupts are requested; `Running` clears it, under the lock, before they
            // are freed.
            let ended = *armed && unsafe { vector.rekindle() };
            drop(armed);
            if ended {
                // Whoever may ring can cause these.
                limits::say(|| dev_warn!(endpoint.pdev, "vector {index} fired too often and was masked for a while\n"));
                self.endpoint.tell(kind::STORM, [u64::from(index), 0, 0, 0]);
            }
        }
    }
}

/// A monitor that runs until this is dropped.
pub(crate) struct Running(Arc<Monitor>);

impl Running {
    /// Starts looking.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory.
    pub(crate) fn new(endpoint: Arc<Endpoint>) -> Result<Self> {
        let monitor = Arc::pin_init(
            pin_init!(Monitor {
                endpoint,
                next_sample: Atomic::new(0),
                armed <- new_mutex!(true, "pcieipc_monitor"),
                work <- new_delayed_work!("pcieipc_monitor"),
            }),
            GFP_KERNEL,
        )?;
        monitor.queue(false);
        Ok(Self(monitor))
    }

    /// From now on interrupts are not enabled any more, and the monitor ends by itself.
    pub(crate) fn disarm(&self) {
        *self.0.armed.lock() = false;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.disarm();
        // CAST: `DelayedWork` is a transparent wrapper of `struct delayed_work`.
        let work = (&raw const self.0.work).cast_mut().cast::<bindings::delayed_work>();
        // SAFETY: The work was initialized in `new`. Waits for a look that runs, which at most tries to take a lock of unbind's callers.
        if unsafe { bindings::cancel_delayed_work_sync(work) } {
            // SAFETY: Queueing turned a reference into a pointer, and the work that would have taken it back will not run.
            drop(unsafe { Arc::from_raw(Arc::as_ptr(&self.0)) });
        }
    }
}
