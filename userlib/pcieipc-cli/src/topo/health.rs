// SPDX-License-Identifier: MIT OR Apache-2.0
//! How well the link above a function is, as a colour.

use pcieipc::topology::{Reach, Topology};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Health {
    /// At the best that both ends can do.
    Best,
    /// Slower, all lanes there: an idle card does that too.
    Slower,
    /// Lanes are missing, or errors were counted that lost data.
    Hurt,
    /// Nobody answers, or a quarter of the lanes or less.
    Broken,
    /// There is no link, or nothing is known.
    Unknown,
}

impl Health {
    pub const ALL: [Self; 5] = [Self::Best, Self::Slower, Self::Hurt, Self::Broken, Self::Unknown];

    pub fn of(tree: &Topology, index: usize) -> Self {
        let Some(function) = tree.functions.get(index) else { return Self::Unknown };
        if function.reach == Reach::AllOnes || function.capabilities.dpc.is_some_and(|d| d.triggered) {
            return Self::Broken;
        }
        let counted = |severity| function.aer.as_ref().is_some_and(|a| a.total(severity) > 0);
        let lost = counted(pcieipc::topology::aer::Severity::NonFatal) || counted(pcieipc::topology::aer::Severity::Fatal);
        let Some((now, best)) = tree.hop(index).and_then(|h| Some((h.now?, h.best?))) else { return Self::Unknown };
        match () {
            () if now.width * 4 <= best.width => Self::Broken,
            () if now.width < best.width || lost => Self::Hurt,
            () if now.speed < best.speed => Self::Slower,
            () => Self::Best,
        }
    }

    pub fn colour(self) -> &'static str {
        match self {
            Self::Best => "#2e8540",
            Self::Slower => "#b8860b",
            Self::Hurt => "#d2691e",
            Self::Broken => "#b22222",
            Self::Unknown => "#808080",
        }
    }

    pub fn meaning(self) -> &'static str {
        match self {
            Self::Best => "link at its best",
            Self::Slower => "slower than possible (idle cards, too)",
            Self::Hurt => "lanes missing or data lost",
            Self::Broken => "a quarter of the lanes or less, or no answer",
            Self::Unknown => "no link, or not known",
        }
    }
}
