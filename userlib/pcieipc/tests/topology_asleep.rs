// SPDX-License-Identifier: MIT OR Apache-2.0
//! What sleeps is left asleep: to answer some files of sysfs the kernel wakes a function, or the bridges above it.

use std::{collections::BTreeSet, io, path::PathBuf, sync::Mutex};

use host_fixtures::Fixture;
use pcieipc::topology::{Archive, CaptureOptions, Origin, Reach, ReadAt, Source, Topology, capture};

/// Files for which the kernel reads a function's configuration space.
const OF_FUNCTIONS: [&str; 8] = [
    "config",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
    "secondary_bus_number",
    "subordinate_bus_number",
    "resource1_resize",
];
/// And that of a slot's port.
const OF_SLOTS: [&str; 4] = ["adapter", "power", "latch", "attention"];

/// Passes all on and remembers which files were read.
struct Listening {
    host: Archive,
    read: Mutex<BTreeSet<String>>,
}

impl Listening {
    fn note(&self, path: &str) {
        self.read.lock().unwrap().insert(path.into());
    }

    /// Those of some files below a folder, or with it in their path, that were read.
    fn among(&self, folder: &str, files: &[&str]) -> Vec<String> {
        let read = self.read.lock().unwrap();
        let among =
            |path: &&String| path.contains(folder) && path.rsplit_once('/').is_some_and(|(_, file)| files.contains(&file));
        read.iter().filter(among).cloned().collect()
    }
}

impl Source for Listening {
    fn origin(&self) -> Origin {
        Origin::Live
    }
    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        self.note(path);
        self.host.read(path)
    }
    fn open(&self, path: &str) -> io::Result<Box<dyn ReadAt>> {
        self.note(path);
        self.host.open(path)
    }
    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        self.host.list(path)
    }
    fn link(&self, path: &str) -> io::Result<String> {
        self.host.link(path)
    }
}

/// A host with two slots, in which the first one's port and card have these states of power; as everybody sees it, or as root does.
fn host(port: &str, card: &str, root: bool) -> Listening {
    let fixture = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hosts/healthy-2gpu-direct.toml");
    let mut host = Fixture::load(&fixture).unwrap().build().unwrap();
    let folders: Vec<String> = host
        .entries()
        .filter_map(|(path, _)| path.strip_suffix("/uevent"))
        .filter(|p| p.contains("pci0000:00/"))
        .map(str::to_owned)
        .collect();
    for folder in &folders {
        let state = match folder.split_once("0000:00:01.0") {
            Some((_, "")) => port,
            Some(_) => card,
            None => "D0",
        };
        host.file(&format!("{folder}/power_state"), format!("{state}\n"));
        host.file(&format!("{folder}/resource1_resize"), "00000000000fffc0\n");
        for (file, text) in [("current_link_speed", "16.0 GT/s PCIe\n"), ("current_link_width", "16\n")] {
            host.file(&format!("{folder}/{file}"), text);
        }
        for (bridge, bus) in [("0000:00:01.0", 1), ("0000:00:03.0", 2)] {
            if folder.ends_with(bridge) {
                host.file(&format!("{folder}/secondary_bus_number"), format!("{bus}\n"));
                host.file(&format!("{folder}/subordinate_bus_number"), format!("{bus}\n"));
            }
        }
        if !root {
            host.remove(&format!("{folder}/config"));
        }
    }
    for slot in ["1", "2"] {
        host.file(&format!("sys/bus/pci/slots/{slot}/address"), format!("0000:0{slot}:00\n"));
        for file in OF_SLOTS {
            host.file(&format!("sys/bus/pci/slots/{slot}/{file}"), "1\n");
        }
    }
    Listening { host, read: Mutex::default() }
}

/// What was read by all that reads a host, of the first slot's functions and of the slot itself, and of the second's.
fn read_by_all(listening: &Listening) -> [Vec<String>; 4] {
    let tree = Topology::read(listening);
    assert!(tree.find("0000:01:00.0".parse().unwrap()).is_some(), "the card is in the tree all the same");
    for whole_config in [false, true] {
        capture(listening, CaptureOptions { whole_config, ..CaptureOptions::default() });
    }
    [
        listening.among("/0000:00:01.0/", &OF_FUNCTIONS),
        listening.among("/slots/1/", &OF_SLOTS),
        listening.among("/0000:00:03.0/", &OF_FUNCTIONS),
        listening.among("/slots/2/", &OF_SLOTS),
    ]
}

#[test]
fn nothing_is_read_that_wakes_a_card_or_a_bridge_that_sleeps() {
    for root in [false, true] {
        let listening = host("D3cold", "D3cold", root);
        let [card, slot, other, other_slot] = read_by_all(&listening);
        assert_eq!((card, slot), (Vec::new(), Vec::new()));
        // Otherwise this would prove nothing.
        assert!(other.iter().any(|path| path.ends_with("0000:02:00.0/resource1_resize")), "{other:?}");
        assert!(other.iter().any(|path| path.ends_with("current_link_speed")), "{other:?}");
        assert_eq!(other_slot.len(), OF_SLOTS.len(), "the port of this one is awake");
        let tree = Topology::read(&listening);
        assert_eq!(tree.slots.iter().map(|slot| slot.present).collect::<Vec<_>>(), [None, Some(true)]);
        let port = tree.find("0000:00:01.0".parse().unwrap()).unwrap();
        assert_eq!((port.reach, port.children.is_empty()), (Reach::Asleep, false));
    }
}

#[test]
fn a_card_below_a_bridge_that_sleeps_lightly_is_not_asked_and_the_bridge_is() {
    let [below, slot, ..] = read_by_all(&host("D3hot", "D3hot", true));
    assert!(below.iter().any(|path| path.ends_with("0000:00:01.0/config")), "{below:?}");
    assert!(!below.iter().any(|path| path.contains("0000:01:00.0/")), "{below:?}");
    assert_eq!(slot.len(), OF_SLOTS.len());
}

#[test]
fn of_a_host_in_which_all_is_awake_everything_is_read() {
    let [card, slot, ..] = read_by_all(&host("D0", "D0", false));
    for file in OF_FUNCTIONS.iter().filter(|file| !file.ends_with("_resize")) {
        assert!(card.iter().any(|path| path.ends_with(file)), "{file} of {card:?}");
    }
    assert_eq!(slot.len(), OF_SLOTS.len());
}
