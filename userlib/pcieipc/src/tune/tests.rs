// SPDX-License-Identifier: MIT OR Apache-2.0
use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use super::*;

const USUAL: Calibration =
    Calibration { step_ns: 100, hop_ns: 150, processors: 16, megabytes: [8_000, 12_000, 18_000, 20_000, 22_000, 18_000] };

fn default(bytes: usize) -> Choice {
    Choice { algorithm: if bytes <= 8 << 10 { Algorithm::OneShot } else { Algorithm::TwoShot }, chunk: 128 << 10 }
}

fn choose(tree: &Tree, calibration: Calibration, bytes: usize) -> Choice {
    Tuner::new(tree.clone(), tree.ranks().len(), calibration).choice(Collective::AllReduce, bytes, default(bytes))
}

#[test]
fn the_slower_a_step_is_the_longer_messages_go_in_one() {
    let tree = Tree::flat(4);
    let last = |calibration| {
        (3..24).map(|p| 1usize << p).filter(|b| choose(&tree, calibration, *b).algorithm == Algorithm::OneShot).max()
    };
    let slow = Calibration { step_ns: 5_000, hop_ns: 5_000, ..USUAL };
    let fast = Calibration { step_ns: 10, hop_ns: 10, ..USUAL };
    assert!(last(slow) > last(fast), "{:?} {:?}", last(slow), last(fast));
    assert_eq!(choose(&tree, USUAL, 256 << 20).algorithm, Algorithm::TwoShot);
}

#[test]
fn a_chunk_that_was_measured_to_be_much_faster_is_taken_for_long_messages() {
    let tree = Tree::flat(2);
    for (at, chunk) in CHUNKS.into_iter().enumerate() {
        let mut calibration = Calibration { megabytes: [5_000; RECORDS.len()], ..USUAL };
        calibration.megabytes[RECORDS.len() - CHUNKS.len() + at] = 50_000;
        assert_eq!(choose(&tree, calibration, 64 << 20), Choice { algorithm: Algorithm::TwoShot, chunk });
    }
}

#[test]
fn only_plans_in_rank_order_are_chosen_and_all_arguments_have_an_answer() {
    let trees = [Tree::flat(1), Tree::flat(2), Tree::groups(&[2, 2]), Tree::groups(&[4, 4])];
    let odd = Calibration { step_ns: 1, hop_ns: 100_000_000, processors: 1, megabytes: [1, 10_000_000, 1, 1, 10_000_000, 1] };
    for tree in trees {
        for calibration in [USUAL, odd] {
            for bytes in [0, 1, 100_000, usize::MAX] {
                let tuner = Tuner::new(tree.clone(), tree.ranks().len(), calibration);
                for collective in Collective::ALL {
                    let choice = tuner.choice(collective, bytes, default(bytes));
                    assert!(choice.algorithm.adds_in_rank_order(), "{collective} {tree} {choice:?}");
                }
            }
        }
    }
}

#[test]
fn a_chunk_longer_than_the_message_is_the_same_plan_and_no_reason_to_leave_the_default() {
    let calibration = Calibration { megabytes: [50_000, 50_000, 50_000, 50_000, 5_000, 5_000], ..USUAL };
    for bytes in [64, 4096, 8192] {
        assert_eq!(choose(&Tree::flat(2), calibration, bytes).chunk, default(bytes).chunk, "{bytes}");
    }
}

#[test]
fn ranks_that_share_processors_keep_the_default() {
    let slow = Calibration { step_ns: 50_000, processors: 3, ..USUAL };
    for bytes in [16 << 10, 64 << 10] {
        assert_eq!(choose(&Tree::flat(4), slow, bytes), default(bytes));
        assert_ne!(choose(&Tree::flat(3), slow, bytes), default(bytes));
    }
}

#[test]
fn sixteen_ranks_choose_whatever_chunk_they_were_given() {
    let tuner = Tuner::new(Tree::flat(16), 16, USUAL);
    let usual = Choice { algorithm: Algorithm::OneShot, chunk: 64 };
    let choice = tuner.choice(Collective::AllReduce, usize::MAX, usual);
    assert_eq!(choice.algorithm, Algorithm::TwoShot, "{choice:?}");
}

#[test]
fn the_order_of_ranks_in_the_tree_is_that_of_the_model() {
    // Ranks 0 and 2 are near each other: a route between them passes one part, one to rank 1 passes three.
    let tree: Tree = "((0 2) (1 3))".parse().unwrap();
    let machine = Machine::of_processes(&tree, USUAL.processes(64)).unwrap();
    assert_eq!(machine.tree(), tree);
    assert!(machine.route(0, 2).len() < machine.route(0, 1).len());
    // Parts and ranks side by side, in any order.
    let tree: Tree = "(3 (0 2) 1)".parse().unwrap();
    let machine = Machine::of_processes(&tree, USUAL.processes(64)).unwrap();
    assert!(machine.route(0, 2).len() < machine.route(0, 3).len());
    assert_eq!(machine.route(3, 1).len(), 2);
}

