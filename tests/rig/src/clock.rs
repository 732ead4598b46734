// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rate of the processor's time-stamp counter, which is what a translated guest's clock counts by. The guest measures it as it boots, and on a
//! busy host gets it wrong by far: its clock then runs dozens of times too fast, and everything in it seems to hang. So it is told.

use std::time::{Duration, Instant};

/// How long it is measured: a preempted look is worth ten microseconds at most, so this is right to a few thousandths.
const WINDOW: Duration = Duration::from_millis(50);

/// Ticks in a millisecond; nothing where the counter is not known.
#[must_use]
pub fn kilohertz() -> Option<u64> {
    let (began, first) = look()?;
    std::thread::sleep(WINDOW);
    let (ended, last) = look()?;
    rate(last.checked_sub(first)?, ended.duration_since(began))
}

fn rate(ticks: u64, time: Duration) -> Option<u64> {
    let rate = u128::from(ticks) * 1_000_000 / time.as_nanos().max(1);
    // What is not that of a processor is not told.
    u64::try_from(rate).ok().filter(|rate| (100_000..100_000_000).contains(rate))
}

/// The time and the counter at one moment: of many looks the one in which least time passed.
#[cfg(target_arch = "x86_64")]
fn look() -> Option<(Instant, u64)> {
    let looks = (0..100).map(|_| {
        let before = Instant::now();
        // SAFETY: every x86-64 processor has the instruction.
        let ticks = unsafe { core::arch::x86_64::_rdtsc() };
        (before.elapsed(), before, ticks)
    });
    looks.min_by_key(|(took, ..)| *took).map(|(_, before, ticks)| (before, ticks))
}

#[cfg(not(target_arch = "x86_64"))]
fn look() -> Option<(Instant, u64)> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_ticks_in_a_millisecond_or_nothing() {
        assert_eq!(rate(130_000_000, Duration::from_millis(50)), Some(2_600_000));
        assert_eq!(rate(0, Duration::from_millis(50)), None);
        assert_eq!(rate(u64::MAX, Duration::ZERO), None);
    }

    #[test]
    fn two_measurements_agree() {
        let Some((one, two)) = kilohertz().zip(kilohertz()) else { return };
        assert!(one.abs_diff(two) < one / 50, "{one} and {two}");
    }
}
