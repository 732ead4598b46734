// SPDX-License-Identifier: MIT OR Apache-2.0
//! A machine as the simulator sees it: ranks, switches, links.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{error::Rank, plan::Tree, tune::Ways};

/// Machines that come with the library, by name.
pub const BUILT_IN: [(&str, &str); 7] = [
    ("two-processors", include_str!("machines/two-processors.json")),
    ("two-gpus-host-memory", include_str!("machines/two-gpus-host-memory.json")),
    ("four-on-a-switch", include_str!("machines/four-on-a-switch.json")),
    ("eight-on-a-switch", include_str!("machines/eight-on-a-switch.json")),
    ("two-sockets-of-four", include_str!("machines/two-sockets-of-four.json")),
    ("sixteen", include_str!("machines/sixteen.json")),
    ("sixty-four", include_str!("machines/sixty-four.json")),
];

/// The machine of that name.
///
/// ```
/// use pcieipc::sim;
/// assert_eq!(sim::built_in("sixty-four")?.ranks(), 64);
/// # Ok::<(), sim::MachineError>(())
/// ```
///
/// # Errors
/// Says which names there are.
pub fn built_in(name: &str) -> Result<Machine, MachineError> {
    let found = BUILT_IN.iter().find(|(n, _)| *n == name);
    let names = || BUILT_IN.map(|(n, _)| n).join(", ");
    Machine::parse(found.ok_or_else(|| MachineError(format!("no machine is called {name}; there are {}", names())))?.1)
}

/// Why a machine can not be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MachineError(pub String);

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// For people.
    description: String,
    /// Rank r hangs below the part that lists it: nested lists of part names, see `machines/`.
    parts: BTreeMap<String, Part>,
    /// The part at the top.
    top: String,
    /// Bytes of a record.
    #[serde(default = "chunk")]
    chunk: usize,
    /// Microseconds that a rank takes for a step besides its bytes.
    step_us: f64,
    /// Gigabytes per second that a rank loads.
    load_gbps: f64,
    /// Gigabytes per second that a rank stores.
    store_gbps: f64,
    /// Whether engines move records, so that a rank's own time goes into combining only.
    #[serde(default)]
    engines: bool,
    /// Processors that the ranks share; one each if absent.
    processors: Option<usize>,
}

fn chunk() -> usize {
    128 << 10
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    /// Names of the parts below, or empty.
    #[serde(default)]
    parts: Vec<String>,
    /// How many ranks hang here directly.
    #[serde(default)]
    ranks: usize,
    /// Gigabytes per second and direction of the link to each thing below.
    down_gbps: f64,
    /// Microseconds of one way through it.
    down_us: f64,
    /// Everything passes the part itself at this rate, both directions together: a memory. No limit if absent.
    through_gbps: Option<f64>,
}

/// Ranks that are processes on processors, by rates that are the same for all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Processes {
    /// Microseconds of a step besides its bytes.
    pub step_us: f64,
    /// Microseconds of one way through a part of the tree.
    pub hop_us: f64,
    /// GB/s that a rank loads, and that it stores.
    pub gbps: f64,
    /// Processors that the ranks share.
    pub processors: usize,
}

/// Memory, not links, limits processes.
const UNLIMITED_GBPS: f64 = 1000.0;

/// A machine, ready to run plans.
#[derive(Debug, Clone)]
pub struct Machine {
    /// For people.
    pub description: String,
    /// Bytes of a record.
    pub chunk: usize,
    /// Microseconds of a step.
    pub step_us: f64,
    /// GB/s.
    pub load_gbps: f64,
    /// GB/s.
    pub store_gbps: f64,
    /// Whether engines move records.
    pub engines: bool,
    /// Processors that the ranks share.
    pub processors: Option<usize>,
    tree: Tree,
    /// Directed links: name, rate, latency.
    links: Vec<(String, f64, f64)>,
    routes: Vec<Vec<Vec<usize>>>,
    file: File,
}

impl Machine {
    /// Reads a machine file.
    ///
    /// ```
    /// use pcieipc::sim::Machine;
    ///
    /// let machine = Machine::parse(r#"{
    ///     "description": "four cards below a switch", "top": "switch",
    ///     "parts": { "switch": { "ranks": 4, "down_gbps": 25, "down_us": 0.5 } },
    ///     "step_us": 1, "load_gbps": 100, "store_gbps": 100
    /// }"#)?;
    /// assert_eq!(machine.ranks(), 4);
    /// # Ok::<(), pcieipc::sim::MachineError>(())
    /// ```
    ///
    /// # Errors
    /// Says what is wrong.
    pub fn parse(text: &str) -> Result<Self, MachineError> {
        let file: File = serde_json::from_str(text).map_err(|e| MachineError(format!("not a machine file: {e}")))?;
        Self::new(file)
    }

