// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether a plan stores its long chunks into the cache or past it: both are tried, again and again, and the faster one is kept.
//!
//! No rule foresees it. Where both ranks' processors share a cache, what one stores the other finds there, and stores past it cost up to twice the
//! time or, to registered buffers, three times. Where they share none, every line that the reader has read is taken back before it is
//! stored to, and stores past the cache need a fifth of the time. A virtual machine may change from one to the other every few seconds.
//!
//! All ranks try the same way in the same call, as they count the same calls of a plan: what a rank measures (its loops, without its waits)
//! then holds its own stores and its reading of the others'. What it keeps it decides for itself: bits do not depend on it.
//!
//! Fields are written by whoever runs the executor, one thread at a time; they are atomic because it may be another thread each time.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// Chunks of so many bytes and more may be stored past the cache. Below that, the other rank waits for the stores rather than for the lines.
pub const LONG: usize = 2048;

/// Bytes that go each way before that way is judged: twice what a ring holds by default. Before that, stores meet lines that the other way
/// has left in other places.
const SETTLED: usize = 4 << 20;

/// Calls that each way is tried in, at least and at most.
const TRIED: (usize, usize) = (4, 512);

/// A trial begins every so many trials' halves. The slower way then costs at most a few percent.
const PERIOD: u32 = 192;

/// Calls of so many bytes are timed whenever they store into the cache; of shorter ones, where a clock costs something, one in 16.
const ALWAYS_TIMED: usize = 64 << 10;

/// So many calls in a row that store into the cache and take over one and a half times what the trial took past it are no accident: the ranks
/// are apart now.
const NO_ACCIDENT: u32 = 4;

/// What is known of one plan. Nothing yet: past the cache, which is never the worst.
#[derive(Debug)]
pub struct Stores {
    calls: AtomicU32,
    past: AtomicBool,
    /// Nanoseconds of the fastest of the trial's calls that were measured: into the cache, past it.
    costs: [AtomicU64; 2],
    /// How many calls in a row were slow.
    slow: AtomicU32,
}

/// How one call stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Way {
    /// Past the cache.
    pub past: bool,
    /// Whether its loops are timed.
    pub timed: bool,
    trial: Trial,
}

/// A call's part in a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trial {
    /// None, or one before its way has settled.
    No,
    /// The first that is measured, a later one, and the one after which the faster way is known.
    First,
    Later,
    Last,
}

impl Default for Stores {
    fn default() -> Self {
        Self { calls: 0.into(), past: true.into(), costs: [const { AtomicU64::new(0) }; 2], slow: 0.into() }
    }
}

/// In how many calls of a trial each way is taken.
fn half(bytes: usize) -> u32 {
    (SETTLED / bytes).clamp(TRIED.0, TRIED.1) as u32
}

impl Stores {
    /// How the plan's next call, of so many bytes, stores. All ranks ask in every call, so they try alike.
    pub fn next(&self, bytes: usize) -> Way {
        if bytes < LONG {
            return Way { past: false, timed: false, trial: Trial::No };
        }
        let half = half(bytes);
        let turn = self.calls.load(Relaxed);
        self.calls.store((turn + 1) % (PERIOD * half), Relaxed);
        if turn < 2 * half {
            let measured_from = half - half / 2;
            let trial = match turn % half {
                early if early < measured_from => Trial::No,
                first if first == measured_from => Trial::First,
                _ if turn == 2 * half - 1 => Trial::Last,
                _ => Trial::Later,
            };
            return Way { past: turn < half, timed: trial != Trial::No, trial };
        }
        let past = self.past.load(Relaxed);
        Way { past, timed: !past && (bytes >= ALWAYS_TIMED || turn % 16 == 0), trial: Trial::No }
    }

