// SPDX-License-Identifier: MIT OR Apache-2.0
//! A checker that finds nothing wrong with anything would pass all tests of right plans; these are wrong ones.

use super::*;
use crate::plan::{Algorithm, Shape, Tree, build};

fn plans_of(collective: Collective, algorithm: Algorithm, n: usize, count: usize, chunk: usize) -> Option<Vec<Plan>> {
    let tree = Tree::groups(&[n - 1, 1]);
    let shape = Shape { root: n / 2, peer: 0, ..Shape::new(n, count, chunk) };
    (0..n).map(|r| build(collective, algorithm, shape, r, &tree)).collect()
}

fn plans(algorithm: Algorithm, n: usize, count: usize, chunk: usize) -> Vec<Plan> {
    plans_of(Collective::AllReduce, algorithm, n, count, chunk).unwrap()
}

/// Every single change of a kind that changes the meaning is found, wherever it is made: in every plan of 2 to 4 ranks. Answers how many plans
/// could be changed.
fn every_change_is_found(change: impl Fn(&mut Step) -> bool) -> usize {
    let pairs = Collective::ALL.into_iter().flat_map(|c| Algorithm::ALL.map(|a| (c, a)));
    let groups = pairs.flat_map(|(c, a)| (2..=4).filter_map(move |n| plans_of(c, a, n, 61, 4)));
    let mut changed = 0;
    for good in groups {
        let (name, before) = (format!("{} {} of {}", good[0].collective, good[0].algorithm, good.len()), changed);
        assert_eq!(check(&good).map(drop), Ok(()), "{name}");
        for rank in 0..good.len() {
            for phase in 0..good[rank].phases.len() {
                for step in 0..good[rank].phases[phase].len() {
                    let mut bad = good.clone();
                    if change(&mut bad[rank].phases[phase][step]) {
                        changed = before + 1;
                        assert!(check(&bad).is_err(), "{name}: rank {rank}, phase {phase}, step {step}");
                    }
                }
            }
        }
    }
    changed
}

/// The pairs of a collective and an algorithm, each for 2 to 4 ranks.
const ALL: usize = 25 * 3;
/// Without barriers, which move nothing.
const DATA: usize = 23 * 3;
/// Those that send data as records; the others read it where it lies.
const SENDING: usize = 19 * 3;

#[test]
fn a_missing_source_is_found() {
    let changed = every_change_is_found(|step| step.sources.pop().is_some());
    assert_eq!(changed, ALL);
}

#[test]
fn a_missing_target_is_found() {
    let changed = every_change_is_found(|step| step.targets.pop().is_some());
    assert_eq!(changed, ALL);
}

/// Both sides agree on it, so nothing else about these plans is wrong.
#[test]
fn two_records_of_one_rank_in_a_step_are_found() {
    let mut both = plans(Algorithm::OneShot, 2, 8, 8);
    let sends = |step: &&mut Step| step.targets.iter().any(|t| matches!(t, Target::Link { .. }));
    let takes = |step: &&mut Step| step.sources.iter().any(|s| matches!(s, Source::Link { .. }));
    both[0].phases.iter_mut().flatten().find(sends).unwrap().targets.push(Target::Signal(1));
    both.iter_mut().for_each(|plan| plan.depth += 1);
    assert!(matches!(check(&both), Err(Flaw::Place { rank: 0, what, .. }) if what == "two records to rank 1 in one step"));
    let mut both = plans(Algorithm::OneShot, 2, 8, 8);
    both[1].phases.iter_mut().flatten().find(takes).unwrap().sources.push(Source::Signal(0));
    assert!(matches!(check(&both), Err(Flaw::Place { rank: 1, what, .. }) if what == "two records from rank 0 in one step"));
}

#[test]
fn a_source_taken_twice_is_found() {
    let changed = every_change_is_found(|step| match step.sources.first().copied() {
        Some(source) if step.len > 0 => {
            step.sources.push(source);
            true
        }
        _ => false,
    });
    assert_eq!(changed, DATA);
}

