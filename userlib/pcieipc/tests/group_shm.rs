// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a group over shared memory promises.

#[path = "support/every_collective.rs"]
mod every_collective;
mod support;

use std::{
    os::unix::fs::PermissionsExt,
    time::{Duration, Instant},
};

use half::bf16;
use pcieipc::{
    Error,
    group::{Group, GroupOptions},
    plan::Algorithm,
    reduce::Op,
};
use support::{PATIENCE, Scratch, options, process, say, sum, threads, value, variables};

#[test]
fn collective_process() {
    let Some(variables) = variables("collective_process") else { return };
    let mut options = options(variables["RANK"].parse().unwrap(), 3, variables["DIR"].as_ref());
    // Small rings, so that the larger calls need each other's room.
    options.ring_bytes = 32 << 10;
    let mut group = Group::meet(options).unwrap();
    for count in [0, 1, 7, 1000, 20_011] {
        every_collective::every_collective(&mut group, count, PATIENCE);
    }
    say("right");
}

#[test]
fn three_processes_get_what_every_collective_promises() {
    let scratch = Scratch::new();
    let start =
        |rank: usize| process("collective_process", &[("RANK", rank.to_string()), ("DIR", scratch.0.display().to_string())]);
    let mut all: Vec<_> = (0..3).map(start).collect();
    for (rank, process) in all.iter_mut().enumerate() {
        assert_eq!(process.hear().as_deref(), Some("right"), "rank {rank}");
    }
}

