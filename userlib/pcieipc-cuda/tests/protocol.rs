// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels' protocol, compiled for the processor and run by threads with delays at random, under a thread sanitizer where there is one.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use pcieipc::plan::check;
use pcieipc_cuda::{
    choice::Choice,
    kernels::NAMES,
    trace::{Call, Step, compare, meet},
};

/// Builds the program once: with the thread sanitizer where a compiler has its run time, otherwise without, and says so.
fn program(traces: bool) -> &'static Path {
    static PROGRAMS: [OnceLock<PathBuf>; 2] = [const { OnceLock::new() }; 2];
    PROGRAMS[usize::from(traces)].get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(if traces { "threads-traced" } else { "threads" });
        let mut why = String::new();
        for sanitizer in [&["-fsanitize=thread"][..], &[]] {
            let compilers = std::env::var("CXX").ok().into_iter().chain(["clang++".to_owned(), "g++".to_owned()]);
            for compiler in compilers {
                let built = Command::new(&compiler)
                    .args(["-std=c++17", "-O1", "-g", "-Wall", "-Wno-unknown-pragmas", "-pthread", "-I"])
                    .arg(folder.join("kernels"))
                    .args(sanitizer)
                    .args(traces.then_some("-DPCIEIPC_TRACE"))
                    .arg("-o")
                    .arg(&program)
                    .arg(folder.join("tests/protocol/threads.cc"))
                    .output();
                match built {
                    Ok(output) if output.status.success() => {
                        if sanitizer.is_empty() {
                            eprintln!("no compiler here has the thread sanitizer; the protocol runs without it");
                        }
                        return program;
                    }
                    Ok(output) => why += &format!("{compiler}: {}\n", String::from_utf8_lossy(&output.stderr)),
                    Err(error) => why += &format!("{compiler}: {error}\n"),
                }
            }
        }
        panic!("no C++ compiler builds the protocol:\n{why}");
    })
}

fn run(arguments: &[&str]) {
    let output = Command::new(program(false)).args(arguments).env("TSAN_OPTIONS", "halt_on_error=1").output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && told.starts_with("ok"),
        "{arguments:?}: {told}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn sums_are_right_and_no_access_races_for_two_and_three_ranks_over_the_wrap_of_the_epoch() {
    for seed in 1..=6 {
        run(&[&seed.to_string(), "20"]);
    }
}

#[test]
fn sums_are_right_when_ranks_come_late() {
    run(&["1", "20", "late"]);
    run(&["2", "20", "late"]);
}

#[test]
fn what_a_copy_engine_wrote_before_never_passes_for_what_is_to_come() {
    for seed in 1..=3 {
        run(&[&seed.to_string(), "40", "engine"]);
    }
}

#[test]
fn shares_of_three_to_five_ranks_are_right_when_one_lags_behind() {
    for seed in 1..=6 {
        run(&[&seed.to_string(), "12", "shares"]);
    }
}

#[test]
fn tensors_that_are_read_where_they_lie_are_not_changed_while_another_rank_lags_behind() {
    for seed in 1..=6 {
        run(&[&seed.to_string(), "12", "direct"]);
    }
}

#[test]
fn ranks_that_call_with_different_lengths_are_told_so() {
    // Of even seeds, the verdict falls between two threads' looks at it.
    for seed in 1..=16 {
        run(&[&seed.to_string(), "6", "short"]);
    }
}

#[test]
fn a_rank_that_does_not_call_is_given_up_at_the_deadline() {
    run(&["1", "10", "dead"]);
    run(&["2", "10", "dead"]);
}

/// What the program printed of a call.
struct Traced {
    choice: Choice,
    ranks: usize,
    bytes: u64,
    in_place: bool,
    /// Of each rank.
    steps: Vec<Vec<Step>>,
}

fn calls(told: &str) -> Vec<Traced> {
    let mut all: Vec<Traced> = Vec::new();
    let mut announced = Vec::new();
    for line in told.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |i: usize| words[i].parse::<u64>().unwrap();
        match words[0] {
            "call" => {
                let kernel = NAMES.into_iter().find(|name| *name == words[1]).unwrap();
                let (blocks, tile) = (number(4) as u32, number(5) as u32);
                let choice = Choice { kernel, blocks, threads: 0, push_warps: 0, tile, linger: 0, prefix: number(6) };
                let (ranks, bytes, in_place) = (number(2) as usize, number(3), number(7) == 1);
                all.push(Traced { choice, ranks, bytes, in_place, steps: Vec::new() });
            }
            "rank" => {
                announced.push(number(2) as usize);
                all.last_mut().unwrap().steps.push(Vec::new());
            }
            "ok" => {}
            _ => {
                let [verb, peer, epoch, bytes] = [0, 1, 2, 3].map(|i| number(i) as u32);
                let step = Step { verb, peer, epoch, bytes, at: number(4), place: number(5), time: number(6) };
                all.last_mut().unwrap().steps.last_mut().unwrap().push(step);
            }
        }
    }
    let lens: Vec<usize> = all.iter().flat_map(|call| call.steps.iter().map(Vec::len)).collect();
    assert_eq!(announced, lens, "the trace had no room for all steps");
    all
}

#[test]
fn every_kernel_takes_the_steps_of_a_plan_that_is_proved_and_no_place_is_written_before_it_is_read() {
    let mut kernels = std::collections::BTreeSet::new();
    for seed in 1..=16u32 {
        let output = Command::new(program(true)).args([&seed.to_string(), "10", "trace"]).output().unwrap();
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "seed {seed}: {}", String::from_utf8_lossy(&output.stderr));
        let mut of_all_calls: Vec<Vec<Step>> = Vec::new();
        for Traced { choice, ranks, bytes, in_place, steps } in calls(&told) {
            kernels.insert(choice.kernel);
            assert!(steps.len() == ranks && steps.iter().any(|s| !s.is_empty()) == (bytes > 0));
            for (rank, steps) in steps.iter().enumerate() {
                let call = Call { choice: &choice, ranks, bytes, in_place };
                compare(call, rank, steps).unwrap_or_else(|e| panic!("seed {seed}, {choice}, {bytes} bytes: {e}"));
            }
            let plans: Vec<Vec<_>> = (0..ranks).map(|rank| choice.plans(ranks, rank, bytes)).collect();
            for part in 0..plans[0].len() {
                let of_ranks: Vec<_> = plans.iter().map(|p| p[part].1.clone()).collect();
                let proof = check(&of_ranks).unwrap_or_else(|flaw| panic!("{choice}, {bytes} bytes: {flaw}"));
                assert!(proof.rank_order && proof.in_place, "{choice}");
            }
            of_all_calls.resize_with(ranks, Vec::new);
            of_all_calls.iter_mut().zip(steps).for_each(|(all, steps)| all.extend(steps));
        }
        meet(&of_all_calls).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
    // All of the program ran.
    assert_eq!(kernels.len(), 11, "{kernels:?}");
}
