// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where rings lie on a machine with two memory nodes, each with its host bridge and an endpoint.

use std::{fs, process::ExitCode};

use guest::{
    abi::*,
    call::{Record, number},
    ktap, machine,
    mapping::Mapping,
    promises,
    session::{Node, Session},
};
use nix::fcntl::OFlag;

const MIB: u64 = 1 << 20;

/// Pages of a mapping on each node.
fn pages_by_node(mapping: &Mapping) -> [u64; 2] {
    let start = format!("{:x} ", mapping.address().as_ptr() as usize);
    let all = fs::read_to_string("/proc/self/numa_maps").unwrap();
    let line = all.lines().find(|line| line.trim_start_matches('0').starts_with(&start)).expect("the mapping");
    let on = |node: u32| {
        let prefix = format!("N{node}=");
        line.split_whitespace().find_map(|word| word.strip_prefix(&prefix)?.parse().ok()).unwrap_or(0)
    };
    [on(0), on(1)]
}

/// On the first processor of a node from now on.
fn run_on(node: usize) {
    let list = fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).unwrap();
    let first = list.trim().split(['-', ',']).next().and_then(|cpu| cpu.parse().ok()).unwrap();
    let mut processors = nix::sched::CpuSet::new();
    processors.set(first).unwrap();
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &processors).unwrap();
}

fn each_endpoint_is_on_its_node() {
    let node = Node::open(OFlag::empty());
    let mut nodes: Vec<i32> = node.endpoints().into_iter().map(|id| node.info(id).unwrap().numa_node).collect();
    nodes.sort_unstable();
    assert_eq!(nodes, [0, 1]);
}

fn rings_lie_on_the_node_of_their_endpoint_wherever_they_are_made_and_mapped() {
    for index in 0..2 {
        let session = Session::nth(index);
        let here = session.info().numa_node as usize;
        for processor in 0..2 {
            run_on(processor);
            let channel = session.create(8 * MIB, 0).unwrap();
            let export = channel.export().unwrap();
            let [data, tail, head, _] = export.maps();
            // The first access from the other node moves nothing.
            data.fill(1);
            for (what, mapping) in [("data", &data), ("tail", &tail), ("head", &head)] {
                let pages = pages_by_node(mapping);
                assert_eq!(pages[1 - here], 0, "{what} of an endpoint on node {here}: {pages:?}");
                assert_eq!(pages[here], mapping.len() as u64 / 4096, "{what} of an endpoint on node {here}: {pages:?}");
            }
        }
    }
}

fn a_node_that_is_full_lets_rings_lie_on_the_other() {
    let session = Session::nth(0);
    let here = session.info().numa_node as usize;
    let free = |node: usize| -> u64 {
        let text = fs::read_to_string(format!("/sys/devices/system/node/node{node}/meminfo")).unwrap();
        let line = text.lines().find(|line| line.contains("MemFree")).unwrap();
        line.split_whitespace().rev().nth(1).unwrap().parse::<u64>().unwrap() << 10
    };
    let channels = free(here) / (64 * MIB) + 1;
    assert!(free(1 - here) > 128 * MIB, "the other has room");
    let mut outside = 0;
    let made: Vec<_> = (0..channels).map(|_| session.create(64 * MIB, 0).unwrap()).collect();
    for (seed, channel) in (1..).zip(&made) {
        let [data, ..] = channel.export().unwrap().maps();
        data.fill(seed);
        assert_eq!(data.differences(seed), 0);
        outside += pages_by_node(&data)[1 - here];
    }
    assert!(outside > 0, "all of {channels} channels of 64 MiB lie on node {here}");
    println!("# {channels} channels of 64 MiB, {outside} pages of them on the other node");
}

fn sockets_are_a_reason_for_being_far() {
    let node = Node::open(OFlag::empty());
    let ids = node.endpoints();
    let far = node.get(number::DISTANCE, pcieipc_distance { from: ids[0], to: ids[1], ..Record::new() });
    let both = PCIEIPC_FAR_SOCKETS | PCIEIPC_FAR_HOST_BRIDGE;
    assert_eq!(far.reasons & both, both, "{far:?}");
    assert_eq!(far.p2p, 0);
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            each_endpoint_is_on_its_node,
            rings_lie_on_the_node_of_their_endpoint_wherever_they_are_made_and_mapped,
            a_node_that_is_full_lets_rings_lie_on_the_other,
            sockets_are_a_reason_for_being_far,
        ],
        machine::repair,
    )
}
