// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels' protocol, compiled for the processor and run by threads with delays at random, under a thread sanitizer where there is one.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// Builds the program once: with the thread sanitizer where a compiler has its run time, otherwise without, and says so.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("threads");
        let mut why = String::new();
        for sanitizer in [&["-fsanitize=thread"][..], &[]] {
            let compilers = std::env::var("CXX").ok().into_iter().chain(["clang++".to_owned(), "g++".to_owned()]);
            for compiler in compilers {
                let built = Command::new(&compiler)
                    .args(["-std=c++17", "-O1", "-g", "-Wall", "-Wno-unknown-pragmas", "-pthread", "-I"])
                    .arg(folder.join("kernels"))
                    .args(sanitizer)
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
    let output = Command::new(program()).args(arguments).env("TSAN_OPTIONS", "halt_on_error=1").output().unwrap();
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
