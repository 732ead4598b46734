// SPDX-License-Identifier: MIT OR Apache-2.0
//! An endpoint's memory as a dma-buf, and a driver of another device that imports it (tests/importer): who may, what its device reaches, and
//! that nobody reaches anything when the endpoint is reset, unbound or the channel ends.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    process::{Command, ExitCode},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use guest::{
    abi::*,
    call::{Record, number},
    ktap, machine,
    mapping::{Mapping, PAGE, READ_WRITE},
    promises,
    session::{Node, SOON, Session, living, played, softdev},
    wait,
};
use nix::{errno::Errno, fcntl::OFlag, sys::mman::ProtFlags};
use serde_json::{Value, json};

const BYTES: u64 = 64 << 10;
/// Less than the importer holds what it was told to hold.
const PATIENCE: Duration = Duration::from_secs(12);
/// What does not come in this time waits.
const UNHURRIED: Duration = Duration::from_secs(3);
/// What an importer says of itself when it attaches.
const WANTS_PAGES: u32 = 0;
const CANNOT_LET_GO: u32 = 1;
const LETS_GO: u32 = 2;

/// The driver that imports, for one device.
struct Importer(File);

impl Importer {
    fn attach(buffer: &OwnedFd, address: &str, way: u32) -> Result<Self, Errno> {
        let file = OpenOptions::new().read(true).write(true).open("/dev/importer").unwrap();
        let importer = Self(file);
        importer.tell(&format!("attach {} {address} {way}", buffer.as_raw_fd())).map(|()| importer)
    }

    fn tell(&self, what: &str) -> Result<(), Errno> {
        let error = |error: io::Error| Errno::from_raw(error.raw_os_error().unwrap_or(0));
        (&self.0).write_all(what.as_bytes()).map_err(error)
    }

    /// Address and length, if it is mapped, and how often it had to let go.
    fn state(&self) -> (Option<(u64, u64)>, u64) {
        let mut text = [0; 128];
        let length = (&self.0).read(&mut text).unwrap();
        let text = std::str::from_utf8(&text[..length]).unwrap();
        let (state, numbers) = text.split_once(' ').unwrap();
        let numbers: Vec<u64> = numbers.split_whitespace().map(|number| number.parse().unwrap()).collect();
        ((state == "mapped").then_some((numbers[0], numbers[1])), numbers[2])
    }

    fn map(&self) -> Result<(u64, u64), Errno> {
        self.tell("map")?;
        Ok(self.state().0.expect("it is mapped"))
    }
}

fn in_device_memory(session: &Session, data_bytes: u64) -> Result<pcieipc_channel_create, Errno> {
    let mut made = pcieipc_channel_create { data_bytes, flags: PCIEIPC_CHANNEL_DEVICE_MEMORY, ..Record::new() };
    session.node.call(number::CHANNEL_CREATE, &mut made).map(|()| made)
}

fn share(session: &Session, channel: u32) -> Result<OwnedFd, Errno> {
    let mut shared = pcieipc_channel_fd { channel, ..Record::new() };
    session.node.call(number::CHANNEL_DMABUF, &mut shared)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(shared.fd) })
}

fn recover(session: &Session) {
    session.node.get(number::RECOVER, pcieipc_recover::new());
}

/// Another device.
struct Other {
    id: u32,
    address: String,
    /// Its number among those that are played.
    endpoint: Value,
}

/// A device below the same switch as this endpoint, or one that is not.
fn other(node: &Node, endpoint: u32, near: bool) -> Option<Other> {
    let is_near = |from: u32| {
        let distance = node.get(number::DISTANCE, pcieipc_distance { from, to: endpoint, ..Record::new() });
        distance.reasons & PCIEIPC_FAR_SAME_SWITCH != 0
    };
    let id = node.endpoints().into_iter().find(|&id| id != endpoint && is_near(id) == near)?;
    let info = node.info(id).unwrap();
    let address = guest::pci::Function::at(info.address).address().to_owned();
    Some(Other { id, address, endpoint: played(info.serial)["endpoint"].clone() })
}

/// A session on an endpoint that has a neighbour, with a channel in its memory, as the reader sees it, and as a dma-buf.
struct Shared {
    session: Session,
    channel: pcieipc_channel_create,
    data: Mapping,
    buffer: OwnedFd,
}

fn shared() -> Shared {
    let node = Node::open(OFlag::empty());
    let endpoint = node.endpoints().into_iter().find(|&id| other(&node, id, true).is_some()).unwrap();
    let session = Session::on(node, endpoint);
    let channel = in_device_memory(&session, BYTES).unwrap();
    let data = session.node.map(channel.data_offset, BYTES as usize, ProtFlags::PROT_READ).unwrap();
    let buffer = share(&session, channel.channel).unwrap();
    Shared { session, channel, data, buffer }
}

