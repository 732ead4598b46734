// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the module answers, by what a user can do about it.

use std::{io, sync::Arc};

use nix::errno::Errno;

use super::EndpointId;

/// A call on `/dev/pcieipc` that failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no node.
    #[error("{path} is not there: load the module (modprobe pcieipc, or insmod pcieipc.ko), or use shared memory")]
    NotLoaded {
        /// The node.
        path: String,
    },
    /// The node may not be opened.
    #[error(
        "no permission to open {path}: become a member of the group pcieipc (usermod -aG pcieipc USER, then log in again) or use sudo"
    )]
    NoPermission {
        /// The node.
        path: String,
    },
    /// Module and library exclude each other.
    #[error(
        "the module speaks ABI {module} (oldest {module_oldest}) and this library {library} (oldest {library_oldest}): \
         install module and library of the same release"
    )]
    Version {
        /// The module's.
        module: u32,
        /// The oldest library that it accepts.
        module_oldest: u32,
        /// This library's.
        library: u32,
        /// The oldest module that it accepts.
        library_oldest: u32,
    },
    /// There is no endpoint with that id.
    #[error("{0} does not exist: `pcieipc info` lists those that are there")]
    NoEndpoint(EndpointId),
    /// The endpoint or the channel is taken.
    #[error("{what} is taken: {hint}")]
    Busy {
        /// What.
        what: String,
        /// What to do.
        hint: &'static str,
    },
    /// The endpoint could be aimed at any memory.
    #[error(
        "{endpoint} may not be used here: it can be aimed at any memory, and no IOMMU translates for it; turn the IOMMU on \
         (intel_iommu=on or amd_iommu=on), or load the module with allow_unsafe_noiommu=1 and have CAP_SYS_RAWIO"
    )]
    NotProtected {
        /// Which.
        endpoint: EndpointId,
    },
    /// The endpoint is in error recovery.
    #[error("the endpoint is recovering from an error: wait until its state is LIVE, then recover the session")]
    Recovering,
    /// The endpoint lives in a newer generation than the session.
    #[error("the endpoint has had a new life since the session attached to it: recover the session")]
    Stale,
    /// The endpoint is gone or dead.
    #[error("the endpoint is gone or dead: attach to another one, or bring it back (`pcieipc info` shows the states)")]
    Gone,
    /// No memory, or over the limit of locked memory.
    #[error(
        "no memory for {what}: the limit of locked memory is {limit} (raise it: ulimit -l, or LimitMEMLOCK= of the service; the \
         kernel log says which limit it was)"
    )]
    Memory {
        /// For what.
        what: String,
        /// The soft limit, in words.
        limit: String,
    },
    /// Over a limit of the module.
    #[error("{what} is over a limit of the module: `pcieipc info` shows them, module parameters raise them")]
    Limit {
        /// What.
        what: String,
    },
    /// The endpoint can not do that.
    #[error("the endpoint can not do {call}: `pcieipc info` shows what it can")]
    Unsupported {
        /// What.
        call: &'static str,
    },
    /// Doorbells came faster than the module allows.
    #[error("doorbells came faster than the module allows (doorbells_per_second): ring less often or raise the limit")]
    RateLimited,
    /// A ring of a copy is not there any more.
    #[error("a ring of the copy is not there any more: its reader has ended or let go of it")]
    NoRing,
    /// The engine did not finish in time.
    #[error("the endpoint's engine did not finish in time and was stopped: look at the endpoint, or give it more time")]
    EngineTimeout,
    /// The engine reported an error.
    #[error("the endpoint's engine reported an error: the kernel log says which")]
    Engine,
    /// Anything else.
    #[error("{call}: {source}")]
    Other {
        /// The call.
        call: &'static str,
        /// The answer.
        source: Arc<io::Error>,
    },
}

impl DeviceError {
    /// What an errno means for every call; calls with meanings of their own look first.
    pub(super) fn new(call: &'static str, source: io::Error) -> Self {
        match source.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EIO) => Self::Recovering,
            Some(Errno::ESTALE) => Self::Stale,
            Some(Errno::ENODEV) => Self::Gone,
            Some(Errno::ENOMEM) => Self::Memory { what: call.to_owned(), limit: memlock() },
            Some(Errno::ENOSPC) => Self::Limit { what: call.to_owned() },
            Some(Errno::EOPNOTSUPP) => Self::Unsupported { call },
            Some(Errno::EAGAIN) => Self::RateLimited,
            Some(Errno::ETIMEDOUT) => Self::EngineTimeout,
            Some(Errno::EREMOTEIO) => Self::Engine,
            _ => Self::Other { call, source: source.into() },
        }
    }
}

/// The soft limit of locked memory, in words.
pub(super) fn memlock() -> String {
    use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
    match getrlimit(Resource::RLIMIT_MEMLOCK) {
        Ok((RLIM_INFINITY, _)) => "unlimited for this process".into(),
        Ok((soft, _)) => format!("{} KiB", soft / 1024),
        Err(_) => "unknown".into(),
    }
}
