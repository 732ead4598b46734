// SPDX-License-Identifier: MIT OR Apache-2.0
//! A saved host: files and symbolic links in memory, and the `.tar.gz` that carries them.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Read, Write},
};

use flate2::{Compression, read::GzDecoder, write::GzEncoder};

use super::{
    read::DEEPEST,
    source::{LONGEST, Origin, ReadAt, Source, resolve},
};

/// A snapshot holds less; what holds more wants to exhaust our memory.
const MOST_BYTES: u64 = 256 << 20;
const MOST_ENTRIES: usize = 400_000;
/// Symbolic links that lead to symbolic links.
const MOST_LINKS: usize = 16;

/// One entry of an [`Archive`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A file's bytes.
    File(Vec<u8>),
    /// A symbolic link's target.
    Link(String),
    /// A file that could not be read when the snapshot was taken: the system's error number.
    Refused(i32),
}

/// Files of a host by path, without a leading slash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Archive {
    entries: BTreeMap<String, Entry>,
    folders: BTreeMap<String, BTreeSet<String>>,
    origin: Origin,
}

/// Why an archive could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The file is broken or no archive.
    #[error("the snapshot can not be read: {0}; take it again with `pcieipc snapshot`")]
    Broken(#[from] io::Error),
    /// It would take too much memory.
    #[error("the snapshot unpacks to more than {what}, which no host's does; take it again with `pcieipc snapshot`")]
    TooLarge {
        /// The bound that it passed.
        what: String,
    },
}

/// Where the error numbers of files that could not be read are kept in the archive.
const REFUSED: &str = "pcieipc/refused.json";

/// Where a second look is kept, and what it needs besides files.
const LATER: &str = "pcieipc/later";
const LATER_SECONDS: &str = "pcieipc/later-seconds";
const LATER_GONE: &str = "pcieipc/later-gone";

/// The longest path of a system (PATH_MAX). A name in an archive can be longer, and each of its folders would be kept.
const LONGEST_PATH: usize = 4096;
/// Folders inside each other: below the deepest tree there are a few more.
const MOST_PARTS: usize = DEEPEST + 16;
/// A file of sysfs is a page at most, and so is a configuration space.
const LONGEST_SYSFS: usize = 8192;

/// No system has such a path, and no archive can hold it.
fn impossible(path: &str) -> bool {
    path.is_empty() || path.len() > LONGEST_PATH || path.contains('\0') || path.split('/').count() > MOST_PARTS
}

impl Archive {
    /// An empty archive.
    pub fn new(origin: Origin) -> Self {
        Self { entries: BTreeMap::new(), folders: BTreeMap::new(), origin }
    }

    /// Adds or replaces an entry. Dots in the path are resolved, so that it can not leave the archive.
    pub fn insert(&mut self, path: &str, entry: Entry) {
        let path = resolve("", path);
        if impossible(&path) || matches!(&entry, Entry::Link(target) if impossible(target)) {
            return;
        }
        self.name_in_parents(&path);
        self.entries.insert(path, entry);
    }

    /// Adds or replaces a file.
    pub fn file(&mut self, path: &str, bytes: impl Into<Vec<u8>>) {
        self.insert(path, Entry::File(bytes.into()));
    }

    /// Adds an empty folder.
    pub fn folder(&mut self, path: &str) {
        let path = resolve("", path);
        if !impossible(&path) {
            self.name_in_parents(&path);
            self.folders.entry(path).or_default();
        }
    }

    fn name_in_parents(&mut self, path: &str) {
        let mut child = path;
        while let Some((folder, name)) = child.rsplit_once('/') {
            if !self.folders.entry(folder.to_owned()).or_default().insert(name.to_owned()) {
                break;
            }
            child = folder;
        }
    }

