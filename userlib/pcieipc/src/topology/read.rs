// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the tree from a [`Source`]. Nothing here fails: what can not be read becomes a note.

use std::{
    collections::{BTreeMap, HashMap},
    io,
};

use super::{
    address::Address,
    function::Function,
    read_function,
    source::{Source, resolve},
    tree::{Note, NumaNode, Root, Slot, Topology},
};

const DEVICES: &str = "sys/bus/pci/devices";
/// More functions than this are no host but an attack on our memory.
const MOST_FUNCTIONS: usize = 65_536;
/// Below this many functions a second thread costs more than it saves.
const FUNCTIONS_PER_THREAD: usize = 64;

impl Topology {
    /// Reads the whole tree anew.
    pub fn read(source: &dyn Source) -> Self {
        let mut notes = Vec::new();
        let names = match source.list(DEVICES) {
            Ok(names) => names,
            Err(error) => {
                notes.push(Note { path: DEVICES.into(), problem: describe(&error) });
                Vec::new()
            }
        };
        let mut addresses: Vec<Address> = Vec::with_capacity(names.len());
        for name in names.iter().take(MOST_FUNCTIONS) {
            match name.parse() {
                Ok(address) => addresses.push(address),
                Err(error) => notes.push(Note { path: format!("{DEVICES}/{name}"), problem: format!("{error}") }),
            }
        }
        addresses.sort_unstable();
        addresses.dedup();
        let functions = read_functions(source, &addresses, &mut notes);
        let mut topology = Self {
            origin: source.origin(),
            missing: source.origin().missing().iter().map(|m| (*m).to_owned()).collect(),
            roots: Vec::new(),
            index: functions.iter().enumerate().map(|(i, f)| (f.address, i)).collect(),
            functions,
            numa_nodes: numa_nodes(source),
            slots: slots(source),
            iommu_groups: iommu_groups(source, &mut notes),
            notes,
        };
        topology.connect();
        read_function::mig(source, &mut topology);
        topology.notes.sort();
        topology.notes.dedup();
        topology
    }

    /// Fills in parents, children and host bridges.
    fn connect(&mut self) {
        let by_bus = self.bridges_by_bus();
        for index in 0..self.functions.len() {
            let function = &self.functions[index];
            let parent = match parent_in_path(&function.path) {
                Some(parent) => self.index.get(&parent).copied(),
                // Without folders, bus numbers tell who is above.
                None if !function.path.starts_with("sys/devices") => {
                    by_bus.get(&(function.address.domain, function.address.bus)).copied()
                }
                None => None,
            };
            self.functions[index].parent = parent.filter(|p| *p != index);
        }
        self.cut_cycles();
        for index in 0..self.functions.len() {
            match self.functions[index].parent {
                Some(parent) => self.functions[parent].children.push(index),
                None => {
                    let root = root_in_path(&self.functions[index].path);
                    let address = self.functions[index].address;
                    self.functions[index].root = root.unwrap_or_else(|| Address::root_name(address.domain, address.bus));
                }
            }
        }
        for index in 0..self.functions.len() {
            if let Some(top) = self.ancestors(index).last() {
                self.functions[index].root = self.functions[top].root.clone();
            }
        }
        let mut roots = BTreeMap::<String, Vec<usize>>::new();
        for (index, function) in self.functions.iter().enumerate() {
            if function.parent.is_none() {
                roots.entry(function.root.clone()).or_default().push(index);
            }
        }
        self.roots =
            roots.into_iter().map(|(name, children)| Root { numa_node: self.common_node(&name), name, children }).collect();
    }

    fn bridges_by_bus(&self) -> HashMap<(u32, u8), usize> {
        let bridges = self.functions.iter().enumerate();
        bridges.filter_map(|(i, f)| Some(((f.address.domain, f.buses.filter(|b| b.0 != 0)?.0), i))).collect()
    }

    /// Parents by bus number come from registers, and those can say anything.
    fn cut_cycles(&mut self) {
        for index in 0..self.functions.len() {
            let mut seen = 0;
            let mut at = index;
            while let Some(parent) = self.functions[at].parent {
                seen += 1;
                if parent == index || seen > self.functions.len() {
                    let path = self.functions[index].path.clone();
                    self.notes.push(Note { path, problem: "the buses above it form a ring; cut here".into() });
                    self.functions[index].parent = None;
                    break;
                }
                at = parent;
            }
        }
    }

    fn common_node(&self, root: &str) -> Option<u32> {
        let mut votes = BTreeMap::<u32, usize>::new();
        for node in self.functions.iter().filter(|f| f.root == root).filter_map(|f| f.numa_node) {
            *votes.entry(node).or_default() += 1;
        }
        votes.into_iter().max_by_key(|(_, count)| *count).map(|(node, _)| node)
    }
}

