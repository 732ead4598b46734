// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters, kernel messages and the host's files. `scripts/fuzz`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pcieipc::topology::{Address, Archive, Host, Origin, Topology, aer, uevent};

fuzz_target!(|bytes: &[u8]| {
    let _ = uevent::parse(bytes);
    let text = String::from_utf8_lossy(bytes);
    let _ = aer::parse(&text);
    let _ = text.parse::<Address>();
    let mut host = Archive::new(Origin::Snapshot);
    let folder = "sys/bus/pci/devices/0000:01:00.0";
    for file in ["uevent", "resource", "aer_dev_correctable", "current_link_speed", "max_link_width", "reset_method", "numa_node", "class"] {
        host.file(&format!("{folder}/{file}"), bytes);
    }
    for file in ["proc/cpuinfo", "proc/iomem", "proc/self/limits", "proc/cmdline", "pcieipc/kernel.log", "pcieipc/facts.json", "sys/devices/system/node/node0/cpulist"] {
        host.file(file, bytes);
    }
    let _ = Host::read(&host);
    let _ = Topology::read(&host);
});
