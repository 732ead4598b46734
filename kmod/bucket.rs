// SPDX-License-Identifier: GPL-2.0

//! A token bucket on ring calls, without a lock: one word holds the time at which the bucket will be full again.

use kernel::{
    bindings,
    prelude::*,
    sync::atomic::{Atomic, Full, Relaxed},
};

/// Seconds' worth of calls that may come at once, as a divisor: a tenth of a second.
const BURST: u64 = 10;

/// A rate limit.
pub(crate) struct Bucket {
    full_at: Atomic<u64>,
}

impl Bucket {
    /// A full bucket.
    pub(crate) const fn new() -> Self {
        Self { full_at: Atomic::new(0) }
    }

    /// Takes one token at `rate` tokens a second; 0 is no limit.
    ///
    /// # Errors
    ///
    /// `EAGAIN` when the bucket is empty.
    pub(crate) fn take(&self, rate: u32) -> Result {
        if rate == 0 {
            return Ok(());
        }
        // SAFETY: Reads the monotonic clock.
        let now = unsafe { bindings::ktime_get() } as u64;
        self.take_at(rate, now)
    }

    /// [`Bucket::take`] at a given time, in nanoseconds.
    pub(crate) fn take_at(&self, rate: u32, now: u64) -> Result {
        let rate = u64::from(rate.max(1));
        let interval = (1_000_000_000 / rate).max(1);
        let depth = interval * (rate / BURST).max(1);
        let mut full_at = self.full_at.load(Relaxed);
        loop {
            let from = full_at.max(now);
            if from - now > depth {
                return Err(EAGAIN);
            }
            match self.full_at.cmpxchg(full_at, from + interval, Full) {
                Ok(_) => return Ok(()),
                Err(seen) => full_at = seen,
            }
        }
    }
}

#[kunit_tests(pcieipc_bucket)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_burst_is_a_tenth_of_a_second() {
        let bucket = Bucket::new();
        let taken = (0..1000).filter(|_| bucket.take_at(1000, SECOND).is_ok()).count();
        assert!((100..=101).contains(&taken));
    }

    #[test]
    fn over_a_second_the_rate_holds() {
        let bucket = Bucket::new();
        let taken = (0..100_000u64).filter(|at| bucket.take_at(1000, SECOND + at * 10_000).is_ok()).count();
        assert!((1000..=1110).contains(&taken));
    }

    #[test]
    fn no_rate_is_no_limit() {
        let bucket = Bucket::new();
        assert!((0..1000).all(|_| bucket.take(0).is_ok()));
    }

    #[test]
    fn a_clock_that_stands_still_gives_nothing_more() {
        let bucket = Bucket::new();
        while bucket.take_at(10, SECOND).is_ok() {}
        assert!(bucket.take_at(10, SECOND).is_err());
        assert!(bucket.take_at(10, 2 * SECOND).is_ok());
    }
}
