// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a host says only through system calls, given the form of files so that a snapshot can hold it.

use std::{
    io::{self, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use super::source::printable;
use crate::device::DeviceError;

/// Path of [`Facts`] as JSON.
pub const FACTS: &str = "pcieipc/facts.json";
/// Path of the kernel log, one record a line in the form of `/dev/kmsg`.
pub const KERNEL_LOG: &str = "pcieipc/kernel.log";
/// At most this much of the kernel log is read, its end.
const LOG_BYTES: usize = 4 << 20;

/// Answers of system calls.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Facts {
    /// When they were taken, seconds since 1970.
    pub time: u64,
    /// Effective user id of the process that asked.
    pub euid: u32,
    /// Size of the file system at `/dev/shm` in bytes.
    pub shm_bytes: Option<u64>,
    /// Free bytes at `/dev/shm`.
    pub shm_free: Option<u64>,
    /// The device node `/dev/pcieipc`.
    pub node: Option<Node>,
    /// Version and ABI of the loaded module as the node answers it.
    pub module: Option<ModuleAnswer>,
}

/// A device node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Node {
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Whether this process could open it for reading and writing; the system's text if not.
    pub refused: Option<String>,
}

/// What the loaded module says about itself.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModuleAnswer {
    /// Its ABI version.
    pub abi: u32,
    /// The oldest library that it accepts.
    pub abi_oldest: u32,
    /// Neither accepts the other.
    pub excluded: bool,
}

impl Facts {
    /// With texts that can be shown anywhere: a saved host's are somebody else's.
    pub(super) fn printable(mut self) -> Self {
        if let Some(refused) = self.node.as_mut().and_then(|n| n.refused.as_mut()) {
            *refused = printable(refused);
        }
        self
    }
}

/// The file at `path` if it is one of ours.
pub(super) fn read(path: &str, root: &Path) -> Option<io::Result<Vec<u8>>> {
    match path {
        FACTS => Some(serde_json::to_vec_pretty(&gather(root)).map_err(io::Error::other)),
        KERNEL_LOG => Some(kernel_log(root)),
        _ => None,
    }
}

fn gather(root: &Path) -> Facts {
    let shm = nix::sys::statvfs::statvfs(&root.join("dev/shm")).ok();
    let block = shm.as_ref().map_or(0, |s| s.fragment_size());
    Facts {
        time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        euid: nix::unistd::geteuid().as_raw(),
        shm_bytes: shm.as_ref().map(|s| s.blocks().saturating_mul(block)),
        shm_free: shm.as_ref().map(|s| s.blocks_available().saturating_mul(block)),
        node: node(&root.join("dev/pcieipc")),
        module: if root == Path::new("/") { module() } else { None },
    }
}

fn module() -> Option<ModuleAnswer> {
    match crate::device::Node::open() {
        Ok(node) => Some(ModuleAnswer { abi: node.limits().version, abi_oldest: node.limits().oldest, excluded: false }),
        Err(DeviceError::Version { module, module_oldest, .. }) => {
            Some(ModuleAnswer { abi: module, abi_oldest: module_oldest, excluded: true })
        }
        Err(_) => None,
    }
}

fn node(path: &Path) -> Option<Node> {
    let metadata = std::fs::metadata(path).ok()?;
    let opened = std::fs::OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK).open(path);
    Some(Node {
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        refused: opened.err().map(|e| e.to_string()),
    })
}

/// Reads all records that the kernel still has. Each `read` of the node gives one record; EPIPE says that records were
/// overwritten meanwhile, and the next read goes on behind the gap.
fn kernel_log(root: &Path) -> io::Result<Vec<u8>> {
    let mut node =
        std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(root.join("dev/kmsg"))?;
    let mut log = Vec::new();
    let mut record = [0u8; 8192];
    // A bound on the records, because a kernel that logs faster than we read would never end this loop.
    for _ in 0..200_000 {
        match node.read(&mut record) {
            Ok(0) => break,
            Ok(length) => {
                // The first line is the message, the lines after it are its dictionary.
                let line = record[..length].split(|b| *b == b'\n').next().unwrap_or_default();
                log.extend_from_slice(line);
                log.push(b'\n');
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
            Err(e) if e.raw_os_error() == Some(libc::EPIPE) || e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    if log.len() > LOG_BYTES {
        log.drain(..log.len() - LOG_BYTES);
    }
    Ok(log)
}
