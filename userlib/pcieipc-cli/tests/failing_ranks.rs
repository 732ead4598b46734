// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that die or hang: the run ends within its bound with exit code 1, says who, and leaves nothing behind.

mod harness;

use std::{
    fs,
    io::Read,
    path::Path,
    process::Child,
    time::{Duration, Instant},
};

use harness::{Ran, f32s, good, listing, pcieipc, write};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

const SUM: &str = "sum.safetensors";

fn reduce(ranks: &str, timeout: &str) -> Vec<String> {
    ["reduce", "--ranks", ranks, "--input", "grads.{rank}.safetensors", "--output", SUM, "--transport=shm", "--timeout", timeout]
        .map(String::from)
        .into()
}

/// A run that has been started, with a folder of its own for what ranks meet in.
struct Started {
    child: Child,
    meeting: tempfile::TempDir,
    start: Instant,
}

impl Started {
    fn new(directory: &Path, arguments: &[String]) -> Self {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let meeting = tempfile::tempdir().unwrap();
        let child = pcieipc(directory, &arguments).env("TMPDIR", meeting.path()).spawn().unwrap();
        Self { child, meeting, start: Instant::now() }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// The rank processes in the order of their start.
    fn ranks(&self) -> Vec<Pid> {
        let path = format!("/proc/{0}/task/{0}/children", self.child.id());
        let children = fs::read_to_string(path).unwrap_or_default();
        let children = children.split_whitespace().map(|pid| Pid::from_raw(pid.parse().unwrap()));
        children.filter(|pid| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(b"\0rank\0"))).collect()
    }

    /// All processes that have this run's private folder in their environment.
    fn processes(&self) -> Vec<i32> {
        let mark = format!("TMPDIR={}\0", self.meeting.path().display());
        let of_this_run = |pid: &i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            String::from_utf8_lossy(&environment).contains(&mark)
        };
        let all = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
        all.filter(of_this_run).collect()
    }

    /// Waits until `done`, looking often.
    fn until(&self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        while !done(self) {
            assert!(self.start.elapsed() < Duration::from_secs(60), "{what} did not happen");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn end(mut self) -> Ran {
        let (mut out, mut err) = (String::new(), String::new());
        self.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        let code = self.child.wait().unwrap().code();
        let left = listing(self.meeting.path());
        assert!(left.is_empty(), "left in the temporary folder: {left:?}");
        Ran { code, out, err, took: self.start.elapsed() }
    }
}

/// Starts a run and catches it while some of its ranks have not been started, so that no group can have met.
fn caught_before_meeting(directory: &Path, arguments: &[String], ranks: usize) -> Started {
    for _ in 0..50 {
        let mut run = Started::new(directory, arguments);
        run.until("the first rank", |run| !run.ranks().is_empty());
        kill(run.pid(), Signal::SIGSTOP).unwrap();
        // Stopping takes effect a moment later.
        run.until("stopping", |run| {
            let stat = fs::read_to_string(format!("/proc/{}/stat", run.child.id())).unwrap();
            stat.rsplit(')').next().unwrap().trim_start().starts_with('T')
        });
        if run.ranks().len() < ranks {
            return run;
        }
        run.child.kill().unwrap();
        run.child.wait().unwrap();
    }
    panic!("all ranks were always there before the run could be stopped");
}

/// Files with so many tensors that a run of four ranks takes a while.
fn long(ranks: usize) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for rank in 0..ranks {
        let tensors: Vec<_> = (0..6_000).map(|at| f32s(&format!("t{at:05}"), &[8], &[rank as f32; 8])).collect();
        write(&directory.path().join(format!("grads.{rank}.safetensors")), &tensors);
    }
    directory
}

#[test]
fn a_rank_that_dies_before_the_group_meets_ends_the_run_at_once() {
    let directory = good(16);
    let before = listing(directory.path());
    let run = caught_before_meeting(directory.path(), &reduce("16", "60s"), 16);
    let first = run.ranks()[0];
    kill(first, Signal::SIGKILL).unwrap();
    kill(run.pid(), Signal::SIGCONT).unwrap();
    let ran = run.end();
    ran.fails(1, &["rank 0 died before the group had met", "SIGKILL"]);
    assert!(ran.took < Duration::from_secs(40), "{:?}", ran.took);
    assert_eq!(listing(directory.path()), before);
}

