// SPDX-License-Identifier: MIT OR Apache-2.0
//! What stands between cards that exchange data: ACS, IOMMU, sockets, shared uplinks.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    case::{Case, file, register},
    finding::{Finding, Report, Severity},
};
use crate::topology::{Acs, Address, Distance, Function, Kind, ReasonCode};

pub(super) fn check(case: &Case<'_>, report: &mut Report) {
    redirect(case, report);
    translation(case, report);
    far(case, report);
    shared_uplinks(case, report);
}

fn names(addresses: impl IntoIterator<Item = Address>) -> String {
    addresses.into_iter().map(|a| a.to_string()).collect::<Vec<_>>().join(", ")
}

/// Switch ports that send requests between peers to the root.
fn redirect(case: &Case<'_>, report: &mut Report) {
    let tree = case.tree();
    let mut ports = BTreeSet::new();
    let mut pairs = 0;
    for (a, b) in case.pairs() {
        let Some(path) = tree.path(a, b) else { continue };
        let at: Vec<Address> =
            path.reasons.iter().filter(|r| r.code == ReasonCode::AcsRedirect).flat_map(|r| r.at.clone()).collect();
        pairs += usize::from(!at.is_empty());
        ports.extend(at);
    }
    if ports.is_empty() {
        return;
    }
    let mut finding = Finding::new(
        "acs-redirect",
        Severity::Warning,
        format!("ACS sends traffic between {pairs} pairs of cards up to the root complex and back"),
    )
    .at_all(ports.iter().copied());
    for port in ports.iter().filter_map(|a| tree.find(*a)) {
        let control = port.capabilities.acs.map_or(0, |a| a.control);
        finding = finding.seen(register(port, "ACSCtl"), format!("{control:#06x}: {}", Acs::names(control).join(" ")));
    }
    report.add(
        finding
            .so("Cards below one switch could talk straight through it. With the redirect, each transfer crosses the switch's uplink twice, shares it with all others, and depends on a root complex that may be slow at it or refuse it: peer-to-peer access then hangs or loses writes on some platforms.")
            .mend("If no virtual machine is given one of these cards, switch the redirect off: disable ACS (or \"ACS control\", and virtualization if nobody needs it) in the firmware's setup, or at run time as in the fix. With virtual machines keep it: it is what isolates them.")
            .fix(
                "Switches request and completion redirect and upstream forwarding off until the next start. Do not do this on a host that gives these cards to virtual machines.",
                ports.iter().map(|p| format!("setpci -s {p} ECAP_ACS+6.w=0:1c")),
            ),
    );
}

fn translation(case: &Case<'_>, report: &mut Report) {
    let tree = case.tree();
    let peers = case.peers();
    if peers.len() < 2 {
        return;
    }
    let mut by_mode = BTreeMap::<&str, Vec<&Function>>::new();
    for function in peers.iter().map(|i| &tree.functions[*i]) {
        match tree.iommu_mode(function) {
            Some("unknown") => report.unchecked(
                "iommu-translating",
                format!("the mode of IOMMU group {} can not be read", function.iommu_group.unwrap_or(0)),
            ),
            Some(mode) => by_mode.entry(mode).or_default().push(function),
            None => {}
        }
    }
    for (mode, functions) in by_mode.iter().filter(|(mode, _)| mode.starts_with("DMA")) {
        let strict = *mode == "DMA";
        let id = if strict { "iommu-strict" } else { "iommu-translating" };
        let what = if strict { "translates in strict mode" } else { "translates" };
        let mut finding =
            Finding::new(id, Severity::Warning, format!("the IOMMU {what} for {}", names(functions.iter().map(|f| f.address))))
                .at_all(functions.iter().map(|f| f.address));
        let groups: BTreeSet<u32> = functions.iter().filter_map(|f| f.iommu_group).collect();
        for group in groups.iter().take(8) {
            finding = finding.seen(format!("/sys/kernel/iommu_groups/{group}/type"), mode);
        }
        let strictly = if strict {
            " Strict mode also flushes the translation cache at each unmap, which costs a lock and some microseconds each time."
        } else {
            ""
        };
        report.add(
            finding
                .so(format!(
                    "Transfers between cards are translated by the root complex, so they can not take the short way through a switch, and peer access of GPUs is slow, refused, or wrong on platforms that do not support it.{strictly}"
                ))
                .mend("On a host that runs no virtual machines with these cards: add `iommu=pt` to the kernel's command line (addresses pass untranslated, interrupts stay isolated). Untrusted cards must stay behind a translating IOMMU.")
                .fix("Makes pass-through the default from the next start on (Debian; other systems have their own boot loader tools).", [
                    r#"sed -i 's/^GRUB_CMDLINE_LINUX="/&iommu=pt /' /etc/default/grub"#.to_owned(),
                    "update-grub".to_owned(),
                ]),
        );
    }
}

