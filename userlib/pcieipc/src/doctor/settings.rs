// SPDX-License-Identifier: MIT OR Apache-2.0
//! Settings of links and functions that cost speed or order: ASPM, payload sizes, relaxed ordering, NUMA nodes left out.

use std::collections::{BTreeMap, HashSet};

use super::{
    case::{Look, file, register},
    finding::{Finding, Report, Severity},
};
use crate::topology::{Address, Function, Kind};

pub(super) fn check(case: &Look<'_>, report: &mut Report) {
    aspm(case, report);
    payload(case, report);
    relaxed_ordering(case, report);
    numa(case, report);
}

fn names(functions: &[&Function]) -> String {
    functions.iter().map(|f| f.address.to_string()).collect::<Vec<_>>().join(", ")
}

fn aspm(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let sleeps = |f: &Function| f.capabilities.link.as_ref().is_some_and(|l| l.aspm_enabled.any());
    // A link sleeps only where both ends allow it; the upper end decides for L1.
    let cards: Vec<(usize, Vec<&Function>)> = (0..tree.functions.len())
        .filter(|i| case.matters(&tree.functions[*i]) && tree.functions[*i].physical_function.is_none())
        .filter_map(|i| {
            let ends = tree
                .hops(i)
                .into_iter()
                .filter(|h| sleeps(&tree.functions[h.card]) && h.port.is_none_or(|p| sleeps(&tree.functions[p])));
            let on: Vec<&Function> = ends.map(|h| &tree.functions[h.card]).collect();
            (!on.is_empty()).then_some((i, on))
        })
        .collect();
    if cards.is_empty() {
        return;
    }
    let functions: Vec<&Function> = cards.iter().map(|(i, _)| &tree.functions[*i]).collect();
    let mut finding =
        Finding::new("aspm-on", Severity::Warning, format!("links on the way to {} may sleep (ASPM)", names(&functions)))
            .at_all(functions.iter().map(|f| f.address));
    let mut ends: Vec<&Function> = cards.iter().flat_map(|(_, on)| on.iter().copied()).collect();
    ends.sort_by_key(|f| f.address);
    ends.dedup_by_key(|f| f.address);
    for end in ends.iter().take(8) {
        let aspm = end.capabilities.link.as_ref().map(|l| l.aspm_enabled).unwrap_or_default();
        finding = finding.seen(register(end, "LnkCtl"), format!("ASPM {aspm}"));
    }
    if let Some(policy) = &case.now.host.aspm_policy {
        finding = finding.seen("/sys/module/pcie_aspm/parameters/policy", policy);
    }
    report.add(
        finding
            .so("A link that fell asleep takes microseconds to wake, which small messages pay in full; cards whose wake-up is faulty drop to a lower speed or off the bus.")
            .mend("Choose the policy `performance`, or add `pcie_aspm=off` to the kernel's command line, or switch ASPM off in the firmware's setup.")
            .fix("Keeps links awake until the next start.", ["echo performance > /sys/module/pcie_aspm/parameters/policy".to_owned()]),
    );
}

/// Payload sizes on the ways between peers.
fn payload(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let mut sizes = BTreeMap::<u32, Vec<Address>>::new();
    let mut mismatch: Vec<(&Function, &Function)> = Vec::new();
    let mut told = HashSet::new();
    for &index in case.peers() {
        let function = &tree.functions[index];
        // Virtual functions take the setting from their physical function.
        let Some(express) = function.capabilities.express.as_ref().filter(|_| function.physical_function.is_none()) else {
            continue;
        };
        sizes.entry(express.payload).or_default().push(function.address);
        // A port that takes less than its card sends breaks the card's writes (malformed packets).
        let chain = std::iter::once(index).chain(tree.ancestors(index)).collect::<Vec<_>>();
        for pair in chain.windows(2) {
            let (lower, upper) = (&tree.functions[pair[0]], &tree.functions[pair[1]]);
            if let (Some(a), Some(b)) = (&lower.capabilities.express, &upper.capabilities.express) {
                if a.payload > b.payload && told.insert(lower.address) {
                    mismatch.push((lower, upper));
                }
            }
        }
    }
    if sizes.len() < 2 && mismatch.is_empty() {
        return;
    }
    let severity = if mismatch.is_empty() { Severity::Warning } else { Severity::Error };
    let described = sizes
        .iter()
        .map(|(size, who)| format!("{size} bytes: {}", who.iter().map(Address::to_string).collect::<Vec<_>>().join(", ")))
        .collect::<Vec<_>>();
    let title = if mismatch.is_empty() {
        format!("cards use different payload sizes ({})", described.join("; "))
    } else {
        "a card sends larger packets than the port above it takes".to_owned()
    };
    let mut finding = Finding::new("payload-unequal", severity, title).at_all(sizes.values().flatten().copied());
    if let Some((lower, upper)) = mismatch.first() {
        finding.at.clear();
        finding = finding.at(lower.address).at(upper.address);
    }
    let shown: Vec<&Function> = if mismatch.is_empty() {
        sizes.values().flatten().filter_map(|a| tree.find(*a)).collect()
    } else {
        mismatch.iter().flat_map(|(a, b)| [*a, *b]).collect()
    };
    for function in shown.iter().take(8) {
        if let Some(express) = &function.capabilities.express {
            finding = finding.seen(
                register(function, "DevCtl"),
                format!("MaxPayload {} bytes (supports {})", express.payload, express.payload_supported),
            );
        }
    }
    report.add(
        finding
            .so("A packet larger than the receiver's setting is malformed and a fatal error; the kernel therefore keeps both sides small where it can, and a card with small packets spends more of its link on headers.")
            .mend("Add `pci=pcie_bus_safe` to the kernel's command line (or `pci=pcie_bus_perf` where no cards are plugged while it runs), and set the same payload size for all slots in the firmware's setup."),
    );
}

