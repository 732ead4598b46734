// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rig's verdict on machines that go wrong. Each test boots one, so they need the environment: run them by `make test`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rig::accelerator::Accelerator;
use rig::kernel::Kernel;
use rig::spec::{Guest, Spec};
use rig::verdict::Verdict;
use rig::vm::{self, Place};

fn boot(name: &str, command: &str, timeout: u64) -> Verdict {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let kernel = Kernel::find(&checkout, false).unwrap();
    let accelerator = Accelerator::choose(&kernel).unwrap();
    let programs = PathBuf::from(env!("CARGO_BIN_EXE_host")).parent().unwrap().to_owned();
    let place = Place { checkout, programs, kernel, accelerator, patience: 1, verbose: 0, environment: vec![] };
    let guest = Guest { command: command.into(), timeout, module: false, ..Guest::default() };
    let spec = Spec { name: name.into(), guest, ..Spec::default() };
    vm::run(&spec, &place).unwrap()
}

#[test]
fn a_kernel_that_crashes_is_an_alarm_and_ends_the_machine() {
    let verdict = boot("judgement-crash", "echo 'ok 1 before'; echo c >/proc/sysrq-trigger", 120);
    assert_eq!(verdict.code, None);
    assert!(!verdict.timed_out);
    assert!(verdict.alarms.iter().any(|line| line.contains("sysrq")), "{:?}", verdict.alarms);
    assert_eq!((verdict.count().passed, verdict.count().failed), (1, 1));
}

#[test]
fn a_machine_that_hangs_is_stopped_in_time() {
    // Long enough for a busy host to boot it first.
    let verdict = boot("judgement-hang", "echo 'ok 1 before'; sleep 1000", 60);
    assert!(verdict.timed_out);
    assert!(verdict.took < Duration::from_secs(180), "{:?}", verdict.took);
    assert_eq!((verdict.count().passed, verdict.count().failed), (1, 1));
}

#[test]
fn an_exit_code_reaches_the_verdict() {
    let verdict = boot("judgement-code", "exit 3", 120);
    assert_eq!(verdict.code, Some(3));
    assert_eq!(verdict.count().failed, 1);
}

#[test]
fn a_kernel_that_never_comes_up_is_given_up_in_time() {
    // No machine boots in a second; each that is started again has no more.
    let verdict = boot("judgement-boot", "echo 'ok 1 never'", 1);
    assert!(verdict.timed_out && verdict.results.tests.is_empty(), "{:?}", verdict.results.tests);
    assert!(verdict.took < Duration::from_secs(60), "{:?}", verdict.took);
    assert_eq!((verdict.count().passed, verdict.count().failed), (0, 1));
}
