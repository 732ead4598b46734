// SPDX-License-Identifier: MIT OR Apache-2.0
//! Builds configuration space: header, capabilities and extended capabilities in lists.

use crate::description::{Line, link, size};

/// Defaults by kind: ids, class, port type code.
pub(crate) struct Defaults {
    pub vendor: u16,
    pub device: u16,
    pub class: u32,
    /// Device/port type of the PCI Express capability; `None` for plain PCI.
    pub port: Option<u32>,
}

pub(crate) fn defaults(line: &Line) -> Defaults {
    let (vendor, device, class, port) = match line.kind.as_str() {
        "hb" => (0x8086, 0x09a2, 0x060000, None),
        "rp" => (0x8086, 0x352a, 0x060400, Some(4)),
        "up" => (0x1000, 0xc030, 0x060400, Some(5)),
        "dn" => (0x1000, 0xc030, 0x060400, Some(6)),
        "br" => (0x1b21, 0x1080, 0x060400, Some(7)),
        "gpu" => (0x10de, 0x2330, 0x030200, Some(0)),
        "nic" => (0x15b3, 0x1021, 0x020700, Some(0)),
        "nvme" => (0x144d, 0xa80a, 0x010802, Some(0)),
        "fpga" => (0x10ee, 0x5020, 0x120000, Some(0)),
        "acc" => (0x1da3, 0x1020, 0x120000, Some(0)),
        "disp" => (0x1a03, 0x2000, 0x030000, None),
        "fabric" => (0x10de, 0x22a3, 0x068000, Some(0)),
        _ => (0x8086, 0x7af0, 0x0c0330, None),
    };
    let pair = |key: &str| {
        let (vendor, device) = line.key(key)?.split_once(':')?;
        Some((u16::from_str_radix(vendor, 16).ok()?, u16::from_str_radix(device, 16).ok()?))
    };
    let (vendor, device) = pair("id").unwrap_or((vendor, device));
    let port = match line.key("port") {
        Some("none") => None,
        Some("integrated") => Some(9),
        Some("legacy") => Some(1),
        _ => port,
    };
    Defaults { vendor, device, class: line.hex("class").unwrap_or(class), port }
}

/// One BAR of a description: `256M*` is 64 bits and prefetchable, `!` unassigned, `<` below 4 GiB.
pub(crate) struct BarDescription {
    pub index: usize,
    pub size: u64,
    pub wide: bool,
    pub unassigned: bool,
    pub low: bool,
}

pub(crate) fn bars(line: &Line) -> Vec<BarDescription> {
    let mut index = 0;
    let mut bars = Vec::new();
    for text in line.key("bars").unwrap_or_default().split(',').filter(|t| !t.is_empty()) {
        let wide = text.contains('*');
        let bare: String = text.chars().filter(|c| c.is_ascii_alphanumeric()).collect();
        bars.push(BarDescription {
            index,
            size: size(&bare).unwrap_or(0),
            wide,
            unassigned: text.contains('!'),
            low: text.contains('<'),
        });
        index += if wide { 2 } else { 1 };
    }
    bars
}

struct Image {
    bytes: Vec<u8>,
    last_pointer: usize,
    next: usize,
    last_extended: Option<usize>,
    next_extended: usize,
}

impl Image {
    fn put8(&mut self, at: usize, value: u32) {
        self.bytes[at] = value as u8;
    }
    fn put16(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 2].copy_from_slice(&(value as u16).to_le_bytes());
    }
    fn put32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    /// Appends a capability and gives its place.
    fn capability(&mut self, id: u32, length: usize) -> usize {
        let at = self.next;
        self.put8(self.last_pointer, at as u32);
        self.put8(at, id);
        self.last_pointer = at + 1;
        self.next += length.next_multiple_of(4);
        at
    }
    /// Appends an extended capability and gives its place.
    fn extended(&mut self, id: u32, length: usize) -> usize {
        let at = self.next_extended;
        if let Some(last) = self.last_extended {
            let head = u32::from_le_bytes([self.bytes[last], self.bytes[last + 1], self.bytes[last + 2], self.bytes[last + 3]]);
            self.put32(last, head & 0xf_ffff | (at as u32) << 20);
        }
        self.put32(at, id | 1 << 16);
        self.last_extended = Some(at);
        self.next_extended += length.next_multiple_of(4);
        at
    }
}

