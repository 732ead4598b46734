// SPDX-License-Identifier: MIT OR Apache-2.0
//! System calls, each wrapped once.

mod bell;
mod count;
mod kernel;
mod mapping;
mod process;
mod sealed;

pub use bell::Bell;
pub use count::{calls, yield_now};
pub use kernel::{Call, Kernel, Linux};
pub use mapping::{Access, Mapping};
pub use process::{Home, Life, wait_readable};
pub(crate) use sealed::{ONE_WRITER, check_sealed};

use crate::error::Error;

/// A failed call as the library's error.
pub(crate) fn failed(call: &'static str, hint: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
    let hint = hint.into();
    move |source| Error::System { call, hint, source: source.into() }
}
