// SPDX-License-Identifier: MIT OR Apache-2.0
//! Any file given to `--snapshot`: archives, NCCL and hwloc XML, lspci's text. `cargo +nightly fuzz run saved_host`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pcieipc::{
    doctor::{Case, Moment, examine, script},
    topology::import,
};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(host) = import::open(bytes) {
        let moment = Moment::read(&host);
        let _ = script(&examine(&Case::new(&moment)));
    }
});
