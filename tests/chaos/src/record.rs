// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is known of one fault in the end.

use serde::{Deserialize, Serialize};

use crate::{
    schedule::{Fault, Kind},
    words::Failure,
};

/// What one rank saw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// The error that its call answered, if one did.
    pub failure: Option<Failure>,
    /// It finished rounds after the fault without an error.
    pub held: bool,
    /// Its process ended.
    pub ended: bool,
    /// What it learned that all have learned: whether all were content, and who has failed.
    pub agreed: Option<(bool, Vec<usize>)>,
    /// Members of the group that went on, by this rank.
    pub members: Option<Vec<usize>>,
    /// Why this rank could not shrink.
    pub refused: Option<Failure>,
}

/// One fault, played.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// What was played.
    pub fault: Option<Fault>,
    /// When the run began, to draw against.
    pub run_ns: u64,
    /// When the fault was played.
    pub at_ns: u64,
    /// When the kernel said that the endpoint does not live any more.
    pub hit_ns: Option<u64>,
    /// By rank.
    pub seen: Vec<Seen>,
    /// Whether a collective was in flight.
    pub in_flight: bool,
    /// When the kernel said that the endpoint lives again, if it was away.
    pub live_ns: Option<u64>,
    /// When the survivors were told to shrink.
    pub shrink_ns: Option<u64>,
    /// When the last survivor had compared its first sum after that.
    pub shrunk_ns: Option<u64>,
    /// When the ranks were told to meet again.
    pub meet_ns: Option<u64>,
    /// When the last of them had met.
    pub met_ns: Option<u64>,
    /// When the last of all ranks had compared its first sum after the fault was over.
    pub back_ns: Option<u64>,
    /// Sums that were compared.
    pub compared: u64,
    /// Sums that were wrong.
    pub wrong: u64,
    /// Ranks that did not answer within the bound, and what they did.
    pub hangs: Vec<String>,
    /// What was held after it that had not been held before.
    pub leaks: Vec<String>,
    /// Calls that answered after their deadline, by how much, in nanoseconds.
    pub overruns_ns: Vec<u64>,
    /// What else went otherwise than it must.
    pub complaints: Vec<String>,
    /// What the playing of it said.
    pub notes: Vec<String>,
}

impl Record {
    /// How long until the last rank knew; none when no rank had an error.
    pub fn detected_ns(&self) -> Option<u64> {
        self.detections().map(|(_, ns)| ns).max()
    }

    /// How long until each rank knew, from when the kernel knew where it is about an endpoint. Ranks that were between two calls know
    /// when they call; one that is stopped knows nothing.
    pub fn detections(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let stopped = self.fault.filter(|fault| fault.kind == Kind::Stop).map(|fault| fault.victim);
        self.seen.iter().enumerate().filter(move |(rank, _)| Some(*rank) != stopped).filter_map(|(rank, seen)| {
            let failure = seen.failure.as_ref()?;
            let known = self.hit_ns.unwrap_or(self.at_ns).max(failure.started_ns);
            Some((rank, failure.at_ns.saturating_sub(known)))
        })
    }

    /// How long until all ranks were back at work.
    pub fn recovered_ns(&self) -> Option<u64> {
        self.back_ns.map(|back| back.saturating_sub(self.at_ns))
    }

    /// How long from the endpoint's return (or the order to meet, if that came later) until all ranks were back at work.
    pub fn after_return_ns(&self) -> Option<u64> {
        let (back, live) = (self.back_ns?, self.live_ns?);
        Some(back.saturating_sub(live.max(self.meet_ns.unwrap_or(0))))
    }

    /// How long the ranks then needed to be one group, before the first call.
    pub fn met_within_ns(&self) -> Option<u64> {
        Some(self.met_ns?.saturating_sub(self.meet_ns?.max(self.live_ns.unwrap_or(0))))
    }

    /// How long the survivors needed to go on.
    pub fn shrunk_within_ns(&self) -> Option<u64> {
        Some(self.shrunk_ns?.saturating_sub(self.shrink_ns?))
    }

    /// Whether anything was not as it must be.
    pub fn is_good(&self) -> bool {
        self.wrong == 0 && self.hangs.is_empty() && self.leaks.is_empty() && self.complaints.is_empty()
    }
}
