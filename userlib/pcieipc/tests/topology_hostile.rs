// SPDX-License-Identifier: MIT OR Apache-2.0
//! Odd sysfs gives a partial tree and a note, never a crash; no parser can be made to panic.

use std::{
    io,
    path::PathBuf,
    sync::{LazyLock, Mutex},
};

use host_fixtures::Fixture;
use pcieipc::{
    doctor::{self, Case, Moment},
    topology::{Archive, CaptureOptions, Entry, Host, Origin, ReadAt, Source, Topology, aer, capture, import, nccl_xml, uevent},
};
use proptest::prelude::*;

/// Built once: the hosts are large.
fn fixtures() -> &'static [Archive] {
    static HOSTS: LazyLock<Vec<Archive>> = LazyLock::new(build_all);
    &HOSTS
}

fn build_all() -> Vec<Archive> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hosts");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
        .iter()
        .filter(|p| p.extension().is_some_and(|e| e == "toml"))
        .map(|p| Fixture::load(p).unwrap().build().unwrap())
        .collect()
}

/// Everything that reads a host, so that a panic anywhere shows.
fn use_it_all(source: &dyn Source) {
    let moment = Moment::read(source);
    let report = doctor::examine(&Case { since: Some(&moment), later: Some((&moment.tree, 1.0)), ..Case::new(&moment) });
    let _ = doctor::script(&report);
    let _ = nccl_xml(&moment.tree, &moment.host).unwrap();
    serde_json::to_string(&moment.tree).unwrap();
    let count = moment.tree.functions.len();
    for a in 0..count.min(6) {
        for b in 0..count.min(6) {
            let _ = moment.tree.path(a, b);
        }
    }
    let all: Vec<_> = moment.tree.functions.iter().map(|f| f.address).collect();
    let _ = moment.tree.machine_key(&all);
    let _ = moment.tree.rank_tree(&all);
    capture(source, CaptureOptions::default()).write(io::sink()).unwrap();
}

/// Answers some reads with errors or garbage, as told by a sequence of choices.
struct Unruly {
    host: Archive,
    choices: Vec<u8>,
    at: Mutex<usize>,
}

impl Unruly {
    fn next(&self) -> u8 {
        let mut at = self.at.lock().unwrap();
        *at += 1;
        self.choices[*at % self.choices.len()]
    }
    fn fault(&self) -> io::Result<()> {
        match self.next() {
            0..=9 => Err(io::Error::from_raw_os_error(libc::ENODEV)),
            10..=19 => Err(io::Error::from_raw_os_error(libc::EACCES)),
            20..=29 => Err(io::Error::from_raw_os_error(libc::EIO)),
            30..=39 => Err(io::ErrorKind::NotFound.into()),
            _ => Ok(()),
        }
    }
}

impl Source for Unruly {
    fn origin(&self) -> Origin {
        Origin::Live
    }
    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        self.fault()?;
        let mut bytes = self.host.read(path)?;
        match self.next() {
            0..=19 => bytes.truncate(bytes.len() / 2),
            20..=39 => bytes.iter_mut().for_each(|b| *b = b.wrapping_mul(37).wrapping_add(11)),
            40..=44 => bytes.clear(),
            _ => {}
        }
        Ok(bytes)
    }
    fn open(&self, path: &str) -> io::Result<Box<dyn ReadAt>> {
        Ok(Box::new(self.read(path)?))
    }
    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        self.fault()?;
        let mut names = self.host.list(path)?;
        if self.next() < 20 {
            names.push("\u{fffd}junk".into());
            names.push("ffffffff:ff:1f.7".into());
        }
        Ok(names)
    }
    fn link(&self, path: &str) -> io::Result<String> {
        self.fault()?;
        match self.next() {
            0..=19 => Ok("../../../../../../$(reboot)/x".into()),
            20..=29 => Ok(String::new()),
            _ => self.host.link(path),
        }
    }
}

