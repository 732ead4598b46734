// SPDX-License-Identifier: MIT OR Apache-2.0
//! A group over `/dev/pcieipc` whose endpoints are reset, have errors, and leave and come back: all ranks are together again.
//! Needs four endpoints and /dev/aer_inject.

use std::{
    fs,
    os::unix::fs::FileExt,
    path::Path,
    process::{Command, ExitCode},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use library_tests::{
    ktap::Ktap,
    process::{Role, say},
    reference::{value, wrong},
};
use pcieipc::{
    Error,
    device::{Event, EventKind, State},
    group::{Group, GroupOptions, KmodOptions, Transport},
    reduce::Op,
    transport::kmod::Mover,
};

/// More than any healthy step takes in a translated machine.
const PATIENCE: Duration = Duration::from_secs(120);
const RANKS: usize = 4;
/// Whose endpoint suffers.
const VICTIM: usize = 2;
/// Elements of a call, calls, and what a good engine moves in a second where links are compared.
const COUNT: usize = 400_000;
const CALLS: u32 = 3;
const SPEED: usize = 2 << 20;
const COMPLETION_TIMEOUT: u32 = 0x4000;
const MALFORMED_TLP: u32 = 0x4_0000;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => promises(),
        ["work", directory, rank, mover] => {
            work(directory, rank.parse().expect("a rank"), mover);
            ExitCode::SUCCESS
        }
        ["slow", directory, rank, _] => {
            slow(directory, rank.parse().expect("a rank"));
            ExitCode::SUCCESS
        }
        ["bereaved", directory, rank, mover] => {
            bereaved(directory, rank.parse().expect("a rank"), mover);
            ExitCode::SUCCESS
        }
        ["scribble", directory, rank, mover] => {
            scribble(directory, rank.parse().expect("a rank"), mover);
            ExitCode::SUCCESS
        }
        other => panic!("unknown role {other:?}"),
    }
}

fn meet(directory: &str, rank: usize, mover: &str) -> Group {
    let mut options = GroupOptions::new(rank, RANKS, directory);
    let mover = if mover == "engine" { Mover::Engine } else { Mover::Processor };
    options.transport = Transport::Kmod(KmodOptions { mover, ..KmodOptions::default() });
    options.ring_bytes = 256 << 10;
    options.meeting_timeout = PATIENCE;
    let group = Group::meet(options).unwrap();
    say(&group.session().unwrap().info().unwrap().address);
    group
}