impl Shared {
    fn other(&self, near: bool) -> Other {
        other(&self.session.node, self.session.endpoint, near).unwrap()
    }

    /// The driver of a device below the same switch, and which that is.
    fn neighbour(&self) -> (Importer, Value) {
        let other = self.other(true);
        (Importer::attach(&self.buffer, &other.address, LETS_GO).unwrap(), other.endpoint)
    }

    fn words(&self) -> Vec<u64> {
        (0..BYTES as usize).step_by(8).map(|offset| self.data.load(offset)).collect()
    }

    /// The neighbour's device writes 64 bytes, and nothing else changes.
    fn assert_written(&self, endpoint: &Value, start: u64, at: u64, seed: u64) {
        let before = self.words();
        softdev(&json!({"cmd": "poke", "endpoint": endpoint, "address": start + at, "bytes": 64, "seed": seed}));
        let now = self.words();
        let changed: Vec<u64> = (0..BYTES).step_by(8).filter(|at| now[*at as usize / 8] != before[*at as usize / 8]).collect();
        assert_eq!(changed, (at..at + 64).step_by(8).collect::<Vec<_>>(), "exactly what the device wrote has changed");
    }
}

fn a_device_of_another_driver_writes_the_endpoints_memory() {
    let shared = shared();
    let (importer, endpoint) = shared.neighbour();
    let (start, bytes) = importer.map().unwrap();
    assert_eq!(bytes, BYTES);
    shared.assert_written(&endpoint, start, 4096, 7);
    shared.assert_written(&endpoint, start, BYTES - 64, 8);
    importer.tell("unmap").unwrap();
    assert_eq!(importer.state(), (None, 0));
    assert_eq!(importer.map().unwrap().1, BYTES, "and maps it again");
}

fn it_is_shared_once_and_only_by_what_is_in_device_memory() {
    let shared = shared();
    assert_eq!(share(&shared.session, shared.channel.channel).map(drop), Err(Errno::EBUSY));
    let host = shared.session.create(PAGE as u64, 0).unwrap();
    assert_eq!(share(&shared.session, host.id()).map(drop), Err(Errno::EOPNOTSUPP));
    assert_eq!(share(&shared.session, 99).map(drop), Err(Errno::ENOENT));
    let Shared { session, channel, buffer, .. } = shared;
    drop(buffer);
    assert!(wait::until(SOON, || share(&session, channel.channel).is_ok()), "another one when the first is closed");
}

fn a_process_cannot_map_it() {
    let shared = shared();
    for protection in [ProtFlags::PROT_READ, READ_WRITE] {
        let mapped = Mapping::new(shared.buffer.as_fd(), 0, PAGE, protection);
        assert_eq!(mapped.map(drop), Err(Errno::EINVAL));
    }
}

fn drivers_that_want_pages_or_do_not_let_go_are_refused_and_so_are_devices_too_far_away() {
    let shared = shared();
    let near = shared.other(true).address;
    for way in [WANTS_PAGES, CANNOT_LET_GO] {
        assert_eq!(Importer::attach(&shared.buffer, &near, way).map(drop), Err(Errno::EOPNOTSUPP));
    }
    let far = shared.other(false);
    let distance = pcieipc_distance { from: far.id, to: shared.session.endpoint, ..Record::new() };
    // A processor that routes peer traffic lets it pass; the translated one does not.
    let reached = shared.session.node.get(number::DISTANCE, distance).p2p != 0;
    let attached = Importer::attach(&shared.buffer, &far.address, LETS_GO).map(drop);
    assert_eq!(attached, if reached { Ok(()) } else { Err(Errno::EOPNOTSUPP) });
}

fn a_reset_takes_it_away_and_recovery_gives_it_back() {
    let shared = shared();
    let (importer, endpoint) = shared.neighbour();
    importer.map().unwrap();
    shared.session.function().reset().unwrap();
    assert_eq!(importer.state(), (None, 1), "the reset waited until the driver had let go");
    assert_eq!(importer.map(), Err(Errno::ENODEV), "the session is still of the old life");
    let near = shared.other(true).address;
    assert_eq!(Importer::attach(&shared.buffer, &near, LETS_GO).map(drop), Err(Errno::ENODEV), "nor may another attach");
    recover(&shared.session);
    assert_eq!(importer.state(), (None, 2), "told that it may");
    let (start, _) = importer.map().unwrap();
    shared.assert_written(&endpoint, start, 0, 9);
    // What is shared in the meantime waits for the recovery, too.
    drop(importer);
    let Shared { session, channel, buffer, data } = shared;
    drop(buffer);
    session.function().reset().unwrap();
    assert_eq!(share(&session, channel.channel).map(drop), Err(Errno::ESTALE));
    recover(&session);
    assert!(wait::until(SOON, || share(&session, channel.channel).is_ok()));
    drop(data);
}