/// Processor time of this thread.
fn thread_time() -> Duration {
    use nix::time::{ClockId, clock_gettime};
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

#[test]
fn a_rank_that_waits_leaves_its_processor_to_others() {
    let used = threads(
        2,
        |_| (),
        |group| {
            let mut group = group.unwrap();
            group.barrier(PATIENCE).unwrap();
            if group.rank() == 1 {
                std::thread::sleep(Duration::from_millis(500));
            }
            let (before, begun) = (thread_time(), Instant::now());
            group.barrier(PATIENCE).unwrap();
            (thread_time() - before, begun.elapsed())
        },
    );
    // Processor time does not grow with the load of the machine.
    let (busy, waited) = used[0];
    assert!(busy < (waited / 4).max(Duration::from_millis(50)), "busy for {busy:?} of {waited:?}");
}

fn reduces_right(group: &mut Group, from: &[usize], count: usize) {
    let own = from[group.rank()];
    let mut buffer: Vec<f32> = (0..count).map(|at| value(own, at)).collect();
    group.all_reduce(&mut buffer, Op::Sum, PATIENCE).unwrap();
    for (at, got) in buffer.iter().enumerate() {
        assert_eq!(f64::from(*got), sum(from.iter().copied(), at), "element {at} of {count}, rank {own}");
    }
}

#[test]
fn four_ranks_hold_the_float64_sum_whatever_the_algorithm_and_the_count() {
    for algorithm in [None, Some(Algorithm::OneShot), Some(Algorithm::TwoShot), Some(Algorithm::Ring)] {
        threads(
            4,
            |o| o.executor.algorithm = algorithm,
            |group| {
                let mut group = group.unwrap();
                for count in [0, 1, 3, 4, 5, 1000, 65_537, 1 << 20] {
                    reduces_right(&mut group, &[0, 1, 2, 3], count);
                }
            },
        );
    }
}

#[test]
fn every_group_size_works_down_to_the_smallest_rings() {
    for ranks in 1..=9 {
        threads(
            ranks,
            |o| o.ring_bytes = 16 << 10,
            |group| {
                let from: Vec<usize> = (0..ranks).collect();
                let mut group = group.unwrap();
                for count in [1, 999, 40_000] {
                    reduces_right(&mut group, &from, count);
                }
            },
        );
    }
}

#[test]
fn bf16_is_summed_in_f32_and_rounded_once() {
    threads(
        4,
        |_| (),
        |group| {
            let mut group = group.unwrap();
            let rank = group.rank();
            let input = |rank: usize, at: usize| bf16::from_f32(value(rank, at) / 3.0);
            let mut buffer: Vec<bf16> = (0..100_000).map(|at| input(rank, at)).collect();
            group.all_reduce(&mut buffer, Op::Sum, PATIENCE).unwrap();
            for (at, got) in buffer.iter().enumerate() {
                let exact: f64 = (0..4).map(|r| input(r, at).to_f64()).sum();
                assert_eq!(*got, bf16::from_f64(exact), "element {at}");
            }
        },
    );
}

#[test]
fn a_rank_that_never_comes_is_named_within_the_time_given() {
    let scratch = Scratch::new();
    let begun = Instant::now();
    let mut options = options(0, 3, &scratch.0);
    options.meeting_timeout = Duration::from_millis(300);
    let error = Group::meet(options).unwrap_err();
    assert!(matches!(&error, Error::Meeting(why) if why.contains("rank 1, 2 did not come")), "{error}");
    assert!((Duration::from_millis(300)..Duration::from_secs(5)).contains(&begun.elapsed()));
}

#[test]
fn ranks_that_want_different_things_are_told_what_differs() {
    let answers =
        threads(2, |o| o.ring_bytes = if o.rank == 0 { 1 << 16 } else { 1 << 17 }, |group| group.map(drop).unwrap_err());
    for (rank, error) in answers.iter().enumerate() {
        let text = error.to_string();
        assert!(matches!(error, Error::Mismatch { rank: r, .. } if *r == rank), "{text}");
        assert!(text.contains("ring_bytes=65536") && text.contains("ring_bytes=131072"), "{text}");
    }
}

#[test]
fn two_processes_with_one_rank_number_are_refused() {
    let answers = threads(
        2,
        |o| {
            o.rank = 0;
            o.meeting_timeout = Duration::from_millis(500);
        },
        |group| group.map(drop).unwrap_err().to_string(),
    );
    assert!(answers.iter().any(|a| a.contains("already meets as rank 0")), "{answers:?}");
}

#[test]
fn a_directory_that_others_can_enter_is_refused() {
    let scratch = Scratch::new();
    std::fs::create_dir(&scratch.0).unwrap();
    std::fs::set_permissions(&scratch.0, std::fs::Permissions::from_mode(0o755)).unwrap();
    let error = Group::meet(options(0, 2, &scratch.0)).unwrap_err();
    assert!(matches!(&error, Error::Meeting(why) if why.contains("open to other users")), "{error}");
    let file = scratch.0.join("file");
    std::fs::write(&file, "").unwrap();
    let error = Group::meet(options(0, 2, &file)).unwrap_err();
    assert!(matches!(&error, Error::Meeting(why) if why.contains("not a directory")), "{error}");
}

#[test]
fn strangers_in_the_directory_do_not_disturb_the_meeting() {
    use nix::sys::socket::*;
    use std::os::fd::AsRawFd;
    let scratch = Scratch::new();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| Group::meet(options(0, 2, &scratch.0)));
        let path = scratch.0.join("rank-0");
        while !path.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        for nonsense in [&b""[..], b"{}", b"\xff\xff\xff", br#"{"kind":"ready","turn":0}"#] {
            let stranger = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::empty(), None).unwrap();
            while connect(stranger.as_raw_fd(), &UnixAddr::new(&path).unwrap()).is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
            if !nonsense.is_empty() {
                send(stranger.as_raw_fd(), nonsense, MsgFlags::MSG_NOSIGNAL).unwrap();
            }
        }
        let second = Group::meet(options(1, 2, &scratch.0));
        assert!(second.is_ok() && first.join().unwrap().is_ok());
    });
}

#[test]
fn ranks_with_different_shapes_get_mismatch_and_nobody_hangs() {
    let begun = Instant::now();
    let answers = threads(
        3,
        |_| (),
        |group| {
            let mut group = group.unwrap();
            let mut buffer = vec![1.0f32; if group.rank() == 2 { 5000 } else { 4000 }];
            group.all_reduce(&mut buffer, Op::Sum, PATIENCE).unwrap_err()
        },
    );
    assert!(answers.iter().any(|e| matches!(e, Error::Mismatch { .. })), "{answers:?}");
    for error in &answers {
        assert!(matches!(error, Error::Mismatch { .. } | Error::Aborted { .. }), "{error}");
    }
    assert!(begun.elapsed() < PATIENCE / 2, "the failure was passed on, not waited for");
}

