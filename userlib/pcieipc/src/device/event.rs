// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ordered events of endpoints.
#![allow(non_upper_case_globals, reason = "the generated constants are named after their C enumerations")]

use std::time::Duration;

use super::{EndpointId, State};
use crate::abi::*;

/// One event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Counts the events of the session, lost ones included.
    pub sequence: u64,
    /// The endpoint's life when it happened.
    pub generation: u64,
    /// Since the machine started, not counting sleep.
    pub time: Duration,
    /// The endpoint; `None` when it is about none.
    pub endpoint: Option<EndpointId>,
    /// What happened.
    pub kind: EventKind,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// So many events before this one were lost.
    Lost(u64),
    /// The state changed.
    State {
        /// Before.
        from: State,
        /// Now.
        to: State,
    },
    /// An uncorrectable error: 1 non-fatal, 2 fatal, 3 the device is lost.
    Error(u64),
    /// Correctable errors.
    Correctable {
        /// Since the last such event.
        new: u64,
        /// In all.
        total: u64,
    },
    /// The link trained to another speed (code) or width (lanes).
    Link {
        /// Before.
        from: (u8, u8),
        /// Now.
        to: (u8, u8),
    },
    /// An endpoint was bound.
    Added {
        /// Its serial number, 0 for none.
        serial: u64,
        /// The endpoint that it was before, if it returned.
        before: Option<EndpointId>,
    },
    /// An administrator's action ended.
    Admin {
        /// Which (`enum pcieipc_admin_action`).
        action: u64,
        /// 0 or a positive errno.
        errno: u64,
    },
    /// A vector fired too often and was masked.
    Storm(u64),
    /// A kind that this library does not know.
    Other(u32),
}

impl From<&pcieipc_event> for Event {
    fn from(raw: &pcieipc_event) -> Self {
        let link = |word: u64| (word as u8, (word >> 8) as u8);
        let endpoint = |id: u64| u32::try_from(id).ok().filter(|id| *id != 0).map(EndpointId);
        let [a, b, ..] = raw.detail;
        let kind = match raw.kind {
            pcieipc_event_kind_PCIEIPC_EVENT_LOST => EventKind::Lost(a),
            pcieipc_event_kind_PCIEIPC_EVENT_STATE => {
                EventKind::State { from: State::from_code(a as u32), to: State::from_code(b as u32) }
            }
            pcieipc_event_kind_PCIEIPC_EVENT_ERROR => EventKind::Error(a),
            pcieipc_event_kind_PCIEIPC_EVENT_CORRECTABLE => EventKind::Correctable { new: a, total: b },
            pcieipc_event_kind_PCIEIPC_EVENT_LINK => EventKind::Link { from: link(a), to: link(b) },
            pcieipc_event_kind_PCIEIPC_EVENT_ADDED => EventKind::Added { serial: a, before: endpoint(b) },
            pcieipc_event_kind_PCIEIPC_EVENT_ADMIN => EventKind::Admin { action: a, errno: b },
            pcieipc_event_kind_PCIEIPC_EVENT_STORM => EventKind::Storm(a),
            other => EventKind::Other(other),
        };
        Self {
            sequence: raw.sequence,
            generation: raw.generation,
            time: Duration::from_nanos(raw.time_ns),
            endpoint: endpoint(u64::from(raw.endpoint)),
            kind,
        }
    }
}
