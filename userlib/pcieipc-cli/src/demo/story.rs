// SPDX-License-Identifier: MIT OR Apache-2.0
//! The run as it is heard: who did what when, when to strike, and whether it ended as it must.

use serde::Serialize;

use super::{Loss, SurvivorError};
use crate::{
    gradients::Tensor,
    ranks::{Lost, Report},
    tally::Tally,
};

/// What a rank was doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// Coming together.
    Meet,
    /// Reducing a tensor.
    Reduce,
    /// Reducing everything as one message, over and over.
    Round,
    /// Inside the call that the loss broke.
    Broken,
    /// Becoming a group without the lost rank.
    Shrink,
    /// Reducing a tensor among the survivors.
    After,
}

/// One thing that one rank did.
#[derive(Debug, Clone, Serialize)]
pub struct Span {
    /// Who.
    pub rank: usize,
    /// What.
    pub what: What,
    /// Seconds since the first rank's start.
    pub start: f64,
    /// Seconds since the first rank's start.
    pub end: f64,
    /// The tensor or the error.
    pub label: String,
}

/// Rounds that every rank must have done before the loss, so that it falls into the middle of reducing.
const ROUNDS_BEFORE: u64 = 2;

/// Collects reports of all ranks.
#[derive(Debug)]
pub struct Story {
    /// Tensors of all ranks.
    pub before: Tally,
    /// Tensors of the survivors.
    pub after: Tally,
    names: Vec<String>,
    victim: usize,
    rounds: Vec<u64>,
    spans: Vec<(usize, What, u64, u64, String)>,
    lost: Vec<Option<Lost>>,
    members: Vec<Option<Vec<usize>>>,
}

impl Story {
    /// Of `ranks` ranks that lose `victim`.
    pub fn new(ranks: usize, victim: usize, tensors: &[Tensor]) -> Self {
        Self {
            before: Tally::new(tensors),
            after: Tally::new(tensors),
            names: tensors.iter().map(|tensor| tensor.name.clone()).collect(),
            victim,
            rounds: vec![0; ranks],
            spans: Vec::new(),
            lost: vec![None; ranks],
            members: vec![None; ranks],
        }
    }

    /// Takes one report.
    pub fn add(&mut self, rank: usize, report: Report) {
        match report {
            Report::Met { start_ns, at_ns } => self.spans.push((rank, What::Meet, start_ns, at_ns, "meet".into())),
            Report::Tensor(done) => {
                let what = if done.shrunk { What::After } else { What::Reduce };
                let name = self.names.get(done.index).cloned().unwrap_or_default();
                self.spans.push((rank, what, done.start_ns, done.end_ns, name));
                if done.shrunk { self.after.add(done) } else { self.before.add(done) }
            }
            Report::Round { number, start_ns, end_ns } => {
                if let Some(rounds) = self.rounds.get_mut(rank) {
                    *rounds = number;
                }
                self.spans.push((rank, What::Round, start_ns, end_ns, format!("round {number}")));
            }
            Report::Lost(lost) => {
                self.spans.push((rank, What::Broken, lost.start_ns, lost.at_ns, lost.text.clone()));
                if let Some(slot) = self.lost.get_mut(rank) {
                    *slot = Some(lost);
                }
            }
            Report::Shrunk { start_ns, at_ns, members } => {
                self.spans.push((rank, What::Shrink, start_ns, at_ns, format!("shrink to {} ranks", members.len())));
                if let Some(slot) = self.members.get_mut(rank) {
                    *slot = Some(members);
                }
            }
            Report::Progress { .. } | Report::Failed { .. } | Report::Done { .. } => {}
        }
    }

    /// Whether every rank is in the middle of reducing.
    pub fn ripe(&self) -> bool {
        self.rounds.iter().all(|&rounds| rounds >= ROUNDS_BEFORE)
    }

    /// When the first rank started, the zero of the time line.
    fn zero(&self) -> u64 {
        self.spans.iter().map(|(_, _, start, _, _)| *start).min().unwrap_or(0)
    }

    /// A clock reading on the time line.
    pub fn on_line(&self, ns: u64) -> f64 {
        ns.saturating_sub(self.zero()) as f64 / 1e9
    }

    /// The time line.
    pub fn timeline(&self) -> Vec<Span> {
        let span = |(rank, what, start, end, label): &(usize, What, u64, u64, String)| Span {
            rank: *rank,
            what: *what,
            start: self.on_line(*start),
            end: self.on_line(*end),
            label: label.clone(),
        };
        let mut spans: Vec<Span> = self.spans.iter().map(span).collect();
        spans.sort_by(|one, other| one.rank.cmp(&other.rank).then(one.start.total_cmp(&other.start)));
        spans
    }

    /// Seconds from the first start to the last end.
    pub fn seconds(&self) -> f64 {
        self.on_line(self.spans.iter().map(|(_, _, _, end, _)| *end).max().unwrap_or(0))
    }

    fn survivors(&self) -> impl Iterator<Item = usize> {
        let victim = self.victim;
        (0..self.rounds.len()).filter(move |&rank| rank != victim)
    }

    /// What the survivors were told, after the fault at `at_ns`.
    pub fn loss(&self, kind: &'static str, endpoint: Option<String>, at_ns: u64, bound: f64) -> Loss {
        let told = |rank: usize| {
            self.lost.get(rank)?.as_ref().map(|lost| SurvivorError {
                rank,
                kind: lost.kind.clone(),
                text: lost.text.clone(),
                after: lost.at_ns.saturating_sub(at_ns) as f64 / 1e9,
            })
        };
        Loss {
            kind,
            rank: self.victim,
            endpoint,
            at: self.on_line(at_ns),
            bound,
            errors: self.survivors().filter_map(told).collect(),
        }
    }

    /// What did not end as it must; empty when all is well.
    pub fn complaints(&self, loss: &Loss, at_ns: u64) -> Vec<String> {
        let mut complaints = Vec::new();
        let expected: Vec<usize> = self.survivors().collect();
        for rank in self.survivors() {
            match self.lost.get(rank).and_then(Option::as_ref) {
                None => complaints.push(format!("rank {rank} was never told of the loss")),
                Some(lost) if lost.at_ns < at_ns => {
                    complaints.push(format!("rank {rank} failed before the fault: {}", lost.text))
                }
                Some(lost) if !matches!(lost.kind.as_str(), "EndpointGone" | "PeerDied") => {
                    complaints.push(format!("rank {rank} was told {}: {}", lost.kind, lost.text));
                }
                Some(_) => {}
            }
            match self.members.get(rank).and_then(Option::as_ref) {
                Some(members) if *members == expected => {}
                other => complaints.push(format!("rank {rank} shrank to {other:?}, not to {expected:?}")),
            }
        }
        for error in loss.errors.iter().filter(|error| error.after > loss.bound) {
            complaints.push(format!("rank {} was told after {:.3} s, the bound is {:.3} s", error.rank, error.after, loss.bound));
        }
        for (when, tally, ranks) in [("before", &self.before, self.rounds.len()), ("after", &self.after, expected.len())] {
            if tally.reports() != self.names.len() * ranks {
                complaints.push(format!(
                    "{} tensors × ranks {when} the loss, not {} × {ranks}",
                    tally.reports(),
                    self.names.len()
                ));
            }
            for row in tally.rows() {
                if row.wrong != Some(0) {
                    complaints.push(format!("{} has {:?} wrong elements {when} the loss", row.tensor, row.wrong));
                }
                if !row.same_bits {
                    complaints.push(format!("the ranks hold different bits of {} {when} the loss", row.tensor));
                }
            }
        }
        complaints
    }
}
