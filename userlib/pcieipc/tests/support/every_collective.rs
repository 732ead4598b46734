// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every collective of a group once, compared with what it promises: for whatever carries the records.

use std::time::Duration;

use pcieipc::{group::Group, reduce::Op};

/// What rank `rank` has at `at`: no two are alike.
fn value(rank: usize, at: usize) -> i64 {
    (rank * 1_000_003 + at) as i64
}

/// Calls every collective with `count` elements, or blocks of so many; all ranks of the group do.
pub fn every_collective(group: &mut Group, count: usize, patience: Duration) {
    let (n, rank) = (group.ranks(), group.rank());
    let total = |at: usize| (0..n).map(|r| value(r, at)).sum::<i64>();
    let of = |rank: usize, from: usize| (from..from + count).map(|at| value(rank, at)).collect::<Vec<_>>();
    let own: Vec<i64> = (0..n * count).map(|at| value(rank, at)).collect();
    let root = count % n;

    let mut sum = vec![-1; count];
    group.all_reduce_into(&own[..count], &mut sum, Op::Sum, patience).unwrap();
    assert_eq!(sum, (0..count).map(total).collect::<Vec<_>>(), "all-reduce, {count}");

    let mut block = vec![-1; count];
    group.reduce_scatter(&own, &mut block, Op::Sum, patience).unwrap();
    assert_eq!(block, (0..count).map(|i| total(rank * count + i)).collect::<Vec<_>>(), "reduce-scatter, {count}");

    let mut all = vec![-1; n * count];
    group.all_gather(&own[..count], &mut all, patience).unwrap();
    assert_eq!(all, (0..n).flat_map(|r| of(r, 0)).collect::<Vec<_>>(), "all-gather, {count}");

    all.fill(-1);
    group.all_to_all(&own, &mut all, patience).unwrap();
    assert_eq!(all, (0..n).flat_map(|r| of(r, rank * count)).collect::<Vec<_>>(), "all-to-all, {count}");

    let mut at_root = vec![-1; if rank == root { count } else { 0 }];
    group.reduce(&own[..count], &mut at_root, Op::Max, root, patience).unwrap();
    assert!(rank != root || at_root == of(n - 1, 0), "reduce, {count}");

    let mut buffer = of(rank, 0);
    group.broadcast(&mut buffer, root, patience).unwrap();
    assert_eq!(buffer, of(root, 0), "broadcast, {count}");

    // Around in a circle: each sends to the next, the first one sends first.
    if n > 1 {
        let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
        let mut buffer = vec![-1; count];
        if rank == 0 {
            group.send(&own[..count], next, patience).unwrap();
        }
        group.receive(&mut buffer, before, patience).unwrap();
        if rank != 0 {
            group.send(&own[..count], next, patience).unwrap();
        }
        assert_eq!(buffer, of(before, 0), "send and receive, {count}");
    }

    let mut registered = group.register::<i64>(count, patience).unwrap();
    registered.copy_from_slice(&own[..count]);
    group.all_reduce_registered(&mut registered, Op::Sum, patience).unwrap();
    assert_eq!(registered.to_vec(), sum, "all-reduce of registered buffers, {count}");

    let mut registered = group.register::<i64>(n * count, patience).unwrap();
    registered.copy_from_slice(&own);
    block.fill(-1);
    group.reduce_scatter_registered(&mut registered, &mut block, Op::Sum, patience).unwrap();
    assert_eq!(block, (0..count).map(|i| total(rank * count + i)).collect::<Vec<_>>(), "reduce-scatter of registered, {count}");

    registered.fill(-1);
    registered[rank * count..][..count].copy_from_slice(&own[..count]);
    group.all_gather_registered(&mut registered, patience).unwrap();
    assert_eq!(registered.to_vec(), (0..n).flat_map(|r| of(r, 0)).collect::<Vec<_>>(), "all-gather of registered, {count}");

    registered.copy_from_slice(&own);
    group.broadcast_registered(&mut registered, root, patience).unwrap();
    assert_eq!(
        registered.to_vec(),
        (0..n * count).map(|at| value(root, at)).collect::<Vec<_>>(),
        "broadcast of registered, {count}"
    );

    // Several in flight, of different kinds, waited for in another order than they were begun.
    let first = group.start_all_reduce(of(rank, 0), Op::Sum, patience).unwrap();
    let second = group.start_broadcast(of(rank, 0), root, patience).unwrap();
    let third = group.start_all_gather((of(rank, 0), vec![-1; n * count]), patience).unwrap();
    assert_eq!(third.wait(group).unwrap().1, (0..n).flat_map(|r| of(r, 0)).collect::<Vec<_>>(), "in flight, {count}");
    assert_eq!(first.wait(group).unwrap(), sum, "in flight, {count}");
    assert_eq!(second.wait(group).unwrap(), of(root, 0), "in flight, {count}");

    group.barrier(patience).unwrap();
}
