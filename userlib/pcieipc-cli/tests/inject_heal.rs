// SPDX-License-Identifier: MIT OR Apache-2.0
//! `inject` and `heal` on a host in a folder: what is refused, what is written where.

mod harness;

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use harness::{Ran, run};

/// A port with a card of two functions of ours, and a card of another driver.
fn host() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let sys = folder.path().join("sys");
    for (path, driver) in [
        ("pci0000:00/0000:00:01.0", "pcieport"),
        ("pci0000:00/0000:00:01.0/0000:01:00.0", "pcieipc"),
        ("pci0000:00/0000:00:01.0/0000:01:00.1", "pcieipc"),
        ("pci0000:00/0000:00:02.0", "pcieport"),
        ("pci0000:00/0000:00:02.0/0000:02:00.0", "nvidia"),
    ] {
        let device = sys.join("devices").join(path);
        fs::create_dir_all(&device).unwrap();
        let files = [
            ("config", "\u{1}\u{2}\u{3}\u{4}"),
            ("remove", ""),
            ("reset", ""),
            ("reset_method", "flr\n"),
            ("driver_override", ""),
            ("aer_dev_correctable", "TOTAL_ERR_COR 3\n"),
            ("aer_dev_fatal", "TOTAL_ERR_FATAL 0\n"),
        ];
        files.iter().for_each(|(file, text)| fs::write(device.join(file), text).unwrap());
        let of = sys.join("bus/pci/drivers").join(driver);
        fs::create_dir_all(&of).unwrap();
        symlink(&of, device.join("driver")).unwrap();
        fs::create_dir_all(sys.join("bus/pci/devices")).unwrap();
        symlink(&device, sys.join("bus/pci/devices").join(device.file_name().unwrap())).unwrap();
    }
    fs::write(sys.join("bus/pci/rescan"), "").unwrap();
    fs::write(sys.join("bus/pci/drivers_probe"), "").unwrap();
    fs::create_dir_all(folder.path().join("dev")).unwrap();
    fs::write(folder.path().join("dev/aer_inject"), "").unwrap();
    folder
}

fn on(host: &Path, arguments: &[&str]) -> Ran {
    let root = ["--root", host.to_str().unwrap()];
    run(host, &[arguments, &root].concat())
}

fn file(host: &Path, address: &str, name: &str) -> PathBuf {
    host.join("sys/bus/pci/devices").join(address).join(name)
}

fn read(path: PathBuf) -> String {
    fs::read_to_string(path).unwrap()
}

#[test]
fn each_fault_is_written_where_the_kernel_reads_it() {
    let host = host();
    let host = host.path();
    on(host, &["inject", "remove", "0000:01:00.0"]).succeeds();
    on(host, &["inject", "reset", "0000:01:00.1"]).succeeds();
    on(host, &["inject", "rescan"]).succeeds();
    assert_eq!(read(file(host, "0000:01:00.0", "remove")), "1");
    assert_eq!(read(file(host, "0000:01:00.1", "reset")), "1");
    assert_eq!(read(host.join("sys/bus/pci/rescan")), "1");
    let told = on(host, &["inject", "fatal", "0000:01:00.0", "--json"]);
    let json = told.succeeds().json();
    assert_eq!((&json["ok"], &json["counted"]["after"]), (&true.into(), &0.into()), "{json}");
    let bytes = fs::read(host.join("dev/aer_inject")).unwrap();
    assert_eq!((bytes.len(), &bytes[..8]), (32, &[1u8, 0, 0, 0, 0, 0, 4, 0][..]));
}

