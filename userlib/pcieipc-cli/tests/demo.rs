// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rehearsal of a loss over shared memory: a killed rank, told survivors, a right sum without it, and a true report.

mod harness;

use std::{fs, path::Path};

use harness::{data, good, listing, run};

fn demo(directory: &Path, victim: &str) -> serde_json::Value {
    let template = data("grads.{rank}.safetensors");
    let arguments = [
        "demo",
        "--ranks=4",
        "--transport=shm",
        "--out=demo",
        "--json",
        "--victim",
        victim,
        "--input",
        template.to_str().unwrap(),
    ];
    let told = run(directory, &arguments).succeeds().json();
    let kept: serde_json::Value = serde_json::from_slice(&fs::read(directory.join("demo/report.json")).unwrap()).unwrap();
    assert_eq!(told, kept);
    kept
}

#[test]
fn every_survivor_is_told_who_died_within_the_bound_and_the_three_go_on() {
    for victim in [0, 2, 3] {
        let directory = tempfile::tempdir().unwrap();
        let report = demo(directory.path(), &victim.to_string());
        assert_eq!((&report["ranks"], &report["survivors"], &report["wrong"]), (&4.into(), &3.into(), &0.into()));
        assert_eq!((&report["transport"], &report["bytes"], &report["dma_bytes"]), (&"shm".into(), &344_208.into(), &0.into()));
        assert_eq!(report["fault"]["rank"], victim);
        let errors = report["fault"]["errors"].as_array().unwrap();
        assert_eq!(errors.len(), 3);
        for error in errors {
            assert_eq!(error["kind"], "PeerDied");
            assert!(error["text"].as_str().unwrap().contains(&format!("rank {victim} died")), "{error}");
            assert!(error["after"].as_f64().unwrap() < report["fault"]["bound"].as_f64().unwrap());
        }
        for rows in ["tensors", "after"] {
            let rows = report[rows].as_array().unwrap();
            assert_eq!(rows.len(), 24);
            assert!(rows.iter().all(|row| row["wrong"] == 0 && row["same_bits"] == true));
        }
    }
}

#[test]
fn the_time_line_shows_the_victim_silent_after_the_fault_and_the_others_at_work() {
    let directory = tempfile::tempdir().unwrap();
    let report = demo(directory.path(), "1");
    let fault = report["fault"]["at"].as_f64().unwrap();
    let spans = report["timeline"].as_array().unwrap();
    let after =
        |rank: u64| spans.iter().filter(|span| span["rank"] == rank && span["start"].as_f64().unwrap() > fault + 0.5).count();
    let shrunk = |rank: u64| spans.iter().filter(|span| span["rank"] == rank && span["what"] == "after").count();
    assert_eq!((after(1), shrunk(1)), (0, 0));
    assert_eq!((shrunk(0), shrunk(2), shrunk(3)), (24, 24, 24));
    let drawn = fs::read_to_string(directory.path().join("demo/report.svg")).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.contains("rank 1: killed"), "{drawn}");
    assert_eq!(listing(&directory.path().join("demo")), ["report.json", "report.svg"]);
}

#[test]
fn a_group_that_is_too_small_or_a_victim_outside_is_refused() {
    let directory = good(3);
    for arguments in [["--ranks=2", "--victim=1"], ["--ranks=3", "--victim=3"]] {
        let mut all = vec!["demo", "--input=grads.{rank}.safetensors", "--transport=shm"];
        all.extend(arguments);
        run(directory.path(), &all).fails(2, &["three ranks or more"]);
    }
}
