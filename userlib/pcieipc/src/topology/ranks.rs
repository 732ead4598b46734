// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tree as plans and tuners want it: which ranks are near each other, and a key for what was measured here.

use std::{collections::BTreeMap, fmt::Write};

use super::{address::Address, function::Kind, tree::Topology};
use crate::plan::Tree;

impl Topology {
    /// Which ranks are near each other, by NUMA node, host bridge and switch; rank `i` uses `endpoints[i]`. Functions of one card are
    /// a part of their own. `None` when one of them is not there.
    pub fn rank_tree(&self, endpoints: &[Address]) -> Option<Tree> {
        let paths: Option<Vec<Vec<String>>> = endpoints.iter().map(|a| self.levels(*a)).collect();
        let members: Vec<(usize, &[String])> = paths.as_ref()?.iter().map(Vec::as_slice).enumerate().collect();
        Some(match part(&members) {
            leaf @ Tree::Leaf(_) => Tree::Part(vec![leaf]),
            tree => tree,
        })
    }

    /// What is above a function, from far to near.
    fn levels(&self, address: Address) -> Option<Vec<String>> {
        let index = self.position(address)?;
        let function = &self.functions[index];
        let mut levels: Vec<String> = self
            .ancestors(index)
            .filter(|i| matches!(self.functions[*i].kind, Kind::SwitchUp | Kind::RootPort | Kind::Bridge))
            .map(|i| self.functions[i].address.to_string())
            .collect();
        levels.push(function.root.clone());
        levels.push(function.numa_node.map_or("?".into(), |n| n.to_string()));
        levels.reverse();
        levels.push(format!("{:x}:{:x}:{:x}", address.domain, address.bus, address.device));
        Some(levels)
    }

    /// A text that is the same on two hosts, or at two times, exactly when plans and measurements for these endpoints carry over: ids, links
    /// on every hop, distances, NUMA nodes, ACS and IOMMU on the way. Addresses are not in it. An idle card's low speed does not change it,
    /// lanes that are gone do.
    pub fn machine_key(&self, endpoints: &[Address]) -> String {
        let mut key = String::from("pcieipc-tree-1");
        for (rank, address) in endpoints.iter().enumerate() {
            let Some(index) = self.position(*address) else {
                let _ = write!(key, ";{rank}:absent");
                continue;
            };
            let function = &self.functions[index];
            let id = &function.identity;
            let _ = write!(
                key,
                ";{rank}:{:04x}:{:04x}:{:04x}:{:04x}",
                id.vendor, id.device, id.subsystem_vendor, id.subsystem_device
            );
            for hop in self.hops(index) {
                let speed = hop.best.map_or(0, |b| b.speed.generation());
                let width = hop.now.or(hop.best).map_or(0, |l| l.width);
                let _ = write!(key, ",{speed}x{width}");
            }
            let _ = write!(
                key,
                ",n{},{}",
                function.numa_node.map_or("?".into(), |n| n.to_string()),
                self.iommu_mode(function).unwrap_or("none")
            );
            for other in endpoints[..rank].iter().filter_map(|a| self.position(*a)) {
                if let Some(path) = self.path(other, index) {
                    let _ = write!(key, ",{}{}", path.distance, if path.through_root { "+" } else { "" });
                }
            }
        }
        key
    }
}

fn part(members: &[(usize, &[String])]) -> Tree {
    match members {
        [(rank, _)] => Tree::Leaf(*rank),
        _ if members.iter().all(|(_, levels)| levels.is_empty()) => {
            Tree::Part(members.iter().map(|(rank, _)| Tree::Leaf(*rank)).collect())
        }
        _ => {
            let mut parts = BTreeMap::<Option<&String>, Vec<(usize, &[String])>>::new();
            for (rank, levels) in members {
                parts.entry(levels.first()).or_default().push((*rank, levels.get(1..).unwrap_or_default()));
            }
            // A level that all share parts nobody.
            if parts.len() == 1 {
                parts.into_values().next().map_or_else(|| Tree::flat(0), |all| part(&all))
            } else {
                Tree::Part(parts.values().map(|p| part(p)).collect())
            }
        }
    }
}
