// SPDX-License-Identifier: MIT OR Apache-2.0
//! Saved hosts: how they are written, and what hostile ones do to terminals and drawings.

mod harness;

use std::{fs, io::Read, os::unix::fs::PermissionsExt, process::Stdio, time::Duration};

use harness::{pcieipc, run};
use pcieipc::topology::{Archive, Entry, Origin};

fn saved(archive: &Archive, path: &std::path::Path) {
    archive.write(fs::File::create(path).unwrap()).unwrap();
}

/// A host whose texts would take a terminal over.
fn hostile() -> Archive {
    let evil = "\u{1b}]0;owned\u{7}\u{1b}[2J<&\"'>";
    let mut host = Archive::new(Origin::Snapshot);
    for (address, class) in [("0000:01:00.0", "30200"), ("0000:02:00.0", "20000"), ("0000:03:00.0", "10802")] {
        let folder = format!("sys/devices/pci0000:00/{address}");
        host.insert(&format!("sys/bus/pci/devices/{address}"), Entry::Link(format!("../../../devices/pci0000:00/{address}")));
        host.file(&format!("{folder}/uevent"), format!("DRIVER=drv{evil}\nPCI_CLASS={class}\nPCI_ID=10DE:2330\n"));
        host.file(&format!("{folder}/power_state"), evil);
        host.file(&format!("{folder}/numa_node"), evil);
        host.file(&format!("{folder}/current_link_speed"), evil);
        for interface in ["net", "nvme", "drm"] {
            host.folder(&format!("{folder}/{interface}/if{}", evil.replace('/', "")));
        }
    }
    host.folder(&format!("sys/bus/pci/devices/junk{evil}"));
    host.file("sys/class/dmi/id/product_name", evil);
    host.file("sys/devices/system/node/node0/cpulist", evil);
    host.file("pcieipc/kernel.log", format!("6,1,2,-;NVRM: Xid (PCI:0000:01:00): 79, {evil} has fallen off the bus\n"));
    host
}

#[test]
fn a_hostile_host_can_not_write_to_the_terminal_and_breaks_no_drawing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hostile.tar.gz");
    saved(&hostile(), &file);
    let file = file.to_str().unwrap();
    for arguments in [
        &["doctor"][..],
        &["doctor", "--json"],
        &["doctor", "--fix-script"],
        &["topo"],
        &["topo", "--all"],
        &["topo", "--format", "matrix"],
        &["topo", "--format", "paths"],
        &["topo", "--format", "dot"],
        &["topo", "--format", "svg"],
        &["topo", "--format", "nccl"],
        &["topo", "--json"],
        &["watch", "--log", "--duration", "0"],
        &["watch", "--duration", "0"],
    ] {
        let ran = run(folder.path(), &[arguments, &["--snapshot", file]].concat());
        for text in [&ran.out, &ran.err] {
            let evil = text.chars().find(|c| c.is_control() && *c != '\n' && *c != '\t');
            assert!(evil.is_none(), "{arguments:?}: {evil:?} in {text}");
        }
        if matches!(arguments.last(), Some(&"svg" | &"nccl")) {
            let mut reader = quick_xml::Reader::from_str(&ran.out);
            reader.config_mut().check_end_names = true;
            loop {
                match reader.read_event() {
                    Ok(quick_xml::events::Event::Eof) => break,
                    Ok(_) => {}
                    Err(error) => panic!("{arguments:?}: {error}: {}", ran.out),
                }
            }
        }
    }
    let notes = run(folder.path(), &["doctor", "--snapshot", file]).out;
    assert!(notes.contains("Notes about what could not be read") && notes.contains("numa_node: a number expected"), "{notes}");
    let notes = run(folder.path(), &["topo", "--snapshot", file]).err;
    assert!(notes.contains("note: /sys/"), "{notes}");
}

