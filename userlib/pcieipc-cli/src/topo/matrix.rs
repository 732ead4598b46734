// SPDX-License-Identifier: MIT OR Apache-2.0
//! The matrix of distances, in the letters of `nvidia-smi topo -m`.

use std::fmt::Write;

use pcieipc::topology::{Distance, Kind, Topology};

/// The functions that the matrix compares: what exchanges data and what carries it off the host.
pub fn members(tree: &Topology) -> Vec<usize> {
    let wanted = |index: &usize| {
        let function = &tree.functions[*index];
        function.kind.is_peer() || function.kind == Kind::Nic && function.physical_function.is_none()
    };
    (0..tree.functions.len()).filter(wanted).collect()
}

/// Draws the matrix with a legend.
pub fn draw(tree: &Topology) -> String {
    let members = members(tree);
    if members.is_empty() {
        return "no accelerators or network adapters were found\n".into();
    }
    let names = names(tree, &members);
    let mut out = format!("{:<7}", "");
    for name in &names {
        let _ = write!(out, "{name:<7}");
    }
    out.push_str("CPU affinity     NUMA\n");
    for (row, a) in members.iter().enumerate() {
        let _ = write!(out, "{:<7}", names[row]);
        for b in &members {
            let letters = match tree.path(*a, *b).map(|p| p.distance) {
                Some(Distance::Same) if a != b => "PIX",
                Some(distance) => distance.letters(),
                None => "?",
            };
            let _ = write!(out, "{letters:<7}");
        }
        // Where there is but one node, everything is near to it, said or not.
        let sole = if let [only] = tree.numa_nodes.as_slice() { Some(only.id) } else { None };
        let node = tree.functions[*a].numa_node.or(sole);
        let cpus = node.and_then(|n| tree.numa_nodes.iter().find(|m| m.id == n)).map_or("", |n| n.cpus.as_str());
        let _ = writeln!(out, "{cpus:<17}{}", node.map_or("N/A".to_owned(), |n| n.to_string()));
    }
    out.push('\n');
    for distance in
        [Distance::Same, Distance::OneSwitch, Distance::Switches, Distance::HostBridge, Distance::Node, Distance::System]
    {
        let _ = writeln!(out, "  {:<5}{}", distance.letters(), distance.meaning());
    }
    out.push('\n');
    for (name, index) in names.iter().zip(&members) {
        let _ = writeln!(out, "  {name:<6}{}", tree.functions[*index].label());
    }
    out
}

/// `GPU0`, `NIC1`, in the order of addresses.
fn names(tree: &Topology, members: &[usize]) -> Vec<String> {
    let mut counts = std::collections::HashMap::<&str, usize>::new();
    let name = |index: &usize| {
        let kind = match tree.functions[*index].kind {
            Kind::Gpu => "GPU",
            Kind::Nic => "NIC",
            Kind::Fpga => "FPGA",
            _ => "ACC",
        };
        let count = counts.entry(kind).or_default();
        *count += 1;
        format!("{kind}{}", *count - 1)
    };
    members.iter().map(name).collect()
}

/// Every pair with its distance, the reasons for it, and what one can expect of it.
pub fn paths(tree: &Topology) -> String {
    let members = members(tree);
    let names = names(tree, &members);
    let mut out = String::new();
    for (row, a) in members.iter().enumerate() {
        let (raw, expected) = tree.path_to_host(*a);
        if let (Some(raw), Some(expected)) = (raw, expected) {
            let _ = writeln!(out, "{} to host memory: {raw:.1} GB/s, about {expected:.1} GB/s of payload", names[row]);
        }
        for (column, b) in members.iter().enumerate().skip(row + 1) {
            let Some(path) = tree.path(*a, *b) else { continue };
            let _ = writeln!(out, "{} to {}: {} ({})", names[row], names[column], path.distance, path.distance.meaning());
            for reason in path.reasons {
                let _ = writeln!(out, "    {}", reason.text);
            }
        }
    }
    out
}
