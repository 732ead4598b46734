// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loop under [`super::fold`], compiled once for each instruction set.

use super::{
    In, Isa, Out,
    lane::{Combine, Lane},
    stream,
};
use crate::Form;

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
            _ => blocks::<T, O, false>(sources, targets, len, divisor),
        }
    }
    if targets.iter().any(|t| t.stream) {
        stream::fence();
    }
}

/// # Safety
/// As for [`super::fold`], on a processor with AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn avx2<T: Lane, O: Combine<T::Acc>>(sources: &[In], targets: &[Out], len: usize, divisor: Option<usize>) {
    // SAFETY: passed on unchanged.
    unsafe { blocks::<T, O, true>(sources, targets, len, divisor) }
}

/// # Safety
/// As for [`super::fold`], on a processor with F16C and AVX-512 F, BW, DQ and VL.
#[cfg(all(target_arch = "x86_64", pcieipc_avx512))]
#[target_feature(enable = "f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn avx512<T: Lane, O: Combine<T::Acc>>(sources: &[In], targets: &[Out], len: usize, divisor: Option<usize>) {
    // SAFETY: passed on unchanged.
    unsafe { blocks::<T, O, true>(sources, targets, len, divisor) }
}

#[inline(always)]
unsafe fn blocks<T: Lane, O: Combine<T::Acc>, const F16C: bool>(
    sources: &[In],
    targets: &[Out],
    len: usize,
    divisor: Option<usize>,
) {
    let whole = len - len % BLOCK;
    let mut at = 0;
    while at < whole {
        // SAFETY: at + BLOCK <= len.
        unsafe { block::<T, O, BLOCK, F16C>(sources, targets, at, divisor) };
        at += BLOCK;
    }
    while at < len {
        // SAFETY: at + 1 <= len.
        unsafe { block::<T, O, 1, F16C>(sources, targets, at, divisor) };
        at += 1;
    }
}

/// Elements `at .. at + N`.
#[inline(always)]
unsafe fn block<T: Lane, O: Combine<T::Acc>, const N: usize, const F16C: bool>(
    sources: &[In],
    targets: &[Out],
    at: usize,
    divisor: Option<usize>,
) {
    let mut acc = [T::Acc::default(); N];
    let [first, rest @ ..] = sources else { return };
    // SAFETY: every source has at + N readable elements.
    unsafe { load::<T, N, F16C>(first, at, &mut acc, |_, new| new) };
    for source in rest {
        // SAFETY: as above.
        unsafe { load::<T, N, F16C>(source, at, &mut acc, O::combine) };
    }
    if let Some(by) = divisor {
        for a in &mut acc {
            *a = T::divide(*a, by);
        }
    }
    for target in targets {
        if T::SAME || target.form == Form::Partial {
            // SAFETY: every target has at + N writable elements.
            unsafe { store(target, at, &acc) };
        } else {
            // SAFETY: as above; `run` chose a function whose instruction set the processor has.
            unsafe { store(target, at, &T::narrow_block::<N, F16C>(&acc)) };
        }
    }
}

/// # Safety
/// The target has at + N writable elements of type `V`.
#[inline(always)]
unsafe fn store<V: Copy, const N: usize>(target: &Out, at: usize, values: &[V; N]) {
    let p = target.ptr.cast::<V>().wrapping_add(at);
    if N == BLOCK && target.stream && p.addr() % 64 == 0 {
        // SAFETY: 64-byte aligned, and writable for the whole array, whose size is a multiple of 64 bytes.
        unsafe { stream::store(p, values) };
        return;
    }
    for (i, value) in values.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { p.wrapping_add(i).write_unaligned(*value) };
    }
}

#[inline(always)]
unsafe fn load<T: Lane, const N: usize, const F16C: bool>(
    source: &In,
    at: usize,
    acc: &mut [T::Acc; N],
    with: impl Fn(T::Acc, T::Acc) -> T::Acc,
) {
    if T::SAME || source.form == Form::Partial {
        let p = source.ptr.cast::<T::Acc>().wrapping_add(at);
        for (i, a) in acc.iter_mut().enumerate() {
            // SAFETY: the caller has checked that the source is readable up to at + N.
            *a = with(*a, unsafe { p.wrapping_add(i).read_unaligned() });
        }
    } else {
        // SAFETY: as above; `run` chose a function whose instruction set the processor has.
        let widened = unsafe { T::widen_block::<N, F16C>(source.ptr.cast::<T>().wrapping_add(at)) };
        for (a, w) in acc.iter_mut().zip(widened) {
            *a = with(*a, w);
        }
    }
}
