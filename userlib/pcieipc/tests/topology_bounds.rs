// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a hostile file may ask for is bounded: work grows with its size and not with its square, and past a number there is a typed error.

use std::{
    fmt::Write,
    sync::mpsc,
    time::{Duration, Instant},
};

use pcieipc::{
    doctor::{self, Case, Moment},
    topology::{Archive, Origin, Topology, import, nccl_xml},
};

/// Far above what a loaded machine needs for work that is linear, and far below what the square of it would take.
const HANG: Duration = Duration::from_secs(900);

/// Runs it in a thread, so that a hang fails the test and does not hang it.
#[track_caller]
fn ends<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, waiting) = mpsc::channel();
    let start = Instant::now();
    std::thread::spawn(move || done.send(work()));
    waiting.recv_timeout(HANG).unwrap_or_else(|e| panic!("{e} after {:?}", start.elapsed()))
}

/// Everything that is done with a host, less what grows with the square by its nature (the matrix).
fn all_of(archive: &Archive) -> usize {
    let moment = Moment::read(archive);
    let report = doctor::examine(&Case { since: Some(&moment), later: Some((&moment.tree, 1.0)), ..Case::new(&moment) });
    let _ = doctor::script(&report);
    let _ = nccl_xml(&moment.tree, &moment.host).unwrap();
    moment.tree.functions.len()
}

fn address(number: usize) -> String {
    format!("{:04x}:{:02x}:{:02x}.{:x}", number >> 16, number >> 8 & 0xff, number >> 3 & 0x1f, number & 7)
}

#[test]
fn a_file_with_as_many_gpus_as_are_allowed_is_examined_and_one_with_more_is_refused() {
    let xml = |count: usize| {
        let mut text = String::from("<system version=\"1\"><cpu numaid=\"0\" affinity=\"ff\">");
        for number in 0..count {
            // Each a card of its own below one switch.
            let address = address((number << 3) & 0xffff | number >> 13 << 16);
            let _ = write!(
                text,
                "<pci busid=\"{address}\" class=\"0x030200\" link_width=\"{}\" link_speed=\"16.0 GT/s PCIe\"/>",
                1 << (number % 5)
            );
        }
        text + "</cpu></system>"
    };
    let allowed = import::from_text(&xml(65_536)).unwrap();
    assert_eq!(ends(move || all_of(&allowed)), 65_536);
    let refused = import::from_text(&xml(65_537)).unwrap_err();
    assert!(matches!(refused, import::ImportError::TooManyFunctions), "{refused}");
    assert!(refused.to_string().contains("65536"), "{refused}");
}

#[test]
fn chains_of_bridges_longer_than_any_host_s_are_cut_with_a_note() {
    let mut archive = Archive::new(Origin::Snapshot);
    // Each claims to hang from the one before, in a folder that need not be there.
    for number in 0..20_000usize {
        let above = if number == 0 { "pci0000:00".to_owned() } else { address(number * 8 - 8) };
        let own = address(number * 8);
        archive.insert(
            &format!("sys/bus/pci/devices/{own}"),
            pcieipc::topology::Entry::Link(format!("../../../devices/{above}/{own}")),
        );
        let class = if number % 3 == 2 { "30200" } else { "60400" };
        archive.file(&format!("sys/devices/{above}/{own}/uevent"), format!("PCI_CLASS={class}\nPCI_ID=10DE:2330\n"));
    }
    let tree = ends(move || {
        all_of(&archive);
        Topology::read(&archive)
    });
    assert_eq!(tree.functions.len(), 20_000);
    let deepest = (0..tree.functions.len()).map(|i| tree.ancestors(i).count()).max().unwrap();
    assert_eq!(deepest, 64);
    assert!(tree.notes.iter().any(|n| n.problem.contains("more than 64 bridges")), "{:?}", tree.notes.first());
}

#[test]
fn many_functions_above_which_the_buses_form_a_ring_are_each_looked_at_once() {
    let mut text = String::new();
    // Two bridges behind each other's bus, and before them in the order of addresses all that fits onto their buses.
    for number in 0..8192usize {
        let bus = 1 + number / 4096;
        let (device, function) = (number / 8 % 32, number % 8);
        let bridge = number % 256 == 255 && number / 256 % 16 == 15;
        let kind = if bridge { "01" } else { "00" };
        let class = if bridge { "04 06" } else { "02 03" };
        let _ = write!(
            text,
            "{:04x}:{bus:02x}:{device:02x}.{function:x} x\n00: de 10 30 23 07 00 00 00 00 00 {class} 00 00 {kind} 00\n",
            number % 4096 / 256
        );
        let below = 3 - bus;
        let _ = write!(
            text,
            "10: 00 00 00 00 00 00 00 00 {bus:02x} {below:02x} {below:02x} 00 00 00 00 00\n20: {z}\n30: {z}\n\n",
            z = ["00"; 16].join(" ")
        );
    }
    let archive = import::from_text(&text).unwrap();
    ends(move || all_of(&archive));
}

#[test]
fn a_second_look_that_has_lost_everything_is_taken_apart_in_time() {
    let mut archive = Archive::new(Origin::Snapshot);
    for number in 0..100_000usize {
        archive.file(&format!("sys/devices/pci0000:00/{number}/vendor"), "x");
    }
    archive.folder("sys/bus/pci/devices");
    archive.add_second_look(&Archive::new(Origin::Snapshot), 1.0);
    let (second, seconds) = ends(move || archive.second_look()).unwrap();
    assert!(seconds > 0.0);
    assert!(!second.entries().any(|(path, _)| path.starts_with("sys/devices")));
}
