// SPDX-License-Identifier: MIT OR Apache-2.0
//! Combining elements: the arithmetic under every collective.
//!
//! One function does it all, [`fold`]: take a chunk from each source, combine in the order given, store to each target.
//! 16-bit floats accumulate in f32 and are rounded once, at the end. Integers wrap. NaN and infinities are as IEEE 754 says;
//! min and max propagate NaN and hold −0 below +0 (IEEE 754-2019 `minimum`, `maximum`); which NaN comes out is not specified.

mod element;
mod kernel;
mod lane;
mod stream;

pub use element::{Element, Kind, Op};

use lane::{Add, Lane, Max, Min, Mul};

/// How elements lie in a record or in scratch memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// As in the user's buffers.
    Element,
    /// As a partial result: 16-bit floats as f32, everything else as it is.
    Partial,
}

/// A chunk to read: it may be memory that another process writes at the same time, and need not be aligned.
#[derive(Debug, Clone, Copy)]
pub struct In {
    /// First element.
    pub ptr: *const u8,
    /// How the elements lie there.
    pub form: Form,
}

/// A chunk to write; need not be aligned.
#[derive(Debug, Clone, Copy)]
pub struct Out {
    /// First element.
    pub ptr: *mut u8,
    /// How the elements lie there.
    pub form: Form,
    /// Whether another processor reads it next. Stores then go past this processor's cache where they can: a line that
    /// another one has read would first have to be taken back from it, which is several times slower.
    pub stream: bool,
}

impl Out {
    /// A chunk that this rank itself reads next.
    ///
    /// ```
    /// use pcieipc_reduce::{Form, Out};
    /// let mut sum = [0.0f32; 4];
    /// assert!(!Out::new(sum.as_mut_ptr().cast(), Form::Element).stream);
    /// ```
    #[inline]
    pub fn new(ptr: *mut u8, form: Form) -> Self {
        Self { ptr, form, stream: false }
    }
}

/// The instruction set that [`fold`] uses on this processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// What the target always has (SSE2 on x86-64, NEON on aarch64).
    Baseline,
    /// AVX2 and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL, and F16C; needs rustc 1.89 to build.
    Avx512,
}

impl Isa {
    /// The widest that this processor has.
    ///
    /// ```
    /// println!("{:?}", pcieipc_reduce::Isa::detect());
    /// ```
    pub fn detect() -> Self {
        #[cfg(all(target_arch = "x86_64", pcieipc_avx512))]
        if std::is_x86_feature_detected!("f16c")
            && std::is_x86_feature_detected!("avx512f")
            && std::is_x86_feature_detected!("avx512bw")
            && std::is_x86_feature_detected!("avx512dq")
            && std::is_x86_feature_detected!("avx512vl")
        {
            return Self::Avx512;
        }
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("f16c") {
            return Self::Avx2;
        }
        Self::Baseline
    }
}

/// Combines `len` elements of each source with `op`, in the order listed, and stores them to every target. Streamed stores are
/// ordered before all stores that follow the call.
/// `divisor` is the number of ranks when the result is final and `op` is [`Op::Average`]; otherwise it is not looked at.
///
/// ```
/// use pcieipc_reduce::{Form, In, Isa, Kind, Op, Out, fold};
///
/// let (a, b, mut sum) = ([1.0f32, 2.0], [3.0f32, 4.0], [0.0f32; 2]);
/// let sources = [&a, &b].map(|x| In { ptr: x.as_ptr().cast(), form: Form::Element });
/// let target = Out::new(sum.as_mut_ptr().cast(), Form::Element);
/// // SAFETY: all three hold two floats, and the processor was asked.
/// unsafe { fold(Isa::detect(), Kind::F32, Op::Sum, &sources, &[target], 2, None) };
/// assert_eq!(sum, [4.0, 6.0]);
/// ```
///
/// # Safety
/// - Each source is readable and each target writable for `len` elements in its form, during the call.
/// - A target may be the same memory as a source only element for element (the same address and form); targets do not overlap.
/// - `isa` is one that this processor has: [`Isa::detect`], or [`Isa::Baseline`].
pub unsafe fn fold(isa: Isa, kind: Kind, op: Op, sources: &[In], targets: &[Out], len: usize, divisor: Option<usize>) {
    if sources.is_empty() || len == 0 {
        return;
    }
    macro_rules! by_kind {
        ($($kind:ident => $lane:ty),*) => {
            // SAFETY: the caller's promises are passed on unchanged.
            unsafe { match kind { $(Kind::$kind => by_op::<$lane>(isa, op, sources, targets, len, divisor)),* } }
        };
    }
    by_kind!(F64 => f64, F32 => f32, F16 => lane::Half, BF16 => lane::Brain, I8 => i8, I16 => i16, I32 => i32, I64 => i64,
             U8 => u8, U16 => u16, U32 => u32, U64 => u64)
}

/// # Safety
/// As for [`fold`].
unsafe fn by_op<T: Lane>(isa: Isa, op: Op, sources: &[In], targets: &[Out], len: usize, divisor: Option<usize>)
where
    Add: lane::Combine<T::Acc>,
    Mul: lane::Combine<T::Acc>,
    Min: lane::Combine<T::Acc>,
    Max: lane::Combine<T::Acc>,
{
    // SAFETY: the caller's promises are passed on unchanged.
    unsafe {
        match op {
            Op::Sum => kernel::run::<T, Add>(isa, sources, targets, len, None),
            Op::Average => kernel::run::<T, Add>(isa, sources, targets, len, divisor),
            Op::Prod => kernel::run::<T, Mul>(isa, sources, targets, len, None),
            Op::Min => kernel::run::<T, Min>(isa, sources, targets, len, None),
            Op::Max => kernel::run::<T, Max>(isa, sources, targets, len, None),
        }
    }
}

#[cfg(test)]
mod tests;
