// SPDX-License-Identifier: MIT OR Apache-2.0
//! NCCL's topology file, as `NCCL_TOPO_DUMP_FILE` writes it.

use quick_xml::{
    Reader,
    events::{BytesStart, Event},
};

use super::{DEEPEST, Entryway, ImportError, attribute, cpu_list, found, hex, hex16, write_node};
use crate::topology::{address::Address, archive::Archive, function::Identity, source::Origin};

/// What is open above the current element.
enum Level {
    /// A processor with its NUMA node.
    Cpu(Option<u32>),
    /// A function with its folder, and its name in the list.
    Pci(String),
    /// Anything else.
    Other,
}

pub(super) fn read(text: &str) -> Result<Archive, ImportError> {
    let mut archive = Archive::new(Origin::NcclXml);
    archive.folder("sys/bus/pci/devices");
    let mut reader = Reader::from_str(text);
    let mut levels: Vec<Level> = Vec::new();
    let mut count = 0;
    loop {
        match reader.read_event()? {
            Event::Start(tag) => {
                if levels.len() >= DEEPEST {
                    return Err(ImportError::Xml(format!("elements are nested more than {DEEPEST} deep")));
                }
                let level = element(&mut archive, &levels, &tag)?;
                if matches!(level, Level::Pci(_)) {
                    found(&mut count)?;
                }
                levels.push(level);
            }
            Event::Empty(tag) => {
                let level = element(&mut archive, &levels, &tag)?;
                if matches!(level, Level::Pci(_)) {
                    found(&mut count)?;
                }
            }
            Event::End(_) => drop(levels.pop()),
            Event::Eof => break,
            _ => {}
        }
    }
    if count > 0 { Ok(archive) } else { Err(ImportError::Empty("NCCL writes `pci` elements into `cpu` elements")) }
}

fn element(archive: &mut Archive, levels: &[Level], tag: &BytesStart<'_>) -> Result<Level, ImportError> {
    match tag.name().as_ref() {
        b"cpu" => {
            let node = attribute(tag, "numaid")?.and_then(|n| n.parse::<u32>().ok());
            if let Some(node) = node {
                let cpus = attribute(tag, "affinity")?.map(|a| cpu_list(&a)).unwrap_or_default();
                write_node(archive, node, &cpus, None);
            }
            if let Some(vendor) = attribute(tag, "vendor")? {
                let number = |key| attribute(tag, key).map(|v| v.and_then(|v| v.parse::<u32>().ok()).unwrap_or(0));
                let text =
                    format!("vendor_id\t: {vendor}\ncpu family\t: {}\nmodel\t: {}\n", number("familyid")?, number("modelid")?);
                archive.file("proc/cpuinfo", text);
            }
            Ok(Level::Cpu(node))
        }
        b"pci" => function(archive, levels, tag),
        b"net" => {
            if let (Some(folder), Some(name)) = (innermost(levels), attribute(tag, "name")?) {
                // The name is a file name here.
                let name: String =
                    name.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-')).take(32).collect();
                let kind = if name.starts_with("mlx") || attribute(tag, "guid")?.is_some() { "infiniband" } else { "net" };
                if !name.is_empty() {
                    archive.folder(&format!("{folder}/{kind}/{name}"));
                }
            }
            Ok(Level::Other)
        }
        _ => Ok(Level::Other),
    }
}

fn innermost(levels: &[Level]) -> Option<&str> {
    levels.iter().rev().find_map(|l| if let Level::Pci(folder) = l { Some(folder.as_str()) } else { None })
}

fn function(archive: &mut Archive, levels: &[Level], tag: &BytesStart<'_>) -> Result<Level, ImportError> {
    let Some(address) = attribute(tag, "busid")?.and_then(|b| b.parse::<Address>().ok()) else { return Ok(Level::Other) };
    let node = levels.iter().find_map(|l| if let Level::Cpu(node) = l { Some(*node) } else { None }).flatten();
    // NCCL leaves host bridges out. What hangs directly from one processor is taken for one bridge's, a virtual bus that no host has.
    let above = innermost(levels).map_or_else(|| format!("sys/devices/{}", root_of(node, address)), str::to_owned);
    let folder = format!("{above}/{address}");
    let id = |key| attribute(tag, key).map(|v| v.map_or(0, |v| hex16(&v)));
    let class = attribute(tag, "class")?.and_then(|c| hex(&c)).unwrap_or(0) & 0xff_ffff;
    let identity = Identity {
        vendor: id("vendor")?,
        device: id("device")?,
        subsystem_vendor: id("subsystem_vendor")?,
        subsystem_device: id("subsystem_device")?,
        class,
        revision: 0,
    };
    let port = (class >> 8 == 0x0604).then_some("upstream");
    Entryway { identity, driver: None, numa_node: node, port }.write(archive, &folder, &address.to_string());
    let speed = attribute(tag, "link_speed")?.unwrap_or_default();
    let width = attribute(tag, "link_width")?.unwrap_or_default();
    for state in ["current", "max"] {
        archive.file(&format!("{folder}/{state}_link_speed"), speed.clone());
        archive.file(&format!("{folder}/{state}_link_width"), width.clone());
    }
    Ok(Level::Pci(folder))
}

/// NCCL says "through the processor" for all that hangs from one; so one bridge stands for each.
fn root_of(node: Option<u32>, address: Address) -> String {
    let bus = node.and_then(|n| u8::try_from(n).ok()).unwrap_or(0xff);
    Address::root_name(address.domain, bus)
}
