// SPDX-License-Identifier: MIT OR Apache-2.0
//! What could not be looked at, and why: silence must always mean "looked, and found nothing".

use super::{case::Look, finding::Report};
use crate::topology::{Function, Kind, Origin, Reach};

/// Findings that are about the host around the tree.
const HOST: &[&str] = &[
    "driver-errors",
    "ipc-namespace",
    "memlock-low",
    "module-missing",
    "module-unsigned",
    "module-version",
    "node-unreadable",
    "pid-namespace",
    "shm-small",
];
/// Findings that rest on registers past the first 64 bytes of configuration space.
const REGISTERS: &[&str] = &[
    "acs-redirect",
    "aer-absent",
    "aspm-on",
    "bar-small",
    "dpc-triggered",
    "link-changed",
    "payload-unequal",
    "relaxed-ordering",
    "slot-without-function",
];
const AER: &[&str] = &["aer-correctable", "aer-fatal", "aer-nonfatal"];
const IOMMU: &[&str] = &["iommu-strict", "iommu-translating"];
const ADDRESS_SPACE: &[&str] = &["above-4g-off", "bar-unassigned", "sriov-resources"];
const LINKS: &[&str] =
    &["link-changed", "link-limited-by-slot", "link-speed-reduced", "link-width-reduced", "shared-uplink", "uplink-narrow"];

pub(super) fn check(case: &Look<'_>, report: &mut Report) {
    match case.tree().origin {
        Origin::Live | Origin::Snapshot => {
            registers(case, "configuration space past its first 64 bytes is shown to root only; run as root", report);
            links(case, report);
            counters(case, report);
            root_ports(case, report);
            translation(case, report);
            host(case, report);
        }
        Origin::Lspci => {
            registers(case, "only the first 64 bytes of configuration space are there; run `lspci -vvvxxxx` as root", report);
            links(case, report);
            tell(report, AER, "lspci prints no error counters");
            tell(report, &["aer-not-native"], "lspci does not say which services the kernel runs");
            tell(report, IOMMU, "lspci prints IOMMU groups, but not how they translate");
            let nodes = "lspci does not say how many NUMA nodes the host has";
            tell(report, &["numa-unknown", "peers-across-sockets", "peers-across-host-bridges"], nodes);
            tell(report, &["vm-hides-tree"], "lspci does not say whether this is a virtual machine");
            tell(report, HOST, "lspci says nothing about the kernel log, limits, namespaces and modules");
        }
        Origin::NcclXml => {
            another_tool(report, "NCCL's file");
            tell(report, LINKS, "NCCL's file has links at their best, not as they are now");
            tell(report, &["peers-across-host-bridges"], "NCCL's file leaves host bridges out");
        }
        Origin::HwlocXml => {
            another_tool(report, "hwloc's file");
            tell(report, LINKS, "hwloc's file has one bandwidth for each device, and no speed and width at best");
        }
    }
    compared(case, report);
}

fn tell(report: &mut Report, ids: &[&'static str], why: &str) {
    ids.iter().for_each(|id| report.unchecked(id, why));
}

/// NCCL and hwloc know ids and places.
fn another_tool(report: &mut Report, file: &str) {
    tell(report, REGISTERS, &format!("{file} holds no registers"));
    tell(report, AER, &format!("{file} holds no error counters"));
    tell(report, &["aer-not-native"], &format!("{file} does not say which services the kernel runs"));
    tell(report, IOMMU, &format!("{file} says nothing about the IOMMU"));
    tell(report, ADDRESS_SPACE, &format!("{file} holds no BARs"));
    tell(report, &["device-fallen-off"], &format!("{file} does not say whether a card answers"));
    tell(report, &["recovery-vetoed"], &format!("{file} names no drivers"));
    tell(report, &["vm-hides-tree"], &format!("{file} does not say whether this is a virtual machine"));
    tell(report, HOST, &format!("{file} says nothing about the kernel log, limits, namespaces and modules"));
}

/// `3 functions (0000:01:00.0, …)`
fn some(functions: &[&Function]) -> String {
    let mut names: Vec<String> = functions.iter().take(4).map(|f| f.address.to_string()).collect();
    if functions.len() > names.len() {
        names.push("…".into());
    }
    let what = if functions.len() == 1 { "function" } else { "functions" };
    format!("{} {what} ({})", functions.len(), names.join(", "))
}

/// Functions that a finding could be about.
fn on_the_way<'a>(case: &Look<'a>) -> impl Iterator<Item = (usize, &'a Function)> {
    let leads: Vec<bool> = (0..case.tree().functions.len()).map(|i| case.leads_to_one(i)).collect();
    case.tree().functions.iter().enumerate().filter(move |(i, _)| leads[*i])
}

fn registers(case: &Look<'_>, refused: &str, report: &mut Report) {
    // An empty slot's port leads to nothing and is looked at all the same.
    let port = |f: &Function| matches!(f.kind, Kind::RootPort | Kind::SwitchDown | Kind::Bridge);
    let with = |reach: Reach| -> Vec<&Function> {
        let all = case.tree().functions.iter().enumerate();
        all.filter(|(i, f)| f.reach == reach && (case.leads_to_one(*i) || port(f))).map(|(_, f)| f).collect()
    };
    if !with(Reach::Header).is_empty() {
        tell(report, REGISTERS, refused);
        let placed = case.tree().functions.iter().any(|f| f.bars.iter().any(|b| b.start >= 1 << 32));
        if !placed {
            report.unchecked("above-4g-off", refused);
        }
    }
    for (reach, why) in [
        (Reach::Asleep, "sleep and were left asleep; look again while they work"),
        (Reach::AllOnes, "do not answer"),
        (Reach::Unreadable, "have a configuration space that could not be read (see the notes)"),
    ] {
        let functions = with(reach);
        if !functions.is_empty() {
            tell(report, REGISTERS, &format!("{} {why}", some(&functions)));
        }
    }
}

