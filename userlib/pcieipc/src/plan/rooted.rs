// SPDX-License-Identifier: MIT OR Apache-2.0
//! Collectives with a root, and the message between two ranks.

use super::{Algorithm, Collective, Plan, Shape, Source, Step, Target, all_reduce::everyone};
use crate::error::Rank;

/// Output exists at the root only.
fn to_root(plan: Plan) -> Plan {
    Plan { output: if plan.rank == plan.shape.root { plan.shape.count } else { 0 }, ..plan }
}

/// Input exists at the root only.
fn from_root(plan: Plan) -> Plan {
    Plan { input: if plan.rank == plan.shape.root { plan.shape.count } else { 0 }, ..plan }
}

/// Everything goes to the root, which combines in rank order.
pub(super) fn reduce_star(shape: Shape, rank: Rank) -> Plan {
    let (root, len) = (shape.root, shape.count);
    if len == 0 {
        return Plan::meet(Collective::Reduce, Algorithm::Star, shape, rank);
    }
    let phases = if rank == root {
        vec![vec![], vec![Step::finish(0, len, everyone(shape, rank, 0), vec![Target::Output(0)])]]
    } else {
        vec![vec![Step::copy(0, len, Source::Input(0), vec![Target::element(root)])], vec![]]
    };
    to_root(Plan::new(Collective::Reduce, Algorithm::Star, shape, rank, 2, phases))
}

/// Every rank combines a shard and sends it to the root.
pub(super) fn reduce_two_shot(shape: Shape, rank: Rank) -> Plan {
    let (n, root) = (shape.ranks, shape.root);
    if shape.count == 0 {
        return Plan::meet(Collective::Reduce, Algorithm::TwoShot, shape, rank);
    }
    let range = |s| shape.shard(n, s);
    let owners = || shape.peers(rank).filter(|&p| !range(p).is_empty());
    let fan_out =
        owners().map(|p| Step::copy(p, range(p).len(), Source::Input(range(p).start), vec![Target::element(p)])).collect();
    let own = range(rank);
    let result = if rank == root { Target::Output(own.start) } else { Target::element(root) };
    let fold = Step::finish(rank, own.len(), everyone(shape, rank, own.start), vec![result]);
    let reduce = if own.is_empty() { vec![] } else { vec![fold] };
    let gather = if rank == root {
        owners().map(|p| Step::copy(p, range(p).len(), Source::element(p), vec![Target::Output(range(p).start)])).collect()
    } else {
        vec![]
    };
    to_root(Plan::new(Collective::Reduce, Algorithm::TwoShot, shape, rank, 4, vec![fan_out, reduce, gather]))
}

/// The root sends everything to all.
pub(super) fn broadcast_star(shape: Shape, rank: Rank) -> Plan {
    let (root, len) = (shape.root, shape.count);
    if len == 0 {
        return Plan::meet(Collective::Broadcast, Algorithm::Star, shape, rank);
    }
    let phases = if rank == root {
        let targets = std::iter::once(Target::Output(0)).chain(shape.peers(rank).map(Target::element)).collect();
        vec![vec![Step::copy(0, len, Source::Input(0), targets)], vec![]]
    } else {
        vec![vec![], vec![Step::copy(0, len, Source::element(root), vec![Target::Output(0)])]]
    };
    from_root(Plan::new(Collective::Broadcast, Algorithm::Star, shape, rank, 2, phases))
}

/// The root gives every rank a shard, and each passes its shard on to all.
pub(super) fn broadcast_two_shot(shape: Shape, rank: Rank) -> Plan {
    let (n, root) = (shape.ranks, shape.root);
    if shape.count == 0 {
        return Plan::meet(Collective::Broadcast, Algorithm::TwoShot, shape, rank);
    }
    let range = |s| shape.shard(n, s);
    let owners = || shape.peers(rank).filter(|&p| !range(p).is_empty());
    let own = range(rank);
    let others: Vec<Target> = shape.peers(rank).filter(|&p| p != root).map(Target::element).collect();
    let (scatter, pass_on) = if rank == root {
        let mut targets = vec![Target::Output(own.start)];
        targets.extend(others);
        let scatter = owners().map(|p| {
            let r = range(p);
            Step::copy(p, r.len(), Source::Input(r.start), vec![Target::element(p), Target::Output(r.start)])
        });
        let own = Step::copy(rank, own.len(), Source::Input(own.start), targets);
        (scatter.collect(), if own.len > 0 { vec![own] } else { vec![] })
    } else if own.is_empty() {
        (vec![], vec![])
    } else {
        let mut targets = vec![Target::Output(own.start)];
        targets.extend(others);
        (vec![], vec![Step::copy(rank, own.len(), Source::element(root), targets)])
    };
    let collect = if rank == root {
        vec![]
    } else {
        owners().map(|p| Step::copy(p, range(p).len(), Source::element(p), vec![Target::Output(range(p).start)])).collect()
    };
    from_root(Plan::new(Collective::Broadcast, Algorithm::TwoShot, shape, rank, 4, vec![scatter, pass_on, collect]))
}

/// `shape.root` sends, `shape.peer` receives; to oneself it is a copy.
pub(super) fn send_receive(shape: Shape, rank: Rank) -> Plan {
    let (from, to, len) = (shape.root, shape.peer, shape.count);
    let (sends, receives) = (rank == from, rank == to);
    let phases = match (sends, receives, len) {
        (true, true, 0) | (false, false, _) => vec![vec![], vec![]],
        (true, true, _) => vec![vec![Step::copy(0, len, Source::Input(0), vec![Target::Output(0)])], vec![]],
        (true, false, 0) => vec![vec![Step::signal(to)], vec![]],
        (false, true, 0) => vec![vec![], vec![Step::wait(from)]],
        (true, false, _) => vec![vec![Step::copy(0, len, Source::Input(0), vec![Target::element(to)])], vec![]],
        (false, true, _) => vec![vec![], vec![Step::copy(0, len, Source::element(from), vec![Target::Output(0)])]],
    };
    let plan = Plan::new(Collective::SendReceive, Algorithm::OneShot, shape, rank, 2, phases);
    Plan { input: if sends { len } else { 0 }, output: if receives { len } else { 0 }, ..plan }
}
