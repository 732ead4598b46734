// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the memory of rings and registered buffers lies on a machine with two memory nodes. Needs no endpoints.

use std::{collections::BTreeMap, process::ExitCode, time::Duration};

use library_tests::{
    ktap::Ktap,
    process::{Role, say},
};
use pcieipc::{
    group::{Group, GroupOptions},
    reduce::Op,
};

const PATIENCE: Duration = Duration::from_secs(60);
const RING_BYTES: usize = 1 << 20;
/// Elements of the registered buffer: 1 MiB.
const COUNT: usize = 1 << 18;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => promises(),
        ["rank", directory, rank] => rank_main(directory, rank.parse().expect("a rank")),
        other => panic!("unknown role {other:?}"),
    }
}

fn promises() -> ExitCode {
    let mut ktap = Ktap::plan(1);
    ktap.promise("rings_lie_with_the_rank_that_reads_them_and_registered_buffers_with_their_owner", || {
        let directory = std::env::temp_dir().join(format!("numa-{}", std::process::id())).display().to_string();
        let mut ranks: Vec<Role> =
            (0..2).map(|rank| Role::start(&["rank".into(), directory.clone(), rank.to_string()])).collect();
        let said: Vec<String> = ranks.iter_mut().map(|rank| rank.hear().expect("a rank failed")).collect();
        assert!(ranks.iter_mut().all(|rank| rank.end().success()));
        said.join("; ")
    });
    ktap.end()
}

/// A rank on the node of its number.
fn rank_main(directory: &str, rank: usize) -> ExitCode {
    run_on_node(rank);
    let options = GroupOptions { ring_bytes: RING_BYTES, meeting_timeout: PATIENCE, ..GroupOptions::new(rank, 2, directory) };
    let mut group = Group::meet(options).unwrap();
    let mut buffer = group.register::<f32>(COUNT, PATIENCE).unwrap();
    buffer.fill(1.0);
    group.all_reduce_registered(&mut buffer, Op::Sum, PATIENCE).unwrap();
    // Through the whole ring, several times.
    group.all_reduce(&mut vec![1.0f32; 4 * COUNT], Op::Sum, PATIENCE).unwrap();

    let (here, there) = (rank, 1 - rank);
    let pages = |name: &str, writable: bool| -> [usize; 2] {
        let mut found = mappings(name).into_iter().filter(|m| m.0 == writable).map(|m| m.1);
        let pages = found.next().unwrap_or_else(|| panic!("no mapping of {name}"));
        assert!(found.next().is_none(), "two ranks have one each");
        pages
    };
    // Node by node: the ring to the other (what this rank writes), the ring from it, the own buffer.
    let (outward, inward, own) = (pages("pcieipc-ring", true), pages("pcieipc-ring", false), pages("pcieipc-buffer", true));
    // Of a ring, the first page is both ranks' indices. A reader has all pages from the beginning, a writer those that it wrote to.
    let data = RING_BYTES / 4096;
    assert!(outward[there] > data / 2 && outward[here] <= 1, "the ring to the other lies in {outward:?} pages of the nodes");
    assert!(inward[here] >= data && inward[there] <= 1, "the ring from the other lies in {inward:?}");
    assert_eq!(own[there], 0, "the own buffer lies in {own:?}");
    group.barrier(PATIENCE).unwrap();
    say(format!("rank {rank} on node {here}: pages by node: to the other {outward:?}, from it {inward:?}, own buffer {own:?}"));
    ExitCode::SUCCESS
}

/// Only on the processors of that node from now on.
fn run_on_node(node: usize) {
    let path = format!("/sys/devices/system/node/node{node}/cpulist");
    let list = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let first = list.trim().split(['-', ',']).next().and_then(|cpu| cpu.parse().ok()).expect("a processor");
    // SAFETY: an all-zero set is an empty one; the call reads it and nothing else.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(first, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Whether it is writable, and its pages by node, of each of this process's mappings of memory files of that name.
fn mappings(name: &str) -> Vec<(bool, [usize; 2])> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let named = |line: &&str| line.contains(&format!("/memfd:{name}"));
    let writable: BTreeMap<&str, bool> = maps
        .lines()
        .filter(named)
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            Some((words.next()?.split('-').next()?, words.next()?.as_bytes()[1] == b'w'))
        })
        .collect();
    let nodes = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
    nodes
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let writable = *writable.get(words.next()?)?;
            let mut pages = [0; 2];
            for word in words {
                let count = word.strip_prefix('N').and_then(|w| w.split_once('='));
                if let Some((node, count)) = count {
                    pages[node.parse::<usize>().unwrap()] = count.parse().unwrap();
                }
            }
            Some((writable, pages))
        })
        .collect()
}
