// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tree as a picture for a report.

use pcieipc::topology::{Kind, Topology};
use svg::{
    Document,
    node::element::{Group, Line, Rectangle, Text, Title},
};

use super::health::Health;

const CARD: (f64, f64) = (146.0, 58.0);
const GAP: f64 = 12.0;
const LEVEL: f64 = 104.0;
const MARGIN: f64 = 24.0;
const HEAD: f64 = 64.0;

/// Draws NUMA nodes as fields, host bridges at their top, and below them ports, switches and cards with links coloured by health.
pub fn draw(tree: &Topology, title: &str, shown: &dyn Fn(usize) -> bool) -> String {
    let mut picture = Picture { tree, shown, lines: Group::new(), boxes: Group::new(), depth: 0.0 };
    let mut fields = Group::new();
    let mut x = MARGIN;
    let mut nodes: Vec<Option<u32>> =
        tree.roots.iter().filter(|r| r.children.iter().any(|c| shown(*c))).map(|r| r.numa_node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let mut spans = Vec::new();
    for node in nodes {
        let start = x;
        x += GAP;
        for root in tree.roots.iter().filter(|r| r.numa_node == node && r.children.iter().any(|c| shown(*c))) {
            let width = picture.width_of(&root.children);
            let centre = x + width / 2.0;
            let top = HEAD + 36.0;
            picture.node(centre, top, width.min(CARD.0).max(100.0), 28.0, &["host bridge", &root.name], "#dfe6ee", "#4a5a6a", "");
            picture.children(&root.children, x, top + 28.0, centre, 1);
            x += width + GAP;
        }
        spans.push((node, start, x));
        x += MARGIN;
    }
    let height = HEAD + 36.0 + picture.depth * LEVEL + 108.0;
    for (node, start, end) in spans {
        let name = node.map_or("NUMA node unknown".to_owned(), |n| match tree.socket(n) {
            Some(socket) => format!("NUMA node {n}, socket {socket}"),
            None => format!("NUMA node {n}"),
        });
        fields = fields
            .add(rectangle(start, HEAD, (end - start).max(160.0), height - HEAD - 64.0, "#f6f7f9", "#c5ccd3", 6.0))
            .add(words(start + 8.0, HEAD + 18.0, &name, 12.0, "start").set("font-weight", "bold"));
    }
    let width = x.max(920.0);
    let mut legend = Group::new();
    let mut at = MARGIN;
    for health in Health::ALL {
        legend = legend
            .add(
                Line::new()
                    .set("x1", at)
                    .set("x2", at + 24.0)
                    .set("y1", height - 24.0)
                    .set("y2", height - 24.0)
                    .set("stroke", health.colour())
                    .set("stroke-width", 5),
            )
            .add(words(at + 30.0, height - 20.0, health.meaning(), 11.0, "start"));
        at += 50.0 + 6.2 * health.meaning().len() as f64;
    }
    let document = Document::new()
        .set("viewBox", (0.0, 0.0, width.max(at), height))
        .set("width", width.max(at))
        .set("height", height)
        .set("font-family", "sans-serif")
        .add(rectangle(0.0, 0.0, width.max(at), height, "#ffffff", "none", 0.0))
        .add(words(MARGIN, 36.0, title, 18.0, "start").set("font-weight", "bold"))
        .add(fields)
        .add(picture.lines)
        .add(picture.boxes)
        .add(legend);
    document.to_string()
}

struct Picture<'a> {
    tree: &'a Topology,
    shown: &'a dyn Fn(usize) -> bool,
    lines: Group,
    boxes: Group,
    depth: f64,
}

