// SPDX-License-Identifier: MIT OR Apache-2.0
//! The whole machine, put right again.

use std::fs;

use nix::{
    fcntl::OFlag,
    kmod::{ModuleInitFlags, finit_module},
};
use serde_json::json;

use crate::{
    pci::Function,
    session::{Node, SOON, softdev},
    wait,
};

/// Every endpoint out of the machine, powered, and in again; the module loaded. So a broken promise breaks no other.
pub fn repair() {
    if !fs::exists("/sys/bus/pci/drivers/pcieipc").is_ok_and(|there| there) {
        let module = fs::File::open("/modules/pcieipc.ko").unwrap_or_else(|error| panic!("{error}"));
        finit_module(&module, c"", ModuleInitFlags::empty()).unwrap_or_else(|error| panic!("{error}"));
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