#[test]
fn a_snapshot_with_serial_numbers_is_for_its_owner_and_none_is_ever_half_written() {
    let folder = tempfile::tempdir().unwrap();
    let mode = |name: &str| fs::metadata(folder.path().join(name)).unwrap().permissions().mode() & 0o777;
    run(folder.path(), &["snapshot", "--sample", "0", "--serials", "secret.tar.gz"]).succeeds();
    assert_eq!(mode("secret.tar.gz"), 0o600);
    run(folder.path(), &["snapshot", "--sample", "0", "plain.tar.gz"]).succeeds();
    assert_eq!(mode("plain.tar.gz") & 0o600, 0o600);
    // One that can not be finished leaves the old one and nothing else.
    let before = fs::read(folder.path().join("plain.tar.gz")).unwrap();
    let limited = std::process::Command::new("sh")
        .args(["-c", "ulimit -f 1; exec \"$0\" snapshot --sample 0 plain.tar.gz", env!("CARGO_BIN_EXE_pcieipc")])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert_eq!(limited.status.code(), Some(1), "{limited:?}");
    assert_eq!(fs::read(folder.path().join("plain.tar.gz")).unwrap(), before);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn a_watch_whose_reader_leaves_ends_in_order() {
    let folder = tempfile::tempdir().unwrap();
    for arguments in [
        &["watch", "--log", "--interval", "0.05"][..],
        &["watch", "--json", "--interval", "0.05"],
        &["watch", "--interval", "0.05"],
    ] {
        // Longer than any loaded machine needs, so that it is the reader who ends it.
        let mut child =
            pcieipc(folder.path(), &[arguments, &["--duration", "300"]].concat()).stdout(Stdio::piped()).spawn().unwrap();
        let mut first = [0];
        let mut out = child.stdout.take().unwrap();
        if arguments.len() > 3 {
            out.read_exact(&mut first).unwrap();
        }
        drop(out);
        let ended = (0..2400).find_map(|_| {
            std::thread::sleep(Duration::from_millis(50));
            child.try_wait().unwrap()
        });
        let Some(status) = ended else {
            child.kill().unwrap();
            panic!("{arguments:?} went on without a reader");
        };
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(status.code(), Some(0), "{arguments:?}: {said}");
        assert!(said.is_empty(), "{arguments:?}: {said}");
    }
}

#[test]
fn plans_predictions_and_choices_are_made_for_a_saved_host_s_tree() {
    let folder = tempfile::tempdir().unwrap();
    let host = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/qemu/nested-switches/host.tar.gz");
    let four = "0000:03:00.0,0000:0a:00.0,0000:04:00.0,0000:0b:00.0";
    let saved = ["--snapshot", host, "--endpoints", four];

    let plan = run(folder.path(), &[&["plan", "--ranks", "4", "--algorithm", "hierarchical"][..], &saved].concat());
    assert!(plan.succeeds().out.contains("tree ((0 2) (1 3))"), "{}", plan.out);
    run(folder.path(), &["plan", "--ranks", "4", "--snapshot", host, "--tree", "(0 1 2 3)"]).fails(2, &["give one of them"]);
    run(folder.path(), &[&["plan", "--ranks", "3"][..], &saved].concat()).fails(2, &["4 endpoints for 3 ranks"]);
    run(folder.path(), &["plan", "--ranks", "1", "--snapshot", host, "--endpoints", "0000:ff:00.0"])
        .fails(2, &["no function 0000:ff:00.0"]);

    let time = |mover: &str| {
        let ran =
            run(folder.path(), &[&["simulate", "--json", "--min", "4M", "--max", "4M", "--mover", mover][..], &saved].concat());
        ran.succeeds().json()["rows"].as_array().unwrap().iter().find(|r| r["algorithm"] == "two-shot").unwrap()["us"]
            .as_f64()
            .unwrap()
    };
    // Engines pass the links of the tree, which are slow in a virtual machine; processors do not.
    assert!(time("engine") > 1.5 * time("processor"), "{} {}", time("engine"), time("processor"));

    let mut tune = pcieipc(folder.path(), &[&["tune", "--json", "--mover", "engine"][..], &saved].concat());
    tune.env("XDG_CACHE_HOME", folder.path());
    let tuned = harness::run_command(tune);
    let tuned = tuned.succeeds().json();
    assert_eq!(tuned["tree"], "((0 2) (1 3))");
    assert!(!tuned["links"]["links"].as_array().unwrap().is_empty(), "{tuned}");
    run(folder.path(), &["tune", "--mover", "engine"]).fails(2, &["--endpoints"]);
}

#[test]
fn info_says_what_a_saved_host_tells_of_the_module_and_what_no_file_can() {
    let folder = tempfile::tempdir().unwrap();
    let mut host = Archive::new(Origin::Snapshot);
    let path = "sys/devices/pci0000:00/0000:01:00.0";
    host.insert("sys/bus/pci/devices/0000:01:00.0", Entry::Link("../../../devices/pci0000:00/0000:01:00.0".into()));
    host.file(&format!("{path}/uevent"), "DRIVER=pcieipc\nPCI_CLASS=120000\nPCI_ID=1B36:0005\n");
    host.file("sys/module/pcieipc/version", "9.9.9\n");
    host.file("pcieipc/facts.json", r#"{"module":{"abi":1,"abi_oldest":1,"excluded":false}}"#);
    let file = folder.path().join("host.tar.gz");
    saved(&host, &file);
    let file = file.to_str().unwrap();
    let said = run(folder.path(), &["info", "--snapshot", file]);
    assert!(said.succeeds().out.contains("module 9.9.9, ABI 1") && said.out.contains("0000:01:00.0"), "{}", said.out);
    assert!(said.err.contains("only the running module knows"), "{}", said.err);
    let said = run(folder.path(), &["info", "--json", "--snapshot", file]).succeeds().json();
    assert_eq!((&said["module"]["version"], &said["endpoints"][0]["address"]), (&"9.9.9".into(), &"0000:01:00.0".into()));
}