fn links(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let known = |i: usize| tree.hop(i).is_none_or(|h| h.now.is_some() && h.best.is_some());
    let unknown: Vec<&Function> = on_the_way(case).filter(|(i, _)| !known(*i)).map(|(_, f)| f).collect();
    if !unknown.is_empty() {
        let why = format!("the link of {} can not be read, now or at best, or is down", some(&unknown));
        tell(report, LINKS, &why);
    }
    // What has a link and hides it even from files, as bridges do whose port type is not known.
    let hidden: Vec<&Function> = on_the_way(case)
        .filter(|(_, f)| f.kind == Kind::Bridge && f.reach != Reach::Full && f.capabilities.link.is_none())
        .map(|(_, f)| f)
        .collect();
    if !hidden.is_empty() {
        tell(report, LINKS, &format!("whether {} have links is not known", some(&hidden)));
    }
}

fn counters(case: &Look<'_>, report: &mut Report) {
    // Without registers nobody knows whether a function has AER; without AER it has no counters.
    let blind: Vec<&Function> = on_the_way(case)
        .map(|(_, f)| f)
        .filter(|f| f.aer.is_none() && (f.capabilities.aer.is_some() || f.reach != Reach::Full && f.capabilities.link.is_some()))
        .collect();
    if !blind.is_empty() {
        tell(report, AER, &format!("sysfs has no error counters of {}", some(&blind)));
    }
}

/// Whether the ports at the top report errors at all.
fn root_ports(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let tops = case.peers().iter().filter_map(|i| tree.ancestors(*i).last()).map(|i| &tree.functions[i]);
    let unknown = |f: &&Function| {
        let told = f.capabilities.aer.is_some() || f.aer.is_some();
        matches!(f.kind, Kind::RootPort | Kind::Bridge) && f.reach != Reach::Full && !told
    };
    let mut unknown: Vec<&Function> = tops.filter(unknown).collect();
    unknown.sort_by_key(|f| f.address);
    unknown.dedup_by_key(|f| f.address);
    if !unknown.is_empty() {
        report.unchecked("aer-not-native", format!("whether {} have AER is not known", some(&unknown)));
    }
}

fn translation(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let unknown = |f: &&Function| f.iommu_group.is_some() && tree.iommu_mode(f).is_none_or(|mode| mode == "unknown");
    let functions: Vec<&Function> = case.peers().iter().map(|i| &tree.functions[*i]).filter(unknown).collect();
    if !functions.is_empty() {
        tell(report, IOMMU, &format!("the mode of the IOMMU group of {} can not be read", some(&functions)));
    }
}

fn host(case: &Look<'_>, report: &mut Report) {
    let host = &case.now.host;
    if host.log.is_none() {
        report.unchecked("driver-errors", "the kernel log can not be read; run as root");
    }
    if host.memlock.is_none() {
        report.unchecked("memlock-low", "/proc/self/limits can not be read");
    }
    if host.initial_pid_namespace.is_none() {
        report.unchecked("pid-namespace", "/proc/self/ns/pid can not be read");
    }
    if host.initial_ipc_namespace.is_none() {
        report.unchecked("ipc-namespace", "/proc/self/ns/ipc can not be read");
    }
    if host.cpu_vendor.is_empty() && host.machine.is_empty() && host.hypervisor.is_none() {
        report.unchecked("vm-hides-tree", "neither /proc/cpuinfo nor the firmware's tables say what machine this is");
    }
    match &host.facts {
        None => tell(report, &["shm-small", "node-unreadable"], "the answers of system calls are not there"),
        Some(facts) => {
            if facts.shm_bytes.is_none() {
                report.unchecked("shm-small", "/dev/shm is not there or can not be asked");
            }
        }
    }
    let module = &host.module;
    if module.loaded {
        if module.version.is_none() {
            report.unchecked("module-version", "/sys/module/pcieipc/version can not be read");
        }
        if host.facts.as_ref().is_none_or(|f| f.module.is_none()) {
            report.unchecked("module-version", "the module's ABI can not be asked: /dev/pcieipc could not be opened");
        }
        // A module from outside the kernel's tree has one letter at least.
        if module.taint.is_empty() {
            report.unchecked("module-unsigned", "/sys/module/pcieipc/taint can not be read");
        }
    }
}

/// What needs two looks.
fn compared(case: &Look<'_>, report: &mut Report) {
    if case.later.is_some() || case.since.is_some() {
        return;
    }
    let how = match case.tree().origin {
        Origin::Live => "look for some time (--sample) or give an earlier snapshot (--since)",
        _ => "give an earlier snapshot (--since)",
    };
    let why = format!("there is one look only, so nothing was compared; {how}");
    tell(report, &["function-missing", "function-new", "link-changed"], &why);
    if case.tree().functions.iter().any(|f| f.aer.is_some()) {
        tell(report, AER, &format!("there is one look only, so errors that rise are not told from old ones; {how}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::CATALOG;

    #[test]
    fn what_is_told_to_be_unchecked_is_in_the_catalogue() {
        for id in [HOST, REGISTERS, AER, IOMMU, ADDRESS_SPACE, LINKS].concat() {
            assert!(CATALOG.iter().any(|e| e.id == id), "{id}");
        }
    }
}