#[test]
fn an_abort_ends_the_calls_of_all_ranks_with_its_reason() {
    let answers = threads(
        3,
        |_| (),
        |group| {
            let mut group = group.unwrap();
            if group.rank() == 1 {
                std::thread::sleep(Duration::from_millis(100));
                group.abort("the loss is not a number");
                return None;
            }
            group.all_reduce(&mut vec![1.0f32; 100_000], Op::Sum, PATIENCE).err()
        },
    );
    for rank in [0, 2] {
        assert!(
            matches!(&answers[rank], Some(Error::Aborted { by, why, .. }) if why.contains("not a number") && (*by == 1 || why.contains("rank 1"))),
            "{:?}",
            answers[rank]
        );
    }
}

#[test]
fn a_rank_that_does_not_call_is_a_timeout_at_the_deadline() {
    let begun = Instant::now();
    let answers = threads(
        2,
        |_| (),
        |group| {
            let mut group = group.unwrap();
            if group.rank() == 0 {
                let result = group.all_reduce(&mut [1.0f32; 10_000], Op::Sum, Duration::from_millis(200));
                return (result.err(), begun.elapsed());
            }
            std::thread::sleep(Duration::from_secs(2));
            (None, Duration::ZERO)
        },
    );
    let (error, took) = &answers[0];
    assert!(matches!(error, Some(Error::Timeout { rank: 0, peer: 1, .. })), "{error:?}");
    assert!((Duration::from_millis(200)..Duration::from_millis(1900)).contains(took), "{took:?}");
}

#[test]
fn a_rank_that_left_in_order_leaves_no_error_behind_and_then_counts_as_gone() {
    threads(
        2,
        |_| (),
        |group| {
            let mut group = group.unwrap();
            reduces_right(&mut group, &[0, 1], 100_000);
            if group.rank() == 0 {
                return;
            }
            let error = group.all_reduce(&mut [1.0f32; 100], Op::Sum, PATIENCE).unwrap_err();
            assert!(matches!(error, Error::PeerDied { rank: 1, peer: 0, .. }), "{error}");
        },
    );
}

/// One rank of the tests below, as a process.
#[test]
fn rank_process() {
    let Some(variables) = variables("rank_process") else { return };
    let (rank, ranks): (usize, usize) = (variables["RANK"].parse().unwrap(), variables["RANKS"].parse().unwrap());
    let mut group =
        Group::meet(GroupOptions { meeting_timeout: PATIENCE, ..GroupOptions::new(rank, ranks, &variables["DIR"]) }).unwrap();
    let mut from: Vec<usize> = (0..ranks).collect();
    say("met");
    let error = loop {
        let mut buffer: Vec<f32> = (0..300_000).map(|at| value(rank, at)).collect();
        match group.all_reduce(&mut buffer, Op::Sum, PATIENCE) {
            Ok(()) => {
                for (at, got) in buffer.iter().enumerate() {
                    assert_eq!(f64::from(*got), sum(from.iter().copied(), at), "element {at}");
                }
            }
            Err(error) => break error,
        }
    };
    let kind = match &error {
        Error::PeerDied { peer, .. } => format!("died {peer}"),
        other => format!("{other:?}"),
    };
    say(kind);
    let begun = Instant::now();
    group.shrink(PATIENCE).unwrap();
    from = group.members().to_vec();
    say(format!("{from:?} in {} ms", begun.elapsed().as_millis()));
    for count in [1, 1000, 300_000] {
        reduces_right(&mut group, &from, count);
    }
    say("right");
}

fn four_processes(scratch: &Scratch) -> Vec<support::Process> {
    let start = |rank: usize| {
        let dir = scratch.0.display().to_string();
        process("rank_process", &[("RANK", rank.to_string()), ("RANKS", "4".into()), ("DIR", dir)])
    };
    let mut all: Vec<_> = (0..4).map(start).collect();
    for process in &mut all {
        assert_eq!(process.hear().as_deref(), Some("met"));
    }
    all
}

