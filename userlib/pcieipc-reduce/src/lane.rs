// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arithmetic of one element, written without branches so that the compiler can run many at once.

/// One element as it lies in memory, and the type in which it accumulates.
pub trait Lane: Copy + Default {
    /// Where sums are held; differs from `Self` for 16-bit floats.
    type Acc: Copy + Default;
    /// Whether `Acc` is the same type.
    const SAME: bool;
    /// To the accumulator, exactly.
    fn widen(self) -> Self::Acc;
    /// From the accumulator, rounded to nearest, ties to even.
    fn narrow(acc: Self::Acc) -> Self;
    /// Divided by a number of ranks.
    fn divide(acc: Self::Acc, by: usize) -> Self::Acc;

    /// `N` elements to accumulators; `F16C` says that the processor and the calling function have those instructions.
    ///
    /// # Safety
    /// `from` is readable for `N` elements.
    #[inline(always)]
    unsafe fn widen_block<const N: usize, const F16C: bool>(from: *const Self) -> [Self::Acc; N] {
        // SAFETY: i < N.
        std::array::from_fn(|i| unsafe { from.wrapping_add(i).read_unaligned() }.widen())
    }

    /// `N` accumulators to elements; `F16C` as above.
    ///
    /// # Safety
    /// The processor has F16C if `F16C` says so.
    #[inline(always)]
    unsafe fn narrow_block<const N: usize, const F16C: bool>(acc: &[Self::Acc; N]) -> [Self; N] {
        std::array::from_fn(|i| Self::narrow(acc[i]))
    }
}

/// How two accumulators become one.
pub trait Combine<A> {
    /// `a` comes from the lower rank.
    fn combine(a: A, b: A) -> A;
}

/// Sum.
pub struct Add;
/// Product.
pub struct Mul;
/// The least.
pub struct Min;
/// The greatest.
pub struct Max;

macro_rules! floats {
    ($($t:ty),*) => { $(
        impl Lane for $t {
            type Acc = $t;
            const SAME: bool = true;
            #[inline(always)]
            fn widen(self) -> $t { self }
            #[inline(always)]
            fn narrow(acc: $t) -> $t { acc }
            #[inline(always)]
            fn divide(acc: $t, by: usize) -> $t { acc / by as $t }
        }
        impl Combine<$t> for Add {
            #[inline(always)]
            fn combine(a: $t, b: $t) -> $t { a + b }
        }
        impl Combine<$t> for Mul {
            #[inline(always)]
            fn combine(a: $t, b: $t) -> $t { a * b }
        }
        impl Combine<$t> for Min {
            #[inline(always)]
            fn combine(a: $t, b: $t) -> $t {
                // Equal values differ in bits only when they are zeros of two signs: then the negative one.
                let same = <$t>::from_bits(a.to_bits() | b.to_bits());
                let least = if a < b || a.is_nan() { a } else { b };
                if a == b { same } else { least }
            }
        }
        impl Combine<$t> for Max {
            #[inline(always)]
            fn combine(a: $t, b: $t) -> $t {
                let same = <$t>::from_bits(a.to_bits() & b.to_bits());
                let greatest = if a > b || a.is_nan() { a } else { b };
                if a == b { same } else { greatest }
            }
        }
    )* };
}
floats!(f32, f64);

macro_rules! integers {
    ($($t:ty),*) => { $(
        impl Lane for $t {
            type Acc = $t;
            const SAME: bool = true;
            #[inline(always)]
            fn widen(self) -> $t { self }
            #[inline(always)]
            fn narrow(acc: $t) -> $t { acc }
            #[inline(always)]
            fn divide(acc: $t, by: usize) -> $t {
                // A group is far smaller than 127 ranks wherever elements are 8 bits wide.
                acc / <$t>::try_from(by).unwrap_or(<$t>::MAX)
            }
        }
        impl Combine<$t> for Add {
            #[inline(always)]
            fn combine(a: $t, b: $t) -> $t { a.wrapping_add(b) }
        }
        impl Combine<$t> for Mul {
            #[inline(always)]
            fn combine(a: $t, b: $t) -> $t { a.wrapping_mul(b) }
        }
        impl Combine<$t> for Min {
            #[inline(always)]
            fn combine(a: $t, b: $t) -> $t { if a < b { a } else { b } }
        }
        impl Combine<$t> for Max {
            #[inline(always)]
            fn combine(a: $t, b: $t) -> $t { if a > b { a } else { b } }
        }
    )* };
}
integers!(i8, i16, i32, i64, u8, u16, u32, u64);

/// The bits of an IEEE binary16.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct Half(u16);

/// The bits of a bfloat16.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct Brain(u16);

