// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ports between the host bridge and the endpoints of a group.

use std::{collections::BTreeMap, fs, io, path::Path};

use serde::Serialize;

/// A function on the way, or an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Its PCI address, `0000:03:00.0`.
    pub address: String,
    /// The rank that owns it, when it is an endpoint.
    pub rank: Option<usize>,
    /// What is below it.
    pub children: Vec<Node>,
}

/// The tree over the endpoints of ranks 0, 1, ..., read from the links in `devices` (`/sys/bus/pci/devices`).
///
/// # Errors
/// When an endpoint is not there.
pub fn tree_of(devices: &Path, endpoints: &[String]) -> io::Result<Vec<Node>> {
    let mut below = Below::default();
    for (rank, address) in endpoints.iter().enumerate() {
        let path = fs::canonicalize(devices.join(address))?;
        let chain: Vec<String> =
            path.iter().filter_map(|part| part.to_str()).filter(|part| is_address(part)).map(ToOwned::to_owned).collect();
        below.insert(&chain, rank);
    }
    Ok(below.nodes())
}

#[derive(Default)]
struct Below {
    rank: Option<usize>,
    children: BTreeMap<String, Below>,
}

impl Below {
    fn insert(&mut self, chain: &[String], rank: usize) {
        match chain.split_first() {
            None => self.rank = Some(rank),
            Some((first, rest)) => self.children.entry(first.clone()).or_default().insert(rest, rank),
        }
    }

    fn nodes(&self) -> Vec<Node> {
        let node =
            |(address, below): (&String, &Below)| Node { address: address.clone(), rank: below.rank, children: below.nodes() };
        self.children.iter().map(node).collect()
    }
}

/// Whether a folder's name is a function's: domain, bus, device, function, not `pci0000:00`.
fn is_address(name: &str) -> bool {
    let groups: Vec<&str> = name.split([':', '.']).collect();
    matches!(groups[..], [domain, bus, device, function] if domain.len() >= 4 && bus.len() == 2 && device.len() == 2 && function.len() == 1)
        && name.chars().all(|letter| letter.is_ascii_hexdigit() || letter == ':' || letter == '.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_behind_one_switch_share_its_ports() {
        let root = tempfile::tempdir().unwrap();
        let real = root.path().join("pci0000:00/0000:00:03.0/0000:01:00.0");
        let devices = root.path().join("devices");
        fs::create_dir(&devices).unwrap();
        let mut endpoints = Vec::new();
        for slot in 0..2 {
            let address = format!("0000:0{}:00.0", slot + 3);
            let path = real.join(format!("0000:02:0{slot}.0")).join(&address);
            fs::create_dir_all(&path).unwrap();
            std::os::unix::fs::symlink(&path, devices.join(&address)).unwrap();
            endpoints.push(address);
        }
        let tree = tree_of(&devices, &endpoints).unwrap();
        assert_eq!(tree.len(), 1);
        let upstream = &tree[0].children[0];
        assert_eq!((tree[0].address.as_str(), upstream.address.as_str()), ("0000:00:03.0", "0000:01:00.0"));
        let ranks: Vec<_> = upstream.children.iter().map(|port| port.children[0].rank).collect();
        assert_eq!(ranks, [Some(0), Some(1)]);
    }
}