#[test]
fn a_killed_rank_is_named_by_every_survivor_and_the_three_go_on_and_are_right() {
    for victim in [0, 2] {
        let scratch = Scratch::new();
        let mut all = four_processes(&scratch);
        std::thread::sleep(Duration::from_millis(50));
        all[victim].child.kill().unwrap();
        let killed = Instant::now();
        let survivors: Vec<usize> = (0..4).filter(|r| *r != victim).collect();
        for &rank in &survivors {
            assert_eq!(all[rank].hear(), Some(format!("died {victim}")), "rank {rank}");
        }
        assert!(killed.elapsed() < Duration::from_secs(5), "bounded: {:?}", killed.elapsed());
        for &rank in &survivors {
            let said = all[rank].hear().unwrap_or_default();
            assert!(said.starts_with(&format!("{survivors:?}")), "rank {rank} said {said}");
            assert_eq!(all[rank].hear().as_deref(), Some("right"), "rank {rank}");
        }
    }
}

/// A rank whose call fails, and which then ends at once without leaving the group.
#[test]
fn abrupt_process() {
    let Some(variables) = variables("abrupt_process") else { return };
    let rank: usize = variables["RANK"].parse().unwrap();
    let mut group = Group::meet(options(rank, 3, std::path::Path::new(&variables["DIR"]))).unwrap();
    say("met");
    let error = loop {
        if let Err(error) = group.all_reduce(&mut [1.0f32; 1000], Op::Sum, PATIENCE) {
            break error;
        }
    };
    assert!(matches!(error, Error::PeerDied { peer: 2, .. }), "{error}");
    std::process::exit(0);
}

#[test]
fn the_first_to_die_is_named_also_by_a_rank_that_looks_when_others_have_ended_too() {
    let scratch = Scratch::new();
    let start = |rank: usize| process("abrupt_process", &[("RANK", rank.to_string()), ("DIR", scratch.0.display().to_string())]);
    let (mut first, mut second) = (start(1), start(2));
    let mut group = Group::meet(options(0, 3, &scratch.0)).unwrap();
    assert!(first.hear().is_some() && second.hear().is_some());
    second.child.kill().unwrap();
    first.child.wait().unwrap();
    let error = group.all_reduce(&mut [1.0f32; 1000], Op::Sum, PATIENCE).unwrap_err();
    assert!(matches!(error, Error::PeerDied { rank: 0, peer: 2, .. }), "{error}");
}

#[test]
fn two_ranks_killed_at_once_leave_two_that_go_on() {
    let scratch = Scratch::new();
    let mut all = four_processes(&scratch);
    all[1].child.kill().unwrap();
    all[3].child.kill().unwrap();
    for rank in [0, 2] {
        let said = all[rank].hear().unwrap_or_default();
        assert!(said == "died 1" || said == "died 3", "rank {rank} said {said}");
        let said = all[rank].hear().unwrap_or_default();
        assert!(said.starts_with("[0, 2]"), "rank {rank} said {said}");
        assert_eq!(all[rank].hear().as_deref(), Some("right"));
    }
}

#[test]
fn a_rank_that_dies_before_it_meets_is_named() {
    let scratch = Scratch::new();
    let dir = scratch.0.display().to_string();
    // Rank 1 of 3 waits for rank 2, and is killed before that comes.
    let mut early = process("rank_process", &[("RANK", "1".into()), ("RANKS", "3".into()), ("DIR", dir)]);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| Group::meet(options(0, 3, &scratch.0)));
        std::thread::sleep(Duration::from_millis(400));
        early.child.kill().unwrap();
        let error = first.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::PeerDied { rank: 0, peer: 1, .. }), "{error}");
    });
    assert!(begun.elapsed() < Duration::from_secs(10));
}

