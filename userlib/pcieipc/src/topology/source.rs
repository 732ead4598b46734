// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the facts come from: this host, or a saved one.
//!
//! Paths are relative to the host's root and have no leading slash: `sys/bus/pci/devices`. Besides `sys` and `proc` there is
//! `pcieipc/`, a folder that no host has: it carries the answers of system calls, so that a saved host has them too.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use super::facts;

/// What the kernel gives of an attribute at most.
const PAGE: usize = 4096;
/// No file that is read here is longer; what is longer is cut, because sysfs of a broken driver can be endless.
pub const LONGEST: usize = 1 << 20;

/// Where the facts of a [`Source`] were taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// The running host.
    Live,
    /// A saved snapshot of a host.
    Snapshot,
    /// NCCL's topology XML.
    NcclXml,
    /// The text of `lspci -vvvxxxx`.
    Lspci,
    /// The XML of hwloc's `lstopo`.
    HwlocXml,
}

impl Origin {
    /// What such a source can not say; empty for a host and its snapshot.
    pub fn missing(self) -> &'static [&'static str] {
        match self {
            Self::Live | Self::Snapshot => &[],
            Self::NcclXml => &[
                "downstream and root ports (NCCL keeps one entry for a whole switch)",
                "links as they are now (NCCL writes what both ends can do at best), and which host bridge a card hangs from",
                "ACS, ASPM, payload sizes, relaxed ordering, extended tags",
                "AER counters, IOMMU groups, BARs, slots, DPC, drivers, reset methods",
                "devices that NCCL does not use, kernel log, module and limits of the host",
            ],
            Self::Lspci => &[
                "AER counters (only the status registers are there), ids of virtual functions (they read as ffff)",
                "reset methods, NUMA distances, IOMMU mode, sizes of BARs where lspci could not read them",
                "kernel log, module and limits of the host",
            ],
            Self::HwlocXml => &[
                "link width, and link speed of ports: hwloc keeps one bandwidth for each device",
                "link at best, ACS, ASPM, payload sizes, relaxed ordering, extended tags",
                "AER counters, IOMMU groups, BARs, slots, DPC, drivers, reset methods",
                "devices that hwloc filtered out, kernel log, module and limits of the host",
            ],
        }
    }
}

/// A file of which parts are read at an offset: configuration space.
pub trait ReadAt {
    /// Reads at most `buf.len()` bytes at `offset`; fewer at the end of what the caller may see.
    ///
    /// # Errors
    /// Those of `pread`.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl ReadAt for File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buf, offset)
    }
}

impl ReadAt for Vec<u8> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.len());
        let length = buf.len().min(self.len() - start);
        buf[..length].copy_from_slice(&self[start..start + length]);
        Ok(length)
    }
}

/// The files of a host. Every call may fail at any time: cards vanish while they are read.
pub trait Source: Send + Sync {
    /// Where the facts come from.
    fn origin(&self) -> Origin;
    /// The whole file, cut at 1 MiB, which no file of sysfs reaches.
    ///
    /// # Errors
    /// Those of `open` and `read`.
    fn read(&self, path: &str) -> io::Result<Vec<u8>>;
    /// Opens a file for reading at offsets.
    ///
    /// # Errors
    /// Those of `open`.
    fn open(&self, path: &str) -> io::Result<Box<dyn ReadAt>>;
    /// The names in a folder, sorted.
    ///
    /// # Errors
    /// Those of `opendir` and `readdir`.
    fn list(&self, path: &str) -> io::Result<Vec<String>>;
    /// Where a symbolic link points to.
    ///
    /// # Errors
    /// Those of `readlink`.
    fn link(&self, path: &str) -> io::Result<String>;

    /// A number that a folder of sysfs has only as long as its device lives, where the source can tell.
    fn life(&self, path: &str) -> Option<u64> {
        let _ = path;
        None
    }

    /// The file's lines without surrounding blanks, printable: a driver, a device or whoever made a snapshot can write anything into it, and it
    /// goes to terminals and into XML.
    ///
    /// # Errors
    /// Those of [`Source::read`].
    fn text(&self, path: &str) -> io::Result<String> {
        Ok(printable_lines(String::from_utf8_lossy(&self.read(path)?).trim()))
    }

