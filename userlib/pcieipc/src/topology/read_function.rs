// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads one function: sysfs first, configuration space where the rights allow, and never a card that sleeps.

use std::io;

use super::{
    address::Address,
    aer::{self, Counters, Severity},
    capability::{Capabilities, PortType, SrIov},
    config::{Config, NoConfig},
    function::{Bar, Function, Identity, Kind, MigInstance, Reach},
    link::{LinkEnd, LinkState, Speed},
    read::describe,
    source::{Source, printable},
    tree::{Note, Topology},
};

/// Reads the function whose folder is `path`; `None` when the folder has vanished meanwhile.
pub(super) fn read(source: &dyn Source, address: Address, path: String, notes: &mut Vec<Note>) -> Option<Function> {
    let mut reader = Reader { source, path, notes };
    let uevent = reader.text("uevent");
    if uevent.as_deref().is_some_and(|text| field(text, "PCI_ID=").is_none()) {
        reader.note("uevent", "names no device (no PCI_ID)".into());
    }
    let mut identity = uevent.as_deref().map(identity_from_uevent).unwrap_or_default();
    let driver = match uevent.as_deref() {
        Some(uevent) => field(uevent, "DRIVER=").map(printable),
        None => source.link_name(&format!("{}/driver", reader.path)),
    };
    let power_state = reader.one_of("power_state", &["D0", "D1", "D2", "D3hot", "D3cold", "unknown", "error"]);
    let (config, reach) = reader.config(power_state.as_deref());
    if uevent.is_none() && matches!(reach, Reach::Unreadable) && source.list(&reader.path).is_err() {
        reader.note("", "vanished while it was read".into());
        return None;
    }
    let mut header = Header::default();
    let mut capabilities = Capabilities::default();
    if let Some(bytes) = &config {
        header = Header { kind: bytes.0.header_type, buses: bytes.0.buses, command: bytes.0.command };
        capabilities = bytes.1.clone();
        identity =
            Identity { revision: bytes.0.identity.revision, ..if identity.vendor == 0 { bytes.0.identity } else { identity } };
        if identity.subsystem_vendor == 0 {
            identity.subsystem_vendor = bytes.0.identity.subsystem_vendor;
            identity.subsystem_device = bytes.0.identity.subsystem_device;
        }
    } else {
        reader.identity_from_files(&mut identity);
    }
    // What configuration space says in full needs no second question; files that are not there cost time, too.
    if capabilities.link.is_none() && !matches!(reach, Reach::Asleep | Reach::Full) {
        capabilities.link = reader.link_from_files();
    }
    let is_bridge_class = matches!(identity.class >> 8, 0x0604 | 0x0609);
    if capabilities.port.is_none() && reach != Reach::Full && is_bridge_class {
        capabilities.port = reader.port_from_files();
    }
    if capabilities.sriov.is_none() && reach != Reach::Full {
        capabilities.sriov = reader.sriov_from_files();
    }
    let header_type = if config.is_none() && is_bridge_class { 1 } else { header.kind };
    let kind = Kind::of(&identity, capabilities.port, header_type, driver.as_deref());
    let aer = reader.aer(capabilities.aer.is_some() || reach != Reach::Full);
    let bars = reader.bars(config.as_ref().map(|c| &c.0), header_type);
    let reset_methods = reader.reset_methods();
    let iommu_group = reader.linked("iommu_group");
    let physical_function = reader.linked("physfn");
    // -1 is how the kernel says that the firmware did not say.
    let numa_node = reader.parsed::<i64>("numa_node").and_then(|n| u32::try_from(n).ok());
    Some(Function {
        address,
        parent: None,
        children: Vec::new(),
        root: String::new(),
        name: name(&identity),
        kind,
        reach,
        driver,
        numa_node,
        // The kernel wakes a bridge to answer that; of one that sleeps the folders inside tell.
        buses: header.buses.or_else(|| if is_bridge_class && reach != Reach::Asleep { reader.buses_from_files() } else { None }),
        bars,
        iommu_group,
        aer,
        physical_function,
        reset_methods,
        power_state,
        memory_enabled: header.command & 2 != 0,
        bus_master: header.command & 4 != 0,
        p2p_memory: if kind.is_peer() || kind == Kind::Nvme { reader.number("p2pmem/size") } else { None },
        interfaces: reader.interfaces(kind),
        mig: Vec::new(),
        life: source.life(&reader.path),
        identity,
        capabilities,
        path: reader.path,
    })
}

