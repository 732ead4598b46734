// SPDX-License-Identifier: MIT OR Apache-2.0
//! On the same virtual machines, at the same moment, pcieipc, lspci and hwloc say the same, but for the differences that
//! docs/topology.md lists.

use std::{collections::BTreeSet, fs::File, path::PathBuf};

use pcieipc::{
    doctor::{self, Case, Moment},
    topology::{Address, Function, Kind, Topology, import, nccl_xml},
};

const HOSTS: [&str; 5] = ["nested-switches", "two-host-bridges", "iommu-sriov", "degraded-links", "hot-plug"];

fn read(host: &str, file: &str) -> Moment {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/qemu").join(host).join(file);
    Moment::read(&import::open(File::open(&path).unwrap()).unwrap())
}

fn addresses(tree: &Topology) -> BTreeSet<Address> {
    tree.functions.iter().map(|f| f.address).collect()
}

fn parent(tree: &Topology, function: &Function) -> Option<Address> {
    function.parent.map(|p| tree.functions[p].address)
}

#[test]
fn lspci_shows_the_same_tree_links_drivers_and_groups() {
    for host in HOSTS {
        let (ours, theirs) = (read(host, "host.tar.gz").tree, read(host, "lspci.txt").tree);
        assert!(ours.functions.len() >= 8, "{host}");
        assert_eq!(addresses(&ours), addresses(&theirs), "{host}");
        for function in &ours.functions {
            let other = theirs.find(function.address).unwrap();
            let at = format!("{host} {}", function.address);
            assert_eq!(parent(&ours, function), parent(&theirs, other), "{at}");
            assert_eq!(function.root, other.root, "{at}");
            assert_eq!(function.driver, other.driver, "{at}");
            assert_eq!(function.iommu_group, other.iommu_group, "{at}");
            assert_eq!(function.buses, other.buses, "{at}");
            assert_eq!(function.kind, other.kind, "{at}");
            assert_eq!(function.capabilities, other.capabilities, "{at}");
            // lspci does not tell a virtual function from a physical one, and its ids read as ones.
            if function.physical_function.is_none() {
                assert_eq!(function.identity.vendor, other.identity.vendor, "{at}");
                assert_eq!(function.identity.device, other.identity.device, "{at}");
            }
            for (a, b) in function.bars.iter().zip(&other.bars) {
                assert_eq!((a.index, a.start, a.size, a.wide, a.io), (b.index, b.start, b.size, b.wide, b.io), "{at}");
            }
        }
    }
}

#[test]
fn hwloc_shows_the_same_tree_and_bandwidths() {
    let mut compared = 0;
    for host in HOSTS {
        let (ours, theirs) = (read(host, "host.tar.gz").tree, read(host, "hwloc.xml").tree);
        assert_eq!(addresses(&ours), addresses(&theirs), "{host}");
        for (index, function) in ours.functions.iter().enumerate() {
            let other = theirs.find(function.address).unwrap();
            let at = format!("{host} {}", function.address);
            assert_eq!(parent(&ours, function), parent(&theirs, other), "{at}");
            assert_eq!(function.root, other.root, "{at}");
            assert_eq!(function.kind, other.kind, "{at}");
            let theirs = theirs.position(function.address).and_then(|i| theirs.hop(i)).and_then(|h| h.gbps());
            if let (Some(a), Some(b)) = (ours.hop(index).and_then(|h| h.gbps()), theirs) {
                assert!((a - b).abs() / a < 0.02, "{at}: {a} and {b} GB/s");
                compared += 1;
            }
        }
    }
    assert!(compared >= 20, "{compared}");
}

#[test]
fn our_export_for_nccl_is_read_back_as_the_same_tree_of_cards() {
    for host in HOSTS {
        let ours = read(host, "host.tar.gz");
        let back = Topology::read(&import::from_text(&nccl_xml(&ours.tree, &ours.host).unwrap()).unwrap());
        let cards = |t: &Topology| -> BTreeSet<Address> {
            t.functions
                .iter()
                .filter(|f| matches!(f.kind, Kind::Gpu | Kind::Nic | Kind::Accelerator | Kind::Fpga))
                .map(|f| f.address)
                .collect()
        };
        assert_eq!(cards(&ours.tree), cards(&back), "{host}");
        for address in cards(&back) {
            let switches = |t: &Topology| -> Vec<Address> {
                let index = t.position(address).unwrap();
                t.ancestors(index).filter(|i| t.functions[*i].kind == Kind::SwitchUp).map(|i| t.functions[i].address).collect()
            };
            assert_eq!(switches(&ours.tree), switches(&back), "{host} {address}");
        }
    }
}

#[test]
fn distances_in_the_machines_are_those_that_qemu_was_told() {
    let distance = |host: &str, a: &str, b: &str| {
        let tree = read(host, "host.tar.gz").tree;
        let index = |text: &str| tree.position(text.parse().unwrap()).unwrap();
        tree.path(index(a), index(b)).unwrap().distance.letters()
    };
    assert_eq!(distance("nested-switches", "0000:03:00.0", "0000:04:00.0"), "PIX");
    assert_eq!(distance("nested-switches", "0000:0a:00.0", "0000:0b:00.0"), "PIX");
    assert_eq!(distance("nested-switches", "0000:0a:00.0", "0000:0c:00.0"), "PXB");
    assert_eq!(distance("nested-switches", "0000:03:00.0", "0000:05:00.0"), "PHB");
    assert_eq!(distance("two-host-bridges", "0000:01:00.0", "0000:43:00.0"), "SYS");
    let tree = read("two-host-bridges", "host.tar.gz").tree;
    assert_eq!(tree.find("0000:43:00.0".parse().unwrap()).unwrap().numa_node, Some(1));
    assert_eq!((tree.socket(0), tree.socket(1)), (Some(0), Some(1)));
}

#[test]
fn the_doctor_finds_in_the_machines_what_was_done_to_them() {
    let findings = |host: &str| -> BTreeSet<String> {
        let moment = read(host, "host.tar.gz");
        let report = doctor::examine(&Case::new(&moment));
        // Limits and the missing module are those of every machine here.
        let ours = report.findings.into_iter().filter(|f| !f.at.is_empty());
        ours.map(|f| format!("{}@{}", f.id, f.at[0])).collect()
    };
    let set = |names: &[&str]| -> BTreeSet<String> { names.iter().map(|n| (*n).to_owned()).collect() };
    assert_eq!(
        findings("degraded-links"),
        set(&["link-speed-reduced@0000:02:00.0", "link-width-reduced@0000:01:00.0", "relaxed-ordering@0000:01:00.0"])
    );
    assert_eq!(findings("hot-plug"), set(&[]));
    assert_eq!(findings("two-host-bridges"), set(&[]));
    let sriov = findings("iommu-sriov");
    for expected in ["iommu-strict@0000:03:00.0", "sriov-resources@0000:05:00.0", "sriov-resources@0000:06:00.0"] {
        assert!(sriov.contains(expected), "{sriov:?}");
    }
}
