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
        "timeout: rank {rank} waited {waited:?} for rank {peer}{} in {what}; raise the deadline or look at what rank {peer} is doing",
        with(.endpoint)
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
        /// The peer's endpoint, if it has one.
        endpoint: Option<EndpointRef>,
    },
    /// The peer's process has ended.
    #[error(
        "rank {peer}{} died (seen by rank {rank} in {what}); call shrink to go on without it or recover to wait for its replacement",
        with(.endpoint)
    )]
    PeerDied {
        /// Who saw it.
        rank: Rank,
        /// Who died.
        peer: Rank,
        /// In which step.
        what: &'static str,
        /// The endpoint that it had, if any.
        endpoint: Option<EndpointRef>,
    },
    /// The endpoint of a rank is in error recovery.
    #[error("{endpoint} of rank {peer} is recovering from a PCIe error; wait for LIVE, then call recover")]
    EndpointRecovering {
        /// Whose endpoint.
        peer: Rank,
        /// Which one.
        endpoint: EndpointRef,
    },
    /// The endpoint of a rank was removed, unbound, is dead, or does not do what it is told any more.
    #[error(
        "{endpoint} of rank {peer} is gone or does nothing any more; call shrink to go on without it, or bring it back (`pcieipc heal`) \
         and call recover"
    )]
    EndpointGone {
        /// Whose endpoint.
        peer: Rank,
        /// Which one.
        endpoint: EndpointRef,
    },
    /// A link trained below what it was at start, and the caller asked to treat that as an error.
    #[error(
        "the link of {endpoint} of rank {peer} is degraded: {now}, was {before}; `pcieipc doctor` says where, and recover goes on with the \
         link as it is"
    )]
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
        "rank {peer}{} disagrees with rank {rank} on {what}: {theirs} there, {ours} here; make all ranks call with the same arguments",
        with(.endpoint)
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
        /// The endpoint of the rank that disagrees, if it has one.
        endpoint: Option<EndpointRef>,
    },
    /// A record or an index from a peer broke the ring protocol.
    #[error(
        "corrupt: {what} from rank {peer}{} (seen by rank {rank}); do not use the data of this call, and shrink or recover the group",
        with(.endpoint)
    )]
    Corrupt {
        /// Who saw it.
        rank: Rank,
        /// From whom it came.
        peer: Rank,
        /// What was wrong.
        what: String,
        /// The endpoint of the rank that it came from, if it has one.
        endpoint: Option<EndpointRef>,
    },
    /// Somebody called abort.
    #[error("aborted by rank {by}{}: {why}; shrink or recover the group to go on", with(.endpoint))]
    Aborted {
        /// Who called abort.
        by: Rank,
        /// The reason given.
        why: String,
        /// The endpoint of the rank that called it, if it has one.
        endpoint: Option<EndpointRef>,
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

/// How an error names the endpoint of a rank that has one.
fn with(endpoint: &Option<EndpointRef>) -> String {
    endpoint.map_or(String::new(), |endpoint| format!(" with {endpoint}"))
}

impl Error {
    /// The rank that the error is about, where it is about one.
    ///
    /// ```
    /// let error = pcieipc::Error::Aborted { by: 3, why: "a watchdog".into(), endpoint: None };
    /// assert_eq!(error.peer(), Some(3));
    /// ```
    pub fn peer(&self) -> Option<Rank> {
        match self {
            Self::Timeout { peer, .. }
            | Self::PeerDied { peer, .. }
            | Self::EndpointRecovering { peer, .. }
            | Self::EndpointGone { peer, .. }
            | Self::LinkDegraded { peer, .. }
            | Self::Mismatch { peer, .. }
            | Self::Corrupt { peer, .. } => Some(*peer),
            Self::Aborted { by, .. } => Some(*by),
            _ => None,
        }
    }

    /// The endpoint that the error is about, in the life that was in use: that of [`Error::peer`], where it has one.
    ///
    /// ```
    /// use pcieipc::error::EndpointRef;
    ///
    /// let endpoint = EndpointRef { id: 5, generation: 12 };
    /// let error = pcieipc::Error::PeerDied { rank: 0, peer: 2, what: "an example", endpoint: Some(endpoint) };
    /// assert_eq!(error.endpoint(), Some(endpoint));
    /// ```
    pub fn endpoint(&self) -> Option<EndpointRef> {
        match self {
            Self::EndpointRecovering { endpoint, .. }
            | Self::EndpointGone { endpoint, .. }
            | Self::LinkDegraded { endpoint, .. } => Some(*endpoint),
            Self::Timeout { endpoint, .. }
            | Self::PeerDied { endpoint, .. }
            | Self::Mismatch { endpoint, .. }
            | Self::Corrupt { endpoint, .. }
            | Self::Aborted { endpoint, .. } => *endpoint,
            _ => None,
        }
    }

    /// Names the endpoint of the rank that the error is about, where the error does not know it yet.
    pub(crate) fn naming(mut self, endpoint_of: impl Fn(Rank) -> Option<EndpointRef>) -> Self {
        let peer = self.peer();
        if let Self::Timeout { endpoint, .. }
        | Self::PeerDied { endpoint, .. }
        | Self::Mismatch { endpoint, .. }
        | Self::Corrupt { endpoint, .. }
        | Self::Aborted { endpoint, .. } = &mut self
        {
            *endpoint = endpoint.or_else(|| endpoint_of(peer?));
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_of_a_call_names_rank_endpoint_generation_and_what_to_do() {
        let (rank, peer, what, endpoint) = (0, 2, "waiting", EndpointRef { id: 5, generation: 12 });
        let text = || "as it was".to_owned();
        let errors = [
            (Error::Timeout { rank, peer, what, waited: Duration::ZERO, endpoint: None }, "raise the deadline"),
            (Error::PeerDied { rank, peer, what, endpoint: None }, "call shrink"),
            (Error::EndpointRecovering { peer, endpoint }, "call recover"),
            (Error::EndpointGone { peer, endpoint }, "call shrink"),
            (Error::LinkDegraded { peer, endpoint, before: text(), now: text() }, "pcieipc doctor"),
            (Error::Mismatch { rank, peer, what, ours: text(), theirs: text(), endpoint: None }, "the same arguments"),
            (Error::Corrupt { rank, peer, what: text(), endpoint: None }, "do not use the data"),
            (Error::Aborted { by: peer, why: text(), endpoint: None }, "shrink or recover"),
        ];
        for (bare, remedy) in errors {
            if bare.endpoint().is_none() {
                assert!(!bare.to_string().contains("endpoint"), "{bare}");
            }
            let known = bare.naming(|rank| (rank == peer).then_some(endpoint));
            assert_eq!((known.peer(), known.endpoint()), (Some(peer), Some(endpoint)), "{known}");
            let text = known.to_string();
            for words in ["rank 2", "endpoint 5 (generation 12)", remedy] {
                assert!(text.contains(words), "{words}: {text}");
            }
        }
    }
}
