// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles the ring with the model checker's atomics.

fn main() {
    println!("cargo:rustc-check-cfg=cfg(loom)");
    println!("cargo:rustc-cfg=loom");
}
