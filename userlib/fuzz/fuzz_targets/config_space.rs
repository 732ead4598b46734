// SPDX-License-Identifier: MIT OR Apache-2.0
//! Configuration space of two bridges and a card, with what sysfs says beside it. `scripts/fuzz`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pcieipc::{
    doctor::{Case, Moment, examine},
    topology::{Archive, Origin},
};

fuzz_target!(|bytes: &[u8]| {
    let mut host = Archive::new(Origin::Snapshot);
    let third = bytes.len() / 3;
    for (at, address) in ["0000:00:01.0", "0000:01:00.0", "0000:02:00.0"].into_iter().enumerate() {
        let folder = format!("sys/bus/pci/devices/{address}");
        host.file(&format!("{folder}/config"), &bytes[at * third..(at + 1) * third]);
        host.file(&format!("{folder}/resource"), &bytes[..third.min(200)]);
    }
    let moment = Moment::read(&host);
    let _ = examine(&Case::new(&moment));
    for a in 0..moment.tree.functions.len() {
        for b in 0..moment.tree.functions.len() {
            let _ = moment.tree.path(a, b);
        }
    }
});
