// SPDX-License-Identifier: MIT OR Apache-2.0
//! `/dev/pcieipc` as safe types.
//!
//! [`Node`] opens it and looks around; [`Node::attach`] makes it a [`Session`] with one endpoint, whose [`Channel`]s other
//! processes write through an [`Export`].

mod channel;
mod endpoint;
mod error;
mod event;
mod export;
mod node;
mod self_test;
mod session;
mod status;

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;

pub use channel::{Channel, Import};
pub use endpoint::{Distance, EndpointId, EndpointInfo, Iommu, State};
pub use error::DeviceError;
pub use event::{Event, EventKind};
pub use export::Export;
pub use node::{Limits, NODE, Node};
pub use self_test::{SelfTest, SelfTestError};
pub use session::{Session, SessionState};
pub use status::{Status, StatusWord};

pub use crate::sys::Bell;