#[test]
fn a_card_that_vanishes_at_any_moment_of_the_reading_leaves_a_tree_of_the_others() {
    struct Vanishing {
        host: Archive,
        after: usize,
        reads: Mutex<usize>,
    }
    impl Vanishing {
        fn check(&self, path: &str) -> io::Result<()> {
            let mut reads = self.reads.lock().unwrap();
            if path.contains("0000:01:00.0") || path.contains("0000:00:01.0/") {
                *reads += 1;
                if *reads > self.after {
                    return Err(io::ErrorKind::NotFound.into());
                }
            }
            Ok(())
        }
    }
    impl Source for Vanishing {
        fn origin(&self) -> Origin {
            Origin::Live
        }
        fn read(&self, path: &str) -> io::Result<Vec<u8>> {
            self.check(path)?;
            self.host.read(path)
        }
        fn open(&self, path: &str) -> io::Result<Box<dyn ReadAt>> {
            self.check(path)?;
            self.host.open(path)
        }
        fn list(&self, path: &str) -> io::Result<Vec<String>> {
            self.check(path)?;
            self.host.list(path)
        }
        fn link(&self, path: &str) -> io::Result<String> {
            self.check(path)?;
            self.host.link(path)
        }
    }
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hosts/healthy-2gpu-direct.toml");
    let host = Fixture::load(&folder).unwrap().build().unwrap();
    let whole = Topology::read(&host).functions.len();
    for after in 0..60 {
        let tree = Topology::read(&Vanishing { host: host.clone(), after, reads: Mutex::new(0) });
        assert!(tree.functions.len() + 2 >= whole, "after {after} reads: {}", tree.functions.len());
        assert!(tree.find("0000:02:00.0".parse().unwrap()).is_some());
    }
}

#[test]
fn no_rights_no_files_and_no_sysfs_are_told_in_notes() {
    let nothing = Archive::new(Origin::Live);
    let tree = Topology::read(&nothing);
    assert!(tree.functions.is_empty() && tree.notes.len() == 1, "{:?}", tree.notes);
    use_it_all(&nothing);
    let mut host = fixtures()[0].clone();
    let configs: Vec<String> = host.entries().map(|(p, _)| p.to_owned()).filter(|p| p.ends_with("/config")).collect();
    for path in &configs {
        host.insert(path, Entry::Refused(libc::EACCES));
    }
    let tree = Topology::read(&host);
    assert_eq!(tree.notes.iter().filter(|n| n.problem.contains("permission denied")).count(), configs.len());
    assert!(!tree.functions.is_empty());
}

/// Every text in some JSON, names of fields too.
fn texts(value: &serde_json::Value, found: &mut Vec<String>) {
    match value {
        serde_json::Value::String(text) => found.push(text.clone()),
        serde_json::Value::Array(values) => values.iter().for_each(|v| texts(v, found)),
        serde_json::Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            found.push(name.clone());
            texts(value, found);
        }),
        _ => {}
    }
}

/// What a terminal would obey.
fn obeyed(text: &str) -> bool {
    text.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\t'))
}

#[test]
fn what_a_terminal_obeys_reaches_no_text_of_tree_host_or_findings_and_no_xml() {
    const EVIL: &str = "\u{1b}]0;owned\u{7}\u{1b}[31m\u{9b}2J\r\u{0}\u{202e}x";
    for host in fixtures() {
        for placed in [0, 1] {
            let mut evil = Archive::new(Origin::Snapshot);
            for (path, entry) in host.entries() {
                match entry {
                    // At the end of each line, or in place of the last word.
                    Entry::File(bytes) if !path.ends_with("/config") && !path.ends_with(".json") => {
                        let lines = String::from_utf8_lossy(bytes)
                            .lines()
                            .map(|line| match (placed, line.rsplit_once(' ')) {
                                (1, Some((start, _))) => format!("{start} {EVIL}\n"),
                                _ => format!("{line}{EVIL}\n"),
                            })
                            .collect::<String>();
                        evil.file(path, lines);
                    }
                    Entry::File(bytes) if path.ends_with(".json") => {
                        let text = String::from_utf8_lossy(bytes).replace("denied", "denied\\u001b[31m");
                        evil.file(path, text);
                    }
                    Entry::Link(target) if path.ends_with("/driver") => {
                        evil.insert(path, Entry::Link(format!("{target}{}", EVIL.replace('\0', ""))))
                    }
                    other => evil.insert(path, other.clone()),
                }
            }
            let folders: Vec<String> = host.entries().filter_map(|(p, _)| p.strip_suffix("/config").map(str::to_owned)).collect();
            for folder in &folders {
                for interface in ["net", "nvme", "drm", "infiniband"] {
                    evil.folder(&format!("{folder}/{interface}/a{}", EVIL.replace(['\0', '/'], "")));
                }
            }
            evil.folder(&format!("sys/bus/pci_express/devices/x{}", EVIL.replace('\0', "")));
            evil.folder(&format!("sys/bus/pci/devices/x{}", EVIL.replace('\0', "")));
            let moment = Moment::read(&evil);
            let report = doctor::examine(&Case { later: Some((&moment.tree, 1.0)), ..Case::new(&moment) });
            let mut all = Vec::new();
            texts(&serde_json::to_value(&moment.tree).unwrap(), &mut all);
            texts(&serde_json::to_value(&moment.host).unwrap(), &mut all);
            texts(&serde_json::to_value(&report).unwrap(), &mut all);
            all.push(doctor::script(&report));
            let xml = nccl_xml(&moment.tree, &moment.host).unwrap();
            all.push(xml.clone());
            let found = all.iter().find(|text| obeyed(text));
            assert!(found.is_none(), "{found:?}");
            let mut reader = quick_xml::Reader::from_str(&xml);
            while reader.read_event().unwrap() != quick_xml::events::Event::Eof {}
        }
    }
}