/// A rank whose child goes on and holds all that the rank had open: its sockets, its rings, the descriptors of its peers.
#[test]
fn forking_process() {
    let Some(variables) = variables("forking_process") else { return };
    let group = Group::meet(options(2, 3, std::path::Path::new(&variables["DIR"]))).unwrap();
    // SAFETY: the child makes system calls only, which is all that a child of a process with threads may do.
    let child = unsafe {
        let child = libc::fork();
        if child == 0 {
            // The test hears this rank's end by these.
            for fd in 0..3 {
                libc::close(fd);
            }
            libc::sleep(60);
            libc::_exit(0);
        }
        child
    };
    assert!(child > 0);
    say(child);
    std::thread::sleep(2 * PATIENCE);
    drop(group);
}

#[test]
fn a_death_is_seen_by_the_end_of_the_process_though_its_child_holds_every_socket_open() {
    let scratch = Scratch::new();
    let dir = || ("DIR", scratch.0.display().to_string());
    let start = |rank: usize| process("rank_process", &[("RANK", rank.to_string()), ("RANKS", "3".into()), dir()]);
    let mut survivors = [start(0), start(1)];
    let mut victim = process("forking_process", &[dir()]);
    survivors.iter_mut().for_each(|p| assert_eq!(p.hear().as_deref(), Some("met")));
    let child: i32 = victim.hear().unwrap().parse().unwrap();
    victim.child.kill().unwrap();
    victim.child.wait().unwrap();
    let killed = Instant::now();
    for survivor in &mut survivors {
        assert_eq!(survivor.hear().as_deref(), Some("died 2"));
    }
    assert!(killed.elapsed() < Duration::from_secs(5), "bounded: {:?}", killed.elapsed());
    for survivor in &mut survivors {
        let said = survivor.hear().unwrap_or_default();
        assert!(said.starts_with("[0, 1]"), "{said}");
        assert_eq!(survivor.hear().as_deref(), Some("right"));
    }
    // It held all of that until now.
    let ended = nix::sys::signal::kill(nix::unistd::Pid::from_raw(child), nix::sys::signal::Signal::SIGKILL);
    assert_eq!(ended, Ok(()));
}

/// A rank that forks a child which calls, drops and ends as a program does; then goes on.
#[test]
fn parenting_process() {
    let Some(variables) = variables("parenting_process") else { return };
    let mut all = options(1, 2, std::path::Path::new(&variables["DIR"]));
    all.helper_thread = variables.contains_key("HELPER");
    let mut group = Group::meet(all).unwrap();
    // With a helper thread, it has the call in flight when the child is made.
    let request = group.start_all_reduce(vec![1.0f32; 1000], Op::Sum, PATIENCE).unwrap();
    // SAFETY: the child calls the library, which takes no lock that another thread of this process can hold, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = |error: Error| matches!(&error, Error::Argument(why) if why.contains("fork"));
        let all = [
            group.barrier(PATIENCE).is_err_and(refused),
            group.agree(true, PATIENCE).is_err_and(refused),
            group.shrink(PATIENCE).is_err_and(refused),
            group.recover(PATIENCE).is_err_and(refused),
        ];
        drop((request, group));
        std::process::exit(i32::from(!all.iter().all(|refused| *refused)));
    }
    let mut status = 0;
    // SAFETY: `status` is ours.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child");
    say("the child ended");
    request.wait(&mut group).unwrap();
    reduces_right(&mut group, &[0, 1], 100_000);
    say("right");
    group.barrier(PATIENCE).unwrap();
}

#[test]
fn a_forked_child_can_not_use_the_group_and_its_end_is_not_that_of_the_rank() {
    for more in [&[][..], &[("HELPER", String::new())][..]] {
        let scratch = Scratch::new();
        let mut parent = process("parenting_process", &[&[("DIR", scratch.0.display().to_string())], more].concat());
        let mut group = Group::meet(options(0, 2, &scratch.0)).unwrap();
        assert_eq!(parent.hear().as_deref(), Some("the child ended"));
        let mut one = vec![1.0f32; 1000];
        group.all_reduce(&mut one, Op::Sum, PATIENCE).unwrap();
        assert_eq!(one[999], 2.0);
        reduces_right(&mut group, &[0, 1], 100_000);
        assert_eq!(parent.hear().as_deref(), Some("right"));
        group.barrier(PATIENCE).unwrap();
    }
}
