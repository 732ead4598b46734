// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ring protocol, compiled from the library's own files with the model checker's atomics.
#![cfg(test)]
#![allow(dead_code, unused_imports, missing_docs, clippy::all)]

#[path = "../../../userlib/pcieipc/src/link.rs"]
mod link;
#[path = "../../../userlib/pcieipc/src/ring/mod.rs"]
mod ring;

/// What `link` needs of the library's errors.
mod error {
    pub type Rank = usize;
    pub type Result<T> = std::result::Result<T, std::convert::Infallible>;
    pub struct EndpointRef;
}

/// What `link` needs of the library's plans.
mod plan {
    pub struct Shares;
}

mod promises;