#[test]
fn a_shorter_shard_is_found() {
    let changed = every_change_is_found(|step| {
        step.len = step.len.saturating_sub(4);
        step.len > 0
    });
    assert_eq!(changed, DATA);
}

#[test]
fn a_wrong_offset_is_found() {
    let changed = every_change_is_found(|step| {
        match step.sources.iter_mut().find_map(|s| if let Source::Input(at) = s { Some(at) } else { None }) {
            Some(at) => {
                *at = if *at == 0 { 1 } else { *at - 1 };
                step.len > 0
            }
            None => false,
        }
    });
    assert_eq!(changed, DATA);
}

#[test]
fn a_forgotten_or_doubled_finish_is_found() {
    let changed = every_change_is_found(|step| {
        step.finish = !step.finish;
        step.len > 0
    });
    assert_eq!(changed, DATA);
}

#[test]
fn a_wrong_form_is_found() {
    let changed = every_change_is_found(|step| {
        step.targets.iter_mut().any(|t| match t {
            Target::Link { form, .. } if step.len > 0 => {
                *form = if *form == Form::Element { Form::Partial } else { Form::Element };
                true
            }
            _ => false,
        })
    });
    assert_eq!(changed, SENDING);
}

#[test]
fn records_out_of_order_are_found() {
    let mut bad = plans(Algorithm::TwoShot, 3, 30, 4);
    // Rank 0 first answers with its shard and only then sends its part of rank 1's.
    let phase = bad[0].phases.remove(1);
    bad[0].phases.insert(0, phase);
    assert!(matches!(check(&bad), Err(Flaw::Record { .. } | Flaw::Cycle(_))));
}

#[test]
fn a_cycle_is_found_and_named() {
    let mut bad = plans(Algorithm::TwoShot, 2, 30, 4);
    for plan in &mut bad {
        plan.phases.swap(0, 1);
    }
    let flaw = check(&bad).unwrap_err();
    assert!(
        matches!(&flaw, Flaw::Cycle(text) if text.contains("rank 0") && text.contains("waits for a record of rank 1")),
        "{flaw}"
    );
}

#[test]
fn too_little_room_on_links_is_found() {
    let mut bad = plans(Algorithm::Ring, 6, 600, 4);
    bad.iter_mut().for_each(|p| p.depth = 1);
    assert!(matches!(check(&bad), Err(Flaw::Cycle(_))));
}

#[test]
fn registered_buffers_without_a_signal_before_or_after_are_a_race() {
    for phase in [0, 4] {
        let mut bad = plans(Algorithm::Direct, 3, 30, 4);
        for plan in &mut bad {
            plan.phases[phase].clear();
            plan.phases[phase + 1].clear();
        }
        assert!(matches!(check(&bad), Err(Flaw::Race(_))), "without phase {phase}");
    }
}

#[test]
fn a_result_copied_before_its_signal_is_a_race() {
    let mut bad = plans(Algorithm::Direct, 3, 30, 4);
    bad[1].phases[2][0].targets.retain(|t| *t != Target::Signal(2));
    bad[2].phases[3].iter_mut().for_each(|s| s.sources.retain(|s| *s != Source::Signal(1)));
    assert!(check(&bad).is_err());
}

#[test]
fn one_missing_signal_pair_is_a_race() {
    for (signals, waits) in [(0, 1), (4, 5)] {
        let mut bad = plans(Algorithm::Direct, 3, 30, 4);
        bad[1].phases[signals].retain(|s| s.targets != [Target::Signal(2)]);
        bad[2].phases[waits].retain(|s| s.sources != [Source::Signal(1)]);
        assert!(matches!(check(&bad), Err(Flaw::Race(_))), "{signals}");
    }
}

