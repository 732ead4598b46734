// SPDX-License-Identifier: MIT OR Apache-2.0
//! What kernels did, step by step, compared with the plan that they declare: in a build of the kernels with `PCIEIPC_TRACE`, on a device or
//! by the protocol's test on a processor.
//!
//! [`compare`] looks at one rank: every step of its plan happened for every byte, once, and in an order that gives the right sum.
//! [`meet`] looks at all ranks: what one sent lay where the other took it, and no place was used again before it was read.

use std::collections::{BTreeMap, HashMap, HashSet};

use pcieipc::plan::{Plan, Source, Target};

pub use crate::abi::Step;
use crate::{
    abi::{REGISTERED, STEP_HEAR, STEP_SEND, STEP_STORE, STEP_SUM, STEP_TAKE},
    choice::Choice,
};

/// A call that was traced.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// The kernel and its launch.
    pub choice: &'a Choice,
    /// How many ranks.
    pub ranks: usize,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// Input and output are the same.
    pub in_place: bool,
}

const VERBS: [&str; 6] = ["", "sends its input to", "adds the input of", "stores", "sends a sum to", "takes a sum of"];

fn verb(verb: u32) -> &'static str {
    VERBS.get(verb as usize).copied().unwrap_or("")
}

/// Ranges in order, those that touch made one. None where two overlap.
fn merged(mut ranges: Vec<(u64, u64)>) -> Result<Vec<(u64, u64)>, u64> {
    ranges.retain(|(from, to)| from < to);
    ranges.sort_unstable();
    let mut all: Vec<(u64, u64)> = Vec::new();
    for (from, to) in ranges {
        match all.last_mut() {
            Some(last) if from < last.1 => return Err(from),
            Some(last) if from == last.1 => last.1 = to,
            _ => all.push((from, to)),
        }
    }
    Ok(all)
}

/// Every verb with every peer, and the bytes of the tensor.
type Moves = BTreeMap<(u32, u32), Vec<(u64, u64)>>;

/// What the plans ask for, and for each stretch of sums whose inputs they add, in which order.
fn asked(plans: &[(u64, Plan)], rank: usize) -> (Moves, Vec<(u64, u64, Vec<u32>)>) {
    let (mut moves, mut orders) = (Moves::new(), Vec::new());
    for (base, plan) in plans {
        for step in plan.phases.iter().flatten().filter(|s| s.len > 0) {
            let input = step.sources.iter().find_map(|s| match s {
                Source::Input(at) => Some(*at),
                _ => None,
            });
            let output = step.targets.iter().find_map(|t| match t {
                Target::Output(at) => Some(*at),
                _ => None,
            });
            // A shard lies at the same place in every buffer.
            let at = base + input.or(output).unwrap_or(0) as u64;
            let range = (at, at + step.len as u64);
            let mut add = |verb, peer: usize| moves.entry((verb, peer as u32)).or_default().push(range);
            let mut order = Vec::new();
            for source in &step.sources {
                match source {
                    Source::Input(_) if step.finish => order.push(rank as u32),
                    Source::Link { from, .. } if step.finish => order.push(*from as u32),
                    Source::Link { from, .. } => add(STEP_HEAR, *from),
                    Source::PeerInput { of, .. } => order.push(*of as u32),
                    Source::PeerOutput { of, .. } => add(STEP_HEAR, *of),
                    _ => {}
                }
            }
            order.iter().for_each(|peer| add(STEP_TAKE, *peer as usize));
            for target in &step.targets {
                match target {
                    Target::Output(_) => add(STEP_STORE, rank),
                    Target::Link { to, .. } => add(if step.finish { STEP_SUM } else { STEP_SEND }, *to),
                    _ => {}
                }
            }
            if step.finish {
                orders.push((range.0, range.1, order));
            }
        }
    }
    (moves, orders)
}

