// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the links above the endpoints of ranks carry.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    error::Rank,
    topology::{Address, Topology},
};

/// More links than sixteen ranks can share in different ways.
const MOST_LINKS: usize = 64;

/// The links from each rank's endpoint up to the root complex. Links that the same ranks pass count as one, the narrowest.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ways {
    /// Megabytes (10⁶) of payload a second in one direction, as each link is now.
    pub links: Vec<u32>,
    /// For each rank, which links it passes, nearest first.
    pub up: Vec<Vec<usize>>,
}

impl Ways {
    /// Whether the numbers can be those of `ranks` ranks.
    ///
    /// ```
    /// # use pcieipc::tune::Ways;
    /// # let ways = Ways { links: vec![25_000, 6_000], up: vec![vec![0], vec![1]] };
    /// assert!(ways.is_sound(2) && !ways.is_sound(3));
    /// ```
    pub fn is_sound(&self, ranks: usize) -> bool {
        self.up.len() == ranks
            && self.links.len() <= MOST_LINKS
            && self.links.iter().all(|m| (1..=10_000_000).contains(m))
            && self.up.iter().all(|way| way.len() <= self.links.len() && way.iter().all(|l| *l < self.links.len()))
    }

    /// The ways of some ranks: `members[i]` becomes rank `i`.
    ///
    /// ```
    /// # use pcieipc::tune::Ways;
    /// # let ways = Ways { links: vec![25_000, 6_000], up: vec![vec![0], vec![1]] };
    /// assert_eq!(ways.among(&[1]).up, [vec![1]]);
    /// ```
    pub fn among(&self, members: &[Rank]) -> Self {
        let up = members.iter().map(|m| self.up.get(*m).cloned().unwrap_or_default()).collect();
        Self { links: self.links.clone(), up }
    }
}

impl Topology {
    /// The links above the endpoints of ranks, as they are now; rank `i` uses `endpoints[i]`. Links whose state is not known limit nothing.
    /// `None` when an endpoint is not there.
    ///
    /// ```
    /// use pcieipc::topology::{Archive, Origin, Topology};
    ///
    /// let tree = Topology::read(&Archive::new(Origin::Snapshot));
    /// assert!(tree.ways(&["0000:03:00.0".parse().unwrap()]).is_none(), "it is not there");
    /// ```
    pub fn ways(&self, endpoints: &[Address]) -> Option<Ways> {
        // By the function at the lower end: the rate, and who passes it.
        let mut passed = BTreeMap::<usize, (u32, Vec<Rank>)>::new();
        for (rank, address) in endpoints.iter().enumerate() {
            let index = self.position(*address)?;
            let payload = self.payload(index);
            for hop in self.hops(index) {
                let gbps = hop.now.map(|now| now.payload_gbps(payload)).or(hop.reported_gbps.map(|g| g * 0.85));
                if let Some(gbps) = gbps {
                    let megabytes = (gbps * 1e3).clamp(1.0, 10_000_000.0) as u32;
                    passed.entry(hop.card).or_insert((megabytes, Vec::new())).1.push(rank);
                }
            }
        }
        let mut shared = BTreeMap::<Vec<Rank>, u32>::new();
        for (megabytes, ranks) in passed.into_values() {
            let narrowest = shared.entry(ranks).or_insert(megabytes);
            *narrowest = megabytes.min(*narrowest);
        }
        // What fewer share is nearer.
        let mut order: Vec<(&Vec<Rank>, u32)> = shared.iter().map(|(ranks, megabytes)| (ranks, *megabytes)).collect();
        order.sort_by_key(|(ranks, _)| (ranks.len(), ranks.first().copied()));
        let up = (0..endpoints.len())
            .map(|rank| order.iter().enumerate().filter(|(_, (ranks, _))| ranks.contains(&rank)).map(|(link, _)| link).collect())
            .collect();
        Some(Ways { links: order.iter().map(|(_, megabytes)| *megabytes).collect(), up })
    }
}
