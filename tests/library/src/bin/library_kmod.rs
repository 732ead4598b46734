// SPDX-License-Identifier: MIT OR Apache-2.0
//! The library over `/dev/pcieipc`: records, all-reduce, engines, removal in the middle. Needs four endpoints.

use std::{
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::ExitCode,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use library_tests::{
    ktap::Ktap,
    process::{Role, say},
    reference::{value, value_bf16, wrong, wrong_bf16},
};
use no_system_calls::{NONE_MADE, without_system_calls};
use pcieipc::{
    Error,
    device::{DeviceError, EndpointId, Node},
    group::{Group, GroupOptions, KmodOptions, Transport},
    link::{Links, RecordHeader},
    plan::Algorithm,
    reduce::Op,
    transport::kmod::Mover,
};

#[path = "../../../../userlib/pcieipc/tests/support/every_collective.rs"]
mod every_collective;
#[path = "../../../../userlib/pcieipc/tests/support/no_system_calls.rs"]
mod no_system_calls;

/// More than any healthy step takes in a translated machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Within this, every survivor has its answer after an endpoint has gone.
const BOUND: Duration = Duration::from_secs(5);
const RECORDS: u32 = 1_000_000;
const COLLECTIVE_COUNTS: [usize; 4] = [0, 1, 1000, 40_009];

fn meet(rank: usize, ranks: usize, directory: &str, mover: Mover, algorithm: Option<Algorithm>) -> pcieipc::Result<Group> {
    let mut options = GroupOptions::new(rank, ranks, directory);
    options.transport = Transport::Kmod(KmodOptions { mover, ..KmodOptions::default() });
    options.ring_bytes = 256 << 10;
    options.meeting_timeout = PATIENCE;
    options.executor.algorithm = algorithm;
    Group::meet(options)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] => return promises(),
        ["records", directory, rank] => records(directory, rank.parse().expect("a rank")),
        ["reduce", directory, rank, mover] => reduce(directory, rank.parse().expect("a rank"), mover),
        ["collectives", directory, rank, mover] => collectives(directory, rank.parse().expect("a rank"), mover),
        ["loop", directory, rank] => reduce_until_it_fails(directory, rank.parse().expect("a rank")),
        ["sealed", directory] => sealed(directory),
        other => panic!("unknown role {other:?}"),
    }
    ExitCode::SUCCESS
}

fn directory() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("library-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    std::env::temp_dir().join(name).display().to_string()
}

fn start(role: &str, ranks: usize, more: &[&str]) -> Vec<Role> {
    let directory = directory();
    let arguments = |rank: usize| {
        let first = [role.to_owned(), directory.clone(), rank.to_string()];
        first.into_iter().chain(more.iter().map(|m| (*m).to_owned())).collect::<Vec<_>>()
    };
    (0..ranks).map(|rank| Role::start(&arguments(rank))).collect()
}

fn promises() -> ExitCode {
    let mut ktap = Ktap::plan(9);
    ktap.promise("four_endpoints_are_listed_live_and_behind_a_translating_iommu", || {
        let node = Node::open().unwrap();
        let ids = node.endpoints().unwrap();
        assert_eq!(ids.len(), 4);
        for id in ids {
            let info = node.endpoint(id).unwrap();
            assert_eq!((info.state, info.attached), (pcieipc::device::State::Live, false), "{info:?}");
            assert_eq!(info.iommu, pcieipc::device::Iommu::Translating);
            assert!(info.has_engine && info.has_ring_registers && info.vectors >= 3, "{info:?}");
        }
        format!("{:?}", node.limits())
    });
    ktap.promise("a_taken_endpoint_an_absent_one_and_an_absent_node_are_typed_errors", || {
        let first = Node::open().unwrap().endpoints().unwrap()[0];
        let session = Node::open().unwrap().attach(first, 1).unwrap();
        let error = Node::open().unwrap().attach(first, 1).unwrap_err();
        assert!(matches!(error, DeviceError::Busy { .. }), "{error}");
        let absent = Node::open().unwrap().attach(EndpointId(u32::MAX), 1).unwrap_err();
        assert!(matches!(absent, DeviceError::NoEndpoint(_)), "{absent}");
        drop(session);
        drop(Node::open().unwrap().attach(first, 1).unwrap());
        let missing = Node::open_with(std::sync::Arc::new(pcieipc::sys::Linux), &PathBuf::from("/dev/no-such-node")).unwrap_err();
        assert!(matches!(missing, DeviceError::NotLoaded { .. }), "{missing}");
        format!("{error}; {absent}; {missing}")
    });
    ktap.promise("two_processes_exchange_a_million_records_and_none_is_lost_or_reordered", || {
        let begun = Instant::now();
        let mut both = start("records", 2, &[]);
        let said: Vec<_> = both.iter_mut().map(|r| r.hear().expect("a rank failed")).collect();
        assert!(both.iter_mut().all(|r| r.end().success()));
        format!("{:.1} s; sender: {}; receiver: {}", begun.elapsed().as_secs_f32(), said[0], said[1])
    });
    ktap.promise("four_ranks_hold_the_float64_sum_in_f32_and_bf16_two_shot_and_ring", || all_reduce("processor"));
    ktap.promise("four_ranks_hold_the_float64_sum_when_endpoints_move_the_data", || all_reduce("engine"));
    ktap.promise("four_ranks_get_what_every_collective_promises_over_channels_whoever_moves_the_data", || {
        for mover in ["processor", "engine"] {
            let mut four = start("collectives", 4, &[mover]);
            assert!(four.iter_mut().all(|r| r.end().success()), "{mover}");
        }
        format!("{COLLECTIVE_COUNTS:?} elements")
    });
    ktap.promise("endpoints_report_the_bytes_that_their_engines_moved", || {
        let node = Node::open().unwrap();
        let bytes: Vec<u64> = node.endpoints().unwrap().iter().map(|id| node.endpoint(*id).unwrap().dma_bytes).collect();
        assert!(bytes.iter().all(|b| *b > 0), "{bytes:?}");
        format!("{bytes:?}")
    });
    ktap.promise("steady_state_makes_no_system_call", || {
        let mut sealed = Role::start(&["sealed".into(), directory()]);
        let status = sealed.end();
        assert_eq!(status.code(), Some(NONE_MADE), "{status}, signal {:?}", status.signal());
        "20000 records"
    });
    ktap.promise("removal_during_allreduce_returns_endpoint_gone_on_every_survivor_and_the_three_go_on", removal);
    ktap.end()
}

