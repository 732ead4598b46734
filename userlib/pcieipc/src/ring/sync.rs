// SPDX-License-Identifier: MIT OR Apache-2.0
//! The atomics that both sides share: the standard library's, or the model checker's under `cfg(loom)`.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// A sequentially consistent fence. On x86-64 compilers make it an `mfence`, which also orders what nobody here asks for and takes several
/// times as long as a locked instruction; that is as good a fence for ordinary memory.
///
/// ```
/// pcieipc::ring::full_fence();
/// ```
#[inline(always)]
pub fn full_fence() {
    #[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
    // SAFETY: adds no bit to a word of this thread's stack; the compiler moves no access to memory across it.
    unsafe {
        std::arch::asm!("lock or dword ptr [rsp - 64], 0", options(nostack));
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom), not(miri))))]
    {
        #[cfg(loom)]
        use loom::sync::atomic::fence;
        #[cfg(not(loom))]
        use std::sync::atomic::fence;
        fence(Ordering::SeqCst);
    }
}

/// Asks for a line that is about to be read; it never faults, and changes nothing but caches.
#[inline(always)]
pub fn fetch(line: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
    // SAFETY: the instruction takes any address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom), not(miri))))]
    let _ = line;
}
