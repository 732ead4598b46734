// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the tree from a [`Source`]. Nothing here fails: what can not be read becomes a note.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    str::FromStr,
};

use super::{
    address::Address,
    function::{Function, Reach},
    read_function,
    source::{Source, printable, resolve},
    tree::{Note, NumaNode, Root, Slot, Topology},
};

const DEVICES: &str = "sys/bus/pci/devices";
/// More functions than this are no host but an attack on our memory.
pub(super) const MOST_FUNCTIONS: usize = 65_536;
/// More bridges above each other than this are no host either. Drawings go down by recursion.
pub(super) const DEEPEST: usize = 64;
/// More memory nodes than any kernel serves.
const MOST_NODES: usize = 1024;
/// Notes that are kept.
const MOST_NOTES: usize = 10_000;
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
        let mut addresses: Vec<Address> = Vec::with_capacity(names.len().min(MOST_FUNCTIONS));
        if names.len() > MOST_FUNCTIONS {
            let problem = format!("{} functions; the first {MOST_FUNCTIONS} are read", names.len());
            notes.push(Note { path: DEVICES.into(), problem });
        }
        for name in names.iter().take(MOST_FUNCTIONS) {
            match name.parse() {
                Ok(address) => addresses.push(address),
                Err(error) => notes.push(Note { path: format!("{DEVICES}/{}", printable(name)), problem: format!("{error}") }),
            }
        }
        addresses.sort_unstable();
        addresses.dedup();
        let functions = read_functions(source, &addresses, &mut notes);
        let slots = slots(source, &functions, &mut notes);
        let mut topology = Self {
            origin: source.origin(),
            missing: source.origin().missing().iter().map(|m| (*m).to_owned()).collect(),
            roots: Vec::new(),
            index: functions.iter().enumerate().map(|(i, f)| (f.address, i)).collect(),
            functions,
            numa_nodes: numa_nodes(source, &mut notes),
            slots,
            iommu_groups: iommu_groups(source, &mut notes),
            notes,
        };
        topology.connect();
        read_function::mig(source, &mut topology);
        topology.notes.sort();
        topology.notes.dedup();
        if topology.notes.len() > MOST_NOTES {
            let more = topology.notes.len() - MOST_NOTES;
            topology.notes.truncate(MOST_NOTES);
            topology.notes.push(Note { path: "/".into(), problem: format!("{more} more notes are left out") });
        }
        topology
    }

    /// Reads the functions at some addresses and all that is above them again, by index. `None` when one of them came, went, or is another life
    /// or at another place than before.
    pub(super) fn reread(&self, source: &dyn Source, addresses: &[Address]) -> Option<Vec<(usize, Function)>> {
        let mut wanted = std::collections::BTreeSet::new();
        for address in addresses {
            match self.position(*address) {
                Some(index) => {
                    wanted.insert(index);
                    wanted.extend(self.ancestors(index));
                }
                // Still away?
                None if source.link(&format!("{DEVICES}/{address}")).is_err() => {}
                None => return None,
            }
        }
        // What is odd about them is in the notes already.
        let mut notes = Vec::new();
        let read = |index: usize| {
            let before = &self.functions[index];
            let path = path_of(source, before.address);
            if path != before.path {
                return None;
            }
            let now = read_function::read(source, before.address, path, &mut notes)?;
            let same = now.life == before.life && now.identity == before.identity && now.buses == before.buses;
            let placed = (before.parent, before.children.clone(), before.root.clone(), before.mig.clone());
            let (parent, children, root, mig) = placed;
            same.then_some((index, Function { parent, children, root, mig, ..now }))
        };
        wanted.into_iter().map(read).collect()
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
        // Functions directly below each host bridge, and how many of all of its functions are near to each node.
        let mut roots = BTreeMap::<&str, (Vec<usize>, BTreeMap<u32, usize>)>::new();
        for (index, function) in self.functions.iter().enumerate() {
            let (children, votes) = roots.entry(&function.root).or_default();
            if function.parent.is_none() {
                children.push(index);
            }
            if let Some(node) = function.numa_node {
                *votes.entry(node).or_default() += 1;
            }
        }
        let most = |votes: BTreeMap<u32, usize>| votes.into_iter().max_by_key(|(_, count)| *count).map(|(node, _)| node);
        self.roots = roots
            .into_iter()
            .map(|(name, (children, votes))| Root { numa_node: most(votes), name: name.to_owned(), children })
            .collect();
    }

    fn bridges_by_bus(&self) -> HashMap<(u32, u8), usize> {
        let bridges = self.functions.iter().enumerate();
        bridges.filter_map(|(i, f)| Some(((f.address.domain, f.buses.filter(|b| b.0 != 0)?.0), i))).collect()
    }

    /// Parents by bus number come from registers and folders from whoever made a snapshot: they can form rings, and chains that are longer than
    /// any host's. Each function is looked at once.
    fn cut_cycles(&mut self) {
        // How many bridges are above; unset while not known.
        let mut depths: Vec<Option<usize>> = vec![None; self.functions.len()];
        let mut on_way = vec![false; self.functions.len()];
        for start in 0..self.functions.len() {
            let mut way = Vec::new();
            let mut at = start;
            while depths[at].is_none() && !on_way[at] {
                on_way[at] = true;
                way.push(at);
                match self.functions[at].parent {
                    Some(parent) => at = parent,
                    None => break,
                }
            }
            if let (Some(&last), true) = (way.last(), depths[at].is_none()) {
                if self.functions[last].parent.is_some() {
                    self.cut(last, "the buses above it form a ring; cut here");
                }
            }
            for &index in way.iter().rev() {
                let above = self.functions[index].parent.map_or(0, |p| depths[p].unwrap_or(0) + 1);
                if above > DEEPEST {
                    self.cut(index, &format!("more than {DEEPEST} bridges lie above it; cut here"));
                }
                depths[index] = Some(if above > DEEPEST { 0 } else { above });
                on_way[index] = false;
            }
        }
    }

    fn cut(&mut self, index: usize, why: &str) {
        let path = self.functions[index].path.clone();
        self.notes.push(Note { path, problem: why.to_owned() });
        self.functions[index].parent = None;
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
    let functions =
        addresses.iter().filter_map(|address| read_function::read(source, *address, path_of(source, *address), &mut notes));
    (functions.collect(), notes)
}

