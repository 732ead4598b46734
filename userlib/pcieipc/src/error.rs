// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a collective can answer instead of a sum.
//!
//! Every error names who and what, and its text ends with what to do. A call either returns the right result or one of
//! these; it never hangs.

use std::{sync::Arc, time::Duration};

/// A rank of a group, counted from zero.
pub type Rank = usize;

/// An endpoint as errors name it: its module-wide id and the generation that the caller knew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EndpointRef {
    /// The id that the module gave to the endpoint; never reused.
    pub id: u32,
    /// The life of the endpoint that the caller was attached to.
    pub generation: u64,
}

impl std::fmt::Display for EndpointRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "endpoint {} (generation {})", self.id, self.generation)
    }
}

/// The library's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a collective, a group or the module answered instead of success. All calls that end for the same reason get a copy.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The deadline passed while the named rank was still alive.
    #[error(
        "timeout: rank {rank} waited {waited:?} for rank {peer} in {what}; raise the deadline or look at what rank {peer} is doing"
    )]
    Timeout {
        /// Who waited.
        rank: Rank,
        /// For whom.
        peer: Rank,
        /// In which step.
        what: &'static str,
        /// How long.
        waited: Duration,
    },
    /// The peer's process has ended.
    #[error(
        "rank {peer} died (seen by rank {rank} in {what}); call shrink to go on without it or recover to wait for its replacement"
    )]
    PeerDied {
        /// Who saw it.
        rank: Rank,
        /// Who died.
        peer: Rank,
        /// In which step.
        what: &'static str,
    },
    /// The endpoint of a rank is in error recovery.
    #[error("{endpoint} of rank {peer} is recovering from a PCIe error; wait for LIVE, then call recover")]
    EndpointRecovering {
        /// Whose endpoint.
        peer: Rank,
        /// Which one.
        endpoint: EndpointRef,
    },
    /// The endpoint of a rank was removed, unbound or is dead.
    #[error("{endpoint} of rank {peer} is gone; call shrink to go on without it, or bring it back and call recover")]
    EndpointGone {
        /// Whose endpoint.
        peer: Rank,
        /// Which one.
        endpoint: EndpointRef,
    },
    /// A link trained below what it was at start, and the caller asked to treat that as an error.
    #[error("the link of {endpoint} of rank {peer} is degraded: {now}, was {before}; run `pcieipc doctor`")]
    LinkDegraded {
        /// Whose endpoint.
        peer: Rank,
        /// Which one.
        endpoint: EndpointRef,
        /// Link before.
        before: String,
        /// Link now.
        now: String,
    },
    /// Ranks disagree on size, type, operation or configuration.
    #[error(
        "rank {peer} disagrees with rank {rank} on {what}: {theirs} there, {ours} here; make all ranks call with the same arguments"
    )]
    Mismatch {
        /// Who saw it.
        rank: Rank,
        /// With whom.
        peer: Rank,
        /// On what.
        what: &'static str,
        /// The value here.
        ours: String,
        /// The value there.
        theirs: String,
    },
    /// A record or an index from a peer broke the ring protocol.
    #[error("corrupt: {what} from rank {peer} (seen by rank {rank}); the data of this call must not be used")]
    Corrupt {
        /// Who saw it.
        rank: Rank,
        /// From whom it came.
        peer: Rank,
        /// What was wrong.
        what: String,
    },
    /// Somebody called abort.
    #[error("aborted by rank {by}: {why}")]
    Aborted {
        /// Who called abort.
        by: Rank,
        /// The reason given.
        why: String,
    },
    /// The arguments of the call can not be served.
    #[error("bad argument: {0}")]
    Argument(String),
    /// The group could not meet.
    #[error("the group could not meet: {0}")]
    Meeting(String),
    /// The module refused a call; the text says what to do.
    #[error(transparent)]
    Device(#[from] crate::device::DeviceError),
    /// A system call failed.
    #[error("{call}: {source}; {hint}")]
    System {
        /// The call that failed.
        call: &'static str,
        /// What the user can do.
        hint: String,
        /// The system's answer.
        source: Arc<std::io::Error>,
    },
}
