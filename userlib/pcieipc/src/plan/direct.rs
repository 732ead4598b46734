// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-reduce over registered buffers that all ranks can read: no copy through a ring, records only signal.

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
