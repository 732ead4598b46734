// SPDX-License-Identifier: GPL-2.0

//! A session's queue of events, as `read()` and `poll()` show it.
//!
//! A full queue never loses silently: the gap is a LOST record that counts. Some places are kept for changes of state, so
//! that a flood of lesser events cannot hide one.

use crate::{
    accounting::User,
    limits,
    uapi::{self, kind},
};
use kernel::{
    bindings,
    fs::File,
    iov::IovIterDest,
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        poll::{PollCondVarBox, PollTable},
        SpinLockIrq,
    },
};

/// Bytes of one event.
pub(crate) const EVENT_BYTES: usize = size_of::<uapi::pcieipc_event>();
const _: () = assert!(EVENT_BYTES == 64);

/// Places that only changes of state may take.
const RESERVED: usize = 8;

/// What happened, before a session's queue numbers it.
#[derive(Clone, Copy)]
pub(crate) struct Event {
    /// One of `uapi::kind`.
    pub(crate) kind: u32,
    /// Endpoint id, 0 for none.
    pub(crate) endpoint: u32,
    /// The endpoint's generation then.
    pub(crate) generation: u64,
    /// See `enum pcieipc_event_kind`.
    pub(crate) detail: [u64; 4],
}

/// The queue proper: no locks, no waiting.
pub(crate) struct Ring {
    slots: KVVec<uapi::pcieipc_event>,
    head: usize,
    length: usize,
    sequence: u64,
    /// Events lost since the last record that was queued.
    gap: u64,
    /// When the gap began, and at which endpoint.
    gap_time: u64,
    lost: u64,
    /// A reader is copying the head to user memory.
    reading: bool,
}

impl Ring {
    /// A ring of `capacity` events.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory.
    pub(crate) fn new(capacity: usize) -> Result<Self> {
        Ok(Self {
            slots: KVVec::from_elem(uapi::pcieipc_event::default(), capacity + RESERVED, GFP_KERNEL_ACCOUNT)?,
            head: 0,
            length: 0,
            sequence: 0,
            gap: 0,
            gap_time: 0,
            lost: 0,
            reading: false,
        })
    }

    fn put(&mut self, event: uapi::pcieipc_event) {
        let index = (self.head + self.length) % self.slots.len();
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = event;
            self.length += 1;
        }
    }

    /// Queues the gap as a record of its own. The caller made sure of room.
    fn put_gap(&mut self) {
        let lost = uapi::pcieipc_event {
            sequence: self.sequence,
            time_ns: self.gap_time,
            kind: kind::LOST,
            detail: [self.gap, 0, 0, 0],
            ..Default::default()
        };
        self.gap = 0;
        self.put(lost);
    }

    /// Queues `event`; false when it was lost. Losing it is remembered and told.
    pub(crate) fn push(&mut self, event: &Event, time_ns: u64) -> bool {
        let room = self.slots.len() - self.length;
        let kept = if event.kind == kind::STATE { 0 } else { RESERVED };
        // A gap needs a place of its own before the event.
        let needed = 1 + usize::from(self.gap > 0) + kept;
        if room < needed {
            if self.gap == 0 {
                self.gap_time = time_ns;
            }
            self.sequence += 1;
            self.gap += 1;
            self.lost += 1;
            return false;
        }
        if self.gap > 0 {
            self.put_gap();
        }
        self.sequence += 1;
        let record = uapi::pcieipc_event {
            sequence: self.sequence,
            generation: event.generation,
            time_ns,
            kind: event.kind,
            endpoint: event.endpoint,
            detail: event.detail,
        };
        self.put(record);
        true
    }

    /// The oldest record, which stays.
    pub(crate) fn peek(&mut self) -> Option<uapi::pcieipc_event> {
        if self.length == 0 && self.gap > 0 {
            self.put_gap();
        }
        if self.length == 0 {
            return None;
        }
        self.slots.get(self.head).copied()
    }

    /// Drops the oldest record.
    pub(crate) fn consume(&mut self) {
        if self.length > 0 {
            self.head = (self.head + 1) % self.slots.len();
            self.length -= 1;
        }
    }

    /// Records that wait, a pending gap included.
    pub(crate) fn waiting(&self) -> usize {
        self.length + usize::from(self.gap > 0)
    }

    /// Events lost so far.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }
}

/// A session's queue, its waiters, and which endpoint it is about.
#[pin_data]
pub(crate) struct Queue {
    #[pin]
    ring: SpinLockIrq<Ring>,
    waiters: PollCondVarBox,
    /// Id of the endpoint that the session is attached to, 0 for none.
    endpoint: Atomic<u32>,
    /// The one endpoint that the session may know of.
    only: Option<u32>,
    /// Whose session it is.
    pub(crate) user: User,
}

impl Queue {
    /// An empty queue of a session that is not attached.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory.
    pub(crate) fn new(only: Option<u32>) -> Result<impl PinInit<Self>> {
        let user = User::current()?;
        let ring = Ring::new(limits::event_queue())?;
        let waiters = PollCondVarBox::new(c"pcieipc_events", kernel::static_lock_class!())?;
        Ok(pin_init!(Self {
            ring <- new_spinlock_irq!(ring, "pcieipc_events"),
            waiters,
            endpoint: Atomic::new(0),
            only,
            user,
        }))
    }

    /// From now on the session is about this endpoint.
    pub(crate) fn attach(&self, endpoint: u32) {
        self.endpoint.store(endpoint, Relaxed);
    }

