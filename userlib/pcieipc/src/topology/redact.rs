// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps secrets and serial numbers out of what is read, shown and saved.

use std::net::{IpAddr, SocketAddr};

/// Kernel parameters that say something about the PCIe tree and nothing about the owner. A name that ends in a dot stands
/// for all parameters of that module.
const PARAMETERS: &[&str] = &[
    "pci",
    "pcie_aspm",
    "pcie_ports",
    "pcie_hp",
    "pcie_port_pm",
    "iommu",
    "intel_iommu",
    "amd_iommu",
    "iommu.",
    "iommu.passthrough",
    "iommu.strict",
    "arm-smmu.",
    "vfio_iommu_type1.",
    "vfio_pci.",
    "hugepages",
    "hugepagesz",
    "default_hugepagesz",
    "numa",
    "numa_balancing",
    "mem",
    "memmap",
    "nokaslr",
    "lockdown",
    "module.sig_enforce",
    "module_blacklist",
    "modprobe.blacklist",
    "nvidia.",
    "nvidia-drm.",
    "nouveau.",
    "amdgpu.",
    "pcieipc.",
    "pciehp.",
    "aer_inject.",
    "swiotlb",
    "isolcpus",
    "idle",
    "processor.max_cstate",
    "intel_idle.max_cstate",
    "maxcpus",
    "nr_cpus",
];

/// The command line less everything that is not known to be harmless.
pub fn command_line(text: &str) -> String {
    let kept = text.split_whitespace().filter(|word| {
        let name = word.split('=').next().unwrap_or_default();
        PARAMETERS.iter().any(|p| if p.ends_with('.') { name.starts_with(p) } else { name == *p })
    });
    kept.collect::<Vec<_>>().join(" ")
}

/// Words of which one must be in a line of the kernel log for it to be kept.
const TOPICS: &[&str] = &[
    "pci",
    "aer:",
    "dpc:",
    "nvrm",
    "nvidia",
    "amdgpu",
    "dmar",
    "amd-vi",
    "iommu",
    "_osc",
    "bar ",
    "mlx5",
    "nvme",
    "xid",
    "vfio",
    "secure boot",
    "lockdown",
    "edac",
    "hardware error",
];

/// A line of the kernel log that is about the tree, with serial numbers and hardware addresses blanked out; `None` for other lines.
pub fn log_line(line: &str) -> Option<String> {
    let lower = line.to_ascii_lowercase();
    if from_user_space(&lower) || lower.contains("command line") || !TOPICS.iter().any(|t| lower.contains(t)) {
        return None;
    }
    Some(blank(line))
}

/// Whether a program wrote the line, or the audit of programs did: it is about users and their files.
fn from_user_space(line: &str) -> bool {
    let message = line.split_once(';').map_or(line, |(_, message)| message).trim_start();
    let program = message.split_whitespace().next().unwrap_or_default();
    message.starts_with("audit") || program.ends_with("]:") && program.contains('[')
}

/// Replaces what looks like a UUID, a hardware (MAC) address, a GUID a network address, a home folder or a serial number by dots, and keeps PCI
/// addresses.
pub fn blank(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    for word in line.split_inclusive(ends_word) {
        let core = word.trim_end_matches(|c: char| ends_word(c) || matches!(c, '.' | ':'));
        out.push_str(if is_unique(core) { "..." } else { core });
        out.push_str(&word[core.len()..]);
    }
    // What follows these words is unique however it looks. The longest come first, so that "serial number" is not cut at "serial".
    for word in ["serial number", "serialnumber", "serial no", "serial", "uuid", "guid"] {
        out = blank_after(&out, word);
    }
    for name in NAMES {
        out = blank_value(&out, name);
    }
    out
}

/// Names whose value, after a colon or an equals sign, is unique or about a user.
const NAMES: &[&str] = &["s/n", "sn", "nqn", "acct", "comm", "exe", "hostname", "name", "user"];

/// Blanks what follows `name` and a separator; a quoted value whole.
fn blank_value(line: &str, name: &str) -> String {
    let lower = line.to_ascii_lowercase();
    let mut out = String::with_capacity(line.len());
    let mut done = 0;
    while let Some(found) = lower[done..].find(name).map(|at| done + at) {
        let end = found + name.len();
        let alone = !lower[..found].ends_with(|c: char| c.is_ascii_alphanumeric());
        let rest = &line[end..];
        let value = rest.trim_start_matches([' ', ':', '=']);
        let separator = &rest[..rest.len() - value.len()];
        out.push_str(&line[done..end]);
        done = end;
        // NVMe's "NQN" has a quoted value behind a space.
        if !alone || !(separator.contains([':', '=']) || name == "nqn" && value.starts_with('"')) {
            continue;
        }
        let length = match value.strip_prefix('"').and_then(|quoted| quoted.find('"')) {
            Some(closing) => closing + 2,
            None => value.find(ends_word).unwrap_or(value.len()),
        };
        out.push_str(separator);
        out.push_str("...");
        done = end + separator.len() + length;
    }
    out.push_str(&line[done..]);
    out
}

