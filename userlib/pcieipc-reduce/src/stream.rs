// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stores that do not pull their lines into this processor's cache.

/// Stores a block of 64 elements.
///
/// # Safety
/// `to` is aligned to 64 bytes and writable for the whole array.
#[inline(always)]
pub unsafe fn store<V: Copy, const N: usize>(to: *mut V, values: &[V; N]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        let from = values.as_ptr().cast::<__m128i>();
        for i in 0..size_of::<[V; N]>() / 16 {
            // SAFETY: both sides hold the whole array; every x86-64 processor has SSE2.
            unsafe { _mm_stream_si128(to.cast::<__m128i>().add(i), _mm_loadu_si128(from.add(i))) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's promise.
    unsafe {
        to.cast::<[V; N]>().write(*values);
    }
}

/// Orders all streamed stores before all that follow.
#[inline(always)]
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
