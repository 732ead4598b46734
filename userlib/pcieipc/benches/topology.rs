// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long a host with more than 1,000 functions takes to read, from files as sysfs has them, in a folder in memory; and beside it `lspci -vv`, which
//! reads the same files where it is installed. Prints a table and writes `target/bench/topology.json`; fails when reading takes 100 ms or more of
//! processor time, which several threads share. The time from start to end is compared with the same bar and told, but what else the machine does is no
//! fault of ours.
//!
//! A real device adds the time of its registers, about a microsecond for each of some 60 double words; sysfs itself costs about what files in
//! memory do. hwloc asks a library that knows no other place than /sys, so it can not be given these files.

use std::{
    fmt::Write,
    path::Path,
    process::{Command, ExitCode},
    time::Instant,
};

use host_fixtures::Fixture;
use pcieipc::{
    doctor::{Case, Moment, examine},
    topology::{Entry, Live, Topology},
};

const LIMIT_MS: f64 = 100.0;

fn main() -> ExitCode {
    let root = tempfile::Builder::new().prefix("pcieipc-bench-").tempdir_in(if Path::new("/dev/shm").is_dir() {
        "/dev/shm"
    } else {
        "/tmp"
    });
    let Ok(root) = root else { return ExitCode::FAILURE };
    unfold(root.path());
    let source = Live::at(root.path());
    let functions = Topology::read(&source).functions.len();
    let moment = Moment::read(&source);
    let lspci = || -> Option<std::process::Output> {
        let path = format!("sysfs.path={}", root.path().join("sys/bus/pci").display());
        Command::new("lspci").args(["-A", "linux-sysfs", "-O", &path, "-vv"]).output().ok().filter(|o| o.status.success())
    };
    // It must have read what we read.
    let headlines = |text: &[u8]| {
        String::from_utf8_lossy(text).lines().filter(|l| !l.is_empty() && !l.starts_with(char::is_whitespace)).count()
    };
    let peer = lspci().map(|o| headlines(&o.stdout)).filter(|count| *count == functions);
    let mut rows = vec![
        row("pcieipc: read the tree", || drop(Topology::read(&source))),
        row("pcieipc: read tree and host", || drop(Moment::read(&source))),
        row("pcieipc: examine it (doctor)", || drop(examine(&Case::new(&moment)))),
    ];
    match peer {
        Some(_) => rows.push(row("lspci -vv", || drop(lspci()))),
        None => println!("lspci is not there, or does not read these files: nothing to compare with"),
    }
    // Processor time does not suffer from what else the machine does.
    let before = processor_ms();
    (0..10).for_each(|_| drop(Topology::read(&source)));
    let processor = (processor_ms() - before) / 10.0;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("{functions} functions, {threads} processors, load {}", load.trim());
    for row in &rows {
        println!(
            "{:<30} best {:>7.1} ms, median {:>7.1} ms, worst {:>7.1} ms of {}",
            row.what, row.best, row.median, row.worst, row.of
        );
    }
    println!("processor time of one read: {processor:.1} ms over all threads");
    let bar = |what: &str, ms: f64| serde_json::json!({ "what": what, "ms": ms, "bar": LIMIT_MS, "met": ms < LIMIT_MS });
    let bars = [
        bar("read the tree, processor time", processor),
        bar("read the tree, start to end, best", rows[0].best),
        bar("read the tree, start to end, median", rows[0].median),
    ];
    for bar in &bars {
        println!(
            "{}: {:.1} ms, bar {LIMIT_MS} ms{}",
            bar["what"].as_str().unwrap_or(""),
            bar["ms"].as_f64().unwrap_or(f64::NAN),
            if bar["met"] == true { "" } else { ": NOT MET" }
        );
    }
    let rows: Vec<_> = rows
        .iter()
        .map(|r| serde_json::json!({ "what": r.what, "best_ms": r.best, "median_ms": r.median, "worst_ms": r.worst, "of": r.of }))
        .collect();
    let met = bars.iter().filter(|b| b["met"] == true).count();
    let report = serde_json::json!({
        "functions": functions, "processors": threads, "load": load.trim(), "bars": bars, "met": met, "of": bars.len(), "rows": rows,
        "peers": if peer.is_some() { serde_json::json!(["lspci -vv"]) } else { serde_json::json!([]) },
    });
    let out = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/bench/topology.json");
    let written =
        out.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| std::fs::write(&out, format!("{report:#}\n")));
    match written {
        Ok(()) => println!("{}", out.display()),
        Err(error) => println!("{}: {error}", out.display()),
    }
    if functions < 1000 || processor.is_nan() || processor >= LIMIT_MS { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

struct Row {
    what: &'static str,
    best: f64,
    median: f64,
    worst: f64,
    of: usize,
}

fn row(what: &'static str, work: impl FnMut()) -> Row {
    let times = times(work);
    Row { what, best: times[0], median: times[times.len() / 2], worst: times[times.len() - 1], of: times.len() }
}

fn processor_ms() -> f64 {
    use nix::sys::resource::{UsageWho, getrusage};
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return f64::NAN };
    [usage.user_time(), usage.system_time()].iter().map(|t| t.tv_sec() as f64 * 1e3 + t.tv_usec() as f64 / 1e3).sum()
}

fn times(mut work: impl FnMut()) -> Vec<f64> {
    let mut times: Vec<f64> = (0..20)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times
}

/// Four sockets' worth of switches: each root has a switch with eight ports, a GPU with an audio function or an adapter with
/// virtual functions behind each.
fn unfold(root: &Path) {
    let mut tree = String::new();
    for domain in 0..16 {
        let _ = writeln!(tree, "root {domain:04x}:00 numa={}\n  rp 01.0 link=5x16\n    up 00.0 link=5x16", domain / 4);
        for port in 0..8 {
            let _ = writeln!(tree, "      dn {port:02x}.0 link=5x16 acs=1d slot={port} hotplug");
            if port % 2 == 0 {
                tree.push_str("        gpu 00.0 link=5x16 driver=nvidia bars=16M,128G*,32M* rebar=2:128G:128G\n        other 00.1 class=040300\n");
            } else {
                tree.push_str("        nic 00.0 link=5x16 driver=mlx5_core sriov=16:12 bars=32M*\n");
                for vf in 1..13 {
                    let _ = writeln!(tree, "        nic {:02x}.{:x} link=5x16 driver=mlx5_core vf bars=1M*", vf / 8, vf % 8);
                }
            }
        }
    }
    let mut numa = String::new();
    for n in 0..4 {
        let (first, last) = (n * 32, n * 32 + 31);
        let _ = writeln!(numa, "[[numa]]\nid = {n}\ncpus = \"{first}-{last}\"\nsocket = {n}\ndistances = \"10 21 21 21\"");
    }
    let text = format!("about = \"bench\"\ntree = \"\"\"\n{tree}\"\"\"\n{numa}");
    let fixture: Fixture = toml::from_str(&text).expect("the description is ours");
    for (path, entry) in fixture.build().expect("the description is ours").entries() {
        let file = root.join(path);
        let _ = std::fs::create_dir_all(file.parent().unwrap_or(root));
        let done = match entry {
            Entry::File(bytes) => std::fs::write(&file, bytes),
            Entry::Link(target) => std::os::unix::fs::symlink(target, &file),
            Entry::Refused(_) => Ok(()),
        };
        done.expect("room for the files");
    }
}