    /// The same for a file that holds one value: always one line.
    ///
    /// # Errors
    /// Those of [`Source::read`].
    fn value(&self, path: &str) -> io::Result<String> {
        Ok(printable(&self.text(path)?))
    }

    /// The last part of where a symbolic link points to, printable.
    fn link_name(&self, path: &str) -> Option<String> {
        self.link(path).ok()?.rsplit('/').next().map(printable)
    }
}

impl<S: Source + ?Sized> Source for std::sync::Arc<S> {
    fn origin(&self) -> Origin {
        (**self).origin()
    }

    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        (**self).read(path)
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn ReadAt>> {
        (**self).open(path)
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        (**self).list(path)
    }

    fn link(&self, path: &str) -> io::Result<String> {
        (**self).link(path)
    }

    fn life(&self, path: &str) -> Option<u64> {
        (**self).life(path)
    }
}

/// The running host.
#[derive(Debug, Clone)]
pub struct Live {
    root: PathBuf,
}

impl Default for Live {
    fn default() -> Self {
        Self::at("/")
    }
}

impl Live {
    /// A host whose `sys` and `proc` stand under `root`: `/`, or a folder that looks like one.
    pub fn at(root: impl AsRef<Path>) -> Self {
        Self { root: root.as_ref().to_owned() }
    }
}

impl Source for Live {
    fn origin(&self) -> Origin {
        Origin::Live
    }

    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        if let Some(fact) = facts::read(path, &self.root) {
            return fact;
        }
        let mut file = File::open(self.root.join(path))?;
        let mut bytes = vec![0; PAGE];
        let length = file.read(&mut bytes)?;
        bytes.truncate(length);
        // One read gives a file of sysfs, which is a page at most; to ask for its end would double the calls. Others may come in pieces.
        if length == PAGE || !path.starts_with("sys/") {
            file.take((LONGEST - length) as u64).read_to_end(&mut bytes)?;
        }
        Ok(bytes)
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn ReadAt>> {
        Ok(Box::new(File::open(self.root.join(path))?))
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(self.root.join(path))? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    fn life(&self, path: &str) -> Option<u64> {
        use std::os::unix::fs::MetadataExt;
        Some(std::fs::symlink_metadata(self.root.join(path)).ok()?.ino())
    }

    fn link(&self, path: &str) -> io::Result<String> {
        Ok(std::fs::read_link(self.root.join(path))?.to_string_lossy().into_owned())
    }
}

/// What a terminal would obey instead of show, what turns the direction of writing, and what XML can not hold, becomes a replacement character.
fn shown(c: char) -> char {
    let obeyed = c.is_control();
    let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let no_xml = matches!(c, '\u{fffe}' | '\u{ffff}');
    if obeyed || turns || no_xml { char::REPLACEMENT_CHARACTER } else { c }
}

/// One line that can be printed anywhere.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(shown).collect()
}

/// The same, less the ends of lines and tabulators.
fn printable_lines(text: &str) -> String {
    text.chars().map(|c| if matches!(c, '\n' | '\t') { c } else { shown(c) }).collect()
}

/// Resolves a link's target against the folder that holds the link: `sys/bus/pci/devices` and `../../../devices/x` give
/// `sys/devices/x`. A target that climbs past the root ends at the root, as in a kernel.
pub fn resolve(folder: &str, target: &str) -> String {
    let mut parts: Vec<&str> =
        if target.starts_with('/') { Vec::new() } else { folder.split('/').filter(|p| !p.is_empty()).collect() };
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_obeys_or_xml_can_not_hold_is_replaced_and_the_rest_is_kept() {
        assert_eq!(printable("a\u{1b}[31mb\nc\u{9b}d\u{202e}e\u{ffff}é"), "a\u{fffd}[31mb\u{fffd}c\u{fffd}d\u{fffd}e\u{fffd}é");
        assert_eq!(printable_lines("a\tb\nc\rd\0"), "a\tb\nc\u{fffd}d\u{fffd}");
    }
}
