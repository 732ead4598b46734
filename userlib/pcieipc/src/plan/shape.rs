// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments of an algorithm, and how a buffer is cut into shards.

use std::ops::Range;

use crate::error::Rank;

/// What an algorithm needs to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// How many ranks, 1 to 16 for executors; more in the simulator.
    pub ranks: usize,
    /// Elements of the buffer.
    pub count: usize,
    /// Elements of one record, at least 1.
    pub chunk: usize,
    /// Shards start at multiples of so many elements (a cache line), where the count allows it.
    pub align: usize,
}

/// The elements that shard `shard` of `shards` covers: contiguous, in order, each boundary at a multiple of `align`, and
/// together exactly `0..count`. Later shards may be shorter or empty.
pub fn shard_range(count: usize, shards: usize, align: usize, shard: Rank) -> Range<usize> {
    let align = align.max(1);
    let each = count.div_ceil(shards).div_ceil(align) * align;
    (shard * each).min(count)..((shard + 1) * each).min(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_every_count_exactly_once_and_in_order() {
        for count in 0..300 {
            for shards in 1..=16 {
                for align in [1, 2, 16, 64] {
                    let mut next = 0;
                    for s in 0..shards {
                        let r = shard_range(count, shards, align, s);
                        assert_eq!(r.start, next);
                        assert!(r.start == count || r.start % align == 0);
                        next = r.end;
                    }
                    assert_eq!(next, count);
                }
            }
        }
    }
}
