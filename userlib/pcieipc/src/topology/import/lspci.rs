// SPDX-License-Identifier: MIT OR Apache-2.0
//! The text of `lspci -vvvxxxx`: configuration space is in it byte for byte, so most of the tree is as good as live.

use std::fmt::Write;

use super::{Entryway, ImportError, MOST_FUNCTIONS};
use crate::topology::{
    address::Address,
    archive::{Archive, Entry},
    function::Identity,
    source::Origin,
};

const LONGEST: usize = 4096;

/// One function while its lines are read.
struct Block {
    address: Address,
    config: Vec<u8>,
    driver: Option<String>,
    numa_node: Option<u32>,
    group: Option<u32>,
    regions: [String; 6],
}

pub(super) fn read(text: &str) -> Result<Archive, ImportError> {
    let mut archive = Archive::new(Origin::Lspci);
    archive.folder("sys/bus/pci/devices");
    let mut block: Option<Block> = None;
    let mut count = 0;
    for line in text.lines() {
        if let Some(address) = headline(line) {
            if let Some(done) = block.take() {
                write(&mut archive, &done);
            }
            count += 1;
            if count > MOST_FUNCTIONS {
                return Err(ImportError::TooManyFunctions);
            }
            block = Some(Block {
                address,
                config: Vec::new(),
                driver: None,
                numa_node: None,
                group: None,
                regions: Default::default(),
            });
        } else if let Some(block) = &mut block {
            bytes(block, line);
            // What is indented further belongs to a capability, and has regions of its own (those of virtual functions).
            if let Some(text) = line.strip_prefix('\t').filter(|t| !t.starts_with(['\t', ' '])) {
                property(block, text.trim());
            }
        }
    }
    if let Some(done) = block {
        write(&mut archive, &done);
    }
    if count == 0 { Err(ImportError::Empty("run `lspci -vvvxxxx` as root and save what it prints")) } else { Ok(archive) }
}

/// `0000:41:00.0 3D controller: …` or without the domain.
fn headline(line: &str) -> Option<Address> {
    if line.starts_with([' ', '\t']) {
        return None;
    }
    line.split_whitespace().next().filter(|w| w.contains('.'))?.parse().ok()
}

/// `10: 00 00 00 f6 …`: up to 16 bytes at a hexadecimal offset.
fn bytes(block: &mut Block, line: &str) {
    let Some((offset, rest)) = line.split_once(": ") else { return };
    if offset.len() > 3 || !offset.bytes().all(|b| b.is_ascii_hexdigit()) {
        return;
    }
    let Ok(offset) = usize::from_str_radix(offset, 16) else { return };
    let words: Vec<&str> = rest.split_whitespace().collect();
    if words.is_empty() || words.len() > 16 || words.iter().any(|w| w.len() != 2) {
        return;
    }
    for (at, word) in words.iter().enumerate() {
        let (Ok(byte), place) = (u8::from_str_radix(word, 16), offset + at) else { return };
        if place < LONGEST {
            if block.config.len() <= place {
                block.config.resize(place + 1, 0);
            }
            block.config[place] = byte;
        }
    }
}

fn property(block: &mut Block, line: &str) {
    let Some((key, value)) = line.split_once(": ") else { return };
    match key {
        "NUMA node" => block.numa_node = value.parse().ok(),
        "IOMMU group" => block.group = value.parse().ok(),
        "Kernel driver in use" => block.driver = Some(value.chars().filter(|c| !c.is_control()).take(64).collect()),
        _ => {
            if let Some(index) = key.strip_prefix("Region ").and_then(|i| i.parse::<usize>().ok()).filter(|i| *i < 6) {
                value.clone_into(&mut block.regions[index]);
            }
        }
    }
}

/// `Memory at f6000000 (32-bit, non-prefetchable) [size=16M]` as the kernel's line of a resource.
fn resource(region: &str) -> String {
    const NOTHING: &str = "0x0000000000000000 0x0000000000000000 0x0000000000000000";
    let io = region.contains("I/O ports");
    if !io && !region.contains("Memory at") {
        return NOTHING.into();
    }
    let size = region.split_once("[size=").and_then(|(_, s)| s.split(']').next()).and_then(parse_size).unwrap_or(0);
    let start = region.split_once(" at ").and_then(|(_, s)| u64::from_str_radix(s.split_whitespace().next()?, 16).ok());
    let mut flags: u64 = if io { 0x100 } else { 0x200 };
    flags |= if region.contains("64-bit") { 0x10_0000 } else { 0 };
    flags |= if region.contains("(32-bit, prefetchable") || region.contains("64-bit, prefetchable") { 0x2000 } else { 0 };
    let Some(start) = start else {
        return format!("{:#018x} {:#018x} {:#018x}", 0, size.saturating_sub(1), flags | 0x2000_0000);
    };
    format!("{start:#018x} {:#018x} {flags:#018x}", start.saturating_add(size.saturating_sub(1)))
}

fn parse_size(text: &str) -> Option<u64> {
    let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn write(archive: &mut Archive, block: &Block) {
    let folder = format!("sys/bus/pci/devices/{}", block.address);
    let word = |at: usize| block.config.get(at..at + 2).map_or(0, |b| u16::from_le_bytes([b[0], b[1]]));
    let class = block.config.get(9..12).map_or(0, |b| u32::from(b[0]) | u32::from(b[1]) << 8 | u32::from(b[2]) << 16);
    let endpoint = block.config.get(0x0e).is_some_and(|t| t & 0x7f == 0);
    let identity = Identity {
        vendor: word(0),
        device: word(2),
        subsystem_vendor: if endpoint { word(0x2c) } else { 0 },
        subsystem_device: if endpoint { word(0x2e) } else { 0 },
        class,
        revision: 0,
    };
    Entryway { identity, driver: block.driver.clone(), numa_node: block.numa_node, port: None }.write(
        archive,
        &folder,
        &block.address.to_string(),
    );
    if !block.config.is_empty() {
        archive.file(&format!("{folder}/config"), block.config.clone());
    }
    if let Some(group) = block.group {
        archive.insert(&format!("{folder}/iommu_group"), Entry::Link(format!("../../../../kernel/iommu_groups/{group}")));
    }
    let mut lines = String::new();
    for region in &block.regions {
        let _ = writeln!(lines, "{}", resource(region));
    }
    archive.file(&format!("{folder}/resource"), lines);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_become_the_kernel_s_lines() {
        assert_eq!(
            resource("Memory at 2000000000 (64-bit, prefetchable) [size=128G]"),
            "0x0000002000000000 0x0000003fffffffff 0x0000000000102200"
        );
        assert!(resource("Memory at <unassigned> (64-bit, prefetchable) [size=256M]").ends_with("20102200"));
        assert!(resource("").starts_with("0x0000000000000000 0x0000000000000000"));
        assert_eq!(parse_size("99999999999999999999T"), None);
    }
}
