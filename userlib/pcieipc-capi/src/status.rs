// SPDX-License-Identifier: MIT OR Apache-2.0
//! Statuses, and the text of the last error.

use std::{
    cell::RefCell,
    ffi::{c_char, CString},
    panic::{catch_unwind, AssertUnwindSafe},
};

use pcieipc::Error;

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

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
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

fn remember(text: String) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST.with(|last| *last.borrow_mut() = text);
}

/// Runs the body of a C function: keeps the error's text, and turns an unwind into a status.
pub(crate) fn answer(body: impl FnOnce() -> Result<(), Error>) -> pcieipc_status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => pcieipc_status::Ok,
        Ok(Err(error)) => {
            remember(error.to_string());
            (&error).into()
        }
        Err(_) => {
            remember("a bug in pcieipc: please report it with what was printed".into());
            pcieipc_status::Internal
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
    LAST.with(|last| last.borrow().as_ptr())
}

/// The name of a status, such as "PeerDied". Never NULL, never freed.
#[no_mangle]
pub extern "C" fn pcieipc_status_name(status: pcieipc_status) -> *const c_char {
    let name = match status {
        pcieipc_status::Ok => "Ok\0",
        pcieipc_status::Timeout => "Timeout\0",
        pcieipc_status::PeerDied => "PeerDied\0",
        pcieipc_status::EndpointRecovering => "EndpointRecovering\0",
        pcieipc_status::EndpointGone => "EndpointGone\0",
        pcieipc_status::LinkDegraded => "LinkDegraded\0",
        pcieipc_status::Mismatch => "Mismatch\0",
        pcieipc_status::Corrupt => "Corrupt\0",
        pcieipc_status::Aborted => "Aborted\0",
        pcieipc_status::Argument => "Argument\0",
        pcieipc_status::Meeting => "Meeting\0",
        pcieipc_status::Device => "Device\0",
        pcieipc_status::System => "System\0",
        pcieipc_status::Internal => "Internal\0",
    };
    name.as_ptr().cast()
}

/// The library's version, such as "0.1.0".
#[no_mangle]
pub extern "C" fn pcieipc_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
