// SPDX-License-Identifier: MIT OR Apache-2.0
//! Drawings of the tree.

pub mod dot;
pub mod health;
pub mod matrix;
pub mod svg;
pub mod text;
