// SPDX-License-Identifier: MIT OR Apache-2.0
//! The upper half: the ports and the endpoints, or the memory that the ranks share.

use super::{
    Report,
    canvas::{Canvas, INK, MUTED, PANEL, RED, RULE, Weight},
    timeline::colour_of_rank,
};
use crate::demo::Node;

const LEVEL: f64 = 74.0;
const BOX: (f64, f64) = (172.0, 44.0);

/// Draws it from `y` on and gives the lower edge.
pub fn draw(canvas: &mut Canvas, report: &Report, x: f64, y: f64, width: f64) -> f64 {
    canvas.text(x, y, "Where the ranks sit", 15.0, INK, Weight::Bold);
    let top = y + 18.0;
    let ranks: Vec<Node> =
        (0..report.ranks).map(|rank| Node { address: String::new(), rank: Some(rank), children: Vec::new() }).collect();
    let (root, nodes) =
        if report.tree.is_empty() { ("shared memory", &ranks) } else { ("host: CPU, memory, IOMMU", &report.tree) };
    let mut place = Place { x, slot: width / leaves(nodes).max(1) as f64, used: 0, deepest: top };
    let under: Vec<f64> = nodes.iter().map(|node| place.node(canvas, report, node, top + LEVEL, 0)).collect();
    let middle = centre(&under).unwrap_or(x + width / 2.0);
    for (node, to) in nodes.iter().zip(&under) {
        edge(canvas, report, node, (middle, top + BOX.1), (*to, top + LEVEL));
    }
    label(canvas, middle, top, 230.0, root, None, PANEL, RULE);
    place.deepest + BOX.1
}

struct Place {
    x: f64,
    slot: f64,
    used: usize,
    deepest: f64,
}

impl Place {
    /// Draws a node and what is below it; gives the middle of its box.
    fn node(&mut self, canvas: &mut Canvas, report: &Report, node: &Node, y: f64, depth: usize) -> f64 {
        self.deepest = self.deepest.max(y);
        if node.children.is_empty() {
            let middle = self.x + (self.used as f64 + 0.5) * self.slot;
            self.used += 1;
            endpoint(canvas, report, node, middle, y, self.slot);
            return middle;
        }
        let under: Vec<f64> = node.children.iter().map(|child| self.node(canvas, report, child, y + LEVEL, depth + 1)).collect();
        let middle = centre(&under).unwrap_or(self.x);
        for (child, to) in node.children.iter().zip(&under) {
            edge(canvas, report, child, (middle, y + BOX.1), (*to, y + LEVEL));
        }
        let fan_out = node.children.len() > 1;
        let what = match depth {
            0 => "root port",
            _ if fan_out => "switch",
            _ => "switch port",
        };
        label(canvas, middle, y, BOX.0.min(self.slot - 10.0), what, Some(&node.address), "#ffffff", RULE);
        middle
    }
}

fn leaves(nodes: &[Node]) -> usize {
    nodes.iter().map(|node| leaves(&node.children).max(1)).sum()
}

fn centre(of: &[f64]) -> Option<f64> {
    Some((of.first()? + of.last()?) / 2.0)
}

fn lost(report: &Report, node: &Node) -> bool {
    node.rank == Some(report.fault.rank)
}

fn edge(canvas: &mut Canvas, report: &Report, below: &Node, from: (f64, f64), to: (f64, f64)) {
    let (stroke, dashes) = if lost(report, below) { (RED, Some("5 4")) } else { ("#93a1b0", None) };
    canvas.elbow(from, to, stroke, dashes);
}

fn endpoint(canvas: &mut Canvas, report: &Report, node: &Node, middle: f64, y: f64, slot: f64) {
    let width = BOX.0.min(slot - 10.0);
    let Some(rank) = node.rank else {
        label(canvas, middle, y, width, "endpoint", Some(&node.address), "#ffffff", RULE);
        return;
    };
    let below = match node.address.as_str() {
        "" => format!("process of rank {rank}"),
        address => format!("endpoint {address}"),
    };
    let stroke = if lost(report, node) { RED } else { colour_of_rank(rank) };
    let title = if lost(report, node) {
        format!("rank {rank}: {}", if node.address.is_empty() { "killed" } else { "removed" })
    } else {
        format!("rank {rank}")
    };
    let fill = if lost(report, node) { "#fdeeee" } else { "#ffffff" };
    label(canvas, middle, y, width, &title, Some(&below), fill, stroke);
}

#[allow(clippy::too_many_arguments, reason = "a box has that many properties")]
fn label(canvas: &mut Canvas, middle: f64, y: f64, width: f64, title: &str, below: Option<&str>, fill: &str, stroke: &str) {
    canvas.rect(middle - width / 2.0, y, width, BOX.1, fill, Some(stroke), 6.0);
    let first = if below.is_some() { 19.0 } else { 27.0 };
    canvas.centred(middle, y + first, title, 13.0, INK, Weight::Bold);
    if let Some(below) = below {
        canvas.centred(middle, y + 35.0, below, 11.0, MUTED, Weight::Normal);
    }
}
