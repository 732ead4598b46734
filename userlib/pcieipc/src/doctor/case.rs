// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the rules look at: a host now, perhaps some seconds later, and perhaps as it was before.

use std::{collections::HashSet, ops::Deref};

use crate::topology::{Address, Function, Host, Kind, Source, Topology};

/// A host at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Moment {
    /// The tree.
    pub tree: Topology,
    /// What surrounds it.
    pub host: Host,
}

impl Moment {
    /// Reads the host.
    pub fn read(source: &dyn Source) -> Self {
        Self { tree: Topology::read(source), host: Host::read(source) }
    }

    /// When it was, in seconds since 1970.
    pub fn time(&self) -> Option<u64> {
        self.host.facts.as_ref().map(|f| f.time)
    }
}

/// What the rules look at.
#[derive(Debug, Clone, Copy)]
pub struct Case<'a> {
    /// The host now.
    pub now: &'a Moment,
    /// The tree a number of seconds later, for rates.
    pub later: Option<(&'a Topology, f64)>,
    /// The host in an earlier snapshot.
    pub since: Option<&'a Moment>,
    /// Functions that exchange data with each other; empty for all accelerators.
    pub peers: &'a [Address],
}

impl<'a> Case<'a> {
    /// A host as it is now, and nothing to compare it with.
    pub fn new(now: &'a Moment) -> Self {
        Self { now, later: None, since: None, peers: &[] }
    }

    /// The tree now.
    pub fn tree(&self) -> &'a Topology {
        &self.now.tree
    }

    /// Whether a function is worth a warning about speed: a peer, a network adapter, a drive.
    pub fn matters(&self, function: &Function) -> bool {
        function.kind.is_peer() || matches!(function.kind, Kind::Nic | Kind::Nvme) || self.peers.contains(&function.address)
    }
}

/// A case with what all rules ask again and again, found once.
pub(super) struct Look<'a> {
    case: Case<'a>,
    /// Indices of the functions that exchange data.
    peers: Vec<usize>,
    leads: Vec<bool>,
}

impl<'a> Look<'a> {
    pub(super) fn new(case: Case<'a>) -> Self {
        Self { peers: peers(&case), leads: leading(&case, case.tree()), case }
    }

    /// The functions that exchange data: those asked for, else all accelerators, one a card and every virtual function.
    pub(super) fn peers(&self) -> &[usize] {
        &self.peers
    }

    /// Whether a function leads to a peer, adapter or drive, or is one.
    pub(super) fn leads_to_one(&self, index: usize) -> bool {
        self.leads.get(index).copied().unwrap_or(false)
    }
}

impl<'a> Deref for Look<'a> {
    type Target = Case<'a>;

    fn deref(&self) -> &Case<'a> {
        &self.case
    }
}

fn peers(case: &Case<'_>) -> Vec<usize> {
    let tree = case.tree();
    if !case.peers.is_empty() {
        let mut asked = HashSet::new();
        return case.peers.iter().filter(|a| asked.insert(**a)).filter_map(|a| tree.position(*a)).collect();
    }
    // The second function of a card shares its link and goes where the first goes.
    let mut cards = HashSet::new();
    let mut peers = tree.peers();
    peers.retain(|i| {
        let function = &tree.functions[*i];
        let Address { domain, bus, device, .. } = function.address;
        let first = cards.insert((domain, bus, device));
        first || function.physical_function.is_some()
    });
    peers
}

/// For each function of a tree, whether it leads to one that matters, or is one.
pub(super) fn leading(case: &Case<'_>, tree: &Topology) -> Vec<bool> {
    let mut leads = vec![false; tree.functions.len()];
    for (index, function) in tree.functions.iter().enumerate() {
        if case.matters(function) {
            let mut at = Some(index);
            while let Some(up) = at.filter(|i| !leads[*i]) {
                leads[up] = true;
                at = tree.functions[up].parent;
            }
        }
    }
    leads
}

/// The register's place inside a function's configuration space, as evidence names it.
pub(super) fn register(function: &Function, name: &str) -> String {
    format!("/{}/config {name}", function.path)
}

/// A file of a function.
pub(super) fn file(function: &Function, name: &str) -> String {
    format!("/{}/{name}", function.path)
}
