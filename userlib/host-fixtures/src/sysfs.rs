// SPDX-License-Identifier: MIT OR Apache-2.0
//! Builds the files of a host.

use std::{collections::BTreeMap, fmt::Write};

use pcieipc::topology::{Address, Archive, Entry, FACTS, Facts, KERNEL_LOG, ModuleAnswer, Node, Origin};

use crate::{
    Fixture,
    config_image::{bars, defaults, image},
    description::{Line, link, parse_tree},
};

pub(crate) fn build(fixture: &Fixture, tree: &str) -> Result<Archive, String> {
    let lines = parse_tree(tree)?;
    let mut host = Builder {
        fixture,
        archive: Archive::new(Origin::Snapshot),
        lines: &lines,
        next_high: 0x20_0000_0000,
        next_low: 0x9000_0000,
    };
    host.archive.folder("sys/bus/pci/devices");
    for (index, line) in lines.iter().enumerate() {
        if line.kind != "root" {
            host.function(index);
        }
    }
    host.around();
    Ok(host.archive)
}

struct Builder<'a> {
    fixture: &'a Fixture,
    archive: Archive,
    lines: &'a [Line],
    next_high: u64,
    next_low: u64,
}

const KINDS: [(&str, &str); 3] = [("cor", "aer_dev_correctable"), ("nonfatal", "aer_dev_nonfatal"), ("fatal", "aer_dev_fatal")];

