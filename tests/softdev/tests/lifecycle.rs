// SPDX-License-Identifier: MIT OR Apache-2.0
//! The server as a process: it begins completely, serves one machine after the other, and always ends.

mod machine;

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use machine::{GUEST_BYTES, Machine};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use softdev::registers as reg;

fn sockets(machine: &Machine) -> usize {
    std::fs::read_dir(machine.dir.path()).unwrap().count()
}

#[test]
fn ready_means_that_every_socket_listens() {
    let machine = Machine::start(8, &[]);
    assert_eq!(sockets(&machine), 9);
    for endpoint in 0..8 {
        machine.driven(endpoint);
    }
    assert_eq!(machine.control().ok(&serde_json::json!({"cmd": "list"}))["endpoints"].as_array().unwrap().len(), 8);
}

#[test]
fn sigterm_ends_it_and_leaves_no_socket() {
    let mut machine = Machine::start(2, &[]);
    let _connected = machine.driven(0);
    kill(Pid::from_raw(machine.child.id() as i32), Signal::SIGTERM).unwrap();
    assert!(machine.ended().success());
    assert_eq!(sockets(&machine), 0);
}

#[test]
fn closing_its_standard_input_ends_it() {
    let mut machine = Machine::start(2, &[]);
    let _connected = machine.driven(0);
    drop(machine.stdin.take());
    assert!(machine.ended().success());
    assert_eq!(sockets(&machine), 0);
}

#[test]
fn it_does_not_outlive_its_parent_even_with_its_input_open() {
    let dir = tempfile::tempdir().unwrap();
    // The shell is its parent; standard input is a FIFO that this test holds open.
    let script = format!(
        "mkfifo {0}/in; sleep 1000 >{0}/in & echo $!; {1} --dir {0} --endpoints 1 <{0}/in >{0}/out & echo $!; wait",
        dir.path().display(),
        env!("CARGO_BIN_EXE_softdev")
    );
    let mut shell = Command::new("sh").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(shell.stdout.take().unwrap()));
    let [sleep, server] = [0; 2].map(|_| Pid::from_raw(lines.next().unwrap().unwrap().parse().unwrap()));
    let seconds = |limit: u32, done: &dyn Fn() -> bool| {
        (0..limit * 100).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            done()
        })
    };
    let ready = seconds(5, &|| std::fs::read_to_string(dir.path().join("out")).is_ok_and(|out| out == "ready\n"));
    shell.kill().unwrap();
    shell.wait().unwrap();
    let gone = seconds(5, &|| !dir.path().join("control.sock").exists());
    for pid in [sleep, server] {
        // Gone is what we hope for.
        let _ = kill(pid, Signal::SIGKILL);
    }
    assert!(ready && gone, "ready: {ready}, gone: {gone}");
}

#[test]
fn the_next_machine_finds_the_endpoint_as_after_power_up() {
    let machine = Machine::start(1, &[]);
    for life in 1..4 {
        let mut endpoint = machine.driven(0);
        assert_eq!(endpoint.read32(0, reg::LIFE), life);
        assert_eq!(endpoint.read64(2, 64), 0);
        assert_eq!(endpoint.read64(0, reg::RING_TABLE), 0);
        assert_eq!(machine.control().endpoint(0)["mapped_bytes"], GUEST_BYTES);
        endpoint.write64(2, 64, 0x55);
        endpoint.set_ring(0, machine::GUEST, 4096);
        machine.control().ok(&serde_json::json!({"cmd": "silence", "endpoint": 0}));
        endpoint.client.shutdown().unwrap();
        drop(endpoint);
        let power_cycled = (0..500).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            machine.control().endpoint(0)["life"] == life + 1
        });
        assert!(power_cycled);
        assert_eq!(machine.control().endpoint(0)["mapped_bytes"], 0);
    }
}

#[test]
fn a_folder_that_is_served_is_refused_and_a_stale_one_is_taken_over() {
    let mut machine = Machine::start(1, &[]);
    let second = |dir: &std::path::Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_softdev"));
        command.arg("--dir").arg(dir).args(["--endpoints", "1"]).stdin(Stdio::null()).output().unwrap()
    };
    let refused = second(machine.dir.path());
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("served by another process"), "{refused:?}");
    machine.control();
    machine.child.kill().unwrap();
    machine.child.wait().unwrap();
    assert_eq!(sockets(&machine), 2, "a killed server leaves its sockets");
    let taken_over = second(machine.dir.path());
    assert!(taken_over.status.success(), "{taken_over:?}");
    assert_eq!(taken_over.stdout, b"ready\n");
}

#[test]
fn bad_arguments_are_refused() {
    for arguments in
        [&["--dir", "/tmp/x", "--endpoints", "0"][..], &["--dir", "/tmp/x", "--endpoints", "65"], &["--endpoints", "1"]]
    {
        let output = Command::new(env!("CARGO_BIN_EXE_softdev")).args(arguments).stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
    }
}