fn nobody_reaches_it_after_unbind() {
    let shared = shared();
    let serial = shared.session.info().serial;
    let (importer, _) = shared.neighbour();
    let (start, _) = importer.map().unwrap();
    let (function, near) = (shared.session.function(), shared.other(true).address);
    function.unbind().unwrap();
    assert_eq!(importer.state(), (None, 1));
    assert_eq!(importer.map(), Err(Errno::ENODEV));
    assert_eq!(Importer::attach(&shared.buffer, &near, LETS_GO).map(drop), Err(Errno::ENODEV));
    assert_eq!(shared.words().iter().filter(|word| **word != 0).count(), 0, "the reader sees a page that nobody writes");
    // The next life has nothing to do with it.
    function.bind().unwrap();
    let next = Session::on(Node::open(OFlag::empty()), living(serial));
    assert_eq!(importer.map(), Err(Errno::ENODEV));
    let again = in_device_memory(&next, BYTES).unwrap();
    let buffer = share(&next, again.channel).unwrap();
    let near = other(&next.node, next.endpoint, true).unwrap();
    assert_eq!(Importer::attach(&buffer, &near.address, LETS_GO).unwrap().map(), Ok((start, BYTES)), "the same place as before");
}

fn the_channels_end_is_its_end_and_the_memory_is_in_use_until_it_is_closed() {
    let shared = shared();
    let (importer, _) = shared.neighbour();
    let Shared { session, channel, data, buffer } = shared;
    let whole = session.info().memory_bytes;
    drop(data);
    importer.map().unwrap();
    session.node.get(number::CHANNEL_DESTROY, pcieipc_channel { channel: channel.channel, ..Record::new() });
    assert_eq!(importer.state(), (None, 1));
    assert_eq!(importer.map(), Err(Errno::ENODEV));
    assert_eq!(in_device_memory(&session, whole).map(drop), Err(Errno::ENOSPC));
    drop(buffer);
    assert_eq!(in_device_memory(&session, whole).map(drop), Err(Errno::ENOSPC), "the importer has it still");
    drop(importer);
    assert!(wait::until(SOON, || in_device_memory(&session, whole).is_ok()), "and now nobody");
}

fn it_outlives_session_and_process_as_a_husk() {
    let pages = machine::module_state("pages");
    let shared = shared();
    let (importer, _) = shared.neighbour();
    let Shared { session, data, buffer, .. } = shared;
    importer.map().unwrap();
    drop((data, session));
    assert!(wait::until(SOON, || importer.state() == (None, 1)), "the session's end takes it away");
    assert_eq!(importer.map(), Err(Errno::ENODEV));
    drop((importer, buffer));
    assert!(wait::until(SOON, || machine::module_state("pages") == pages), "nothing is left of it");
}

/// While another driver takes its time to let go, `cause` waits for it and nobody else does.
fn held(shared: &Shared, cause: impl FnOnce() + Send, meanwhile: impl FnOnce(&dyn Fn() -> bool)) {
    let (importer, _) = shared.neighbour();
    importer.map().unwrap();
    importer.tell("hold").unwrap();
    thread::scope(|scope| {
        let causing = scope.spawn(cause);
        importer.tell("await").unwrap();
        meanwhile(&|| causing.is_finished());
        importer.tell("go").unwrap();
        causing.join().unwrap();
    });
    assert_eq!(importer.state(), (None, 1));
}

fn a_driver_that_takes_its_time_holds_up_nobody_but_the_reset() {
    let shared = shared();
    let (function, serial) = (shared.session.function(), shared.session.info().serial);
    let reset = || function.reset().unwrap();
    held(&shared, reset, |reset_is_over| {
        assert!(!played(serial)["mastering"].as_bool().unwrap(), "the endpoint is off the bus first");
        assert_eq!(shared.session.state().0, PCIEIPC_STATE_RECOVERING);
        // The endpoint's session and others, in threads, because a call that waits for the driver does not come back.
        let calls: [&(dyn Fn() + Sync); 3] = [
            &|| assert!(Node::open(OFlag::empty()).info(shared.session.endpoint).is_ok()),
            &|| assert!(machine::module_state("pages") > 0),
            &|| assert_eq!(shared.session.create(PAGE as u64, 0).map(drop), Err(Errno::EIO)),
        ];
        thread::scope(|scope| {
            let calls = calls.map(|call| scope.spawn(call));
            let answered = wait::until(PATIENCE, || calls.iter().all(|call| call.is_finished()));
            assert!(answered, "a call waits for the driver");
        });
        assert!(!reset_is_over(), "the reset waits");
    });
    recover(&shared.session);
}

