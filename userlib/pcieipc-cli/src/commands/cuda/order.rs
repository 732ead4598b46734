// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a bench or a check asks of its workers, one JSON object a line, and what they answer.

use serde::{Deserialize, Serialize};

/// One thing to do, by all workers of a side at once.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Order {
    /// Prepare and warm up calls of this size.
    Prepare(Shape),
    /// Tell what a tuner may try for a tensor of this size.
    Candidates { bytes: u64 },
    /// Time what was prepared.
    Measure,
    /// Time calls of this size alone, matrix products alone, and so many replays beside products, if any.
    Beside { shape: Shape, replays: u32 },
    /// Compare results with the processor's, bit for bit.
    Check(Trial),
    /// End in order.
    Quit,
}

/// Calls to time.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Shape {
    /// Of one rank's tensor.
    pub bytes: u64,
    /// Element type, by its name.
    pub kind: String,
    /// As replays of a graph.
    pub graph: bool,
    /// Into the input.
    pub in_place: bool,
    /// Calls in a graph, and how often it is replayed.
    pub calls: u32,
    /// As said.
    pub replays: u32,
    /// Which of the tuner's candidates; otherwise what the library chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub candidate: Option<usize>,
}

/// What to compare.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trial {
    /// Lengths from one element to `bytes` in odd steps.
    Lengths { bytes: u64, kind: String, op: String, shift: u64 },
    /// Calls back to back with fresh data, ranks delayed at random.
    Many { calls: u32, bytes: u64, kind: String },
    /// Captured and replayed, with a second graph and other streams between.
    Graphs { bytes: u64 },
    /// One tensor.
    One { bytes: u64, kind: String, in_place: bool },
    /// Registered memory of a kind (`plain`, `pieces` or `pool`): calls on it, also in a graph, until it is no longer registered; or why not.
    Registered { bytes: u64, kind: String, memory: String, in_place: bool },
    /// Two calls of kernels of which one rank's stores a wrong word: short ones.
    Spoiled,
    /// Ranks call at different places of registered memory.
    Elsewhere,
    /// The steps of one call, of a build of the kernels that traces, against the plan; writes them to `file`, followed by the rank.
    Steps {
        bytes: u64,
        kind: String,
        op: String,
        in_place: bool,
        candidate: Option<usize>,
        registered: bool,
        file: std::path::PathBuf,
    },
    /// This rank ends its process in the middle of calls of `bytes`; the others tell what they got.
    Die { rank: usize, bytes: u64 },
    /// Ranks call with different lengths.
    Differ,
    /// This rank aborts while the others wait for it.
    Abort { rank: usize },
    /// One rank does not call at all; deadline in milliseconds.
    Absent { rank: usize, deadline: u64, bytes: u64 },
    /// Two streams at once, not ordered.
    AtOnce,
    /// A fresh communicator of the same group and process after a failure.
    Rebuild,
}

/// Microseconds of a call and of a matrix product, each alone and both at once.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Beside {
    pub alone: f64,
    pub beside: f64,
    pub product_alone: f64,
    pub product_beside: f64,
}

/// A worker's answer.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Answer {
    /// Microseconds a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us: Option<f64>,
    /// What was measured beside matrix products.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beside: Option<Beside>,
    /// What a tuner may try.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub candidates: Vec<String>,
    /// How many results were compared, and how many were wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compared: Option<u64>,
    /// As said.
    #[serde(default)]
    pub wrong: u64,
    /// What to show.
    #[serde(default)]
    pub text: String,
    /// Why it was not done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
