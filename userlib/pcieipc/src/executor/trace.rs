// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a rank did when: every step in a bounded buffer, the latest ones kept.

use nix::time::{ClockId, clock_gettime};

use super::{Executor, run::Run};
use crate::{link::Links, plan::Collective};

/// One step that a rank has run. Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Which collective.
    pub collective: Collective,
    /// The number of the call within the group (of messages, between the two ranks).
    pub call: u32,
    /// The step's phase.
    pub phase: u16,
    /// Which chunk of every shard.
    pub window: u32,
    /// The shard that it worked on.
    pub shard: u16,
    /// Bytes of the chunk in the user's form; 0 for a signal.
    pub bytes: u32,
    /// When the rank first looked whether it can run.
    pub begun: u64,
    /// When all records and all room were there.
    pub ready: u64,
    /// When the chunk was combined and stored.
    pub combined: u64,
    /// When its records were published and given back.
    pub ended: u64,
}

/// Where a rank's time went, in nanoseconds, over all steps that were traced (also those no longer in the buffer).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Steps.
    pub steps: u64,
    /// Until records and room were there.
    pub waiting: u64,
    /// Combining and storing.
    pub combining: u64,
    /// Publishing and giving back.
    pub publishing: u64,
}

/// The steps of one rank.
#[derive(Debug)]
pub struct Trace {
    /// The latest steps; the oldest is at `next` once the buffer is full.
    events: Vec<Event>,
    most: usize,
    next: usize,
    totals: Totals,
}

/// Now, on the clock of [`Event`].
pub(super) fn now() -> u64 {
    // The clock exists on every Linux; a time of zero would only make a picture wrong.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |t| t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64)
}

impl Trace {
    fn new(most: usize) -> Self {
        let most = most.max(1);
        Self { events: Vec::with_capacity(most), most, next: 0, totals: Totals::default() }
    }

    pub(super) fn add(&mut self, event: Event) {
        self.totals.steps += 1;
        self.totals.waiting += event.ready.saturating_sub(event.begun);
        self.totals.combining += event.combined.saturating_sub(event.ready);
        self.totals.publishing += event.ended.saturating_sub(event.combined);
        if self.events.len() < self.most {
            self.events.push(event);
        } else if let Some(oldest) = self.events.get_mut(self.next) {
            *oldest = event;
            self.next = (self.next + 1) % self.most;
        }
    }

    /// The steps that are kept, oldest first.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// alone.start_trace(1000);
    /// alone.all_reduce(&mut [1.0f32; 8], Op::Average, soon)?;
    /// let trace = alone.stop_trace().unwrap();
    /// assert!(trace.events().iter().all(|step| step.begun <= step.ended));
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn events(&self) -> Vec<Event> {
        let (late, early) = self.events.split_at(self.next.min(self.events.len()));
        early.iter().chain(late).copied().collect()
    }

    /// Over all steps.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// alone.start_trace(1); // however few steps are kept
    /// alone.all_reduce(&mut [1.0f32; 8], Op::Average, soon)?;
    /// assert!(alone.stop_trace().unwrap().totals().steps > 0);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Steps that were traced but are no longer kept.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// alone.start_trace(1);
    /// alone.all_reduce(&mut [1.0f32; 8], Op::Average, soon)?;
    /// alone.all_reduce(&mut [1.0f32; 8], Op::Average, soon)?;
    /// assert!(alone.stop_trace().unwrap().lost() > 0);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn lost(&self) -> u64 {
        self.totals.steps - self.events.len() as u64
    }
}

impl<L: Links> Executor<L> {
    /// From now on every step is recorded; the latest `most` are kept. Costs four looks at the clock a step, and a branch a step when it is off.
    ///
    /// ```
    /// use std::time::{Duration, Instant};
    /// use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    ///
    /// let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default()).unwrap();
    /// alone.start_trace(1000);
    /// alone.all_reduce(&mut [1.0f32; 8], Op::Average, Instant::now() + Duration::from_secs(1)).unwrap();
    /// let trace = alone.stop_trace().unwrap();
    /// assert_eq!(trace.totals().steps, trace.events().len() as u64);
    /// ```
    pub fn start_trace(&mut self, most: usize) {
        self.trace = Some(Trace::new(most));
    }

    /// Ends the recording and gives it; nothing when there was none.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// assert!(alone.stop_trace().is_none());
    /// alone.start_trace(10);
    /// assert!(alone.stop_trace().is_some());
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn stop_trace(&mut self) -> Option<Trace> {
        self.trace.take()
    }
}

/// When the parts of a step began.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Marks {
    pub begun: u64,
    pub ready: u64,
    pub combined: u64,
}

impl Run {
    pub(super) fn event(&self, marks: Marks, phase: usize, window: usize, shard: u16, bytes: usize) -> Event {
        Event {
            collective: self.plan().collective,
            call: self.number(),
            phase: phase as u16,
            window: window as u32,
            shard,
            bytes: bytes as u32,
            begun: marks.begun,
            ready: marks.ready,
            combined: marks.combined,
            ended: now(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_buffer_keeps_the_latest_steps_in_order_and_counts_all() {
        let mut trace = Trace::new(3);
        for i in 0..8u64 {
            let (begun, ready, combined, ended) = (10 * i, 10 * i + 1, 10 * i + 3, 10 * i + 6);
            let collective = Collective::Barrier;
            trace.add(Event {
                collective,
                call: i as u32,
                phase: 0,
                window: 0,
                shard: 0,
                bytes: 0,
                begun,
                ready,
                combined,
                ended,
            });
        }
        assert_eq!(trace.events().iter().map(|e| e.call).collect::<Vec<_>>(), [5, 6, 7]);
        assert_eq!(trace.totals(), Totals { steps: 8, waiting: 8, combining: 16, publishing: 24 });
        assert_eq!(trace.lost(), 5);
    }
}
