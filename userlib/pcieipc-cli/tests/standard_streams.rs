// SPDX-License-Identifier: MIT OR Apache-2.0
//! Standard streams that can not be written: an exit code and a message, never a panic, and the work done all the same.

mod harness;

use std::{
    fs::{self, OpenOptions},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    process::Stdio,
};

use harness::{good, pcieipc};

const REDUCE: [&str; 8] =
    ["reduce", "--ranks", "2", "--input", "grads.{rank}.safetensors", "--output", "sum.safetensors", "--transport=shm"];

/// Every command that writes to standard output; each with a table and with JSON.
fn commands() -> Vec<Vec<&'static str>> {
    let mut commands: Vec<Vec<&str>> = [
        &REDUCE[..],
        &["info"],
        &["doctor"],
        &["topo"],
        &["plan", "--ranks", "4"],
        &["simulate"],
        &["simulate", "--machine", "four-on-a-switch", "--max", "4K"],
        &["bench", "--ranks", "2", "--min", "1K", "--max", "1K", "--transport=shm"],
        &["demo", "--ranks", "3", "--input", "grads.{rank}.safetensors", "--out", "demo", "--transport=shm"],
    ]
    .map(<[&str]>::to_vec)
    .into();
    let json: Vec<_> = commands.iter().map(|command| [&command[..], &["--json"]].concat()).collect();
    commands.extend(json);
    commands
}

/// Runs a command whose standard output and error are what they are; gives its exit code and its messages, where they can be had.
fn run(directory: &Path, arguments: &[&str], out: Stdio, err: Stdio) -> (Option<i32>, String) {
    let output = pcieipc(directory, arguments).stdout(out).stderr(err).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

fn full() -> Stdio {
    OpenOptions::new().write(true).open("/dev/full").unwrap().into()
}

/// A stream whose reader is gone.
fn closed() -> Stdio {
    let (here, _) = UnixStream::pair().unwrap();
    OwnedFd::from(here).into()
}

#[test]
fn a_full_standard_output_is_a_failed_run_that_says_so() {
    for command in commands() {
        let directory = good(3);
        let (code, err) = run(directory.path(), &command, full(), Stdio::piped());
        assert_eq!(code, Some(1), "{command:?}: {err}");
        assert!(!err.contains("panicked"), "{command:?}: {err}");
    }
}

#[test]
fn a_reader_that_has_enough_changes_nothing() {
    for command in commands() {
        let directory = good(3);
        let (expected, _) = run(directory.path(), &command, Stdio::null(), Stdio::piped());
        let (code, err) = run(directory.path(), &command, closed(), Stdio::piped());
        assert_eq!(code, expected, "{command:?}: {err}");
        assert!(!err.contains("panicked"), "{command:?}: {err}");
    }
}

#[test]
fn messages_that_nobody_can_read_change_nothing() {
    for err in [full, closed] {
        let directory = good(2);
        assert_eq!(run(directory.path(), &REDUCE, Stdio::null(), err()).0, Some(0));
        assert!(directory.path().join("sum.safetensors").exists());
        fs::remove_file(directory.path().join("grads.0.safetensors")).unwrap();
        assert_eq!(run(directory.path(), &REDUCE, Stdio::null(), err()).0, Some(2));
    }
}

#[test]
fn a_sum_is_whole_even_if_its_table_can_not_be_told() {
    let directory = good(2);
    let sum = directory.path().join("sum.safetensors");
    assert_eq!(run(directory.path(), &REDUCE, Stdio::null(), Stdio::null()).0, Some(0));
    let whole = fs::read(&sum).unwrap();
    fs::remove_file(&sum).unwrap();
    let (code, err) = run(directory.path(), &REDUCE, full(), Stdio::piped());
    assert_eq!(code, Some(1));
    assert!(err.contains("standard output: No space left"), "{err}");
    assert_eq!(fs::read(&sum).unwrap(), whole);
}
