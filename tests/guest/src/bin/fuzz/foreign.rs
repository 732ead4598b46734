// SPDX-License-Identifier: MIT OR Apache-2.0
//! Answers of devices that are no soft endpoints, and of the module loaded with other parameters.

use std::{
    fs,
    os::fd::{AsFd, AsRawFd},
};

use guest::{
    abi::*,
    call::{Record, number},
    machine,
    mapping::{PAGE, READ_WRITE},
    pci::Function,
    session::{Node, SOON, Session},
    tally::{Call, Tally},
    wait,
};
use nix::{errno::Errno, fcntl::OFlag};

use crate::provoke::{ask, map};

const EDU: u16 = 0x11e8;
const PROFILE: &str = "/sys/kernel/config/pcieipc/aimed";

fn edu() -> Function {
    let mut found = Function::with_device("0x11e8");
    found.pop().unwrap_or_else(|| panic!("no edu device in this machine"))
}

fn id_of_edu() -> u32 {
    let node = Node::open(OFlag::empty());
    let mut found = None;
    wait::until(SOON, || {
        found = node.endpoints().into_iter().find(|&id| node.info(id).is_ok_and(|info| info.device == EDU));
        found.is_some()
    });
    found.unwrap_or_else(|| panic!("edu is not bound"))
}

/// Where doorbell pages may not be mapped; the module is loaded so.
pub fn doorbells_that_are_not_allowed(tally: &Tally) {
    let session = Session::nth(0);
    let channel = session.create(PAGE as u64, 0).unwrap_or_else(|error| panic!("{error}"));
    let export = channel.export().unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(ask(tally, &session.node, Call::DOORBELL_MAP, &mut pcieipc_doorbell::new()), Err(Errno::EPERM));
    assert_eq!(ask(tally, &export, Call::EXPORT_DOORBELL, &mut pcieipc_doorbell::new()), Err(Errno::EPERM));
}

/// All that the module gives is taken: a doorbell page is charged like a ring's.
pub fn a_module_that_is_full(tally: &Tally) {
    machine::reload(c"doorbell_map=1 max_total_bytes=8192");
    let session = Session::nth(0);
    let bell = session.node.get(number::DOORBELL_MAP, pcieipc_doorbell::new()).map_offset;
    let mapped = [0; 2].map(|_| map(tally, &session.node, bell, PAGE, READ_WRITE).unwrap_or_else(|error| panic!("{error}")));
    assert_eq!(map(tally, &session.node, bell, PAGE, READ_WRITE).map(drop), Err(Errno::ENOSPC));
    drop(mapped);
    assert_eq!(map(tally, &session.node, bell, PAGE, READ_WRITE).map(drop), Ok(()), "given back with the mapping");
}

/// A device without memory, doorbell pages, and a bridge above it, whose engine rings nobody and reaches no other device.
pub fn a_poor_device(tally: &Tally, bell: u64) {
    edu().bind_by_override().unwrap_or_else(|error| panic!("edu: {error}"));
    let session = Session::on(Node::open(OFlag::empty()), id_of_edu());
    let node = &session.node;
    let channel = session.create(PAGE as u64, 0).unwrap_or_else(|error| panic!("{error}"));
    let export = channel.export().unwrap_or_else(|error| panic!("{error}"));
    let create = pcieipc_channel_create { data_bytes: PAGE as u64, flags: PCIEIPC_CHANNEL_DEVICE_MEMORY, ..Record::new() };
    assert_eq!(ask(tally, node, Call::CHANNEL_CREATE, &mut { create }), Err(Errno::EOPNOTSUPP));
    let soft = Session::nth(0);
    assert_ne!(soft.endpoint, session.endpoint);
    let in_soft = soft.node.get(number::CHANNEL_CREATE, create);
    let in_soft = guest::session::export(&soft.node, in_soft.channel).unwrap_or_else(|error| panic!("{error}"));
    let import = pcieipc_channel_fd { fd: in_soft.as_fd().as_raw_fd(), ..Record::new() };
    assert_eq!(ask(tally, node, Call::CHANNEL_IMPORT, &mut { import }), Err(Errno::EOPNOTSUPP));
    let (id, flags) = (channel.id(), PCIEIPC_COPY_RING);
    let copy = pcieipc_copy { flags, from: id, to: id, to_offset: 64, bytes: 8, timeout_ms: 100, ..Record::new() };
    assert_eq!(ask(tally, node, Call::COPY, &mut { copy }), Err(Errno::EOPNOTSUPP));
    assert_eq!(ask(tally, node, Call::DOORBELL_MAP, &mut pcieipc_doorbell::new()), Err(Errno::EOPNOTSUPP));
    assert_eq!(ask(tally, &export, Call::EXPORT_DOORBELL, &mut pcieipc_doorbell::new()), Err(Errno::EOPNOTSUPP));
    assert_eq!(map(tally, node, bell, PAGE, READ_WRITE).map(drop), Err(Errno::EOPNOTSUPP));
    let scan = pcieipc_admin { action: PCIEIPC_ADMIN_RESCAN, endpoint: session.endpoint, ..Record::new() };
    assert_eq!(ask(tally, node, Call::ADMIN, &mut { scan }), Err(Errno::EOPNOTSUPP));
    drop(export);
    drop(session);
    edu().unbind().unwrap_or_else(|error| panic!("edu: {error}"));
}

/// A device whose user can aim its DMA, and whose addresses nothing translates.
pub fn a_device_that_reaches_all_memory(tally: &Tally) {
    let edu = edu();
    edu.set_iommu("identity").unwrap_or_else(|error| panic!("edu's IOMMU group: {error}"));
    fs::create_dir(PROFILE).unwrap_or_else(|error| panic!("{PROFILE}: {error}"));
    let fields = [("vendor", "0x1234"), ("device", "0x11e8"), ("doorbell_offset", "0x60"), ("user_dma", "1"), ("enable", "1")];
    for (field, value) in fields {
        fs::write(format!("{PROFILE}/{field}"), value).unwrap_or_else(|error| panic!("{field}: {error}"));
    }
    edu.bind_by_override().unwrap_or_else(|error| panic!("edu: {error}"));
    let node = Node::open(OFlag::empty());
    let attach = pcieipc_attach { endpoint: id_of_edu(), ..Record::new() };
    assert_eq!(ask(tally, &node, Call::ATTACH, &mut { attach }), Err(Errno::EPERM));
    edu.unbind().unwrap_or_else(|error| panic!("edu: {error}"));
    fs::remove_dir(PROFILE).unwrap_or_else(|error| panic!("{PROFILE}: {error}"));
    edu.set_iommu("DMA").unwrap_or_else(|error| panic!("edu's IOMMU group: {error}"));
}

/// The module as the fuzzer wants it: small limits are reached sooner.
pub fn reload() {
    machine::reload(c"doorbell_map=1 doorbells_per_second=500 max_channels=24 event_queue=32 link_sample_ms=50");
}
