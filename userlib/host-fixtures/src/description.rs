// SPDX-License-Identifier: MIT OR Apache-2.0
//! The language in which trees are drawn.

use std::collections::BTreeMap;

use pcieipc::topology::Address;

/// One line of a drawing.
#[derive(Debug, Clone)]
pub struct Line {
    /// What it is: `root`, `rp`, `up`, `dn`, `br`, `hb`, or a card.
    pub kind: String,
    /// Its address; for a root the first bus.
    pub address: Address,
    /// What is above it, by place in the list.
    pub parent: Option<usize>,
    /// Buses below.
    pub buses: (u8, u8),
    /// Settings.
    pub keys: BTreeMap<String, String>,
}

impl Line {
    /// A setting.
    pub fn key(&self, name: &str) -> Option<&str> {
        self.keys.get(name).map(String::as_str)
    }

    /// Whether a setting without a value is there.
    pub fn has(&self, name: &str) -> bool {
        self.keys.contains_key(name)
    }

    /// A number in hexadecimal digits.
    pub fn hex(&self, name: &str) -> Option<u32> {
        self.key(name).and_then(|v| u32::from_str_radix(v, 16).ok())
    }

    /// A decimal number.
    pub fn number(&self, name: &str) -> Option<u32> {
        self.key(name).and_then(|v| v.parse().ok())
    }

    /// Whether it leads to another bus.
    pub fn is_bridge(&self) -> bool {
        matches!(self.kind.as_str(), "rp" | "up" | "dn" | "br")
    }
}

/// Reads a drawing: lines in order, buses numbered as firmware does, depth first.
///
/// # Errors
/// The line and what is wrong with it.
pub fn parse_tree(text: &str) -> Result<Vec<Line>, String> {
    let mut lines: Vec<Line> = Vec::new();
    let mut stack: Vec<(usize, usize)> = Vec::new();
    let mut next_bus: u8 = 0;
    let mut domain = 0;
    for raw in text.lines() {
        let content = raw.split('#').next().unwrap_or_default();
        if content.trim().is_empty() {
            continue;
        }
        let fail = |why: &str| format!("{why}: {raw:?}");
        let indent = content.len() - content.trim_start().len();
        let mut words = content.split_whitespace();
        let kind = words.next().unwrap_or_default().to_owned();
        let place = words.next().ok_or_else(|| fail("no place"))?;
        while stack.last().is_some_and(|(depth, _)| *depth >= indent) {
            stack.pop();
        }
        let mut keys: BTreeMap<String, String> = words
            .map(|w| w.split_once('=').map_or((w.to_owned(), String::new()), |(k, v)| (k.to_owned(), v.to_owned())))
            .collect();
        let above = stack.last().map(|(_, index)| *index);
        let (address, parent) = if kind == "root" {
            let address: Address = format!("{place}:00.0").parse().map_err(|_| fail("bad root"))?;
            next_bus = address.bus.checked_add(1).ok_or_else(|| fail("buses run out"))?;
            domain = address.domain;
            (address, None)
        } else {
            let above = above.ok_or_else(|| fail("nothing above"))?;
            // What is below takes the NUMA node from above.
            for inherited in ["numa", "iommu"] {
                if let Some(value) = lines[above].keys.get(inherited).cloned() {
                    keys.entry(inherited.to_owned()).or_insert(value);
                }
            }
            let bus = if lines[above].kind == "root" { lines[above].address.bus } else { lines[above].buses.0 };
            let address: Address = format!("{domain:x}:{bus:02x}:{place}").parse().map_err(|_| fail("bad device"))?;
            (address, Some(above))
        };
        let mut line = Line { kind, address, parent, buses: (0, 0), keys };
        if line.is_bridge() {
            line.buses = (next_bus, next_bus);
            next_bus = next_bus.checked_add(1).ok_or_else(|| fail("buses run out"))?;
            let mut up = parent;
            while let Some(index) = up {
                lines[index].buses.1 = line.buses.0;
                up = lines[index].parent;
            }
        }
        stack.push((indent, lines.len()));
        lines.push(line);
    }
    Ok(lines)
}

/// Generation and width, as in `5x16`.
pub(crate) fn link(text: &str) -> Option<(u32, u32)> {
    let (speed, width) = text.split_once('x')?;
    Some((speed.parse().ok()?, width.parse().ok()?))
}

/// A size such as `16M` or `128G`.
pub(crate) fn size(text: &str) -> Option<u64> {
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let shift = match unit {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok().map(|n| n << shift)
}
