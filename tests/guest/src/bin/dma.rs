// SPDX-License-Identifier: MIT OR Apache-2.0
//! DMA where it must not be: outside of rings, after a ring was taken away, after unbind. The endpoint is one that has lost its
//! mind (`haunt` in docs/soft-endpoint.md): it goes on writing whatever the kernel tells it, so only the IOMMU holds.
//! `PCIEIPC_IOMMU` says which mode is meant: `DMA` is strict, `DMA-FQ` is lazy.

use std::{
    env,
    fs::{self, File},
    io::{Read, Write},
    process::ExitCode,
    thread,
    time::Duration,
};

use guest::{
    ktap, machine,
    mapping::{Mapping, PAGE},
    promises,
    session::{SOON, Session, living, played, softdev},
    wait,
};
use rig::guest::Host;
use serde_json::{Value, json};

/// Long enough for thousands of stores of the endpoint.
const MOMENT: Duration = Duration::from_millis(10);
const ROUNDS: u64 = 100;
const RING: u64 = 64 << 10;

/// An endpoint that haunts until this is dropped.
struct Haunted {
    serial: u64,
    endpoint: Value,
}

impl Haunted {
    fn new(serial: u64) -> Self {
        let endpoint = played(serial)["endpoint"].clone();
        softdev(&json!({"cmd": "haunt", "endpoint": endpoint, "on": true}));
        Self { serial, endpoint }
    }

    /// Stores that landed, and that did not.
    fn counts(&self) -> (u64, u64) {
        let report = played(self.serial);
        (report["haunted"].as_u64().unwrap(), report["exorcised"].as_u64().unwrap())
    }
}

impl Drop for Haunted {
    fn drop(&mut self) {
        softdev(&json!({"cmd": "haunt", "endpoint": self.endpoint, "on": false}));
    }
}

/// The endpoint writes there: what the processor stored does not stay.
fn is_written(data: &Mapping) -> bool {
    data.store(0, u64::MAX);
    wait::until(SOON, || data.load(0) != u64::MAX)
}

/// What the processor stores stays.
fn assert_left_alone(data: &Mapping, seed: u64, haunted: &Haunted, why: &str) {
    data.fill(seed);
    let (_, before) = haunted.counts();
    thread::sleep(MOMENT);
    let (_, after) = haunted.counts();
    assert_eq!(data.differences(seed), 0, "{why}, round {seed}: the endpoint still writes into the ring");
    assert!(wait::until(SOON, || haunted.counts().1 > before), "{why}: the endpoint did not even try ({before}, {after})");
}

fn the_iommu_is_in_the_mode_that_is_meant() {
    let meant = env::var("PCIEIPC_IOMMU").unwrap();
    let session = Session::nth(0);
    let group = session.info().iommu_group;
    let mode = fs::read_to_string(format!("/sys/kernel/iommu_groups/{group}/type")).unwrap();
    assert_eq!(mode.trim(), meant);
}

fn dma_outside_of_rings_finds_no_memory() {
    let session = Session::nth(0);
    let channel = session.create(RING, 0).unwrap();
    let [data, ..] = channel.export().unwrap().maps();
    let endpoint = played(session.info().serial)["endpoint"].clone();
    // All over the machine's memory, which is 2 GiB from 0 on.
    let mut host = Host::connect().unwrap();
    let mut landed = Vec::new();
    for address in (0..2u64 << 30).step_by(16 << 20).chain([0x1000, 0x10_0000, 0xfee0_0000, 1 << 32, u64::MAX - 0xfff]) {
        let poke = json!({"cmd": "poke", "endpoint": endpoint, "address": address, "bytes": 64, "seed": 1});
        if host.softdev(&poke).is_ok() {
            landed.push(address);
        }
    }
    // One process at a time has the line to the host.
    drop(host);
    assert!(landed.is_empty(), "memory answered at {landed:#x?}");
    // The same endpoint does reach its ring.
    let haunted = Haunted::new(session.info().serial);
    assert!(is_written(&data));
    drop(haunted);
}

fn a_ring_that_is_destroyed_under_dma_is_left_alone() {
    let session = Session::nth(0);
    let haunted = Haunted::new(session.info().serial);
    for round in 1..=ROUNDS {
        let channel = session.create(RING, 0).unwrap();
        let [data, ..] = channel.export().unwrap().maps();
        assert!(is_written(&data), "round {round}: the endpoint does not write");
        channel.destroy().unwrap();
        assert_left_alone(&data, round, &haunted, "after DESTROY");
    }
}

