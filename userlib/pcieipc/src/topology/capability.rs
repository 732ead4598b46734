// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the capabilities in configuration space say, in the field's terms.

use serde::Serialize;

use super::{
    config::{Config, Registers},
    link::{Aspm, LinkEnd, LinkState, Speed},
};

/// What a function is in the PCI Express tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortType {
    /// An endpoint with a link.
    Endpoint,
    /// An endpoint of the old kind, with a link.
    LegacyEndpoint,
    /// A port of the root complex.
    RootPort,
    /// The port of a switch that looks to the root.
    UpstreamPort,
    /// A port of a switch that looks to the cards.
    DownstreamPort,
    /// A bridge to PCI.
    PcieToPci,
    /// A bridge from PCI.
    PciToPcie,
    /// An endpoint inside the root complex, without a link.
    IntegratedEndpoint,
    /// An event collector of the root complex.
    EventCollector,
}

impl PortType {
    fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0 => Self::Endpoint,
            1 => Self::LegacyEndpoint,
            4 => Self::RootPort,
            5 => Self::UpstreamPort,
            6 => Self::DownstreamPort,
            7 => Self::PcieToPci,
            8 => Self::PciToPcie,
            9 => Self::IntegratedEndpoint,
            10 => Self::EventCollector,
            _ => return None,
        })
    }
}

/// The PCI Express capability, less its link.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Express {
    /// Largest payload that the function can take, in bytes.
    pub payload_supported: u32,
    /// Payload size in use, in bytes.
    pub payload: u32,
    /// Largest read request that the function sends, in bytes.
    pub read_request: u32,
    /// The function can use 8-bit tags.
    pub extended_tags_supported: bool,
    /// 8-bit tags are on.
    pub extended_tags: bool,
    /// 10-bit tags: as completer, as requester, switched on.
    pub ten_bit_tags: (bool, bool, bool),
    /// The function may mark its packets as relaxed in order.
    pub relaxed_ordering: bool,
    /// The function may ask for no snooping of caches.
    pub no_snoop: bool,
    /// Errors that the function saw since the bits were cleared: correctable, non-fatal, fatal, unsupported request.
    pub detected: [bool; 4],
    /// Requests are outstanding.
    pub transactions_pending: bool,
    /// Atomic operations are routed (port) or completed (endpoint).
    pub atomics: bool,
    /// Function-level reset is supported.
    pub function_level_reset: bool,
}

/// What a port knows about its slot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SlotPort {
    /// Number printed on the chassis, where the firmware filled it in.
    pub number: u32,
    /// Cards can be exchanged while the host runs.
    pub hot_plug: bool,
    /// Cards may vanish without a word.
    pub surprise: bool,
    /// The port can switch the slot's power.
    pub power_control: bool,
    /// Power that the slot may draw, in milliwatts; 0 where unknown.
    pub power_limit_mw: u32,
    /// A card sits in the slot.
    pub present: bool,
    /// The power of the slot has failed since the bit was cleared.
    pub power_fault: bool,
}

/// Access Control Services of a port or function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Acs {
    /// What it can do, the register's bits.
    pub capability: u16,
    /// What is switched on, the register's bits.
    pub control: u16,
}

impl Acs {
    /// Requests from one peer to another go up to the root instead of straight across.
    pub fn redirects_requests(self) -> bool {
        self.control & 0x04 != 0
    }
    /// Completions do so.
    pub fn redirects_completions(self) -> bool {
        self.control & 0x08 != 0
    }
    /// Translated requests (ATS) go straight across all the same.
    pub fn direct_translated(self) -> bool {
        self.control & 0x40 != 0
    }
    /// The short names that lspci prints, of what is on.
    pub fn names(bits: u16) -> Vec<&'static str> {
        ["SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans"]
            .into_iter()
            .enumerate()
            .filter(|(bit, _)| bits & (1 << bit) != 0)
            .map(|(_, name)| name)
            .collect()
    }
}

/// Status and masks of Advanced Error Reporting.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct AerRegisters {
    /// Uncorrectable errors that are latched.
    pub uncorrectable_status: u32,
    /// Uncorrectable errors that are not reported.
    pub uncorrectable_mask: u32,
    /// Which uncorrectable errors count as fatal.
    pub uncorrectable_severity: u32,
    /// Correctable errors that are latched.
    pub correctable_status: u32,
    /// Correctable errors that are not reported.
    pub correctable_mask: u32,
}

/// Downstream Port Containment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Dpc {
    /// Containment is armed.
    pub enabled: bool,
    /// The port has shut its link down.
    pub triggered: bool,
    /// Why: 0 unmasked uncorrectable error, 1 non-fatal message, 2 fatal message, 3 extended.
    pub reason: u8,
}