impl Picture<'_> {
    fn visible(&self, children: &[usize]) -> Vec<usize> {
        children.iter().copied().filter(|c| (self.shown)(*c)).collect()
    }

    fn width_of(&self, children: &[usize]) -> f64 {
        let visible = self.visible(children);
        let sum: f64 = visible.iter().map(|c| self.width_of(&self.tree.functions[*c].children).max(CARD.0) + GAP).sum();
        (sum - GAP).max(0.0)
    }

    fn children(&mut self, children: &[usize], left: f64, parent_bottom: f64, parent_centre: f64, depth: u32) {
        let mut x = left;
        for index in self.visible(children) {
            let function = &self.tree.functions[index];
            let width = self.width_of(&function.children).max(CARD.0);
            let centre = x + width / 2.0;
            let top = HEAD + 36.0 + f64::from(depth) * LEVEL - 28.0;
            self.depth = self.depth.max(f64::from(depth));
            let health = Health::of(self.tree, index);
            let hop = self.tree.hop(index);
            let lanes = hop.and_then(|h| h.now).map_or(1.0, |n| f64::from(n.width));
            self.lines = std::mem::take(&mut self.lines).add(
                Line::new()
                    .set("x1", parent_centre)
                    .set("y1", parent_bottom)
                    .set("x2", centre)
                    .set("y2", top)
                    .set("stroke", health.colour())
                    .set("stroke-width", 1.5 + lanes.sqrt()),
            );
            let link = hop.map(|h| match (h.now, h.best) {
                (Some(now), Some(best)) if now.below(best) => format!("{now} of {best}"),
                (Some(now), _) => now.to_string(),
                _ => "link down or unknown".into(),
            });
            let height = if function.kind.is_bridge() { 44.0 } else { CARD.1 };
            let (fill, stroke) = colours(function.kind);
            let name = if function.kind.is_bridge() { function.kind.word().to_owned() } else { short(model(&function.name), 22) };
            let address = function.address.to_string();
            let third = if function.kind.is_bridge() {
                String::new()
            } else {
                function.driver.clone().unwrap_or_else(|| "no driver".into())
            };
            let lines: Vec<&str> = [name.as_str(), address.as_str(), link.as_deref().unwrap_or(""), third.as_str()]
                .into_iter()
                .filter(|t| !t.is_empty())
                .collect();
            let stroke = if health == Health::Broken { health.colour() } else { stroke };
            let tip = super::text::describe(self.tree, index);
            let wide = if function.kind == Kind::SwitchUp { width } else { CARD.0 };
            self.node(centre, top, wide, height, &lines, fill, stroke, &tip);
            let below = function.children.clone();
            let inner = self.width_of(&below);
            self.children(&below, centre - inner / 2.0, top + height, centre, depth + 1);
            x += width + GAP;
        }
    }

    #[allow(clippy::too_many_arguments)] // one box: place, size, text, colours
    fn node(&mut self, centre: f64, top: f64, width: f64, height: f64, lines: &[&str], fill: &str, stroke: &str, tip: &str) {
        let mut group = Group::new().add(rectangle(centre - width / 2.0, top, width, height, fill, stroke, 4.0));
        if !tip.is_empty() {
            group = group.add(Title::new(tip));
        }
        let step = 12.5;
        let first = top + height / 2.0 - step * (lines.len() as f64 - 1.0) / 2.0 + 3.5;
        for (at, line) in lines.iter().enumerate() {
            group = group.add(words(centre, first + step * at as f64, line, if at == 0 { 11.0 } else { 9.5 }, "middle"));
        }
        self.boxes = std::mem::take(&mut self.boxes).add(group);
    }
}

fn colours(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Gpu => ("#dff0d8", "#3c763d"),
        Kind::Nic => ("#d9edf7", "#31708f"),
        Kind::Nvme => ("#f2e9f7", "#6f4685"),
        Kind::Fpga | Kind::Accelerator => ("#fcf3d9", "#8a6d3b"),
        Kind::SwitchUp | Kind::SwitchDown => ("#e9ecef", "#5c6770"),
        Kind::RootPort | Kind::Bridge => ("#eef2f6", "#4a5a6a"),
        _ => ("#f5f5f5", "#9a9a9a"),
    }
}

/// The list of ids puts the name that people know into brackets: `GH100 [H100 SXM5 80GB]`.
fn model(name: &str) -> &str {
    name.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or(name, |(inside, _)| inside)
}

fn short(text: &str, most: usize) -> String {
    if text.chars().count() <= most { text.to_owned() } else { text.chars().take(most - 1).chain(['…']).collect() }
}

fn rectangle(x: f64, y: f64, width: f64, height: f64, fill: &str, stroke: &str, radius: f64) -> Rectangle {
    Rectangle::new()
        .set("x", x)
        .set("y", y)
        .set("width", width)
        .set("height", height)
        .set("rx", radius)
        .set("fill", fill)
        .set("stroke", stroke)
}

fn words(x: f64, y: f64, text: &str, size: f64, anchor: &str) -> Text {
    Text::new(text).set("x", x).set("y", y).set("font-size", size).set("text-anchor", anchor).set("fill", "#1c242c")
}
