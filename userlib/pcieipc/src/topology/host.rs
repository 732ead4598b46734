// SPDX-License-Identifier: MIT OR Apache-2.0
//! What surrounds the tree: kernel, firmware, limits, namespaces, the module, and the kernel log.

use serde::Serialize;

use super::{
    facts::{FACTS, Facts, KERNEL_LOG},
    redact,
    source::{Source, printable},
    tree::Note,
};

/// The host around the tree.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Host {
    /// Kernel release.
    pub kernel: String,
    /// Parameters of the kernel's command line that concern the tree.
    pub command_line: String,
    /// Maker of the processor as it names itself.
    pub cpu_vendor: String,
    /// Family and model of the processor.
    pub cpu_model: (u32, u32),
    /// The virtual machine monitor, if there is one: its name, or "unknown".
    pub hypervisor: Option<String>,
    /// Maker and model of the machine.
    pub machine: String,
    /// Version and date of the firmware.
    pub firmware: String,
    /// IOMMU units, such as `dmar0`.
    pub iommu_units: Vec<String>,
    /// Secure boot is on, where the firmware says so.
    pub secure_boot: Option<bool>,
    /// Mode of kernel lockdown: `none`, `integrity`, `confidentiality`.
    pub lockdown: Option<String>,
    /// Policy of link power management.
    pub aspm_policy: Option<String>,
    /// Memory that a process may lock, in bytes: soft and hard limit, `u64::MAX` for none.
    pub memlock: Option<(u64, u64)>,
    /// This process sees the host's own process ids.
    pub initial_pid_namespace: Option<bool>,
    /// This process sees the host's own shared memory.
    pub initial_ipc_namespace: Option<bool>,
    /// Seconds since the kernel started.
    pub uptime: Option<f64>,
    /// The module `pcieipc`.
    pub module: ModuleState,
    /// Answers of system calls.
    pub facts: Option<Facts>,
    /// Bus windows of host bridges from `/proc/iomem`: start, end; empty without rights.
    pub windows: Vec<(u64, u64)>,
    /// Lines of the kernel log about the tree, oldest first; `None` when it could not be read.
    pub log: Option<Vec<LogLine>>,
    /// Services that the kernel's port driver runs, as `port:pcieXXX` with the driver: AER, DPC, hot-plug.
    pub services: Vec<(String, Option<String>)>,
    /// Files that hold something else than they should.
    pub notes: Vec<Note>,
}

/// Whether and how the module is loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ModuleState {
    /// It is loaded.
    pub loaded: bool,
    /// Its version.
    pub version: Option<String>,
    /// Letters of the taint it caused: `O` out of tree, `E` unsigned.
    pub taint: String,
}

/// One line of the kernel log.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LogLine {
    /// Seconds since the kernel started.
    pub seconds: f64,
    /// The message.
    pub text: String,
}

/// Inode numbers of the namespaces that a host starts with.
const INITIAL_PID: &str = "pid:[4026531836]";
const INITIAL_IPC: &str = "ipc:[4026531839]";

