// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tree for Graphviz.

use std::fmt::Write;

use pcieipc::topology::Topology;

use super::health::Health;

/// Draws host bridges as clusters, links as edges with their state, coloured by health.
pub fn draw(tree: &Topology, shown: &[bool]) -> String {
    let mut out = String::from(
        "graph pcie {\n  rankdir=LR;\n  node [shape=box, fontname=\"sans-serif\", fontsize=10];\n  edge [fontname=\"sans-serif\", fontsize=9];\n",
    );
    for root in &tree.roots {
        if !root.children.iter().any(|c| shown[*c]) {
            continue;
        }
        let near = root.numa_node.map_or("NUMA node unknown".to_owned(), |n| format!("NUMA node {n}"));
        let _ = writeln!(out, "  subgraph \"cluster_{}\" {{\n    label=\"{}, {near}\";", root.name, root.name);
        let _ = writeln!(out, "    \"{}\" [label=\"host bridge\", style=filled, fillcolor=\"#e8e8e8\"];", root.name);
        let mut stack: Vec<usize> = root.children.iter().rev().copied().collect();
        let mut edges = String::new();
        while let Some(index) = stack.pop() {
            if !shown[index] {
                continue;
            }
            let function = &tree.functions[index];
            let health = Health::of(tree, index);
            let name = if function.kind.is_bridge() { function.kind.word() } else { &function.name };
            let _ = writeln!(
                out,
                "    \"{}\" [label=\"{}\\n{}\", color=\"{}\"];",
                function.address,
                escape(name),
                function.address,
                health.colour()
            );
            let above = function.parent.map_or(root.name.clone(), |p| tree.functions[p].address.to_string());
            let label = tree.hop(index).and_then(|h| h.now).map_or(String::new(), |n| n.to_string());
            let _ = writeln!(
                edges,
                "    \"{above}\" -- \"{}\" [label=\"{label}\", color=\"{}\"];",
                function.address,
                health.colour()
            );
            stack.extend(function.children.iter().rev());
        }
        out.push_str(&edges);
        out.push_str("  }\n");
    }
    out.push_str("}\n");
    out
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}