#[derive(Default)]
struct Header {
    kind: u8,
    buses: Option<(u8, u8)>,
    command: u16,
}

/// What the first 64 bytes say.
struct HeaderFields {
    header_type: u8,
    buses: Option<(u8, u8)>,
    command: u16,
    identity: Identity,
    /// BAR registers, raw.
    bars: [u32; 6],
}

impl HeaderFields {
    fn of(config: &Config<'_>) -> Self {
        let header_type = config.header_type();
        let mut identity = Identity {
            vendor: config.header16(0),
            device: config.header16(2),
            class: config.header32(8) >> 8,
            revision: config.header8(8),
            ..Identity::default()
        };
        if header_type == 0 {
            identity.subsystem_vendor = config.header16(0x2c);
            identity.subsystem_device = config.header16(0x2e);
        }
        let count = if header_type == 0 { 6 } else { 2 };
        let mut bars = [0; 6];
        for (index, bar) in bars.iter_mut().take(count).enumerate() {
            *bar = config.header32(0x10 + index * 4);
        }
        Self {
            header_type,
            buses: (header_type == 1).then(|| (config.header8(0x19), config.header8(0x1a))),
            command: config.header16(4),
            identity,
            bars,
        }
    }
}

struct Reader<'a> {
    source: &'a dyn Source,
    path: String,
    notes: &'a mut Vec<Note>,
}

