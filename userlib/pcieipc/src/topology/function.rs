// SPDX-License-Identifier: MIT OR Apache-2.0
//! One PCI function, as the host and its configuration space describe it.

use serde::Serialize;

use super::{
    address::Address,
    aer::Counters,
    capability::{Capabilities, PortType},
    link::LinkState,
};

/// Who made a function and what it claims to be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Identity {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Vendor of the board.
    pub subsystem_vendor: u16,
    /// Model of the board.
    pub subsystem_device: u16,
    /// Class, subclass and programming interface: 24 bits.
    pub class: u32,
    /// Revision.
    pub revision: u8,
}

/// What a function is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The host bridge's own function.
    HostBridge,
    /// Port of the root complex.
    RootPort,
    /// Switch port towards the root.
    SwitchUp,
    /// Switch port towards the cards.
    SwitchDown,
    /// A bridge of another kind.
    Bridge,
    /// Graphics processor that computes.
    Gpu,
    /// The display of a management controller or of a virtual machine: no peer.
    Display,
    /// Network or InfiniBand adapter.
    Nic,
    /// NVMe drive.
    Nvme,
    /// Field-programmable gate array.
    Fpga,
    /// Another accelerator, or an endpoint that pcieipc drives.
    Accelerator,
    /// NVSwitch or a similar bridge that is no part of the PCIe tree.
    Fabric,
    /// All the rest.
    Other,
}

impl Kind {
    /// Derives it from class, vendor, role in the tree and driver.
    pub fn of(identity: &Identity, port: Option<PortType>, header_type: u8, driver: Option<&str>) -> Self {
        if driver == Some("pcieipc") {
            return Self::Accelerator;
        }
        match port {
            Some(PortType::RootPort) => return Self::RootPort,
            Some(PortType::UpstreamPort) => return Self::SwitchUp,
            Some(PortType::DownstreamPort) => return Self::SwitchDown,
            _ => {}
        }
        let class = identity.class >> 8;
        match (class >> 8, class, identity.vendor) {
            (_, 0x0600, _) => Self::HostBridge,
            (_, 0x0680, 0x10de) if header_type == 0 => Self::Fabric,
            (_, 0x0604 | 0x0609, _) => Self::Bridge,
            (0x06, _, _) if header_type == 1 => Self::Bridge,
            // Displays of management controllers and of virtual machines.
            (0x03, _, 0x1a03 | 0x102b | 0x1234 | 0x1b36 | 0x15ad | 0x1414 | 0x1013 | 0x1af4) => Self::Display,
            // A graphics processor of a card has a link; what sits in the root complex drives the monitor.
            (0x03, _, 0x8086) if matches!(port, Some(PortType::IntegratedEndpoint) | None) => Self::Display,
            (0x03, _, _) => Self::Gpu,
            (_, 0x0200 | 0x0207 | 0x0280, _) => Self::Nic,
            (_, 0x0108, _) => Self::Nvme,
            // Xilinx, Altera, Lattice, Microsemi, Achronix.
            (_, 0x1200 | 0x0580 | 0x0500 | 0x0700 | 0xff00 | 0x0b40 | 0x1180, 0x10ee | 0x1172 | 0x1204 | 0x11f8 | 0x1b59) => {
                Self::Fpga
            }
            (0x12, _, _) | (_, 0x0b40, _) => Self::Accelerator,
            _ => Self::Other,
        }
    }

    /// Whether it has functions below.
    pub fn is_bridge(self) -> bool {
        matches!(self, Self::RootPort | Self::SwitchUp | Self::SwitchDown | Self::Bridge)
    }

    /// Whether it exchanges data with peers at full speed: what an all-reduce or its network runs on.
    pub fn is_peer(self) -> bool {
        matches!(self, Self::Gpu | Self::Fpga | Self::Accelerator)
    }