    /// Delivers `event` if the session is to see it; false when it should have seen it and it was lost.
    pub(crate) fn deliver(&self, event: &Event) -> bool {
        if self.only.is_some_and(|only| only != event.endpoint) {
            return true;
        }
        let attached = self.endpoint.load(Relaxed);
        let for_all = matches!(event.kind, kind::ADDED | kind::STATE);
        if attached != 0 && attached != event.endpoint && !for_all {
            return true;
        }
        // SAFETY: Reads the monotonic clock.
        let now = unsafe { bindings::ktime_get() } as u64;
        let kept = self.ring.lock().push(event, now);
        self.waiters.notify_all();
        kept
    }

    /// Wakes everybody who waits in poll or read, to look at the state again.
    pub(crate) fn wake(&self) {
        // A reader that has looked and found nothing holds the lock until it sleeps, so it is not missed.
        drop(self.ring.lock());
        self.waiters.notify_all();
    }

    /// Registers a poller.
    pub(crate) fn register(&self, table: &PollTable<'_>, file: &File) {
        table.register_wait(file, &self.waiters);
    }

    /// Records that wait to be read.
    pub(crate) fn waiting(&self) -> usize {
        self.ring.lock().waiting()
    }

    /// Events lost so far.
    pub(crate) fn lost(&self) -> u64 {
        self.ring.lock().lost()
    }

    /// Copies whole records to `to`; waits for the first one unless `nonblocking` or `over` says that no more will come.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a buffer shorter than a record, `EAGAIN` when nonblocking and empty, `EFAULT` for a bad buffer, a restart
    /// on a signal. Zero bytes mean that the endpoint's end was read already.
    pub(crate) fn read(&self, to: &mut IovIterDest<'_>, nonblocking: bool, over: impl Fn() -> bool) -> Result<usize> {
        if to.len() < EVENT_BYTES {
            return Err(EINVAL);
        }
        let mut done = 0;
        while to.len() >= EVENT_BYTES {
            let Some(event) = self.claim(done > 0 || nonblocking, &over)? else {
                break;
            };
            // The lock is not held here: the buffer may be served by userfaultfd and never arrive.
            let copied = to.copy_to_iter(bytes(&event));
            let mut ring = self.ring.lock();
            ring.reading = false;
            if copied == EVENT_BYTES {
                ring.consume();
            }
            drop(ring);
            self.waiters.notify_all();
            if copied < EVENT_BYTES {
                return if done > 0 { Ok(done) } else { Err(EFAULT) };
            }
            done += EVENT_BYTES;
        }
        // What another reader is copying comes back when its buffer turns out to be bad, so it is not the end yet.
        if done == 0 && nonblocking && (!over() || self.waiting() > 0) {
            return Err(EAGAIN);
        }
        Ok(done)
    }

    /// Takes the right to copy the head; None when there is nothing to copy and no use in waiting.
    fn claim(&self, at_once: bool, over: &impl Fn() -> bool) -> Result<Option<uapi::pcieipc_event>> {
        let mut ring = self.ring.lock();
        loop {
            if !ring.reading {
                if let Some(event) = ring.peek() {
                    ring.reading = true;
                    return Ok(Some(event));
                }
                if over() {
                    return Ok(None);
                }
            }
            if at_once {
                return Ok(None);
            }
            if self.waiters.wait_interruptible(&mut ring) {
                return Err(ERESTARTSYS);
            }
        }
    }
}

fn bytes(event: &uapi::pcieipc_event) -> &[u8] {
    // SAFETY: An event is 64 bytes of integers without padding, see the assertion above; the slice borrows from it.
    unsafe { core::slice::from_raw_parts(core::ptr::from_ref(event).cast(), EVENT_BYTES) }
}

#[kunit_tests(pcieipc_events)]
mod tests {
    use super::*;

    fn event(kind: u32) -> Event {
        Event { kind, endpoint: 1, generation: 1, detail: [0; 4] }
    }

    fn take(ring: &mut Ring) -> Option<uapi::pcieipc_event> {
        let event = ring.peek();
        ring.consume();
        event
    }

    #[test]
    fn events_come_in_order_without_gaps() -> Result {
        let mut ring = Ring::new(16)?;
        for time in 0..10 {
            assert!(ring.push(&event(kind::LINK), time));
        }
        for sequence in 1..=10 {
            assert_eq!(take(&mut ring).map(|event| event.sequence), Some(sequence));
        }
        assert!(take(&mut ring).is_none());
        Ok(())
    }

    #[test]
    fn a_full_queue_tells_how_many_were_lost() -> Result {
        let mut ring = Ring::new(16)?;
        let kept = (0..40).filter(|time| ring.push(&event(kind::LINK), *time)).count() as u64;
        assert_eq!(kept, 16);
        assert_eq!(ring.lost(), 24);
        for _ in 0..kept {
            assert_eq!(take(&mut ring).map(|event| event.kind), Some(kind::LINK));
        }
        let lost = take(&mut ring).unwrap_or_default();
        assert_eq!((lost.kind, lost.detail[0], lost.sequence), (kind::LOST, 24, 40));
        assert!(ring.push(&event(kind::LINK), 50));
        assert_eq!(take(&mut ring).map(|event| event.sequence), Some(41));
        assert!(take(&mut ring).is_none());
        Ok(())
    }

    #[test]
    fn a_flood_leaves_room_for_changes_of_state() -> Result {
        let mut ring = Ring::new(16)?;
        for time in 0..100 {
            ring.push(&event(kind::CORRECTABLE), time);
        }
        assert!(ring.push(&event(kind::STATE), 100));
        let mut last = 0;
        let mut told = 0;
        let mut state = false;
        while let Some(event) = take(&mut ring) {
            told += if event.kind == kind::LOST { event.detail[0] } else { 1 };
            state |= event.kind == kind::STATE;
            last = event.sequence;
        }
        assert!(state);
        assert_eq!((told, last), (101, 101));
        Ok(())
    }
}
