// SPDX-License-Identifier: MIT OR Apache-2.0
//! cycles ROUNDS: so many times a device is bound, used, and unbound while everything of it is still mapped and open; what outlives it
//! is given back in another order each time. Nothing may be left of it: pages, memory, charges, interrupts, nodes, descriptors.

use std::{
    collections::BTreeMap,
    fs,
    os::fd::AsFd,
    panic,
    process::ExitCode,
    time::{Duration, Instant},
};

use guest::{
    abi::*,
    call::{Record, number},
    machine,
    mapping::{Mapping, PAGE, READ_WRITE},
    pci::Function,
    session::{Export, Node, SOON, Session, export, living, signals},
    wait,
};
use nix::{
    fcntl::OFlag,
    sys::{
        mman::ProtFlags,
        resource::{Resource, setrlimit},
        wait::{WaitStatus, waitpid},
    },
    unistd::{ForkResult, fork},
};

/// The kernel's own caches, and what its checkers hold back, may grow by so much. A ring that leaked each time is several times that.
const DRIFT_KIB: i64 = 96 << 10;
const DATA: u64 = 256 << 10;

/// What one round leaves when its device has gone.
struct Rest {
    mappings: Vec<Mapping>,
    exports: Vec<Export>,
    session: Option<Session>,
}

fn round(function: &Function, serial: u64, number: u64) -> Rest {
    function.bind().unwrap_or_else(|error| panic!("bind: {error}"));
    let session = Session::on(Node::open(OFlag::O_NONBLOCK), living(serial));
    let eventfd = session.eventfd(0);
    let mut rest = Rest { mappings: Vec::new(), exports: Vec::new(), session: None };
    for (data_bytes, flags) in [(DATA, 0), (PAGE as u64, 0), (16 * PAGE as u64, PCIEIPC_CHANNEL_DEVICE_MEMORY)] {
        let made = session.node.get(number::CHANNEL_CREATE, pcieipc_channel_create { data_bytes, flags, ..Record::new() });
        let map = |offset, len, protection| {
            session.node.map(offset, len, protection).unwrap_or_else(|error| panic!("map {offset:#x}: {error}"))
        };
        rest.mappings.push(map(made.data_offset, data_bytes as usize, ProtFlags::PROT_READ));
        rest.mappings.push(map(made.tail_offset, PAGE, ProtFlags::PROT_READ));
        rest.mappings.push(map(made.head_offset, PAGE, READ_WRITE));
        let exported = export(&session.node, made.channel).unwrap_or_else(|error| panic!("export: {error}"));
        let writer = exported.maps();
        writer[0].store(0, number);
        assert_eq!(rest.mappings[rest.mappings.len() - 3].load(0), number, "the reader sees what the writer stored");
        rest.mappings.extend(writer);
        rest.exports.push(exported);
    }
    let bell = session.node.get(number::DOORBELL_MAP, pcieipc_doorbell::new());
    let page = session.node.map(bell.map_offset, PAGE, READ_WRITE).unwrap_or_else(|error| panic!("doorbell page: {error}"));
    page.store32(bell.page_offset as usize, bell.value as u32);
    assert_eq!(signals(&eventfd, SOON), 1, "the mapped doorbell rings");

    function.unbind().unwrap_or_else(|error| panic!("unbind: {error}"));
    assert_eq!(session.state().0, PCIEIPC_STATE_GONE);
    // All of it is still memory that can be used; of the device only what nobody reads.
    page.store32(bell.page_offset as usize, bell.value as u32);
    for exported in &rest.exports {
        let info = exported.info().unwrap_or_else(|error| panic!("export info: {error}"));
        let again =
            Mapping::new(exported.as_fd(), info.tail_offset, PAGE, READ_WRITE).unwrap_or_else(|error| panic!("tail: {error}"));
        again.store(0, number);
    }
    rest.mappings[3].store(8, number);
    assert_eq!(rest.mappings[0].load(8), number, "ring memory outlives the device");
    rest.mappings.push(page);
    rest.session = Some(session);
    rest
}

/// Gives back what a round left, in one of several orders.
fn give_back(mut rest: Rest, order: u64) {
    match order % 4 {
        0 => drop(rest.session.take()),
        1 => rest.exports.clear(),
        2 => rest.mappings.clear(),
        _ => rest.mappings.truncate(5),
    }
    drop(rest.exports);
    drop(rest.session);
    drop(rest.mappings);
}

/// What would grow if something were left.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    pages: u64,
    channel_bytes: u64,
    interrupts: usize,
    nodes: usize,
    files: usize,
    mappings: usize,
}

