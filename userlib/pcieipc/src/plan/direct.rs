// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-reduce over registered buffers that all ranks can see: no copy through a ring, records only signal.

use super::{Algorithm, Collective, Plan, Shape, Source, Step, Target};
use crate::error::Rank;

/// Every rank owns a shard: it reads that shard from all inputs where they lie, combines it in rank order, and stores it to
/// all outputs. One signal each way before, so that all inputs are there, and one after, so that all results are.
///
/// In place is allowed: the only rank that reads or writes a shard of any buffer between the signals is its owner.
pub(super) fn all_reduce(shape: Shape, rank: Rank) -> Plan {
    if shape.count == 0 || shape.ranks == 1 {
        return Plan { algorithm: Algorithm::Direct, ..super::all_reduce::two_shot(shape, rank) };
    }
    let signals = || shape.peers(rank).map(Step::signal).collect::<Vec<_>>();
    let waits = || shape.peers(rank).map(Step::wait).collect::<Vec<_>>();
    let range = shape.shard(shape.ranks, rank);
    let start = range.start;
    let input = |of| if of == rank { Source::Input(start) } else { Source::PeerInput { of, start } };
    let output = |of| if of == rank { Target::Output(start) } else { Target::PeerOutput { of, start } };
    let everywhere = std::iter::once(rank).chain(shape.peers(rank)).map(output).collect();
    let reduce = Step::finish(rank, range.len(), (0..shape.ranks).map(input).collect(), everywhere);
    let reduce = if range.is_empty() { vec![] } else { vec![reduce] };
    // One window: a signal runs once, so everything it vouches for must come before it.
    let whole = Shape { chunk: shape.count, ..shape };
    Plan::new(Collective::AllReduce, Algorithm::Direct, whole, rank, 2, vec![signals(), waits(), reduce, signals(), waits()])
}