#[test]
fn each_file_that_holds_garbage_is_named_in_a_note() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hosts");
    let whole = Fixture::load(&folder.join("intel-8gpu-two-sockets.toml")).unwrap().build().unwrap();
    let moment = Moment::read(&whole);
    assert!(moment.tree.notes.is_empty() && moment.host.notes.is_empty(), "{:?} {:?}", moment.tree.notes, moment.host.notes);
    let unprivileged = Fixture::load(&folder.join("unprivileged-user.toml")).unwrap().build().unwrap();
    for (host, last) in [
        (&whole, "numa_node"),
        (&whole, "power_state"),
        (&whole, "resource"),
        (&whole, "uevent"),
        (&whole, "reset_method"),
        (&whole, "aer_dev_fatal"),
        (&whole, "aer_dev_correctable"),
        (&whole, "config"),
        (&whole, "node0/cpulist"),
        (&whole, "physical_package_id"),
        (&whole, "proc/self/limits"),
        (&whole, "proc/uptime"),
        (&whole, "proc/iomem"),
        (&whole, "pcieipc/facts.json"),
        (&whole, "pcieipc/kernel.log"),
        (&whole, "parameters/policy"),
        (&unprivileged, "current_link_speed"),
        (&unprivileged, "current_link_width"),
        (&unprivileged, "max_link_speed"),
    ] {
        let mut host = host.clone();
        let paths: Vec<String> = host.entries().map(|(p, _)| p.to_owned()).filter(|p| p.ends_with(last)).collect();
        let path = paths.last().unwrap_or_else(|| panic!("no fixture has {last}"));
        host.file(path, "\u{fffd}%§ garbage\n");
        let moment = Moment::read(&host);
        let named = moment.tree.notes.iter().chain(&moment.host.notes).any(|n| n.path == *path);
        assert!(named, "{path}: {:?} {:?}", moment.tree.notes, moment.host.notes);
    }
}

#[test]
fn buses_that_form_a_ring_are_cut() {
    // Two bridges, each behind the other's bus, without folders that would tell.
    let mut text = String::new();
    for (bus, below) in [(1, 2), (2, 1)] {
        text.push_str(&format!("0000:{bus:02x}:00.0 PCI bridge: x\n00: 86 80 34 12 07 00 00 00 00 00 04 06 00 00 01 00\n"));
        text.push_str(&format!(
            "10: 00 00 00 00 00 00 00 00 {bus:02x} {below:02x} {below:02x} 00 00 00 00 00\n20: {z}\n30: {z}\n\n",
            z = ["00"; 16].join(" ")
        ));
    }
    let tree = Topology::read(&import::from_text(&text).unwrap());
    assert_eq!(tree.functions.len(), 2);
    assert_eq!(tree.functions.iter().filter(|f| f.parent.is_none()).count(), 1);
    assert!(tree.notes.iter().any(|n| n.problem.contains("ring")), "{:?}", tree.notes);
}

