// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every fixture host gives exactly the findings that it is described with, live or through a snapshot.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use host_fixtures::Fixture;
use pcieipc::{
    doctor::{self, CATALOG, Case, Moment, Report},
    topology::{Archive, CaptureOptions, Topology, capture},
};

fn hosts() -> Vec<(String, Fixture)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hosts");
    let mut paths: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "toml"));
    paths.sort();
    paths.iter().map(|p| (p.file_stem().unwrap().to_string_lossy().into_owned(), Fixture::load(p).unwrap())).collect()
}

fn examine(fixture: &Fixture, change: &dyn Fn(Archive) -> Archive) -> Report {
    let now = Moment::read(&change(fixture.build().unwrap()));
    let later = fixture.build_later().unwrap().map(|a| Topology::read(&change(a)));
    let before = fixture.build_before().unwrap().map(|a| Moment::read(&change(a)));
    doctor::examine(&Case { later: later.as_ref().map(|t| (t, 10.0)), since: before.as_ref(), ..Case::new(&now) })
}

/// `id@address`, or `id` alone where it names no function.
fn names(report: &Report) -> BTreeSet<String> {
    let name = |f: &doctor::Finding| f.at.first().map_or(f.id.to_owned(), |a| format!("{}@{a}", f.id));
    report.findings.iter().map(name).collect()
}

#[test]
fn each_host_gives_the_findings_it_is_described_with_and_no_others() {
    let mut wrong = Vec::new();
    for (name, fixture) in hosts() {
        let found = names(&examine(&fixture, &|a| a));
        let expected: BTreeSet<String> = fixture.expect.findings.iter().cloned().collect();
        for missed in expected.difference(&found) {
            wrong.push(format!("{name}: not found: {missed}"));
        }
        for extra in found.difference(&expected) {
            wrong.push(format!("{name}: found: {extra}"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn each_finding_has_a_host_that_shows_it_and_one_that_must_not() {
    let hosts = hosts();
    assert!(hosts.len() >= 20, "{} hosts", hosts.len());
    let shows =
        |id: &str| hosts.iter().filter(|(_, f)| f.expect.findings.iter().any(|e| e.split('@').next() == Some(id))).count();
    for entry in CATALOG {
        let count = shows(entry.id);
        assert!(count > 0, "no host shows {}", entry.id);
        assert!(count < hosts.len(), "every host shows {}", entry.id);
    }
}

#[test]
fn a_snapshot_gives_the_same_findings_as_the_host() {
    for (name, fixture) in hosts() {
        let through_a_file = |host: Archive| {
            let mut bytes = Vec::new();
            capture(&host, CaptureOptions::default()).write(&mut bytes).unwrap();
            Archive::read(bytes.as_slice()).unwrap()
        };
        assert_eq!(names(&examine(&fixture, &through_a_file)), names(&examine(&fixture, &|a| a)), "{name}");
    }
}

#[test]
fn a_snapshot_holds_no_serial_number_unless_asked() {
    for (name, fixture) in hosts() {
        let host = fixture.build().unwrap();
        let serial = [0xef, 0xbe, 0xad, 0xde, 0xfe, 0xca, 0xad, 0x0b];
        let holds = |options| {
            let archive = capture(&host, options);
            archive
                .entries()
                .any(|(_, e)| matches!(e, pcieipc::topology::Entry::File(bytes) if bytes.windows(8).any(|w| w == serial)))
        };
        assert!(!holds(CaptureOptions::default()), "{name}");
    }
    let (_, fixture) = hosts().into_iter().find(|(_, f)| !f.host.unprivileged && f.tree.contains("gpu")).unwrap();
    let archive = capture(&fixture.build().unwrap(), CaptureOptions { serials: true, ..CaptureOptions::default() });
    assert!(
        archive
            .entries()
            .any(|(_, e)| matches!(e, pcieipc::topology::Entry::File(b) if b.windows(4).any(|w| w == [0xef, 0xbe, 0xad, 0xde])))
    );
}

#[test]
fn distances_and_bandwidths_are_those_of_the_description() {
    let mut checked = 0;
    for (name, fixture) in hosts() {
        let tree = Topology::read(&fixture.build().unwrap());
        let index = |address: &str| tree.position(address.parse().unwrap()).unwrap_or_else(|| panic!("{name}: {address}"));
        for (pair, letters) in &fixture.expect.distances {
            let (a, b) = pair.split_once(' ').unwrap();
            for (from, to) in [(a, b), (b, a)] {
                let path = tree.path(index(from), index(to)).unwrap();
                assert_eq!(path.distance.letters(), letters, "{name}: {from} to {to}: {:?}", path.reasons);
                checked += 1;
            }
        }
        for (pair, expected) in &fixture.expect.raw_gbps {
            let (a, b) = pair.split_once(' ').unwrap();
            let raw = if b == "host" { tree.path_to_host(index(a)).0 } else { tree.path(index(a), index(b)).unwrap().raw_gbps };
            assert!((raw.unwrap() - expected).abs() < 0.1, "{name}: {pair}: {raw:?}");
            checked += 1;
        }
    }
    assert!(checked >= 40, "only {checked} ways are described");
}

#[test]
fn every_finding_says_how_one_knows_what_it_does_and_what_to_do() {
    for (name, fixture) in hosts() {
        for finding in examine(&fixture, &|a| a).findings {
            let complete = !finding.evidence.is_empty() && finding.consequence.len() > 20 && finding.remedy.len() > 15;
            assert!(complete, "{name}: {finding:?}");
            assert!(CATALOG.iter().any(|e| e.id == finding.id), "{}", finding.id);
        }
    }
}

#[test]
fn every_finding_is_documented() {
    let docs = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/doctor.md")).unwrap();
    let headings: BTreeMap<&str, usize> = docs.lines().filter_map(|l| l.strip_prefix("### ")).map(|h| (h.trim(), 0)).collect();
    for entry in CATALOG {
        assert!(headings.contains_key(entry.id), "docs/doctor.md has no heading {}", entry.id);
    }
    for heading in headings.keys() {
        assert!(CATALOG.iter().any(|e| e.id == *heading), "docs/doctor.md explains {heading}, which is no finding");
    }
}