impl Reader<'_> {
    fn note(&mut self, file: &str, problem: String) {
        let path = if file.is_empty() { self.path.clone() } else { format!("{}/{file}", self.path) };
        self.notes.push(Note { path, problem });
    }

    /// A file's text. A file that is not there is normal: kernels and devices differ.
    fn text(&mut self, file: &str) -> Option<String> {
        match self.source.text(&format!("{}/{file}", self.path)) {
            Ok(text) => Some(text),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => None,
            Err(error) => {
                self.note(file, describe(&error));
                None
            }
        }
    }

    /// The one value of a file.
    fn value(&mut self, file: &str) -> Option<String> {
        self.text(file).map(|text| printable(&text))
    }

    /// Says that a file holds something else than it should.
    fn garbage(&mut self, file: &str, wanted: &str, found: &str) {
        self.note(file, format!("{wanted} expected, found {:?}", found.chars().take(40).collect::<String>()));
    }

    /// A decimal or 0x-prefixed number.
    fn number(&mut self, file: &str) -> Option<u64> {
        let text = self.value(file)?;
        let value = match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => text.parse(),
        };
        if value.is_err() {
            self.garbage(file, "a number", &text);
        }
        value.ok()
    }

    /// A value of a type that reads itself.
    fn parsed<T: std::str::FromStr>(&mut self, file: &str) -> Option<T> {
        let text = self.value(file)?;
        let value = text.parse().ok();
        if value.is_none() {
            self.garbage(file, "a number", &text);
        }
        value
    }

    /// One of some words; others are kept, and noted.
    fn one_of(&mut self, file: &str, words: &[&str]) -> Option<String> {
        let text = self.value(file)?;
        if !words.contains(&text.as_str()) {
            self.garbage(file, &format!("one of {}", words.join(", ")), &text);
        }
        Some(text)
    }

    /// What a link's last part says.
    fn linked<T: std::str::FromStr>(&mut self, link: &str) -> Option<T> {
        let name = self.source.link_name(&format!("{}/{link}", self.path))?;
        let value = name.parse().ok();
        if value.is_none() {
            self.garbage(link, "a link to a group or function", &name);
        }
        value
    }

    fn reset_methods(&mut self) -> Vec<String> {
        let text = self.value("reset_method").unwrap_or_default();
        let (good, bad): (Vec<&str>, Vec<&str>) = text
            .split_whitespace()
            .partition(|w| w.len() <= 32 && w.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-')));
        if let Some(bad) = bad.first() {
            self.garbage("reset_method", "names of methods", bad);
        }
        good.into_iter().map(str::to_owned).collect()
    }

    /// A speed of a link; `Unknown` is how the kernel says that there is none.
    fn speed(&mut self, file: &str) -> Option<Speed> {
        let text = self.value(file)?;
        let speed = Speed::from_text(&text);
        if speed.is_none() && !text.to_ascii_lowercase().starts_with("unknown") && !text.is_empty() {
            self.garbage(file, "a speed such as \"16.0 GT/s PCIe\"", &text);
        }
        speed
    }

    fn config(&mut self, power_state: Option<&str>) -> (Option<(HeaderFields, Capabilities)>, Reach) {
        // A read would wake it, and the bridges above it.
        if power_state == Some("D3cold") || (power_state == Some("D3hot") && self.bridge_sleeps()) {
            return (None, Reach::Asleep);
        }
        let file = match self.source.open(&format!("{}/config", self.path)) {
            Ok(file) => file,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    self.note("config", describe(&error));
                }
                return (None, Reach::Unreadable);
            }
        };
        match Config::read(file.as_ref()) {
            Ok(config) => {
                if config.broken_list() {
                    self.note("config", "the list of capabilities leads nowhere; what comes before is used".into());
                }
                let reach = if config.restricted() { Reach::Header } else { Reach::Full };
                (Some((HeaderFields::of(&config), Capabilities::decode(&config))), reach)
            }
            Err(NoConfig::AllOnes) => (None, Reach::AllOnes),
            Err(error) => {
                self.note("config", error.to_string());
                (None, Reach::Unreadable)
            }
        }
    }

    fn bridge_sleeps(&self) -> bool {
        let above = self.path.rsplit_once('/').map_or("", |(above, _)| above);
        self.source.value(&format!("{above}/power_state")).is_ok_and(|state| state != "D0" && state != "unknown")
    }

    fn identity_from_files(&mut self, identity: &mut Identity) {
        let mut id = |file: &str| self.number(file).and_then(|n| u16::try_from(n).ok()).unwrap_or(0);
        if identity.vendor == 0 {
            identity.vendor = id("vendor");
            identity.device = id("device");
        }
        if identity.subsystem_vendor == 0 {
            identity.subsystem_vendor = id("subsystem_vendor");
            identity.subsystem_device = id("subsystem_device");
        }
        if identity.class == 0 {
            identity.class = self.number("class").and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
        }
    }

    /// Speeds and widths that the kernel shows to everybody.
    fn link_from_files(&mut self) -> Option<LinkEnd> {
        // 255 is how sysfs says that nobody knows, and NCCL writes an empty file.
        let state = |speed: Option<Speed>, width: Option<u64>| {
            Some(LinkState { speed: speed?, width: width.and_then(|w| u8::try_from(w).ok()).filter(|w| (1..=32).contains(w))? })
        };
        let speed = self.speed("current_link_speed");
        let reported = self.parsed("link_gbps").filter(|g: &f64| g.is_finite() && *g > 0.0);
        if speed.is_none() && reported.is_none() {
            return None;
        }
        let width = self.number("current_link_width");
        let now = state(speed, width);
        let best_speed = self.speed("max_link_speed");
        let best_width = self.number("max_link_width");
        let best = state(best_speed, best_width);
        (now.is_some() || best.is_some() || reported.is_some()).then(|| LinkEnd {
            now,
            best,
            reported_gbps: reported,
            ..LinkEnd::default()
        })
    }

    /// Without rights the header hides what kind of port it is; the services that the kernel made of it tell.
    fn port_from_files(&mut self) -> Option<PortType> {
        // What an import knows; no kernel has this file.
        match self.value("port_type").as_deref() {
            Some("root") => return Some(PortType::RootPort),
            Some("upstream") => return Some(PortType::UpstreamPort),
            Some("downstream") => return Some(PortType::DownstreamPort),
            _ => {}
        }
        let names = self.source.list(&self.path).ok()?;
        let service = names.iter().find_map(|n| n.rsplit_once(":pcie").filter(|(_, s)| s.len() == 3).map(|(_, s)| s.to_owned()));
        match service.as_deref().and_then(|s| s.chars().next()) {
            Some('0') => Some(PortType::RootPort),
            Some('1') => Some(PortType::UpstreamPort),
            Some('2') => Some(PortType::DownstreamPort),
            // No service: a bridge directly below the host bridge that has a link is a root port.
            _ if names.iter().any(|n| n == "current_link_speed") => {
                let above = self.path.rsplit('/').nth(1)?;
                if above.parse::<Address>().is_err() { Some(PortType::RootPort) } else { None }
            }
            _ => None,
        }
    }

    fn sriov_from_files(&mut self) -> Option<SrIov> {
        let total = u16::try_from(self.number("sriov_totalvfs")?).ok()?;
        let active = self.number("sriov_numvfs").and_then(|n| u16::try_from(n).ok()).unwrap_or(0);
        Some(SrIov { total, active })
    }

    fn buses_from_files(&mut self) -> Option<(u8, u8)> {
        let bus = u8::try_from(self.number("secondary_bus_number")?).ok()?;
        let last = self.number("subordinate_bus_number").and_then(|n| u8::try_from(n).ok()).unwrap_or(bus);
        Some((bus, last))
    }

    fn aer(&mut self, likely: bool) -> Option<Counters> {
        if !likely {
            return None;
        }
        let mut counters = None;
        for (severity, file) in Severity::FILES {
            if let Some(text) = self.text(file) {
                if let Some(line) = aer::odd_line(&text) {
                    self.garbage(file, "a kind and a number in each line", line);
                }
                counters.get_or_insert_with(Counters::default).set(severity, aer::parse(&text));
            }
        }
        counters
    }

    /// BARs as the kernel placed them; those that it could not place show in the registers alone.
    fn bars(&mut self, header: Option<&HeaderFields>, header_type: u8) -> Vec<Bar> {
        let text = self.text("resource").unwrap_or_default();
        let count = if header_type == 1 { 2 } else { 6 };
        let mut bars = Vec::new();
        let mut upper_half = false;
        let three_numbers = |line: &str| {
            let mut words = line.split_whitespace();
            words.by_ref().take(3).filter(|w| u64::from_str_radix(w.trim_start_matches("0x"), 16).is_ok()).count() == 3
                && words.next().is_none()
        };
        if let Some(line) = text.lines().find(|line| !three_numbers(line)) {
            self.garbage("resource", "start, end and flags in each line", line);
        }
        for index in 0..count {
            let line = text.lines().nth(index).unwrap_or_default();
            let mut numbers = line.split_whitespace().map(|n| u64::from_str_radix(n.trim_start_matches("0x"), 16).ok());
            let (start, end, flags) = match (numbers.next().flatten(), numbers.next().flatten(), numbers.next().flatten()) {
                (Some(start), Some(end), Some(flags)) => (start, end, flags),
                _ => (0, 0, 0),
            };
            let register = header.map_or(0, |h| h.bars[index]);
            // The upper half of a 64-bit BAR is no BAR of its own.
            if std::mem::take(&mut upper_half) {
                continue;
            }
            upper_half = register & 7 == 4 || flags & 0x10_0000 != 0;
            if flags & 0x300 != 0 {
                let unset = flags & 0x2000_0000 != 0 || start == 0 && flags & 0x100 == 0;
                bars.push(Bar {
                    index: index as u8,
                    start: if unset { 0 } else { start },
                    size: end.checked_sub(start).and_then(|s| s.checked_add(1)).unwrap_or(0),
                    wide: flags & 0x10_0000 != 0,
                    prefetchable: flags & 0x2000 != 0,
                    io: flags & 0x100 != 0,
                    unassigned: unset,
                });
            } else if register & 0xf != 0 && register & 1 == 0 && !text.is_empty() {
                bars.push(Bar {
                    index: index as u8,
                    start: 0,
                    size: 0,
                    wide: register & 6 == 4,
                    prefetchable: register & 8 != 0,
                    io: false,
                    unassigned: true,
                });
            }
        }
        bars
    }

    fn interfaces(&mut self, kind: Kind) -> Vec<String> {
        let folders: &[&str] = match kind {
            Kind::Nic => &["net", "infiniband"],
            Kind::Nvme => &["nvme"],
            Kind::Gpu => &["drm"],
            _ => &[],
        };
        let mut found = Vec::new();
        for folder in folders {
            let names = self.source.list(&format!("{}/{folder}", self.path)).unwrap_or_default();
            found.extend(names.into_iter().map(|name| format!("{folder}/{}", printable(&name))));
        }
        found
    }
}

