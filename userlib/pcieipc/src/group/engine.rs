// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who has the executor: the group, or its helper thread while calls are in flight and the caller computes.
//!
//! It goes back and forth whole, so that there is no lock on the path of a call and neither side ever sees it half way.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
};

use super::GroupLinks;
use crate::{
    error::{Error, Result},
    executor::Executor,
    sys::{Bell, Home},
};

pub(super) type Calls = Executor<Box<dyn GroupLinks>>;

/// The executor's place in the group.
#[derive(Debug)]
pub(super) struct Engine {
    /// Nothing while the helper has it.
    here: Option<Box<Calls>>,
    helper: Option<Helper>,
}

#[derive(Debug)]
struct Helper {
    wanted: Arc<AtomicBool>,
    /// Wakes the helper from its sleep on the links; changes with them.
    waker: Option<Bell>,
    there: Option<Sender<Box<Calls>>>,
    back: Receiver<Box<Calls>>,
    thread: Option<JoinHandle<()>>,
    home: Home,
}

impl Engine {
    /// With a thread of its own, if asked for.
    pub fn new(calls: Calls, helper: bool) -> Result<Self> {
        let helper = if helper { Some(Helper::start()?) } else { None };
        let mut engine = Self { here: None, helper };
        engine.replace(calls);
        Ok(engine)
    }

    /// The executor; waits until the helper has put it down.
    pub fn get(&mut self) -> &mut Calls {
        self.take_back();
        match &mut self.here {
            Some(calls) => calls,
            // The helper gives back what it was given, also after a panic.
            None => unreachable!("the helper thread has lost the executor"),
        }
    }

    fn take_back(&mut self) {
        if self.here.is_none() {
            self.here = self.helper.as_ref().and_then(Helper::take_back);
        }
    }

    /// Other links, after the group shrank.
    pub fn replace(&mut self, mut calls: Calls) {
        if let Some(helper) = &mut self.helper {
            helper.waker = calls.links().waker();
        }
        self.here = Some(Box::new(calls));
    }

    /// The caller goes away to compute: the helper goes on with what is in flight.
    pub fn leave(&mut self) {
        let Some(Helper { there: Some(there), waker: Some(_), .. }) = &self.helper else { return };
        if let Some(calls) = self.here.take_if(|calls| calls.in_flight() > 0) {
            if let Err(unsent) = there.send(calls) {
                self.here = Some(unsent.0);
            }
        }
    }

    /// Whether a thread goes on with the calls in flight.
    pub fn is_helped(&self) -> bool {
        self.helper.as_ref().is_some_and(|helper| helper.waker.is_some())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // The links are left by the thread that leaves the group, before the helper ends.
        self.take_back();
    }
}

impl Helper {
    fn start() -> Result<Self> {
        let wanted = Arc::new(AtomicBool::new(false));
        let ((there, inbox), (outbox, back)) = (channel::<Box<Calls>>(), channel());
        let seen = wanted.clone();
        let body = move || {
            while let Ok(mut calls) = inbox.recv() {
                let driven = catch_unwind(AssertUnwindSafe(|| calls.drive(&|| seen.load(Ordering::Acquire), None)));
                let failure = match driven {
                    Ok(Ok(_)) => None,
                    Ok(Err(error)) => Some(error),
                    Err(_) => Some(calls.fail(Error::Argument("the helper thread panicked; please report it".into()))),
                };
                if let Some(error) = failure {
                    calls.links().abort(&error.to_string());
                }
                if outbox.send(calls).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("pcieipc-helper".into()).spawn(body).map_err(|source| Error::System {
            call: "pthread_create",
            hint: "raise the limit of threads (ulimit -u), or do without helper_thread".into(),
            source: source.into(),
        })?;
        Ok(Self { wanted, waker: None, there: Some(there), back, thread: Some(thread), home: Home::here() })
    }

    fn take_back(&self) -> Option<Box<Calls>> {
        if !self.home.is_here() {
            // The thread was not copied.
            return None;
        }
        // It may have put it down already: then nobody is woken.
        if let Ok(calls) = self.back.try_recv() {
            return Some(calls);
        }
        self.wanted.store(true, Ordering::Release);
        if let Some(waker) = &self.waker {
            // Not rung, it looks again after a slice.
            let _ = waker.ring();
        }
        let calls = self.back.recv().ok();
        self.wanted.store(false, Ordering::Release);
        calls
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.there = None;
        if let Some(thread) = self.thread.take().filter(|_| self.home.is_here()) {
            let _ = thread.join();
        }
    }
}