/// Short words for an error of the system.
pub(super) fn describe(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "permission denied; run as root to see it".into(),
        io::ErrorKind::NotFound => "not there".into(),
        _ => error.to_string(),
    }
}

/// Letters that paths in sysfs are made of, and that mean nothing to a shell.
fn plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b':' | b'.' | b'-' | b'_')
}

fn read_functions(source: &dyn Source, addresses: &[Address], notes: &mut Vec<Note>) -> Vec<Function> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let chunk = addresses.len().div_ceil(threads).max(FUNCTIONS_PER_THREAD);
    let mut parts: Vec<(Vec<Function>, Vec<Note>)> = Vec::new();
    std::thread::scope(|scope| {
        let mut chunks = addresses.chunks(chunk);
        let first = chunks.next();
        let workers: Vec<_> = chunks.map(|part| scope.spawn(move || read_part(source, part))).collect();
        parts.extend(first.map(|part| read_part(source, part)));
        // A worker can only panic by a bug of ours; then its functions are missing and the rest still counts.
        parts.extend(workers.into_iter().filter_map(|w| w.join().ok()));
    });
    let mut functions = Vec::with_capacity(addresses.len());
    for (found, said) in parts {
        functions.extend(found);
        notes.extend(said);
    }
    functions
}

fn read_part(source: &dyn Source, addresses: &[Address]) -> (Vec<Function>, Vec<Note>) {
    let mut notes = Vec::new();
    let functions = addresses.iter().filter_map(|address| {
        let link = source.link(&format!("{DEVICES}/{address}"));
        let path = match &link {
            // A saved host can claim any path; remedies put it into commands.
            Ok(target) if target.bytes().all(plain) => resolve(DEVICES, target),
            Ok(_) | Err(_) => format!("{DEVICES}/{address}"),
        };
        read_function::read(source, *address, path, &mut notes)
    });
    (functions.collect(), notes)
}

/// The nearest address above the last part of a path such as `sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0`.
fn parent_in_path(path: &str) -> Option<Address> {
    let mut parts = path.rsplit('/').skip(1);
    let above = parts.next()?;
    above.parse().ok()
}

/// The host bridge that is nearest above: behind a volume-management device there is a second one.
fn root_in_path(path: &str) -> Option<String> {
    path.rsplit('/').skip(1).find(|p| is_root_name(p)).map(str::to_owned)
}

fn is_root_name(part: &str) -> bool {
    part.strip_prefix("pci").and_then(|rest| rest.split_once(':')).is_some_and(|(domain, bus)| {
        let hex = |t: &str| !t.is_empty() && t.len() <= 8 && t.bytes().all(|b| b.is_ascii_hexdigit());
        hex(domain) && hex(bus)
    })
}

fn numa_nodes(source: &dyn Source) -> Vec<NumaNode> {
    let folder = "sys/devices/system/node";
    let names = source.list(folder).unwrap_or_default();
    let mut nodes: Vec<NumaNode> = names
        .iter()
        .filter_map(|name| name.strip_prefix("node")?.parse().ok())
        .map(|id: u32| {
            let cpus = source.text(&format!("{folder}/node{id}/cpulist")).unwrap_or_default();
            let first: Option<u32> = cpus.split([',', '-']).next().and_then(|c| c.parse().ok());
            let socket = first.and_then(|cpu| {
                source.text(&format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id")).ok()?.parse().ok()
            });
            let distances = source.text(&format!("{folder}/node{id}/distance")).unwrap_or_default();
            NumaNode { id, cpus, socket, distances: distances.split_whitespace().filter_map(|d| d.parse().ok()).collect() }
        })
        .collect();
    nodes.sort_by_key(|n| n.id);
    nodes
}

fn slots(source: &dyn Source) -> Vec<Slot> {
    let folder = "sys/bus/pci/slots";
    let flag = |name: &str, file: &str| {
        let text = source.text(&format!("{folder}/{name}/{file}")).ok()?;
        text.parse::<u32>().ok().map(|n| n != 0)
    };
    let names = source.list(folder).unwrap_or_default();
    names
        .into_iter()
        .filter(|name| name.bytes().all(plain))
        .map(|name| Slot {
            address: source.text(&format!("{folder}/{name}/address")).unwrap_or_default(),
            present: flag(&name, "adapter"),
            powered: flag(&name, "power"),
            name,
        })
        .collect()
}

fn iommu_groups(source: &dyn Source, notes: &mut Vec<Note>) -> BTreeMap<u32, String> {
    let folder = "sys/kernel/iommu_groups";
    let names = source.list(folder).unwrap_or_default();
    names
        .iter()
        .filter_map(|name| {
            let group = name.parse().ok()?;
            let path = format!("{folder}/{name}/type");
            let mode = source.text(&path).unwrap_or_else(|error| {
                notes.push(Note { path, problem: describe(&error) });
                "unknown".into()
            });
            Some((group, mode))
        })
        .collect()
}
