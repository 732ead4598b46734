// SPDX-License-Identifier: MIT OR Apache-2.0
//! Statuses, and the text of the last error.

use std::{
    cell::RefCell,
    ffi::{c_char, CString},
    mem::offset_of,
    panic::{catch_unwind, AssertUnwindSafe},
};

use pcieipc::Error;

use crate::growing::{self, Growing};

/// What a call answered.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum pcieipc_status {
    /// The result is right.
    Ok = 0,
    /// The deadline passed while the peer was alive.
    Timeout = 1,
    /// A peer's process has ended.
    PeerDied = 2,
    /// An endpoint is recovering from a PCIe error.
    EndpointRecovering = 3,
    /// An endpoint was removed, unbound or is dead.
    EndpointGone = 4,
    /// A link trained below what it was.
    LinkDegraded = 5,
    /// Ranks disagree on size, type, operation or configuration.
    Mismatch = 6,
    /// A record or an index from a peer broke the protocol.
    Corrupt = 7,
    /// Somebody called abort.
    Aborted = 8,
    /// The arguments can not be served.
    Argument = 9,
    /// The group could not meet.
    Meeting = 10,
    /// The module or an endpoint refused.
    Device = 11,
    /// A system call failed.
    System = 12,
    /// A bug in the library; please report it.
    Internal = 13,
}

/// Who and what an error is about. Set everything to zero, then `size` to `sizeof(struct pcieipc_error)`: fields that later versions add
/// are found by `size`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct pcieipc_error {
    /// Bytes of this struct.
    pub size: usize,
    /// The pcieipc_status that the call answered.
    pub status: u32,
    /// The rank that it is about (that died, is late, disagrees, called abort), or -1.
    pub rank: i32,
    /// The module's id of the endpoint that it is about, or -1.
    pub endpoint: i64,
    /// The life of that endpoint that was in use, or 0.
    pub generation: u64,
}

// SAFETY: it begins with its size, and zero is good for integers.
unsafe impl Growing for pcieipc_error {
    const NAME: &'static str = "out";
    const OLDEST: usize = offset_of!(Self, generation) + size_of::<u64>();
}

impl pcieipc_error {
    const NONE: Self = Self { size: size_of::<Self>(), status: pcieipc_status::Ok as u32, rank: -1, endpoint: -1, generation: 0 };
}

impl From<&Error> for pcieipc_error {
    fn from(error: &Error) -> Self {
        let (rank, endpoint) = (error.peer(), error.endpoint());
        Self {
            status: pcieipc_status::from(error) as u32,
            rank: rank.and_then(|r| i32::try_from(r).ok()).unwrap_or(-1),
            endpoint: endpoint.map_or(-1, |e| e.id.into()),
            generation: endpoint.map_or(0, |e| e.generation),
            ..Self::NONE
        }
    }
}

thread_local! {
    static LAST: RefCell<(CString, pcieipc_error)> = RefCell::new((CString::default(), pcieipc_error::NONE));
}

impl From<&Error> for pcieipc_status {
    fn from(error: &Error) -> Self {
        match error {
            Error::Timeout { .. } => Self::Timeout,
            Error::PeerDied { .. } => Self::PeerDied,
            Error::EndpointRecovering { .. } => Self::EndpointRecovering,
            Error::EndpointGone { .. } => Self::EndpointGone,
            Error::LinkDegraded { .. } => Self::LinkDegraded,
            Error::Mismatch { .. } => Self::Mismatch,
            Error::Corrupt { .. } => Self::Corrupt,
            Error::Aborted { .. } => Self::Aborted,
            Error::Argument(_) => Self::Argument,
            Error::Meeting(_) => Self::Meeting,
            Error::Device(_) => Self::Device,
            Error::System { .. } => Self::System,
            _ => Self::Internal,
        }
    }
}

fn remember(text: String, detail: pcieipc_error) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST.with(|last| *last.borrow_mut() = (text, detail));
}

/// Runs the body of a C function: keeps the error's text, and turns an unwind into a status.
pub(crate) fn answer(body: impl FnOnce() -> Result<(), Error>) -> pcieipc_status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => pcieipc_status::Ok,
        Ok(Err(error)) => {
            remember(error.to_string(), (&error).into());
            (&error).into()
        }
        Err(_) => {
            let status = pcieipc_status::Internal;
            let detail = pcieipc_error { status: status as u32, ..pcieipc_error::NONE };
            remember("a bug in pcieipc: please report it with what was printed".into(), detail);
            status
        }
    }
}

/// An argument that is missing or wrong.
pub(crate) fn bad(what: impl Into<String>) -> Error {
    Error::Argument(what.into())
}

/// The text of this thread's last error; valid until its next call of this library. Never NULL.
#[no_mangle]
pub extern "C" fn pcieipc_last_error() -> *const c_char {
    LAST.with(|last| last.borrow().0.as_ptr())
}

/// Stores to `out` who and what this thread's last error is about. Its own failure is not remembered.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_last_error_detail(out: *mut pcieipc_error) -> pcieipc_status {
    // SAFETY: NULL or valid, as the C caller promises.
    let stored = unsafe { growing::write(out, &LAST.with(|last| last.borrow().1)) };
    if stored.is_ok() {
        pcieipc_status::Ok
    } else {
        pcieipc_status::Argument
    }
}

/// The name of a status, such as "PeerDied"; "Unknown" for a number that is none. Never NULL, never freed.
#[no_mangle]
pub extern "C" fn pcieipc_status_name(status: u32) -> *const c_char {
    use pcieipc_status as S;
    let all = [
        (S::Ok, "Ok\0"),
        (S::Timeout, "Timeout\0"),
        (S::PeerDied, "PeerDied\0"),
        (S::EndpointRecovering, "EndpointRecovering\0"),
        (S::EndpointGone, "EndpointGone\0"),
        (S::LinkDegraded, "LinkDegraded\0"),
        (S::Mismatch, "Mismatch\0"),
        (S::Corrupt, "Corrupt\0"),
        (S::Aborted, "Aborted\0"),
        (S::Argument, "Argument\0"),
        (S::Meeting, "Meeting\0"),
        (S::Device, "Device\0"),
        (S::System, "System\0"),
        (S::Internal, "Internal\0"),
    ];
    let name = all.into_iter().find(|(of, _)| *of as u32 == status).map_or("Unknown\0", |(_, name)| name);
    name.as_ptr().cast()
}

/// The library's version, such as "0.1.0".
#[no_mangle]
pub extern "C" fn pcieipc_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn every_number_has_a_name_and_wrong_ones_are_unknown() {
        // SAFETY: never NULL and ends with a zero byte, which is what is promised.
        let name = |status| unsafe { CStr::from_ptr(pcieipc_status_name(status)) }.to_str().unwrap().to_owned();
        let all: Vec<String> = (0..16).map(name).collect();
        assert_eq!((all[0].as_str(), all[2].as_str(), all[13].as_str()), ("Ok", "PeerDied", "Internal"));
        let different: std::collections::HashSet<&String> = all[..14].iter().collect();
        assert!(different.len() == 14 && all[14..] == ["Unknown", "Unknown"] && name(u32::MAX) == "Unknown", "{all:?}");
    }
}
