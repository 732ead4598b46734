// SPDX-License-Identifier: MIT OR Apache-2.0
//! Drawings of the tree.

pub mod matrix;
pub mod text;
