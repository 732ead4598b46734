// SPDX-License-Identifier: MIT OR Apache-2.0
//! A group that follows the PCIe tree learns of changes and plans anew, all ranks alike.

#[path = "support/changing.rs"]
mod changing;
mod support;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use changing::Changing;
use host_fixtures::Fixture;
use pcieipc::{
    Error,
    plan::Algorithm,
    reduce::Op,
    topology::{Address, Change, Topology},
};
use support::{PATIENCE, sum, threads, value};

#[test]
fn ranks_plan_by_switches_and_learn_that_a_link_lost_lanes() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hosts/intel-8gpu-two-sockets.toml");
    let mut described = Fixture::load(&path).unwrap();
    let host = Changing::new(described.build().unwrap());
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
            assert!(matches!(
                group.follow_tree_of(pcieipc::group::Host::of(host.clone()), vec![gpus[0]]),
                Err(Error::Argument(_))
            ));
            assert!(group.replan(PATIENCE).unwrap().is_none(), "nobody follows a tree yet");
            group.follow_tree_of(pcieipc::group::Host::of(host.clone()), four.clone()).unwrap();
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
                host.change(worse.clone());
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

#[test]
fn a_group_with_a_tree_that_was_given_shrinks_to_what_the_tree_says_of_those_left() {
    use pcieipc::plan::Tree;
    // Who sees the loss first aborts the call of all; nobody may be in the first call any more by then.
    let all_had_the_sum = std::sync::Barrier::new(4);
    threads(
        4,
        |o| {
            o.executor.algorithm = Some(Algorithm::Hierarchical);
            o.executor.tree = Some(Tree::groups(&[2, 2]));
        },
        |group| {
            let mut group = group.unwrap();
            let rank = group.rank();
            let reduce = |group: &mut pcieipc::group::Group, among: &[usize]| {
                let mut buffer: Vec<f32> = (0..5000).map(|at| value(rank, at)).collect();
                let result = group.all_reduce(&mut buffer, Op::Sum, PATIENCE);
                result.map(|()| {
                    let right = |(at, got): (usize, &f32)| (f64::from(*got) - sum(among.iter().copied(), at)).abs() < 1e-3;
                    assert!(buffer.iter().enumerate().all(right), "{among:?}");
                })
            };
            reduce(&mut group, &[0, 1, 2, 3]).unwrap();
            all_had_the_sum.wait();
            if rank == 1 {
                return;
            }
            reduce(&mut group, &[]).unwrap_err();
            group.shrink(PATIENCE).unwrap();
            assert_eq!(group.members(), [0, 2, 3]);
            reduce(&mut group, &[0, 2, 3]).unwrap();
        },
    );
}

const MEASURED: pcieipc::tune::Calibration = pcieipc::tune::Calibration {
    step_ns: 20_000,
    hop_ns: 20_000,
    processors: 4,
    megabytes: [9_000, 9_000, 9_000, 9_000, 3_000, 30_000],
};

#[test]
fn tuned_ranks_choose_alike_and_change_no_bit_before_and_after_they_learn_the_tree() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hosts/intel-8gpu-two-sockets.toml");
    let host = Changing::new(Fixture::load(&path).unwrap().build().unwrap());
    let tree = Topology::read(&host);
    let gpus: Vec<Address> = tree.peers().into_iter().map(|i| tree.functions[i].address).collect();
    let four = vec![gpus[0], gpus[4], gpus[1], gpus[5]];
    let sums = |calibration| {
        threads(
            4,
            |o| o.executor.calibration = calibration,
            |group| {
                let mut group = group.unwrap();
                let rank = group.rank();
                let mut bits = Vec::new();
                let mut reduce_all = |group: &mut pcieipc::group::Group| {
                    for count in [1, 3000, 20_000, 300_000] {
                        let mut buffer: Vec<f32> = (0..count).map(|at| value(rank, at) / 3.0).collect();
                        group.all_reduce(&mut buffer, Op::Sum, PATIENCE).unwrap();
                        bits.extend(buffer.iter().map(|b| b.to_bits()));
                    }
                };
                reduce_all(&mut group);
                group.follow_tree_of(pcieipc::group::Host::of(host.clone()), four.clone()).unwrap();
                assert_eq!(group.replan(PATIENCE).unwrap().unwrap().to_string(), "((0 2) (1 3))");
                reduce_all(&mut group);
                bits
            },
        )
    };
    let (tuned, usual) = (sums(Some(MEASURED)), sums(None));
    assert!(tuned.iter().all(|bits| *bits == usual[0]));
}

#[test]
fn ranks_with_other_calibrations_do_not_meet() {
    let results = threads(
        2,
        |o| o.executor.calibration = Some(pcieipc::tune::Calibration { step_ns: 1 + o.rank as u32, ..MEASURED }),
        |group| group.map(drop),
    );
    for result in results {
        assert!(matches!(result, Err(Error::Mismatch { .. } | Error::Meeting(_))), "{result:?}");
    }
    let impossible = pcieipc::tune::Calibration { processors: 0, ..MEASURED };
    let results = threads(2, |o| o.executor.calibration = Some(impossible), |group| group.map(drop));
    assert!(results.iter().all(|r| matches!(r, Err(Error::Argument(_)))), "{results:?}");
}
