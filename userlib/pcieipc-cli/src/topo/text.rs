// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tree for a terminal.

use std::fmt::Write;

use pcieipc::topology::{Address, Function, Kind, Reach, Topology};

/// Draws host bridges, ports, switches and cards, one a line, with the link above each.
pub fn draw(tree: &Topology, everything: bool) -> String {
    let mut drawing = Drawing { tree, shown: shown(tree, everything), out: String::new() };
    for node in &tree.numa_nodes {
        let socket = node.socket.map_or(String::new(), |s| format!(", socket {s}"));
        let _ = writeln!(drawing.out, "NUMA node {}{socket}: processors {}", node.id, node.cpus);
    }
    for root in &tree.roots {
        if !everything && !root.children.iter().any(|c| drawing.shown[*c]) {
            continue;
        }
        let near = root.numa_node.map_or("NUMA node unknown".to_owned(), |n| format!("NUMA node {n}"));
        let _ = writeln!(drawing.out, "host bridge {} ({near})", root.name);
        drawing.children(&root.children, "");
    }
    if tree.functions.is_empty() {
        let _ = writeln!(drawing.out, "no PCI functions were found");
    }
    drawing.out
}

/// Which functions a drawing has: all, or cards and the bridges that lead to one.
pub fn shown(tree: &Topology, everything: bool) -> Vec<bool> {
    let mut shown = vec![everything; tree.functions.len()];
    for (index, function) in tree.functions.iter().enumerate() {
        let in_trouble = function.reach == Reach::AllOnes || function.capabilities.dpc.is_some_and(|d| d.triggered);
        let card = !matches!(function.kind, Kind::HostBridge | Kind::Other | Kind::Display) && !function.kind.is_bridge();
        let mut at = Some(index).filter(|_| in_trouble || card);
        while let Some(up) = at.filter(|i| !shown[*i]) {
            shown[up] = true;
            at = tree.functions[up].parent;
        }
    }
    shown
}

struct Drawing<'a> {
    tree: &'a Topology,
    shown: Vec<bool>,
    out: String,
}

impl Drawing<'_> {
    fn children(&mut self, children: &[usize], indent: &str) {
        let shown: Vec<usize> = children.iter().copied().filter(|c| self.shown[*c]).collect();
        for (at, index) in shown.iter().enumerate() {
            let last = at + 1 == shown.len();
            let (branch, below) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            let line = describe(self.tree, *index);
            let _ = writeln!(self.out, "{indent}{branch}{line}");
            let children = self.tree.functions[*index].children.clone();
            self.children(&children, &format!("{indent}{below}"));
        }
    }
}

/// One function in one line.
pub fn describe(tree: &Topology, index: usize) -> String {
    let function = &tree.functions[index];
    let mut line = format!("{} {}", function.address, function.kind.word());
    if !function.kind.is_bridge() {
        let _ = write!(line, " {}", function.name);
    }
    match function.reach {
        Reach::AllOnes => line.push_str(", FALLEN OFF THE BUS (reads all ones)"),
        Reach::Asleep => line.push_str(", asleep"),
        Reach::Unreadable if tree.missing.is_empty() => line.push_str(", not readable"),
        Reach::Unreadable | Reach::Full | Reach::Header => {}
    }
    if let Some(link) = link(tree, index) {
        let _ = write!(line, ", {link}");
    }
    for part in details(function) {
        let _ = write!(line, ", {part}");
    }
    line
}

/// The link above: as trained, and at best where that is more.
fn link(tree: &Topology, index: usize) -> Option<String> {
    let hop = tree.hop(index)?;
    Some(match (hop.now, hop.best, hop.reported_gbps) {
        (Some(now), Some(best), _) if now.below(best) => format!("{now} (DEGRADED, {best} at best)"),
        (Some(now), ..) => now.to_string(),
        (None, _, Some(gbps)) => format!("{gbps:.1} GB/s"),
        (None, Some(_), None) => "link down or unknown".into(),
        (None, None, None) => return None,
    })
}

fn details(function: &Function) -> Vec<String> {
    let mut parts = Vec::new();
    if !function.kind.is_bridge() {
        parts.extend(function.driver.as_ref().map(|d| format!("driver {d}")));
        parts.extend(function.numa_node.map(|n| format!("NUMA {n}")));
        parts.extend(function.iommu_group.map(|g| format!("IOMMU group {g}")));
    }
    if let Some(slot) = function.capabilities.slot.as_ref().filter(|s| s.number != 0) {
        parts.push(format!("slot {}{}", slot.number, if slot.hot_plug { " hot-plug" } else { "" }));
    }
    if function.kind == Kind::SwitchDown && function.capabilities.acs.is_some_and(|a| a.redirects_requests()) {
        parts.push("ACS redirects".into());
    }
    if let Some(sriov) = function.capabilities.sriov.filter(|s| s.active > 0) {
        parts.push(format!("{} of {} virtual functions", sriov.active, sriov.total));
    }
    parts.extend(function.physical_function.map(|p: Address| format!("virtual function of {p}")));
    if !function.mig.is_empty() {
        parts.push(format!("{} MIG instances", function.mig.len()));
    }
    parts.extend(function.interfaces.iter().filter_map(|i| i.rsplit('/').next()).map(str::to_owned));
    parts
}