    /// A short word for drawings.
    pub fn word(self) -> &'static str {
        match self {
            Self::HostBridge => "host bridge",
            Self::RootPort => "root port",
            Self::SwitchUp => "switch up",
            Self::SwitchDown => "switch down",
            Self::Bridge => "bridge",
            Self::Gpu => "GPU",
            Self::Display => "display",
            Self::Nic => "NIC",
            Self::Nvme => "NVMe",
            Self::Fpga => "FPGA",
            Self::Accelerator => "accelerator",
            Self::Fabric => "fabric",
            Self::Other => "other",
        }
    }
}

/// How well the function could be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reach {
    /// Configuration space answered.
    Full,
    /// Only the header, for want of rights.
    Header,
    /// It sleeps, and was left asleep.
    Asleep,
    /// It answers all ones: it fell off the bus.
    AllOnes,
    /// Nothing could be read.
    Unreadable,
}

/// A BAR, an expansion ROM or the window of a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bar {
    /// 0 to 5.
    pub index: u8,
    /// Bus address as the host assigned it; 0 where unassigned.
    pub start: u64,
    /// Length in bytes; 0 where unknown.
    pub size: u64,
    /// 64 bits wide.
    pub wide: bool,
    /// Prefetchable.
    pub prefetchable: bool,
    /// Port I/O, not memory.
    pub io: bool,
    /// The function wants it, and the host gave it no address.
    pub unassigned: bool,
}

/// A share of a partitioned GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MigInstance {
    /// GPU instance.
    pub gpu_instance: u32,
    /// Compute instances inside it.
    pub compute_instances: Vec<u32>,
}

/// One PCI function.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Function {
    /// Where it is.
    pub address: Address,
    /// Its folder in sysfs.
    pub path: String,
    /// The bridge above it, as an index into [`super::Topology::functions`].
    pub parent: Option<usize>,
    /// What is below it.
    pub children: Vec<usize>,
    /// The host bridge it hangs from, such as `pci0000:00`.
    pub root: String,
    /// Ids.
    pub identity: Identity,
    /// Name from the public list of ids.
    pub name: String,
    /// What it is for.
    pub kind: Kind,
    /// How well it could be read.
    pub reach: Reach,
    /// Driver that owns it.
    pub driver: Option<String>,
    /// NUMA node that it is near to.
    pub numa_node: Option<u32>,
    /// What configuration space says.
    #[serde(flatten)]
    pub capabilities: Capabilities,
    /// Buses below a bridge: secondary, subordinate.
    pub buses: Option<(u8, u8)>,
    /// BARs.
    pub bars: Vec<Bar>,
    /// IOMMU group.
    pub iommu_group: Option<u32>,
    /// AER counters since the function appeared.
    pub aer: Option<Counters>,
    /// For a virtual function: its physical function.
    pub physical_function: Option<Address>,
    /// Ways in which the kernel can reset it, best first.
    pub reset_methods: Vec<String>,
    /// Power state as the kernel sees it: `D0`, `D3hot`, `D3cold`.
    pub power_state: Option<String>,
    /// Whether memory decoding and bus mastering are on.
    pub memory_enabled: bool,
    /// The function may start transfers.
    pub bus_master: bool,
    /// Memory that it lends for peer-to-peer transfers, in bytes.
    pub p2p_memory: Option<u64>,
    /// Names of its interfaces, such as `net/eth0` or `nvme/nvme0`.
    pub interfaces: Vec<String>,
    /// Shares of a partitioned GPU.
    pub mig: Vec<MigInstance>,
    /// A number that is the function's as long as it lives, so that a removal and return between two looks is noticed.
    #[serde(skip)]
    pub life: Option<u64>,
}

impl Function {
    /// The link as trained now.
    pub fn link_now(&self) -> Option<LinkState> {
        self.capabilities.link.as_ref().and_then(|l| l.now)
    }

    /// The best that this end of the link can do.
    pub fn link_best(&self) -> Option<LinkState> {
        self.capabilities.link.as_ref().and_then(|l| l.best)
    }

    /// Kind, address and name: how findings speak of it.
    pub fn label(&self) -> String {
        format!("{} {} ({})", self.kind.word(), self.address, self.name)
    }
}
