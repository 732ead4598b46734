// SPDX-License-Identifier: MIT OR Apache-2.0
//! The whole tree: host bridges, functions, NUMA nodes, slots.

use std::collections::HashMap;

use serde::Serialize;

use super::{
    address::Address,
    function::{Function, Kind},
    link::LinkState,
    source::Origin,
};

/// A host bridge: where a tree of buses begins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Root {
    /// Name as in sysfs: `pci0000:00`.
    pub name: String,
    /// NUMA node that most of its functions are near to.
    pub numa_node: Option<u32>,
    /// Functions on its first bus, as indices.
    pub children: Vec<usize>,
}

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NumaNode {
    /// Number.
    pub id: u32,
    /// List of processors as the kernel prints it: `0-15,32-47`.
    pub cpus: String,
    /// Socket of its first processor.
    pub socket: Option<u32>,
    /// Distance to each node by number, 10 is itself.
    pub distances: Vec<u32>,
}

/// A hot-plug slot as the kernel names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Slot {
    /// Its name.
    pub name: String,
    /// Domain, bus and device: `0000:41:00`.
    pub address: String,
    /// A card sits in it, where the slot can tell.
    pub present: Option<bool>,
    /// It is powered, where the slot can tell.
    pub powered: Option<bool>,
}

/// Something that could not be read, or made no sense.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Note {
    /// File or folder.
    pub path: String,
    /// What was wrong with it.
    pub problem: String,
}

/// What the host says about its PCIe tree.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Topology {
    /// Where the facts come from.
    pub origin: Origin,
    /// What such a source can not say.
    pub missing: Vec<String>,
    /// Host bridges, by name.
    pub roots: Vec<Root>,
    /// All functions, by address.
    pub functions: Vec<Function>,
    /// NUMA nodes, by number.
    pub numa_nodes: Vec<NumaNode>,
    /// Hot-plug slots.
    pub slots: Vec<Slot>,
    /// How each IOMMU group treats addresses: `DMA` translates and flushes at once, `DMA-FQ` translates and flushes late, `identity` passes.
    pub iommu_groups: std::collections::BTreeMap<u32, String>,
    /// What could not be read.
    pub notes: Vec<Note>,
    #[serde(skip)]
    pub(super) index: HashMap<Address, usize>,
}

impl Topology {
    /// The function at `address`.
    pub fn find(&self, address: Address) -> Option<&Function> {
        self.functions.get(self.position(address)?)
    }

    /// The index of the function at `address`.
    pub fn position(&self, address: Address) -> Option<usize> {
        self.index.get(&address).copied()
    }

    /// The bridges above a function, nearest first.
    pub fn ancestors(&self, index: usize) -> impl Iterator<Item = usize> + '_ {
        // Links come from data: a cycle must end.
        std::iter::successors(self.functions.get(index).and_then(|f| f.parent), |i| self.functions.get(*i).and_then(|f| f.parent))
            .take(256)
    }

    /// The functions that exchange data with peers: the first function of each card, and every virtual function.
    pub fn peers(&self) -> Vec<usize> {
        (0..self.functions.len()).filter(|i| self.functions[*i].kind.is_peer()).collect()
    }

    /// The link just above a function: the function's own end if it looks up, with the port at the other side.
    pub fn hop(&self, index: usize) -> Option<Hop> {
        let function = self.functions.get(index)?;
        // A root port's or downstream port's link belongs to what is below it.
        if matches!(function.kind, Kind::RootPort | Kind::SwitchDown | Kind::HostBridge) {
            return None;
        }
        let end = function.capabilities.link.as_ref()?;
        let port = function.parent.and_then(|p| self.functions.get(p));
        let port_end =
            port.filter(|p| matches!(p.kind, Kind::RootPort | Kind::SwitchDown)).and_then(|p| p.capabilities.link.as_ref());
        let best = match (end.best, port_end.and_then(|p| p.best)) {
            (Some(card), Some(port)) => Some(card.common(port)),
            (card, port) => card.or(port),
        };
        Some(Hop {
            card: index,
            port: function.parent.filter(|_| port_end.is_some()),
            // Both ends report the same state; a card that sleeps or lacks rights leaves it to its port.
            now: end.now.or(port_end.and_then(|p| p.now)),
            best,
            card_best: end.best,
            port_best: port_end.and_then(|p| p.best),
            reported_gbps: end.reported_gbps,
        })
    }

    /// The links from a function up to its root port, nearest first.
    pub fn hops(&self, index: usize) -> Vec<Hop> {
        std::iter::once(index).chain(self.ancestors(index)).filter_map(|i| self.hop(i)).collect()
    }

    /// Socket of a NUMA node.
    pub fn socket(&self, node: u32) -> Option<u32> {
        self.numa_nodes.iter().find(|n| n.id == node)?.socket
    }

    /// Payload size in use between two functions: the smaller one; 128 bytes where unknown, as after reset.
    pub fn payload(&self, index: usize) -> u32 {
        self.functions.get(index).and_then(|f| f.capabilities.express.as_ref()).map_or(128, |e| e.payload)
    }
}

/// One link, seen from both ends.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Hop {
    /// The lower end, as an index.
    pub card: usize,
    /// The upper end, as an index.
    pub port: Option<usize>,
    /// As trained now.
    pub now: Option<LinkState>,
    /// The best that both ends can do together.
    pub best: Option<LinkState>,
    /// The best of the lower end.
    pub card_best: Option<LinkState>,
    /// The best of the upper end.
    pub port_best: Option<LinkState>,
    /// Bandwidth as another tool reported it, where speed and width are unknown; GB/s.
    pub reported_gbps: Option<f64>,
}

impl Hop {
    /// Data bytes per second in one direction now, in GB/s.
    pub fn gbps(&self) -> Option<f64> {
        self.now.map(LinkState::raw_gbps).or(self.reported_gbps)
    }

    /// Whether the link runs below what both ends can do.
    pub fn degraded(&self) -> bool {
        matches!((self.now, self.best), (Some(now), Some(best)) if now.below(best))
    }
}
