// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long a host with 1,000 functions takes to read, from files as sysfs has them: at most 100 ms of processor time, which several threads share.
//!
//! A real device adds the time of its registers, about a microsecond for each of some 60 double words; sysfs itself costs about what files in
//! memory do.

use std::{fmt::Write, path::Path, process::ExitCode, time::Instant};

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
    let read = times(|| drop(Topology::read(&source)));
    // Processor time does not suffer from what else the machine does.
    let before = processor_ms();
    (0..10).for_each(|_| drop(Topology::read(&source)));
    let processor = (processor_ms() - before) / 10.0;
    let moment = Moment::read(&source);
    let doctor = times(|| drop(examine(&Case::new(&moment))));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{functions} functions, {threads} processors");
    for (what, times) in [("read the tree", &read), ("examine it", &doctor)] {
        println!(
            "{what}: best {:.1} ms, median {:.1} ms, worst {:.1} ms of {}",
            times[0],
            times[times.len() / 2],
            times[times.len() - 1],
            times.len()
        );
    }
    println!("processor time of one read: {processor:.1} ms over all threads");
    if functions < 1000 || processor.is_nan() || processor > LIMIT_MS { ExitCode::FAILURE } else { ExitCode::SUCCESS }
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