impl Host {
    /// Reads all of it anew. What is not there stays empty.
    pub fn read(source: &dyn Source) -> Self {
        let text = |path: &str| source.value(path).ok().filter(|t| !t.is_empty());
        let lines = |path: &str| source.text(path).ok().filter(|t| !t.is_empty());
        let cpuinfo = lines("proc/cpuinfo").unwrap_or_default();
        let mut notes = Vec::new();
        let mut odd = |path: &str, wanted: &str| notes.push(Note { path: path.into(), problem: format!("{wanted} expected") });
        let limits = lines("proc/self/limits");
        let memlock = limits.as_deref().and_then(memlock);
        if limits.is_some() && memlock.is_none() {
            odd("proc/self/limits", "a line of locked memory with two numbers");
        }
        let uptime = text("proc/uptime");
        let seconds = uptime.as_deref().and_then(|t| t.split_whitespace().next()?.parse().ok());
        if uptime.is_some() && seconds.is_none() {
            odd("proc/uptime", "a number of seconds");
        }
        let choice = |path: &str, odd: &mut dyn FnMut(&str, &str)| {
            let text = text(path)?;
            let found = chosen(&text);
            if found.is_none() {
                odd(path, "a word in brackets");
            }
            found
        };
        let lockdown = choice("sys/kernel/security/lockdown", &mut odd);
        let aspm_policy = choice("sys/module/pcie_aspm/parameters/policy", &mut odd);
        let facts = source.read(FACTS).ok().and_then(|bytes| {
            let facts = serde_json::from_slice::<Facts>(&bytes).ok();
            if facts.is_none() {
                odd(FACTS, "the answers of system calls in JSON");
            }
            facts.map(Facts::printable)
        });
        let iomem = lines("proc/iomem").unwrap_or_default();
        if !iomem.is_empty() && iomem.lines().all(|l| range(l).is_none()) {
            odd("proc/iomem", "ranges of addresses");
        }
        let (log, no_records) = match source.text(KERNEL_LOG) {
            Ok(text) => log(&text),
            Err(_) => (None, 0),
        };
        if no_records > 0 {
            odd(KERNEL_LOG, &format!("records of the kernel, less {no_records} lines that are none,"));
        }
        let cpu = |key: &str| of_processor(&cpuinfo, key);
        let number = |key| cpu(key).and_then(|n| n.parse().ok()).unwrap_or(0);
        let dmi = |file: &str| text(&format!("sys/class/dmi/id/{file}")).unwrap_or_default();
        let pair = |a: String, b: String| format!("{a} {b}").trim().to_owned();
        let machine = pair(dmi("sys_vendor"), dmi("product_name"));
        Self {
            kernel: text("proc/sys/kernel/osrelease").unwrap_or_default(),
            command_line: redact::command_line(&text("proc/cmdline").unwrap_or_default()),
            cpu_vendor: cpu("vendor_id").unwrap_or_default().to_owned(),
            cpu_model: (number("cpu family"), number("model")),
            hypervisor: hypervisor(text("sys/hypervisor/type"), cpu("flags"), &machine),
            machine,
            firmware: pair(dmi("bios_version"), dmi("bios_date")),
            iommu_units: source.list("sys/class/iommu").unwrap_or_default().iter().map(|n| printable(n)).collect(),
            secure_boot: secure_boot(source),
            lockdown,
            aspm_policy,
            memlock,
            initial_pid_namespace: source.link("proc/self/ns/pid").ok().map(|n| n == INITIAL_PID),
            initial_ipc_namespace: source.link("proc/self/ns/ipc").ok().map(|n| n == INITIAL_IPC),
            uptime: seconds,
            module: ModuleState {
                loaded: source.list("sys/module/pcieipc").is_ok(),
                version: text("sys/module/pcieipc/version"),
                taint: text("sys/module/pcieipc/taint").unwrap_or_default(),
            },
            facts,
            windows: windows(&iomem),
            log,
            services: services(source),
            notes,
        }
    }

    /// Maker, and family and model of the processor: the part of [`Host::read`] that costs one small file.
    pub fn processor(source: &dyn Source) -> (String, (u32, u32)) {
        let cpuinfo = source.text("proc/cpuinfo").unwrap_or_default();
        let number = |key| of_processor(&cpuinfo, key).and_then(|n| n.parse().ok()).unwrap_or(0);
        (of_processor(&cpuinfo, "vendor_id").unwrap_or_default().to_owned(), (number("cpu family"), number("model")))
    }

    /// Whether the kernel's driver of a service (`aer`, `dpc`, `pciehp`) runs on any port.
    pub fn has_service(&self, driver: &str) -> bool {
        self.services.iter().any(|(_, d)| d.as_deref() == Some(driver))
    }
}

/// The value of a key in the first processor's entry.
fn of_processor<'a>(cpuinfo: &'a str, key: &str) -> Option<&'a str> {
    cpuinfo.lines().find_map(|l| Some(l.strip_prefix(key)?.trim_start().strip_prefix(':')?.trim()))
}