/// A rank that waits until a link has trained down, and then owns a shard that fits the links.
fn slow(directory: &str, rank: usize) {
    let mut group = meet(directory, rank, "engine");
    let input: Vec<f32> = (0..COUNT).map(|at| value(rank, at)).collect();
    let mut output = vec![0.0; input.len()];
    let mut calls = |group: &mut Group| {
        let (bytes, begun) = (group.counters().dma_bytes, Instant::now());
        for _ in 0..CALLS {
            group.all_reduce_into(&input, &mut output, Op::Sum, PATIENCE).unwrap();
            assert_eq!(wrong(&output, &[0, 1, 2, 3]), 0);
        }
        (group.counters().dma_bytes - bytes, begun.elapsed().as_secs_f64() / f64::from(CALLS))
    };
    calls(&mut group);
    say("right");
    loop {
        let seen = !group.degraded_links().is_empty();
        if group.agree(seen, PATIENCE).unwrap().ok {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let (bytes, seconds) = calls(&mut group);
    // The group sees it by itself, at the next look but one.
    for _ in 0..128 {
        group.all_reduce(&mut [1.0f32], Op::Sum, PATIENCE).unwrap();
    }
    let shares = group.shares();
    assert!(!shares.are_equal(), "{:?}", group.degraded_links());
    assert_eq!(group.rebalance(PATIENCE).unwrap(), shares);
    // Plans for the new shares are made and proved at the first call.
    calls(&mut group);
    let (now, then) = calls(&mut group);
    say(format!("moved {bytes} {now} bytes, {:.1} then {:.1} ms a call", seconds * 1e3, then * 1e3));
}

/// A rank that reduces as long as it runs, and recovers whenever the ranks agree that something failed.
fn work(directory: &str, rank: usize, mover: &str) {
    let mut group = meet(directory, rank, mover);
    let input: Vec<f32> = (0..50_000).map(|at| value(rank, at)).collect();
    let (mut output, mut tell) = (vec![0.0; input.len()], true);
    loop {
        let reduced = group.all_reduce_into(&input, &mut output, Op::Sum, PATIENCE);
        let failed = Instant::now();
        if reduced.is_ok() {
            assert_eq!(wrong(&output, &[0, 1, 2, 3]), 0);
        }
        let agreed = group.agree(reduced.is_ok(), PATIENCE).unwrap();
        if agreed.ok && agreed.failed.is_empty() {
            if std::mem::take(&mut tell) {
                say("right");
            }
            continue;
        }
        let why = reduced.map_or_else(|error| error.to_string(), |()| "nothing, but another rank".into());
        // Those of the links' life end with it.
        let heard = group.events();
        group.recover(PATIENCE).unwrap();
        let session = group.session().unwrap();
        say(format!(
            "back {:?} on {} generation {} after {} ms; heard of {}; it was told: {why}",
            group.members(),
            session.endpoint(),
            session.generation(),
            failed.elapsed().as_millis(),
            changes(&heard)
        ));
        tell = true;
    }
}

/// Endpoints that were said not to live any more.
fn changes(events: &[Event]) -> String {
    let left = |event: &Event| match event.kind {
        EventKind::State { from: State::Live, to } => Some(format!("{} {to}", event.endpoint?)),
        _ => None,
    };
    let left: Vec<String> = events.iter().filter_map(left).collect();
    if left.is_empty() { "nothing".into() } else { left.join(" and ") }
}

/// A rank that reduces until another dies, and then goes on with those that are left.
fn bereaved(directory: &str, rank: usize, mover: &str) {
    let mut group = meet(directory, rank, mover);
    let input: Vec<f32> = (0..50_000).map(|at| value(rank, at)).collect();
    let mut output = vec![0.0; input.len()];
    let mut calls = 0;
    let error = loop {
        match group.all_reduce_into(&input, &mut output, Op::Sum, PATIENCE) {
            Ok(()) => assert_eq!(wrong(&output, &[0, 1, 2, 3]), 0),
            Err(error) => break error,
        }
        calls += 1;
        if calls == 5 {
            say("right");
        }
    };
    let named = match &error {
        Error::PeerDied { peer: VICTIM, endpoint: Some(_), .. } => "itself".to_owned(),
        // Who heard it from another that knows it.
        Error::Aborted { by, why, .. } if *by != VICTIM && why.contains(&format!("rank {VICTIM} with endpoint")) => {
            format!("rank {by}")
        }
        other => panic!("rank {rank} was told: {other}"),
    };
    let agreed = group.agree(false, PATIENCE).unwrap();
    assert_eq!(agreed.failed, [VICTIM]);
    group.shrink(PATIENCE).unwrap();
    let survivors: Vec<usize> = (0..RANKS).filter(|rank| *rank != VICTIM).collect();
    assert_eq!(group.members(), survivors);
    for _ in 0..20 {
        group.all_reduce_into(&input, &mut output, Op::Sum, PATIENCE).unwrap();
        assert_eq!(wrong(&output, &survivors), 0);
    }
    say(format!("knew it from {named}"));
}

/// Everything of the module that this process has mapped for writing, by the kernel's list.
fn writable() -> Vec<(u64, u64)> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mapping = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let ours = rest.starts_with("rw-s") && rest.contains("pcieipc");
        ours.then_some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
    };
    maps.lines().filter_map(mapping).collect()
}