fn field<'a>(uevent: &'a str, key: &str) -> Option<&'a str> {
    uevent.lines().find_map(|line| line.strip_prefix(key))
}

fn identity_from_uevent(uevent: &str) -> Identity {
    let pair = |key| {
        let (vendor, device) = field(uevent, key)?.split_once(':')?;
        Some((u16::from_str_radix(vendor, 16).ok()?, u16::from_str_radix(device, 16).ok()?))
    };
    let (vendor, device) = pair("PCI_ID=").unwrap_or_default();
    let (subsystem_vendor, subsystem_device) = pair("PCI_SUBSYS_ID=").unwrap_or_default();
    let class = field(uevent, "PCI_CLASS=").and_then(|c| u32::from_str_radix(c, 16).ok()).unwrap_or(0) & 0xff_ffff;
    Identity { vendor, device, subsystem_vendor, subsystem_device, class, revision: 0 }
}

/// The device's name, or the maker's, or the numbers.
fn name(identity: &Identity) -> String {
    let numbers = format!("{:04x}:{:04x}", identity.vendor, identity.device);
    if let Some(device) = pci_ids::Device::from_vid_pid(identity.vendor, identity.device) {
        return format!("{} {}", short_vendor(device.vendor().name()), device.name());
    }
    match <pci_ids::Vendor as pci_ids::FromId<u16>>::from_id(identity.vendor) {
        Some(vendor) => format!("{} {numbers}", short_vendor(vendor.name())),
        None => numbers,
    }
}

