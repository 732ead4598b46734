// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds out what this compiler can do beyond the oldest that is supported.

fn main() {
    // AVX-512 as a target feature is stable from 1.89 on; an older compiler leaves AVX2 as the widest.
    autocfg::emit_possibility("pcieipc_avx512");
    if autocfg::new().probe_rustc_version(1, 89) {
        autocfg::emit("pcieipc_avx512");
    }
    autocfg::rerun_path("build.rs");
}
