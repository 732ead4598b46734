// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long a host with more than 1,000 functions takes to read, from files as sysfs has them, in a folder in memory; and beside it `lspci -vv`, which
//! reads the same files where it is installed. Prints a table and writes `target/bench/topology.json`; fails when reading takes 100 ms or more from start
//! to end (the median), which counts only on a machine that does nothing else. Several threads share the work; the processor time of all is told.
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
const DOCTOR: &str = "pcieipc: examine it (doctor)";
const LSPCI: &str = "lspci -vv";

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
        let address = |line: &&str| line.split(' ').next().is_some_and(|word| word.contains(':') && word.contains('.'));
        String::from_utf8_lossy(text).lines().filter(address).count()
    };
    let peer = lspci().map(|o| headlines(&o.stdout)).filter(|count| *count == functions);
    let mut rows = vec![
        row("pcieipc: read the tree", || drop(Topology::read(&source))),
        row("pcieipc: read tree and host", || drop(Moment::read(&source))),
        row(DOCTOR, || drop(examine(&Case::new(&moment)))),
    ];
    match peer {
        Some(_) => rows.push(row(LSPCI, || drop(lspci()))),
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
    let median = rows[0].median;
    println!(
        "read the tree, start to end, median: {median:.1} ms, bar {LIMIT_MS} ms{}",
        if median < LIMIT_MS { "" } else { ": NOT MET" }
    );
    let peer = rows.iter().find(|r| r.what == LSPCI).map(|r| r.median);
    let report = serde_json::json!({
        "name": "topology",
        "command": "cargo bench -p pcieipc --bench topology",
        "machine": format!("{threads} processors, load {}", load.trim()),
        "functions": functions,
        "bar_ms": LIMIT_MS,
        "processor_ms": processor,
        "rows": rows.iter().filter(|r| r.what != LSPCI).map(|r| serde_json::json!({
            "case": r.what, "bytes": null, "unit": "ms", "ours": r.median, "best": r.best, "worst": r.worst,
            // lspci prints the tree and judges nothing.
            "peer_name": peer.filter(|_| r.what != DOCTOR).map(|_| LSPCI),
            "peer": peer.filter(|_| r.what != DOCTOR),
            "ratio": peer.filter(|_| r.what != DOCTOR).map(|p| r.median / p),
        })).collect::<Vec<_>>(),
    });
    let out = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/bench/topology.json");
    let written =
        out.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| std::fs::write(&out, format!("{report:#}\n")));
    match written {
        Ok(()) => println!("{}", out.display()),
        Err(error) => println!("{}: {error}", out.display()),
    }
    if functions < 1000 || median >= LIMIT_MS { ExitCode::FAILURE } else { ExitCode::SUCCESS }
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
            Entry::File(bytes) => {
                if file.ends_with("config") {
                    for_lspci(&file, bytes);
                }
                std::fs::write(&file, bytes)
            }
            Entry::Link(target) => std::os::unix::fs::symlink(target, &file),
            Entry::Refused(_) => Ok(()),
        };
        done.expect("room for the files");
    }
}

/// What lspci reads from files of their own and we from configuration space.
fn for_lspci(config: &Path, bytes: &[u8]) {
    let number = |at: usize, length: usize| {
        bytes.get(at..at + length).unwrap_or_default().iter().rev().fold(0u32, |n, b| n << 8 | u32::from(*b))
    };
    let files = [
        ("vendor", format!("{:#06x}", number(0, 2))),
        ("device", format!("{:#06x}", number(2, 2))),
        ("class", format!("{:#08x}", number(9, 3))),
        ("irq", "0".to_owned()),
    ];
    for (name, text) in files {
        std::fs::write(config.with_file_name(name), text + "\n").expect("room for the files");
    }
}
