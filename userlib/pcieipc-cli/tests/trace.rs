// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc trace` records every step of every rank, and `pcieipc plan` draws what it prints.

mod harness;

use std::{collections::BTreeMap, fs};

use harness::run;

#[test]
fn every_step_of_every_rank_and_call_is_in_the_trace_and_its_parts_lie_in_it() {
    let directory = tempfile::tempdir().unwrap();
    let arguments = ["trace", "--ranks=3", "--bytes=300K", "--calls=2", "--transport=shm", "--algorithm=two-shot"];
    let told = run(directory.path(), &[&arguments[..], &["--output=t.json", "--svg=t.svg", "--json"]].concat());
    let told = told.succeeds().json();

    let trace: serde_json::Value = serde_json::from_str(&fs::read_to_string(directory.path().join("t.json")).unwrap()).unwrap();
    let mut steps: BTreeMap<u64, Vec<(f64, f64, u64)>> = BTreeMap::new();
    let mut parts = 0;
    for event in trace["traceEvents"].as_array().unwrap() {
        let rank = event["pid"].as_u64().unwrap();
        if event["ph"] == "M" {
            continue;
        }
        assert_eq!(event["ph"], "X", "{event}");
        let (from, length) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        assert!(from >= 0.0 && length >= 0.0, "{event}");
        if let Some(call) = event["args"]["call"].as_u64() {
            steps.entry(rank).or_default().push((from, from + length, call));
        } else {
            // A part comes after the step that it belongs to.
            let (start, end, _) = steps[&rank].last().unwrap();
            assert!(from >= start - 0.01 && from + length <= end + 0.01, "{event} is not in its step");
            parts += 1;
        }
    }
    // What the plan says: 3 ranks, each with its steps once a call.
    let plan = run(directory.path(), &["plan", "--ranks=3", "--bytes=300K", "--algorithm=two-shot", "--json"]).succeeds().json();
    let all: usize = steps.values().map(Vec::len).sum();
    assert_eq!((all as u64, parts), (2 * plan["steps"].as_u64().unwrap(), 3 * all));
    for (rank, steps) in &steps {
        let calls: Vec<u64> = steps.iter().map(|s| s.2).collect();
        assert!(calls.is_sorted() && calls[0] + 1 == calls[calls.len() - 1], "rank {rank}: {calls:?}");
        assert!(steps.windows(2).all(|w| w[0].1 <= w[1].0 + 0.01), "rank {rank}: steps of blocking calls do not overlap");
        assert_eq!(told["ranks"][*rank as usize]["steps"], steps.len());
    }
    let svg = fs::read_to_string(directory.path().join("t.svg")).unwrap();
    assert!(svg.starts_with("<svg") && (0..3).all(|r| svg.contains(&format!("rank {r}"))));
}

#[test]
fn a_plan_is_drawn() {
    let directory = tempfile::tempdir().unwrap();
    run(directory.path(), &["plan", "--ranks=6", "--bytes=1M", "--algorithm=hierarchical", "--svg=p.svg"]).succeeds();
    let svg = fs::read_to_string(directory.path().join("p.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("hierarchical") && svg.contains("rank 5"));
}

#[test]
fn what_can_not_be_traced_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    run(directory.path(), &["trace", "--collective=barrier"]).fails(2, &["not measured"]);
    run(directory.path(), &["trace", "--root=5"]).fails(2, &["no rank 5"]);
}
