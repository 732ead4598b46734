// SPDX-License-Identifier: MIT OR Apache-2.0
//! Collectives over registered buffers that all ranks can read: no copy through a ring, records only signal.

use super::{Algorithm, Collective, Plan, Shape, Source, Step, Target};
use crate::error::Rank;

/// Every rank owns a shard: it reads that shard from all inputs where they lie, combines it in rank order into its own output,
/// and all others copy it from there, chunk by chunk, while it is still in the processor's cache.
///
/// Signals: one each way before, so that all inputs are there; one for each chunk of result; and one each way after, so that
/// nobody changes an output that another still reads. In place is allowed: another rank reads a shard of the input only if it
/// owns it, and the result that replaces it comes from that rank.
pub(super) fn all_reduce(shape: Shape, rank: Rank) -> Plan {
    let n = shape.ranks;
    if shape.count == 0 || n == 1 {
        return Plan { algorithm: Algorithm::Direct, ..super::all_reduce::two_shot(shape, rank) };
    }
    let range = |s| shape.shard(n, s);
    let own = range(rank);
    let input = |of| if of == rank { Source::Input(own.start) } else { Source::PeerInput { of, start: own.start } };
    let ready = std::iter::once(Target::Output(own.start)).chain(shape.peers(rank).map(Target::Signal));
    let reduce = Step::finish(rank, own.len(), (0..n).map(input).collect(), ready.collect());
    let collect = shape.peers(rank).filter(|&p| !range(p).is_empty()).map(|p| {
        let (start, len) = (range(p).start, range(p).len());
        let mut step = Step::copy(p, len, Source::PeerOutput { of: p, start }, vec![Target::Output(start)]);
        step.sources.push(Source::Signal(p));
        step
    });
    let phases = vec![
        shape.peers(rank).map(Step::signal).collect(),
        shape.peers(rank).map(Step::wait).collect(),
        if own.is_empty() { vec![] } else { vec![reduce] },
        collect.collect(),
        shape.peers(rank).map(|p| Step::signal(p).at_the_end()).collect(),
        shape.peers(rank).map(|p| Step::wait(p).at_the_end()).collect(),
    ];
    Plan::new(Collective::AllReduce, Algorithm::Direct, shape, rank, 4, phases)
}

/// Signals before, so that all inputs are there, and after, so that nobody changes what another still reads.
fn around(shape: Shape, rank: Rank, steps: Vec<Step>) -> Vec<Vec<Step>> {
    let peers = || shape.peers(rank);
    vec![
        peers().map(Step::signal).collect(),
        peers().map(Step::wait).collect(),
        steps,
        peers().map(|p| Step::signal(p).at_the_end()).collect(),
        peers().map(|p| Step::wait(p).at_the_end()).collect(),
    ]
}

/// All read the root's buffer, chunk by chunk. Where the root's input and output are one buffer its copy is none.
pub(super) fn broadcast(shape: Shape, rank: Rank) -> Plan {
    let (root, len) = (shape.root, shape.count);
    if len == 0 {
        return Plan::meet(Collective::Broadcast, Algorithm::Direct, shape, rank);
    }
    let peers = || shape.peers(rank);
    let phases = if rank == root {
        let ready = std::iter::once(Target::Output(0)).chain(peers().map(Target::Signal));
        vec![vec![Step::copy(0, len, Source::Input(0), ready.collect())], peers().map(|p| Step::wait(p).at_the_end()).collect()]
    } else {
        let mut copy = Step::copy(0, len, Source::PeerOutput { of: root, start: 0 }, vec![Target::Output(0)]);
        copy.sources.push(Source::Signal(root));
        vec![vec![copy], vec![Step::signal(root).at_the_end()]]
    };
    let plan = Plan::new(Collective::Broadcast, Algorithm::Direct, shape, rank, 2, phases);
    Plan { input: if rank == root { len } else { 0 }, ..plan }
}

/// Every rank reads the blocks of all others.
pub(super) fn all_gather(shape: Shape, rank: Rank) -> Plan {
    let (n, len) = (shape.ranks, shape.count);
    if len == 0 {
        return Plan::meet(Collective::AllGather, Algorithm::Direct, shape, rank);
    }
    let mut copies = vec![Step::copy(rank, len, Source::Input(0), vec![Target::Output(rank * len)])];
    let take = |p| Step::copy(p, len, Source::PeerInput { of: p, start: 0 }, vec![Target::Output(p * len)]);
    copies.extend(shape.peers(rank).map(take));
    let plan = Plan::new(Collective::AllGather, Algorithm::Direct, shape, rank, 2, around(shape, rank, copies));
    Plan { output: n * len, ..plan }
}

/// Every rank combines its block of all inputs in rank order.
pub(super) fn reduce_scatter(shape: Shape, rank: Rank) -> Plan {
    let (n, len) = (shape.ranks, shape.count);
    if len == 0 {
        return Plan::meet(Collective::ReduceScatter, Algorithm::Direct, shape, rank);
    }
    let start = rank * len;
    let source = |of| if of == rank { Source::Input(start) } else { Source::PeerInput { of, start } };
    let fold = Step::finish(rank, len, (0..n).map(source).collect(), vec![Target::Output(0)]);
    let phases = around(shape, rank, vec![fold]);
    let plan = Plan::new(Collective::ReduceScatter, Algorithm::Direct, shape, rank, 2, phases);
    Plan { input: n * len, ..plan }
}
