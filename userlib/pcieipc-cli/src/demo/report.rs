// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the demo found, as `report.json` holds it.

use serde::Serialize;

use super::{Node, story::Span};
use crate::tally::Row;

/// The whole report. Times are seconds; those on the time line count from the first rank's start.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// How many ranks began.
    pub ranks: usize,
    /// Bytes of gradients of one rank.
    pub bytes: usize,
    /// Wrong elements over all ranks, before and after the loss.
    pub wrong: u64,
    /// Doorbells that the ranks rang.
    pub doorbells: u64,
    /// Interrupts that their endpoints raised.
    pub interrupts: u64,
    /// Times that a rank slept and was woken.
    pub wakeups: u64,
    /// `kmod` or `shm`.
    pub transport: &'static str,
    /// Why this transport.
    pub why: String,
    /// The running kernel.
    pub kernel: String,
    /// What was done to the group, and what each survivor was told.
    pub fault: Loss,
    /// How many ranks went on.
    pub survivors: usize,
    /// Bytes that the endpoints' own engines moved.
    pub dma_bytes: u64,
    /// From the first rank's start to the last report.
    pub seconds: f64,
    /// The reduce of all ranks, tensor by tensor.
    pub tensors: Vec<Row>,
    /// The reduce of the survivors, tensor by tensor.
    pub after: Vec<Row>,
    /// What each rank did when.
    pub timeline: Vec<Span>,
    /// What the module counted at each endpoint that is left; empty for shared memory.
    pub endpoints: Vec<EndpointCount>,
    /// The endpoints and the ports above them; empty for shared memory.
    pub tree: Vec<Node>,
}

/// What the module counted at one endpoint during the run, beside what its rank counted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EndpointCount {
    /// Whose it is.
    pub rank: usize,
    /// Its PCI address.
    pub address: String,
    /// Bytes that its engine moved, by the module's count.
    pub dma_bytes: u64,
    /// Bytes that the rank had it move.
    pub asked_bytes: u64,
    /// Interrupts, by the module's count.
    pub interrupts: u64,
}

/// The loss of a rank.
#[derive(Debug, Clone, Serialize)]
pub struct Loss {
    /// `endpoint removed` or `process killed`.
    pub kind: &'static str,
    /// Whose.
    pub rank: usize,
    /// The endpoint's PCI address, where there is one.
    pub endpoint: Option<String>,
    /// When, on the time line.
    pub at: f64,
    /// The longest that a survivor may take to be told.
    pub bound: f64,
    /// What each survivor was told.
    pub errors: Vec<SurvivorError>,
}

/// A survivor's typed error.
#[derive(Debug, Clone, Serialize)]
pub struct SurvivorError {
    /// Who.
    pub rank: usize,
    /// The error's name.
    pub kind: String,
    /// Its text.
    pub text: String,
    /// Seconds between the fault and the return of the interrupted call.
    pub after: f64,
}