#[test]
fn another_drivers_function_is_refused_unless_forced() {
    let host = host();
    let host = host.path();
    for fault in ["correctable", "non-fatal", "fatal", "remove", "reset"] {
        on(host, &["inject", fault, "0000:02:00.0"]).fails(2, &["0000:02:00.0 belongs to the driver nvidia", "--force"]);
    }
    // A function of another driver on the same card is hit by the recovery, and by nothing else.
    let driver = file(host, "0000:01:00.1", "driver");
    fs::remove_file(&driver).unwrap();
    symlink(host.join("sys/bus/pci/drivers/nvidia"), &driver).unwrap();
    for fault in ["non-fatal", "fatal"] {
        on(host, &["inject", fault, "0000:01:00.0"]).fails(2, &["0000:01:00.1 belongs to the driver nvidia", "--force"]);
    }
    for fault in ["correctable", "remove", "reset"] {
        on(host, &["inject", fault, "0000:01:00.0", "--dry-run"]).succeeds();
    }
    // What hangs below is hit, too.
    on(host, &["inject", "remove", "0000:00:02.0"]).fails(2, &["0000:02:00.0 belongs to the driver nvidia"]);
    assert_eq!(read(file(host, "0000:02:00.0", "remove")), "");
    let refused = on(host, &["inject", "remove", "0000:02:00.0", "--json"]);
    assert_eq!((refused.fails(2, &[]).json()["ok"].as_bool(), refused.json()["needs"].is_array()), (Some(false), true));
    on(host, &["inject", "remove", "0000:02:00.0", "--force"]).succeeds();
    assert_eq!(read(file(host, "0000:02:00.0", "remove")), "1");
    on(host, &["heal", "0000:02:00.0"]).fails(2, &["belongs to the driver nvidia", "--force"]);
}

#[test]
fn what_is_missing_is_said_with_what_to_do() {
    let host = host();
    let host = host.path();
    on(host, &["inject", "fatal", "0000:07:00.0"]).fails(1, &["function 0000:07:00.0 is missing", "pcieipc topo"]);
    fs::remove_file(host.join("dev/aer_inject")).unwrap();
    on(host, &["inject", "fatal", "0000:01:00.0"]).fails(1, &["injector", "modprobe aer_inject"]);
    let plan = on(host, &["inject", "fatal", "0000:01:00.0", "--dry-run"]);
    plan.fails(1, &["injector"]);
    assert!(plan.out.contains("MISSING: the kernel's error injector") && plan.out.contains("there:   function"), "{}", plan.out);
    fs::write(file(host, "0000:01:00.0", "reset_method"), "\n").unwrap();
    on(host, &["inject", "reset", "0000:01:00.0"]).fails(1, &["a way to reset", "remove and rescan"]);
    on(host, &["inject", "fatal"]).fails(2, &["ENDPOINT"]);
    on(host, &["inject", "fatal", "01:zz"]).fails(2, &["is no PCI address"]);
}

#[test]
fn a_dry_run_writes_nothing_and_names_every_step() {
    let host = host();
    let host = host.path();
    on(host, &["inject", "remove", "0000:01:00.0", "--dry-run"]).succeeds();
    let planned = on(host, &["heal", "0000:01:00.0", "--dry-run"]);
    for step in ["verify", "wait", "reset", "remove", "rescan", "rebind"] {
        assert!(planned.succeeds().out.contains(step), "{}", planned.out);
    }
    let json = on(host, &["heal", "0000:01:00.0", "--dry-run", "--json"]).succeeds().json();
    assert_eq!((&json["ok"], &json["healthy"], json["steps"].as_array().unwrap().len()), (&true.into(), &false.into(), 7));
    for name in ["remove", "reset"] {
        assert_eq!(read(file(host, "0000:01:00.0", name)), "");
    }
}

#[test]
fn a_function_that_is_not_healed_is_an_exit_code_and_every_step_is_told() {
    let host = host();
    let host = host.path();
    // The module of this host does not know the function of that folder, so no test passes.
    let failed = on(host, &["heal", "0000:01:00.0", "--json", "--timeout", "100ms"]);
    let json = failed.fails(1, &["is not healed"]).json();
    let steps: Vec<_> = json["steps"].as_array().unwrap().iter().map(|step| step["step"].as_str().unwrap()).collect();
    assert_eq!(steps, ["wait", "verify", "reset", "verify", "remove", "rescan", "rebind", "verify"], "{json}");
    assert_eq!(read(file(host, "0000:01:00.0", "reset")), "1");
}
