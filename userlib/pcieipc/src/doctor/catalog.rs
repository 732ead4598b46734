// SPDX-License-Identifier: MIT OR Apache-2.0
//! All findings that there are. `docs/doctor.md` explains each; a test compares the two.

/// A kind of finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Stable name.
    pub id: &'static str,
    /// What it says.
    pub summary: &'static str,
}

/// All kinds of findings, by id.
pub const CATALOG: &[Entry] = &[
    Entry { id: "above-4g-off", summary: "no card has memory above 4 GiB" },
    Entry { id: "acs-redirect", summary: "ACS sends traffic between peers up to the root" },
    Entry { id: "aer-absent", summary: "a function on the way can not report errors" },
    Entry { id: "aer-correctable", summary: "errors that the hardware repaired" },
    Entry { id: "aer-fatal", summary: "errors that broke a link" },
    Entry { id: "aer-nonfatal", summary: "errors that lost transactions" },
    Entry { id: "aer-not-native", summary: "the kernel does not own error reporting" },
    Entry { id: "aspm-on", summary: "links may sleep" },
    Entry { id: "bar-small", summary: "a resizable BAR is smaller than it could be" },
    Entry { id: "bar-unassigned", summary: "a BAR has no address" },
    Entry { id: "device-fallen-off", summary: "a card answers all ones" },
    Entry { id: "dpc-triggered", summary: "a port cut off what is below it" },
    Entry { id: "driver-errors", summary: "drivers complained in the kernel log" },
    Entry { id: "function-missing", summary: "a card of the earlier snapshot is gone" },
    Entry { id: "function-new", summary: "a card was not in the earlier snapshot" },
    Entry { id: "iommu-strict", summary: "the IOMMU translates in strict mode" },
    Entry { id: "iommu-translating", summary: "the IOMMU translates" },
    Entry { id: "ipc-namespace", summary: "an IPC namespace of its own" },
    Entry { id: "link-changed", summary: "a link changed speed or width" },
    Entry { id: "link-limited-by-slot", summary: "a card can do more than its slot" },
    Entry { id: "link-speed-reduced", summary: "a link is slower than both ends can" },
    Entry { id: "link-width-reduced", summary: "a link is narrower than both ends can" },
    Entry { id: "memlock-low", summary: "a process may lock too little memory" },
    Entry { id: "module-missing", summary: "the module is not loaded" },
    Entry { id: "module-unsigned", summary: "the module carries no known signature" },
    Entry { id: "module-version", summary: "module and command differ in version" },
    Entry { id: "node-unreadable", summary: "/dev/pcieipc can not be opened" },
    Entry { id: "numa-unknown", summary: "the firmware does not name a card's NUMA node" },
    Entry { id: "payload-unequal", summary: "payload sizes differ" },
    Entry { id: "peers-across-host-bridges", summary: "peers hang from different host bridges" },
    Entry { id: "peers-across-sockets", summary: "peers are on different NUMA nodes" },
    Entry { id: "pid-namespace", summary: "a PID namespace of its own" },
    Entry { id: "recovery-vetoed", summary: "a neighbour without a driver would veto recovery" },
    Entry { id: "relaxed-ordering", summary: "relaxed ordering where it is a hazard" },
    Entry { id: "shared-uplink", summary: "several cards share an uplink that can not feed them all" },
    Entry { id: "shm-small", summary: "/dev/shm is small" },
    Entry { id: "slot-without-function", summary: "a card sits in a slot, but there is no function" },
    Entry { id: "sriov-resources", summary: "virtual functions take what others need" },
    Entry { id: "uplink-narrow", summary: "a link above a card is slower than the card's own" },
    Entry { id: "vm-hides-tree", summary: "a virtual machine hides the tree" },
];

/// The entry with this id.
pub fn entry(id: &str) -> Option<&'static Entry> {
    CATALOG.iter().find(|e| e.id == id)
}