/// Compares the steps of one rank in one call, in the order in which they were recorded, with the plan that the kernel declares.
///
/// # Errors
/// The first difference.
pub fn compare(call: Call<'_>, rank: usize, steps: &[Step]) -> Result<(), String> {
    let (asked, mut orders) = asked(&call.choice.plans(call.ranks, rank, call.bytes), rank);
    let mut done = Moves::new();
    for step in steps {
        if step.bytes == 0 || step.at.checked_add(step.bytes.into()).is_none_or(|end| end > call.bytes) {
            return Err(format!(
                "rank {rank} {} {}: {} bytes at {} are not in the tensor",
                verb(step.verb),
                step.peer,
                step.bytes,
                step.at
            ));
        }
        done.entry((step.verb, step.peer)).or_default().push((step.at, step.at + u64::from(step.bytes)));
    }
    let mut all: Vec<_> = asked.keys().chain(done.keys()).copied().collect();
    all.sort_unstable();
    all.dedup();
    for key in all {
        let what = format!("rank {rank} {} {}", verb(key.0), key.1);
        let wanted =
            merged(asked.get(&key).cloned().unwrap_or_default()).map_err(|at| format!("the plan: {what} twice at {at}"))?;
        let found = merged(done.remove(&key).unwrap_or_default()).map_err(|at| format!("{what}: twice at byte {at}"))?;
        if wanted != found {
            return Err(format!("{what}: bytes {found:?}, and {wanted:?} in the plan"));
        }
    }
    // What happened to each unit of the tensor so far.
    orders.sort_unstable();
    let order = |at: u64| {
        let i = orders.partition_point(|(from, ..)| *from <= at).checked_sub(1)?;
        orders.get(i).filter(|(_, to, _)| at < *to).map(|(.., order)| order.as_slice())
    };
    let (mut taken, mut stored, mut heard) = (HashMap::new(), HashSet::new(), HashSet::new());
    for step in steps {
        let (at, came) = (step.at, taken.get(&step.at).copied().unwrap_or(0usize));
        let complete = || order(at).is_none_or(|order| came == order.len());
        let early = |what: &str| Err(format!("rank {rank}, byte {at}: {what} when {came} inputs were added"));
        match step.verb {
            STEP_TAKE => {
                let next = order(at).and_then(|order| order.get(came)).copied();
                if next != Some(step.peer) {
                    return Err(format!("rank {rank}, byte {at}: rank {} is added where the plan adds {next:?}", step.peer));
                }
                taken.insert(at, came + 1);
            }
            STEP_HEAR => {
                heard.insert(at);
            }
            STEP_STORE => {
                // Either a sum, or what was heard of one.
                if !complete() || order(at).is_none() && !heard.contains(&at) {
                    return early("stored");
                }
                stored.insert(at);
            }
            STEP_SUM if !complete() => return early("the sum was sent"),
            STEP_SEND if call.in_place && stored.contains(&at) => {
                return Err(format!("rank {rank}, byte {at}: sent to rank {} after the sum had overwritten it", step.peer));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Compares the steps of all ranks in one or more calls, by the clock that they have in common: every place that one wrote was read by the
/// other before it was written again, and held what it took for it; a sum in registered memory was read after it had been stored.
///
/// # Errors
/// The first difference.
pub fn meet(all: &[Vec<Step>]) -> Result<(), String> {
    /// Of a place: whether it was written last, and when, in which call, and which bytes.
    #[derive(Clone, Copy)]
    struct Use {
        written: bool,
        of: (u32, u64, u32),
    }
    // When each rank stored what.
    let mut stores: HashMap<(usize, u32, u64), u64> = HashMap::new();
    for (rank, steps) in all.iter().enumerate() {
        let stored = steps.iter().filter(|s| s.verb == STEP_STORE);
        stores.extend(stored.map(|s| ((rank, s.epoch, s.at), s.time)));
    }
    // A write comes before the read that saw it, so of equal times it is the first.
    let mut uses: Vec<(u64, bool, usize, usize, Step)> = Vec::new();
    for (rank, steps) in all.iter().enumerate() {
        for step in steps {
            let peer = step.peer as usize;
            match step.verb {
                STEP_HEAR if step.place == REGISTERED => {
                    let stored = stores.get(&(peer, step.epoch, step.at)).copied().unwrap_or(u64::MAX);
                    if stored > step.time {
                        let (at, call) = (step.at, step.epoch);
                        return Err(format!(
                            "byte {at} of call {call}: rank {rank} read the sum of rank {peer} before it was stored"
                        ));
                    }
                }
                STEP_TAKE if step.place == REGISTERED => {}
                STEP_SEND | STEP_SUM => uses.push((step.time, false, peer, rank, *step)),
                STEP_TAKE | STEP_HEAR if peer != rank => uses.push((step.time, true, rank, peer, *step)),
                _ => {}
            }
        }
    }
    uses.sort_by_key(|(time, read, ..)| (*time, *read));
    let mut places: HashMap<(usize, u64), Use> = HashMap::new();
    for (_, read, reader, sender, step) in uses {
        let (key, of) = ((reader, step.place), (step.epoch, step.at, step.bytes));
        let told = format!("byte {} of call {}, from rank {sender} to rank {reader} at {}", step.at, step.epoch, step.place);
        let before = places.insert(key, Use { written: !read, of });
        match (read, before) {
            (true, Some(Use { written: true, of: wrote })) if wrote == of => {}
            (true, Some(Use { written: true, of: wrote })) => return Err(format!("{told}: there lay {wrote:?}")),
            (true, _) => return Err(format!("{told}: taken, and nobody had sent it")),
            (false, Some(Use { written: true, of })) => return Err(format!("{told}: sent over {of:?}, which was not taken yet")),
            (false, _) => {}
        }
    }
    match places.iter().find(|(_, used)| used.written) {
        Some(((reader, place), used)) => Err(format!("{:?} was sent to rank {reader} at {place} and never taken", used.of)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(verb: u32, peer: u32, at: u64, bytes: u32, place: u64, time: u64) -> Step {
        Step { verb, peer, epoch: 1, bytes, at, place, time }
    }

    /// Two ranks, 20 bytes in two lines; both ranks send, then take.
    fn one_shot() -> [Vec<Step>; 2] {
        [0u32, 1].map(|rank| {
            let (peer, mut steps) = (1 - rank, Vec::new());
            let lines = [(0, 16, 64), (16, 4, 80)];
            steps.extend(lines.map(|(at, bytes, place)| step(STEP_SEND, peer, at, bytes, place, 1)));
            for (at, bytes, place) in lines {
                let take = |of: u32| step(STEP_TAKE, of, at, bytes, if of == rank { 0 } else { place }, 2);
                steps.extend([take(0), take(1), step(STEP_STORE, rank, at, bytes, 0, 3)]);
            }
            steps
        })
    }

    /// Three ranks, one round of tiles of 16 bytes, of which the last is shorter.
    fn two_shot(rank: u32) -> Vec<Step> {
        let (others, lens) = ((0..3).filter(move |p| *p != rank), [16, 16, 8]);
        let tile = |verb, peer, of: u32, time| step(verb, peer, u64::from(of) * 16, lens[of as usize], 64, time);
        let mut steps: Vec<_> = others.clone().map(|p| tile(STEP_SEND, p, p, 1)).collect();
        steps.extend((0..3).map(|of| tile(STEP_TAKE, of, rank, 2)));
        steps.push(tile(STEP_STORE, rank, rank, 3));
        steps.extend(others.clone().map(|p| tile(STEP_SUM, p, rank, 4)));
        steps.extend(others.flat_map(|p| [tile(STEP_HEAR, p, p, 5), tile(STEP_STORE, rank, p, 6)]));
        steps
    }

    const LINES: Choice =
        Choice { kernel: "pair_sum_two_u1", blocks: 1, threads: 96, push_warps: 0, tile: 0, linger: 0, prefix: 0 };
    const SHARES: Choice = Choice { kernel: "shares_sum_many_u2", tile: 16, ..LINES };

    fn lines(in_place: bool) -> Call<'static> {
        Call { choice: &LINES, ranks: 2, bytes: 20, in_place }
    }
    const TWO_SHOT: Call<'static> = Call { choice: &SHARES, ranks: 3, bytes: 40, in_place: true };

    #[test]
    fn steps_of_one_and_two_shots_are_those_of_the_plan() {
        for (rank, steps) in one_shot().iter().enumerate() {
            assert_eq!(compare(lines(true), rank, steps), Ok(()));
        }
        assert_eq!(meet(&one_shot()), Ok(()));
        for rank in 0..3 {
            assert_eq!(compare(TWO_SHOT, rank, &two_shot(rank as u32)), Ok(()));
        }
    }

    #[test]
    fn a_step_that_is_missing_repeated_or_another_is_told() {
        let broken = |call, rank, steps: &[Step], change: &dyn Fn(&mut Vec<Step>)| {
            let mut steps = steps.to_vec();
            change(&mut steps);
            compare(call, rank, &steps).unwrap_err()
        };
        let shots = one_shot();
        for (call, rank, steps) in [(lines(false), 1, &shots[1]), (TWO_SHOT, 2, &two_shot(2))] {
            for i in 0..steps.len() {
                broken(call, rank, steps, &|s| {
                    s.remove(i);
                });
                broken(call, rank, steps, &|s| s.push(s[i]));
                broken(call, rank, steps, &|s| s[i].peer = 7);
                broken(call, rank, steps, &|s| s[i].bytes -= 1);
                broken(call, rank, steps, &|s| s[i].at = 1 << 40);
            }
        }
    }

    #[test]
    fn an_order_that_gives_another_sum_is_told() {
        let shots = one_shot();
        let position = |steps: &[Step], verb| steps.iter().position(|s| s.verb == verb).unwrap();
        let mut steps = shots[0].clone();
        let first = position(&steps, STEP_TAKE);
        steps.swap(first, first + 1);
        assert!(compare(lines(false), 0, &steps).unwrap_err().contains("is added where"));
        let mut steps = shots[0].clone();
        let store = steps.remove(position(&shots[0], STEP_STORE));
        steps.insert(0, store);
        assert!(compare(lines(false), 0, &steps).unwrap_err().contains("stored when"));
        // Only in place is it wrong to send what was stored before.
        let mut steps = shots[0].clone();
        let send = steps.remove(0);
        steps.push(send);
        assert_eq!(compare(lines(false), 0, &steps), Ok(()));
        assert!(compare(lines(true), 0, &steps).unwrap_err().contains("had overwritten"));
        let mut steps = two_shot(1);
        let sum = position(&steps, STEP_SUM);
        let sum = steps.remove(sum);
        steps.insert(0, sum);
        assert!(compare(TWO_SHOT, 1, &steps).unwrap_err().contains("the sum was sent when"));
    }

    #[test]
    fn a_place_that_is_used_again_too_early_or_holds_something_else_is_told() {
        let shots = one_shot();
        let broken = |change: &dyn Fn(&mut [Vec<Step>; 2])| {
            let mut all = shots.clone();
            change(&mut all);
            meet(&all).unwrap_err()
        };
        assert!(broken(&|all| all[0][1].place = 64).contains("not taken yet"));
        assert!(broken(&|all| all[0][0].time = 9).contains("nobody had sent it"));
        assert!(broken(&|all| all[0][0].place = 96).contains("nobody had sent it"));
        assert!(broken(&|all| all[0][0].at = 4).contains("there lay"));
        let lost = broken(&|all| {
            let taken = all[1].iter().position(|s| s.verb == STEP_TAKE && s.peer == 0).unwrap();
            all[1].remove(taken);
        });
        assert!(lost.contains("never taken"), "{lost}");
        let read = |of: u64, when| {
            let place = |s: Step| Step { place: REGISTERED, time: when, ..s };
            meet(&[vec![step(STEP_STORE, 0, of, 16, 0, 5)], vec![place(step(STEP_HEAR, 0, 0, 16, 0, 0))]])
        };
        assert_eq!(read(0, 6), Ok(()));
        assert!(read(0, 4).unwrap_err().contains("before it was stored") && read(16, 6).is_err());
    }
}