    fn new(file: File) -> Result<Self, MachineError> {
        let mut build = Build { file: &file, ranks: 0, links: Vec::new(), up: Vec::new(), depth: 0 };
        let tree = build.part(&file.top, &mut Vec::new())?;
        let (links, up, ranks) = (build.links, build.up, build.ranks);
        if ranks == 0 || ranks > 512 {
            return Err(MachineError(format!("a machine has 1 to 512 ranks, this one {ranks}")));
        }
        let rates = [file.step_us.max(1e-9), file.load_gbps, file.store_gbps];
        if rates.iter().chain(links.iter().map(|l| &l.1)).any(|r| !(r.is_finite() && *r > 0.0)) {
            return Err(MachineError("rates are numbers above zero".into()));
        }
        let route = |from: Rank, to: Rank| -> Vec<usize> {
            let (a, b) = (&up[from], &up[to]);
            let shared = a.iter().rev().zip(b.iter().rev()).take_while(|(x, y)| x.part == y.part && x.child == y.child).count();
            // Up to the first part that holds both, through it, and down again.
            let (a, b) = (&a[..a.len() - shared], &b[..b.len() - shared]);
            let mut links: Vec<usize> = a.iter().map(|l| l.upward).collect();
            links.extend(a.last().and_then(|l| l.through));
            links.extend(b.iter().rev().map(|l| l.downward));
            links
        };
        let routes = (0..ranks).map(|a| (0..ranks).map(|b| if a == b { vec![] } else { route(a, b) }).collect()).collect();
        Ok(Self {
            description: file.description.clone(),
            chunk: file.chunk.max(64),
            step_us: file.step_us,
            load_gbps: file.load_gbps,
            store_gbps: file.store_gbps,
            engines: file.engines,
            processors: file.processors,
            tree,
            links,
            routes,
            file,
        })
    }

    /// Processes that are near each other as the tree says.
    ///
    /// ```
    /// use pcieipc::{plan::Tree, sim::{Machine, Processes}};
    ///
    /// let rates = Processes { step_us: 0.3, hop_us: 0.2, gbps: 10.0, processors: 4 };
    /// assert_eq!(Machine::of_processes(&Tree::groups(&[2, 2]), rates)?.ranks(), 4);
    /// # Ok::<(), pcieipc::sim::MachineError>(())
    /// ```
    ///
    /// # Errors
    /// For a tree that does not cover its ranks, or is too deep, and for rates that are none.
    pub fn of_processes(tree: &Tree, rates: Processes) -> Result<Self, MachineError> {
        let mut parts = BTreeMap::new();
        // In this order the file's ranks are numbered.
        let mut order = Vec::new();
        let top = describe(tree, rates, &mut parts, &mut order);
        if !tree.covers(order.len()) {
            return Err(MachineError(format!("the tree {tree} does not hold each of {} ranks once", order.len())));
        }
        let mut machine = Self::new(File {
            description: format!("Processes on {} processors, {tree}", rates.processors),
            parts,
            top,
            chunk: chunk(),
            step_us: rates.step_us,
            load_gbps: rates.gbps,
            store_gbps: rates.gbps,
            engines: false,
            processors: Some(rates.processors),
        })?;
        let mut routes = vec![vec![Vec::new(); order.len()]; order.len()];
        for (from, row) in machine.routes.into_iter().enumerate() {
            for (to, route) in row.into_iter().enumerate() {
                routes[order[from]][order[to]] = route;
            }
        }
        machine.routes = routes;
        machine.tree = tree.clone();
        Ok(machine)
    }

    /// The same machine where the endpoints' engines carry the records: from host memory to the writer's endpoint and from there to host
    /// memory, over each link of its way in both directions. Ways of other ranks change nothing.
    ///
    /// ```
    /// use pcieipc::{plan::Tree, sim::{Machine, Processes}, tune::Ways};
    ///
    /// let rates = Processes { step_us: 0.3, hop_us: 0.2, gbps: 10.0, processors: 2 };
    /// let ways = Ways { links: vec![25_000, 6_000], up: vec![vec![0], vec![1]] };
    /// assert!(Machine::of_processes(&Tree::flat(2), rates)?.over(&ways).engines);
    /// # Ok::<(), pcieipc::sim::MachineError>(())
    /// ```
    pub fn over(mut self, ways: &Ways) -> Self {
        if !ways.is_sound(self.ranks()) {
            return self;
        }
        let first = self.links.len();
        for (number, megabytes) in ways.links.iter().enumerate() {
            let passed =
                (0..ways.up.len()).filter(|r| ways.up[*r].contains(&number)).map(|r| r.to_string()).collect::<Vec<_>>().join(" ");
            for direction in ["down to", "up from"] {
                self.links.push((format!("link {direction} the endpoint of rank {passed}"), f64::from(*megabytes) / 1e3, 0.0));
            }
        }
        for (from, routes) in self.routes.iter_mut().enumerate() {
            let (down, up) = (ways.up[from].iter().rev().map(|l| first + 2 * l), ways.up[from].iter().map(|l| first + 2 * l + 1));
            let way: Vec<usize> = down.chain(up).collect();
            for (_, route) in routes.iter_mut().enumerate().filter(|(to, _)| *to != from) {
                route.splice(0..0, way.iter().copied());
            }
        }
        self.engines = true;
        self
    }

