// SPDX-License-Identifier: MIT OR Apache-2.0
//! How large the shard of each rank is, when the links of ranks are not equally fast.

use std::ops::Range;

/// Ranks that shares are kept for: those that executors serve.
const RANKS: usize = 16;
/// What all shares add up to.
const WHOLE: u32 = 1 << 14;

/// The parts of a buffer that the ranks own in a two-shot all-reduce, in 2¹⁴ths; equal ones if nothing is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Shares([u16; RANKS]);

impl Shares {
    /// Shares for ranks whose links carry so much (in any unit): such that the last link is done as early as possible. Who owns the part
    /// `s` of a buffer among `n` ranks carries `1 + (n - 2) s` times the buffer each way, so a rank with a slow link owns less,
    /// or nothing. Equal rates, rates that are none, and two ranks (where it makes no difference) give equal shares.
    ///
    /// ```
    /// # use pcieipc::plan::Shares;
    /// assert!(Shares::for_rates(&[8.0, 8.0, 8.0, 8.0]).are_equal());
    /// assert!(!Shares::for_rates(&[8.0, 8.0, 2.0, 8.0]).are_equal());
    /// ```
    pub fn for_rates(rates: &[f64]) -> Self {
        let n = rates.len();
        let good = rates.iter().all(|r| r.is_finite() && *r > 0.0);
        let uneven = rates.iter().any(|r| (r - rates[0]).abs() > 1e-3 * rates[0]);
        if !(3..=RANKS).contains(&n) || !good || !uneven {
            return Self::default();
        }
        let part = |time: f64, rate: f64| ((time * rate - 1.0) / (n as f64 - 2.0)).max(0.0);
        let parts = |time: f64| rates.iter().map(|r| part(time, *r)).sum::<f64>();
        // Nobody is done before its own data have gone over its link once.
        let least = rates.iter().fold(0.0, |most: f64, r| most.max(1.0 / r));
        let (mut low, mut high) = (0.0, least * n as f64);
        for _ in 0..100 {
            let middle = (low + high) / 2.0;
            if parts(middle) < 1.0 { low = middle } else { high = middle }
        }
        // Below that, a larger share of the others costs no time.
        let time = high.max(least);
        let (total, mut shares, mut given) = (parts(time), [0; RANKS], 0);
        let most = (0..n).max_by(|a, b| rates[*a].total_cmp(&rates[*b])).unwrap_or(0);
        for (share, rate) in shares.iter_mut().zip(rates) {
            *share = (part(time, *rate) / total * f64::from(WHOLE)) as u16;
            given += u32::from(*share);
        }
        shares[most] += (WHOLE - given.min(WHOLE)) as u16;
        Self(shares)
    }

    /// How much earlier or later than the unit of the rates the slowest link is done: buffers over rate.
    ///
    /// ```
    /// use pcieipc::plan::Shares;
    /// let rates = [8.0, 8.0, 2.0, 8.0];
    /// assert!(Shares::for_rates(&rates).time(&rates) < Shares::default().time(&rates));
    /// ```
    pub fn time(&self, rates: &[f64]) -> f64 {
        let n = rates.len() as f64;
        let part = |rank: usize| if self.are_equal() { 1.0 / n } else { f64::from(self.0[rank]) / f64::from(WHOLE) };
        rates.iter().enumerate().map(|(rank, rate)| (1.0 + (n - 2.0) * part(rank)) / rate).fold(0.0, f64::max)
    }

    /// Whether all ranks own as much.
    ///
    /// ```
    /// use pcieipc::plan::Shares;
    /// assert!(Shares::default().are_equal());
    /// ```
    pub fn are_equal(&self) -> bool {
        self.0 == [0; RANKS]
    }