    /// All entries by path.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(path, entry)| (path.as_str(), entry))
    }

    /// Removes everything at or below `path`. What is elsewhere is not looked at.
    pub fn remove(&mut self, path: &str) {
        let below = format!("{path}/");
        fn gone<T>(map: &BTreeMap<String, T>, path: &str, below: &str) -> Vec<String> {
            let inside = map.range(below.to_owned()..).map(|(p, _)| p).take_while(|p| p.starts_with(below)).cloned();
            inside.chain(map.get_key_value(path).map(|(p, _)| p.clone())).collect()
        }
        gone(&self.entries, path, &below).iter().for_each(|p| drop(self.entries.remove(p)));
        gone(&self.folders, path, &below).iter().for_each(|p| drop(self.folders.remove(p)));
        // A folder that only led to it goes, too.
        let mut child = path;
        while let Some((folder, name)) = child.rsplit_once('/') {
            let Some(names) = self.folders.get_mut(folder) else { break };
            names.remove(name);
            if !names.is_empty() {
                break;
            }
            self.folders.remove(folder);
            child = folder;
        }
    }

    /// Writes a `.tar.gz`, the same bytes for the same entries.
    ///
    /// # Errors
    /// Those of writing to `out`.
    pub fn write(&self, out: impl Write) -> io::Result<()> {
        let mut tar = tar::Builder::new(GzEncoder::new(out, Compression::default()));
        let mut refused = BTreeMap::new();
        for (path, entry) in &self.entries {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o644);
            match entry {
                Entry::File(bytes) => {
                    header.set_size(bytes.len() as u64);
                    tar.append_data(&mut header, path, bytes.as_slice())?;
                }
                Entry::Link(target) => {
                    header.set_entry_type(tar::EntryType::Symlink);
                    header.set_size(0);
                    tar.append_link(&mut header, path, target)?;
                }
                Entry::Refused(errno) => {
                    refused.insert(path.clone(), *errno);
                }
            }
        }
        for (path, _) in self.folders.iter().filter(|(path, names)| names.is_empty() && !path.is_empty()) {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o755);
            header.set_size(0);
            header.set_entry_type(tar::EntryType::Directory);
            tar.append_data(&mut header, path, io::empty())?;
        }
        if !refused.is_empty() {
            let bytes = serde_json::to_vec_pretty(&refused)?;
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o644);
            header.set_size(bytes.len() as u64);
            tar.append_data(&mut header, REFUSED, bytes.as_slice())?;
        }
        tar.into_inner()?.finish()?.flush()
    }

    /// Reads what [`Archive::write`] wrote. Any other `.tar.gz` of `sys` and `proc` does as well.
    ///
    /// # Errors
    /// A broken file, or one that holds too much.
    pub fn read(input: impl Read) -> Result<Self, ArchiveError> {
        let mut archive = Self::new(Origin::Snapshot);
        // The bound is on what comes out of the compressor: a small file can unfold into a huge one.
        let mut tar = tar::Archive::new(Bounded { inner: GzDecoder::new(input), left: MOST_BYTES });
        for (count, entry) in tar.entries()?.enumerate() {
            let mut entry = entry.map_err(too_large)?;
            if count >= MOST_ENTRIES {
                return Err(ArchiveError::TooLarge { what: format!("{MOST_ENTRIES} files") });
            }
            let path = entry.path()?.to_string_lossy().into_owned();
            match entry.header().entry_type() {
                tar::EntryType::Regular => {
                    let mut bytes = Vec::new();
                    let name = resolve("", &path);
                    let limit = match name.strip_prefix("pcieipc/later/").unwrap_or(&name) {
                        name if name.starts_with("sys/") => LONGEST_SYSFS,
                        name if name.starts_with("pcieipc/") => 16 * LONGEST,
                        _ => LONGEST,
                    };
                    (&mut entry).take(limit as u64).read_to_end(&mut bytes).map_err(too_large)?;
                    archive.file(&path, bytes);
                }
                tar::EntryType::Symlink => {
                    if let Some(target) = entry.link_name()? {
                        archive.insert(&path, Entry::Link(target.to_string_lossy().into_owned()));
                    }
                }
                tar::EntryType::Directory => archive.folder(&path),
                _ => {}
            }
        }
        if let Some(Entry::File(bytes)) = archive.entries.get(REFUSED).cloned() {
            archive.remove(REFUSED);
            let refused: BTreeMap<String, i32> = serde_json::from_slice(&bytes).unwrap_or_default();
            for (path, errno) in refused {
                archive.insert(&path, Entry::Refused(errno));
            }
        }
        Ok(archive)
    }

    /// Keeps what changed at a second look, some seconds after the first.
    pub fn add_second_look(&mut self, second: &Self, seconds: f64) {
        for (path, entry) in second.entries() {
            if self.entries.get(path) != Some(entry) {
                self.insert(&format!("{LATER}/{path}"), entry.clone());
            }
        }
        let gone: Vec<String> =
            self.entries.keys().filter(|p| !p.starts_with("pcieipc/") && !second.entries.contains_key(*p)).cloned().collect();
        self.file(LATER_GONE, gone.join("\n"));
        self.file(LATER_SECONDS, format!("{seconds}\n"));
    }

    /// The host at the second look, and how many seconds after the first it was; `None` when there was none.
    pub fn second_look(&self) -> Option<(Self, f64)> {
        let seconds = self.text(LATER_SECONDS).ok()?.parse().ok().filter(|s: &f64| s.is_finite() && *s > 0.0)?;
        let mut second = self.clone();
        second.remove(LATER);
        for path in self.text(LATER_GONE).unwrap_or_default().lines().take(MOST_ENTRIES) {
            second.remove(path);
        }
        let below = format!("{LATER}/");
        for (path, entry) in self.entries() {
            if let Some(path) = path.strip_prefix(&below) {
                second.insert(path, entry.clone());
            }
        }
        Some((second, seconds))
    }

    /// Follows symbolic links in every part of the path.
    fn canonical(&self, path: &str) -> io::Result<String> {
        let mut path = resolve("", path);
        for _ in 0..MOST_LINKS {
            if self.entries.contains_key(&path) && !matches!(self.entries[&path], Entry::Link(_))
                || self.folders.contains_key(&path)
            {
                return Ok(path);
            }
            // Most files that are asked for and not there are missing from a folder that is.
            let in_folder = path.rsplit_once('/').is_some_and(|(folder, _)| self.folders.contains_key(folder));
            if in_folder && !self.entries.contains_key(&path) {
                break;
            }
            let Some((link, target, rest)) = self.first_link(&path) else { break };
            let folder = link.rsplit_once('/').map_or("", |(folder, _)| folder);
            path = format!("{}{rest}", resolve(folder, target));
        }
        Err(io::ErrorKind::NotFound.into())
    }

    /// The shortest prefix of the path that is a link, its target, and what follows.
    fn first_link<'a>(&'a self, path: &'a str) -> Option<(&'a str, &'a str, &'a str)> {
        let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
        ends.filter_map(|end| match self.entries.get(&path[..end]) {
            Some(Entry::Link(target)) => Some((&path[..end], target.as_str(), &path[end..])),
            _ => None,
        })
        .next()
    }

    fn bytes(&self, path: &str) -> io::Result<&Vec<u8>> {
        let path = self.canonical(path)?;
        match self.entries.get(&path) {
            Some(Entry::File(bytes)) => Ok(bytes),
            Some(Entry::Refused(errno)) => Err(io::Error::from_raw_os_error(*errno)),
            _ => Err(io::ErrorKind::IsADirectory.into()),
        }
    }
}

