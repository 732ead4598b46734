// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments of an algorithm, and how a buffer is cut into shards.

use std::ops::Range;

use super::Shares;
use crate::error::Rank;

/// What an algorithm needs to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// How many ranks, 1 to 16 for executors; more in the simulator.
    pub ranks: usize,
    /// Elements: of the buffer where all ranks pass equal ones, of one rank's block in reduce-scatter, all-gather and
    /// all-to-all.
    pub count: usize,
    /// Elements of one record, at least 1.
    pub chunk: usize,
    /// Shards start at multiples of so many elements (a cache line), where the count allows it.
    pub align: usize,
    /// The root of a reduce or broadcast, the sender of a message; otherwise 0.
    pub root: Rank,
    /// The receiver of a message; otherwise 0.
    pub peer: Rank,
    /// How much of the buffer each rank owns, where every rank owns a shard.
    pub shares: Shares,
}

impl Shape {
    /// A shape without root, with shards cut anywhere.
    ///
    /// ```
    /// # use pcieipc::plan::Shape;
    /// let shape = Shape::new(4, 1000, 64);
    /// assert_eq!((shape.ranks, shape.count, shape.chunk), (4, 1000, 64));
    /// ```
    pub fn new(ranks: usize, count: usize, chunk: usize) -> Self {
        Self { ranks, count, chunk: chunk.max(1), align: 1, root: 0, peer: 0, shares: Shares::default() }
    }

    /// The elements of shard `shard` when the buffer is cut into `shards`.
    pub(crate) fn shard(&self, shards: usize, shard: usize) -> Range<usize> {
        shard_range(self.count, shards, self.align, shard)
    }

    /// The elements that a rank owns when every rank owns a shard, by the shares.
    pub(crate) fn owned(&self, rank: Rank) -> Range<usize> {
        if self.shares.are_equal() { self.shard(self.ranks, rank) } else { self.shares.range(self.count, self.align, rank) }
    }

    /// All other ranks. Each starts with its right neighbour, so that not all talk to rank 0 at once.
    pub(crate) fn peers(&self, rank: Rank) -> impl Iterator<Item = Rank> + use<> {
        let ranks = self.ranks;
        (1..ranks).map(move |d| (rank + d) % ranks)
    }
}

/// The elements that shard `shard` of `shards` covers: contiguous, in order, each boundary at a multiple of `align`, and
/// together exactly `0..count`. Later shards may be shorter or empty.
///
/// ```
/// use pcieipc::plan::shard_range;
/// assert_eq!((shard_range(100, 3, 16, 0), shard_range(100, 3, 16, 2)), (0..48, 96..100));
/// ```
pub fn shard_range(count: usize, shards: usize, align: usize, shard: usize) -> Range<usize> {
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