fn an_endpoint_that_is_unbound_under_dma_writes_nowhere() {
    let serial = Session::nth(0).info().serial;
    let haunted = Haunted::new(serial);
    for round in 1..=ROUNDS {
        let session = Session::on(guest::session::Node::open(nix::fcntl::OFlag::empty()), living(serial));
        let function = session.function();
        let channel = session.create(RING, 0).unwrap();
        let [data, ..] = channel.export().unwrap().maps();
        assert!(is_written(&data), "round {round}: the endpoint does not write");
        function.unbind().unwrap();
        assert_left_alone(&data, round, &haunted, "after unbind");
        assert_eq!(played(serial)["mapped_bytes"], 0, "nothing is mapped for it");
        function.bind().unwrap();
    }
    let (landed, refused) = haunted.counts();
    println!("# {landed} stores landed in rings, {refused} were refused");
}

/// Who is given the pages that this processor has just freed: the kernel keeps them at hand, the last freed first. Pages that the kernel had for
/// itself, as those of rings, go to its own users first, such as a pipe; what a process leaves may go to another process.
struct NextOwner {
    memory: Mapping,
    pipe: File,
    seed: u64,
}

impl NextOwner {
    const BYTES: usize = 4 * RING as usize;

    /// Filled at once.
    fn new(seed: u64) -> Self {
        let (reader, writer) = nix::unistd::pipe().unwrap();
        nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_SETPIPE_SZ(Self::BYTES as i32)).unwrap();
        File::from(writer).write_all(&seed.to_ne_bytes().repeat(Self::BYTES / 8)).unwrap();
        let memory = Mapping::anonymous(Self::BYTES).unwrap();
        memory.fill(seed);
        Self { memory, pipe: File::from(reader), seed }
    }

    /// Nobody else wrote there in a moment.
    fn assert_left_alone(mut self) {
        let seed = self.seed;
        thread::sleep(MOMENT);
        assert_eq!(self.memory.differences(seed), 0, "round {seed}: the endpoint writes into a process's memory");
        let mut kept = Vec::new();
        self.pipe.read_to_end(&mut kept).unwrap();
        let changed = kept.chunks_exact(8).filter(|word| **word != seed.to_ne_bytes()).count();
        assert_eq!((kept.len(), changed), (Self::BYTES, 0), "round {seed}: the endpoint writes into a pipe");
    }
}

fn stay_on_one_processor() {
    let mut processor = nix::sched::CpuSet::new();
    processor.set(0).unwrap();
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &processor).unwrap();
}

fn pages_of_a_ring_that_is_gone_are_not_written_by_anybody() {
    stay_on_one_processor();
    let session = Session::nth(0);
    let haunted = Haunted::new(session.info().serial);
    for round in 1..=ROUNDS {
        let channel = session.create(RING, 0).unwrap();
        let [data, ..] = channel.export().unwrap().maps();
        assert!(is_written(&data), "round {round}: the endpoint does not write");
        drop(data);
        channel.destroy().unwrap();
        NextOwner::new(round).assert_left_alone();
    }
    assert!(haunted.counts().1 > 0);
}

fn a_process_that_is_killed_under_dma_leaves_pages_that_nobody_writes() {
    stay_on_one_processor();
    let serial = Session::nth(0).info().serial;
    let haunted = Haunted::new(serial);
    for round in 1..=ROUNDS / 4 {
        // SAFETY: the child makes system calls only, on what it opens itself, and ends.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Child => {
                let session = Session::nth(0);
                let channel = session.create(RING, 0).unwrap();
                let [data, ..] = channel.export().unwrap().maps();
                // SAFETY: asks for the end of this process.
                unsafe { libc::raise(if is_written(&data) { libc::SIGKILL } else { libc::SIGABRT }) };
                unreachable!()
            }
            nix::unistd::ForkResult::Parent { child } => {
                let status = nix::sys::wait::waitpid(child, None).unwrap();
                assert!(
                    matches!(status, nix::sys::wait::WaitStatus::Signaled(_, nix::sys::signal::Signal::SIGKILL, _)),
                    "{status:?}"
                );
            }
        }
        NextOwner::new(round).assert_left_alone();
    }
    assert_eq!(played(haunted.serial)["mapped_bytes"], 0, "nothing is mapped for it");
}

fn main() -> ExitCode {
    assert_eq!(PAGE, 4096);
    ktap::main(
        promises![
            the_iommu_is_in_the_mode_that_is_meant,
            dma_outside_of_rings_finds_no_memory,
            a_ring_that_is_destroyed_under_dma_is_left_alone,
            an_endpoint_that_is_unbound_under_dma_writes_nowhere,
            pages_of_a_ring_that_is_gone_are_not_written_by_anybody,
            a_process_that_is_killed_under_dma_leaves_pages_that_nobody_writes,
        ],
        machine::repair,
    )
}
