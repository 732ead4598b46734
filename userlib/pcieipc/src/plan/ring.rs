// SPDX-License-Identifier: MIT OR Apache-2.0
//! Algorithms in which every rank talks to its neighbours only, and all links carry the same.

use super::{Algorithm, Collective, Plan, Shape, Source, Step, Target};
use crate::error::Rank;

fn neighbours(shape: Shape, rank: Rank) -> (Rank, Rank) {
    ((rank + 1) % shape.ranks, (rank + shape.ranks - 1) % shape.ranks)
}

/// The shard that a rank holds at a hop: its predecessor's at first, one further back each time, its own at hop n - 1.
fn held(shape: Shape, rank: Rank, hop: usize) -> usize {
    (rank + 2 * shape.ranks - 1 - hop) % shape.ranks
}

/// Shard `s` starts at rank `s + 1`, is added to by each rank on its way to rank `s`, and goes round once more as the
/// result. Partial sums travel as `Form::Partial`, so that 16-bit floats are rounded once.
pub(super) fn all_reduce(shape: Shape, rank: Rank) -> Plan {
    let n = shape.ranks;
    if n == 1 || shape.count == 0 {
        return Plan { algorithm: Algorithm::Ring, ..super::all_reduce::two_shot(shape, rank) };
    }
    let (next, prev) = neighbours(shape, rank);
    let step = |hop: usize| {
        let s = held(shape, rank, hop);
        let range = shape.shard(n, s);
        if range.is_empty() {
            return vec![];
        }
        let (own, out, len) = (Source::Input(range.start), Target::Output(range.start), range.len());
        vec![if hop == 0 {
            Step::copy(s, len, own, vec![Target::partial(next)])
        } else if hop < n - 1 {
            Step::combine(s, len, vec![Source::partial(prev), own], vec![Target::partial(next)])
        } else if hop == n - 1 {
            Step::finish(s, len, vec![Source::partial(prev), own], vec![out, Target::element(next)])
        } else if hop < 2 * n - 2 {
            Step::copy(s, len, Source::element(prev), vec![out, Target::element(next)])
        } else {
            Step::copy(s, len, Source::element(prev), vec![out])
        }]
    };
    Plan::new(Collective::AllReduce, Algorithm::Ring, shape, rank, 2 * n, (0..2 * n - 1).map(step).collect())
}

/// The first half of [`all_reduce`], on blocks that the caller cut: block `r` ends at rank `r`.
pub(super) fn reduce_scatter(shape: Shape, rank: Rank) -> Plan {
    let (n, len) = (shape.ranks, shape.count);
    if n == 1 || len == 0 {
        return Plan { algorithm: Algorithm::Ring, ..super::blocks::reduce_scatter(shape, rank) };
    }
    let (next, prev) = neighbours(shape, rank);
    let step = |hop: usize| {
        let s = held(shape, rank, hop);
        let own = Source::Input(s * len);
        vec![if hop == 0 {
            Step::copy(s, len, own, vec![Target::partial(next)])
        } else if hop < n - 1 {
            Step::combine(s, len, vec![Source::partial(prev), own], vec![Target::partial(next)])
        } else {
            Step::finish(s, len, vec![Source::partial(prev), own], vec![Target::Output(0)])
        }]
    };
    let plan = Plan::new(Collective::ReduceScatter, Algorithm::Ring, shape, rank, n + 1, (0..n).map(step).collect());
    Plan { input: n * len, ..plan }
}

/// Every block goes round once.
pub(super) fn all_gather(shape: Shape, rank: Rank) -> Plan {
    let (n, len) = (shape.ranks, shape.count);
    if n == 1 || len == 0 {
        return Plan { algorithm: Algorithm::Ring, ..super::blocks::all_gather(shape, rank) };
    }
    let (next, prev) = neighbours(shape, rank);
    let step = |hop: usize| {
        let s = (rank + n - hop) % n;
        let out = Target::Output(s * len);
        vec![if hop == 0 {
            Step::copy(s, len, Source::Input(0), vec![out, Target::element(next)])
        } else if hop < n - 1 {
            Step::copy(s, len, Source::element(prev), vec![out, Target::element(next)])
        } else {
            Step::copy(s, len, Source::element(prev), vec![out])
        }]
    };
    let plan = Plan::new(Collective::AllGather, Algorithm::Ring, shape, rank, n + 1, (0..n).map(step).collect());
    Plan { output: n * len, ..plan }
}

/// A chain from the root to its left neighbour; every rank passes on what it gets.
pub(super) fn broadcast(shape: Shape, rank: Rank) -> Plan {
    let (n, len) = (shape.ranks, shape.count);
    if len == 0 {
        return Plan::meet(Collective::Broadcast, Algorithm::Ring, shape, rank);
    }
    let (next, prev) = neighbours(shape, rank);
    let place = (rank + n - shape.root) % n;
    let source = if place == 0 { Source::Input(0) } else { Source::element(prev) };
    let mut targets = vec![Target::Output(0)];
    if place + 1 < n {
        targets.push(Target::element(next));
    }
    let step = |hop: usize| if hop == place { vec![Step::copy(0, len, source, targets.clone())] } else { vec![] };
    let plan = Plan::new(Collective::Broadcast, Algorithm::Ring, shape, rank, 2, (0..n).map(step).collect());
    Plan { input: if place == 0 { len } else { 0 }, ..plan }
}
