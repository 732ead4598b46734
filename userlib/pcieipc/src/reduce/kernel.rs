// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loop under [`super::fold`], compiled once for each instruction set.

use super::{
    In, Isa, Out,
    lane::{Combine, Lane},
};
use crate::plan::Form;

/// Elements that are held in registers at once. Constant, so that the inner loops unroll into vector code whatever the
/// pointers are: buffers may be the same memory, which would otherwise stop the vectoriser.
const BLOCK: usize = 64;

/// # Safety
/// As for [`super::fold`].
pub unsafe fn run<T: Lane, O: Combine<T::Acc>>(isa: Isa, sources: &[In], targets: &[Out], len: usize, divisor: Option<usize>) {
    // SAFETY: the caller promises that the processor has `isa`, and everything that `blocks` asks for.
    unsafe {
        match isa {
            #[cfg(all(target_arch = "x86_64", pcieipc_avx512))]
            Isa::Avx512 => avx512::<T, O>(sources, targets, len, divisor),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::<T, O>(sources, targets, len, divisor),
            _ => blocks::<T, O>(sources, targets, len, divisor),
        }
    }
}

/// # Safety
/// As for [`super::fold`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2<T: Lane, O: Combine<T::Acc>>(sources: &[In], targets: &[Out], len: usize, divisor: Option<usize>) {
    // SAFETY: passed on unchanged.
    unsafe { blocks::<T, O>(sources, targets, len, divisor) }
}

/// # Safety
/// As for [`super::fold`], on a processor with AVX-512 F, BW, DQ and VL.
#[cfg(all(target_arch = "x86_64", pcieipc_avx512))]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn avx512<T: Lane, O: Combine<T::Acc>>(sources: &[In], targets: &[Out], len: usize, divisor: Option<usize>) {
    // SAFETY: passed on unchanged.
    unsafe { blocks::<T, O>(sources, targets, len, divisor) }
}

#[inline(always)]
unsafe fn blocks<T: Lane, O: Combine<T::Acc>>(sources: &[In], targets: &[Out], len: usize, divisor: Option<usize>) {
    let whole = len - len % BLOCK;
    let mut at = 0;
    while at < whole {
        // SAFETY: at + BLOCK <= len.
        unsafe { block::<T, O, BLOCK>(sources, targets, at, divisor) };
        at += BLOCK;
    }
    while at < len {
        // SAFETY: at + 1 <= len.
        unsafe { block::<T, O, 1>(sources, targets, at, divisor) };
        at += 1;
    }
}

/// Elements `at .. at + N`.
#[inline(always)]
unsafe fn block<T: Lane, O: Combine<T::Acc>, const N: usize>(sources: &[In], targets: &[Out], at: usize, divisor: Option<usize>) {
    let mut acc = [T::Acc::default(); N];
    let [first, rest @ ..] = sources else { return };
    // SAFETY: every source has at + N readable elements.
    unsafe { load::<T, N>(first, at, &mut acc, |_, new| new) };
    for source in rest {
        // SAFETY: as above.
        unsafe { load::<T, N>(source, at, &mut acc, O::combine) };
    }
    if let Some(by) = divisor {
        for a in &mut acc {
            *a = T::divide(*a, by);
        }
    }
    for target in targets {
        if T::SAME || target.form == Form::Partial {
            let p = target.ptr.cast::<T::Acc>().wrapping_add(at);
            for (i, a) in acc.iter().enumerate() {
                // SAFETY: every target has at + N writable elements.
                unsafe { p.wrapping_add(i).write_unaligned(*a) };
            }
        } else {
            let p = target.ptr.cast::<T>().wrapping_add(at);
            for (i, a) in acc.iter().enumerate() {
                // SAFETY: as above.
                unsafe { p.wrapping_add(i).write_unaligned(T::narrow(*a)) };
            }
        }
    }
}

#[inline(always)]
unsafe fn load<T: Lane, const N: usize>(source: &In, at: usize, acc: &mut [T::Acc; N], with: impl Fn(T::Acc, T::Acc) -> T::Acc) {
    if T::SAME || source.form == Form::Partial {
        let p = source.ptr.cast::<T::Acc>().wrapping_add(at);
        for (i, a) in acc.iter_mut().enumerate() {
            // SAFETY: the caller has checked that the source is readable up to at + N.
            *a = with(*a, unsafe { p.wrapping_add(i).read_unaligned() });
        }
    } else {
        let p = source.ptr.cast::<T>().wrapping_add(at);
        for (i, a) in acc.iter_mut().enumerate() {
            // SAFETY: as above.
            *a = with(*a, unsafe { p.wrapping_add(i).read_unaligned() }.widen());
        }
    }
}