/// One of two ranks that exchange records.
fn records(directory: &str, rank: usize) {
    let mut group = meet(rank, 2, directory, Mover::Processor, None).unwrap();
    let deadline = Instant::now() + Duration::from_secs(300);
    let length = |number: u32| (number as usize * 37) % 500;
    for number in 0..RECORDS {
        let header = RecordHeader { epoch: number, call: !number, ..RecordHeader::default() };
        let links = group.links();
        if rank == 0 {
            let mut room = links.reserve(1, length(number), deadline).unwrap();
            // SAFETY: the room has this length and is this process's own until it is committed.
            unsafe { room.as_mut_ptr().write_bytes(number as u8, length(number)) };
            links.commit(1, header, length(number)).unwrap();
        } else {
            let (got, payload) = links.receive(0, deadline).unwrap();
            assert_eq!((got, payload.len()), (header, length(number)), "record {number}");
            for at in 0..payload.len() {
                // SAFETY: inside the payload, which an honest writer leaves alone until it is released.
                assert_eq!(unsafe { payload.as_ptr().add(at).read_volatile() }, number as u8, "record {number}, byte {at}");
            }
            links.release(0).unwrap();
        }
    }
    // The last record has to be read before the sender leaves its endpoint.
    if rank == 0 {
        let (done, _) = group.links().receive(1, deadline).unwrap();
        assert_eq!(done.epoch, RECORDS);
    } else {
        let links = group.links();
        links.reserve(0, 0, deadline).unwrap();
        links.commit(0, RecordHeader { epoch: RECORDS, ..RecordHeader::default() }, 0).unwrap();
    }
    let info = group.session().unwrap().info().unwrap();
    say(format!("{:?}, doorbells {}, interrupts {}", group.counters(), info.doorbells, info.interrupts));
}

fn all_reduce(mover: &str) -> String {
    let mut four = start("reduce", 4, &[mover]);
    let said: Vec<_> = four.iter_mut().map(|r| r.hear().expect("a rank failed")).collect();
    assert!(four.iter_mut().all(|r| r.end().success()));
    said.join("; ")
}

/// One of four ranks that make every call, the smallest and of more records than a ring holds.
fn collectives(directory: &str, rank: usize, mover: &str) {
    let mut group = meet(rank, 4, directory, mover_of(mover), None).unwrap();
    for count in COLLECTIVE_COUNTS {
        every_collective::every_collective(&mut group, count, PATIENCE);
    }
}

fn mover_of(name: &str) -> Mover {
    if name == "engine" { Mover::Engine } else { Mover::Processor }
}

