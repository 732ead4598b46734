// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc bench` measures every collective, checks what it measures, and says the same in all formats; beside others where they are installed.
//! `pcieipc simulate` predicts in the same formats.

mod harness;

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use harness::{Ran, pcieipc, run, run_command};

/// Two sizes, measured for as short as it goes.
const SHORT: [&str; 6] = ["bench", "--transport=shm", "--min=1K", "--max=16K", "--factor=16", "--time=100us"];

fn bench(directory: &Path, more: &[&str]) -> Ran {
    run(directory, &[&SHORT[..], more].concat())
}

#[test]
fn every_collective_is_measured_and_right_from_ordinary_and_registered_memory() {
    let directory = tempfile::tempdir().unwrap();
    let calls = [
        ("all-reduce", "sum", "f32", "registered"),
        ("all-reduce", "avg", "bf16", "ordinary"),
        ("all-reduce", "prod", "i8", "ordinary"),
        ("reduce-scatter", "max", "f16", "ordinary"),
        ("reduce-scatter", "avg", "i32", "registered"),
        ("all-gather", "sum", "u8", "ordinary"),
        ("all-gather", "sum", "f64", "registered"),
        ("reduce", "min", "i64", "ordinary"),
        ("broadcast", "sum", "u16", "ordinary"),
        ("broadcast", "sum", "f32", "registered"),
        ("all-to-all", "sum", "f32", "ordinary"),
    ];
    for (collective, op, kind, memory) in calls {
        let [collective, op, kind, memory] =
            [("collective", collective), ("op", op), ("type", kind), ("memory", memory)].map(|(name, v)| format!("--{name}={v}"));
        let ran = bench(directory.path(), &["--ranks=3", "--root=2", "--json", &collective, &op, &kind, &memory]);
        let said = ran.succeeds().json();
        assert_eq!(said["ok"], true, "{said}");
        let rows = said["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 2, "{said}");
        for row in rows {
            let timings: Vec<_> = ["out_of_place", "in_place"].iter().map(|p| &row[p]).filter(|t| !t.is_null()).collect();
            assert!(!timings.is_empty() && row["count"].as_u64().unwrap() > 0, "{said}");
            for timing in timings {
                assert!(timing["wrong"] == 0 && timing["seconds"].as_f64().unwrap() > 0.0, "{timing}");
                assert!(timing["stored"].as_f64().unwrap() > 0.0 && timing["waiting"].as_f64().unwrap() >= 0.0, "{timing}");
            }
        }
    }
}

#[test]
fn the_table_csv_and_picture_are_of_one_run_each_and_phases_come_after() {
    let directory = tempfile::tempdir().unwrap();
    let table = bench(directory.path(), &["--phases", "--plot=b.svg"]);
    let rows: Vec<Vec<&str>> =
        table.succeeds().out.lines().filter(|l| !l.starts_with('#')).map(|l| l.split_whitespace().collect()).collect();
    let sizes: Vec<&str> = rows.iter().map(|r| r[0]).collect();
    assert_eq!(sizes, ["1024", "16384", "1024", "16384"], "{}", table.out);
    assert!(rows[..2].iter().all(|r| r.len() == 13 && r[8] == "0" && r[12] == "0") && rows[2].len() == 7, "{}", table.out);
    let svg = fs::read_to_string(directory.path().join("b.svg")).unwrap();
    assert_eq!((svg.matches("<polyline").count(), svg.matches("<circle").count()), (2, 4), "{svg}");

    let csv = bench(directory.path(), &["--csv"]);
    let mut lines = csv.succeeds().out.lines();
    let head: Vec<&str> = lines.next().unwrap().split(',').collect();
    let column = |name: &str| head.iter().position(|h| *h == name).unwrap();
    let rows: Vec<Vec<&str>> = lines.map(|l| l.split(',').collect()).collect();
    assert_eq!(rows.len(), 4, "{}", csv.out);
    for row in &rows {
        let number = |name: &str| row[column(name)].parse::<f64>().unwrap();
        // Two ranks: the bus carries what the algorithm does. All are rounded for print.
        let algbw = number("bytes") / number("us") / 1e3;
        assert!((number("algbw") - algbw).abs() <= 1e-3 + algbw * 1e-2 && number("busbw") == number("algbw"), "{row:?}");
        assert_eq!((row[column("wrong")], row[column("type")], row[column("op")]), ("0", "f32", "sum"));
    }
}

/// Programs that stand in for the others. A run prints so many microseconds a KiB: `first`, and 10 more with each run of a program at that
/// size; and writes to the file `turns` who measures what.
fn others(folder: &Path) {
    let times = |file: &str, first: u32| {
        format!(
            "while [ \"$1\" != 0.0001 ]; do shift; done; shift
             n=0
             while :; do
                 while [ ! -e \"$1/turn-$n\" ]; do sleep 0.01; done
                 size=$(cat \"$1/turn-$n\"); n=$((n + 1)); [ \"$size\" != 0 ] || exit 0
                 run=$(($(cat {0}/{file}-$size 2>/dev/null || echo 0) + 1)); echo $run >{0}/{file}-$size
                 echo \"{file} $size\" >>{0}/turns; echo \"$size $((size / 1024 * ({first} + 10 * run)))\"
             done",
            folder.display()
        )
    };
    program(folder, "mpicc", "while [ \"$1\" != -o ]; do shift; done; echo built >\"$2\"");
    let mpirun = format!(
        "[ \"$1\" != --version ] || {{ echo 'mpirun (Open MPI) 9.9'; exit; }}\ncase $* in *xhc*) {};; *) {};; esac",
        times("xhc", 1000),
        times("mpi", 500)
    );
    program(folder, "mpirun", &mpirun);
    program(folder, "python3", &format!("[ \"$1\" != -c ] || {{ echo 8.8; exit; }}\n{}", times("gloo", 700)));
}

fn program(folder: &Path, name: &str, text: &str) {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// As [`bench`], beside the programs of a folder.
fn compare(directory: &Path, others: &Path, more: &[&str]) -> Ran {
    let mut command = pcieipc(directory, &[&SHORT[..], &["--compare"], more].concat());
    command.env("PATH", format!("{}:/usr/bin:/bin", others.display()));
    run_command(command)
}

#[test]
fn ratios_are_to_the_best_of_the_others_in_the_same_round_and_all_have_a_size_before_the_next() {
    let directory = tempfile::tempdir().unwrap();
    others(directory.path());
    let said = compare(directory.path(), directory.path(), &["--json", "--plot=c.svg"]).succeeds().json();
    assert_eq!(
        (&said["ok"], &said["rounds"], &said["versions"]["Open MPI"]),
        (&true.into(), &3.into(), &"mpirun (Open MPI) 9.9".into())
    );
    assert_eq!(said["versions"]["Gloo"], "torch 8.8");
    for (row, kib) in said["rows"].as_array().unwrap().iter().zip([1.0, 16.0]) {
        // The second of three rounds is the middle one.
        let us = &row["us"];
        assert_eq!(
            [&us["Open MPI"], &us["Open MPI xhc"], &us["Gloo"]].map(|v| v.as_f64().unwrap()),
            [520.0, 1020.0, 720.0].map(|t| t * kib)
        );
        assert_eq!(row["best_peer_us"], 520.0 * kib);
        for (memory, name) in [("ordinary", "pcieipc, ordinary memory"), ("registered", "pcieipc, registered")] {
            // In the rounds the best took 510, 520 and 530.
            let rounds = row[format!("ratios_{memory}")].as_array().unwrap().iter().map(|r| r.as_f64().unwrap());
            let (mut ratios, mut times): (Vec<f64>, Vec<f64>) =
                rounds.zip([510.0, 520.0, 530.0]).map(|(r, us)| (r, r * us * kib)).unzip();
            ratios.sort_by(f64::total_cmp);
            times.sort_by(f64::total_cmp);
            assert!(ratios.len() == 3 && row[format!("ratio_{memory}")] == ratios[1], "{row}");
            assert!((us[name].as_f64().unwrap() / times[1] - 1.0).abs() < 1e-9, "{row}");
        }
        assert!(row["memory_limit_us"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert_eq!(said["costs"].as_array().unwrap().len(), 4, "{said}");
    let svg = fs::read_to_string(directory.path().join("c.svg")).unwrap();
    assert_eq!(svg.matches("<polyline").count(), 5, "{svg}");
    // The second round goes the other way round.
    let (there, back) = (["mpi", "xhc", "gloo"], ["gloo", "xhc", "mpi"]);
    let turns: Vec<String> = [there, back, there]
        .iter()
        .flat_map(|order| ["1024", "16384"].map(|size| order.map(|who| format!("{who} {size}"))))
        .flatten()
        .collect();
    assert_eq!(fs::read_to_string(directory.path().join("turns")).unwrap().lines().collect::<Vec<_>>(), turns);

    program(
        directory.path(),
        "mpirun",
        "[ \"$1\" != --version ] || { echo 1; exit; }; echo 1024 9.5; echo out of slots >&2; exit 3",
    );
    compare(directory.path(), directory.path(), &["--rounds=1"]).fails(1, &["Open MPI at 16384 bytes: it ended:\nout of slots"]);
    compare(directory.path(), directory.path(), &["--op=max"]).fails(2, &["all-reduce of f32 sums"]);
}

#[test]
fn others_that_are_not_there_are_left_out() {
    let directory = tempfile::tempdir().unwrap();
    // Found before anything that is installed, and of no use.
    for name in ["mpicc", "mpirun", "python3"] {
        program(directory.path(), name, "exit 1");
    }
    let ran = compare(directory.path(), directory.path(), &["--rounds=1"]);
    assert!(ran.succeeds().err.contains("Open MPI is not here") && ran.err.contains("Gloo is not here"), "{}", ran.err);
    let rows: Vec<Vec<&str>> = ran.out.lines().filter(|l| !l.starts_with('#')).map(|l| l.split_whitespace().collect()).collect();
    assert!(rows.len() == 2 && rows.iter().all(|r| r.len() == 5 && r[3..] == ["-", "-"]), "{}", ran.out);
}

#[test]
fn simulate_lists_predicts_and_draws() {
    let directory = tempfile::tempdir().unwrap();
    let machines = run(directory.path(), &["simulate", "--json"]).succeeds().json();
    let listed = run(directory.path(), &["simulate"]);
    let names: Vec<&str> = machines["machines"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap()).collect();
    assert!(
        names.len() >= 4 && listed.succeeds().out.lines().map(|l| l.split_whitespace().next().unwrap()).eq(names.iter().copied())
    );
    for name in names {
        let arguments = ["simulate", "--machine", name, "--min=64K", "--max=1M"];
        let said = run(directory.path(), &[&arguments[..], &["--json", "--plot=s.svg"]].concat()).succeeds().json();
        let rows = said["rows"].as_array().unwrap();
        let mut algorithms: Vec<&str> = rows.iter().map(|r| r["algorithm"].as_str().unwrap()).collect();
        algorithms.dedup();
        assert!(algorithms.len() >= 5 && rows.len() == 3 * algorithms.len(), "{said}");
        assert!(rows.iter().all(|r| r["us"].as_f64().unwrap() > 0.0), "{said}");
        let svg = fs::read_to_string(directory.path().join("s.svg")).unwrap();
        assert_eq!(svg.matches("<polyline").count(), algorithms.len(), "{svg}");
    }
}

#[test]
fn no_size_between_the_smallest_and_the_largest_is_bad_use() {
    let directory = tempfile::tempdir().unwrap();
    for command in ["bench", "simulate", "tune"] {
        let more: &[&str] = if command == "simulate" { &["--machine=sixty-four"] } else { &[] };
        run(directory.path(), &[&[command, "--min=4K", "--max=1K"], more].concat())
            .fails(2, &["at least --min 4096 and at most --max 1024"]);
    }
    run(directory.path(), &["bench", "--min=99999999999999999G"]).fails(2, &["sizes go from 1 to 16G"]);
}
