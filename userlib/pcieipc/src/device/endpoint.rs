// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the module tells about endpoints.
#![allow(non_upper_case_globals, reason = "the generated constants are named after their C enumerations")]

use std::fmt;

use crate::abi::*;

/// The number that the module gave to an endpoint; never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointId(pub u32);

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "endpoint {}", self.0)
    }
}

/// The state of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Usable.
    Live,
    /// In error recovery or reset.
    Recovering,
    /// Recovery failed; only removal helps.
    Dead,
    /// Unbound or removed.
    Gone,
    /// A state that this library does not know.
    Other(u32),
}

impl State {
    pub(super) fn from_code(code: u32) -> Self {
        match code {
            pcieipc_state_PCIEIPC_STATE_LIVE => Self::Live,
            pcieipc_state_PCIEIPC_STATE_RECOVERING => Self::Recovering,
            pcieipc_state_PCIEIPC_STATE_DEAD => Self::Dead,
            pcieipc_state_PCIEIPC_STATE_GONE => Self::Gone,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Live => f.write_str("live"),
            Self::Recovering => f.write_str("recovering"),
            Self::Dead => f.write_str("dead"),
            Self::Gone => f.write_str("gone"),
            Self::Other(code) => write!(f, "state {code}"),
        }
    }
}

/// What is in front of an endpoint's DMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Iommu {
    /// Nothing.
    None,
    /// An IOMMU that passes addresses through.
    Identity,
    /// An IOMMU that translates and protects.
    Translating,
}

/// One endpoint, as it was when it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndpointInfo {
    /// Its number.
    pub id: EndpointId,
    /// Its state.
    pub state: State,
    /// Its present life.
    pub generation: u64,
    /// Device Serial Number, if it has one.
    pub serial: Option<u64>,
    /// PCI address, such as `0000:03:00.0`.
    pub address: String,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// NUMA node, if known.
    pub numa_node: Option<u32>,
    /// What is in front of its DMA.
    pub iommu: Iommu,
    /// IOMMU group, if it has one.
    pub iommu_group: Option<u32>,
    /// A session is attached.
    pub attached: bool,
    /// [`super::Session::copy`] works.
    pub has_engine: bool,
    /// It is told the addresses of its rings.
    pub has_ring_registers: bool,
    /// Its doorbells can be mapped.
    pub has_doorbell_page: bool,
    /// Interrupt vectors that a session may use.
    pub vectors: u32,
    /// Link now: speed code (1 is 2.5 GT/s, 6 is 64 GT/s) and lanes; 0 when unknown.
    pub link: (u8, u8),
    /// Link at best.
    pub link_max: (u8, u8),
    /// Bytes of its memory BAR.
    pub memory_bytes: u64,
    /// Doorbells rung through the module since it was bound.
    pub doorbells: u64,
    /// Interrupts taken.
    pub interrupts: u64,
    /// Events that full queues lost.
    pub events_lost: u64,
    /// Bytes that its engine moved.
    pub dma_bytes: u64,
    /// Correctable errors reported to the module.
    pub correctable: u64,
    /// The profile that describes its registers.
    pub profile: String,
}

impl From<&pcieipc_endpoint_info> for EndpointInfo {
    fn from(raw: &pcieipc_endpoint_info) -> Self {
        let (domain, bus, devfn) = (raw.address >> 16, raw.address >> 8 & 0xff, raw.address & 0xff);
        let has = |flag| raw.ep_flags & flag != 0;
        let profile: Vec<u8> = raw.profile.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
        Self {
            id: EndpointId(raw.endpoint),
            state: State::from_code(raw.state),
            generation: raw.generation,
            serial: (raw.serial != 0).then_some(raw.serial),
            address: format!("{domain:04x}:{bus:02x}:{:02x}.{}", devfn >> 3, devfn & 7),
            vendor: raw.vendor,
            device: raw.device,
            numa_node: u32::try_from(raw.numa_node).ok(),
            iommu: match raw.iommu {
                PCIEIPC_IOMMU_TRANSLATING => Iommu::Translating,
                PCIEIPC_IOMMU_IDENTITY => Iommu::Identity,
                _ => Iommu::None,
            },
            iommu_group: u32::try_from(raw.iommu_group).ok(),
            attached: has(PCIEIPC_EP_ATTACHED),
            has_engine: has(PCIEIPC_EP_DMA_ENGINE),
            has_ring_registers: has(PCIEIPC_EP_RING_REGISTERS),
            has_doorbell_page: has(PCIEIPC_EP_DOORBELL_PAGE),
            vectors: raw.vectors,
            link: (raw.link_speed, raw.link_width),
            link_max: (raw.link_speed_max, raw.link_width_max),
            memory_bytes: raw.memory_bytes,
            doorbells: raw.doorbells,
            interrupts: raw.interrupts,
            events_lost: raw.events_lost,
            dma_bytes: raw.dma_bytes,
            correctable: raw.correctable,
            profile: String::from_utf8_lossy(&profile).into_owned(),
        }
    }
}

/// How far two endpoints are apart, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Distance {
    /// Ports between them.
    pub hops: u32,
    /// The kernel lets the one reach the other's memory directly.
    pub p2p: bool,
    /// What makes them near or far, in words.
    pub reasons: Vec<&'static str>,
}

impl From<&pcieipc_distance> for Distance {
    fn from(raw: &pcieipc_distance) -> Self {
        let words = [
            (PCIEIPC_FAR_SAME_FUNCTION_CARD, "functions of one card"),
            (PCIEIPC_FAR_SAME_SWITCH, "below a common switch"),
            (PCIEIPC_FAR_HOST_BRIDGE, "across the host bridge"),
            (PCIEIPC_FAR_ACS_REDIRECT, "ACS redirects to the root"),
            (PCIEIPC_FAR_SOCKETS, "across NUMA nodes"),
            (PCIEIPC_FAR_IOMMU, "an IOMMU translates on the way"),
        ];
        let reasons = words.into_iter().filter(|(flag, _)| raw.reasons & flag != 0).map(|(_, word)| word).collect();
        Self { hops: raw.hops, p2p: raw.p2p != 0, reasons }
    }
}
