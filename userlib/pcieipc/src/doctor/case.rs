// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the rules look at: a host now, perhaps some seconds later, and perhaps as it was before.

use crate::topology::{Address, Function, Host, Source, Topology};

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

    /// Indices of the functions that exchange data: those asked for, else all accelerators, one a card and every virtual function.
    pub fn peers(&self) -> Vec<usize> {
        if !self.peers.is_empty() {
            return self.peers.iter().filter_map(|a| self.tree().position(*a)).collect();
        }
        let mut peers = self.tree().peers();
        // The second function of a card shares its link and goes where the first goes.
        let first = |i: &usize| {
            let function = &self.tree().functions[*i];
            function.physical_function.is_some()
                || !self.tree().peers().iter().any(|p| {
                    let other = &self.tree().functions[*p];
                    p < i && other.address.same_device(function.address) && function.address.bus == other.address.bus
                })
        };
        peers.retain(first);
        peers
    }

    /// Pairs of peers.
    pub fn pairs(&self) -> Vec<(usize, usize)> {
        let peers = self.peers();
        peers.iter().enumerate().flat_map(|(at, a)| peers[at + 1..].iter().map(move |b| (*a, *b))).collect()
    }

    /// Whether a function is worth a warning about speed: a peer, a network adapter, a drive.
    pub fn matters(&self, function: &Function) -> bool {
        use crate::topology::Kind;
        function.kind.is_peer() || matches!(function.kind, Kind::Nic | Kind::Nvme) || self.peers.contains(&function.address)
    }

    /// Whether a function leads to a peer, adapter or drive, or is one.
    pub fn leads_to_one(&self, index: usize) -> bool {
        let mut stack = vec![index];
        let mut budget = self.tree().functions.len() + 1;
        while let Some(at) = stack.pop() {
            let Some(function) = self.tree().functions.get(at) else { continue };
            if self.matters(function) {
                return true;
            }
            budget = budget.saturating_sub(1);
            if budget == 0 {
                return false;
            }
            stack.extend(&function.children);
        }
        false
    }
}

/// The register's place inside a function's configuration space, as evidence names it.
pub(super) fn register(function: &Function, name: &str) -> String {
    format!("/{}/config {name}", function.path)
}

/// A file of a function.
pub(super) fn file(function: &Function, name: &str) -> String {
    format!("/{}/{name}", function.path)
}
