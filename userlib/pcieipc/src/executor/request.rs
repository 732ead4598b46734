// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the caller holds of a call in flight.

use std::{
    ptr::NonNull,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use super::Executor;
use crate::{
    error::{Error, Result},
    link::Links,
    reduce::Element,
    registered::Registered,
};

/// Memory that a call in flight can use: it stays where it is when the value moves.
///
/// # Safety
/// Until the value is dropped, [`Buffer::elements`] gives the same place, readable and writable, and nobody uses that memory but through
/// the value.
pub unsafe trait Buffer: Send + 'static {
    /// What it holds.
    type Element: Element;
    /// Where.
    fn elements(&mut self) -> NonNull<[Self::Element]>;
}

// SAFETY: a vector's elements are on the heap, its own, and it is not grown while it is kept for a call.
unsafe impl<T: Element> Buffer for Vec<T> {
    type Element = T;
    fn elements(&mut self) -> NonNull<[T]> {
        NonNull::from(self.as_mut_slice())
    }
}

// SAFETY: a mapping does not move; peers only read it.
unsafe impl<T: Element> Buffer for Registered<T> {
    type Element = T;
    fn elements(&mut self) -> NonNull<[T]> {
        NonNull::from(&mut **self)
    }
}

/// Memory of somebody else, such as a tensor.
#[derive(Debug)]
pub struct Lent<T>(NonNull<[T]>);

// SAFETY: whoever lends it promises that nobody else uses it.
unsafe impl<T: Send> Send for Lent<T> {}

impl<T: Element> Lent<T> {
    /// `count` elements at `start`.
    ///
    /// ```
    /// use pcieipc::executor::Lent;
    ///
    /// let mut tensor = [1.0f32; 8];
    /// // SAFETY: the array lives on and is not used before the call is over.
    /// let lent = unsafe { Lent::new(std::ptr::NonNull::from(&mut tensor).cast::<f32>(), 8) };
    /// # drop(lent);
    /// ```
    ///
    /// # Safety
    /// Until the value is dropped, the memory stays there, readable and (if a call stores to it) writable, and nobody else uses it. A call
    /// that it was given to keeps it until it is over, also when its request is dropped.
    pub unsafe fn new(start: NonNull<T>, count: usize) -> Self {
        Self(NonNull::slice_from_raw_parts(start, count))
    }
}

// SAFETY: as `Lent::new` was promised.
unsafe impl<T: Element> Buffer for Lent<T> {
    type Element = T;
    fn elements(&mut self) -> NonNull<[T]> {
        self.0
    }
}

/// How a call ended, and what it was given.
#[derive(Debug)]
pub(super) struct Outcome<B> {
    done: AtomicBool,
    answer: Mutex<Option<(B, Result<()>)>>,
}

impl<B> Default for Outcome<B> {
    fn default() -> Self {
        Self { done: AtomicBool::new(false), answer: Mutex::new(None) }
    }
}

impl<B> Outcome<B> {
    pub fn set(&self, buffers: B, answer: Result<()>) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some((buffers, answer));
        self.done.store(true, Ordering::Release);
    }

    pub fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    fn take(&self) -> Option<(B, Result<()>)> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A call in flight, and the buffers that it was given.
///
/// Dropping it does not stop the call, whose peers count on it: it goes on, its buffers are freed when it is over, and a failure is told
/// by the next call of the group.
#[derive(Debug)]
#[must_use = "the call's buffers come back through `wait`"]
pub struct Request<B> {
    pub(super) outcome: Arc<Outcome<B>>,
}

/// A call that failed, with the buffers that it was given; 16-bit sums and others may be half written, inputs are as they were.
/// No buffers when the call belongs to another group: there it goes on.
pub struct Failed<B> {
    /// Why.
    pub error: Error,
    /// What the call was given.
    pub buffers: Option<B>,
}

/// A call that has begun, or was refused and gives its buffers back.
pub type Started<B> = Result<Request<B>, Failed<B>>;

impl<B> std::fmt::Debug for Failed<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Failed").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<B> std::fmt::Display for Failed<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for Failed<B> {}

impl<B> From<Failed<B>> for Error {
    fn from(failed: Failed<B>) -> Self {
        failed.error
    }
}

impl<B> Request<B> {
    /// Whether the call is over, well or not. A look at one word of memory; nothing is progressed by it.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let request = alone.start_barrier(soon)?;
    /// assert!(request.is_done()); // nobody else to wait for
    /// alone.wait(request)?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn is_done(&self) -> bool {
        self.outcome.is_done()
    }

    /// The answer, once the call is over.
    pub(crate) fn answer(self) -> Result<B, Failed<B>> {
        match self.outcome.take() {
            Some((buffers, Ok(()))) => Ok(buffers),
            Some((buffers, Err(error))) => Err(Failed { error, buffers: Some(buffers) }),
            None => {
                let why = "the call belongs to another group; wait for it there".to_owned();
                Err(Failed { error: Error::Argument(why), buffers: None })
            }
        }
    }

    /// The answer of a call that was refused before it began.
    pub(super) fn refusal(self, error: Error) -> Failed<B> {
        Failed { error, buffers: self.outcome.take().map(|(buffers, _)| buffers) }
    }
}

impl<L: Links> Executor<L> {
    /// Goes on until the call is over, and gives its buffers back. The call's own deadline bounds the wait.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// let request = alone.start_all_reduce(vec![1u8, 2], Op::Max, soon)?;
    /// assert_eq!(alone.wait(request)?, [1, 2]);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// What the call answered, with the buffers.
    pub fn wait<B>(&mut self, request: Request<B>) -> Result<B, Failed<B>> {
        // A failure is in the outcome too, with the buffers.
        let _ = self.drive(&|| request.is_done(), None);
        request.answer()
    }

    /// As [`Executor::wait`], until `until` at the latest; says whether the call is over.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut ranks = loopback::group(2, 4, 4096).into_iter().map(|links| Executor::new(links, Options::default()).unwrap());
    /// # let (mut zero, mut one) = (ranks.next().unwrap(), ranks.next().unwrap());
    /// let request = zero.start_barrier(soon)?;
    /// assert!(!zero.wait_until(&request, std::time::Instant::now()), "the other has not come");
    /// # let other = one.start_barrier(soon)?;
    /// # (zero.wait(request)?, one.wait(other)?);
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn wait_until<B>(&mut self, request: &Request<B>, until: Instant) -> bool {
        let _ = self.drive(&|| request.is_done(), Some(until));
        request.is_done()
    }
}
