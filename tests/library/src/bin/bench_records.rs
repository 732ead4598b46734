// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records between two processes over a channel of `/dev/pcieipc`, beside the same ring in plain shared memory, turn by turn. Both
//! sides spin, so that nobody is rung and only the rings are compared. Prints JSON; needs two endpoints.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use library_tests::process::{Role, say};
use pcieipc::{
    group::{Group, GroupOptions, KmodOptions, Transport},
    link::{Links, RecordHeader},
    transport::kmod::Mover,
};

const RUNS: usize = 61;
/// Bytes of a record, and records of one turn.
const CASES: [(usize, u32); 2] = [(64, 1_000), (64 << 10, 40)];
/// Turns of each side in a run. Short ones, so that what else a host does meets both sides; the middle one counts.
const TURNS: usize = 51;
/// A bound for hangs, by the clock of a translated machine, which runs ahead on a busy host.
const PATIENCE: Duration = Duration::from_secs(3600);

fn meet(rank: usize, directory: &str, transport: Transport) -> Group {
    let mut options = GroupOptions::new(rank, 2, directory);
    options.transport = transport;
    options.ring_bytes = 512 << 10;
    options.meeting_timeout = PATIENCE;
    Group::meet(options).expect("two ranks meet")
}

/// Asks again and again; a bound for hangs.
fn spin<T>(mut what: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        for _ in 0..1000 {
            if let Some(got) = what() {
                return got;
            }
            std::hint::spin_loop();
        }
        assert!(Instant::now() < end, "the other side hangs");
    }
}

fn send<L: Links + ?Sized>(links: &mut L, to: usize, from: &[u8], epoch: u32) {
    spin(|| {
        let mut room = links.try_reserve(to, from.len()).expect("room")?;
        // SAFETY: the room has this length and is this process's own until it is committed.
        unsafe { room.as_mut_ptr().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Some(())
    });
    links.commit(to, RecordHeader { epoch, ..RecordHeader::default() }, from.len()).expect("commit");
}

fn receive<L: Links + ?Sized>(links: &mut L, from: usize, into: &mut [u8]) -> u32 {
    let epoch = spin(|| {
        let (header, payload) = links.try_receive(from).expect("a record")?;
        assert!(payload.len() <= into.len());
        // SAFETY: inside the payload, which an honest writer leaves alone until it is released.
        unsafe { payload.as_ptr().copy_to_nonoverlapping(into.as_mut_ptr(), payload.len()) };
        Some(header.epoch)
    });
    links.release(from).expect("release");
    epoch
}

/// Nanoseconds for a record, from the first to the answer to the last, as rank 0 sees it.
fn run(group: &mut Group, rank: usize, bytes: usize, records: u32, buffer: &mut [u8]) -> f64 {
    let links = group.links();
    let begin = Instant::now();
    for number in 0..records {
        match rank {
            0 => send(links, 1, &buffer[..bytes], number),
            _ => assert_eq!(receive(links, 0, buffer), number),
        }
    }
    match rank {
        0 => assert_eq!(receive(links, 1, buffer), records),
        _ => send(links, 0, &[], records),
    }
    begin.elapsed().as_nanos() as f64 / f64::from(records)
}

fn pin(processor: usize) {
    // SAFETY: a set of processors is plain data, and the call only reads it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(processor, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &set), 0);
    }
}

fn role(rank: usize, directory: &str) {
    pin(rank);
    let kmod = KmodOptions { mover: Mover::Processor, ..KmodOptions::default() };
    let mut groups = [
        meet(rank, &format!("{directory}-kmod"), Transport::Kmod(kmod)),
        meet(rank, &format!("{directory}-shm"), Transport::Shm),
    ];
    let mut buffer = vec![0x5a; 64 << 10];
    for (bytes, records) in CASES {
        // The first run warms up and does not count.
        for number in 0..=RUNS {
            let mut times = [const { Vec::new() }; 2];
            for turn in 0..2 * TURNS {
                // Who is first changes: one, other, other, one.
                let which = turn.div_ceil(2) % 2;
                times[which].push(run(&mut groups[which], rank, bytes, records, &mut buffer));
            }
            if rank == 0 && number > 0 {
                say(format!("{bytes} {} {}", median(&mut times[0]), median(&mut times[1])));
            }
        }
    }
    // Nobody leaves while the other still looks.
    for group in &mut groups {
        run(group, rank, 64, 1, &mut buffer);
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [rank, directory] = arguments.as_slice() {
        role(rank.parse().expect("a rank"), directory);
        return ExitCode::SUCCESS;
    }
    let directory = std::env::temp_dir().join(format!("bench-{}", std::process::id())).display().to_string();
    let mut roles: Vec<Role> = (0..2).map(|rank| Role::start(&[rank.to_string(), directory.clone()])).collect();
    let mut measured: Vec<(usize, f64, f64)> = Vec::new();
    while let Some(line) = roles[0].hear() {
        let words: Vec<f64> = line.split(' ').map(|word| word.parse().expect("a number")).collect();
        measured.push((words[0] as usize, words[1], words[2]));
    }
    if !roles.iter_mut().all(|role| role.end().success()) {
        return ExitCode::FAILURE;
    }
    let rows: Vec<String> = CASES
        .iter()
        .map(|(bytes, _)| {
            let runs: Vec<_> = measured.iter().filter(|run| run.0 == *bytes).collect();
            let ours = median(&mut runs.iter().map(|run| run.1).collect::<Vec<_>>());
            let peer = median(&mut runs.iter().map(|run| run.2).collect::<Vec<_>>());
            let mut ratios: Vec<f64> = runs.iter().map(|run| run.1 / run.2).collect();
            let ratio = median(&mut ratios);
            format!(
                "{{\"case\": \"records from one process to another, both spin\", \"bytes\": {bytes}, \"unit\": \"ns\", \"ours\": {ours:.1}, \
                 \"peer_name\": \"the same ring in shared memory\", \"peer\": {peer:.1}, \"ratio\": {ratio:.4}, \"runs\": {}, \
                 \"ratio_lowest\": {:.4}, \"ratio_highest\": {:.4}, \"bar\": 1.10}}",
                runs.len(),
                ratios[0],
                ratios[ratios.len() - 1]
            )
        })
        .collect();
    println!("{{\"rows\": [{}]}}", rows.join(", "));
    ExitCode::SUCCESS
}
