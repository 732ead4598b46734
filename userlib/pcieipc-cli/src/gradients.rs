// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gradient files: safetensors, one a rank, checked before anything runs and read one tensor at a time.

mod check;
mod file;
mod template;

pub use check::{Judgement, judge};
pub use file::{BadFile, GradientFile, Number, Tensor, agree};
pub use template::Template;
