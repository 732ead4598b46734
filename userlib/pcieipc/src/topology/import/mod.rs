// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hosts as other tools wrote them down. Each becomes an [`Archive`] with the files that the tool knew, so that one reader
//! serves all; what a tool does not know stays absent, and [`Origin::missing`](super::Origin::missing) says so.

mod hwloc;
mod lspci;
mod nccl;

use std::io::Read;

use super::{
    archive::{Archive, ArchiveError, Entry},
    function::Identity,
    read::{DEEPEST, MOST_FUNCTIONS},
    source::{Source, printable},
};

/// A text of more than this is no host.
const MOST_BYTES: u64 = 128 << 20;

/// Why a file could not be taken in.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// It could not be read.
    #[error("the file can not be read: {0}")]
    Read(#[from] std::io::Error),
    /// It looked like a snapshot and is none.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// It is longer than any host's.
    #[error("the file is longer than {} MiB, which no host's is; take it again", MOST_BYTES >> 20)]
    TooLong,
    /// It has more functions than any host.
    #[error("the file holds more than {MOST_FUNCTIONS} functions, which no host has; take it again")]
    TooManyFunctions,
    /// It is XML, and broken.
    #[error("the XML is broken: {0}; take it again")]
    Xml(String),
    /// It is text, but of none of the forms that are understood.
    #[error("this is neither a snapshot, nor NCCL's or hwloc's XML, nor the output of `lspci -vvvxxxx`")]
    Unknown,
    /// It is of a form that is understood, and holds no function.
    #[error("no PCI function was found in it; {0}")]
    Empty(&'static str),
}

impl From<quick_xml::Error> for ImportError {
    fn from(error: quick_xml::Error) -> Self {
        Self::Xml(printable(&error.to_string()))
    }
}

impl From<quick_xml::events::attributes::AttrError> for ImportError {
    fn from(error: quick_xml::events::attributes::AttrError) -> Self {
        Self::Xml(printable(&error.to_string()))
    }
}

/// Reads a saved host of any form: a snapshot, NCCL's XML, hwloc's XML, or the text of `lspci -vvvxxxx`.
///
/// # Errors
/// A file that can not be read, is broken, or is none of these.
pub fn open(input: impl Read) -> Result<Archive, ImportError> {
    let mut bytes = Vec::new();
    input.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(ImportError::TooLong);
    }
    if bytes.starts_with(&[0x1f, 0x8b]) {
        let archive = Archive::read(bytes.as_slice())?;
        // A snapshot of a host without any function has the folder all the same.
        if archive.list("sys/bus/pci/devices").is_err() {
            return Err(ImportError::Empty("it is no snapshot that `pcieipc snapshot` wrote"));
        }
        return Ok(archive);
    }
    let text = String::from_utf8_lossy(&bytes);
    from_text(&text)
}

/// Reads a saved host that is text.
///
/// # Errors
/// As for [`open`].
pub fn from_text(text: &str) -> Result<Archive, ImportError> {
    let start = text.trim_start_matches('\u{feff}').trim_start();
    if start.starts_with('<') {
        // The root element tells whose XML it is.
        return if text.contains("<topology") || text.contains("<!DOCTYPE topology") {
            hwloc::read(text)
        } else if text.contains("<system") {
            nccl::read(text)
        } else {
            Err(ImportError::Unknown)
        };
    }
    lspci::read(text)
}

/// Counts a function.
fn found(count: &mut usize) -> Result<(), ImportError> {
    *count += 1;
    if *count > MOST_FUNCTIONS { Err(ImportError::TooManyFunctions) } else { Ok(()) }
}

/// One function of an import, to be written as files.
#[derive(Debug, Default)]
struct Entryway {
    identity: Identity,
    driver: Option<String>,
    numa_node: Option<u32>,
    port: Option<&'static str>,
}

impl Entryway {
    /// Writes what every form knows.
    fn write(&self, archive: &mut Archive, folder: &str, address: &str) {
        if folder.starts_with("sys/devices/") {
            let target = format!("../../../{}", folder.trim_start_matches("sys/"));
            archive.insert(&format!("sys/bus/pci/devices/{address}"), Entry::Link(target));
        }
        let id = &self.identity;
        let driver = self.driver.as_ref().map_or(String::new(), |d| format!("DRIVER={d}\n"));
        archive.file(
            &format!("{folder}/uevent"),
            format!(
                "{driver}PCI_CLASS={:X}\nPCI_ID={:04X}:{:04X}\nPCI_SUBSYS_ID={:04X}:{:04X}\n",
                id.class, id.vendor, id.device, id.subsystem_vendor, id.subsystem_device
            ),
        );
        archive.file(&format!("{folder}/numa_node"), self.numa_node.map_or("-1".into(), |n| n.to_string()));
        if let Some(port) = self.port {
            archive.file(&format!("{folder}/port_type"), port);
        }
    }
}

/// Hexadecimal digits with or without `0x`.
fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
}

fn hex16(text: &str) -> u16 {
    hex(text).and_then(|n| u16::try_from(n).ok()).unwrap_or(0)
}

/// A mask in words of 32 bits, highest first, as a list: `0000000f` is `0-3`.
fn cpu_list(mask: &str) -> String {
    let words: Vec<u32> = mask.split(',').map(|w| hex(w).unwrap_or(0)).collect();
    let set = words
        .iter()
        .rev()
        .take(2048)
        .enumerate()
        .flat_map(|(at, word)| (0..32).filter(move |b| word >> b & 1 != 0).map(move |b| at * 32 + b));
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for cpu in set {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let texts = ranges.iter().map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") });
    texts.collect::<Vec<_>>().join(",")
}

/// A NUMA node's files.
fn write_node(archive: &mut Archive, id: u32, cpus: &str, socket: Option<u32>) {
    let folder = format!("sys/devices/system/node/node{id}");
    archive.file(&format!("{folder}/cpulist"), cpus);
    if let (Some(socket), Some(cpu)) = (socket, cpus.split([',', '-']).next().filter(|c| !c.is_empty())) {
        archive.file(&format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"), socket.to_string());
    }
}

/// An attribute's value with entities resolved.
fn attribute(tag: &quick_xml::events::BytesStart<'_>, name: &str) -> Result<Option<String>, ImportError> {
    match tag.try_get_attribute(name)? {
        Some(found) => Ok(Some(found.normalized_value(quick_xml::XmlVersion::Implicit1_0)?.into_owned())),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_become_lists() {
        assert_eq!(cpu_list("0000000f"), "0-3");
        assert_eq!(cpu_list("ffffffff,00000001"), "0,32-63");
        assert_eq!(cpu_list("zz,"), "");
    }

    #[test]
    fn what_is_no_host_is_refused() {
        assert!(matches!(from_text("hello"), Err(ImportError::Empty(_))));
        assert!(matches!(from_text("<html/>"), Err(ImportError::Unknown)));
        assert!(matches!(from_text("<system><cpu"), Err(ImportError::Xml(_))));
        assert!(matches!(open(&b"\x1f\x8bnonsense"[..]), Err(ImportError::Archive(_))));
        let mut photos = Archive::new(super::super::Origin::Snapshot);
        photos.file("photos/cat.jpg", "meow");
        let mut packed = Vec::new();
        photos.write(&mut packed).unwrap();
        assert!(matches!(open(packed.as_slice()), Err(ImportError::Empty(_))));
    }
}