/// Gives an error of its own past a number of bytes, where `take` would give an end that looks like a broken file.
struct Bounded<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buf)?;
        self.left = self.left.checked_sub(length as u64).ok_or_else(|| io::Error::other(TooManyBytes))?;
        Ok(length)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("it unpacks to more than {} MiB", MOST_BYTES >> 20)]
struct TooManyBytes;

/// The archive's reader may wrap the error.
fn too_large(error: io::Error) -> ArchiveError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(found) = cause {
        let inner = found.downcast_ref::<io::Error>().and_then(|e| e.get_ref());
        if found.is::<TooManyBytes>() || inner.is_some_and(|i| i.is::<TooManyBytes>()) {
            return ArchiveError::TooLarge { what: format!("{} MiB", MOST_BYTES >> 20) };
        }
        cause = inner.map(|i| i as &(dyn std::error::Error + 'static)).or_else(|| found.source());
    }
    ArchiveError::Broken(error)
}

impl Source for Archive {
    fn origin(&self) -> Origin {
        self.origin
    }

    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        self.bytes(path).cloned()
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn ReadAt>> {
        Ok(Box::new(self.bytes(path)?.clone()))
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let path = self.canonical(path)?;
        let names = self.folders.get(&path).ok_or(io::ErrorKind::NotADirectory)?;
        Ok(names.iter().cloned().collect())
    }

    fn link(&self, path: &str) -> io::Result<String> {
        // The folder may be reached through links, the link itself must not be followed.
        let path = match path.rsplit_once('/') {
            Some((folder, name)) => format!("{}/{name}", self.canonical(folder)?),
            None => path.to_owned(),
        };
        match self.entries.get(&path) {
            Some(Entry::Link(target)) => Ok(target.clone()),
            Some(Entry::Refused(errno)) => Err(io::Error::from_raw_os_error(*errno)),
            Some(Entry::File(_)) => Err(io::ErrorKind::InvalidInput.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Archive {
        let mut archive = Archive::new(Origin::Snapshot);
        archive.file("sys/devices/pci0000:00/0000:00:01.0/vendor", "0x10de\n");
        archive.insert("sys/devices/pci0000:00/0000:00:01.0/config", Entry::Refused(libc::EACCES));
        archive.insert("sys/bus/pci/devices/0000:00:01.0", Entry::Link("../../../devices/pci0000:00/0000:00:01.0".into()));
        archive
    }

    #[test]
    fn what_is_written_is_read_again_links_and_refusals_too() {
        let mut bytes = Vec::new();
        sample().write(&mut bytes).unwrap();
        let read = Archive::read(bytes.as_slice()).unwrap();
        assert_eq!(read, sample());
        assert_eq!(read.text("sys/bus/pci/devices/0000:00:01.0/vendor").unwrap(), "0x10de");
        let refused = read.read("sys/bus/pci/devices/0000:00:01.0/config").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn a_path_longer_than_any_system_has_takes_no_memory() {
        let mut archive = Archive::new(Origin::Snapshot);
        archive.file(&"a/".repeat(30_000), "x");
        archive.folder(&"b/".repeat(30_000));
        archive.insert("c", Entry::Link("d/".repeat(30_000)));
        assert_eq!(archive, Archive::new(Origin::Snapshot));
    }

    #[test]
    fn links_in_a_ring_are_not_found_rather_than_followed_for_ever() {
        let mut archive = Archive::new(Origin::Snapshot);
        archive.insert("a", Entry::Link("b".into()));
        archive.insert("b", Entry::Link("a".into()));
        assert_eq!(archive.read("a").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(archive.list("a/c").unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn removing_takes_what_is_at_and_below_a_path_and_nothing_beside_it() {
        let mut archive = Archive::new(Origin::Snapshot);
        for path in ["a/b", "a/b-c/d", "a/b/c", "a/b/c/d", "a/bc", "e"] {
            archive.file(path, "x");
        }
        archive.remove("a/b");
        let left: Vec<&str> = archive.entries().map(|(path, _)| path).collect();
        assert_eq!(left, ["a/b-c/d", "a/bc", "e"]);
        assert_eq!(archive.list("a").unwrap(), ["b-c", "bc"]);
    }

    #[test]
    fn an_archive_that_unpacks_to_too_much_is_called_too_large_and_not_broken() {
        let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
        let mut header = tar::Header::new_gnu();
        header.set_size(MOST_BYTES + 1);
        tar.append_data(&mut header, "sys/zeros", io::repeat(0).take(MOST_BYTES + 1)).unwrap();
        let bytes = tar.into_inner().unwrap().finish().unwrap();
        let error = Archive::read(bytes.as_slice()).unwrap_err();
        assert!(matches!(error, ArchiveError::TooLarge { .. }), "{error}");
        assert!(error.to_string().contains("256 MiB"), "{error}");
    }

    #[test]
    fn paths_that_climb_stay_inside() {
        let mut archive = Archive::new(Origin::Snapshot);
        archive.file("../../etc/passwd", "x");
        assert_eq!(archive.text("etc/passwd").unwrap(), "x");
    }
}
