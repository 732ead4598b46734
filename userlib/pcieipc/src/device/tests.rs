// SPDX-License-Identifier: MIT OR Apache-2.0
//! The safe layer against a module in this process.

use std::{os::fd::AsFd, path::Path, sync::Arc, time::Duration};

use nix::errno::Errno;

use super::{
    DeviceError, EndpointId, EventKind, Export, Node, Session, State,
    fake::{FakeKernel, GONE, LIVE, RECOVERING},
};
use crate::{
    abi::*,
    ring::{Reader, Writer},
    sys::{Bell, wait_readable},
};

fn node(kernel: &Arc<FakeKernel>) -> Result<Node, DeviceError> {
    Node::open_with(kernel.clone(), Path::new("/dev/pcieipc"))
}

fn session(kernel: &Arc<FakeKernel>, id: u32) -> Session {
    node(kernel).unwrap().attach(EndpointId(id), 2).unwrap()
}

#[test]
fn a_node_that_can_not_be_opened_says_what_to_do() {
    let kernel = FakeKernel::new(0);
    for (errno, word) in [(Errno::ENOENT, "modprobe"), (Errno::EACCES, "group pcieipc"), (Errno::EMFILE, "Too many open files")] {
        kernel.world().fail.insert("open", errno);
        let error = node(&kernel).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn module_and_library_that_exclude_each_other_are_refused_early() {
    let kernel = FakeKernel::new(0);
    // A module that no longer accepts this library, and one that is older than this library accepts.
    for versions in [(7, 2), (0, 0)] {
        kernel.world().versions = versions;
        let error = node(&kernel).unwrap_err();
        assert!(matches!(error, DeviceError::Version { module, library: 1, .. } if module == versions.0), "{error}");
    }
    // A newer one that still accepts it.
    kernel.world().versions = (7, 1);
    assert_eq!(node(&kernel).unwrap().limits().version, 7);
}

#[test]
fn all_endpoints_are_listed_however_many_there_are() {
    for count in [0, 1, 16, 17, 100] {
        let ids = node(&FakeKernel::new(count)).unwrap().endpoints().unwrap();
        assert_eq!(ids, (1..=count as u32).map(EndpointId).collect::<Vec<_>>());
    }
}

#[test]
fn information_is_decoded_and_what_is_unknown_is_none() {
    let kernel = FakeKernel::new(1);
    let info = || node(&kernel).unwrap().endpoint(EndpointId(1)).unwrap();
    assert_eq!(info().address, "0001:03:03.0");
    assert_eq!((info().numa_node, info().iommu_group, info().serial), (None, Some(5), Some(100)));
    // 0 is what the module says of a device without a serial number.
    kernel.world().endpoints[0].serial = 0;
    assert_eq!(info().serial, None);
    let absent = node(&kernel).unwrap().endpoint(EndpointId(2)).unwrap_err();
    assert!(matches!(absent, DeviceError::NoEndpoint(EndpointId(2))), "{absent}");
}

#[test]
fn each_refusal_of_an_attach_is_its_own_error() {
    let kernel = FakeKernel::new(2);
    let _first = session(&kernel, 1);
    let attach = |id| node(&kernel).unwrap().attach(EndpointId(id), 1).unwrap_err();
    assert!(matches!(attach(1), DeviceError::Busy { .. }));
    assert!(matches!(attach(9), DeviceError::NoEndpoint(EndpointId(9))));
    kernel.world().fail.insert("PCIEIPC_IOCTL_ATTACH", Errno::EPERM);
    assert!(matches!(attach(2), DeviceError::NotProtected { .. }));
    kernel.world().fail.clear();
    kernel.set_state(1, RECOVERING);
    assert!(matches!(attach(2), DeviceError::Recovering));
    kernel.set_state(1, GONE);
    assert!(matches!(attach(2), DeviceError::Gone));
}

#[test]
fn each_errno_of_a_channel_is_its_own_error() {
    let kernel = FakeKernel::new(1);
    let session = session(&kernel, 1);
    let fails = |errno| {
        kernel.world().fail.insert("PCIEIPC_IOCTL_CHANNEL_CREATE", errno);
        session.channel(1 << 16, 0).unwrap_err()
    };
    let memory = fails(Errno::ENOMEM);
    assert!(matches!(memory, DeviceError::Memory { .. }) && memory.to_string().contains("64 KiB"), "{memory}");
    assert!(matches!(fails(Errno::ENOSPC), DeviceError::Limit { .. }));
    assert!(matches!(fails(Errno::EIO), DeviceError::Recovering));
    assert!(matches!(fails(Errno::ESTALE), DeviceError::Stale));
    assert!(matches!(fails(Errno::ENODEV), DeviceError::Gone));
    assert!(matches!(fails(Errno::EOPNOTSUPP), DeviceError::Unsupported { .. }));
    assert!(matches!(fails(Errno::EINVAL), DeviceError::Other { .. }));
}

#[test]
fn a_record_goes_through_a_channel_and_its_bells_ring() {
    let kernel = FakeKernel::new(1);
    let session = session(&kernel, 1);
    let (reader_bell, writer_bell) = (Bell::new().unwrap(), Bell::new().unwrap());
    session.set_bell(1, &reader_bell).unwrap();
    let channel = session.channel(1 << 14, 1).unwrap();
    let export = Export::with(kernel.clone(), channel.export().unwrap()).unwrap();
    export.set_bell(&writer_bell).unwrap();
    assert!(matches!(channel.export(), Err(DeviceError::Busy { .. })), "one writer");
    assert_eq!((export.endpoint(), export.generation()), (session.endpoint(), session.generation()));
    assert_eq!(export.status().word().state, State::Live);

    let silent = |bell: &Bell| wait_readable(&[bell.as_fd()], Duration::ZERO).unwrap() == 0;
    export.ring().unwrap();
    assert!(!silent(&reader_bell) && silent(&writer_bell));
    assert_eq!(reader_bell.drain(), 1);
    channel.freed().unwrap();
    assert_eq!((writer_bell.drain(), reader_bell.drain()), (1, 0));

    let (mut writer, mut reader) = (Writer::new(export), Reader::new(channel));
    writer.try_reserve(100).unwrap().unwrap();
    assert!(!writer.commit(Default::default(), 100));
    assert_eq!(reader.try_receive().unwrap().unwrap().1.len(), 100);
    kernel.set_state(0, GONE);
    assert_eq!(writer.memory().status().word().state, State::Gone);
    assert!(matches!(writer.memory().ring(), Err(DeviceError::Gone)));
    assert!(reader_bell.drain() > 0 && writer_bell.drain() > 0, "a change of state wakes everybody");
    assert_eq!(reader.try_receive().unwrap().unwrap().1.len(), 100, "the memory outlives the endpoint");
}

#[test]
fn a_channel_ends_with_its_value_also_when_it_could_not_be_mapped() {
    let kernel = FakeKernel::new(1);
    let session = session(&kernel, 1);
    drop(session.channel(1 << 14, 0).unwrap());
    // Too small for the ring protocol: refused after the module has made it.
    assert!(session.channel(4096, 0).is_err());
    let world = kernel.world();
    assert_eq!(world.calls["PCIEIPC_IOCTL_CHANNEL_CREATE"], 2);
    assert_eq!(world.calls["PCIEIPC_IOCTL_CHANNEL_DESTROY"], 2);
}

#[test]
fn a_descriptor_that_claims_an_impossible_channel_is_refused() {
    let kernel = FakeKernel::new(1);
    let session = session(&kernel, 1);
    let channel = session.channel(1 << 14, 0).unwrap();
    let fd = channel.export().unwrap();
    for bytes in [0, 1, 4096, (1 << 14) + 64, u64::MAX] {
        kernel.world().claimed_bytes = Some(bytes);
        assert!(Export::with(kernel.clone(), fd.try_clone().unwrap()).is_err(), "{bytes}");
    }
    let not_exported = Bell::new().unwrap().as_fd().try_clone_to_owned().unwrap();
    assert!(Export::with(kernel.clone(), not_exported).is_err());
}

#[test]
fn events_are_decoded_and_unknown_kinds_kept() {
    let kernel = FakeKernel::new(1);
    let node = node(&kernel).unwrap();
    let raw = |kind, detail| pcieipc_event { sequence: 5, endpoint: 1, kind, detail, ..Default::default() };
    kernel.world().events = vec![raw(1, [1, 2, 0, 0]), raw(0, [7, 0, 0, 0]), raw(4, [0x1005, 0x0801, 0, 0]), raw(99, [0; 4])];
    let events = node.events().unwrap();
    let kinds: Vec<_> = events.iter().map(|e| e.kind).collect();
    assert_eq!(
        kinds,
        [
            EventKind::State { from: State::Live, to: State::Recovering },
            EventKind::Lost(7),
            EventKind::Link { from: (5, 16), to: (1, 8) },
            EventKind::Other(99)
        ]
    );
    assert_eq!((events[0].sequence, events[0].endpoint), (5, Some(EndpointId(1))));
    assert!(node.events().unwrap().is_empty());
}

#[test]
fn a_session_recovers_into_the_new_life() {
    let kernel = FakeKernel::new(1);
    let session = session(&kernel, 1);
    kernel.set_state(0, RECOVERING);
    assert!(matches!(session.recover(), Err(DeviceError::Recovering)));
    kernel.world().endpoints[0].generation = 77;
    kernel.set_state(0, LIVE);
    assert_eq!(session.recover().unwrap(), 77);
    assert_eq!((session.generation(), session.status().word().generation), (77, 77));
}