/// Peers in different halves of the host.
fn far(case: &Case<'_>, report: &mut Report) {
    let tree = case.tree();
    let mut counts = BTreeMap::<Distance, usize>::new();
    for (a, b) in case.pairs() {
        if let Some(path) = tree.path(a, b) {
            *counts.entry(path.distance).or_default() += 1;
        }
    }
    let peers: Vec<&Function> = case.peers().into_iter().map(|i| &tree.functions[i]).collect();
    let grouped = |key: &dyn Fn(&Function) -> String| {
        let mut groups = BTreeMap::<String, Vec<Address>>::new();
        for function in &peers {
            groups.entry(key(function)).or_default().push(function.address);
        }
        groups
    };
    if let Some(pairs) = counts.get(&Distance::System) {
        let groups = grouped(&|f| f.numa_node.map_or("unknown".into(), |n| n.to_string()));
        let unknown = peers.iter().any(|f| f.numa_node.is_none());
        let mut finding = Finding::new(
            "peers-across-sockets",
            Severity::Warning,
            format!("{pairs} pairs of cards are on different NUMA nodes"),
        )
        .at_all(peers.iter().map(|f| f.address));
        for (node, members) in &groups {
            finding = finding.seen(format!("numa_node of {}", names(members.iter().copied())), node);
        }
        let guess = if unknown { " For some cards the firmware does not name the node; the worst is assumed." } else { "" };
        report.add(
            finding
                .so(format!("Transfers between them cross the interconnect between sockets. It is shared with the processors, peer-to-peer writes through it are often several times slower than inside one socket, and some platforms do not forward them at all.{guess}"))
                .mend("Keep groups that talk most (tensor parallelism) inside one NUMA node; use a hierarchical all-reduce across nodes (pcieipc picks it by itself); bind each rank's process to its card's node."),
        );
    }
    if let Some(pairs) = counts.get(&Distance::Node) {
        let groups = grouped(&|f| f.root.clone());
        let mut finding = Finding::new(
            "peers-across-host-bridges",
            Severity::Info,
            format!("{pairs} pairs of cards hang from different host bridges of one NUMA node"),
        )
        .at_all(peers.iter().map(|f| f.address));
        for (root, members) in &groups {
            finding = finding.seen(format!("/sys/devices/{root}"), names(members.iter().copied()));
        }
        report.add(
            finding
                .so("Transfers between them pass the processor's internal fabric; whether peer-to-peer works there depends on the processor. NCCL does not use peer access at this distance unless NCCL_P2P_LEVEL says so.")
                .mend("Nothing is wrong. Let `pcieipc` probe the paths; compare NCCL with NCCL_P2P_LEVEL=SYS before you judge it."),
        );
    }
}

/// Two or more peers behind one link that can not feed them all.
fn shared_uplinks(case: &Case<'_>, report: &mut Report) {
    let tree = case.tree();
    let mut behind = BTreeMap::<usize, BTreeSet<usize>>::new();
    for peer in case.peers() {
        for port in tree.ancestors(peer).filter(|i| tree.functions[*i].kind == Kind::SwitchUp) {
            behind.entry(port).or_default().insert(peer);
        }
    }
    for (port, cards) in &behind {
        let Some(rate) = tree.hop(*port).and_then(|h| h.gbps()).filter(|_| cards.len() > 1) else { continue };
        // A switch of switches: the one whose cards are the same and whose link is slower speaks for both.
        let outdone = behind.iter().any(|(other, theirs)| {
            other != port
                && theirs == cards
                && tree.hop(*other).and_then(|h| h.gbps()).is_some_and(|r| (r, *other) < (rate, *port))
        });
        let own: Vec<f64> = cards.iter().filter_map(|c| tree.hop(*c)?.gbps()).collect();
        let sum: f64 = own.iter().sum();
        let fastest = own.iter().copied().fold(0.0, f64::max);
        if outdone || sum <= rate * 1.01 {
            continue;
        }
        let narrow = rate < fastest * 0.99;
        let severity = if narrow { Severity::Warning } else { Severity::Info };
        let up = &tree.functions[*port];
        report.add(
            Finding::new("shared-uplink", severity, format!("{} cards share the uplink of {} ({rate:.1} GB/s for {sum:.1} GB/s)", cards.len(), up.label()))
                .at(up.address)
                .at_all(cards.iter().map(|i| tree.functions[*i].address))
                .seen(register(up, "LnkSta"), up.link_now().map_or("unknown".to_owned(), |n| n.to_string()))
                .seen(file(up, ""), names(cards.iter().map(|i| tree.functions[*i].address)))
                .so(format!(
                    "When all of them talk to the processor, or to cards behind another switch, each gets about {:.1} GB/s. Between each other they are not limited, unless ACS or the IOMMU sends them up.",
                    rate / cards.len() as f64
                ))
                .mend(if narrow {
                    "The uplink is slower than a single card's link: give the switch a wider slot, or mend its link; spread cards over several switches."
                } else {
                    "This is how switches are built. Put cards that talk most behind the same switch, and those that feed from memory or network behind different ones."
                }),
        );
    }
}
