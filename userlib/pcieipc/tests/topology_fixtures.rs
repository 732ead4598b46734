// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every fixture host gives exactly the findings that it is described with, live or through a snapshot.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use host_fixtures::Fixture;
use pcieipc::{
    doctor::{self, CATALOG, Case, Moment, Report, Severity},
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
fn each_finding_has_a_host_that_shows_it_and_one_that_was_looked_at_and_must_not() {
    let hosts = hosts();
    assert!(hosts.len() >= 20, "{} hosts", hosts.len());
    // What each host is described to show, and what it does not show although it could be looked for.
    let (mut shown, mut clean) = (BTreeSet::new(), BTreeSet::new());
    for (_, fixture) in &hosts {
        let expected: BTreeSet<&str> = fixture.expect.findings.iter().filter_map(|e| e.split('@').next()).collect();
        let unchecked: BTreeSet<&str> = examine(fixture, &|a| a).unchecked.iter().map(|u| u.id).collect();
        let silent = CATALOG.iter().map(|e| e.id).filter(|id| !expected.contains(id) && !unchecked.contains(id));
        clean.extend(silent);
        shown.extend(expected.into_iter().map(str::to_owned));
    }
    for entry in CATALOG {
        assert!(shown.contains(entry.id), "no host shows {}", entry.id);
        assert!(clean.contains(entry.id), "no host was looked at for {} and is free of it", entry.id);
    }
    assert!(shown.iter().all(|id| CATALOG.iter().any(|e| e.id == id)), "{shown:?}");
}

/// Findings that can be looked for in this host, of those that are not told to be unchecked.
fn looked_for(host: &Archive) -> BTreeSet<&'static str> {
    let moment = Moment::read(host);
    let report = doctor::examine(&Case { since: Some(&moment), ..Case::new(&moment) });
    let told: BTreeSet<&str> = report.unchecked.iter().map(|u| u.id).collect();
    CATALOG.iter().map(|e| e.id).filter(|id| !told.contains(id)).collect()
}

#[test]
fn what_a_file_of_another_tool_can_not_show_is_told_finding_by_finding() {
    let nccl = r#"<system version="1"><cpu numaid="0" affinity="0000000f" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
        <pci busid="0000:01:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
        <pci busid="0000:02:00.0" class="0x030200" vendor="0x10de" device="0x2330" link_speed="16.0 GT/s PCIe" link_width="16"/>
        <pci busid="0000:03:00.0" class="0x030200" vendor="0x10de" device="0x2330" link_speed="16.0 GT/s PCIe" link_width="16"/>
        </pci></cpu></system>"#;
    let hwloc = r#"<topology version="2.0"><object type="Machine" nodeset="0x1"><object type="NUMANode" os_index="0" cpuset="0xf"/>
        <object type="Bridge" bridge_type="0-1" bridge_pci="0000:[00-ff]"><object type="Bridge" bridge_type="1-1" pci_busid="0000:00:01.0"
        pci_type="0604 [8086:1901]" pci_link_speed="15.7"><object type="PCIDev" pci_busid="0000:01:00.0" pci_type="0302 [10de:2330]"
        pci_link_speed="15.7"/></object></object></object></topology>"#;
    let header = "00: de 10 30 23 07 00 10 00 a1 00 02 03 00 00 00 00\n10: 00 00 00 f6 0c 00 00 00 20 00 00 00 0c 00 00 00\n";
    let lspci = format!(
        "0000:01:00.0 3D controller: x\n\tNUMA node: 0\n{header}20: {z}\n30: 00 00 00 00 60 00 00 00 00 00 00 00 00 01 00 00\n",
        z = ["00"; 16].join(" ")
    );
    // What such a file shows; everything else in the catalogue has to be told.
    let both = ["function-missing", "function-new", "numa-unknown", "peers-across-sockets"];
    for (what, text, shown) in [
        ("NCCL", nccl, &both[..]),
        (
            "hwloc",
            hwloc,
            &["function-missing", "function-new", "numa-unknown", "peers-across-host-bridges", "peers-across-sockets"],
        ),
        (
            "lspci of a user",
            &lspci,
            &["bar-unassigned", "device-fallen-off", "function-missing", "function-new", "recovery-vetoed", "sriov-resources"],
        ),
    ] {
        let host = pcieipc::topology::import::from_text(text).unwrap();
        let mut found: Vec<&str> = looked_for(&host).into_iter().collect();
        // Rules about links and address space have something to look at only where registers are.
        found.retain(|id| {
            what != "lspci of a user"
                || !matches!(
                    *id,
                    "above-4g-off"
                        | "link-limited-by-slot"
                        | "link-speed-reduced"
                        | "link-width-reduced"
                        | "shared-uplink"
                        | "uplink-narrow"
                )
        });
        assert_eq!(found, shown, "{what}");
    }
}

#[test]
fn what_an_ordinary_user_can_not_see_is_told_finding_by_finding() {
    let (_, fixture) = hosts().into_iter().find(|(name, _)| name == "unprivileged-user").unwrap();
    let host = fixture.build().unwrap();
    let hidden: BTreeSet<&str> =
        CATALOG.iter().map(|e| e.id).collect::<BTreeSet<_>>().difference(&looked_for(&host)).copied().collect();
    for id in [
        "acs-redirect",
        "aer-absent",
        "aspm-on",
        "bar-small",
        "dpc-triggered",
        "link-changed",
        "payload-unequal",
        "relaxed-ordering",
        "slot-without-function",
    ] {
        assert!(hidden.contains(id), "{id} is passed over in silence: {hidden:?}");
    }
    let (_, root) = hosts().into_iter().find(|(name, _)| name == "healthy-2gpu-direct").unwrap();
    let all = looked_for(&root.build().unwrap());
    for id in &hidden {
        assert!(all.contains(id), "root is told that {id} can not be checked");
    }
}

#[test]
fn one_look_says_that_nothing_was_compared() {
    let (_, fixture) = hosts().into_iter().find(|(name, _)| name == "healthy-2gpu-direct").unwrap();
    let moment = Moment::read(&fixture.build().unwrap());
    let told = |case: &Case<'_>| {
        let report = doctor::examine(case);
        let ids: BTreeSet<&str> = report.unchecked.iter().filter(|u| u.why.contains("one look only")).map(|u| u.id).collect();
        ids
    };
    let one = told(&Case::new(&moment));
    for id in ["link-changed", "function-missing", "function-new", "aer-correctable", "aer-nonfatal", "aer-fatal"] {
        assert!(one.contains(id), "{one:?}");
    }
    assert!(told(&Case { later: Some((&moment.tree, 1.0)), ..Case::new(&moment) }).is_empty());
    assert!(told(&Case { since: Some(&moment), ..Case::new(&moment) }).is_empty());
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

#[test]
fn a_link_that_changed_by_itself_is_a_remark_and_no_bad_signal() {
    let (_, host) = hosts().into_iter().find(|(name, _)| name == "gen2-for-hours").unwrap();
    let report = examine(&host, &|a| a);
    let found = |id: &str, at: &str| {
        report.findings.iter().find(|f| f.id == id && f.at.first().is_some_and(|a| a.to_string() == at)).unwrap()
    };
    // Both ports remember such a change; only the card below the first counted damaged packets.
    assert_eq!(found("link-changed", "0000:00:01.0").severity, Severity::Info);
    assert_eq!(found("link-changed", "0000:00:02.0").severity, Severity::Info);
    assert_eq!(found("link-speed-reduced", "0000:02:00.0").severity, Severity::Info);
    assert!(found("link-speed-reduced", "0000:01:00.0").severity > Severity::Info);
}