impl Held {
    fn now() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let names = |path: &str| {
            let entries = fs::read_dir(path).unwrap_or_else(|error| panic!("{path}: {error}")).flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        Held {
            pages: machine::module_state("pages"),
            channel_bytes: machine::module_state("channel bytes"),
            interrupts: text("/proc/interrupts").lines().filter(|line| line.contains("pcieipc")).count(),
            nodes: names("/dev").iter().filter(|name| name.starts_with("pcieipc")).count(),
            files: names("/proc/self/fd").len(),
            mappings: text("/proc/self/maps").lines().filter(|line| line.contains("pcieipc")).count(),
        }
    }
}

/// The kernel's account of its memory, in KiB.
fn memory_now() -> BTreeMap<String, i64> {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let parse = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        Some((name.to_owned(), rest.trim().strip_suffix(" kB")?.parse().ok()?))
    };
    text.lines().filter_map(parse).collect()
}

/// How much less is available than `before`; what else changed much is printed, to tell where it went.
fn less_than(before: &BTreeMap<String, i64>) -> i64 {
    let now = memory_now();
    let change = |name: &String| now.get(name).copied().unwrap_or(0) - before.get(name).copied().unwrap_or(0);
    let large: Vec<String> =
        before.keys().filter(|name| change(name).abs() > 1 << 10).map(|name| format!(" {name} {:+}", change(name))).collect();
    println!("# memory in KiB since the first round:{}", large.concat());
    -change(&"MemAvailable".to_owned())
}

/// Whether this user can still lock memory up to a limit that a few rounds' rings would exceed: without the privilege to pass it.
fn may_still_lock() -> bool {
    // SAFETY: no other thread runs; the child leaves without unwinding into the parent's state.
    match unsafe { fork() }.unwrap_or_else(|error| panic!("fork: {error}")) {
        ForkResult::Child => {
            let created = panic::catch_unwind(|| {
                let session = Session::nth(0);
                setrlimit(Resource::RLIMIT_MEMLOCK, 2 * DATA, 2 * DATA).unwrap_or_else(|error| panic!("{error}"));
                // `_LINUX_CAPABILITY_VERSION_3` of this process, and no capability.
                let (mut header, none) = ([0x2008_0522u32, 0], [0u32; 6]);
                // SAFETY: both have the layout that the version says.
                let dropped = unsafe { libc::syscall(libc::SYS_capset, header.as_mut_ptr(), none.as_ptr()) };
                assert_eq!(dropped, 0);
                let refused = session.create(8 * DATA, 0).is_err();
                refused && session.create(DATA, 0).is_ok()
            });
            // SAFETY: leaves at once.
            unsafe { libc::_exit(i32::from(!created.unwrap_or(false))) }
        }
        ForkResult::Parent { child } => matches!(waitpid(child, None), Ok(WaitStatus::Exited(_, 0))),
    }
}

fn cycles(rounds: u64) {
    let node = Node::open(OFlag::empty());
    let info = node.info(node.endpoints()[0]).unwrap_or_else(|error| panic!("info: {error}"));
    let function = Function::at(info.address);
    function.unbind().unwrap_or_else(|error| panic!("unbind: {error}"));
    // What is made once and stays is made now.
    (0..8).for_each(|number| give_back(round(&function, info.serial, number), number));
    let (before, memory) = (Held::now(), memory_now());
    let mut told = Instant::now();
    let mut kept = None;
    for number in 0..rounds {
        let rest = round(&function, info.serial, number + 1);
        // Every other round is given back only after the next device has come and gone.
        if let Some(old) = kept.take() {
            give_back(old, number / 2);
        }
        if number % 2 == 0 {
            kept = Some(rest)
        } else {
            give_back(rest, number)
        }
        if told.elapsed() > Duration::from_secs(15) {
            println!("# {} rounds", number + 1);
            less_than(&memory);
            told = Instant::now();
        }
    }
    kept.into_iter().for_each(|rest| give_back(rest, rounds));
    let mut now = Held::now();
    let same = wait::until(SOON, || {
        now = Held::now();
        now == before
    });
    assert!(same, "{now:?} is left of {rounds} rounds, not {before:?}");
    let less = less_than(&memory);
    assert!(less < DRIFT_KIB, "{less} KiB");
    function.bind().unwrap_or_else(|error| panic!("bind: {error}"));
    living(info.serial);
}

fn main() -> ExitCode {
    let rounds = std::env::args().nth(1).and_then(|argument| argument.parse().ok()).unwrap_or(1000);
    println!("KTAP version 1\n1..2");
    let began = Instant::now();
    let kept = panic::catch_unwind(|| cycles(rounds)).is_ok();
    println!("{} 1 devices_come_and_go_under_live_mappings_and_leave_nothing", if kept { "ok" } else { "not ok" });
    println!("# {rounds} rounds in {} s", began.elapsed().as_secs());
    if !kept {
        machine::repair();
    }
    let locks = may_still_lock();
    println!("{} 2 no_memory_is_left_charged_to_the_user", if locks { "ok" } else { "not ok" });
    if kept && locks { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