impl Builder<'_> {
    fn folder_of(&self, index: usize) -> String {
        let line = &self.lines[index];
        match line.parent {
            None => format!("sys/devices/{}", Address::root_name(line.address.domain, line.address.bus)),
            Some(parent) => format!("{}/{}", self.folder_of(parent), line.address),
        }
    }

    fn put(&mut self, path: String, text: impl std::fmt::Display) {
        self.archive.file(&path, format!("{text}\n"));
    }

    fn function(&mut self, index: usize) {
        let line = &self.lines[index];
        let folder = self.folder_of(index);
        let what = defaults(line);
        let child = self.lines.iter().find(|l| l.parent == Some(index));
        self.archive.insert(
            &format!("sys/bus/pci/devices/{}", line.address),
            Entry::Link(format!("../../../{}", folder.trim_start_matches("sys/"))),
        );
        let mut uevent = String::new();
        if let Some(driver) = line.key("driver") {
            let _ = writeln!(uevent, "DRIVER={driver}");
        }
        let _ = write!(
            uevent,
            "PCI_CLASS={:X}\nPCI_ID={:04X}:{:04X}\nPCI_SUBSYS_ID={:04X}:0001\nPCI_SLOT_NAME={}",
            what.class, what.vendor, what.device, what.vendor, line.address
        );
        self.put(format!("{folder}/uevent"), uevent);
        self.put(format!("{folder}/numa_node"), line.key("numa").unwrap_or("-1"));
        self.put(format!("{folder}/power_state"), line.key("power").unwrap_or("D0"));
        if let Some(driver) = line.key("driver") {
            self.archive.insert(&format!("{folder}/driver"), Entry::Link(format!("../../../../bus/pci/drivers/{driver}")));
        }
        if !line.is_bridge() {
            self.put(format!("{folder}/reset_method"), line.key("reset").unwrap_or("flr bus").replace(',', " "));
        }
        let mut bytes = image(line, child);
        if self.fixture.host.unprivileged {
            bytes.truncate(64);
        }
        self.archive.file(&format!("{folder}/config"), bytes);
        self.resource(&folder, line);
        self.aer(&folder, line, what.port.is_some());
        self.unprivileged_files(&folder, line, what.port);
        self.group(&folder, line, index);
        self.services(&folder, line, what.port);
        if let Some((total, active)) = line.key("sriov").and_then(|s| s.split_once(':')) {
            self.put(format!("{folder}/sriov_totalvfs"), total);
            self.put(format!("{folder}/sriov_numvfs"), active);
        }
        if line.has("vf") {
            let physical = self.lines[..index].iter().rev().find(|l| l.parent == line.parent && !l.has("vf"));
            if let Some(physical) = physical {
                self.archive.insert(&format!("{folder}/physfn"), Entry::Link(format!("../{}", physical.address)));
            }
        }
        for interface in line.key("interfaces").unwrap_or_default().split(',').filter(|i| !i.is_empty()) {
            self.archive.folder(&format!("{folder}/{interface}"));
        }
        if let Some(size) = line.key("p2pmem") {
            self.put(format!("{folder}/p2pmem/size"), size);
        }
        if line.has("hotplug") {
            let number = line.number("slot").unwrap_or(0);
            let below = Address { bus: line.buses.0, device: 0, function: 0, ..line.address }.to_string();
            let present = child.is_some() || line.has("present");
            self.put(format!("sys/bus/pci/slots/{number}/address"), below.trim_end_matches(".0"));
            self.put(format!("sys/bus/pci/slots/{number}/adapter"), u8::from(present));
            self.put(format!("sys/bus/pci/slots/{number}/power"), u8::from(present && !line.has("unpowered")));
        }
        if let Some(mig) = line.number("mig") {
            self.mig(line, mig);
        }
    }

    fn resource(&mut self, folder: &str, line: &Line) {
        let mut lines = vec![String::from("0x0000000000000000 0x0000000000000000 0x0000000000000000"); 13];
        if !line.has("dead") {
            for bar in bars(line) {
                let flags: u64 = if bar.wide { 0x14220c } else { 0x40200 };
                let base = if bar.wide && !bar.low { &mut self.next_high } else { &mut self.next_low };
                *base = base.next_multiple_of(bar.size.max(4096));
                if !bar.unassigned {
                    lines[bar.index] = format!("{:#018x} {:#018x} {flags:#018x}", *base, *base + bar.size - 1);
                    *base += bar.size;
                } else if !bar.wide {
                    lines[bar.index] = format!("{:#018x} {:#018x} {:#018x}", 0, bar.size - 1, flags | 0x2000_0000);
                }
            }
        }
        self.put(format!("{folder}/resource"), lines.join("\n"));
    }

    fn aer(&mut self, folder: &str, line: &Line, express: bool) {
        if !express || line.key("aer") == Some("0") {
            return;
        }
        for (key, file) in KINDS {
            let mut text = String::new();
            let mut total = 0u64;
            let counts = line.key(key).unwrap_or_default();
            let known: &[&str] = if key == "cor" {
                &["RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout", "NonFatalErr", "CorrIntErr", "HeaderOF"]
            } else {
                &[
                    "Undefined",
                    "DLP",
                    "SDES",
                    "TLP",
                    "FCP",
                    "CmpltTO",
                    "CmpltAbrt",
                    "UnxCmplt",
                    "RxOF",
                    "MalfTLP",
                    "ECRC",
                    "UnsupReq",
                    "ACSViol",
                ]
            };
            for kind in known {
                let count =
                    counts.split(',').find_map(|c| c.strip_prefix(kind)?.strip_prefix(':')?.parse::<u64>().ok()).unwrap_or(0);
                total += count;
                let _ = writeln!(text, "{kind} {count}");
            }
            let name =
                ["TOTAL_ERR_COR", "TOTAL_ERR_NONFATAL", "TOTAL_ERR_FATAL"][KINDS.iter().position(|k| k.0 == key).unwrap_or(0)];
            let _ = write!(text, "{name} {total}");
            self.put(format!("{folder}/{file}"), text);
        }
    }

    /// Attributes that everybody may read, next to the bytes that only root may.
    fn unprivileged_files(&mut self, folder: &str, line: &Line, port: Option<u32>) {
        if !matches!(port, Some(0..=8)) || line.has("dead") || line.is_bridge() && !self.fixture.host.unprivileged {
            return;
        }
        let text = line.key("link").unwrap_or("4x16");
        let (best, now) = text.split_once('/').unwrap_or((text, text));
        let speed = |code: u32| {
            ["Unknown", "2.5 GT/s PCIe", "5.0 GT/s PCIe", "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe", "64.0 GT/s PCIe"]
                [code.min(6) as usize]
        };
        for (state, name) in [(now, "current"), (best, "max")] {
            let (code, width) = link(state).unwrap_or((0, 0));
            self.put(format!("{folder}/{name}_link_speed"), speed(code));
            self.put(format!("{folder}/{name}_link_width"), width);
        }
    }

    fn group(&mut self, folder: &str, line: &Line, index: usize) {
        let mode = line.key("iommu").unwrap_or(&self.fixture.host.iommu).to_owned();
        if mode.is_empty() || mode == "none" {
            return;
        }
        let group = line.number("group").unwrap_or(index as u32);
        self.archive.insert(&format!("{folder}/iommu_group"), Entry::Link(format!("../../../kernel/iommu_groups/{group}")));
        self.put(format!("sys/kernel/iommu_groups/{group}/type"), mode);
    }

    fn services(&mut self, folder: &str, line: &Line, port: Option<u32>) {
        let Some(port) = port.filter(|p| matches!(p, 4..=6)) else { return };
        let mut services = BTreeMap::from([(1, "pcie_pme")]);
        if self.fixture.host.native_aer && port == 4 && line.key("aer") != Some("0") {
            services.insert(2, "aer");
        }
        if line.has("hotplug") {
            services.insert(4, "pciehp");
        }
        if line.has("dpc") && self.fixture.host.native_aer {
            services.insert(8, "dpc");
        }
        for (service, driver) in services {
            let name = format!("{}:pcie{}{service:02x}", line.address, port - 4);
            self.archive.folder(&format!("{folder}/{name}"));
            self.archive
                .insert(&format!("{folder}/{name}/driver"), Entry::Link(format!("../../../../bus/pci_express/drivers/{driver}")));
            let target = format!("../../../{}/{name}", folder.trim_start_matches("sys/"));
            self.archive.insert(&format!("sys/bus/pci_express/devices/{name}"), Entry::Link(target));
        }
    }

    fn mig(&mut self, line: &Line, count: u32) {
        let minor = self.lines.iter().filter(|l| l.kind == "gpu").position(|l| l.address == line.address).unwrap_or(0);
        self.put(
            format!("proc/driver/nvidia/gpus/{}/information", line.address),
            format!("Model: \t\t GPU\nDevice Minor: \t {minor}"),
        );
        for instance in 1..=count {
            self.archive.folder(&format!("proc/driver/nvidia/capabilities/gpu{minor}/mig/gi{instance}/ci0"));
        }
    }

    fn around(&mut self) {
        let host = &self.fixture.host;
        let flags = if host.hypervisor { "fpu vme hypervisor" } else { "fpu vme" };
        let limit = |v: &str| v.to_owned();
        self.put("proc/sys/kernel/osrelease".into(), &host.kernel);
        self.put("proc/cmdline".into(), &host.cmdline);
        self.put(
            "proc/cpuinfo".into(),
            format!(
                "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: {}\nflags\t\t: {flags}",
                host.cpu, host.family, host.model
            ),
        );
        self.put("proc/uptime".into(), format!("{}.00 1.00", host.uptime));
        self.put(
            "proc/self/limits".into(),
            format!("Limit                     Soft Limit           Hard Limit           Units\nMax locked memory         {:<20} {:<20} bytes", limit(&host.memlock), limit(&host.memlock)),
        );
        self.put("sys/class/dmi/id/sys_vendor".into(), &host.vendor);
        self.put("sys/class/dmi/id/product_name".into(), &host.product);
        self.put("sys/class/dmi/id/bios_version".into(), "1.0");
        self.put("sys/class/dmi/id/bios_date".into(), "01/01/2026");
        self.put("sys/kernel/security/lockdown".into(), format!("[{}] other", host.lockdown));
        self.put("sys/module/pcie_aspm/parameters/policy".into(), format!("[{}] powersupersave", host.aspm_policy));
        if let Some(secure) = host.secure_boot {
            self.archive
                .file("sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", [6, 0, 0, 0, u8::from(secure)]);
        }
        let namespace =
            |kind: &str, initial: bool, first: u32| format!("{kind}:[{}]", if initial { first } else { 4_026_532_999 });
        self.archive.insert("proc/self/ns/pid", Entry::Link(namespace("pid", host.pid_namespace_initial, 4_026_531_836)));
        self.archive.insert("proc/self/ns/ipc", Entry::Link(namespace("ipc", host.ipc_namespace_initial, 4_026_531_839)));
        if !host.module.is_empty() {
            self.put("sys/module/pcieipc/version".into(), &host.module);
            self.put("sys/module/pcieipc/taint".into(), &host.module_taint);
        }
        if !host.iommu.is_empty() && host.iommu != "none" {
            self.archive.folder("sys/class/iommu/dmar0");
        }
        let mut windows = String::from("80000000-fbffffff : PCI Bus 0000:00\n");
        if host.above_4g {
            windows.push_str("2000000000-ffffffffff : PCI Bus 0000:16\n");
        }
        self.archive.file("proc/iomem", windows);
        for node in &self.fixture.numa {
            let folder = format!("sys/devices/system/node/node{}", node.id);
            let first = node.cpus.split(['-', ',']).next().unwrap_or("0");
            self.put(format!("sys/devices/system/cpu/cpu{first}/topology/physical_package_id"), node.socket);
            self.put(format!("{folder}/cpulist"), &node.cpus);
            self.put(format!("{folder}/distance"), &node.distances);
        }
        let node = (!host.module.is_empty()).then(|| Node { mode: 0o660, uid: 0, gid: 990, refused: host.node_refused.clone() });
        // A node that opens answers for the module.
        let module =
            node.as_ref().filter(|n| n.refused.is_none()).map(|_| ModuleAnswer { abi: 1, abi_oldest: 1, excluded: false });
        let shm = Some(host.shm);
        let facts = Facts { time: 1_780_000_000, euid: 0, shm_bytes: shm, shm_free: shm, node, module };
        if let Ok(bytes) = serde_json::to_vec(&facts) {
            self.archive.file(FACTS, bytes);
        }
        let mut log = String::new();
        for (i, line) in host.log.iter().enumerate() {
            log.push_str(&format!("4,{i},{}000000,-;{line}\n", i + 1));
        }
        self.archive.file(KERNEL_LOG, log);
    }
}
