// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-reduce in rank order: one-shot, two-shot, star.

use super::{Algorithm, Collective, Plan, Shape, Source, Step, Target};
use crate::error::Rank;

fn plan(algorithm: Algorithm, shape: Shape, rank: Rank, depth: usize, phases: Vec<Vec<Step>>) -> Plan {
    Plan::new(Collective::AllReduce, algorithm, shape, rank, depth, phases)
}

/// All ranks in rank order: this one's part from its input, the others' from their links.
pub(super) fn everyone(shape: Shape, rank: Rank, offset: usize) -> Vec<Source> {
    (0..shape.ranks).map(|r| if r == rank { Source::Input(offset) } else { Source::element(r) }).collect()
}

/// A record to every other rank, and before them the place here.
fn everywhere(shape: Shape, rank: Rank, offset: usize) -> Vec<Target> {
    std::iter::once(Target::Output(offset)).chain(shape.peers(rank).map(Target::element)).collect()
}

/// Every rank sends its whole input to every other; each combines all of them. One hop.
pub(super) fn one_shot(shape: Shape, rank: Rank) -> Plan {
    let len = shape.count;
    if len == 0 {
        return Plan::meet(Collective::AllReduce, Algorithm::OneShot, shape, rank);
    }
    let fold = Step::finish(0, len, everyone(shape, rank, 0), vec![Target::Output(0)]);
    if shape.ranks == 1 {
        return plan(Algorithm::OneShot, shape, rank, 1, vec![vec![fold]]);
    }
    let send = Step::copy(0, len, Source::Input(0), shape.peers(rank).map(Target::element).collect());
    plan(Algorithm::OneShot, shape, rank, 2, vec![vec![send], vec![fold]])
}

/// Every rank owns a shard: it gets the others' parts, combines them, and sends the result to all.
pub(super) fn two_shot(shape: Shape, rank: Rank) -> Plan {
    if shape.count == 0 {
        return Plan::meet(Collective::AllReduce, Algorithm::TwoShot, shape, rank);
    }
    let range = |s| shape.owned(s);
    let owners = || shape.peers(rank).filter(|&p| !range(p).is_empty());
    let fan_out =
        owners().map(|p| Step::copy(p, range(p).len(), Source::Input(range(p).start), vec![Target::element(p)])).collect();
    let own = range(rank);
    let reduce = if own.is_empty() {
        vec![]
    } else {
        vec![Step::finish(rank, own.len(), everyone(shape, rank, own.start), everywhere(shape, rank, own.start))]
    };
    let collect =
        owners().map(|p| Step::copy(p, range(p).len(), Source::element(p), vec![Target::Output(range(p).start)])).collect();
    plan(Algorithm::TwoShot, shape, rank, 4, vec![fan_out, reduce, collect])
}

/// Rank 0 gets all inputs, combines them, and sends the result to all.
pub(super) fn star(shape: Shape, rank: Rank) -> Plan {
    let len = shape.count;
    if len == 0 {
        return Plan::meet(Collective::AllReduce, Algorithm::Star, shape, rank);
    }
    let phases = if rank == 0 {
        vec![vec![], vec![Step::finish(0, len, everyone(shape, 0, 0), everywhere(shape, 0, 0))], vec![]]
    } else {
        let send = Step::copy(0, len, Source::Input(0), vec![Target::element(0)]);
        let receive = Step::copy(0, len, Source::element(0), vec![Target::Output(0)]);
        vec![vec![send], vec![], vec![receive]]
    };
    plan(Algorithm::Star, shape, rank, 4, phases)
}