/// Text that is near what the parsers expect.
fn near(parts: &'static [&'static str]) -> impl Strategy<Value = String> {
    prop::collection::vec(
        prop_oneof![4 => prop::sample::select(parts).prop_map(str::to_owned), 1 => ".{0,12}", 1 => "[0-9a-f:. ]{0,20}"],
        0..60,
    )
    .prop_map(|v| v.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: std::env::var("PROPTEST_CASES").ok().and_then(|c| c.parse().ok()).unwrap_or(24), ..ProptestConfig::default() })]

    #[test]
    fn garbage_in_configuration_space_is_no_crash(mut bytes in prop::collection::vec(any::<u8>(), 0..4096), keep in any::<bool>(), which in 0usize..64) {
        let hosts = fixtures();
        let mut host = hosts[which % hosts.len()].clone();
        let configs: Vec<String> = host.entries().map(|(p, _)| p.to_owned()).filter(|p| p.ends_with("/config")).collect();
        if keep && bytes.len() > 64 {
            // A good beginning leads deeper into the lists.
            if let Some(Entry::File(good)) = host.entries().find(|(p, _)| *p == configs[0]).map(|(_, e)| e.clone()) {
                let n = good.len().min(64);
                bytes[..n].copy_from_slice(&good[..n]);
                bytes[6] |= 0x10;
            }
        }
        for path in configs.iter().skip(which % 3).step_by(2) {
            host.file(path, bytes.clone());
        }
        use_it_all(&host);
    }

    #[test]
    fn files_that_fail_or_hold_garbage_are_no_crash(choices in prop::collection::vec(any::<u8>(), 1..200), which in 0usize..64) {
        let hosts = fixtures();
        use_it_all(&Unruly { host: hosts[which % hosts.len()].clone(), choices, at: Mutex::new(0) });
    }

    #[test]
    fn archives_of_garbage_are_refused_or_read(bytes in prop::collection::vec(any::<u8>(), 0..600), flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6), which in 0usize..64) {
        let _ = import::open(bytes.as_slice());
        let hosts = fixtures();
        let mut packed = Vec::new();
        hosts[which % hosts.len()].write(&mut packed).unwrap();
        for (at, byte) in flips {
            let at = at.index(packed.len());
            packed[at] = byte;
        }
        if let Ok(archive) = import::open(packed.as_slice()) {
            let _ = Topology::read(&archive);
        }
    }

    #[test]
    fn text_imports_never_crash(lspci in near(&["0000:01:00.0 3D controller\n", "00: 86 80 34 12 07 00 10 00 00 00 04 06 00 00 01 00\n", "\tNUMA node: ", "\tRegion 1: Memory at ", "f6000000", " (64-bit, prefetchable)", " [size=", "99T]", "\n", "\tIOMMU group: 7\n"]),
                                xml in near(&["<system>", "<cpu numaid=\"0\" affinity=\"ffffffff\">", "<pci busid=\"0000:01:00.0\" class=\"0x030200\" link_width=\"16\">", "</pci>", "</cpu>", "<topology>", "<object type=\"Bridge\" bridge_type=\"0-1\" bridge_pci=\"0000:[00-ff]\">", "<object type=\"PCIDev\" pci_busid=\"0000:01:00.0\" pci_type=\"0302 [10de:2330]\" pci_link_speed=\"63\">", "</object>", "&amp;", "<!--", "\""])) {
        for text in [&lspci, &xml, &format!("<topology>{xml}</topology>"), &format!("<system>{xml}</system>")] {
            if let Ok(archive) = import::from_text(text) {
                use_it_all(&archive);
            }
        }
    }

    #[test]
    fn small_texts_never_crash(text in "\\PC{0,80}", bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = aer::parse(&text);
        let _ = uevent::parse(&bytes);
        let _ = text.parse::<pcieipc::topology::Address>();
        let mut host = fixtures()[0].clone();
        for path in ["proc/self/limits", "proc/iomem", "proc/cpuinfo", "proc/uptime", "pcieipc/facts.json", "pcieipc/kernel.log", "sys/devices/system/node/node0/cpulist"] {
            host.file(path, text.clone());
        }
        let _ = Host::read(&host);
        use_it_all(&host);
    }
}
