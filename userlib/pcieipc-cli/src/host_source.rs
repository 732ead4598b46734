// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--snapshot FILE`: the host that a command looks at.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use pcieipc::{
    plan::Tree,
    topology::{Address, Archive, Live, Source, Topology, import},
    tune::Ways,
};

use crate::failure::Failure;

/// A host later on, and how many seconds later.
pub type SecondLook = (Box<dyn Source>, f64);

/// Which host to look at.
#[derive(clap::Args, Clone, Debug)]
pub struct HostSource {
    /// Look at a saved host in place of this one: a snapshot, NCCL's or hwloc's XML, or the text of `lspci -vvvxxxx`
    #[arg(long, value_name = "FILE")]
    pub snapshot: Option<PathBuf>,
    /// Look at a host whose /sys and /proc are mounted below this folder
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    pub host_root: PathBuf,
}

impl HostSource {
    /// Opens the saved host, or this one.
    pub fn open(&self) -> Result<Box<dyn Source>, Failure> {
        let Some(path) = &self.snapshot else { return Ok(Box::new(Live::at(&self.host_root))) };
        Ok(Box::new(load(path)?))
    }

    /// The same host at a second look, and how many seconds lie between: the running host after a pause that the caller
    /// makes, or what a snapshot saved of its own second look.
    pub fn later(&self, seconds: f64) -> Result<Option<SecondLook>, Failure> {
        match &self.snapshot {
            None if seconds > 0.0 => Ok(Some((Box::new(Live::at(&self.host_root)), seconds))),
            None => Ok(None),
            Some(path) => {
                let second = load(path)?.second_look();
                Ok(second.map(|(archive, seconds)| (Box::new(archive) as Box<dyn Source>, seconds)))
            }
        }
    }

    /// Whether it is the running host.
    pub fn is_live(&self) -> bool {
        self.snapshot.is_none()
    }
}

/// Where ranks are on a host.
pub struct Placed {
    /// The endpoint of each rank.
    pub endpoints: Vec<Address>,
    /// Which ranks are near each other.
    pub tree: Tree,
    /// What the links above them carry.
    pub ways: Ways,
}

/// Puts ranks onto a host: on the endpoints that were named, one each, else on its first accelerators.
pub fn place(source: &dyn Source, named: &[Address], ranks: usize) -> Result<Placed, Failure> {
    let topology = Topology::read(source);
    let endpoints = if named.is_empty() {
        let peers: Vec<Address> = topology.peers().into_iter().map(|i| topology.functions[i].address).take(ranks).collect();
        if peers.len() < ranks {
            return Err(Failure::Use(format!(
                "the host has {} accelerators for {ranks} ranks; name the function of each rank with --endpoints (`pcieipc topo` lists them)",
                peers.len()
            )));
        }
        peers
    } else {
        named.to_vec()
    };
    let lost = endpoints.iter().find(|a| topology.position(**a).is_none());
    match (topology.rank_tree(&endpoints), topology.ways(&endpoints)) {
        (Some(tree), Some(ways)) => Ok(Placed { endpoints, tree, ways }),
        _ => Err(Failure::Use(format!(
            "there is no function {}; see `pcieipc topo`",
            lost.map_or(String::new(), Address::to_string)
        ))),
    }
}

/// Reads a saved host.
pub fn load(path: &Path) -> Result<Archive, Failure> {
    let file = File::open(path).map_err(|e| Failure::Use(format!("{}: {e}", path.display())))?;
    import::open(file).map_err(|e| Failure::Use(format!("{}: {e}", path.display())))
}
