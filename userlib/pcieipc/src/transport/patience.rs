// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long a rank looks at a ring before it sleeps.

/// Pauses of a processor that a rank has for itself, about 50 µs.
const MOST_SPINS: u32 = 1000;
/// Looks without a pause before them: a short message comes within them, and a pause would be a good part of its time.
const KEEN: u32 = 64;
/// Looks between two looks at peers and endpoints.
pub const LOOKS_BETWEEN_CHECKS: u32 = 32;

/// Spins first, then lets others run, then sleeps. Learns: waits that end while spinning raise the bound for the next, waits
/// that end asleep lower it, so that a group that waits for long does not burn its processors.
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
    /// For a group of `ranks` on the processors that this process may use.
    pub fn new(ranks: usize) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        // When ranks share processors, what a rank waits for often can only happen after it has let go.
        let (most_spins, yields) = if ranks <= processors { (MOST_SPINS, 4) } else { (64, 16) };
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
        self.spins = (self.spins * 2).clamp(16, self.most_spins);
    }

    /// The wait ended asleep.
    pub fn was_long(&mut self) {
        self.spins = (self.spins / 2).max(16);
    }
}

#[cfg(test)]
mod tests {
    use super::{Patience, Pause};

    #[test]
    fn every_wait_ends_asleep_and_long_waits_shorten_the_spinning() {
        let mut patience = Patience::new(2);
        let looks = |p: &Patience| (0..).find(|n| p.after(*n) == Pause::Sleep).unwrap();
        let first = looks(&patience);
        for _ in 0..20 {
            patience.was_long();
        }
        let last = looks(&patience);
        assert!(last < first && last >= 16, "{first} then {last}");
        for _ in 0..20 {
            patience.was_short();
        }
        assert_eq!(looks(&patience), first);
    }
}