impl Lane for Brain {
    type Acc = f32;
    const SAME: bool = false;
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits((self.0 as u32) << 16)
    }
    #[inline(always)]
    fn narrow(acc: f32) -> Self {
        let bits = acc.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // Rounding could carry a NaN into infinity; keep it a quiet NaN.
        let nan = (bits >> 16) | 0x40;
        Self(if acc.is_nan() { nan } else { rounded } as u16)
    }
    #[inline(always)]
    fn divide(acc: f32, by: usize) -> f32 {
        acc / by as f32
    }
}

impl Lane for Half {
    type Acc = f32;
    const SAME: bool = false;
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn widen_block<const N: usize, const F16C: bool>(from: *const Self) -> [f32; N] {
        use std::arch::x86_64::{_mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
        let mut acc = [0.0; N];
        if F16C && N % 8 == 0 {
            for i in (0..N).step_by(8) {
                // SAFETY: i + 8 <= N on both sides, and the caller promises F16C.
                unsafe {
                    _mm256_storeu_ps(acc.as_mut_ptr().add(i), _mm256_cvtph_ps(_mm_loadu_si128(from.wrapping_add(i).cast())))
                };
            }
        } else {
            for (i, a) in acc.iter_mut().enumerate() {
                // SAFETY: i < N.
                *a = unsafe { from.wrapping_add(i).read_unaligned() }.widen();
            }
        }
        acc
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn narrow_block<const N: usize, const F16C: bool>(acc: &[f32; N]) -> [Self; N] {
        use std::arch::x86_64::{_MM_FROUND_TO_NEAREST_INT, _mm_storeu_si128, _mm256_cvtps_ph, _mm256_loadu_ps};
        let mut out = [Self(0); N];
        if F16C && N % 8 == 0 {
            for i in (0..N).step_by(8) {
                // SAFETY: i + 8 <= N on both sides, and the caller promises F16C.
                unsafe {
                    let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(acc.as_ptr().add(i)));
                    _mm_storeu_si128(out.as_mut_ptr().add(i).cast(), halves);
                }
            }
        } else {
            for (o, a) in out.iter_mut().zip(acc) {
                *o = Self::narrow(*a);
            }
        }
        out
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        let sign = ((self.0 & 0x8000) as u32) << 16;
        let magnitude = ((self.0 & 0x7fff) as u32) << 13;
        // As an f32 the bits mean 2^112 times too little, subnormals included; the product is exact.
        let scaled = (f32::from_bits(magnitude) * f32::from_bits((112 + 127) << 23)).to_bits();
        let special = magnitude | 0x7f80_0000;
        f32::from_bits(sign | if magnitude >= 0x7c00 << 13 { special } else { scaled })
    }
    #[inline(always)]
    fn narrow(acc: f32) -> Self {
        let sign = acc.to_bits() & 0x8000_0000;
        let bits = acc.to_bits() ^ sign;
        // Normal: move the exponent's bias from 127 to 15, round to 10 bits of mantissa.
        let normal = bits.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + ((bits >> 13) & 1)) >> 13;
        // Subnormal: adding 2^-1 · 2^(24 - 24) aligns the last place to 2^-24, and the adder rounds.
        let magic = f32::from_bits(0x3f00_0000);
        let subnormal = (f32::from_bits(bits) + magic).to_bits().wrapping_sub(0x3f00_0000);
        let small = if bits < 113 << 23 { subnormal } else { normal };
        let special = if bits > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
        // From 65520 on, everything rounds to infinity; `normal` does so by its carry, up to 2^16.
        let all = if bits >= (127 + 16) << 23 { special } else { small };
        Self((all | (sign >> 16)) as u16)
    }
    #[inline(always)]
    fn divide(acc: f32, by: usize) -> f32 {
        acc / by as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_exactly_and_narrows_back() {
        for bits in 0..=u16::MAX {
            let theirs = half::f16::from_bits(bits).to_f32();
            let ours = Half(bits).widen();
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{bits:04x}");
            let back = half::f16::from_bits(Half::narrow(ours).0);
            assert!(back.to_bits() == bits || back.is_nan() && ours.is_nan(), "{bits:04x}");
        }
    }

    #[test]
    fn narrowing_rounds_to_nearest_even_as_the_half_crate_does() {
        let mut bits = 0u32;
        loop {
            let x = f32::from_bits(bits);
            let (h, b) = (half::f16::from_f32(x), half::bf16::from_f32(x));
            let (oh, ob) = (half::f16::from_bits(Half::narrow(x).0), half::bf16::from_bits(Brain::narrow(x).0));
            assert!(h.to_bits() == oh.to_bits() || h.is_nan() && oh.is_nan(), "f16 of {bits:08x}");
            assert!(b.to_bits() == ob.to_bits() || b.is_nan() && ob.is_nan(), "bf16 of {bits:08x}");
            // A prime stride visits all exponents and every class of tail bits.
            match bits.checked_add(997) {
                Some(next) => bits = next,
                None => break,
            }
        }
    }
}