fn ends_word(c: char) -> bool {
    c.is_whitespace() || matches!(c, ',' | ';' | '(' | ')' | '[' | ']' | '=' | '"')
}

fn blank_after(line: &str, word: &str) -> String {
    // Only ASCII letters change, so offsets hold in both.
    let lower = line.to_ascii_lowercase();
    let mut out = String::with_capacity(line.len());
    let mut done = 0;
    while let Some(found) = lower[done..].find(word) {
        let end = done + found + word.len();
        let rest = &line[end..];
        let value = rest.trim_start_matches([' ', ':', '=', '#', '"']);
        let start = end + rest.len() - value.len();
        let length = value.find(ends_word).unwrap_or(value.len());
        // "serialize" and "serial port" name no number; the separator tells.
        if !rest.starts_with([' ', ':', '=', '#']) || (word == "serial" && !rest.trim_start().starts_with([':', '=', '#'])) {
            out.push_str(&line[done..end]);
            done = end;
            continue;
        }
        out.push_str(&line[done..start]);
        if length > 0 {
            out.push_str("...");
        }
        done = start + length;
    }
    out.push_str(&line[done..]);
    out
}

fn is_unique(word: &str) -> bool {
    let word = word.strip_prefix("GPU-").or(word.strip_prefix("MIG-")).unwrap_or(word);
    let groups = |separator| word.split(separator).map(str::len).collect::<Vec<_>>();
    let hex = |separator: char| word.bytes().all(|b| b.is_ascii_hexdigit() || b == separator as u8);
    let mac = groups(':') == [2; 6] && hex(':') || groups('-') == [2; 6] && hex('-');
    let serial = groups('-') == [2; 8] && hex('-') || groups(':') == [4; 4] && hex(':') || groups(':') == [2; 20] && hex(':');
    let uuid = groups('-') == [8, 4, 4, 4, 12] && hex('-');
    let network = word.parse::<IpAddr>().is_ok() || word.parse::<SocketAddr>().is_ok();
    mac || serial || uuid || network || word.contains("/home/") || word.starts_with("/root/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_keeps_what_concerns_the_tree_and_nothing_else() {
        let line =
            "BOOT_IMAGE=/vmlinuz root=UUID=1234 ip=10.0.0.1 luks.key=secret pci=realloc iommu=pt intel_iommu=on iommu.strict=1";
        assert_eq!(command_line(line), "pci=realloc iommu=pt intel_iommu=on iommu.strict=1");
    }

    #[test]
    fn hardware_addresses_and_serial_numbers_are_blanked_and_pci_addresses_are_kept() {
        let line = "6,1,2,-;mlx5_core 0000:41:00.0 eth0: MAC 0c:42:a1:00:11:22, GPU-12345678-1234-1234-1234-123456789abc Serial Number: ABC123";
        assert_eq!(blank(line), "6,1,2,-;mlx5_core 0000:41:00.0 eth0: MAC ..., ... Serial Number: ...");
        assert_eq!(log_line("6,1,2,-;usb 1-1: SerialNumber: 12"), None);
        assert_eq!(log_line("6,1,2,-;Kernel command line: pci=x password=y"), None);
    }

    #[test]
    fn what_tells_of_users_hosts_and_networks_is_not_kept() {
        for (line, kept) in [
            ("audit: type=1326 acct=\"alice\" exe=\"/home/alice/bin/lspci\" hostname=box.corp addr=10.1.2.3", None),
            ("systemd[1]: Mounted /home/alice on /dev/nvme0n1p3 pw=hunter2", None),
            (
                "nvme nvme1: new ctrl: NQN \"nqn.2014-08.org:alice-host\", addr 192.168.7.5:4420",
                Some("nvme nvme1: new ctrl: NQN ..., addr ..."),
            ),
            (
                "NVRM: Xid (PCI:0000:41:00): 31, pid=4711, name=alice_train, Ch 8",
                Some("NVRM: Xid (PCI:0000:41:00): 31, pid=4711, name=..., Ch 8"),
            ),
            ("pci 0000:01:00.0: S/N: S4EVNX0R123456", Some("pci 0000:01:00.0: S/N: ...")),
            ("mlx5_core: sn=MT2245X01234 up", Some("mlx5_core: sn=... up")),
            ("mlx5_core eth0: fe80::0e42:a1ff:fe00:1122", Some("mlx5_core eth0: ...")),
            ("vfio: opened by /home/alice/run", Some("vfio: opened by ...")),
            ("pci 0000:00:1f.0: disabling snoop", Some("pci 0000:00:1f.0: disabling snoop")),
            ("pcieport 0000:00:01.0: AER: Corrected error", Some("pcieport 0000:00:01.0: AER: Corrected error")),
        ] {
            assert_eq!(log_line(&format!("6,1,2,-;{line}")), kept.map(|kept| format!("6,1,2,-;{kept}")), "{line}");
        }
    }

    #[test]
    fn the_serial_number_of_a_pci_device_is_blanked() {
        assert_eq!(blank("pci dsn 00-11-22-ff-fe-33-44-55 end"), "pci dsn ... end");
    }
}
