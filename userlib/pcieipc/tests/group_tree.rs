// SPDX-License-Identifier: MIT OR Apache-2.0
//! A group that follows the PCIe tree learns of changes and plans anew, all ranks alike.

mod support;

use std::{
    io,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use host_fixtures::Fixture;
use pcieipc::{
    Error,
    plan::Algorithm,
    reduce::Op,
    topology::{Address, Archive, Change, Origin, ReadAt, Source, Topology},
};
use support::{PATIENCE, sum, threads, value};

/// A host that changes when all ranks look at the same one.
#[derive(Clone)]
struct Host(Arc<Mutex<Archive>>);

impl Source for Host {
    fn origin(&self) -> Origin {
        Origin::Snapshot
    }
    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        self.0.lock().unwrap().read(path)
    }
    fn open(&self, path: &str) -> io::Result<Box<dyn ReadAt>> {
        self.0.lock().unwrap().open(path)
    }
    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        self.0.lock().unwrap().list(path)
    }
    fn link(&self, path: &str) -> io::Result<String> {
        self.0.lock().unwrap().link(path)
    }
}

#[test]
fn ranks_plan_by_switches_and_learn_that_a_link_lost_lanes() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hosts/intel-8gpu-two-sockets.toml");
    let mut described = Fixture::load(&path).unwrap();
    let host = Host(Arc::new(Mutex::new(described.build().unwrap())));
    let tree = Topology::read(&host);
    let gpus: Vec<Address> = tree.peers().into_iter().map(|i| tree.functions[i].address).collect();
    let four = vec![gpus[0], gpus[1], gpus[4], gpus[5]];
    described.tree = described.tree.replacen("gpu 00.0 link=5x16", "gpu 00.0 link=5x16/5x4", 1);
    let worse = described.build().unwrap();
    let gate = std::sync::Barrier::new(4);
    threads(
        4,
        |o| o.executor.algorithm = Some(Algorithm::Hierarchical),
        |group| {
            let mut group = group.unwrap();
            let rank = group.rank();
            assert!(matches!(group.follow_tree_of(Box::new(host.clone()), vec![gpus[0]]), Err(Error::Argument(_))));
            assert!(group.replan(PATIENCE).unwrap().is_none(), "nobody follows a tree yet");
            group.follow_tree_of(Box::new(host.clone()), four.clone()).unwrap();
            assert!(group.tree_changed());
            let check = |group: &mut pcieipc::group::Group| {
                let mut buffer: Vec<f32> = (0..5000).map(|at| value(rank, at)).collect();
                group.all_reduce(&mut buffer, Op::Sum, PATIENCE).unwrap();
                assert!(buffer.iter().enumerate().all(|(at, got)| (f64::from(*got) - sum(0..4, at)).abs() < 1e-3));
            };
            check(&mut group);
            assert_eq!(group.replan(PATIENCE).unwrap().unwrap().to_string(), "((0 1) (2 3))");
            assert!(!group.tree_changed());
            check(&mut group);
            // Nobody may still be reading the old tree for the first time.
            gate.wait();
            if rank == 0 {
                *host.0.lock().unwrap() = worse.clone();
            }
            let start = Instant::now();
            while !group.tree_changed() && start.elapsed() < Duration::from_secs(30) {
                std::thread::sleep(Duration::from_millis(10));
            }
            assert!(group.tree_changed());
            let changes = group.tree_changes();
            assert!(changes.iter().any(|c| matches!(c, Change::Link { address, .. } if *address == gpus[0])), "{changes:?}");
            group.replan(PATIENCE).unwrap();
            assert!(!group.tree_changed());
            check(&mut group);
        },
    );
}