fn an_unbind_while_the_channel_ends_waits_for_the_driver_too() {
    let shared = shared();
    let (function, serial) = (shared.session.function(), shared.session.info().serial);
    let id = shared.channel.channel;
    let destroy = || {
        shared.session.node.get(number::CHANNEL_DESTROY, pcieipc_channel { channel: id, ..Record::new() });
    };
    thread::scope(|scope| {
        held(&shared, destroy, |_| {
            let unbinding = scope.spawn(|| function.unbind().unwrap());
            assert!(!wait::until(UNHURRIED, || unbinding.is_finished()), "the driver still has it mapped");
        });
    });
    assert!(!function.bound());
    drop(shared);
    function.bind().unwrap();
    living(serial);
}

fn the_log_names_the_endpoint_whose_end_waits_for_a_driver_that_does_not_finish() {
    let shared = shared();
    let (function, id) = (shared.session.function(), shared.channel.channel);
    let (importer, _) = shared.neighbour();
    importer.map().unwrap();
    importer.tell("begin").unwrap();
    let told = || {
        let log = Command::new("dmesg").output().unwrap().stdout;
        let message = format!("{}: waits for a driver that has imported its memory and does not finish", function.address());
        String::from_utf8_lossy(&log).matches(&message).count()
    };
    thread::scope(|scope| {
        let destroying = scope.spawn(|| {
            shared.session.node.get(number::CHANNEL_DESTROY, pcieipc_channel { channel: id, ..Record::new() });
        });
        // Each 10 seconds.
        wait::until(2 * SOON, || told() > 0 || destroying.is_finished());
        let (messages, waits) = (told(), !destroying.is_finished());
        importer.tell("finish").unwrap();
        assert!(messages > 0 && waits, "{messages} messages, and it waits: {waits}");
        destroying.join().unwrap();
    });
}

fn mapping_it_races_resets_and_unbind() {
    for round in 0..6 {
        let shared = shared();
        let address = shared.other(true).address;
        let over = AtomicBool::new(false);
        let (function, serial) = (shared.session.function(), shared.session.info().serial);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        // Whether it may depends on the moment.
                        let Ok(importer) = Importer::attach(&shared.buffer, &address, LETS_GO) else { continue };
                        for _ in 0..20 {
                            let _ = importer.tell("map");
                            let _ = importer.tell("unmap");
                            let _ = importer.tell("map");
                        }
                    }
                });
            }
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let _ = shared.session.node.call(number::RECOVER, &mut pcieipc_recover::new());
                    thread::sleep(Duration::from_millis(1));
                }
            });
            function.reset().unwrap();
            thread::sleep(Duration::from_millis(20));
            if round % 3 == 0 {
                scope.spawn(|| {
                    let mut ended = pcieipc_channel { channel: shared.channel.channel, ..Record::new() };
                    shared.session.node.call(number::CHANNEL_DESTROY, &mut ended)
                });
            }
            function.reset().unwrap();
            if round % 2 == 0 {
                function.unbind().unwrap();
            }
            over.store(true, Ordering::Relaxed);
        });
        drop(shared);
        if !function.bound() {
            function.bind().unwrap();
        }
        living(serial);
    }
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            a_device_of_another_driver_writes_the_endpoints_memory,
            it_is_shared_once_and_only_by_what_is_in_device_memory,
            a_process_cannot_map_it,
            drivers_that_want_pages_or_do_not_let_go_are_refused_and_so_are_devices_too_far_away,
            a_reset_takes_it_away_and_recovery_gives_it_back,
            the_channels_end_is_its_end_and_the_memory_is_in_use_until_it_is_closed,
            it_outlives_session_and_process_as_a_husk,
            nobody_reaches_it_after_unbind,
            a_driver_that_takes_its_time_holds_up_nobody_but_the_reset,
            an_unbind_while_the_channel_ends_waits_for_the_driver_too,
            the_log_names_the_endpoint_whose_end_waits_for_a_driver_that_does_not_finish,
            mapping_it_races_resets_and_unbind,
        ],
        machine::repair,
    )
}