#[test]
fn a_stored_calibration_is_found_by_its_key_alone_and_garbage_is_none() {
    let directory = tempfile::tempdir().unwrap();
    let below = directory.path().join("a/b");
    assert_eq!(cache::stored_in(&below, "key"), None);
    let file = cache::store_in(&below, "key", &USUAL).unwrap();
    assert_eq!(cache::stored_in(&below, "key"), Some(USUAL));
    assert_eq!(cache::stored_in(&below, "another key"), None);
    let other = Calibration { step_ns: 7, ..USUAL };
    cache::store_in(&below, "key", &other).unwrap();
    assert_eq!(cache::stored_in(&below, "key"), Some(other));
    assert_eq!(std::fs::read_dir(&below).unwrap().count(), 1, "nothing partial is left");
    let good = std::fs::read_to_string(&file).unwrap();
    for bad in [
        "",
        "{",
        "null",
        "\u{0}\u{1}",
        &good[..good.len() / 2],
        &good.replace("\"key\": \"key\"", "\"key\": \"x\""),
        &good.replace(": 7", ": 0"),
    ] {
        std::fs::write(&file, bad).unwrap();
        assert_eq!(cache::stored_in(&below, "key"), None, "{bad}");
    }
    std::fs::write(&file, vec![b'['; 1 << 20]).unwrap();
    assert_eq!(cache::stored_in(&below, "key"), None);
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    assert_eq!(cache::stored_in(&below, "key"), None);
}

#[test]
fn two_times_give_the_step_and_the_hop_behind_them() {
    let (step, hop) = measure::solve([(2.0, 1.0), (3.0, 2.0)], [2.0 * 0.3 + 0.2, 3.0 * 0.3 + 2.0 * 0.2]);
    assert!((step - 0.3).abs() < 1e-9 && (hop - 0.2).abs() < 1e-9, "{step} {hop}");
    // Noise: the longer plan was faster.
    assert_eq!(measure::solve([(2.0, 1.0), (3.0, 2.0)], [10.0, 1.0]), (5.0, 0.0));
}

/// A machine on paper: what an all-reduce of two ranks takes in microseconds, by the definition of its plans and not by the simulator. A step
/// costs 0.1 and a way to the other rank 0.2; a byte that is loaded or stored costs what `ns` says for records of that length.
fn on_paper(choice: Choice, bytes: f64, ns: impl Fn(f64) -> f64) -> f64 {
    let (step, way) = (0.1, 0.2);
    match choice.algorithm {
        // Copy the input out (a load and a store of all), wait a hop, add both and store (two loads and a store of all).
        Algorithm::OneShot => 2.0 * step + way + 5.0 * bytes * ns(bytes) / 1e3,
        // Send the other's half; wait; add two halves and store the sum at home and in the ring; wait; copy a half.
        _ => {
            let half = bytes / 2.0;
            3.0 * step + 2.0 * way + (2.0 + 4.0 + 2.0) * half * ns(half.min(choice.chunk as f64)) / 1e3
        }
    }
}

#[test]
fn a_machine_that_is_known_is_found_and_predicted_at_sizes_that_were_not_measured() {
    // A byte of a short record costs twice what one of a long record does.
    let ns = |record: f64| if record < 1024.0 { 0.2 } else { (0.2 - 0.02 * (record / 1024.0).log2()).max(0.1) };
    let found = Calibration::from(2, |choice, count| Ok(on_paper(choice, count as f64 * 4.0, ns))).unwrap();
    // A way passes two links of the model.
    assert!((97..=103).contains(&found.step_ns) && (97..=103).contains(&found.hop_ns), "{found:?}");
    let tuner = Tuner::new(Tree::flat(2), 2, found);
    for size in [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768] {
        for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
            // Longer records were measured many behind each other, whose steps overlap: more than this paper holds.
            if algorithm == Algorithm::OneShot && size > 16384 {
                continue;
            }
            let choice = Choice { algorithm, chunk: 64 << 10 };
            let (predicted, right) =
                (tuner.predict(Collective::AllReduce, choice, size).unwrap(), on_paper(choice, size as f64, ns));
            assert!((predicted / right - 1.0).abs() < 0.05, "{algorithm} of {size}: {predicted} predicted, {right} on paper");
        }
    }
}

#[test]
fn rates_of_records_between_two_that_were_measured_lie_between_theirs() {
    let calibration = Calibration { megabytes: [1_000, 2_000, 4_000, 8_000, 10_000, 9_000], ..USUAL };
    let rate = |record| (calibration.rate(record) * 1e3).round();
    for (record, megabytes) in RECORDS.into_iter().zip([1_000.0, 2_000.0, 4_000.0, 8_000.0, 10_000.0, 9_000.0]) {
        assert_eq!(rate(record), megabytes);
    }
    // Half of the doublings: half of the nanoseconds between 1 and 0.5.
    assert_eq!(rate(2048), (1e3 / 0.75f64).round());
    assert_eq!((rate(1), rate(0), rate(usize::MAX)), (1_000.0, 1_000.0, 9_000.0));
}

