// SPDX-License-Identifier: MIT OR Apache-2.0
//! Limits of a process that are too low: the run succeeds or fails with exit code 1 and a message, and leaves nothing behind.

mod harness;

use std::{os::unix::process::CommandExt, time::Duration};

use harness::{good, listing, pcieipc};
use nix::sys::resource::{Resource, setrlimit};

const REDUCE: [&str; 10] = [
    "reduce",
    "--ranks",
    "4",
    "--input",
    "grads.{rank}.safetensors",
    "--output",
    "sum.safetensors",
    "--transport=shm",
    "--timeout",
    "5s",
];

/// Runs reduce under a limit; gives its code and messages, and whether there is a sum.
fn under(resource: Resource, limit: u64) -> (Option<i32>, String) {
    let directory = good(4);
    let meeting = tempfile::tempdir().unwrap();
    let mut command = pcieipc(directory.path(), &REDUCE);
    command.env("TMPDIR", meeting.path());
    // SAFETY: setrlimit is safe to call between fork and exec, and this closure does nothing else.
    unsafe { command.pre_exec(move || Ok(setrlimit(resource, limit, limit)?)) };
    let mut before = listing(directory.path());
    let output = command.output().unwrap();
    // The process that cleans up may need a moment when the run was ended from outside.
    std::thread::sleep(Duration::from_millis(if output.status.code().is_none() { 500 } else { 0 }));
    if output.status.success() {
        before.push("sum.safetensors".into());
    }
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(listing(directory.path()), before, "{resource:?} {limit}: {err}");
    assert!(listing(meeting.path()).is_empty(), "{resource:?} {limit}: {err}");
    assert!(!err.contains("panicked"), "{resource:?} {limit}: {err}");
    (output.status.code(), err)
}

#[test]
fn too_few_open_files_at_any_place_are_a_failed_run_that_names_the_limit() {
    let mut failed = 0;
    for limit in 6..32 {
        let (code, err) = under(Resource::RLIMIT_NOFILE, limit);
        if code != Some(0) {
            failed += 1;
            assert_eq!(code, Some(1), "{limit}: {err}");
            assert!(err.contains("Too many open files") && err.contains("raise the limit of open files"), "{limit}: {err}");
        }
    }
    assert!(failed > 4, "{failed}");
}

#[test]
fn a_limit_of_file_sizes_is_a_failed_run_and_kills_nobody() {
    for limit in [0, 100, 4096, 1 << 17] {
        let (code, err) = under(Resource::RLIMIT_FSIZE, limit);
        assert!(code == Some(1), "{limit}: {code:?} {err}");
        assert!(err.contains("File too large"), "{limit}: {err}");
    }
}

#[test]
fn locked_memory_is_not_needed_without_the_module() {
    assert_eq!(under(Resource::RLIMIT_MEMLOCK, 0).0, Some(0));
}