/// A BAR whose size can be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Resizable {
    /// Which BAR.
    pub bar: u8,
    /// Size now, in bytes.
    pub size: u64,
    /// Largest size that the function offers, in bytes.
    pub largest: u64,
}

/// Single-root virtualization of a physical function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SrIov {
    /// Virtual functions that the card can have.
    pub total: u16,
    /// Virtual functions switched on.
    pub active: u16,
}

/// Everything that is decoded from configuration space, apart from the identity.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Capabilities {
    /// Role in the tree.
    pub port: Option<PortType>,
    /// PCI Express settings.
    pub express: Option<Express>,
    /// The link towards the other end: up for endpoints and upstream ports, down for root and downstream ports.
    pub link: Option<LinkEnd>,
    /// The slot below a port.
    pub slot: Option<SlotPort>,
    /// Access Control Services.
    pub acs: Option<Acs>,
    /// Advanced Error Reporting.
    #[serde(rename = "aer_registers")]
    pub aer: Option<AerRegisters>,
    /// Downstream Port Containment.
    pub dpc: Option<Dpc>,
    /// BARs whose size can be changed.
    pub resizable: Vec<Resizable>,
    /// Virtual functions.
    pub sriov: Option<SrIov>,
    /// Address translation services are on.
    pub ats: Option<bool>,
    /// Number of MSI-X vectors.
    pub msix_vectors: Option<u16>,
    /// The function is in a power state other than D0 (its number).
    pub d_state: Option<u8>,
}

impl Capabilities {
    /// Decodes what `config` holds.
    pub fn decode(config: &Config<'_>) -> Self {
        let mut found = Self::default();
        if let Some(at) = config.capability(0x10) {
            found.express(config, at);
        }
        found.d_state = config.capability(0x01).and_then(|at| config.u16(at + 4)).map(|pmcsr| (pmcsr & 3) as u8);
        found.msix_vectors = config.capability(0x11).and_then(|at| config.u16(at + 2)).map(|control| (control & 0x7ff) + 1);
        found.acs =
            config.extended(0x0d).and_then(|at| Some(Acs { capability: config.u16(at + 4)?, control: config.u16(at + 6)? }));
        found.aer = config.extended(0x01).and_then(|at| Registers::<0x18>::read(config, at)).map(|r| AerRegisters {
            uncorrectable_status: r.u32(0x04),
            uncorrectable_mask: r.u32(0x08),
            uncorrectable_severity: r.u32(0x0c),
            correctable_status: r.u32(0x10),
            correctable_mask: r.u32(0x14),
        });
        found.dpc = config.extended(0x1d).and_then(|at| Registers::<0x0a>::read(config, at)).map(|r| Dpc {
            enabled: r.u16(0x06) & 3 != 0,
            triggered: r.u16(0x08) & 1 != 0,
            reason: (r.u16(0x08) >> 1 & 3) as u8,
        });
        found.sriov = config
            .extended(0x10)
            .and_then(|at| Registers::<0x14>::read(config, at))
            .map(|r| SrIov { total: r.u16(0x0e) as u16, active: if r.u16(0x08) & 1 != 0 { r.u16(0x10) as u16 } else { 0 } });
        found.ats = config.extended(0x0f).and_then(|at| config.u16(at + 6)).map(|control| control & 0x8000 != 0);
        if let (Some(link), Some(at)) = (&mut found.link, config.extended(0x1e)) {
            link.aspm_enabled.l1_substates = config.u32(at + 8).is_some_and(|control| control & 0x0c != 0);
            link.aspm_supported.l1_substates = config.u32(at + 4).is_some_and(|capable| capable & 0x0c != 0);
        }
        if let (Some(link), Some(at)) = (&mut found.link, config.extended(0x19)) {
            link.lane_errors = config.u32(at + 8).unwrap_or(0);
        }
        if let Some(at) = config.extended(0x15) {
            found.resizable = resizable(config, at);
        }
        found
    }

