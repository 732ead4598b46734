// SPDX-License-Identifier: MIT OR Apache-2.0
//! What happens, and to whom: a pure function of the seed.

use serde::{Deserialize, Serialize};

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A burst of correctable errors.
    Correctable,
    /// A non-fatal error: recovery without a reset of the link.
    NonFatal,
    /// A fatal error: the link is reset.
    Fatal,
    /// A fatal error whose endpoint dies in the reset: the kernel gives up after a minute.
    FailedRecovery,
    /// The function is removed through sysfs, and the bus rescanned.
    RemoveRescan,
    /// The driver is unbound and bound again.
    UnbindBind,
    /// A function-level reset.
    FunctionReset,
    /// The endpoint reads all-ones, drops writes and stops its engine; later it is removed, powered and found again.
    Death,
    /// The endpoint's registers answer, but it raises no interrupt and starts no copy; later it returns as after death.
    Silence,
    /// An `edu` card beside the ranks' endpoints is unplugged by pciehp and plugged in again.
    HotUnplug,
    /// Doorbells that raise no interrupt.
    DoorbellDrop,
    /// Doorbells that raise it late.
    DoorbellDelay,
    /// Doorbells that raise it several times.
    DoorbellRepeat,
    /// An endpoint's engine flips bits of what it copies, or memory of what it holds (checked mode).
    Corruption,
    /// A link trains to a worse speed and width, and back.
    LinkDowngrade,
    /// SIGKILL of a rank.
    Kill,
    /// SIGSTOP of a rank for longer than the deadline, then SIGCONT.
    Stop,
    /// SIGSTOP of a rank for less than the deadline.
    ShortStop,
    /// A rank forks, and starts another program.
    ForkExec,
    /// Another process takes nearly all memory.
    MemoryPressure,
}

impl Kind {
    /// All, in the order of reports.
    pub const ALL: [Kind; 20] = [
        Kind::Correctable,
        Kind::NonFatal,
        Kind::Fatal,
        Kind::FailedRecovery,
        Kind::RemoveRescan,
        Kind::UnbindBind,
        Kind::FunctionReset,
        Kind::Death,
        Kind::Silence,
        Kind::HotUnplug,
        Kind::DoorbellDrop,
        Kind::DoorbellDelay,
        Kind::DoorbellRepeat,
        Kind::Corruption,
        Kind::LinkDowngrade,
        Kind::Kill,
        Kind::Stop,
        Kind::ShortStop,
        Kind::ForkExec,
        Kind::MemoryPressure,
    ];

    /// As reports and the command line write it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Correctable => "correctable",
            Kind::NonFatal => "non-fatal",
            Kind::Fatal => "fatal",
            Kind::FailedRecovery => "failed-recovery",
            Kind::RemoveRescan => "remove-rescan",
            Kind::UnbindBind => "unbind-bind",
            Kind::FunctionReset => "function-reset",
            Kind::Death => "death",
            Kind::Silence => "silence",
            Kind::HotUnplug => "hot-unplug",
            Kind::DoorbellDrop => "doorbell-drop",
            Kind::DoorbellDelay => "doorbell-delay",
            Kind::DoorbellRepeat => "doorbell-repeat",
            Kind::Corruption => "corruption",
            Kind::LinkDowngrade => "link-downgrade",
            Kind::Kill => "kill",
            Kind::Stop => "stop",
            Kind::ShortStop => "short-stop",
            Kind::ForkExec => "fork-exec",
            Kind::MemoryPressure => "memory-pressure",
        }
    }

    /// The kind with this name.
    pub fn from_name(name: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether it happens to an endpoint, so that a group over shared memory knows no such thing.
    pub fn needs_endpoints(self) -> bool {
        !matches!(self, Kind::Corruption | Kind::Kill | Kind::Stop | Kind::ShortStop | Kind::ForkExec | Kind::MemoryPressure)
    }
}

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// From 0.
    pub number: usize,
    /// What.
    pub kind: Kind,
    /// The rank whose process or endpoint it happens to.
    pub victim: usize,
    /// Whether a collective is in flight when it happens; otherwise all ranks are between two.
    pub in_flight: bool,
    /// How hard or how long, 0 to 999; what that means is the kind's.
    pub amount: u32,
}

/// A small generator (SplitMix64): the same numbers for the same seed, everywhere and always.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `limit`, which is not 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.draw() % limit.max(1) as u64) as usize
    }
}

