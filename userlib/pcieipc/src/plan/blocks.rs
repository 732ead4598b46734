// SPDX-License-Identifier: MIT OR Apache-2.0
//! Collectives on blocks, one for each rank, every pair talking directly.

use super::{Algorithm, Collective, Plan, Shape, Source, Step, Target};
use crate::error::Rank;

/// Block `r` of every rank goes to rank `r`, which combines them in rank order.
pub(super) fn reduce_scatter(shape: Shape, rank: Rank) -> Plan {
    let (n, len) = (shape.ranks, shape.count);
    if len == 0 {
        return Plan::meet(Collective::ReduceScatter, Algorithm::TwoShot, shape, rank);
    }
    let send = shape.peers(rank).map(|p| Step::copy(p, len, Source::Input(p * len), vec![Target::element(p)])).collect();
    let fold = Step::finish(rank, len, super::all_reduce::everyone(shape, rank, rank * len), vec![Target::Output(0)]);
    let plan = Plan::new(Collective::ReduceScatter, Algorithm::TwoShot, shape, rank, 2, vec![send, vec![fold]]);
    Plan { input: n * len, ..plan }
}

/// Every rank sends its block to all.
pub(super) fn all_gather(shape: Shape, rank: Rank) -> Plan {
    let (n, len) = (shape.ranks, shape.count);
    if len == 0 {
        return Plan::meet(Collective::AllGather, Algorithm::TwoShot, shape, rank);
    }
    let targets = std::iter::once(Target::Output(rank * len)).chain(shape.peers(rank).map(Target::element)).collect();
    let send = Step::copy(rank, len, Source::Input(0), targets);
    let receive = shape.peers(rank).map(|p| Step::copy(p, len, Source::element(p), vec![Target::Output(p * len)])).collect();
    let plan = Plan::new(Collective::AllGather, Algorithm::TwoShot, shape, rank, 2, vec![vec![send], receive]);
    Plan { output: n * len, ..plan }
}

/// Block `p` goes to rank `p`, where it becomes the block of the sender.
pub(super) fn all_to_all(shape: Shape, rank: Rank) -> Plan {
    let (n, len) = (shape.ranks, shape.count);
    if len == 0 {
        return Plan::meet(Collective::AllToAll, Algorithm::TwoShot, shape, rank);
    }
    let mut send = vec![Step::copy(rank, len, Source::Input(rank * len), vec![Target::Output(rank * len)])];
    send.extend(shape.peers(rank).map(|p| Step::copy(p, len, Source::Input(p * len), vec![Target::element(p)])));
    let receive = shape.peers(rank).map(|p| Step::copy(rank, len, Source::element(p), vec![Target::Output(p * len)])).collect();
    let plan = Plan::new(Collective::AllToAll, Algorithm::TwoShot, shape, rank, 2, vec![send, receive]);
    Plan { input: n * len, output: n * len, ..plan }
}
