// SPDX-License-Identifier: MIT OR Apache-2.0
//! What stands between cards that exchange data: ACS, IOMMU, sockets, shared uplinks.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    case::{Look, file, register},
    finding::{Finding, Report, Severity},
};
use crate::topology::{Acs, Address, Function, Kind};

pub(super) fn check(case: &Look<'_>, report: &mut Report) {
    redirect(case, report);
    translation(case, report);
    far(case, report);
    shared_uplinks(case, report);
}

fn names(addresses: impl IntoIterator<Item = Address>) -> String {
    addresses.into_iter().map(|a| a.to_string()).collect::<Vec<_>>().join(", ")
}

/// Switch ports that send requests between peers to the root.
fn redirect(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let redirects = |i: usize| {
        let function = &tree.functions[i];
        function.kind == Kind::SwitchDown && function.capabilities.acs.is_some_and(|a| a.redirects_requests())
    };
    // Peers at or below each function, and those among them from which no port on the way up to it redirects.
    let mut below = BTreeMap::<usize, (u64, u64)>::new();
    for peer in case.peers() {
        let mut clean = true;
        for at in std::iter::once(*peer).chain(tree.ancestors(*peer)) {
            clean &= !redirects(at);
            let (all, straight) = below.entry(at).or_default();
            *all += 1;
            *straight += u64::from(clean);
        }
    }
    // Pairs that meet at a function are those below it that do not meet below one of its children already; a pair talks straight when
    // neither's way there is redirected.
    let mut met = BTreeMap::<usize, (u64, u64)>::new();
    for (index, (all, straight)) in &below {
        if let Some(parent) = tree.functions[*index].parent {
            let (pairs, direct) = met.entry(parent).or_default();
            *pairs += pairs_among(*all);
            *direct += pairs_among(*straight);
        }
    }
    let mut pairs = 0;
    for (index, (all_apart, direct_apart)) in &met {
        let children = tree.functions[*index].children.iter().filter_map(|c| below.get(c));
        let (all, straight) = children.fold((0, 0), |(all, straight), (a, s)| (all + a, straight + s));
        pairs += (pairs_among(all) - all_apart) - (pairs_among(straight) - direct_apart);
    }
    // Ports with a peer below, and one that is beside.
    let mut ports = BTreeSet::new();
    for (index, (all, _)) in below.iter().filter(|(i, _)| redirects(**i)) {
        let top = tree.ancestors(*index).last().and_then(|top| below.get(&top));
        if top.is_some_and(|(everybody, _)| everybody > all) {
            ports.insert(tree.functions[*index].address);
        }
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

fn translation(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let peers = case.peers();
    if peers.len() < 2 {
        return;
    }
    let mut by_mode = BTreeMap::<&str, Vec<&Function>>::new();
    for function in peers.iter().map(|i| &tree.functions[*i]) {
        match tree.iommu_mode(function) {
            // What is not known is told elsewhere.
            Some("unknown") => {}
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
fn far(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let peers: Vec<&Function> = case.peers().iter().map(|i| &tree.functions[*i]).collect();
    let known: Vec<&Function> = peers.iter().copied().filter(|f| f.numa_node.is_some()).collect();
    let apart = pairs_apart(&peers, |_| None);
    // Where the host has one node only, what is not known is near to that one.
    let unknown = if tree.numa_nodes.len() <= 1 { apart - pairs_apart(&known, |_| None) } else { 0 };
    let near = pairs_apart(&known, |f| f.numa_node) + unknown;
    let across = apart - near;
    let grouped = |key: &dyn Fn(&Function) -> String| {
        let mut groups = BTreeMap::<String, Vec<Address>>::new();
        for function in &peers {
            groups.entry(key(function)).or_default().push(function.address);
        }
        groups
    };
    if across > 0 {
        let groups = grouped(&|f| f.numa_node.map_or("unknown".into(), |n| n.to_string()));
        let unknown = peers.iter().any(|f| f.numa_node.is_none());
        let mut finding = Finding::new(
            "peers-across-sockets",
            Severity::Warning,
            format!("{across} pairs of cards are on different NUMA nodes"),
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
    if near > 0 {
        let groups = grouped(&|f| f.root.clone());
        let mut finding = Finding::new(
            "peers-across-host-bridges",
            Severity::Info,
            format!("{near} pairs of cards hang from different host bridges of one NUMA node"),
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

/// Pairs that share a node and hang from different host bridges.
fn pairs_apart(functions: &[&Function], node: impl Fn(&Function) -> Option<u32>) -> u64 {
    let mut together = BTreeMap::<Option<u32>, u64>::new();
    let mut below_one = BTreeMap::<(Option<u32>, &str), u64>::new();
    for function in functions {
        *together.entry(node(function)).or_default() += 1;
        *below_one.entry((node(function), function.root.as_str())).or_default() += 1;
    }
    together.into_values().map(pairs_among).sum::<u64>() - below_one.into_values().map(pairs_among).sum::<u64>()
}

fn pairs_among(count: u64) -> u64 {
    count * count.saturating_sub(1) / 2
}

/// Two or more peers behind one link that can not feed them all.
fn shared_uplinks(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let mut behind = BTreeMap::<usize, Vec<usize>>::new();
    for peer in case.peers() {
        for port in tree.ancestors(*peer).filter(|i| tree.functions[*i].kind == Kind::SwitchUp) {
            behind.entry(port).or_default().push(*peer);
        }
    }
    // A switch of switches: of those with the same cards, the one with the slowest link speaks for all. Cards below two ports are the same, or of
    // one inside the other's, or have none in common; so the first and the number tell.
    let mut speakers = BTreeMap::<(usize, usize), (f64, usize)>::new();
    for (port, cards) in &behind {
        let (Some(rate), Some(first)) = (tree.hop(*port).and_then(|h| h.gbps()), cards.first()) else { continue };
        let speaker = speakers.entry((*first, cards.len())).or_insert((rate, *port));
        if (rate, *port) < *speaker {
            *speaker = (rate, *port);
        }
    }
    for ((_, count), (rate, port)) in &speakers {
        let Some(cards) = behind.get(port).filter(|_| *count > 1) else { continue };
        let own: Vec<f64> = cards.iter().filter_map(|c| tree.hop(*c)?.gbps()).collect();
        let sum: f64 = own.iter().sum();
        let fastest = own.iter().copied().fold(0.0, f64::max);
        if sum <= rate * 1.01 {
            continue;
        }
        let narrow = *rate < fastest * 0.99;
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
