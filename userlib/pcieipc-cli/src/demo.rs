// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rehearsal of a loss, and its report: reduce, lose an endpoint in the middle of the next reduce, go on without it.

mod fault;
pub mod figure;
mod report;
mod story;
mod tree;

pub use fault::Fault;
pub use figure::draw;
pub use report::{EndpointCount, Loss, Report, SurvivorError};
pub use story::Story;
pub use tree::{Node, tree_of};