/// sysfs marks the chosen one of several words with brackets: `default [performance] powersave`.
fn chosen(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

fn hypervisor(kind: Option<String>, flags: Option<&str>, machine: &str) -> Option<String> {
    let known = [
        "QEMU",
        "KVM",
        "VMware",
        "VirtualBox",
        "Amazon EC2",
        "Google",
        "OpenStack",
        "Xen",
        "Alibaba Cloud",
        "Parallels",
        "Virtual Machine",
        "Firecracker",
    ];
    let by_name = known.iter().find(|k| machine.contains(**k)).map(|k| (*k).to_owned());
    let flagged = flags.is_some_and(|f| f.split_whitespace().any(|w| w == "hypervisor"));
    // Cloud vendors put their name on bare metal, too: the processor's flag decides where there is one.
    match (kind, flagged, flags.is_some()) {
        (Some(kind), ..) => Some(kind),
        (None, true, _) => Some(by_name.unwrap_or_else(|| "unknown".into())),
        (None, false, true) => None,
        (None, false, false) => by_name,
    }
}

fn secure_boot(source: &dyn Source) -> Option<bool> {
    // Four bytes of attributes, then the value.
    let bytes = source.read("sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c").ok()?;
    bytes.get(4).map(|b| *b == 1)
}

fn memlock(limits: &str) -> Option<(u64, u64)> {
    let line = limits.lines().find_map(|l| l.strip_prefix("Max locked memory"))?;
    let mut values = line.split_whitespace().map(|v| if v == "unlimited" { Some(u64::MAX) } else { v.parse().ok() });
    Some((values.next()??, values.next()??))
}

fn windows(iomem: &str) -> Vec<(u64, u64)> {
    let ranges = iomem.lines().filter(|l| l.contains("PCI Bus") && !l.starts_with(' '));
    // Without rights the kernel prints zeros.
    ranges.filter_map(range).filter(|(_, end)| *end != 0).collect()
}

/// `38000000-3fffffff : PCI Bus 0000:16`
fn range(line: &str) -> Option<(u64, u64)> {
    let (start, end) = line.split(':').next()?.trim().split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

/// The records about the tree, and how many lines are no records; no log at all where no line is one.
fn log(text: &str) -> (Option<Vec<LogLine>>, usize) {
    let record = |line: &str| {
        // priority,sequence,microseconds,flags;message
        let (head, message) = line.split_once(';')?;
        let microseconds: u64 = head.split(',').nth(2)?.parse().ok()?;
        Some(LogLine { seconds: microseconds as f64 / 1e6, text: printable(message) })
    };
    let (records, others): (Vec<&str>, Vec<&str>) =
        text.lines().filter(|l| !l.is_empty()).partition(|line| record(line).is_some());
    if records.is_empty() && !others.is_empty() {
        return (None, others.len());
    }
    (Some(records.into_iter().filter_map(redact::log_line).filter_map(|l| record(&l)).collect()), others.len())
}

fn services(source: &dyn Source) -> Vec<(String, Option<String>)> {
    let mut found = Vec::new();
    let folder = "sys/bus/pci_express/devices";
    if let Ok(names) = source.list(folder) {
        for name in names {
            let driver = source.link_name(&format!("{folder}/{name}/driver"));
            found.push((printable(&name), driver));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_and_choices_are_read_as_the_kernel_prints_them() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units\nMax locked memory         8388608              unlimited            bytes\n";
        assert_eq!(memlock(limits), Some((8_388_608, u64::MAX)));
        assert_eq!(chosen("default [performance] powersave"), Some("performance".into()));
        assert_eq!(memlock("Max locked memory"), None);
    }

    #[test]
    fn a_cloud_vendor_s_bare_metal_is_no_virtual_machine() {
        assert_eq!(hypervisor(None, Some("fpu vme"), "Amazon EC2 p4d.24xlarge"), None);
        assert_eq!(hypervisor(None, Some("fpu hypervisor"), "Amazon EC2 p4d"), Some("Amazon EC2".into()));
    }
}
