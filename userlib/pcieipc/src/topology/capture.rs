// SPDX-License-Identifier: MIT OR Apache-2.0
//! Takes a snapshot: everything that the reader and the doctor look at, without secrets.

use std::{cell::RefCell, collections::BTreeSet, io};

use super::{
    address::Address,
    aer::Severity,
    archive::{Archive, Entry},
    capability::Capabilities,
    config::Config,
    facts::{FACTS, KERNEL_LOG},
    read::bus_of_slot,
    redact,
    source::{Origin, ReadAt, Source, resolve},
};

/// What a snapshot holds beyond the default.
#[derive(Debug, Clone, Copy, Default)]
pub struct CaptureOptions {
    /// Serial numbers, hardware addresses and the whole command line as well.
    pub serials: bool,
    /// All of configuration space, not only the registers that are decoded. Some devices do not take that well.
    pub whole_config: bool,
}

const DEVICES: &str = "sys/bus/pci/devices";

/// Files of a function.
const FUNCTION_FILES: &[&str] = &[
    "uevent",
    "vendor",
    "device",
    "subsystem_vendor",
    "subsystem_device",
    "class",
    "revision",
    "resource",
    "numa_node",
    "power_state",
    "power/runtime_status",
    "reset_method",
    "sriov_totalvfs",
    "sriov_numvfs",
    "p2pmem/size",
    "local_cpulist",
    "enable",
    "aer_rootport_total_err_cor",
    "aer_rootport_total_err_fatal",
    "aer_rootport_total_err_nonfatal",
    "d3cold_allowed",
    "link/l1_aspm",
    "link/l0s_aspm",
    "link/clkpm",
    "modalias",
    "boot_vga",
    "dma_mask_bits",
    "driver_override",
];

/// Files of a function that the kernel reads from its configuration space, for which it wakes it.
const WAKING_FILES: &[&str] =
    &["current_link_speed", "current_link_width", "max_link_speed", "max_link_width", SECONDARY_BUS, "subordinate_bus_number"];

const SECONDARY_BUS: &str = "secondary_bus_number";

/// Files of the host.
const HOST_FILES: &[&str] = &[
    "proc/sys/kernel/osrelease",
    "proc/sys/kernel/arch",
    "proc/uptime",
    "proc/self/limits",
    "proc/meminfo",
    "sys/hypervisor/type",
    "sys/class/dmi/id/sys_vendor",
    "sys/class/dmi/id/product_name",
    "sys/class/dmi/id/board_vendor",
    "sys/class/dmi/id/board_name",
    "sys/class/dmi/id/bios_vendor",
    "sys/class/dmi/id/bios_version",
    "sys/class/dmi/id/bios_date",
    "sys/class/dmi/id/chassis_vendor",
    "sys/module/pcie_aspm/parameters/policy",
    "sys/kernel/security/lockdown",
    "sys/module/pcieipc/version",
    "sys/module/pcieipc/taint",
    "sys/module/pcieipc/initstate",
    "sys/module/pcieipc/srcversion",
    "sys/module/nvidia/version",
    "sys/module/amdgpu/version",
    "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c",
    "proc/sys/kernel/tainted",
    FACTS,
];

/// Reads the host and gives it as an archive.
pub fn capture(source: &dyn Source, options: CaptureOptions) -> Archive {
    let archive = Archive::new(Origin::Snapshot);
    let mut taker = Taker { source, options, archive, awake_buses: BTreeSet::new(), anybody_sleeps: false };
    taker.archive.folder(DEVICES);
    for name in taker.list(DEVICES) {
        taker.function(&name);
    }
    taker.host();
    taker.nvidia();
    taker.archive
}

struct Taker<'a> {
    source: &'a dyn Source,
    options: CaptureOptions,
    archive: Archive,
    /// Domain and number of each bus below a bridge that is awake.
    awake_buses: BTreeSet<(u32, u8)>,
    anybody_sleeps: bool,
}