/// A rank of four. The victim does not answer when the others shrink, and then writes to all that it shared with them as long as they work.
fn scribble(directory: &str, rank: usize, mover: &str) {
    let mut group = meet(directory, rank, mover);
    let input: Vec<f32> = (0..50_000).map(|at| value(rank, at)).collect();
    let mut output = vec![0.0; input.len()];
    group.all_reduce_into(&input, &mut output, Op::Sum, PATIENCE).unwrap();
    // Who has its sum may go on before the others have theirs.
    assert!(group.agree(true, PATIENCE).unwrap().ok);
    say("right");
    let survivors: Vec<usize> = (0..RANKS).filter(|rank| *rank != VICTIM).collect();
    let shrunk = |rank: usize| Path::new(directory).join(format!("shrunk-{rank}"));
    let until = Instant::now() + PATIENCE;
    if rank == VICTIM {
        // Until the last of them has read on the old board what they decided.
        while !survivors.iter().all(|rank| shrunk(*rank).exists()) {
            assert!(Instant::now() < until, "the others did not go on");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mapped = writable();
        // The board, and of each of the others two pages and a ring.
        assert!(mapped.len() > RANKS, "{mapped:?}");
        let memory = fs::File::options().write(true).open("/proc/self/mem").unwrap();
        for round in (0..=255u8).cycle() {
            for (start, end) in &mapped {
                memory.write_all_at(&vec![round; (end - start) as usize], *start).unwrap();
            }
            if round == 0 {
                say(format!("wrote {} mappings", mapped.len()));
            }
        }
    }
    group.shrink(Duration::from_secs(30)).unwrap();
    assert_eq!(group.members(), survivors);
    fs::write(shrunk(rank), "").unwrap();
    for _ in 0..100 {
        group.all_reduce_into(&input, &mut output, Op::Sum, PATIENCE).unwrap();
        assert_eq!(wrong(&output, &survivors), 0);
    }
    assert!(group.agree(true, PATIENCE).unwrap().failed.is_empty());
    say("right");
}

/// Has the kernel find an uncorrectable error in the AER registers of the function at this address.
fn inject(address: &str, uncorrectable: u32) {
    let number = |text: &str| u32::from_str_radix(text, 16).unwrap();
    let parts: Vec<&str> = address.split([':', '.']).collect();
    let [domain, bus, device, function] = parts[..] else { panic!("{address}") };
    let mut request = vec![number(bus) as u8, number(device) as u8, number(function) as u8, 0];
    for word in [uncorrectable, 0, 0, 1, 2, 3, number(domain)] {
        request.extend(word.to_ne_bytes());
    }
    let begun = Instant::now();
    // Busy until the kernel has looked at the one before.
    while let Err(error) = fs::write("/dev/aer_inject", &request) {
        assert!(error.raw_os_error() == Some(libc::EBUSY) && begun.elapsed() < PATIENCE, "/dev/aer_inject: {error}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until all ranks are right again; gives what they said on the way.
fn all_right(ranks: &mut [Role]) -> Vec<String> {
    let mut said = Vec::new();
    for (rank, role) in ranks.iter_mut().enumerate() {
        loop {
            match role.hear().unwrap_or_else(|| panic!("rank {rank} failed")).as_str() {
                "right" => break,
                other => said.push(format!("rank {rank} {other}")),
            }
        }
    }
    said
}

fn start(role: &str, mover: &str) -> (Vec<Role>, Vec<String>) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("recovery-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let directory = std::env::temp_dir().join(name).display().to_string();
    let start = |rank: usize| Role::start(&[role.to_owned(), directory.clone(), rank.to_string(), mover.to_owned()]);
    let mut four: Vec<Role> = (0..RANKS).map(start).collect();
    let addresses: Vec<String> = four.iter_mut().map(|r| r.hear().expect("a rank failed to meet")).collect();
    all_right(&mut four);
    (four, addresses)
}

/// Asks the endpoints' server, which counts them in the order of their addresses.
fn softdev(request: String) {
    let answer = Command::new("host").args(["softdev", &request]).output().expect("host");
    assert!(answer.status.success(), "{request}: {answer:?}");
}

/// The link of one endpoint trains down to a fourth, and all engines move what their links would.
fn rebalanced() -> String {
    let (mut four, _) = start("slow", "engine");
    for endpoint in 0..RANKS {
        let speed = if endpoint == VICTIM { SPEED / 4 } else { SPEED };
        softdev(format!(r#"{{"cmd":"slow","endpoint":{endpoint},"bytes_per_s":{speed}}}"#));
    }
    softdev(format!(r#"{{"cmd":"link","endpoint":{VICTIM},"speed":4,"width":4}}"#));
    let said: Vec<String> = four.iter_mut().map(|r| r.hear().expect("a rank failed")).collect();
    for endpoint in 0..RANKS {
        softdev(format!(r#"{{"cmd":"slow","endpoint":{endpoint},"bytes_per_s":0}}"#));
    }
    softdev(format!(r#"{{"cmd":"link","endpoint":{VICTIM},"speed":4,"width":16}}"#));
    for (rank, said) in said.iter().enumerate() {
        let words: Vec<f64> = said.split(' ').filter_map(|word| word.parse().ok()).collect();
        // Equal shards: 1.5 times the buffer over each link. By the links: once over the slow one, 1.67 times over the others.
        let (least, most) = if rank == VICTIM { (0.62, 0.72) } else { (1.06, 1.16) };
        let moved = words[1] / words[0];
        assert!((least..most).contains(&moved), "rank {rank} {said}");
    }
    // Whoever owns what, the slow link has to carry the buffer once.
    let bound = COUNT as f64 * 4.0 / (SPEED / 4) as f64 * 1e3;
    let words = |said: &String| said.split(' ').filter_map(|word| word.parse::<f64>().ok()).collect::<Vec<_>>();
    // What the engines moved in a call, at the speed of their links: the last one is done then.
    let ms = |rank: usize, bytes: f64| bytes / f64::from(CALLS) / (if rank == VICTIM { SPEED / 4 } else { SPEED }) as f64 * 1e3;
    let last = |word: usize| said.iter().enumerate().map(|(rank, said)| ms(rank, words(said)[word])).fold(0.0, f64::max);
    assert!(last(0) > 1.4 * bound && last(1) <= 1.15 * bound, "{:.1} and {:.1} ms, bound {bound:.1} ms", last(0), last(1));
    let took = said.iter().map(|said| words(said)[3]).fold(0.0, f64::max);
    format!(
        "{}; engines need {:.1} ms, then {:.1} ms, the slow link alone {bound:.1} ms; measured {:.2} of that",
        said.join("; "),
        last(0),
        last(1),
        took / bound
    )
}

/// A rank is killed, and its endpoint with its session gone: the others are told of the process.
fn killed(mover: &str) -> String {
    let (mut four, _) = start("bereaved", mover);
    four[VICTIM].child.kill().unwrap();
    let mut said = Vec::new();
    for (rank, role) in four.iter_mut().enumerate().filter(|(rank, _)| *rank != VICTIM) {
        said.push(format!("rank {rank} {}", role.hear().unwrap_or_else(|| panic!("rank {rank} failed"))));
    }
    said.join("; ")
}

fn scribbled(mover: &str) -> String {
    let (mut four, _) = start("scribble", mover);
    let mut victim = four.remove(VICTIM);
    let wrote = victim.hear().expect("the rank that was left out failed");
    for (rank, role) in four.iter_mut().enumerate() {
        assert_eq!(role.hear().as_deref(), Some("right"), "survivor {rank}");
    }
    wrote
}

fn recovers(mover: &str, fault: impl Fn(&str)) -> String {
    let (mut four, addresses) = start("work", mover);
    let begun = Instant::now();
    fault(&addresses[VICTIM]);
    let said = all_right(&mut four);
    for rank in 0..RANKS {
        let back = format!("rank {rank} back [0, 1, 2, 3]");
        assert!(said.iter().any(|s| s.starts_with(&back) && !s.contains("heard of nothing")), "rank {rank}: {said:?}");
    }
    format!("all right again after {:?}; {}", begun.elapsed(), said.join("; "))
}

fn promises() -> ExitCode {
    let mut ktap = Ktap::plan(10);
    let write = |file: String| fs::write(&file, "1").unwrap_or_else(|error| panic!("{file}: {error}"));
    let device = |address: &str, file: &str| format!("/sys/bus/pci/devices/{address}/{file}");
    ktap.promise("all_ranks_are_back_and_right_after_a_reset", || {
        recovers("processor", |address| write(device(address, "reset")))
    });
    ktap.promise("all_ranks_are_back_and_right_after_a_non_fatal_error", || {
        recovers("processor", |address| inject(address, COMPLETION_TIMEOUT))
    });
    ktap.promise("all_ranks_are_back_and_right_after_a_fatal_error", || {
        recovers("processor", |address| inject(address, MALFORMED_TLP))
    });
    let rescan = |address: &str| {
        write(device(address, "remove"));
        write("/sys/bus/pci/rescan".into());
    };
    ktap.promise("all_ranks_are_back_and_right_after_remove_and_rescan", || recovers("processor", rescan));
    ktap.promise("all_ranks_are_back_and_right_after_remove_and_rescan_when_engines_move_the_data", || {
        recovers("engine", rescan)
    });
    for mover in ["processor", "engine"] {
        let name = format!("survivors_of_a_killed_rank_are_told_of_its_process_and_go_on_when_the_{mover}_moves_the_data");
        ktap.promise(&name, || killed(mover));
    }
    for mover in ["processor", "engine"] {
        let name = format!("what_a_left_out_rank_still_writes_reaches_nobody_when_the_{mover}_moves_the_data");
        ktap.promise(&name, || scribbled(mover));
    }
    ktap.promise("after_a_link_trained_down_each_rank_moves_what_its_link_can_carry_and_the_sums_are_right", rebalanced);
    ktap.end()
}
