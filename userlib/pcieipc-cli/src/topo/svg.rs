// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tree as a picture for a report.

use pcieipc::topology::{Kind, LinkState, Topology};
use svg::{
    Document,
    node::element::{Group, Line, Rectangle, Text, Title},
};

use super::health::Health;

const CARD: (f64, f64) = (164.0, 58.0);
const GAP: f64 = 12.0;
const LEVEL: f64 = 104.0;
const MARGIN: f64 = 24.0;
const HEAD: f64 = 64.0;

/// Draws NUMA nodes as fields, host bridges at their top, and below them ports, switches and cards with links coloured by health.
pub fn draw(tree: &Topology, title: &str, shown: &[bool]) -> String {
    let mut picture = Picture { tree, shown, widths: widths(tree, shown), lines: Group::new(), boxes: Group::new(), depth: 0.0 };
    let mut fields = Group::new();
    let mut x = MARGIN;
    let mut nodes: Vec<Option<u32>> =
        tree.roots.iter().filter(|r| r.children.iter().any(|c| shown[*c])).map(|r| r.numa_node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let mut spans = Vec::new();
    for node in nodes {
        let start = x;
        x += GAP;
        for root in tree.roots.iter().filter(|r| r.numa_node == node && r.children.iter().any(|c| shown[*c])) {
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
    shown: &'a [bool],
    /// Of what is below each function, side by side.
    widths: Vec<f64>,
    lines: Group,
    boxes: Group,
    depth: f64,
}

impl Picture<'_> {
    fn visible(&self, children: &[usize]) -> Vec<usize> {
        children.iter().copied().filter(|c| self.shown[*c]).collect()
    }

    fn width_of(&self, children: &[usize]) -> f64 {
        side_by_side(self.visible(children).iter().map(|c| self.widths[*c]))
    }

    fn children(&mut self, children: &[usize], left: f64, parent_bottom: f64, parent_centre: f64, depth: u32) {
        let mut x = left;
        for index in self.visible(children) {
            let function = &self.tree.functions[index];
            let width = self.widths[index].max(CARD.0);
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
                (Some(now), Some(best)) if now.below(best) => reduced(now, best),
                (Some(now), _) => now.to_string(),
                _ => "link down or unknown".into(),
            });
            let height = if function.kind.is_bridge() { 44.0 } else { CARD.1 };
            let (fill, stroke) = colours(function.kind);
            let name = if function.kind.is_bridge() { function.kind.word().to_owned() } else { model(&function.name).to_owned() };
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
            let inner = self.widths[index];
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
            let size = if at == 0 { 11.0 } else { 9.5 };
            group = group.add(words(centre, first + step * at as f64, &fitting(line, size, width - 8.0), size, "middle"));
        }
        self.boxes = std::mem::take(&mut self.boxes).add(group);
    }
}

/// What a link does of what it could, in words that fit into a box.
fn reduced(now: LinkState, best: LinkState) -> String {
    if now.speed == best.speed {
        format!("{now} of x{}", best.width)
    } else if now.width == best.width {
        format!("{} of {best}", now.speed)
    } else {
        format!("{now} of {best}")
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

/// As much of a text as fits into a width, with what is cut shown by three dots.
fn fitting(text: &str, size: f64, width: f64) -> String {
    if width_of(text, size) <= width {
        return text.to_owned();
    }
    let mut cut = String::new();
    for c in text.chars() {
        if width_of(&cut, size) + width_of(&format!("{c}…"), size) > width {
            break;
        }
        cut.push(c);
    }
    cut.trim_end().to_owned() + "…"
}

/// How wide a text is in a sans-serif type, from above: the picture is drawn by whoever looks at it, with whatever type is there.
fn width_of(text: &str, size: f64) -> f64 {
    let of = |c: char| match c {
        'i' | 'j' | 'l' | '.' | ',' | ':' | ';' | '|' | '\'' | '!' => 0.36,
        'f' | 'r' | 't' | 'I' | ' ' | '(' | ')' | '[' | ']' | '-' | '/' => 0.44,
        'm' | 'w' | 'M' | 'W' | '…' => 1.0,
        c if c.is_ascii_uppercase() => 0.76,
        c if c.is_ascii() => 0.64,
        _ => 1.0,
    };
    text.chars().map(of).sum::<f64>() * size
}

/// For each function the width of what is shown below it. Children come after their parents by address in no particular order, so the tree is
/// gone through from its leaves.
fn widths(tree: &Topology, shown: &[bool]) -> Vec<f64> {
    let mut widths = vec![0.0; tree.functions.len()];
    let mut order: Vec<usize> = tree.roots.iter().flat_map(|r| r.children.iter().copied()).collect();
    let mut at = 0;
    while let Some(index) = order.get(at).copied() {
        order.extend(tree.functions[index].children.iter().copied());
        at += 1;
    }
    for index in order.into_iter().rev() {
        let children = tree.functions[index].children.iter().filter(|c| shown[**c]);
        widths[index] = side_by_side(children.map(|c| widths[*c]));
    }
    widths
}

fn side_by_side(widths: impl Iterator<Item = f64>) -> f64 {
    (widths.map(|w| w.max(CARD.0) + GAP).sum::<f64>() - GAP).max(0.0)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reduced_link_fits_into_a_box() {
        let states = || (1..=6).flat_map(|speed| [1, 2, 4, 8, 12, 16].map(|width| LinkState::from_fields(speed, width).unwrap()));
        for best in states() {
            for now in states().filter(|now| now.below(best)) {
                let text = reduced(now, best);
                assert!(width_of(&text, 9.5) <= CARD.0 - 8.0, "{text}");
            }
        }
    }

    #[test]
    fn a_long_name_is_cut_to_its_box_and_a_short_one_is_whole() {
        let name = "NVMe SSD Controller PM1733/PM1735 WWWWMMMM";
        let cut = fitting(name, 11.0, CARD.0 - 8.0);
        assert!(width_of(&cut, 11.0) <= CARD.0 - 8.0 && cut.ends_with('…') && cut.len() > 12, "{cut}");
        assert_eq!(fitting("H100", 11.0, CARD.0 - 8.0), "H100");
    }
}