impl Taker<'_> {
    fn list(&self, path: &str) -> Vec<String> {
        self.source.list(path).unwrap_or_default()
    }

    /// Copies a file; one that is refused is remembered as such, one that is not there is not.
    fn file(&mut self, path: &str) {
        self.file_with(path, |bytes| bytes);
    }

    fn file_with(&mut self, path: &str, change: impl FnOnce(Vec<u8>) -> Vec<u8>) {
        match self.source.read(path) {
            Ok(bytes) => self.archive.file(path, change(bytes)),
            Err(error) => self.refused(path, &error),
        }
    }

    fn refused(&mut self, path: &str, error: &io::Error) {
        if let Some(errno) = error.raw_os_error().filter(|e| !matches!(*e, libc::ENOENT | libc::ENOTDIR | libc::EISDIR)) {
            self.archive.insert(path, Entry::Refused(errno));
        }
    }

    fn text_with(&mut self, path: &str, change: impl FnOnce(&str) -> String) {
        let keep = self.options.serials;
        self.file_with(path, |bytes| if keep { bytes } else { change(&String::from_utf8_lossy(&bytes)).into_bytes() });
    }

    fn link(&mut self, path: &str) {
        if let Ok(target) = self.source.link(path) {
            self.archive.insert(path, Entry::Link(target));
        }
    }

    fn function(&mut self, name: &str) {
        let entry = format!("{DEVICES}/{name}");
        let folder = match self.source.link(&entry) {
            Ok(target) => {
                let folder = resolve(DEVICES, &target);
                self.archive.insert(&entry, Entry::Link(target));
                folder
            }
            Err(_) => entry,
        };
        for file in FUNCTION_FILES.iter().copied().chain(Severity::FILES.map(|(_, file)| file)) {
            self.file(&format!("{folder}/{file}"));
        }
        for link in ["driver", "iommu_group", "physfn"] {
            self.link(&format!("{folder}/{link}"));
        }
        // The same rule as the reader's: a card that sleeps is left asleep.
        let asleep = self.sleeps(&folder);
        if asleep {
            self.anybody_sleeps = true;
        } else {
            WAKING_FILES.iter().for_each(|file| self.file(&format!("{folder}/{file}")));
            self.bus_below(name, &folder);
            self.config(&folder);
        }
        let names = self.list(&folder);
        for name in &names {
            match name.as_str() {
                // Names of interfaces are kept, what is inside them (addresses, serial numbers) is not.
                "net" | "infiniband" | "nvme" | "drm" => {
                    for interface in self.list(&format!("{folder}/{name}")) {
                        self.archive.folder(&format!("{folder}/{name}/{interface}"));
                    }
                }
                service if service.contains(":pcie") => {
                    self.archive.folder(&format!("{folder}/{service}"));
                    self.link(&format!("{folder}/{service}/driver"));
                }
                virtual_function if virtual_function.starts_with("virtfn") => self.link(&format!("{folder}/{virtual_function}")),
                resize if resize.ends_with("_resize") && !asleep => self.file(&format!("{folder}/{resize}")),
                _ => {}
            }
        }
    }

    /// A question to its configuration space would wake it, or the bridges above it.
    fn sleeps(&self, folder: &str) -> bool {
        let state = |folder: &str| self.source.text(&format!("{folder}/power_state")).unwrap_or_default();
        let above = folder.rsplit_once('/').map_or("", |(above, _)| above);
        state(folder) == "D3cold" || (state(folder) == "D3hot" && !matches!(state(above).as_str(), "D0" | "unknown" | ""))
    }

    /// Notes which bus is below a bridge that is awake.
    fn bus_below(&mut self, name: &str, folder: &str) {
        let number = self.source.text(&format!("{folder}/{SECONDARY_BUS}")).ok().and_then(|text| text.parse().ok());
        if let (Some(bus), Ok(address)) = (number, name.parse::<Address>()) {
            self.awake_buses.insert((address.domain, bus));
        }
    }

    fn config(&mut self, folder: &str) {
        let path = format!("{folder}/config");
        let file = match self.source.open(&path) {
            Ok(file) => file,
            Err(error) => return self.refused(&path, &error),
        };
        if self.options.whole_config || self.options.serials {
            return self.file(&path);
        }
        let recording = Recording { file: file.as_ref(), image: RefCell::new(Vec::new()) };
        if let Ok(config) = Config::read(&recording) {
            Capabilities::decode(&config);
        }
        self.archive.file(&path, recording.image.into_inner());
    }

    fn host(&mut self) {
        for file in HOST_FILES {
            self.file(file);
        }
        self.text_with("proc/cmdline", redact::command_line);
        // One processor's entry tells maker, model and whether this is a virtual machine.
        self.file_with("proc/cpuinfo", |bytes| {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            text.split("\n\n").next().unwrap_or_default().as_bytes().to_vec()
        });
        self.text_with("proc/iomem", |text| text.split_inclusive('\n').filter(|l| l.contains("PCI Bus")).collect());
        self.text_with(KERNEL_LOG, |text| text.lines().filter_map(redact::log_line).map(|l| l + "\n").collect());
        for link in ["proc/self/ns/pid", "proc/self/ns/ipc"] {
            self.link(link);
        }
        for name in self.list("sys/class/iommu") {
            self.archive.folder(&format!("sys/class/iommu/{name}"));
        }
        for folder in ["sys/module/pcieipc", "sys/module/nvidia", "sys/module/amdgpu", "sys/module/nvidia_peermem"] {
            if self.source.list(folder).is_ok() {
                self.archive.folder(folder);
            }
        }
        for service in self.list("sys/bus/pci_express/devices") {
            self.link(&format!("sys/bus/pci_express/devices/{service}"));
        }
        for slot in self.list("sys/bus/pci/slots") {
            let folder = format!("sys/bus/pci/slots/{slot}");
            for file in ["address", "cur_bus_speed", "max_bus_speed"] {
                self.file(&format!("{folder}/{file}"));
            }
            // The kernel asks the slot's port for these, which it wakes for that.
            let address = self.source.value(&format!("{folder}/address")).unwrap_or_default();
            let awake = bus_of_slot(&address).is_some_and(|bus| self.awake_buses.contains(&bus));
            if awake || !self.anybody_sleeps {
                for file in ["adapter", "power", "latch", "attention"] {
                    self.file(&format!("{folder}/{file}"));
                }
            }
        }
        for group in self.list("sys/kernel/iommu_groups") {
            self.archive.folder(&format!("sys/kernel/iommu_groups/{group}"));
            self.file(&format!("sys/kernel/iommu_groups/{group}/type"));
        }
        for node in self.list("sys/devices/system/node").into_iter().filter(|n| n.starts_with("node")) {
            let folder = format!("sys/devices/system/node/{node}");
            self.file(&format!("{folder}/cpulist"));
            self.file(&format!("{folder}/distance"));
            let cpus = self.source.text(&format!("{folder}/cpulist")).unwrap_or_default();
            if let Some(cpu) = cpus.split([',', '-']).next().filter(|c| !c.is_empty()) {
                self.file(&format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"));
            }
        }
    }

    /// The GPU's number and its partitions; the UUID is left out.
    fn nvidia(&mut self) {
        for gpu in self.list("proc/driver/nvidia/gpus") {
            self.text_with(&format!("proc/driver/nvidia/gpus/{gpu}/information"), |text| {
                text.split_inclusive('\n').filter(|l| !l.contains("UUID") && !l.contains("Serial")).collect()
            });
        }
        let folder = "proc/driver/nvidia/capabilities";
        for gpu in self.list(folder).into_iter().filter(|n| n.starts_with("gpu")) {
            for instance in self.list(&format!("{folder}/{gpu}/mig")) {
                for inside in self.list(&format!("{folder}/{gpu}/mig/{instance}")) {
                    self.archive.folder(&format!("{folder}/{gpu}/mig/{instance}/{inside}"));
                }
            }
        }
    }
}

/// Passes reads on and keeps what was read; all else stays zero, the serial number in its capability too.
struct Recording<'a> {
    file: &'a dyn ReadAt,
    image: RefCell<Vec<u8>>,
}

impl ReadAt for Recording<'_> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let length = self.file.read_at(buf, offset)?;
        let start = usize::try_from(offset).map_err(io::Error::other)?;
        let mut image = self.image.borrow_mut();
        // Nothing lies past the 4 KiB of a function.
        let end = (start + length).min(4096);
        if end > start && length > 0 {
            // A size that the kernel can give, so that a reader finds the end where it was: header, PCI, PCI Express.
            let size = [64, 256, 4096].into_iter().find(|s| *s >= end).unwrap_or(4096);
            if image.len() < size {
                image.resize(size, 0);
            }
            image[start..end].copy_from_slice(&buf[..end - start]);
        }
        Ok(length)
    }
}