#[test]
fn an_input_read_after_its_result_was_stored_is_found_in_place_only() {
    let mut bad = plans(Algorithm::OneShot, 2, 8, 8);
    // Rank 0 stores the result and only then sends its input.
    let send = bad[0].phases[0].remove(0);
    let fold = bad[0].phases[1].remove(0);
    bad[0].phases = vec![vec![], vec![fold, send]];
    assert_eq!(Group::new(&bad, false).run().map(drop), Ok(()), "with two buffers it is right");
    let flaw = check(&bad).unwrap_err();
    assert!(matches!(flaw, Flaw::Wrong { in_place: true, .. } | Flaw::Place { .. }), "{flaw}");
}

#[test]
fn plans_of_different_calls_or_ranks_are_refused() {
    let mut bad = plans(Algorithm::OneShot, 3, 8, 8);
    bad.swap(0, 1);
    assert!(matches!(check(&bad), Err(Flaw::Unrelated(_))));
    bad.swap(0, 1);
    bad[2].shape.count = 9;
    assert!(matches!(check(&bad), Err(Flaw::Unrelated(_))));
    assert!(matches!(check(&[]), Err(Flaw::Unrelated(_))));
    let mut bad = plans(Algorithm::OneShot, 3, 8, 8);
    bad[1].phases[1][0].targets = vec![Target::Output(5)];
    assert!(matches!(check(&bad), Err(Flaw::Place { rank: 1, .. })));
}

#[test]
fn a_barrier_that_somebody_leaves_too_early_is_found() {
    for algorithm in [Algorithm::OneShot, Algorithm::RecursiveDoubling] {
        for n in 2..=16 {
            let good = plans_of(Collective::Barrier, algorithm, n, 0, 4).unwrap();
            assert_eq!(check(&good).map(drop), Ok(()), "{algorithm}, {n} ranks");
            // Each word of a rank to another is needed: without it and the wait for it, all records are read and all ranks end.
            for (rank, phase, step) in (0..n).flat_map(|r| (0..good[r].phases.len()).map(move |p| (r, p, 0))) {
                let mut bad = good.clone();
                let Some(&Target::Signal(to)) = bad[rank].phases[phase].get(step).and_then(|s| s.targets.first()) else {
                    continue;
                };
                bad[rank].phases[phase].remove(step);
                bad[to].phases[phase + 1].retain(|s| s.sources != [Source::Signal(rank)]);
                let flaw = check(&bad).unwrap_err();
                assert!(matches!(flaw, Flaw::Early { .. }), "{algorithm}, {n} ranks, {rank} to {to}: {flaw}");
            }
        }
    }
}

#[test]
fn a_call_of_nothing_in_which_nobody_waits_is_found() {
    let pairs =
        Collective::ALL.into_iter().filter(|c| *c != Collective::SendReceive).flat_map(|c| Algorithm::ALL.map(|a| (c, a)));
    for (collective, algorithm) in pairs {
        let Some(good) = plans_of(collective, algorithm, 3, 0, 4) else { continue };
        assert_eq!(check(&good).map(drop), Ok(()), "{collective} {algorithm}");
        let mut bad = good;
        bad.iter_mut().flat_map(|p| &mut p.phases).for_each(Vec::clear);
        assert_eq!(check(&bad), Err(Flaw::Early { rank: 0, of: 1 }), "{collective} {algorithm}");
    }
}

#[test]
fn a_buffer_that_a_slower_rank_still_reads_in_the_call_before_is_a_race() {
    // All read their block of rank 0's input; without the last words rank 0 goes on and writes its input anew.
    let mut first = plans_of(Collective::ReduceScatter, Algorithm::Direct, 3, 8, 4).unwrap();
    let second = plans(Algorithm::TwoShot, 3, 24, 4);
    assert_eq!(check_in_a_row(&[first.clone(), second.clone()]), Ok(()));
    for plan in &mut first {
        plan.phases[3].clear();
        plan.phases[4].clear();
    }
    assert!(matches!(check_in_a_row(&[first, second]), Err(Flaw::Race(_))));
}
