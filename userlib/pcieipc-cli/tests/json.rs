// SPDX-License-Identifier: MIT OR Apache-2.0
//! What scripts rely on: every command answers in JSON when asked to.

use std::process::{Command, Output};

fn pcieipc(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pcieipc")).args(arguments).output().expect("the command starts")
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).expect("help is text")
}

/// The commands that help lists, less `help` itself.
fn listed() -> Vec<String> {
    let help = text(pcieipc(&["--help"]).stdout);
    let (_, rest) = help.split_once("Commands:\n").expect("help lists the commands");
    let lines = rest.lines().take_while(|line| !line.is_empty());
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn every_command_has_json() {
    let commands = listed();
    assert!(commands.len() >= 10, "help lists the commands: {commands:?}");
    for command in commands {
        // What is below `cuda` is asked for by its own subcommands.
        let arguments: &[&str] = if command == "cuda" { &["cuda", "probe", "--help"] } else { &[&command, "--help"] };
        assert!(text(pcieipc(arguments).stdout).contains("--json"), "pcieipc {command} has no --json");
    }
}

#[test]
fn a_watch_and_a_snapshot_say_what_they_did_in_json() {
    let watched = pcieipc(&["watch", "--json", "--duration", "0"]);
    assert!(watched.status.success(), "{watched:?}");
    let first = text(watched.stdout).lines().next().map(str::to_owned).expect("a first line");
    assert_eq!(serde_json::from_str::<serde_json::Value>(&first).expect("JSON")["event"], "start");

    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("host.tar.gz");
    let saved = pcieipc(&["snapshot", "--json", "--sample", "0", file.to_str().expect("a name")]);
    assert!(saved.status.success(), "{saved:?}");
    let said: serde_json::Value = serde_json::from_slice(&saved.stdout).expect("JSON");
    assert_eq!(said["ok"], true);
    assert!(said["files"].as_u64().expect("a count") > 0 && file.metadata().expect("the file").len() > 0);
}

#[test]
fn the_doctor_says_what_a_saved_host_of_another_tool_does_not_know() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("nccl.xml");
    let host = r#"<system version="1"><cpu numaid="0" affinity="0000000f" arch="x86_64">
        <pci busid="0000:01:00.0" class="0x030200" vendor="0x10de" device="0x2330" link_speed="16.0 GT/s PCIe" link_width="16"/>
        </cpu></system>"#;
    std::fs::write(&file, host).expect("the file");
    let file = file.to_str().expect("a name");

    let said = pcieipc(&["doctor", "--json", "--snapshot", file]);
    let said: serde_json::Value = serde_json::from_slice(&said.stdout).expect("JSON");
    assert!(!said["missing"].as_array().expect("a list").is_empty(), "{said}");
    let words = text(pcieipc(&["doctor", "--snapshot", file]).stderr);
    assert!(words.contains("not checked"), "{words}");
}
