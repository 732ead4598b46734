// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-reduce: every rank gets the combination of all inputs.

use super::{Algorithm, Collective, Form, Plan, Shape, Source, Step, Target, shape::shard_range};
use crate::error::Rank;

fn empty(shape: Shape, algorithm: Algorithm, rank: Rank, depth: usize, phases: Vec<Vec<Step>>) -> Plan {
    Plan {
        collective: Collective::AllReduce,
        algorithm,
        rank,
        ranks: shape.ranks,
        input: shape.count,
        output: shape.count,
        chunk: shape.chunk.max(1),
        scratch: 0,
        depth,
        phases,
    }
}

fn peers(ranks: usize, rank: Rank) -> impl Iterator<Item = Rank> {
    // Each rank starts with its right neighbour, so that not all talk to rank 0 at once.
    (1..ranks).map(move |d| (rank + d) % ranks)
}

fn link_to(to: Rank, form: Form) -> Target {
    Target::Link { to, form }
}

/// All ranks in rank order: this one's part from its input, the others' from their links.
fn everyone(ranks: usize, rank: Rank, offset: usize) -> Vec<Source> {
    (0..ranks).map(|r| if r == rank { Source::Input(offset) } else { Source::Link { from: r, form: Form::Element } }).collect()
}

/// Nothing to add, but all ranks still compare their arguments.
fn meet(shape: Shape, algorithm: Algorithm, rank: Rank) -> Plan {
    let signals = peers(shape.ranks, rank).map(Step::signal).collect();
    let waits = peers(shape.ranks, rank).map(Step::wait).collect();
    empty(shape, algorithm, rank, 1, vec![signals, waits])
}

/// Every rank sends its whole input to every other; each combines all of them in rank order. One hop.
pub fn one_shot(shape: Shape, rank: Rank) -> Plan {
    let (n, len) = (shape.ranks, shape.count);
    if len == 0 {
        return meet(shape, Algorithm::OneShot, rank);
    }
    let send = Step {
        shard: 0,
        len,
        sources: vec![Source::Input(0)],
        targets: peers(n, rank).map(|p| link_to(p, Form::Element)).collect(),
        finish: false,
    };
    let fold = Step { shard: 0, len, sources: everyone(n, rank, 0), targets: vec![Target::Output(0)], finish: true };
    let phases = if n == 1 { vec![vec![fold]] } else { vec![vec![send], vec![fold]] };
    empty(shape, Algorithm::OneShot, rank, 2, phases)
}

/// Every rank owns a shard: it gets the others' parts, combines them in rank order, and sends the result to all.
pub fn two_shot(shape: Shape, rank: Rank) -> Plan {
    let n = shape.ranks;
    if shape.count == 0 {
        return meet(shape, Algorithm::TwoShot, rank);
    }
    let range = |s| shard_range(shape.count, n, shape.align, s);
    let fan_out = peers(n, rank)
        .filter(|&p| !range(p).is_empty())
        .map(|p| Step {
            shard: p as u16,
            len: range(p).len(),
            sources: vec![Source::Input(range(p).start)],
            targets: vec![link_to(p, Form::Element)],
            finish: false,
        })
        .collect();
    let own = range(rank);
    let mut reduce = Vec::new();
    if !own.is_empty() {
        let mut targets = vec![Target::Output(own.start)];
        targets.extend(peers(n, rank).map(|p| link_to(p, Form::Element)));
        reduce.push(Step { shard: rank as u16, len: own.len(), sources: everyone(n, rank, own.start), targets, finish: true });
    }
    let collect = peers(n, rank)
        .filter(|&p| !range(p).is_empty())
        .map(|p| Step {
            shard: p as u16,
            len: range(p).len(),
            sources: vec![Source::Link { from: p, form: Form::Element }],
            targets: vec![Target::Output(range(p).start)],
            finish: false,
        })
        .collect();
    empty(shape, Algorithm::TwoShot, rank, 4, vec![fan_out, reduce, collect])
}

/// Shard `s` starts at rank `s + 1`, is added to by each rank on its way to rank `s`, and goes round once more as the
/// result. Partial sums travel as [`Form::Partial`], so that 16-bit floats are rounded once.
pub fn ring(shape: Shape, rank: Rank) -> Plan {
    let n = shape.ranks;
    if n == 1 || shape.count == 0 {
        return Plan { algorithm: Algorithm::Ring, ..two_shot(shape, rank) };
    }
    let (next, prev) = ((rank + 1) % n, (rank + n - 1) % n);
    let mut phases = Vec::with_capacity(2 * n - 1);
    for hop in 0..=2 * n - 2 {
        // The shard that this rank holds at that hop: one further back around the ring each time.
        let s = (rank + 2 * n - 1 - hop) % n;
        let range = shard_range(shape.count, n, shape.align, s);
        if range.is_empty() {
            phases.push(Vec::new());
            continue;
        }
        let arriving = |form| Source::Link { from: prev, form };
        let own = Source::Input(range.start);
        let (sources, targets, finish) = if hop == 0 {
            (vec![own], vec![link_to(next, Form::Partial)], false)
        } else if hop < n - 1 {
            (vec![arriving(Form::Partial), own], vec![link_to(next, Form::Partial)], false)
        } else if hop == n - 1 {
            (vec![arriving(Form::Partial), own], vec![Target::Output(range.start), link_to(next, Form::Element)], true)
        } else if hop < 2 * n - 2 {
            (vec![arriving(Form::Element)], vec![Target::Output(range.start), link_to(next, Form::Element)], false)
        } else {
            (vec![arriving(Form::Element)], vec![Target::Output(range.start)], false)
        };
        phases.push(vec![Step { shard: s as u16, len: range.len(), sources, targets, finish }]);
    }
    empty(shape, Algorithm::Ring, rank, 2 * n, phases)
}
