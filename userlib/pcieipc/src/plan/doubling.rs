// SPDX-License-Identifier: MIT OR Apache-2.0
//! Recursive doubling: log2(n) exchanges between pairs at distance 1, 2, 4, ...

use super::{Algorithm, Collective, Plan, Shape, Source, Step, Target};
use crate::error::Rank;

/// Where a rank keeps what it has combined so far; both pair members combine the lower rank's part first, so that all
/// ranks end with the same bits.
const ACC: usize = 0;

/// The largest power of two of the ranks exchange; each rank beyond it gives its input to a partner first and gets the
/// result at the end.
pub(super) fn all_reduce(shape: Shape, rank: Rank) -> Plan {
    let (n, len) = (shape.ranks, shape.count);
    if n == 1 || len == 0 {
        return Plan { algorithm: Algorithm::RecursiveDoubling, ..super::all_reduce::one_shot(shape, rank) };
    }
    let core = 1 << n.ilog2();
    let extra = (rank + core < n).then_some(rank + core);
    let mut phases: Vec<Vec<Step>> = Vec::new();
    let mut have = Source::Input(0);
    if n > core {
        let give = Step::copy(0, len, have, if rank >= core { vec![Target::partial(rank - core)] } else { vec![] });
        phases.push(if rank >= core { vec![give] } else { vec![] });
        phases.push(match extra {
            Some(extra) => {
                have = Source::Scratch(ACC);
                vec![Step::combine(0, len, vec![Source::Input(0), Source::partial(extra)], vec![Target::Scratch(ACC)])]
            }
            None => vec![],
        });
    }
    for bit in 0..core.ilog2() {
        if rank >= core {
            phases.extend([vec![], vec![]]);
            continue;
        }
        let partner = rank ^ (1 << bit);
        phases.push(vec![Step::copy(0, len, have, vec![Target::partial(partner)])]);
        let mut both = vec![have, Source::partial(partner)];
        if partner < rank {
            both.reverse();
        }
        phases.push(vec![if bit + 1 < core.ilog2() {
            have = Source::Scratch(ACC);
            Step::combine(0, len, both, vec![Target::Scratch(ACC)])
        } else {
            let result = std::iter::once(Target::Output(0)).chain(extra.map(Target::element));
            Step::finish(0, len, both, result.collect())
        }]);
    }
    if n > core {
        let receive = |from| Step::copy(0, len, Source::element(from), vec![Target::Output(0)]);
        phases.push(if rank >= core { vec![receive(rank - core)] } else { vec![] });
    }
    let depth = phases.len() + 1;
    let plan = Plan::new(Collective::AllReduce, Algorithm::RecursiveDoubling, shape, rank, depth, phases);
    Plan { scratch: 1, ..plan }
}

/// Dissemination: in round `k` every rank tells the one 2^k further and hears from the one 2^k before.
pub(super) fn barrier(shape: Shape, rank: Rank) -> Plan {
    let n = shape.ranks;
    let mut phases = Vec::new();
    let mut distance = 1;
    while distance < n {
        phases.push(vec![Step::signal((rank + distance) % n)]);
        phases.push(vec![Step::wait((rank + n - distance) % n)]);
        distance *= 2;
    }
    let shape = Shape { count: 0, ..shape };
    Plan::new(Collective::Barrier, Algorithm::RecursiveDoubling, shape, rank, 2, phases)
}