    /// How long the loops of a timed call took.
    pub fn took(&self, way: Way, time: Duration) {
        let took = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let cost = &self.costs[usize::from(way.past)];
        match way.trial {
            Trial::First => cost.store(took, Relaxed),
            Trial::Later | Trial::Last => cost.store(cost.load(Relaxed).min(took), Relaxed),
            Trial::No if took / 3 <= self.costs[1].load(Relaxed) / 2 => self.slow.store(0, Relaxed),
            Trial::No => {
                let slow = self.slow.load(Relaxed) + 1;
                self.slow.store(slow, Relaxed);
                if slow >= NO_ACCIDENT {
                    self.past.store(true, Relaxed);
                }
            }
        }
        if way.trial == Trial::Last {
            let [cached, past] = [0, 1].map(|way: usize| self.costs[way].load(Relaxed));
            // Alike means that neither is slowed down; then what may become five times slower is left alone.
            self.past.store(cached >= past - past / 20, Relaxed);
            self.slow.store(0, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a long call and of the shortest that may go either way.
    const SIZES: [usize; 2] = [1 << 20, LONG];

    /// Makes `calls` calls on a machine where the loops take so many nanoseconds into the cache and past it; says how many went past.
    fn play(stores: &Stores, calls: u32, bytes: usize, [cached, past]: [u64; 2]) -> u32 {
        let mut went = 0;
        for _ in 0..calls {
            let way = stores.next(bytes);
            went += u32::from(way.past);
            if way.timed {
                stores.took(way, Duration::from_nanos(if way.past { past } else { cached }));
            }
        }
        went
    }

    #[test]
    fn the_faster_way_is_kept() {
        for bytes in SIZES {
            let (half, period) = (half(bytes), half(bytes) * PERIOD);
            for (times, went) in [([60, 140], half), ([560, 140], period - half), ([140, 141], period - half)] {
                assert_eq!(play(&Stores::default(), period, bytes, times.map(|t| t * 1000)), went, "{bytes} bytes, {times:?}");
            }
        }
    }

    #[test]
    fn ranks_that_move_apart_stop_storing_into_the_cache_within_a_few_calls() {
        for (bytes, calls) in SIZES.into_iter().zip([NO_ACCIDENT, 16 * NO_ACCIDENT]) {
            let (stores, half) = (Stores::default(), half(bytes));
            assert_eq!(play(&stores, 10 * half, bytes, [60_000, 140_000]), half);
            let went = play(&stores, 10 * half, bytes, [560_000, 140_000]);
            assert!(went >= 10 * half - calls, "{bytes} bytes: {went} of {}", 10 * half);
        }
    }

    #[test]
    fn ranks_that_move_together_are_found_by_the_next_trial() {
        for bytes in SIZES {
            let (stores, period) = (Stores::default(), half(bytes) * PERIOD);
            play(&stores, period, bytes, [560_000, 140_000]);
            assert_eq!(play(&stores, period, bytes, [60_000, 140_000]), half(bytes));
        }
    }

    #[test]
    fn a_call_that_is_interrupted_changes_nothing() {
        for bytes in SIZES {
            let (stores, half) = (Stores::default(), half(bytes));
            play(&stores, 2 * half - 2, bytes, [60_000, 140_000]);
            for time in [3_000_000, 60_000, 60_000].repeat(40 * half as usize) {
                assert_eq!(play(&stores, 1, bytes, [time, 140_000]), 0);
            }
        }
    }

    #[test]
    fn calls_before_a_way_has_settled_are_not_counted() {
        for bytes in SIZES {
            let (stores, half) = (Stores::default(), half(bytes));
            let unsettled = half - half / 2;
            for times in [[60_000, 140_000]; 2] {
                play(&stores, unsettled, bytes, [9_000_000, 9_000_000]);
                play(&stores, half - unsettled, bytes, times);
            }
            assert_eq!(play(&stores, 10 * half, bytes, [60_000, 140_000]), 0);
        }
    }

    #[test]
    fn ranks_with_other_measures_still_try_alike() {
        let bytes = SIZES[0];
        let (one, other, half) = (Stores::default(), Stores::default(), half(bytes));
        for call in 0..3 * half * PERIOD {
            let ways = [one.next(bytes), other.next(bytes)];
            assert_eq!(ways[0].trial, ways[1].trial);
            if call % (half * PERIOD) < 2 * half {
                assert_eq!(ways[0], ways[1]);
            } else {
                assert_ne!(ways[0].past, ways[1].past);
            }
            one.took(ways[0], Duration::from_nanos(if ways[0].past { 900 } else { 500 }));
            other.took(ways[1], Duration::from_nanos(if ways[1].past { 500 } else { 900 }));
        }
    }

    #[test]
    fn short_calls_are_never_timed() {
        let stores = Stores::default();
        assert!((0..2000).all(|_| stores.next(LONG - 1) == Way { past: false, timed: false, trial: Trial::No }));
    }
}