    /// The same machine with another number of ranks in each part that has ranks: for parts of processes, not of cards.
    ///
    /// ```
    /// # use pcieipc::sim;
    /// # let machine = sim::built_in("two-sockets-of-four")?;
    /// assert_eq!(machine.with_ranks(2).ranks(), 4); // two in each of the sockets
    /// # Ok::<(), pcieipc::sim::MachineError>(())
    /// ```
    pub fn with_ranks(&self, ranks: usize) -> Self {
        let mut file = self.file.clone();
        file.parts.values_mut().filter(|p| p.ranks > 0).for_each(|p| p.ranks = ranks);
        Self::new(file).unwrap_or_else(|_| self.clone())
    }

    /// How many ranks it has.
    ///
    /// ```
    /// # use pcieipc::sim;
    /// # let machine = sim::built_in("two-sockets-of-four")?;
    /// assert_eq!(machine.ranks(), 8);
    /// # Ok::<(), pcieipc::sim::MachineError>(())
    /// ```
    pub fn ranks(&self) -> usize {
        self.routes.len()
    }

    /// Its parts, for hierarchical plans.
    ///
    /// ```
    /// # use pcieipc::sim;
    /// # let machine = sim::built_in("two-sockets-of-four")?;
    /// assert!(machine.tree().covers(8));
    /// # Ok::<(), pcieipc::sim::MachineError>(())
    /// ```
    pub fn tree(&self) -> Tree {
        self.tree.clone()
    }

    /// How many links there are, each direction for itself.
    ///
    /// ```
    /// # use pcieipc::sim;
    /// # let machine = sim::built_in("two-sockets-of-four")?;
    /// assert!(machine.route(0, 7).iter().all(|link| *link < machine.directed()));
    /// # Ok::<(), pcieipc::sim::MachineError>(())
    /// ```
    pub fn directed(&self) -> usize {
        self.links.len()
    }

    /// The links from one rank to another.
    ///
    /// ```
    /// # use pcieipc::sim;
    /// # let machine = sim::built_in("two-sockets-of-four")?;
    /// assert!(machine.route(0, 7).len() > machine.route(0, 1).len(), "the other socket is farther");
    /// # Ok::<(), pcieipc::sim::MachineError>(())
    /// ```
    pub fn route(&self, from: Rank, to: Rank) -> &[usize] {
        &self.routes[from][to]
    }

    /// GB/s of a link.
    ///
    /// ```
    /// # use pcieipc::sim;
    /// # let machine = sim::built_in("two-sockets-of-four")?;
    /// let slowest = machine.route(0, 7).iter().map(|link| machine.rate(*link)).fold(f64::INFINITY, f64::min);
    /// assert!(slowest > 0.0);
    /// # Ok::<(), pcieipc::sim::MachineError>(())
    /// ```
    pub fn rate(&self, link: usize) -> f64 {
        self.links[link].1
    }

    /// Microseconds of a link.
    ///
    /// ```
    /// # use pcieipc::sim;
    /// # let machine = sim::built_in("two-sockets-of-four")?;
    /// let one_way: f64 = machine.route(0, 1).iter().map(|link| machine.latency(*link)).sum();
    /// assert!(one_way > 0.0);
    /// # Ok::<(), pcieipc::sim::MachineError>(())
    /// ```
    pub fn latency(&self, link: usize) -> f64 {
        self.links[link].2
    }

    /// What a link is called.
    ///
    /// ```
    /// # use pcieipc::sim;
    /// # let machine = sim::built_in("two-sockets-of-four")?;
    /// for link in machine.route(0, 7) {
    ///     println!("{}", machine.name_of(*link));
    /// }
    /// # Ok::<(), pcieipc::sim::MachineError>(())
    /// ```
    pub fn name_of(&self, link: usize) -> String {
        self.links[link].0.clone()
    }
}

