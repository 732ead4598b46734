// SPDX-License-Identifier: MIT OR Apache-2.0
//! A follower never shows what is no longer there, and counts lives.

use std::{path::PathBuf, sync::Arc, time::Duration};

use host_fixtures::Fixture;
use pcieipc::{
    plan::Tree,
    topology::{Address, Archive, Change, Follower, Live, Origin, ReadAt, Source, Topology},
};

fn fixture(name: &str) -> Fixture {
    Fixture::load(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hosts").join(format!("{name}.toml")))
        .unwrap()
}

/// A source whose host can be exchanged while it is followed.
#[derive(Clone)]
struct Exchangeable(Arc<std::sync::Mutex<Archive>>);

impl Source for Exchangeable {
    fn origin(&self) -> Origin {
        Origin::Snapshot
    }
    fn read(&self, path: &str) -> std::io::Result<Vec<u8>> {
        self.0.lock().unwrap().read(path)
    }
    fn open(&self, path: &str) -> std::io::Result<Box<dyn ReadAt>> {
        self.0.lock().unwrap().open(path)
    }
    fn list(&self, path: &str) -> std::io::Result<Vec<String>> {
        self.0.lock().unwrap().list(path)
    }
    fn link(&self, path: &str) -> std::io::Result<String> {
        self.0.lock().unwrap().link(path)
    }
}

#[test]
fn a_card_that_leaves_and_returns_has_a_new_generation_and_no_generation_repeats() {
    let changed = fixture("changed-while-looking");
    let (without, with) = (changed.build().unwrap(), changed.build_later().unwrap().unwrap());
    let card: Address = "0000:18:00.0".parse().unwrap();
    let host = Exchangeable(Arc::new(std::sync::Mutex::new(with.clone())));
    let mut follower = Follower::new(Box::new(host.clone()));
    let mut seen = vec![follower.generation(card).unwrap()];
    for _ in 0..3 {
        let version = follower.version();
        *host.0.lock().unwrap() = without.clone();
        let changes = follower.wait(Duration::ZERO).unwrap();
        assert!(changes.iter().any(|c| matches!(c, Change::Removed { address, generation, .. } if *address == card && Some(generation) == seen.last())), "{changes:?}");
        assert_eq!(follower.generation(card), None);
        assert!(follower.tree().find(card).is_none());
        assert!(follower.version() > version);
        *host.0.lock().unwrap() = with.clone();
        let changes = follower.wait(Duration::ZERO).unwrap();
        let generation = follower.generation(card).unwrap();
        assert!(
            changes
                .iter()
                .any(|c| matches!(c, Change::Returned { address, generation: g, .. } if *address == card && *g == generation)),
            "{changes:?}"
        );
        assert!(!seen.contains(&generation));
        seen.push(generation);
    }
    assert!(follower.wait(Duration::ZERO).unwrap().is_empty());
}

#[test]
fn errors_and_links_are_told_with_what_was_added() {
    let storm = fixture("aer-storm");
    let host = Exchangeable(Arc::new(std::sync::Mutex::new(storm.build().unwrap())));
    let mut follower = Follower::new(Box::new(host.clone()));
    let version = follower.version();
    *host.0.lock().unwrap() = storm.build_later().unwrap().unwrap();
    let changes = follower.look();
    assert_eq!(changes.len(), 4, "{changes:?}");
    assert!(changes.iter().all(|c| matches!(c, Change::Errors { .. })));
    assert_eq!(follower.version(), version, "errors alone do not void plans");
}

#[test]
fn a_card_that_falls_off_is_told_once() {
    let mut described = fixture("gpu-fallen-off");
    let fallen = described.build().unwrap();
    described.tree = described.tree.replace(" dead", "");
    let host = Exchangeable(Arc::new(std::sync::Mutex::new(described.build().unwrap())));
    let mut follower = Follower::new(Box::new(host.clone()));
    *host.0.lock().unwrap() = fallen;
    let fell = |changes: &[Change]| changes.iter().filter(|c| matches!(c, Change::FellOff { .. })).count();
    assert_eq!(fell(&follower.look()), 1);
    assert_eq!(fell(&follower.look()), 0);
}

/// Writes an archive as a folder that looks like a host's root.
fn unfold(archive: &Archive, root: &std::path::Path) {
    use pcieipc::topology::Entry;
    for (path, entry) in archive.entries() {
        let file = root.join(path);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        match entry {
            Entry::File(bytes) => std::fs::write(&file, bytes).unwrap(),
            Entry::Link(target) => std::os::unix::fs::symlink(target, &file).unwrap(),
            Entry::Refused(_) => {}
        }
    }
}

#[test]
fn a_card_that_was_away_between_two_looks_is_told_as_returned() {
    let root = tempfile::tempdir().unwrap();
    unfold(&fixture("healthy-2gpu-direct").build().unwrap(), root.path());
    let mut follower = Follower::new(Box::new(Live::at(root.path())));
    let card: Address = "0000:02:00.0".parse().unwrap();
    let before = follower.generation(card).unwrap();
    assert!(follower.look().is_empty());
    // Removed and created again, everything as it was: another folder.
    let folder = root.path().join("sys/devices/pci0000:00/0000:00:03.0/0000:02:00.0");
    let aside = root.path().join("aside");
    std::fs::rename(&folder, &aside).unwrap();
    std::fs::create_dir(&folder).unwrap();
    for file in std::fs::read_dir(&aside).unwrap() {
        let file = file.unwrap();
        std::fs::rename(file.path(), folder.join(file.file_name())).unwrap();
    }
    let changes = follower.look();
    assert!(matches!(changes.as_slice(), [Change::Removed { .. }, Change::Returned { .. }]), "{changes:?}");
    assert!(follower.generation(card).unwrap() > before);
}

#[test]
fn ranks_are_grouped_as_the_switches_group_their_cards() {
    let tree = Topology::read(&fixture("intel-8gpu-two-sockets").build().unwrap());
    let gpus: Vec<Address> = tree.peers().into_iter().map(|i| tree.functions[i].address).collect();
    assert_eq!(tree.rank_tree(&gpus).unwrap().to_string(), "(((0 1) (2 3)) ((4 5) (6 7)))");
    let mixed: Vec<Address> = [0, 4, 1, 5].map(|i| gpus[i]).to_vec();
    assert_eq!(tree.rank_tree(&mixed).unwrap().to_string(), "((0 2) (1 3))");
    assert_eq!(tree.rank_tree(&gpus[..1]).unwrap(), Tree::Part(vec![Tree::Leaf(0)]));
    assert!(tree.rank_tree(&["0000:ff:00.0".parse().unwrap()]).is_none());
    let direct = Topology::read(&fixture("healthy-2gpu-direct").build().unwrap());
    let two: Vec<Address> = direct.peers().into_iter().map(|i| direct.functions[i].address).collect();
    assert_eq!(direct.rank_tree(&two).unwrap().to_string(), "(0 1)");
}

#[test]
fn the_key_of_a_machine_changes_with_lanes_and_not_with_idle_speed_or_addresses() {
    let key = |change: &dyn Fn(String) -> String| {
        let mut described = fixture("healthy-2gpu-direct");
        described.tree = change(described.tree);
        let tree = Topology::read(&described.build().unwrap());
        let peers: Vec<Address> = tree.peers().into_iter().map(|i| tree.functions[i].address).collect();
        tree.machine_key(&peers)
    };
    let same = key(&|t| t);
    assert_eq!(same, key(&|t| t.replacen("gpu 00.0 id=10de:26b1 link=4x16", "gpu 00.0 id=10de:26b1 link=4x16/1x16", 1)), "idle");
    assert_eq!(same, key(&|t| t.replace("root 0000:00", "root 0000:40")), "addresses");
    assert_ne!(same, key(&|t| t.replacen("gpu 00.0 id=10de:26b1 link=4x16", "gpu 00.0 id=10de:26b1 link=4x16/4x8", 1)), "lanes");
}

#[test]
fn the_links_above_ranks_are_those_of_the_tree_now_and_shared_ones_are_shared() {
    let tree = Topology::read(&fixture("intel-8gpu-two-sockets").build().unwrap());
    let gpus: Vec<Address> = tree.peers().into_iter().map(|i| tree.functions[i].address).collect();
    let ways = tree.ways(&gpus).unwrap();
    assert!(ways.is_sound(8), "{ways:?}");
    // Two GPUs below each switch: a link each, and the uplink that both pass.
    assert_eq!(ways.links.len(), 12);
    assert!(ways.up.iter().all(|way| way.len() == 2), "{ways:?}");
    assert_eq!(ways.up[0][1], ways.up[1][1]);
    assert_ne!(ways.up[0][1], ways.up[2][1]);
    let mut described = fixture("intel-8gpu-two-sockets");
    described.tree = described.tree.replacen("gpu 00.0 link=5x16", "gpu 00.0 link=5x16/5x4", 1);
    let worse = Topology::read(&described.build().unwrap()).ways(&gpus).unwrap();
    let slower: Vec<usize> = (0..8).filter(|r| worse.links[worse.up[*r][0]] < ways.links[ways.up[*r][0]]).collect();
    assert_eq!(slower, [0]);
    assert!(tree.ways(&["0000:ff:00.0".parse().unwrap()]).is_none());
}

#[test]
fn a_look_at_some_functions_sees_their_links_and_all_that_comes_and_goes() {
    let mut described = fixture("intel-8gpu-two-sockets");
    let whole = described.build().unwrap();
    let host = Exchangeable(Arc::new(std::sync::Mutex::new(whole.clone())));
    let mut follower = Follower::new(Box::new(host.clone()));
    let gpus: Vec<Address> = follower.tree().peers().into_iter().map(|i| follower.tree().functions[i].address).collect();
    assert!(follower.look_at(&gpus[..2]).is_empty());
    described.tree = described.tree.replacen("gpu 00.0 link=5x16", "gpu 00.0 link=5x16/5x4", 1);
    *host.0.lock().unwrap() = described.build().unwrap();
    // Somebody else's link is nobody's concern here.
    assert!(follower.look_at(&gpus[1..2]).is_empty());
    let changes = follower.look_at(&gpus[..2]);
    assert!(matches!(&changes[..], [Change::Link { address, .. }] if *address == gpus[0]), "{changes:?}");
    let mut without = described.build().unwrap();
    let folder = follower.tree().find(gpus[1]).unwrap().path.clone();
    without.remove(&format!("sys/bus/pci/devices/{}", gpus[1]));
    without.remove(&folder);
    *host.0.lock().unwrap() = without;
    let changes = follower.look_at(&gpus[..2]);
    assert!(changes.iter().any(|c| matches!(c, Change::Removed { address, .. } if *address == gpus[1])), "{changes:?}");
    assert!(follower.look_at(&gpus[..2]).is_empty(), "gone is gone");
    *host.0.lock().unwrap() = whole;
    let changes = follower.look_at(&gpus[..2]);
    assert!(changes.iter().any(|c| matches!(c, Change::Returned { address, .. } if *address == gpus[1])), "{changes:?}");
}
