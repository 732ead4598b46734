// SPDX-License-Identifier: MIT OR Apache-2.0
//! hwloc's XML, as `lstopo --of xml` writes it (format 2).

use quick_xml::{
    Reader,
    events::{BytesStart, Event},
};

use super::{DEEPEST, Entryway, ImportError, attribute, cpu_list, found, hex16, write_node};
use crate::topology::{address::Address, archive::Archive, function::Identity, source::Origin};

/// What is open above the current object.
#[derive(Clone, Default)]
struct Level {
    /// Folder that functions below go into.
    folder: Option<String>,
    /// The NUMA node, if all of what is open is near to one.
    node: Option<u32>,
    /// The socket.
    socket: Option<u32>,
    /// What kind of port a bridge here would be.
    next_port: Option<&'static str>,
}

pub(super) fn read(text: &str) -> Result<Archive, ImportError> {
    let mut archive = Archive::new(Origin::HwlocXml);
    archive.folder("sys/bus/pci/devices");
    let mut reader = Reader::from_str(text);
    let mut levels: Vec<Level> = vec![Level::default()];
    let mut count = 0;
    loop {
        match reader.read_event()? {
            Event::Start(tag) => {
                if levels.len() >= DEEPEST {
                    return Err(ImportError::Xml(format!("elements are nested more than {DEEPEST} deep")));
                }
                let above = levels.last().cloned().unwrap_or_default();
                levels.push(if tag.name().as_ref() == b"object" {
                    object(&mut archive, &above, &tag, &mut count)?
                } else {
                    above
                });
            }
            Event::Empty(tag) => {
                let above = levels.last().cloned().unwrap_or_default();
                if tag.name().as_ref() == b"object" {
                    object(&mut archive, &above, &tag, &mut count)?;
                }
            }
            Event::End(_) => drop(levels.pop()),
            Event::Eof => break,
            _ => {}
        }
    }
    if count > 0 { Ok(archive) } else { Err(ImportError::Empty("let `lstopo` keep I/O: `lstopo --whole-io --of xml`")) }
}

fn object(archive: &mut Archive, above: &Level, tag: &BytesStart<'_>, count: &mut usize) -> Result<Level, ImportError> {
    let mut level = above.clone();
    if let Some(set) = attribute(tag, "nodeset")? {
        // One bit: all that is below is near to this node.
        let nodes = cpu_list(&set.replace("0x", ""));
        level.node = nodes.parse().ok();
    }
    match attribute(tag, "type")?.as_deref() {
        Some("Package") => level.socket = attribute(tag, "os_index")?.and_then(|n| n.parse().ok()),
        Some("NUMANode") => {
            let node: Option<u32> = attribute(tag, "os_index")?.and_then(|n| n.parse().ok());
            let cpus = attribute(tag, "cpuset")?.map(|c| cpu_list(&c.replace("0x", ""))).unwrap_or_default();
            if let Some(node) = node {
                write_node(archive, node, &cpus, level.socket);
            }
        }
        Some("Bridge") if attribute(tag, "bridge_type")?.is_some_and(|t| t.starts_with("0-")) => {
            // "0000:[00-1f]": the host bridge and its buses.
            let buses = attribute(tag, "bridge_pci")?.unwrap_or_default();
            let (domain, rest) = buses.split_once(":[").unwrap_or(("0", "00"));
            let bus = rest.split('-').next().and_then(|b| u8::from_str_radix(b, 16).ok()).unwrap_or(0);
            let domain = u32::from_str_radix(domain, 16).unwrap_or(0);
            level.folder = Some(format!("sys/devices/{}", Address::root_name(domain, bus)));
            level.next_port = Some("root");
        }
        Some("Bridge") => {
            let port = above.next_port;
            if let Some(folder) = function(archive, above, tag, port)? {
                level.folder = Some(folder);
                found(count)?;
            }
            // Below a root port comes a switch's upstream port, below that its downstream ports, and so on.
            level.next_port = match port {
                Some("root" | "downstream") => Some("upstream"),
                _ => Some("downstream"),
            };
        }
        Some("PCIDev") => {
            if let Some(folder) = function(archive, above, tag, None)? {
                level.folder = Some(folder);
                found(count)?;
            }
        }
        Some("OSDev") => {
            let name: String = attribute(tag, "name")?
                .unwrap_or_default()
                .chars()
                .filter(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'))
                .take(32)
                .collect();
            // Network and OpenFabrics devices; format 3 writes sets of bits, and these names only matter for drawings.
            let kind = match attribute(tag, "osdev_type")?.as_deref() {
                Some("2") => "net",
                Some("3") => "infiniband",
                _ => return Ok(level),
            };
            if let (Some(folder), false) = (&above.folder, name.is_empty()) {
                archive.folder(&format!("{folder}/{kind}/{name}"));
            }
        }
        _ => {}
    }
    Ok(level)
}

fn function(
    archive: &mut Archive,
    above: &Level,
    tag: &BytesStart<'_>,
    port: Option<&'static str>,
) -> Result<Option<String>, ImportError> {
    let Some(address) = attribute(tag, "pci_busid")?.and_then(|b| b.parse::<Address>().ok()) else { return Ok(None) };
    let parent = above.folder.clone().unwrap_or_else(|| format!("sys/devices/{}", Address::root_name(address.domain, 0)));
    let folder = format!("{parent}/{address}");
    // "0302 [10de:2330] [10de:16c1] a1"
    let kind = attribute(tag, "pci_type")?.unwrap_or_default();
    let mut parts = kind.split([' ', '[', ']', ':']).filter(|p| !p.is_empty()).map(hex16);
    let mut next = || parts.next().unwrap_or(0);
    let class = u32::from(next()) << 8;
    let identity =
        Identity { class, vendor: next(), device: next(), subsystem_vendor: next(), subsystem_device: next(), revision: 0 };
    Entryway { identity, driver: None, numa_node: above.node, port }.write(archive, &folder, &address.to_string());
    if let Some(speed) = attribute(tag, "pci_link_speed")? {
        archive.file(&format!("{folder}/link_gbps"), speed);
    }
    Ok(Some(folder))
}