/// The bytes of a function's configuration space. `child_link` is what hangs from a port: both ends report the same state.
pub(crate) fn image(line: &Line, child: Option<&Line>) -> Vec<u8> {
    if line.has("dead") {
        return vec![0xff; 4096];
    }
    let what = defaults(line);
    let length = if what.port.is_some() { 4096 } else { 256 };
    let mut image = Image { bytes: vec![0; length], last_pointer: 0x34, next: 0x40, last_extended: None, next_extended: 0x100 };
    image.put16(0, u32::from(what.vendor));
    image.put16(2, u32::from(what.device));
    image.put16(4, if line.has("off") { 0 } else { 0x406 });
    image.put32(8, what.class << 8 | 1);
    let mut command_status = 0;
    if line.is_bridge() {
        image.put8(0x0e, 1);
        image.put8(0x18, u32::from(line.address.bus));
        image.put8(0x19, u32::from(line.buses.0));
        image.put8(0x1a, u32::from(line.buses.1));
    } else {
        image.put16(0x2c, u32::from(what.vendor));
        image.put16(0x2e, 1);
        for bar in bars(line) {
            image.put32(0x10 + bar.index * 4, if bar.wide { 0xc } else { 0 });
        }
    }
    if let Some(port) = what.port {
        command_status = 0x10;
        power(&mut image, line);
        express(&mut image, line, child, port);
        if !line.is_bridge() {
            let at = image.capability(0x11, 12);
            image.put16(at + 2, 31);
        }
        extended(&mut image, line, child);
    }
    image.put16(6, command_status);
    image.bytes
}

fn power(image: &mut Image, line: &Line) {
    let at = image.capability(0x01, 8);
    image.put16(at + 4, if line.key("power") == Some("D3hot") { 3 } else { 0 });
}

/// Best and current state of the link that this function is one end of.
fn link_of(line: &Line, child: Option<&Line>) -> ((u32, u32), Option<(u32, u32)>) {
    let own = line.key("link").unwrap_or("4x16");
    let (best, now) = own.split_once('/').unwrap_or((own, own));
    let best = link(best).unwrap_or((4, 16));
    // A port reports what it trained to with the card below.
    let downstream = matches!(line.kind.as_str(), "rp" | "dn");
    let now = if downstream {
        child.and_then(|c| {
            let text = c.key("link").unwrap_or("4x16");
            let (card, now) = text.split_once('/').unwrap_or((text, text));
            match now {
                "down" => None,
                now if text.contains('/') => link(now),
                _ => link(card).map(|(s, w)| (s.min(best.0), w.min(best.1))),
            }
        })
    } else {
        (now != "down").then(|| link(now)).flatten()
    };
    (best, now)
}

fn aspm_bits(text: Option<&str>) -> u32 {
    match text {
        Some("l0s") => 1,
        Some("l1") => 2,
        Some("l0sl1") => 3,
        _ => 0,
    }
}