/// `faults` faults among `ranks` ranks. A kind that is listed twice has two shares; each share is four fifths of an equal part at
/// least, and the rest is drawn. Failed recoveries take a minute each, so there are exactly as many as asked for.
pub fn plan(seed: u64, faults: usize, ranks: usize, kinds: &[Kind], failed_recoveries: usize) -> Vec<Fault> {
    let mut random = Random::new(seed);
    let slow = if kinds.contains(&Kind::FailedRecovery) { failed_recoveries.min(faults) } else { 0 };
    let shares: Vec<Kind> = kinds.iter().copied().filter(|kind| *kind != Kind::FailedRecovery).collect();
    let mut drawn = vec![Kind::FailedRecovery; slow];
    if !shares.is_empty() {
        let rest = faults - slow;
        // A run that is too short for four fifths gives each kind an equal part.
        let least = if rest >= 5 * shares.len() { rest * 4 / (5 * shares.len()) } else { rest / shares.len() };
        for kind in &shares {
            drawn.extend(std::iter::repeat_n(*kind, least));
        }
        while drawn.len() < faults {
            drawn.push(shares[random.below(shares.len())]);
        }
    }
    for last in (1..drawn.len()).rev() {
        drawn.swap(last, random.below(last + 1));
    }
    // Of each kind every second one, the first included, meets a collective in flight.
    let mut seen = [0usize; Kind::ALL.len()];
    let mut faults = Vec::with_capacity(drawn.len());
    for (number, kind) in drawn.into_iter().enumerate() {
        let place = Kind::ALL.iter().position(|one| *one == kind).unwrap_or(0);
        seen[place] += 1;
        let (victim, amount) = (random.below(ranks), random.below(1000) as u32);
        faults.push(Fault { number, kind, victim, in_flight: seen[place] % 2 == 1, amount });
    }
    faults
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counted(plan: &[Fault]) -> std::collections::BTreeMap<Kind, (usize, usize)> {
        let mut counts = std::collections::BTreeMap::new();
        for fault in plan {
            let count: &mut (usize, usize) = counts.entry(fault.kind).or_default();
            count.0 += 1;
            count.1 += usize::from(fault.in_flight);
        }
        counts
    }

    proptest! {
        #[test]
        fn the_seed_repeats_the_schedule_and_the_length_is_as_asked(seed: u64, faults in 0usize..400, ranks in 1usize..9) {
            let one = plan(seed, faults, ranks, &Kind::ALL, 2);
            prop_assert_eq!(one.len(), faults);
            prop_assert!(one.iter().enumerate().all(|(n, f)| f.number == n && f.victim < ranks && f.amount < 1000));
            prop_assert_eq!(one, plan(seed, faults, ranks, &Kind::ALL, 2));
        }

        #[test]
        fn each_kind_is_at_least_three_percent_and_half_of_it_in_flight(seed: u64, faults in 200usize..1200) {
            let counts = counted(&plan(seed, faults, 4, &Kind::ALL, 5));
            for kind in Kind::ALL {
                let (count, in_flight) = counts.get(&kind).copied().unwrap_or_default();
                if kind == Kind::FailedRecovery {
                    prop_assert_eq!(count, 5);
                } else {
                    prop_assert!(100 * count >= 3 * faults, "{} of {faults} are {}", count, kind.name());
                    prop_assert!(2 * in_flight >= count, "{in_flight} of {count} in flight");
                }
            }
        }

        #[test]
        fn a_thousand_faults_hold_forty_of_every_kind(seed: u64) {
            let counts = counted(&plan(seed, 1000, 8, &Kind::ALL, 5));
            prop_assert!(counts.iter().all(|(kind, (count, _))| *kind == Kind::FailedRecovery || *count >= 40), "{counts:?}");
        }

        #[test]
        fn a_short_run_still_holds_every_kind(seed: u64) {
            let kinds: Vec<Kind> = Kind::ALL.into_iter().filter(|kind| *kind != Kind::FailedRecovery).collect();
            prop_assert_eq!(counted(&plan(seed, 40, 4, &kinds, 0)).len(), 19);
        }
    }

    #[test]
    fn another_seed_is_another_schedule() {
        assert_ne!(plan(1, 100, 4, &Kind::ALL, 0), plan(2, 100, 4, &Kind::ALL, 0));
    }

    #[test]
    fn names_are_read_back() {
        assert!(Kind::ALL.into_iter().all(|kind| Kind::from_name(kind.name()) == Some(kind)));
        assert_eq!(Kind::from_name("none"), None);
    }
}
