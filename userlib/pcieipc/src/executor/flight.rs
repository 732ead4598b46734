// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls in flight: begun, in the order of their numbers, and progressed a little at a time.
//!
//! Several run at once. Records of one link are never out of order: a call uses a link only when all calls before it are through
//! with it. So the calls before it go on exactly as if it were not there, and no order of calls that ends one after the
//! other can wait in a cycle when they overlap.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Executor,
    arguments::Arguments,
    request::Outcome,
    run::{Busy, Pace, Run, Tools, Traffic},
};
use crate::{
    error::{Error, Rank, Result},
    link::{Links, Want},
    plan::Collective,
};

/// So many calls progress at once; later ones wait for their turn.
const AT_ONCE: usize = 8;

/// How often a caller that only asks, and never waits, is told of an end that no record and no word of memory tells: a process's.
const BETWEEN_SURVEYS: Duration = Duration::from_millis(10);

/// Who is told how a call ended.
pub(super) type End = Box<dyn FnOnce(Result<()>) + Send>;

/// A call that has begun and is not over.
pub(super) struct Flight {
    run: Run,
    traffic: Traffic,
    scratch: Vec<u64>,
    begun: Instant,
    deadline: Instant,
    rank: Rank,
    end: Option<End>,
}

// SAFETY: what keeps it from being Send are the addresses of the caller's buffers. They are those of an owned buffer that `end` keeps (and
// that is Send), or of one whose borrow lasts until the flight is over.
unsafe impl Send for Flight {}

impl std::fmt::Debug for Flight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flight").field("run", &self.run).field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

impl Flight {
    fn end(mut self, answer: Result<()>) {
        if let Some(end) = self.end.take() {
            end(answer);
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end(Err(Error::Aborted {
                by: self.rank,
                why: "the group ended or went on before this call was over".into(),
                endpoint: None,
            }));
        }
    }
}

impl<L: Links> Executor<L> {
    /// Begins a call.
    pub(super) fn launch(&mut self, arguments: Arguments, deadline: Instant, end: End) -> Result<(), (Error, End)> {
        let run = match self.begin(arguments) {
            Ok(run) => run,
            Err(error) => return Err((error, end)),
        };
        let (traffic, rank) = (Traffic::of(run.plan()), self.links.rank());
        let begun = Instant::now();
        if self.flights.is_empty() {
            self.surveyed = begun;
        }
        let flight = Flight { run, traffic, scratch: Vec::new(), begun, deadline, rank, end: Some(end) };
        self.flights.push_back(flight);
        Ok(())
    }

    /// How many calls are in flight.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut ranks = loopback::group(2, 4, 4096).into_iter().map(|links| Executor::new(links, Options::default()).unwrap());
    /// # let (mut zero, mut one) = (ranks.next().unwrap(), ranks.next().unwrap());
    /// let request = zero.start_all_reduce(vec![1.0f32; 8], Op::Sum, soon)?;
    /// assert_eq!(zero.in_flight(), 1);
    /// # let other = one.start_all_reduce(vec![1.0f32; 8], Op::Sum, soon)?;
    /// # drop((zero.wait(request)?, one.wait(other)?));
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Goes on with the calls in flight as far as that is possible without waiting; says how many are left.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut ranks = loopback::group(2, 4, 4096).into_iter().map(|links| Executor::new(links, Options::default()).unwrap());
    /// # let (mut zero, mut one) = (ranks.next().unwrap(), ranks.next().unwrap());
    /// let (first, second) = (zero.start_barrier(soon)?, one.start_barrier(soon)?);
    /// while zero.progress()? + one.progress()? > 0 {
    ///     // ... compute ...
    /// }
    /// assert!(first.is_done() && second.is_done());
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// A call failed or its time is over. All calls in flight have then ended with this error.
    pub fn progress(&mut self) -> Result<usize> {
        self.advance().map_err(|error| self.fail(error))?;
        Ok(self.flights.len())
    }