/// Adds the part that a tree is, and gives its name.
fn describe(tree: &Tree, rates: Processes, parts: &mut BTreeMap<String, Part>, order: &mut Vec<Rank>) -> String {
    let name = format!("part {}", parts.len());
    let part = |parts, ranks| Part { parts, ranks, down_gbps: UNLIMITED_GBPS, down_us: rates.hop_us, through_gbps: None };
    // Takes the name; what is below gets others.
    parts.insert(name.clone(), part(Vec::new(), 0));
    let children = match tree {
        Tree::Leaf(_) => std::slice::from_ref(tree),
        Tree::Part(children) => children,
    };
    let inner = children.iter().filter(|c| matches!(c, Tree::Part(_)));
    let below: Vec<String> = inner.map(|c| describe(c, rates, parts, order)).collect();
    let before = order.len();
    order.extend(children.iter().filter_map(|c| if let Tree::Leaf(rank) = c { Some(*rank) } else { None }));
    parts.insert(name.clone(), part(below, order.len() - before));
    name
}

/// A level on a rank's way to the top.
#[derive(Debug, Clone)]
struct Level {
    part: String,
    child: usize,
    upward: usize,
    downward: usize,
    through: Option<usize>,
}

struct Build<'a> {
    file: &'a File,
    ranks: usize,
    links: Vec<(String, f64, f64)>,
    /// For each rank, the levels from itself to the top.
    up: Vec<Vec<Level>>,
    depth: usize,
}

impl Build<'_> {
    /// Adds a part and all below it; `above` are the levels from it to the top, nearest first.
    fn part(&mut self, name: &str, above: &mut Vec<Level>) -> Result<Tree, MachineError> {
        let Some(part) = self.file.parts.get(name) else { return Err(MachineError(format!("there is no part {name}"))) };
        self.depth += 1;
        if self.depth > 16 {
            return Err(MachineError(format!("parts lie more than 16 deep, or {name} lies in itself")));
        }
        let through = part.through_gbps.map(|rate| {
            self.links.push((name.to_owned(), rate, 0.0));
            self.links.len() - 1
        });
        let mut below = Vec::new();
        for child in 0..part.parts.len() + part.ranks {
            let what = part.parts.get(child).cloned().unwrap_or_else(|| format!("rank {}", self.ranks));
            let (upward, downward) = (self.links.len(), self.links.len() + 1);
            self.links.push((format!("{what} to {name}"), part.down_gbps, part.down_us));
            self.links.push((format!("{name} to {what}"), part.down_gbps, part.down_us));
            above.insert(0, Level { part: name.to_owned(), child, upward, downward, through });
            below.push(match part.parts.get(child) {
                Some(inner) => self.part(inner, above)?,
                None => {
                    self.up.push(above.clone());
                    self.ranks += 1;
                    Tree::Leaf(self.ranks - 1)
                }
            });
            above.remove(0);
        }
        self.depth -= 1;
        match below.len() {
            0 => Err(MachineError(format!("part {name} is empty"))),
            1 if self.depth > 0 => Ok(below.remove(0)),
            _ => Ok(Tree::Part(below)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_machine_that_comes_with_the_library_reads_and_covers_its_ranks() {
        for (name, _) in BUILT_IN {
            let machine = built_in(name).unwrap();
            assert!(machine.tree().covers(machine.ranks()), "{name} {}", machine.tree());
            for (a, b) in (0..machine.ranks()).flat_map(|a| (0..machine.ranks()).map(move |b| (a, b))).filter(|(a, b)| a != b) {
                assert!(!machine.route(a, b).is_empty(), "{name} {a} {b}");
            }
        }
    }

    #[test]
    fn routes_go_no_higher_than_they_must() {
        let machine = built_in("two-sockets-of-four").unwrap();
        let names = |a, b| machine.route(a, b).iter().map(|&l| machine.name_of(l)).collect::<Vec<_>>();
        assert_eq!(names(0, 1).len(), 2);
        assert!(names(0, 7).iter().any(|n| n.contains("socket")), "{:?}", names(0, 7));
    }

    #[test]
    fn files_that_make_no_sense_are_refused_with_a_reason() {
        for text in [
            "{}",
            r#"{"description": "", "top": "x", "parts": {}, "step_us": 1, "load_gbps": 1, "store_gbps": 1}"#,
            r#"{"description": "", "top": "x", "parts": {"x": {"parts": ["x"], "down_gbps": 1, "down_us": 1}}, "step_us": 1, "load_gbps": 1, "store_gbps": 1}"#,
            r#"{"description": "", "top": "x", "parts": {"x": {"ranks": 2, "down_gbps": 0, "down_us": 1}}, "step_us": 1, "load_gbps": 1, "store_gbps": 1}"#,
        ] {
            assert!(Machine::parse(text).is_err(), "{text}");
        }
    }
}
