// SPDX-License-Identifier: MIT OR Apache-2.0
//! When a call must be over, without asking the system's clock for every call: that would be a tenth of a short one.

use std::time::{Duration, Instant};

/// Ticks of the processor's counter for which a look at the clock is good: half a millisecond at the slowest rate that processors count at.
const GOOD_FOR: u64 = 1 << 19;
/// Added where the clock was not looked at, so that no bound is shorter than asked for.
const SLACK: Duration = Duration::from_millis(1);

/// The system's clock as last seen.
#[derive(Debug)]
pub(super) struct Clock {
    seen: Instant,
    ticks: u64,
}

impl Clock {
    pub fn new() -> Self {
        Self { seen: Instant::now(), ticks: ticks() }
    }

    /// The end of a bound that begins now; not early, and a millisecond late at most.
    #[inline]
    pub fn after(&mut self, bound: Duration) -> Instant {
        let ticks = ticks();
        if ticks == 0 || ticks.wrapping_sub(self.ticks) > GOOD_FOR {
            *self = Self { seen: Instant::now(), ticks };
            return self.seen + bound;
        }
        self.seen + bound + SLACK
    }
}

/// The processor's counter; 0 where there is none.
#[inline]
fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has it, and Linux lets programs read it.
    return unsafe { std::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    return 0;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_never_early_and_a_millisecond_late_at_most() {
        let (mut clock, bound) = (Clock::new(), Duration::from_secs(1));
        for pause in [0, 0, 100, 300, 2000, 0] {
            std::thread::sleep(Duration::from_micros(pause));
            let before = Instant::now();
            let end = clock.after(bound);
            let after = Instant::now();
            assert!(end >= before + bound && end <= after + bound + SLACK, "{pause}");
        }
    }
}
