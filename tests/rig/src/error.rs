// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why a virtual machine could not be run. A test that ran and failed is no error: see [`crate::verdict`].

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What kept the rig from running a machine.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A program could not be started or did not do its work.
    #[error("{program}: {why}")]
    Program {
        /// Its name.
        program: String,
        /// What it said, or what the system said of it.
        why: String,
    },
    /// A test's description is wrong.
    #[error("{path}: {why}")]
    Spec {
        /// The description.
        path: PathBuf,
        /// What is wrong in it.
        why: String,
    },
    /// Something the machine is made of is not there.
    #[error("{path} is missing: {remedy}")]
    Missing {
        /// What is missing.
        path: PathBuf,
        /// How to make it.
        remedy: &'static str,
    },
    /// Something did not answer in time.
    #[error("{what} did not answer within {limit:?}")]
    Silent {
        /// What was waited for.
        what: String,
        /// How long.
        limit: Duration,
    },
    /// The other side of a line protocol said something that is not its protocol.
    #[error("{what}: {why}")]
    Protocol {
        /// Which side.
        what: String,
        /// What was wrong.
        why: String,
    },
}

/// The rig's result.
pub type Result<T> = std::result::Result<T, Error>;

/// Names the file in an I/O error.
pub(crate) fn at(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::File { path: path.as_ref().to_owned(), source }
}