    /// As bytes, to pass to other ranks.
    ///
    /// ```
    /// use pcieipc::plan::Shares;
    /// let shares = Shares::for_rates(&[8.0, 8.0, 2.0, 8.0]);
    /// assert_eq!(Shares::from_bytes(shares.to_bytes(), 4), shares);
    /// ```
    pub fn to_bytes(self) -> [u8; 2 * RANKS] {
        let mut bytes = [0; 2 * RANKS];
        for (to, share) in bytes.chunks_exact_mut(2).zip(self.0) {
            to.copy_from_slice(&share.to_le_bytes());
        }
        bytes
    }

    /// From what another rank passed; equal shares for what can not be any.
    ///
    /// ```
    /// use pcieipc::plan::Shares;
    /// assert!(Shares::from_bytes([7; 32], 16).are_equal(), "these are no shares");
    /// ```
    pub fn from_bytes(bytes: [u8; 2 * RANKS], ranks: usize) -> Self {
        let shares: [u16; RANKS] = std::array::from_fn(|i| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]));
        let whole = shares.iter().map(|s| u32::from(*s)).sum::<u32>() == WHOLE;
        if whole && shares.iter().skip(ranks).all(|s| *s == 0) { Self(shares) } else { Self::default() }
    }

    /// The elements of `0..count` that a rank owns, with boundaries at multiples of `align`; not for equal shares.
    pub(super) fn range(&self, count: usize, align: usize, rank: usize) -> Range<usize> {
        let before = |ranks: usize| self.0.iter().take(ranks).map(|s| u64::from(*s)).sum::<u64>();
        let boundary = |ranks: usize| {
            let (sum, align) = (before(ranks), align.max(1));
            if sum >= u64::from(WHOLE) {
                return count;
            }
            let exact = (count as u128 * u128::from(sum) / u128::from(WHOLE)) as usize;
            exact.next_multiple_of(align).min(count)
        };
        boundary(rank)..boundary(rank + 1)
    }

    /// A number that differs between different shares, for ranks to compare.
    pub(crate) fn fingerprint(&self) -> usize {
        self.0.iter().fold(0, |hash: usize, share| hash.wrapping_mul(31).wrapping_add(usize::from(*share)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_every_count_exactly_once_and_in_order() {
        for rates in [&[1.0, 4.0, 4.0][..], &[8.0, 8.0, 1.0, 8.0], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]] {
            let shares = Shares::for_rates(rates);
            for count in (0..400).chain([100_003]) {
                for align in [1, 16] {
                    let mut next = 0;
                    for rank in 0..rates.len() {
                        let range = shares.range(count, align, rank);
                        assert_eq!(range.start, next);
                        assert!(range.start == count || range.start % align == 0);
                        next = range.end;
                    }
                    assert_eq!(next, count);
                }
            }
        }
    }

    #[test]
    fn no_shares_are_better_than_those_for_the_rates() {
        for rates in [[8.0, 8.0, 8.0, 4.0], [8.0, 8.0, 2.0, 8.0], [8.0, 1.0, 4.0, 2.0]] {
            let shares = Shares::for_rates(&rates);
            let time = shares.time(&rates);
            assert!(time <= Shares::default().time(&rates) + 1e-3, "{rates:?}");
            // Moving a little of the buffer from one rank to another does not help.
            for from in 0..4 {
                for to in 0..4 {
                    let mut other = shares;
                    if from != to && other.0[from] > 100 {
                        (other.0[from], other.0[to]) = (other.0[from] - 100, other.0[to] + 100);
                        assert!(other.time(&rates) >= time - 1e-3, "{rates:?}: {other:?} beats {shares:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn shares_come_back_from_bytes_and_nonsense_gives_equal_ones() {
        let shares = Shares::for_rates(&[8.0, 8.0, 2.0, 8.0]);
        assert_eq!(Shares::from_bytes(shares.to_bytes(), 4), shares);
        assert!(Shares::from_bytes(shares.to_bytes(), 3).are_equal());
        assert!(Shares::from_bytes([7; 32], 16).are_equal());
        assert!(Shares::for_rates(&[1.0, f64::NAN, 1.0]).are_equal());
    }
}