    fn advance(&mut self) -> Result<()> {
        let mut busy = Busy::default();
        let mut at = 0;
        while let Some(flight) = self.flights.get_mut(at).filter(|_| at < AT_ONCE) {
            self.links.until(flight.deadline);
            let trace = self.trace.as_mut();
            let (scratch, volume) = (&mut flight.scratch, &mut self.volume);
            let tools = Tools { links: &mut self.links, isa: self.isa, scratch, trace, volume };
            if flight.run.advance(tools, Pace::Try(busy))? {
                self.links.confirm()?;
                if let Some(flight) = self.flights.remove(at) {
                    flight.end(Ok(()));
                }
            } else {
                busy = flight.run.holds(&flight.traffic, busy);
                at += 1;
            }
        }
        if self.flights.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        if now.duration_since(self.surveyed) >= BETWEEN_SURVEYS {
            self.surveyed = now;
            self.links.survey()?;
        }
        if let Some(late) = self.flights.iter().find(|flight| flight.deadline <= now) {
            let waited = late.begun.elapsed();
            // The deadline has passed: says at once whether something worse than a late peer is the reason.
            let wants = self.wants();
            self.links.wait_for(&wants, now)?;
            let rank = self.links.rank();
            let (peer, what) = wants.first().map_or((rank, "its turn among the calls in flight"), |want| want.of());
            return Err(Error::Timeout { rank, peer, what, waited, endpoint: None });
        }
        // The caller may compute for long before it asks again.
        self.links.nudge()
    }

    /// What the calls in flight wait for. The first always waits for something.
    fn wants(&self) -> Vec<Want> {
        self.flights.iter().take(AT_ONCE).filter_map(|flight| flight.run.want()).collect()
    }

    /// Why it can not go on, once a call has failed.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut ranks = loopback::group(2, 4, 4096).into_iter().map(|links| Executor::new(links, Options::default()).unwrap());
    /// # let (mut zero, mut one) = (ranks.next().unwrap(), ranks.next().unwrap());
    /// drop(one); // its rank leaves
    /// assert!(zero.barrier(soon).is_err());
    /// assert!(zero.failure().is_some());
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }

    /// Ends all calls in flight.
    pub(crate) fn fail(&mut self, error: Error) -> Error {
        let error = error.naming(|rank| self.links.endpoint(rank));
        self.failure.get_or_insert_with(|| error.clone());
        self.flights.drain(..).for_each(|flight| flight.end(Err(error.clone())));
        error
    }

    /// Goes on, sleeping where nothing can be done, until `over`, an error, or nothing is left. False when `until` came first.
    pub(crate) fn drive(&mut self, over: &dyn Fn() -> bool, until: Option<Instant>) -> Result<bool> {
        loop {
            self.progress()?;
            if over() {
                return Ok(true);
            }
            let Some(mut deadline) = self.flights.iter().map(|f| f.deadline).min() else { return Ok(false) };
            if let Some(until) = until {
                if until <= Instant::now() {
                    return Ok(false);
                }
                deadline = deadline.min(until);
            }
            let wants = self.wants();
            self.links.wait_for(&wants, deadline).map_err(|error| self.fail(error))?;
        }
    }

    /// Goes on until the collective with this number is over.
    pub(super) fn drive_past(&mut self, number: u32) -> Result<()> {
        let flies = |flight: &Flight| flight.run.plan().collective != Collective::SendReceive && flight.run.number() == number;
        while self.flights.iter().any(flies) {
            self.progress()?;
            let Some(deadline) = self.flights.iter().map(|f| f.deadline).min() else { return Ok(()) };
            let wants = self.wants();
            self.links.wait_for(&wants, deadline).map_err(|error| self.fail(error))?;
        }
        Ok(())
    }

    /// Runs calls to their end, overlapped, behind those in flight.
    pub(super) fn call_all(&mut self, calls: Vec<Arguments>, deadline: Instant) -> Result<()> {
        let mut outcomes = Vec::with_capacity(calls.len());
        let mut begun = Ok(());
        for arguments in calls {
            let outcome = Arc::new(Outcome::default());
            let end = outcome.clone();
            begun = self.launch(arguments, deadline, Box::new(move |answer| end.set((), answer))).map_err(|(error, _)| error);
            if begun.is_err() {
                break;
            }
            outcomes.push(outcome);
        }
        let over = || outcomes.iter().all(|o| o.is_done());
        // Nobody may touch the buffers after this call: when it fails, and when it panics, nothing stays in flight.
        let driven = catch_unwind(AssertUnwindSafe(|| self.drive(&over, None)));
        let driven = driven.unwrap_or_else(|panic| {
            self.fail(Error::Argument("a call of this group panicked; please report it".into()));
            resume_unwind(panic)
        });
        driven?;
        begun
    }
}

#[cfg(test)]
mod tests;
