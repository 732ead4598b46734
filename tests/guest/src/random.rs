// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbers that look random and come again with the same seed.

/// A xorshift generator.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// One for each of several users of a seed.
    pub fn of(seed: u64, user: u64) -> Self {
        Self((seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ user.wrapping_add(1).wrapping_mul(0xd134_2543_de82_ef95)) | 1)
    }

    /// All bits.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        (self.bits() >> 11) % limit
    }

    /// True once in `times`.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of several.
    pub fn of_these<T: Copy>(&mut self, these: &[T]) -> T {
        these[self.below(these.len() as u64) as usize]
    }
}