/// `NVIDIA Corporation` and `Advanced Micro Devices, Inc. [AMD/ATI]` are too long for a drawing.
fn short_vendor(vendor: &str) -> &str {
    if let Some((_, bracket)) = vendor.split_once('[') {
        return bracket.trim_end_matches(']');
    }
    let mut name = vendor.split(',').next().unwrap_or(vendor);
    for ending in [" Corporation", " Corp.", " Inc.", " Inc", " Technologies", " Technology", " Semiconductor", " Co.", " Ltd"] {
        name = name.strip_suffix(ending).unwrap_or(name);
    }
    name
}

/// Shares of partitioned GPUs, which the vendor's driver lists in procfs.
pub(super) fn mig(source: &dyn Source, topology: &mut Topology) {
    for name in source.list("proc/driver/nvidia/gpus").unwrap_or_default() {
        let Some(index) = name.parse().ok().and_then(|a| topology.position(a)) else { continue };
        let text = source.text(&format!("proc/driver/nvidia/gpus/{name}/information")).unwrap_or_default();
        let Some(minor) = text.lines().find_map(|l| l.strip_prefix("Device Minor:")) else { continue };
        let folder = format!("proc/driver/nvidia/capabilities/gpu{}/mig", minor.trim());
        let mut instances: Vec<MigInstance> = source
            .list(&folder)
            .unwrap_or_default()
            .iter()
            .filter_map(|gi| {
                let gpu_instance = gi.strip_prefix("gi")?.parse().ok()?;
                let inside = source.list(&format!("{folder}/{gi}")).unwrap_or_default();
                let compute_instances = inside.iter().filter_map(|ci| ci.strip_prefix("ci")?.parse().ok()).collect();
                Some(MigInstance { gpu_instance, compute_instances })
            })
            .collect();
        instances.sort_by_key(|i| i.gpu_instance);
        topology.functions[index].mig = instances;
    }
}
