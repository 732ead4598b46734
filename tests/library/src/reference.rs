// SPDX-License-Identifier: MIT OR Apache-2.0
//! Inputs, and their sums in float64.

use half::bf16;

/// What rank `rank` brings at place `at`; sums of these need no rounding in f32.
pub fn value(rank: usize, at: usize) -> f32 {
    ((rank * 7919 + at * 31) % 2048) as f32 - 1000.0
}

/// The same for bf16, where it is rounded.
pub fn value_bf16(rank: usize, at: usize) -> bf16 {
    bf16::from_f32(value(rank, at) / 3.0)
}

/// How many elements are not the float64 sum over these ranks.
pub fn wrong(got: &[f32], ranks: &[usize]) -> usize {
    let exact = |at: usize| ranks.iter().map(|r| f64::from(value(*r, at))).sum::<f64>();
    got.iter().enumerate().filter(|(at, v)| f64::from(**v) != exact(*at)).count()
}

/// How many elements are not the float64 sum over these ranks, rounded once.
pub fn wrong_bf16(got: &[bf16], ranks: &[usize]) -> usize {
    let exact = |at: usize| ranks.iter().map(|r| value_bf16(*r, at).to_f64()).sum::<f64>();
    got.iter().enumerate().filter(|(at, v)| **v != bf16::from_f64(exact(*at))).count()
}