#[test]
fn who_comes_first_measures_and_all_others_wait_and_get_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let (below, measured) = (directory.path().join("not/there/yet"), AtomicUsize::new(0));
    let far = Duration::from_secs(60);
    let first_use = || {
        cache::stored_or(&below, "key", far, |meeting| {
            assert!(!meeting.exists() && meeting.parent() == Some(below.as_path()));
            let number = measured.fetch_add(1, Ordering::Relaxed) as u32;
            std::thread::sleep(Duration::from_millis(50));
            Ok(Calibration { step_ns: 100 + number, ..USUAL })
        })
    };
    let found: Vec<_> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..8).map(|_| scope.spawn(first_use)).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
    });
    assert_eq!((found, measured.load(Ordering::Relaxed)), (vec![USUAL; 8], 1));
    assert_eq!(first_use().unwrap(), USUAL);
    assert_eq!(measured.load(Ordering::Relaxed), 1);
}

#[test]
fn a_measurement_that_fails_or_takes_too_long_is_an_error_and_the_next_one_may_measure() {
    let directory = tempfile::tempdir().unwrap();
    let below = directory.path();
    let fails = |_: &std::path::Path| Err(crate::Error::Argument("a busy machine".into()));
    assert!(cache::stored_or(below, "key", Duration::ZERO, fails).is_err());
    // Somebody else measures meanwhile.
    let inner = cache::stored_or(below, "key", Duration::ZERO, |_| {
        assert!(cache::stored_or(below, "key", Duration::from_millis(30), |_| Ok(USUAL)).is_err());
        Ok(Calibration { step_ns: 7, ..USUAL })
    });
    assert_eq!(inner.unwrap().step_ns, 7);
    assert_eq!(cache::stored_or(below, "key", Duration::ZERO, fails).unwrap().step_ns, 7);
}

#[test]
fn this_machine_is_measured_in_bounded_time_and_the_numbers_are_plausible() {
    let directory = tempfile::tempdir().unwrap();
    let meeting = directory.path().join("meeting");
    let found = Calibration::measure(&meeting).unwrap();
    assert!(found.is_plausible(), "{found:?}");
    assert!(!meeting.exists());
}

/// Four ranks: the endpoints of two below one switch with a narrow uplink, those of two others on ports of their own.
fn behind_a_switch(uplink: u32) -> Ways {
    Ways { links: vec![12_000, 12_000, 12_000, 12_000, uplink], up: vec![vec![0, 4], vec![1, 4], vec![2], vec![3]] }
}

#[test]
fn a_narrow_link_makes_what_engines_carry_slower_and_changes_what_is_chosen() {
    let tree = Tree::flat(4);
    let time = |uplink, choice, bytes| {
        let tuner = Tuner::new(tree.clone(), 4, USUAL).over(Some(behind_a_switch(uplink)));
        tuner.predict(Collective::AllReduce, choice, bytes).unwrap()
    };
    let two_shot = Choice { algorithm: Algorithm::TwoShot, chunk: 128 << 10 };
    let (wide, narrow) = (time(12_000, two_shot, 16 << 20), time(1_000, two_shot, 16 << 20));
    assert!(narrow > 4.0 * wide, "{narrow} us over a narrow uplink, {wide} over a wide one");
    // The size up to which a message goes to everybody at once depends on what the links carry.
    let last = |uplink| {
        let tuner = Tuner::new(tree.clone(), 4, USUAL).over(Some(behind_a_switch(uplink)));
        let one_shot =
            |bytes: &usize| tuner.choice(Collective::AllReduce, *bytes, default(*bytes)).algorithm == Algorithm::OneShot;
        (6..24).map(|p| 1usize << p).filter(one_shot).max().unwrap_or(0)
    };
    assert!(last(12_000) > last(100), "{} {}", last(12_000), last(100));
    // Processors carry through memory.
    let none = Tuner::new(tree.clone(), 4, USUAL).predict(Collective::AllReduce, two_shot, 16 << 20);
    assert_eq!(none, Tuner::new(tree, 4, USUAL).over(None).predict(Collective::AllReduce, two_shot, 16 << 20));
}

#[test]
fn ways_of_other_ranks_or_of_links_that_are_not_there_are_not_taken() {
    assert!(behind_a_switch(1).is_sound(4) && !behind_a_switch(1).is_sound(3));
    assert!(!Ways { links: vec![0], up: vec![vec![0]] }.is_sound(1));
    assert!(!Ways { links: vec![1], up: vec![vec![1]] }.is_sound(1));
    assert!(!Ways { links: vec![1; 65], up: vec![vec![]] }.is_sound(1));
    assert!(behind_a_switch(5).among(&[1, 3]).is_sound(2));
    assert_eq!(behind_a_switch(5).among(&[1, 3]).up, [vec![1, 4], vec![3]]);
}
