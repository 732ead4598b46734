// SPDX-License-Identifier: MIT OR Apache-2.0
//! The whole machine, put right again.

use std::{ffi::CStr, fs};

use nix::{
    errno::Errno,
    fcntl::OFlag,
    kmod::{DeleteModuleFlags, ModuleInitFlags, delete_module, finit_module},
};
use serde_json::json;

use crate::{
    pci::Function,
    session::{Node, SOON, softdev},
    wait,
};

/// The module out and in again, with these parameters.
pub fn reload(parameters: &CStr) {
    if loaded() {
        unload();
    }
    insert(parameters);
}

/// Whether the module is there.
pub fn loaded() -> bool {
    fs::exists("/sys/module/pcieipc").is_ok_and(|there| there)
}

/// The module out.
pub fn unload() {
    // What has just been closed may hold it a moment longer.
    let gone = wait::until(SOON, || delete_module(c"pcieipc", DeleteModuleFlags::O_NONBLOCK).is_ok());
    assert!(gone, "the module cannot be removed");
}

fn insert(parameters: &CStr) {
    try_insert(&module_file(), parameters).unwrap_or_else(|error| panic!("insmod: {error}"));
}

/// The module in.
///
/// # Errors
/// What finit_module(2) says.
pub fn try_insert(file: &fs::File, parameters: &CStr) -> Result<(), Errno> {
    finit_module(file, parameters, ModuleInitFlags::empty())
}

/// The module's file.
pub fn module_file() -> fs::File {
    fs::File::open("/modules/pcieipc.ko").unwrap_or_else(|error| panic!("{error}"))
}

/// A number in the module's state in debugfs, such as `pages`.
pub fn module_state(key: &str) -> u64 {
    let state = fs::read_to_string("/sys/kernel/debug/pcieipc/state").unwrap_or_else(|error| panic!("debugfs: {error}"));
    let line = state.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.parse().ok());
    line.unwrap_or_else(|| panic!("no {key:?} in {state}"))
}

/// Every endpoint out of the machine, powered, and in again; the module loaded. So a broken promise breaks no other.
pub fn repair() {
    if !fs::exists("/sys/bus/pci/drivers/pcieipc").is_ok_and(|there| there) {
        insert(c"");
    }
    for function in Function::soft_endpoints() {
        function.remove().unwrap_or_else(|error| panic!("{function:?}: {error}"));
    }
    let list = softdev(&json!({"cmd": "list"}));
    let count = list["endpoints"].as_array().map_or(0, Vec::len);
    for endpoint in 0..count {
        softdev(&json!({"cmd": "revive", "endpoint": endpoint}));
    }
    Function::rescan().unwrap_or_else(|error| panic!("{error}"));
    let node = Node::open(OFlag::empty());
    let live = |id| node.info(id).is_ok_and(|info| info.state == crate::abi::PCIEIPC_STATE_LIVE);
    let back = wait::until(SOON, || node.endpoints().into_iter().filter(|&id| live(id)).count() == count);
    assert!(back, "not all endpoints came back");
}