/// Root ports whose chips break the rules of relaxed ordering; the kernel's own list of them.
fn breaks_relaxed_ordering(function: &Function) -> bool {
    matches!(
        (function.identity.vendor, function.identity.device),
        (0x8086, 0x6f01..=0x6f0e | 0x2f01..=0x2f0e) | (0x1022, 0x1a00..=0x1a02)
    )
}

fn relaxed_ordering(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let relaxed = |f: &Function| f.capabilities.express.as_ref().is_some_and(|e| e.relaxed_ordering);
    let peers = case.peers();
    let on = |wanted: &dyn Fn(usize) -> bool| -> Vec<&Function> {
        peers.iter().filter(|i| relaxed(&tree.functions[**i]) && wanted(**i)).map(|i| &tree.functions[*i]).collect()
    };
    let behind_bad = on(&|i| tree.ancestors(i).any(|a| breaks_relaxed_ordering(&tree.functions[a])));
    // A GPU's own copy engines order the flag behind the data; programmable endpoints rely on the fabric for it.
    let flags = on(&|i| matches!(tree.functions[i].kind, Kind::Fpga | Kind::Accelerator));
    for (functions, severity, why, remedy) in [
        (
            behind_bad,
            Severity::Warning,
            "The root port above these cards is known to be slow or wrong with relaxed ordering (the kernel switches it off for its own drivers).",
            "Clear the bit, or let the card's driver do it; current kernels do it for drivers that ask.",
        ),
        (
            flags,
            Severity::Info,
            "These endpoints may mark their writes as relaxed. A flag that is marked so can be seen before the data it announces.",
            "Make sure that the endpoint sends flags and doorbells without the relaxed mark (or clear the bit); use checked mode while you try.",
        ),
    ] {
        if functions.is_empty() {
            continue;
        }
        let mut finding = Finding::new("relaxed-ordering", severity, format!("relaxed ordering is on for {}", names(&functions)))
            .at_all(functions.iter().map(|f| f.address));
        for function in functions.iter().take(8) {
            finding = finding.seen(register(function, "DevCtl"), "RlxdOrd+");
        }
        let commands: Vec<String> = functions.iter().map(|f| format!("setpci -s {} CAP_EXP+8.w=0:10", f.address)).collect();
        report.add(finding.so(why).mend(remedy).fix("Clears the bit until the card's next reset.", commands));
    }
}

fn numa(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    if tree.numa_nodes.len() < 2 {
        return;
    }
    let lost: Vec<&Function> = case.peers().iter().map(|i| &tree.functions[*i]).filter(|f| f.numa_node.is_none()).collect();
    if lost.is_empty() {
        return;
    }
    let mut finding = Finding::new(
        "numa-unknown",
        Severity::Warning,
        format!("the firmware does not say which NUMA node {} are near to", names(&lost)),
    )
    .at_all(lost.iter().map(|f| f.address));
    for function in lost.iter().take(8) {
        finding = finding.seen(file(function, "numa_node"), -1);
    }
    report.add(
        finding
            .so("Buffers may lie in the far socket's memory, and processes may be bound to the wrong one.")
            .mend("Update the firmware and switch its NUMA options on (SRAT, \"NUMA nodes per socket\"); meanwhile measure from each node and bind by hand."),
    );
}
