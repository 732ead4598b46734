// SPDX-License-Identifier: MIT OR Apache-2.0
//! A machine is measured on first use, once, and again when what was stored is garbage.

mod harness;

use std::{fs, path::Path};

use harness::{Ran, pcieipc, run_command};

fn tune(directory: &Path, arguments: &[&str]) -> Ran {
    let mut command = pcieipc(directory, arguments);
    command.env("XDG_CACHE_HOME", directory.join("cache"));
    run_command(command)
}

#[test]
fn a_machine_is_measured_once_and_the_table_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let first = tune(directory.path(), &["tune", "--ranks", "4", "--json"]).succeeds().json();
    assert_eq!(first["measured_earlier"], false);
    let files = fs::read_dir(directory.path().join("cache/pcieipc")).unwrap().map(|f| f.unwrap().path());
    let files: Vec<_> = files.filter(|path| path.extension().is_some_and(|e| e == "json")).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let second = tune(directory.path(), &["tune", "--ranks", "4", "--json"]).succeeds().json();
    assert_eq!((&second["measured_earlier"], &second["calibration"]), (&true.into(), &first["calibration"]));
    assert_eq!(second["rows"], first["rows"]);
    for row in second["rows"].as_array().unwrap() {
        let us = |choice: &serde_json::Value| {
            let mut candidates = row["candidates"].as_array().unwrap().iter();
            let found = candidates.find(|c| c["algorithm"] == choice["algorithm"] && c["chunk"] == choice["chunk"]);
            found.unwrap()["us"].as_f64().unwrap()
        };
        assert!(row["choice"] == row["default"] || us(&row["choice"]) < 0.95 * us(&row["default"]), "{row}");
    }
    let explained = tune(directory.path(), &["tune", "--explain"]);
    assert!(explained.succeeds().out.contains("measured earlier"), "{}", explained.out);
    // Nothing is predicted for ranks that share a processor.
    let alone = std::thread::available_parallelism().unwrap().get() < 2;
    assert_eq!(explained.out.contains("star"), !alone, "{}", explained.out);
    let bench = tune(
        directory.path(),
        &["bench", "--ranks", "2", "--transport", "shm", "--tuned", "--min", "1K", "--max", "1M", "--time", "1ms"],
    );
    assert!(bench.succeeds().out.contains("tuned"), "{}", bench.out);
    fs::write(&files[0], "{\"key\": garbage").unwrap();
    let third = tune(directory.path(), &["tune", "--json"]).succeeds().json();
    assert_eq!(third["measured_earlier"], false);
    tune(directory.path(), &["tune", "--collective", "all-gather"]).fails(2, &["nothing to choose"]);
    tune(directory.path(), &["tune", "--endpoints", "00ff:ee:1d.7"]).fails(2, &["no function 00ff:ee:1d.7"]);
}

#[test]
fn the_first_use_of_the_tuner_measures_and_whoever_comes_at_the_same_time_gets_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let short = ["bench", "--ranks=2", "--transport=shm", "--tuned", "--min=1K", "--max=1K", "--time=1ms"];
    let bench = || tune(directory.path(), &short).succeeds().err.contains("measuring this machine, once");
    let together: Vec<bool> = std::thread::scope(|scope| {
        let both: Vec<_> = (0..2).map(|_| scope.spawn(bench)).collect();
        both.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(together.contains(&true), "{together:?}");
    let calibrations = || {
        let all = fs::read_dir(directory.path().join("cache/pcieipc")).unwrap().map(|f| f.unwrap().path());
        all.filter(|path| path.extension().is_some_and(|e| e == "json")).map(|path| fs::read(path).unwrap()).collect::<Vec<_>>()
    };
    let stored = calibrations();
    assert_eq!(stored.len(), 1);
    assert!(!bench(), "it is measured once");
    let said = tune(directory.path(), &["tune", "--json"]).succeeds().json();
    assert_eq!(said["measured_earlier"], true);
    assert_eq!(calibrations(), stored);
}
