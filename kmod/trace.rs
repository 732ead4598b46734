// SPDX-License-Identifier: GPL-2.0

//! Tracepoints, in `pcieipc_trace.c`; they cost a call and a branch that is not taken while nobody listens.

unsafe extern "C" {
    fn pcieipc_trace_doorbell(endpoint: u32, vector: u32);
    fn pcieipc_trace_interrupt(endpoint: u32, vector: u32);
    fn pcieipc_trace_event(endpoint: u32, kind: u32, generation: u64, detail0: u64, detail1: u64);
    fn pcieipc_trace_state(endpoint: u32, from: u32, to: u32, generation: u64);
}

/// A doorbell was rung.
pub(crate) fn doorbell(endpoint: u32, vector: u32) {
    // SAFETY: Takes numbers only.
    unsafe { pcieipc_trace_doorbell(endpoint, vector) };
}

/// An interrupt was taken.
pub(crate) fn interrupt(endpoint: u32, vector: u32) {
    // SAFETY: Takes numbers only.
    unsafe { pcieipc_trace_interrupt(endpoint, vector) };
}

/// An event happened.
pub(crate) fn event(endpoint: u32, kind: u32, generation: u64, detail: &[u64; 4]) {
    // SAFETY: Takes numbers only.
    unsafe { pcieipc_trace_event(endpoint, kind, generation, detail[0], detail[1]) };
}

/// An endpoint changed its state.
pub(crate) fn state(endpoint: u32, from: u32, to: u32, generation: u64) {
    // SAFETY: Takes numbers only.
    unsafe { pcieipc_trace_state(endpoint, from, to, generation) };
}
