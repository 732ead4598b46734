// SPDX-License-Identifier: MIT OR Apache-2.0
//! The way between two functions: how far, why, and what it can carry.

use std::fmt;

use serde::Serialize;

use super::{
    address::Address,
    function::{Function, Kind},
    tree::{Hop, Topology},
};

/// How far two functions are from each other, nearest first. The letters are those of `nvidia-smi topo -m` and NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Distance {
    /// The same function, or another function of the same card.
    #[serde(rename = "X")]
    Same,
    /// At most one switch between them.
    #[serde(rename = "PIX")]
    OneSwitch,
    /// Several switches, no host bridge.
    #[serde(rename = "PXB")]
    Switches,
    /// Through one host bridge, that is through the root complex of one processor.
    #[serde(rename = "PHB")]
    HostBridge,
    /// From one host bridge to another of the same NUMA node.
    #[serde(rename = "NODE")]
    Node,
    /// From one NUMA node to another.
    #[serde(rename = "SYS")]
    System,
}

impl Distance {
    /// The letters.
    pub fn letters(self) -> &'static str {
        match self {
            Self::Same => "X",
            Self::OneSwitch => "PIX",
            Self::Switches => "PXB",
            Self::HostBridge => "PHB",
            Self::Node => "NODE",
            Self::System => "SYS",
        }
    }

    /// What the letters mean.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Same => "the same card",
            Self::OneSwitch => "at most one PCIe switch between them",
            Self::Switches => "several PCIe switches, but no host bridge",
            Self::HostBridge => "through one PCIe host bridge (the processor's root complex)",
            Self::Node => "through two PCIe host bridges of one NUMA node",
            Self::System => "through the interconnect between NUMA nodes (sockets)",
        }
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.letters())
    }
}

/// Why a way is as long or as slow as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// Which kind of reason; stable.
    pub code: ReasonCode,
    /// The functions that cause it.
    pub at: Vec<Address>,
    /// In words.
    pub text: String,
}

/// Kinds of [`Reason`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReasonCode {
    /// Both hang from one switch or port.
    SharedSwitch,
    /// More than one switch lies between.
    SeveralSwitches,
    /// The nearest thing above both is the host bridge.
    HostBridge,
    /// They hang from different host bridges.
    HostBridges,
    /// They are near to different NUMA nodes.
    NumaNodes,
    /// Their NUMA nodes are not known, so the worst is assumed.
    NumaUnknown,
    /// A switch sends requests between peers up to the root.
    AcsRedirect,
    /// The IOMMU translates their addresses.
    IommuTranslates,
    /// The link that limits the way.
    Narrowest,
    /// A link on the way is down or unknown.
    LinkUnknown,
}

/// The way between two functions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Path {
    /// How far.
    pub distance: Distance,
    /// Why.
    pub reasons: Vec<Reason>,
    /// The links on the way: up from the first function, then up from the second.
    pub hops: Vec<Hop>,
    /// Whether data goes through the root complex, be it by the tree's shape or because ACS sends it there.
    pub through_root: bool,
    /// Data bytes per second in one direction, after coding and before headers, in GB/s; the narrowest link decides. `None` where no link is known.
    pub raw_gbps: Option<f64>,
    /// Payload bytes per second that one can expect in one direction, in GB/s. Ways through a root complex are often slower still: how much is a
    /// matter of the processor and has to be measured.
    pub expected_gbps: Option<f64>,
}

impl Topology {
    /// The way between two functions, given as indices. `None` when an index is out of range.
    pub fn path(&self, a: usize, b: usize) -> Option<Path> {
        let (first, second) = (self.functions.get(a)?, self.functions.get(b)?);
        if a == b || first.address.same_device(second.address) {
            return Some(Path {
                distance: Distance::Same,
                reasons: Vec::new(),
                hops: Vec::new(),
                through_root: false,
                raw_gbps: None,
                expected_gbps: None,
            });
        }
        let chain = |from| std::iter::once(from).chain(self.ancestors(from)).collect::<Vec<_>>();
        let (up, down) = (chain(a), chain(b));
        let shared = up.iter().copied().find(|i| down.contains(i));
        let mut reasons = Vec::new();
        let distance = match shared {
            Some(top) => self.below(top, &up, &down, &mut reasons),
            None => self.apart(first, second, &mut reasons),
        };
        let below = |chain: &[usize]| chain.iter().copied().take_while(|i| Some(*i) != shared).collect::<Vec<_>>();
        let redirecting: Vec<Address> = match shared {
            // Requests that reach the root complex anyway are not led astray.
            None => Vec::new(),
            Some(_) => {
                let ports = below(&up).into_iter().chain(below(&down)).map(|i| &self.functions[i]);
                ports
                    .filter(|f| f.kind == Kind::SwitchDown && f.capabilities.acs.is_some_and(|a| a.redirects_requests()))
                    .map(|f| f.address)
                    .collect()
            }
        };
        let redirected = !redirecting.is_empty();
        if redirected {
            let ports = redirecting.iter().map(Address::to_string).collect::<Vec<_>>().join(" and ");
            reasons.push(Reason {
                code: ReasonCode::AcsRedirect,
                text: format!("ACS on {ports} sends requests between peers up to the root complex and back"),
                at: redirecting,
            });
        }
        self.translation(first, second, &mut reasons);
        let whole = redirected || shared.is_none();
        let mut hops: Vec<Hop> = Vec::new();
        for chain in [&up, &down] {
            let part = if whole { chain.clone() } else { below(chain) };
            hops.extend(part.into_iter().filter_map(|i| self.hop(i)));
        }
        let payload = self.payload(a).min(self.payload(b));
        let (raw_gbps, expected_gbps) = self.narrowest(&hops, payload, &mut reasons);
        Some(Path { distance, reasons, hops, through_root: whole, raw_gbps, expected_gbps })
    }

