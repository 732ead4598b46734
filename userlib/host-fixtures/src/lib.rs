// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hosts for tests. A description in TOML names the machine and draws its tree, one function a line; [`Fixture::build`] turns it
//! into the files that such a host would have in sysfs, with configuration space byte for byte.
//!
//! ```text
//! root 0000:16 numa=0
//!   rp 01.0 link=5x16 slot=1
//!     up 00.0 link=5x16
//!       dn 00.0 link=5x16 acs=1d
//!         gpu 00.0 id=10de:2330 link=5x16/4x8 driver=nvidia
//! ```
//!
//! Indentation says what is below what. `link=BEST/NOW` is generation and width at best and now.

mod config_image;
mod description;
mod sysfs;

use std::{collections::BTreeMap, path::Path};

use pcieipc::topology::Archive;
use serde::Deserialize;

pub use description::{Line, parse_tree};

/// One host with what is expected of it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fixture {
    /// What the host is and where the idea comes from.
    pub about: String,
    /// The tree, in the language above.
    pub tree: String,
    /// The tree some time later: counters and links as a second look finds them.
    pub later: Option<String>,
    /// The tree as an earlier snapshot has it.
    pub before: Option<String>,
    /// The machine around the tree.
    #[serde(default)]
    pub host: HostDescription,
    /// NUMA nodes.
    #[serde(default)]
    pub numa: Vec<NumaDescription>,
    /// What the doctor must find, and nothing else.
    #[serde(default)]
    pub expect: Expect,
}

/// What the doctor must find.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expect {
    /// `id` or `id@address`, all of them.
    #[serde(default)]
    pub findings: Vec<String>,
    /// Distances between functions: `"0000:17:00.0 0000:2a:00.0" = "SYS"`.
    #[serde(default)]
    pub distances: BTreeMap<String, String>,
    /// Expected bandwidth of ways in GB/s before headers, `host` stands for memory.
    #[serde(default)]
    pub raw_gbps: BTreeMap<String, f64>,
}

/// The machine around the tree.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct HostDescription {
    /// Kernel release.
    pub kernel: String,
    /// Kernel command line.
    pub cmdline: String,
    /// Name by which the processor calls its maker.
    pub cpu: String,
    /// Family of the processor.
    pub family: u32,
    /// Model of the processor.
    pub model: u32,
    /// Maker of the machine.
    pub vendor: String,
    /// Model of the machine.
    pub product: String,
    /// It runs in a virtual machine.
    pub hypervisor: bool,
    /// Secure boot, where there is EFI.
    pub secure_boot: Option<bool>,
    /// Lockdown mode.
    pub lockdown: String,
    /// Soft limit of locked memory in bytes, or `unlimited`.
    pub memlock: String,
    /// Size of /dev/shm in bytes.
    pub shm: u64,
    /// The process sees the host's process ids.
    pub pid_namespace_initial: bool,
    /// The process sees the host's shared memory.
    pub ipc_namespace_initial: bool,
    /// Version of the loaded module; empty when it is not loaded.
    pub module: String,
    /// The module's taint letters.
    pub module_taint: String,
    /// System's text when the node can not be opened.
    pub node_refused: Option<String>,
    /// ASPM policy.
    pub aspm_policy: String,
    /// Mode of all IOMMU groups: `DMA`, `DMA-FQ`, `identity`; empty for no IOMMU.
    pub iommu: String,
    /// The kernel owns AER (its services are bound to ports).
    pub native_aer: bool,
    /// Bus windows of host bridges reach above 4 GiB.
    pub above_4g: bool,
    /// Lines of the kernel log.
    pub log: Vec<String>,
    /// Only the header of configuration space can be read.
    pub unprivileged: bool,
    /// Seconds since start.
    pub uptime: u64,
}

impl Default for HostDescription {
    fn default() -> Self {
        Self {
            kernel: "6.12.48-amd64".into(),
            cmdline: "ro quiet".into(),
            cpu: "GenuineIntel".into(),
            family: 6,
            model: 143,
            vendor: "Example".into(),
            product: "Server".into(),
            hypervisor: false,
            secure_boot: Some(false),
            lockdown: "none".into(),
            memlock: "unlimited".into(),
            shm: 256 << 30,
            pid_namespace_initial: true,
            ipc_namespace_initial: true,
            module: env!("CARGO_PKG_VERSION").into(),
            module_taint: "O".into(),
            node_refused: None,
            aspm_policy: "default".into(),
            iommu: "identity".into(),
            native_aer: true,
            above_4g: true,
            log: Vec::new(),
            unprivileged: false,
            uptime: 86_400,
        }
    }
}

/// A NUMA node.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumaDescription {
    /// Number.
    pub id: u32,
    /// Processors.
    pub cpus: String,
    /// Socket.
    pub socket: u32,
    /// Distances to all nodes.
    pub distances: String,
}

impl Fixture {
    /// Reads a description.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn load(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        toml::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// The host's files.
    ///
    /// # Errors
    /// What is wrong with the drawing, in words.
    pub fn build(&self) -> Result<Archive, String> {
        sysfs::build(self, &self.tree)
    }

    /// The files that a second look finds, ten seconds later.
    ///
    /// # Errors
    /// As for [`Fixture::build`].
    pub fn build_later(&self) -> Result<Option<Archive>, String> {
        self.later.as_ref().map(|tree| sysfs::build(self, tree)).transpose()
    }

    /// The files of the earlier snapshot.
    ///
    /// # Errors
    /// As for [`Fixture::build`].
    pub fn build_before(&self) -> Result<Option<Archive>, String> {
        self.before.as_ref().map(|tree| sysfs::build(self, tree)).transpose()
    }
}
