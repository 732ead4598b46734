// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as threads and as processes, for tests of groups.
#![allow(dead_code, reason = "each test program uses a part")]

use std::{
    collections::HashMap,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use pcieipc::{
    Result,
    group::{Group, GroupOptions},
};

/// More than any healthy step takes on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A directory of this test alone, deleted at the end.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("pcieipc-test-{}-{count}", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn options(rank: usize, ranks: usize, directory: &Path) -> GroupOptions {
    GroupOptions { meeting_timeout: PATIENCE, ..GroupOptions::new(rank, ranks, directory) }
}

/// Runs `body` once a rank, each in a thread with a group of its own; gives the answers in rank order.
pub fn threads<R: Send>(
    ranks: usize,
    change: impl Fn(&mut GroupOptions) + Sync,
    body: impl Fn(Result<Group>) -> R + Sync,
) -> Vec<R> {
    let scratch = Scratch::new();
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..ranks)
            .map(|rank| {
                let (scratch, change, body) = (&scratch, &change, &body);
                scope.spawn(move || {
                    let mut options = options(rank, ranks, &scratch.0);
                    change(&mut options);
                    body(Group::meet(options))
                })
            })
            .collect();
        running.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

/// A rank as a process: this test program again, running the test `role` alone.
pub struct Process {
    pub child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

/// Starts `role` with these variables; `role` is a test that only does something under [`variables`].
pub fn process(role: &str, variables: &[(&str, String)]) -> Process {
    let program = std::env::current_exe().expect("own path");
    let mut command = Command::new(program);
    command.args(["--exact", role, "--nocapture", "--test-threads=1"]).env("PCIEIPC_TEST_ROLE", role);
    command.envs(variables.iter().map(|(k, v)| (format!("PCIEIPC_TEST_{k}"), v)));
    let mut child = command.stdout(Stdio::piped()).spawn().expect("start a rank");
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    Process { child, lines }
}

impl Process {
    /// The next line that the role says with [`say`].
    pub fn hear(&mut self) -> Option<String> {
        self.lines.by_ref().map_while(|l| l.ok()).find_map(|l| l.split_once("## ").map(|(_, said)| said.to_owned()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The variables of a role, or `None` when the test runs as a test.
pub fn variables(role: &str) -> Option<HashMap<String, String>> {
    (std::env::var("PCIEIPC_TEST_ROLE").ok()? == role)
        .then(|| std::env::vars().filter_map(|(k, v)| Some((k.strip_prefix("PCIEIPC_TEST_")?.to_owned(), v))).collect())
}

/// One line to the test that started this role.
pub fn say(text: impl std::fmt::Display) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "## {text}");
    let _ = out.flush();
}

/// What rank `rank` brings at `at`: differs between ranks and places, sums without rounding in f32.
pub fn value(rank: usize, at: usize) -> f32 {
    ((rank * 7919 + at * 31) % 2048) as f32 - 1000.0
}

/// The exact sum over these ranks, made in f64.
pub fn sum(ranks: impl IntoIterator<Item = usize>, at: usize) -> f64 {
    ranks.into_iter().map(|r| f64::from(value(r, at))).sum()
}