    /// The way from a function to host memory: every link up to the root.
    pub fn path_to_host(&self, index: usize) -> (Option<f64>, Option<f64>) {
        let mut reasons = Vec::new();
        self.narrowest(&self.hops(index), self.payload(index), &mut reasons)
    }

    fn below(&self, top: usize, up: &[usize], down: &[usize], reasons: &mut Vec<Reason>) -> Distance {
        let parts = up.iter().take_while(|i| **i != top).chain(down.iter().take_while(|i| **i != top)).chain([&top]);
        let switches: Vec<usize> = parts.copied().filter(|i| self.functions[*i].kind == Kind::SwitchUp).collect();
        let at: Vec<Address> = switches.iter().map(|i| self.functions[*i].address).collect();
        let top = &self.functions[top];
        if switches.len() <= 1 {
            let text = format!("both hang from {} {}", top.kind.word(), top.address);
            reasons.push(Reason { code: ReasonCode::SharedSwitch, at: vec![top.address], text });
            return Distance::OneSwitch;
        }
        let text = format!("{} switches lie between them, the topmost is {}", switches.len(), top.address);
        reasons.push(Reason { code: ReasonCode::SeveralSwitches, at, text });
        Distance::Switches
    }

    fn apart(&self, first: &Function, second: &Function, reasons: &mut Vec<Reason>) -> Distance {
        let at = vec![first.address, second.address];
        if first.root == second.root {
            let text = format!("nothing but the host bridge {} is above both", first.root);
            reasons.push(Reason { code: ReasonCode::HostBridge, at, text });
            return Distance::HostBridge;
        }
        let text = format!("they hang from different host bridges, {} and {}", first.root, second.root);
        reasons.push(Reason { code: ReasonCode::HostBridges, at: at.clone(), text });
        match (first.numa_node, second.numa_node) {
            (Some(a), Some(b)) if a == b => Distance::Node,
            (Some(a), Some(b)) => {
                let sockets = match (self.socket(a), self.socket(b)) {
                    (Some(s), Some(t)) if s == t => format!(" (both of socket {s})"),
                    (Some(s), Some(t)) => format!(" (sockets {s} and {t})"),
                    _ => String::new(),
                };
                reasons.push(Reason {
                    code: ReasonCode::NumaNodes,
                    at,
                    text: format!("they are near to NUMA nodes {a} and {b}{sockets}"),
                });
                Distance::System
            }
            _ if self.numa_nodes.len() <= 1 => Distance::Node,
            _ => {
                reasons.push(Reason {
                    code: ReasonCode::NumaUnknown,
                    at,
                    text: "the firmware does not say which NUMA node they are near to; the farthest is assumed".into(),
                });
                Distance::System
            }
        }
    }

    /// How the IOMMU treats a function, if it is behind one.
    pub fn iommu_mode(&self, function: &Function) -> Option<&str> {
        self.iommu_groups.get(&function.iommu_group?).map(String::as_str)
    }

    fn translation(&self, first: &Function, second: &Function, reasons: &mut Vec<Reason>) {
        let translated: Vec<&Function> =
            [first, second].into_iter().filter(|f| self.iommu_mode(f).is_some_and(|m| m.starts_with("DMA"))).collect();
        if translated.is_empty() {
            return;
        }
        let groups = translated
            .iter()
            .filter_map(|f| Some(format!("{} ({})", f.iommu_group?, self.iommu_mode(f)?)))
            .collect::<Vec<_>>()
            .join(" and ");
        reasons.push(Reason {
            code: ReasonCode::IommuTranslates,
            at: translated.iter().map(|f| f.address).collect(),
            text: format!("the IOMMU translates addresses of group {groups}"),
        });
    }

    fn narrowest(&self, hops: &[Hop], payload: u32, reasons: &mut Vec<Reason>) -> (Option<f64>, Option<f64>) {
        let unknown: Vec<Address> = hops.iter().filter(|h| h.gbps().is_none()).map(|h| self.functions[h.card].address).collect();
        if !unknown.is_empty() {
            let text = "the state of a link on the way is not known".to_owned();
            reasons.push(Reason { code: ReasonCode::LinkUnknown, at: unknown, text });
        }
        let known = hops.iter().filter_map(|hop| Some((hop, hop.gbps()?)));
        let Some((hop, raw)) = known.min_by(|a, b| a.1.total_cmp(&b.1)) else { return (None, None) };
        let at = self.functions[hop.card].address;
        let (state, expected) = match hop.now {
            Some(now) => (now.to_string(), now.payload_gbps(payload)),
            None => (format!("{raw:.1} GB/s"), raw * 0.85),
        };
        reasons.push(Reason {
            code: ReasonCode::Narrowest,
            at: vec![at],
            text: format!("the link above {at} ({state}) is the narrowest: {raw:.1} GB/s, about {expected:.1} GB/s of payload"),
        });
        (Some(raw), Some(expected))
    }
}