    fn express(&mut self, config: &Config<'_>, at: u16) {
        let Some(r) = Registers::<0x34>::read(config, at) else { return };
        let flags = r.u16(0x02);
        let device_cap = r.u32(0x04);
        let control = r.u16(0x08);
        let status = r.u16(0x0a);
        // The second half of the capability exists from version 2 on.
        let (device_cap2, control2) = if flags & 0xf >= 2 { (r.u32(0x24), r.u16(0x28)) } else { (0, 0) };
        self.port = PortType::from_code(flags >> 4 & 0xf);
        self.express = Some(Express {
            payload_supported: 128 << (device_cap & 7).min(5),
            payload: 128 << (control >> 5 & 7).min(5),
            read_request: 128 << (control >> 12 & 7).min(5),
            extended_tags_supported: device_cap & 1 << 5 != 0,
            extended_tags: control & 1 << 8 != 0,
            ten_bit_tags: (device_cap2 & 1 << 16 != 0, device_cap2 & 1 << 17 != 0, control2 & 1 << 12 != 0),
            relaxed_ordering: control & 1 << 4 != 0,
            no_snoop: control & 1 << 11 != 0,
            detected: [0, 1, 2, 3].map(|bit| status & 1 << bit != 0),
            transactions_pending: status & 1 << 5 != 0,
            atomics: device_cap2 & (1 << 6 | 1 << 8) != 0,
            function_level_reset: device_cap & 1 << 28 != 0,
        });
        if !matches!(self.port, Some(PortType::IntegratedEndpoint | PortType::EventCollector) | None) {
            self.link = Some(link(&r, flags));
        }
        let is_port = matches!(self.port, Some(PortType::RootPort | PortType::DownstreamPort));
        if is_port && flags & 1 << 8 != 0 {
            self.slot = Some(slot(&r));
        }
    }
}

fn link(r: &Registers<0x34>, flags: u32) -> LinkEnd {
    let capable = r.u32(0x0c);
    let control = r.u16(0x10);
    let status = r.u16(0x12);
    let (vector, control2) = if flags & 0xf >= 2 { (r.u32(0x2c) >> 1 & 0x7f, r.u16(0x30)) } else { (0, 0) };
    // The vector of supported speeds rules where it is filled in; the older field only says which bit of it is the highest.
    let fastest = if vector != 0 { 32 - vector.leading_zeros() } else { capable & 0xf };
    let now = LinkState::from_fields(status & 0xf, status >> 4 & 0x3f);
    let reports_active = capable & 1 << 20 != 0;
    let active = reports_active.then_some(status & 1 << 13 != 0);
    LinkEnd {
        // A port that reports "down" keeps stale speed and width bits.
        now: if active == Some(false) { None } else { now },
        best: LinkState::from_fields(fastest, capable >> 4 & 0x3f),
        target: Speed::from_code(control2 & 0xf),
        aspm_supported: Aspm::from_bits(capable >> 10 & 3),
        aspm_enabled: Aspm::from_bits(control & 3),
        training: status & 1 << 11 != 0,
        active,
        bandwidth_managed: status & 1 << 14 != 0,
        bandwidth_autonomous: status & 1 << 15 != 0,
        width_change_disabled: control & 1 << 9 != 0,
        disabled: control & 1 << 4 != 0,
        reported_gbps: None,
        lane_errors: 0,
    }
}

fn slot(r: &Registers<0x34>) -> SlotPort {
    let capable = r.u32(0x14);
    let status = r.u16(0x1a);
    let watts = capable >> 7 & 0xff;
    // Past 0xef the values stand for fixed wattages from 250 W up in steps of 25 W.
    let power_limit_mw = match (watts, capable >> 15 & 3) {
        (0xf0.., 0) => 250_000 + (watts - 0xf0) * 25_000,
        (watts, scale) => watts * 1000 / 10u32.pow(scale),
    };
    SlotPort {
        number: capable >> 19,
        surprise: capable & 1 << 5 != 0,
        hot_plug: capable & 1 << 6 != 0,
        power_control: capable & 1 << 1 != 0,
        power_limit_mw,
        present: status & 1 << 6 != 0,
        power_fault: status & 1 << 1 != 0,
    }
}

fn resizable(config: &Config<'_>, at: u16) -> Vec<Resizable> {
    let Some(first) = config.u32(at + 8) else { return Vec::new() };
    let count = (first >> 5 & 7).min(6) as u16;
    (0..count)
        .filter_map(|entry| {
            let capable = config.u32(at + 4 + entry * 8)?;
            let control = config.u32(at + 8 + entry * 8)?;
            // Bit 4 of the capability stands for 1 MiB; bits 16 and up of the control register go on at 256 TiB.
            let sizes = u64::from(capable >> 4) | u64::from(control >> 16) << 28;
            let largest = sizes.checked_ilog2()?;
            let size = control >> 8 & 0x3f;
            Some(Resizable {
                bar: (control & 7) as u8,
                size: 1u64.checked_shl(size + 20)?,
                largest: 1u64.checked_shl(largest + 20)?,
            })
        })
        .collect()
}
