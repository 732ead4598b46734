// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long a rank looks at a ring before it sleeps.

use std::time::Duration;

use nix::{
    sched::{CpuSet, sched_getaffinity},
    unistd::Pid,
};

use crate::sys::Life;

/// Pauses of a processor that a rank has for itself, about 50 µs; at least so many, however long waits were.
const MOST_SPINS: u32 = 1000;
const LEAST_SPINS: u32 = 16;
/// Pauses where ranks share processors: whom this one waits for may run only when it has let go. 64 of them made an all-reduce of 256 bytes
/// among four ranks on two processors over one and a half times as long.
const CROWDED_SPINS: u32 = 4;
/// Looks without a pause before them: a short message comes within them, and a pause would be a good part of its time.
const KEEN: u32 = 64;
/// A wait that ended asleep, but before this, says little of how long the next one is: much of it was the time that it takes to fall asleep
/// and to be woken. After longer ones 50 µs of looks in vain, a twentieth of this, are too many to go on with.
const WORTH_SLEEP: Duration = Duration::from_millis(1);
/// Looks between two looks at peers and endpoints.
pub const LOOKS_BETWEEN_CHECKS: u32 = 32;

/// Spins first, then lets others run, then sleeps. Learns: long waits lower the bound for the next, so that a group that waits for long does
/// not burn its processors; short ones raise it, also those that ended asleep. Otherwise two ranks that were held up once would go on
/// waking each other, each because the other one slept, where both could look.
#[derive(Debug)]
pub struct Patience {
    most_spins: u32,
    spins: u32,
    yields: u32,
}

/// What to do before the next look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// Nothing: look again at once.
    Look,
    /// A pause of the processor.
    Spin,
    /// Let another process run.
    Yield,
    /// Sleep until woken.
    Sleep,
}

impl Patience {
    /// For a group of `ranks` on so many processors.
    pub fn new(ranks: usize, processors: usize) -> Self {
        let (most_spins, yields) = if ranks <= processors { (MOST_SPINS, 4) } else { (CROWDED_SPINS, 16) };
        Self { most_spins, spins: most_spins, yields }
    }

    /// Whether the ranks share processors.
    pub fn is_crowded(&self) -> bool {
        self.most_spins < MOST_SPINS
    }

    /// What to do after so many looks in vain.
    pub fn after(&self, looks: u32) -> Pause {
        if looks < self.spins.min(KEEN) && !self.is_crowded() {
            Pause::Look
        } else if looks < self.spins {
            Pause::Spin
        } else if looks < self.spins + self.yields {
            Pause::Yield
        } else {
            Pause::Sleep
        }
    }

    /// The wait ended without sleep.
    pub fn was_short(&mut self) {
        self.spins = (self.spins * 2).min(self.most_spins);
    }

    /// The wait ended asleep, after so long. Where ranks share processors the other one runs only while this one sleeps.
    pub fn slept(&mut self, waited: Duration) {
        if waited < WORTH_SLEEP && !self.is_crowded() {
            self.was_short();
        } else {
            self.spins = (self.spins / 2).max(LEAST_SPINS.min(self.most_spins));
        }
    }
}

/// How many processors this process and these may use together: each rank may be bound to one of its own.
pub fn processors<'a>(others: impl Iterator<Item = &'a Life>) -> usize {
    let here = std::thread::available_parallelism().map_or(1, |n| n.get());
    match sched_getaffinity(Pid::from_raw(0)) {
        Ok(own) => together(here, own, others.filter_map(Life::processors)),
        Err(_) => here,
    }
}

fn together(here: usize, own: CpuSet, others: impl Iterator<Item = CpuSet>) -> usize {
    let of =
        |sets: &[CpuSet]| (0..CpuSet::count()).filter(|cpu| sets.iter().any(|set| set.is_set(*cpu).unwrap_or(false))).count();
    // What a control group gives less than that is of time, not of processors.
    if of(&[own]) > here { here } else { of(&std::iter::once(own).chain(others).collect::<Vec<_>>()) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{CpuSet, Patience, Pause, WORTH_SLEEP, together};

    fn set(cpus: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        cpus.iter().for_each(|cpu| set.set(*cpu).unwrap());
        set
    }

    #[test]
    fn ranks_that_are_bound_to_a_processor_each_do_not_share_one() {
        let bound = |cpus: &[&[usize]]| together(cpus[0].len(), set(cpus[0]), cpus[1..].iter().map(|cpus| set(cpus)));
        assert_eq!((bound(&[&[3], &[5]]), bound(&[&[3], &[3]]), bound(&[&[0, 1], &[0, 1]])), (2, 1, 2));
        assert!(!Patience::new(2, bound(&[&[3], &[5]])).is_crowded() && Patience::new(2, bound(&[&[3], &[3]])).is_crowded());
        // A quota of one processor's time on a machine of eight.
        assert_eq!(together(1, set(&[0, 1, 2, 3, 4, 5, 6, 7]), [set(&[8])].into_iter()), 1);
    }

    #[test]
    fn every_wait_ends_asleep_and_long_waits_shorten_the_spinning() {
        let mut patience = Patience::new(2, 2);
        let looks = |p: &Patience| (0..).find(|n| p.after(*n) == Pause::Sleep).unwrap();
        let first = looks(&patience);
        for _ in 0..20 {
            patience.slept(WORTH_SLEEP);
        }
        let last = looks(&patience);
        assert!(last < first && last >= 16, "{first} then {last}");
        for _ in 0..20 {
            patience.was_short();
        }
        assert_eq!(looks(&patience), first);
    }

    #[test]
    fn two_ranks_that_were_held_up_do_not_go_on_waking_each_other() {
        let looks = |p: &Patience| (0..).find(|n| p.after(*n) == Pause::Sleep).unwrap();
        let mut patience = Patience::new(2, 2);
        let first = looks(&patience);
        for _ in 0..20 {
            patience.slept(Duration::from_secs(1));
        }
        assert!(looks(&patience) < first / 10);
        // As long as it takes to wake the other one.
        for _ in 0..20 {
            patience.slept(Duration::from_micros(100));
        }
        assert_eq!(looks(&patience), first);
        let mut crowded = Patience::new(4, 2);
        let first = looks(&crowded);
        for _ in 0..20 {
            crowded.slept(Duration::from_micros(100));
        }
        assert!(looks(&crowded) <= first, "it keeps the other one from its processor");
    }

    #[test]
    fn who_shares_a_processor_lets_others_run_almost_at_once() {
        let mut crowded = Patience::new(4, 2);
        for _ in 0..20 {
            assert!((0..).find(|n| crowded.after(*n) == Pause::Yield).unwrap() <= 4);
            crowded.was_short();
        }
    }
}
