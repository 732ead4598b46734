// SPDX-License-Identifier: MIT OR Apache-2.0
//! What calls in flight promise, over shared memory.

mod support;

use std::time::{Duration, Instant};

use pcieipc::{Error, group::Group, reduce::Op};
use support::{PATIENCE, Scratch, options, process, say, sum, threads, value, variables};

fn input(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| value(rank, at)).collect()
}

fn is_the_sum(ranks: usize, buffer: &[f32]) -> bool {
    buffer.iter().enumerate().all(|(at, got)| f64::from(*got) == sum(0..ranks, at))
}

#[test]
fn calls_in_flight_of_all_sizes_are_right_with_and_without_a_helper_thread() {
    for helper_thread in [false, true] {
        threads(
            3,
            |o| (o.helper_thread, o.ring_bytes) = (helper_thread, 64 << 10),
            |group| {
                let mut group = group.unwrap();
                let rank = group.rank();
                for round in 0..10 {
                    let counts = [1, 100, 3000, 100_000, 7, 0, 20_000, 64];
                    let requests =
                        counts.map(|count| group.start_all_reduce(input(rank, count + round), Op::Sum, PATIENCE).unwrap());
                    // A blocking call between them.
                    let mut one = vec![1u64];
                    group.all_reduce(&mut one, Op::Sum, PATIENCE).unwrap();
                    assert_eq!(one, [3]);
                    for request in requests.into_iter().rev() {
                        assert!(is_the_sum(3, &request.wait(&mut group).unwrap()));
                    }
                }
            },
        );
    }
}

#[test]
fn a_helper_thread_ends_a_call_that_nobody_waits_for() {
    threads(
        2,
        |o| o.helper_thread = true,
        |group| {
            let mut group = group.unwrap();
            let rank = group.rank();
            let request = group.start_all_reduce(input(rank, 300_000), Op::Sum, PATIENCE).unwrap();
            let begun = Instant::now();
            while !request.is_done() {
                assert!(begun.elapsed() < PATIENCE, "nobody goes on with it");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(is_the_sum(2, &request.wait(&mut group).unwrap()));
            // Nobody leaves while the other still looks.
            group.barrier(PATIENCE).unwrap();
        },
    );
}

#[test]
fn without_a_helper_a_test_now_and_then_is_enough() {
    threads(
        2,
        |_| (),
        |group| {
            let mut group = group.unwrap();
            let rank = group.rank();
            let request = group.start_all_reduce(input(rank, 300_000), Op::Sum, PATIENCE).unwrap();
            let begun = Instant::now();
            while !request.test(&mut group) {
                assert!(begun.elapsed() < PATIENCE);
                std::thread::yield_now();
            }
            assert!(is_the_sum(2, &request.wait(&mut group).unwrap()));
            group.barrier(PATIENCE).unwrap();
        },
    );
}

#[test]
fn a_peer_that_leaves_ends_every_call_in_flight_with_its_name_also_in_the_helper() {
    for helper_thread in [false, true] {
        threads(
            3,
            |o| o.helper_thread = helper_thread,
            |group| {
                let mut group = group.unwrap();
                if group.rank() == 2 {
                    return;
                }
                let rank = group.rank();
                let first = group.start_all_reduce(input(rank, 100_000), Op::Sum, PATIENCE);
                let second = group.start_all_reduce(input(rank, 10), Op::Sum, PATIENCE);
                for started in [first, second] {
                    let failed = started.map_or_else(|refused| refused, |r| r.wait(&mut group).unwrap_err());
                    // Whoever sees it second may see the other's abort first.
                    let error = &failed.error;
                    assert!(
                        matches!(error, Error::PeerDied { peer: 2, .. } | Error::Aborted { .. } | Error::Argument(_)),
                        "{error}"
                    );
                    assert!(failed.buffers.is_some());
                }
                group.shrink(PATIENCE).unwrap();
                let again = group.start_all_reduce(vec![1u8; 9], Op::Sum, PATIENCE).unwrap();
                assert_eq!(again.wait(&mut group).unwrap(), [2; 9]);
            },
        );
    }
}

#[test]
fn calls_in_flight_when_the_group_ends_are_over_and_their_buffers_come_back() {
    threads(
        2,
        |o| o.helper_thread = o.rank == 0,
        |group| {
            let mut group = group.unwrap();
            if group.rank() == 1 {
                // Gone before the other's call can end.
                group.barrier(PATIENCE).unwrap();
                return;
            }
            group.barrier(PATIENCE).unwrap();
            let request = group.start_all_reduce(vec![1u8; 9], Op::Sum, PATIENCE);
            drop(group);
            if let Ok(request) = request {
                assert!(request.is_done());
            }
        },
    );
}

/// A rank that meets and does nothing else until it is killed.
#[test]
fn idle_process() {
    let Some(variables) = variables("idle_process") else { return };
    let group = Group::meet(options(1, 2, std::path::Path::new(&variables["DIR"]))).unwrap();
    say("met");
    std::thread::sleep(2 * PATIENCE);
    drop(group);
}

#[test]
fn a_rank_that_asks_and_never_waits_is_told_of_a_death_long_before_its_deadline() {
    let scratch = Scratch::new();
    let mut idle = process("idle_process", &[("DIR", scratch.0.display().to_string())]);
    let mut group = Group::meet(options(0, 2, &scratch.0)).unwrap();
    assert_eq!(idle.hear().as_deref(), Some("met"));
    let request = group.start_all_reduce(input(0, 1000), Op::Sum, PATIENCE).unwrap();
    assert!(!request.test(&mut group));
    idle.child.kill().unwrap();
    let begun = Instant::now();
    while !request.test(&mut group) {}
    assert!(begun.elapsed() < PATIENCE / 4, "{:?}", begun.elapsed());
    let error = request.wait(&mut group).unwrap_err().error;
    assert!(matches!(error, Error::PeerDied { rank: 0, peer: 1, .. }), "{error}");
}