/// One of four ranks that reduce.
fn reduce(directory: &str, rank: usize, mover: &str) {
    let mover = mover_of(mover);
    let counts: &[usize] = if mover == Mover::Engine { &[1, 1000, 65_537] } else { &[0, 1, 3, 1000, 262_144, 1_000_003] };
    let mut summary = Vec::new();
    for algorithm in [Algorithm::TwoShot, Algorithm::Ring] {
        let mut group = meet(rank, 4, &format!("{directory}-{algorithm:?}"), mover, Some(algorithm)).unwrap();
        let all = [0, 1, 2, 3];
        let moved_before = group.session().unwrap().info().unwrap().dma_bytes;
        for &count in counts {
            let mut buffer: Vec<f32> = (0..count).map(|at| value(rank, at)).collect();
            group.all_reduce(&mut buffer, Op::Sum, PATIENCE).unwrap();
            assert_eq!(wrong(&buffer, &all), 0, "{count} elements of f32 by {algorithm:?}");
            // Partial sums of the ring are rounded in the order of its hops, so they are not compared with one rounding.
            if algorithm == Algorithm::TwoShot {
                let mut buffer: Vec<_> = (0..count).map(|at| value_bf16(rank, at)).collect();
                group.all_reduce(&mut buffer, Op::Sum, PATIENCE).unwrap();
                assert_eq!(wrong_bf16(&buffer, &all), 0, "{count} elements of bf16 by {algorithm:?}");
            }
        }
        let counters = group.counters();
        assert_eq!(counters.dma_bytes > 0, mover == Mover::Engine, "{counters:?}");
        let moved = group.session().unwrap().info().unwrap().dma_bytes - moved_before;
        assert_eq!(counters.dma_bytes, moved, "what the rank counted and what its endpoint says");
        summary.push(format!("{algorithm:?} {counters:?}"));
    }
    say(format!("rank {rank}: {}", summary.join(", ")));
}

/// Both ends in one thread, so that each finds its ring ready.
fn sealed(directory: &str) {
    let (mut a, mut b) = std::thread::scope(|scope| {
        let second = scope.spawn(|| meet(1, 2, directory, Mover::Processor, None).unwrap());
        (meet(0, 2, directory, Mover::Processor, None).unwrap(), second.join().unwrap())
    });
    let deadline = Instant::now() + PATIENCE;
    without_system_calls(|| {
        (0..20_000u32).all(|number| {
            let header = RecordHeader { epoch: number, ..RecordHeader::default() };
            let (from, to) = if number % 2 == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
            let (from, to) = (from.links(), to.links());
            let len = (number as usize * 97) % 9000;
            from.reserve(to.rank(), len, deadline).is_ok()
                && from.commit(to.rank(), header, len).is_ok()
                && to.receive(from.rank(), deadline).is_ok_and(|(h, payload)| h == header && payload.len() == len)
                && to.release(from.rank()).is_ok()
                && from.confirm().is_ok()
                && to.confirm().is_ok()
        })
    })
}

/// One of four ranks, one of which loses its endpoint.
fn reduce_until_it_fails(directory: &str, rank: usize) {
    let mut group = meet(rank, 4, directory, Mover::Processor, None).unwrap();
    let info = group.session().unwrap().info().unwrap();
    say(&info.address);
    let mut calls = 0;
    let error = loop {
        let mut buffer: Vec<f32> = (0..200_000).map(|at| value(rank, at)).collect();
        match group.all_reduce(&mut buffer, Op::Sum, PATIENCE) {
            Ok(()) => assert_eq!(wrong(&buffer, &[0, 1, 2, 3]), 0),
            Err(error) => break error,
        }
        calls += 1;
        if calls == 2 {
            say("reducing");
        }
    };
    match error {
        Error::EndpointGone { peer, .. } => say(format!("gone {peer}")),
        other => say(format!("{other:?}: {other}")),
    }
    match group.shrink(PATIENCE) {
        Ok(()) => {
            let members = group.members().to_vec();
            for count in [1, 1000, 200_000] {
                let mut buffer: Vec<f32> = (0..count).map(|at| value(rank, at)).collect();
                group.all_reduce(&mut buffer, Op::Sum, PATIENCE).unwrap();
                assert_eq!(wrong(&buffer, &members), 0);
            }
            say(format!("right among {members:?}"));
        }
        Err(Error::EndpointGone { peer, .. }) => say(format!("own endpoint, rank {peer}, is gone")),
        Err(other) => say(format!("{other:?}: {other}")),
    }
}

fn removal() -> String {
    const VICTIM: usize = 2;
    let mut four = start("loop", 4, &[]);
    let addresses: Vec<String> = four.iter_mut().map(|r| r.hear().expect("a rank failed to meet")).collect();
    for role in &mut four {
        assert_eq!(role.hear().as_deref(), Some("reducing"));
    }
    let begun = Instant::now();
    std::fs::write(format!("/sys/bus/pci/devices/{}/remove", addresses[VICTIM]), "1").expect("remove the endpoint");
    let removed = begun.elapsed();
    for (rank, role) in four.iter_mut().enumerate() {
        assert_eq!(role.hear(), Some(format!("gone {VICTIM}")), "rank {rank}");
    }
    let told = begun.elapsed();
    assert!(told < BOUND, "all ranks had their answer only after {told:?}");
    for (rank, role) in four.iter_mut().enumerate() {
        let want = if rank == VICTIM { format!("own endpoint, rank {VICTIM}, is gone") } else { "right among [0, 1, 3]".into() };
        assert_eq!(role.hear(), Some(want), "rank {rank}");
        assert!(role.end().success());
    }
    format!("removed after {removed:?}, all told after {told:?}, reduced again after {:?}", begun.elapsed())
}