/// The folder of a function. A saved host can claim any path; remedies put it into commands.
fn path_of(source: &dyn Source, address: Address) -> String {
    match source.link(&format!("{DEVICES}/{address}")) {
        Ok(target) if target.bytes().all(plain) => resolve(DEVICES, &target),
        Ok(_) | Err(_) => format!("{DEVICES}/{address}"),
    }
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

/// The names in a folder that need not be there; a refusal is noted.
fn list(source: &dyn Source, folder: &str, notes: &mut Vec<Note>) -> Vec<String> {
    source.list(folder).unwrap_or_else(|error| {
        if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) {
            notes.push(Note { path: folder.into(), problem: describe(&error) });
        }
        Vec::new()
    })
}

/// The value of a file that need not be there; what it should not hold is noted.
fn parsed<T: FromStr>(source: &dyn Source, path: &str, notes: &mut Vec<Note>) -> Option<T> {
    let text = source.value(path).ok()?;
    let value = text.parse().ok();
    if value.is_none() {
        notes.push(Note { path: path.into(), problem: format!("a number expected, found {:?}", shortened(&text)) });
    }
    value
}

fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

fn numa_nodes(source: &dyn Source, notes: &mut Vec<Note>) -> Vec<NumaNode> {
    let folder = "sys/devices/system/node";
    let names = list(source, folder, notes);
    let mut ids: Vec<u32> = names.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect();
    ids.sort_unstable();
    ids.dedup();
    if ids.len() > MOST_NODES {
        let problem = format!("{} nodes; the first {MOST_NODES} are read", ids.len());
        notes.push(Note { path: folder.into(), problem });
        ids.truncate(MOST_NODES);
    }
    ids.into_iter()
        .map(|id| {
            let path = format!("{folder}/node{id}/cpulist");
            let cpus = source.value(&path).unwrap_or_default();
            // A node without processors has an empty list.
            let first: Option<u32> = cpus.split([',', '-']).next().and_then(|c| c.parse().ok());
            if first.is_none() && !cpus.is_empty() {
                notes.push(Note { path, problem: format!("a list of processors expected, found {:?}", shortened(&cpus)) });
            }
            let socket = first
                .and_then(|cpu| parsed(source, &format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"), notes));
            let distances = source.value(&format!("{folder}/node{id}/distance")).unwrap_or_default();
            NumaNode { id, cpus, socket, distances: distances.split_whitespace().filter_map(|d| d.parse().ok()).collect() }
        })
        .collect()
}

/// Domain and number of the bus whose devices sit in a slot, of the address that the kernel gives it.
pub(super) fn bus_of_slot(address: &str) -> Option<(u32, u8)> {
    let device: Address = format!("{address}.0").parse().ok()?;
    Some((device.domain, device.bus))
}

fn slots(source: &dyn Source, functions: &[Function], notes: &mut Vec<Note>) -> Vec<Slot> {
    // The kernel asks the slot's port what is in it, and wakes it for that.
    let nobody_sleeps = functions.iter().all(|f| f.reach != Reach::Asleep);
    let awake = |address: &str| {
        bus_of_slot(address).is_some_and(|(domain, bus)| {
            functions
                .iter()
                .any(|f| f.address.domain == domain && f.reach != Reach::Asleep && f.buses.is_some_and(|b| b.0 == bus))
        })
    };
    let folder = "sys/bus/pci/slots";
    let mut slots = Vec::new();
    for name in list(source, folder, notes) {
        if !name.bytes().all(plain) {
            notes.push(Note { path: format!("{folder}/{}", printable(&name)), problem: "no name of a slot; left out".into() });
            continue;
        }
        let address = source.value(&format!("{folder}/{name}/address")).unwrap_or_default();
        let asked = nobody_sleeps || awake(&address);
        let mut flag = |file: &str| {
            let value = if asked { parsed::<u32>(source, &format!("{folder}/{name}/{file}"), notes) } else { None };
            value.map(|n| n != 0)
        };
        slots.push(Slot { present: flag("adapter"), powered: flag("power"), address, name });
    }
    slots
}

fn iommu_groups(source: &dyn Source, notes: &mut Vec<Note>) -> BTreeMap<u32, String> {
    let folder = "sys/kernel/iommu_groups";
    let mut groups = BTreeMap::new();
    for name in list(source, folder, notes) {
        let Ok(group) = name.parse() else {
            notes.push(Note { path: format!("{folder}/{}", printable(&name)), problem: "no number of a group; left out".into() });
            continue;
        };
        let path = format!("{folder}/{name}/type");
        let mode = source.value(&path).unwrap_or_else(|error| {
            notes.push(Note { path, problem: describe(&error) });
            "unknown".into()
        });
        groups.insert(group, mode);
    }
    groups
}