fn express(image: &mut Image, line: &Line, child: Option<&Line>, port: u32) {
    let at = image.capability(0x10, 0x3c);
    let slot = line.has("slot");
    image.put16(at + 2, 2 | port << 4 | if slot { 1 << 8 } else { 0 });
    let code = |bytes: u32| bytes.max(128).ilog2() - 7;
    let supported = line.number("mpss").unwrap_or(512);
    image.put32(at + 4, code(supported) | 1 << 5 | 1 << 28);
    let mut control = code(line.number("mps").unwrap_or(256)) << 5 | code(line.number("mrrs").unwrap_or(512)) << 12;
    control |= if line.key("et") == Some("0") { 0 } else { 1 << 8 };
    // GPUs and adapters come up with relaxed ordering on.
    let relaxed = line.key("ro").map_or(!line.is_bridge() && line.kind != "fpga" && line.kind != "acc", |v| v == "1");
    control |= if relaxed { 1 << 4 } else { 0 };
    image.put16(at + 8, control);
    if port == 9 {
        return;
    }
    let (best, now) = link_of(line, child);
    let downstream = matches!(line.kind.as_str(), "rp" | "dn");
    image.put32(at + 0x0c, best.0 | best.1 << 4 | 2 << 10 | if downstream { 3 << 20 } else { 0 });
    image.put16(at + 0x10, aspm_bits(line.key("aspm")) | 1 << 6);
    let (speed, width) = now.unwrap_or((1, 0));
    let mut status = speed | width << 4 | 1 << 12;
    if downstream && now.is_some() {
        status |= 1 << 13;
    }
    for (flag, bit) in [("lbms", 14), ("labs", 15), ("training", 11)] {
        status |= if line.has(flag) { 1 << bit } else { 0 };
    }
    image.put16(at + 0x12, status);
    if slot {
        let mut capable = line.number("slot").unwrap_or(0) << 19 | 75 << 7;
        capable |= if line.has("hotplug") { 1 << 6 } else { 0 } | if line.has("surprise") { 1 << 5 } else { 0 };
        image.put32(at + 0x14, capable);
        let present = child.is_some() || line.has("present");
        image.put16(at + 0x1a, if present { 1 << 6 } else { 0 });
    }
    image.put32(at + 0x24, 1 << 16 | 1 << 17);
    image.put32(at + 0x2c, ((1 << best.0) - 1) << 1);
    image.put16(at + 0x30, line.number("target").unwrap_or(best.0));
}

fn extended(image: &mut Image, line: &Line, child: Option<&Line>) {
    if line.key("aer") != Some("0") {
        let at = image.extended(0x01, 0x48);
        image.put32(at + 0x0c, 0x0046_2030);
        image.put32(at + 0x14, 0x2000);
    }
    // A serial number that no snapshot may hold.
    let at = image.extended(0x03, 12);
    image.put32(at + 4, 0xdead_beef);
    image.put32(at + 8, 0x0bad_cafe);
    if let Some(control) = line.hex("acs") {
        let at = image.extended(0x0d, 8);
        image.put16(at + 4, 0x5f);
        image.put16(at + 6, control);
    }
    if let Some((total, active)) = line.key("sriov").and_then(|s| s.split_once(':')) {
        let at = image.extended(0x10, 0x40);
        let (total, active) = (total.parse().unwrap_or(0), active.parse().unwrap_or(0));
        image.put16(at + 8, u32::from(active > 0));
        image.put16(at + 0x0e, total);
        image.put16(at + 0x10, active);
    }
    if let Some((bar, sizes)) = line.key("rebar").and_then(|r| r.split_once(':')) {
        let (now, largest) = sizes.split_once(':').unwrap_or((sizes, sizes));
        let exponent = |text| size(text).unwrap_or(1 << 20).ilog2() - 20;
        let at = image.extended(0x15, 12);
        image.put32(at + 4, (((1u64 << (exponent(largest) + 1)) - 1) << 4) as u32);
        image.put32(at + 8, bar.parse().unwrap_or(0) | 1 << 5 | exponent(now) << 8);
    }
    if let Some(lanes) = line.hex("lanes") {
        let at = image.extended(0x19, 0x2c);
        image.put32(at + 8, lanes);
    }
    if let Some(state) = line.key("dpc") {
        let at = image.extended(0x1d, 16);
        image.put16(at + 6, 1);
        image.put16(at + 8, u32::from(state == "triggered"));
    }
    if child.is_none() && line.has("l1ss") {
        let at = image.extended(0x1e, 16);
        image.put32(at + 4, 0xf);
        image.put32(at + 8, 0xf);
    }
}