#[test]
fn a_rank_that_never_comes_to_the_meeting_is_named_by_the_others_within_the_bound() {
    let directory = good(16);
    let run = caught_before_meeting(directory.path(), &reduce("16", "1s"), 16);
    let first = run.ranks()[0];
    kill(first, Signal::SIGSTOP).unwrap();
    kill(run.pid(), Signal::SIGCONT).unwrap();
    let ran = run.end();
    ran.fails(1, &["rank 0", "meet"]);
    assert!(ran.took < Duration::from_secs(40), "{:?}", ran.took);
}

#[test]
fn a_rank_that_dies_in_the_middle_is_named_by_every_other_and_nothing_is_written() {
    let directory = long(4);
    let before = listing(directory.path());
    let run = Started::new(directory.path(), &reduce("4", "10s"));
    let mut victim = None;
    run.until("the run's middle", |run| {
        victim = run.ranks().get(2).copied();
        let Some(victim) = victim else { return false };
        // It has said that it met, and all reports of tensors come after the last reduce.
        fs::read_to_string(format!("/proc/{victim}/io"))
            .is_ok_and(|io| io.lines().any(|line| line.strip_prefix("wchar: ").is_some_and(|n| n.parse::<u64>().unwrap() > 60)))
    });
    kill(victim.unwrap(), Signal::SIGKILL).unwrap();
    let ran = run.end();
    ran.fails(1, &["rank 2: died (killed by SIGKILL)", "rank 0: rank 2 died", "rank 1: rank 2 died", "rank 3: rank 2 died"]);
    assert!(ran.took < Duration::from_secs(40), "{:?}", ran.took);
    assert_eq!(listing(directory.path()), before);
}

#[test]
fn an_interrupted_run_leaves_nothing_behind() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let directory = long(4);
        let before = listing(directory.path());
        let run = Started::new(directory.path(), &reduce("4", "10s"));
        run.until("four ranks", |run| run.ranks().len() == 4);
        let ranks = run.ranks();
        // One rank stands still, so that the run can not end by itself.
        kill(ranks[1], Signal::SIGSTOP).unwrap();
        run.until("the output's beginning", |_| listing(directory.path()) != before);
        kill(run.pid(), signal).unwrap();
        let ran = run.end();
        ran.fails(1, &["interrupted"]);
        assert_eq!(listing(directory.path()), before);
        for rank in ranks {
            assert!(kill(rank, None).is_err(), "rank process {rank} still lives");
        }
    }
}

#[test]
fn ranks_end_when_their_parent_is_killed() {
    let directory = long(4);
    let mut run = Started::new(directory.path(), &reduce("4", "60s"));
    run.until("four ranks", |run| run.ranks().len() == 4);
    let ranks = run.ranks();
    kill(ranks[3], Signal::SIGSTOP).unwrap();
    run.child.kill().unwrap();
    run.child.wait().unwrap();
    // It may have been stopped before it had asked the kernel to end it with its parent, and must then find out by itself.
    kill(ranks[3], Signal::SIGCONT).ok();
    let gone = |pid: &Pid| fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z"));
    run.until("the end of all ranks", |_| ranks.iter().all(gone));
}

#[test]
fn a_run_that_is_killed_at_any_moment_leaves_neither_processes_nor_files() {
    let directory = long(4);
    let before = listing(directory.path());
    // What a kernel short of memory, a lost terminal, a quitting user and a bug would send.
    for (at, signal) in
        [Signal::SIGKILL, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGABRT].into_iter().cycle().take(24).enumerate()
    {
        let mut run = Started::new(directory.path(), &reduce("4", "60s"));
        drop((run.child.stdout.take(), run.child.stderr.take()));
        std::thread::sleep(Duration::from_millis(3 * at as u64));
        let sent = kill(run.pid(), signal);
        let ended = run.child.wait().unwrap();
        run.until("the end of all its processes", |run| run.processes().is_empty());
        assert!(listing(run.meeting.path()).is_empty(), "after {signal} in step {at}: {:?}", listing(run.meeting.path()));
        let left: Vec<_> = listing(directory.path()).into_iter().filter(|name| !before.contains(name)).collect();
        // On a fast machine a run may have been done before.
        assert!(left.is_empty() || (left == [SUM] && sent.is_ok()), "after {signal} in step {at} ({ended}): {left:?}");
        let _ = fs::remove_file(directory.path().join(SUM));
    }
}

#[test]
fn a_process_that_cleans_up_does_not_outlive_a_good_run() {
    let directory = good(2);
    let mut run = Started::new(directory.path(), &reduce("2", "60s"));
    assert!(run.child.wait().unwrap().success());
    assert!(run.processes().is_empty());
    assert!(listing(run.meeting.path()).is_empty());
}
