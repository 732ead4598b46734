// SPDX-License-Identifier: MIT OR Apache-2.0
//! What survivors learn and do, whoever dies at whichever step: with real processes, over shared memory.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{Agreement, Group, Mended, Policy, deaths};
use crate::{
    error::{Error, Rank, Result},
    reduce::Op,
};

#[path = "../../tests/support/mod.rs"]
mod support;
use support::{PATIENCE, Process, Scratch, options, process, say, sum, threads, value, variables};

fn reduces_right(group: &mut Group, timeout: Duration) -> Result<()> {
    let members = group.members().to_vec();
    let own = members[group.rank()];
    let input: Vec<f32> = (0..30_000).map(|at| value(own, at)).collect();
    let mut output = vec![0.0; input.len()];
    group.all_reduce_into(&input, &mut output, Op::Sum, timeout)?;
    for (at, got) in output.iter().enumerate() {
        assert_eq!(f64::from(*got), sum(members.iter().copied(), at), "element {at} of rank {own} among {members:?}");
    }
    Ok(())
}

fn told(agreement: &Agreement) -> String {
    format!("ok={} failed={:?}", agreement.ok, agreement.failed)
}

fn start(role: &str, rank: Rank, ranks: usize, scratch: &Scratch, more: &[(&str, String)]) -> Process {
    let mut variables = vec![("RANK", rank.to_string()), ("RANKS", ranks.to_string()), ("DIR", scratch.0.display().to_string())];
    variables.extend(more.iter().cloned());
    process(&format!("group::fault_tests::{role}"), &variables)
}

/// A rank that reduces, agrees, shrinks if somebody failed, and does so again until all agree that it was good.
#[test]
fn voter_process() {
    let Some(variables) = variables("group::fault_tests::voter_process") else { return };
    let number = |name: &str| variables[name].parse::<usize>().unwrap();
    let mut group = Group::meet(options(number("RANK"), number("RANKS"), Path::new(&variables["DIR"]))).unwrap();
    say("met");
    let victim = number("RANK") == number("VICTIM");
    let mut first = true;
    loop {
        if victim && first {
            // What only some heard of is told apart from what all did.
            deaths::arm(number("STEP") as u32);
        }
        let reduced = if first { Ok(()) } else { reduces_right(&mut group, PATIENCE) };
        let agreement = group.agree(reduced.is_ok() && !(victim && first), PATIENCE).unwrap();
        say(told(&agreement));
        if agreement.ok && agreement.failed.is_empty() {
            break;
        }
        first = false;
        group.shrink(PATIENCE).unwrap();
        say(format!("{:?}", group.members()));
    }
    say(if victim && deaths::is_armed() { "unscathed" } else { "right" });
}

#[test]
fn agree_gives_every_survivor_the_same_verdict_and_the_same_failed_set_whoever_dies_at_whichever_step() {
    for victim in [0, 2] {
        let mut steps = 0;
        for step in 1.. {
            let scratch = Scratch::new();
            let more = [("VICTIM", victim.to_string()), ("STEP", step.to_string())];
            let mut all: Vec<Process> = (0..4).map(|rank| start("voter_process", rank, 4, &scratch, &more)).collect();
            for process in &mut all {
                assert_eq!(process.hear().as_deref(), Some("met"));
            }
            let heard: Vec<Vec<String>> = all.iter_mut().map(|p| std::iter::from_fn(|| p.hear()).collect()).collect();
            let survivors: Vec<usize> = (0..4).filter(|r| *r != victim).collect();
            let first = &heard[survivors[0]];
            for &rank in &survivors {
                assert_eq!(&heard[rank], first, "rank {rank}, step {step} of rank {victim}");
                assert_eq!(heard[rank].last().map(String::as_str), Some("right"), "step {step}: {heard:?}");
            }
            // The victim said false: without it the verdict is true, with it false, and nothing else.
            assert!(
                first[0] == format!("ok=true failed=[{victim}]") || first[0] == "ok=false failed=[]",
                "step {step}: {}",
                first[0]
            );
            // What it heard before it died is what all heard.
            let said = &heard[victim];
            let same = said.iter().take(first.len()).eq(first.iter().take(said.len()));
            if said.last().map(String::as_str) == Some("unscathed") {
                steps = step;
                break;
            }
            assert!(same, "step {step}: the victim heard {said:?}, the others {first:?}");
        }
        assert!(steps > 20, "only {steps} steps of rank {victim} were tried");
    }
}

/// A rank that reduces until an error, and then does what the policy says.
#[test]
fn working_process() {
    let Some(variables) = variables("group::fault_tests::working_process") else { return };
    let number = |name: &str| variables[name].parse::<usize>().unwrap();
    let mut options = options(number("RANK"), number("RANKS"), Path::new(&variables["DIR"]));
    options.policy = match variables["POLICY"].as_str() {
        "shrink" => Policy::Shrink { within: PATIENCE },
        "recover, or shrink" => Policy::Recover { within: Duration::from_secs(2), then_shrink: Some(PATIENCE) },
        _ => Policy::Recover { within: PATIENCE, then_shrink: None },
    };
    let returns = variables.contains_key("RETURNS");
    let mut group = if returns { Group::rejoin(options) } else { Group::meet(options) }.unwrap();
    say("met");
    let (mut rounds, mut mended) = (0, returns);
    // So many rounds together after the fault.
    while rounds < 10 {
        match reduces_right(&mut group, PATIENCE) {
            Ok(()) => rounds += usize::from(mended),
            Err(error) => {
                let how = group.mend(error).unwrap();
                (mended, rounds) = (true, 0);
                say(format!("{how:?} {:?}", group.members()));
            }
        }
    }
    say("right");
}

#[test]
fn a_killed_rank_is_replaced_by_a_new_process_and_all_are_right_again() {
    for victim in [0, 3] {
        let scratch = Scratch::new();
        let policy = [("POLICY", "recover".to_owned())];
        let mut all: Vec<Process> = (0..4).map(|rank| start("working_process", rank, 4, &scratch, &policy)).collect();
        all.iter_mut().for_each(|p| assert_eq!(p.hear().as_deref(), Some("met")));
        all[victim].child.kill().unwrap();
        let returns = [("POLICY", "recover".to_owned()), ("RETURNS", String::new())];
        all[victim] = start("working_process", victim, 4, &scratch, &returns);
        for (rank, process) in all.iter_mut().enumerate() {
            let wanted = if rank == victim { "met".into() } else { format!("{:?} [0, 1, 2, 3]", Mended::Recovered) };
            assert_eq!(process.hear(), Some(wanted), "rank {rank}");
            assert_eq!(process.hear().as_deref(), Some("right"), "rank {rank}");
        }
    }
}

#[test]
fn a_policy_that_shrinks_goes_on_with_those_that_are_left_at_once_or_when_the_time_to_recover_is_over() {
    for policy in ["shrink", "recover, or shrink"] {
        let scratch = Scratch::new();
        let more = [("POLICY", policy.to_owned())];
        let mut all: Vec<Process> = (0..3).map(|rank| start("working_process", rank, 3, &scratch, &more)).collect();
        all.iter_mut().for_each(|p| assert_eq!(p.hear().as_deref(), Some("met")));
        all[1].child.kill().unwrap();
        for rank in [0, 2] {
            assert_eq!(all[rank].hear(), Some(format!("{:?} [0, 2]", Mended::Shrunk)), "{policy}: rank {rank}");
            assert_eq!(all[rank].hear().as_deref(), Some("right"), "{policy}: rank {rank}");
        }
    }
}

#[test]
fn a_policy_that_fails_gives_the_error_back_and_a_mistake_of_the_program_is_never_mended() {
    for policy in [Policy::Fail, Policy::Shrink { within: PATIENCE }] {
        threads(
            2,
            |options| options.policy = policy,
            |group| {
                let mut group = group.unwrap();
                assert!(matches!(group.mend(Error::Argument("a mistake".into())), Err(Error::Argument(_))));
                if group.rank() == 1 {
                    group.abort("as a test");
                }
                let error = loop {
                    if let Err(error) = reduces_right(&mut group, PATIENCE) {
                        break error;
                    }
                };
                match (policy, group.mend(error)) {
                    (Policy::Fail, Err(Error::Aborted { by: 1, why, .. })) => assert_eq!(why, "as a test"),
                    (Policy::Shrink { .. }, Ok(Mended::Shrunk)) => reduces_right(&mut group, PATIENCE).unwrap(),
                    other => panic!("{other:?}"),
                }
            },
        );
    }
}

/// A rank of the test below: recovers though nobody is away, and again until all agree that all are there. One dies in that, and another
/// process takes its place.
#[test]
fn recovering_process() {
    let Some(variables) = variables("group::fault_tests::recovering_process") else { return };
    let number = |name: &str| variables[name].parse::<usize>().unwrap();
    let options = options(number("RANK"), number("RANKS"), Path::new(&variables["DIR"]));
    let returns = variables.contains_key("RETURNS");
    let mut group = if returns { Group::rejoin(options) } else { Group::meet(options) }.unwrap();
    say("met");
    let victim = !returns && number("RANK") == number("VICTIM");
    if victim {
        deaths::arm(number("STEP") as u32);
    }
    let (mut recovered, mut unscathed) = (returns, false);
    loop {
        if recovered {
            // Who dies in what follows may leave others that have what they came for, and take nobody back.
            unscathed |= victim && deaths::is_armed();
            deaths::arm(0);
            let reduced = reduces_right(&mut group, PATIENCE);
            let agreement = group.agree(reduced.is_ok(), PATIENCE).unwrap();
            if agreement.ok && agreement.failed.is_empty() {
                break;
            }
        }
        group.recover(PATIENCE).unwrap();
        recovered = true;
    }
    say(if unscathed { "unscathed".into() } else { format!("right {:?}", group.members()) });
}

#[test]
fn all_ranks_are_back_and_right_at_whichever_step_of_recovering_one_dies_and_is_replaced() {
    let mut steps = 0;
    for step in 1.. {
        let scratch = Scratch::new();
        // The lowest rank does more than the others.
        let victim = step % 2 * 2;
        let more = [("VICTIM", victim.to_string()), ("STEP", step.to_string())];
        let mut all: Vec<Process> = (0..3).map(|rank| start("recovering_process", rank, 3, &scratch, &more)).collect();
        all.iter_mut().for_each(|p| assert_eq!(p.hear().as_deref(), Some("met")));
        match all[victim].hear().as_deref() {
            // Its end.
            None => {}
            Some("unscathed") => {
                steps = step;
                break;
            }
            said => panic!("step {step} of rank {victim}: {said:?}"),
        }
        let again = [more.to_vec(), vec![("RETURNS", String::new())]].concat();
        all[victim] = start("recovering_process", victim, 3, &scratch, &again);
        assert_eq!(all[victim].hear().as_deref(), Some("met"), "step {step}: not taken back");
        for (rank, process) in all.iter_mut().enumerate() {
            assert_eq!(process.hear().as_deref(), Some("right [0, 1, 2]"), "step {step} of rank {victim}, rank {rank}");
        }
    }
    assert!(steps > 15, "only {steps} steps were tried");
}

#[test]
fn a_stopped_rank_is_left_out_learns_it_when_it_goes_on_and_is_taken_back() {
    let scratch = Scratch::new();
    let policy = [("POLICY", "shrink".to_owned())];
    let mut all: Vec<Process> = (0..3).map(|rank| start("stopping_process", rank, 3, &scratch, &policy)).collect();
    all.iter_mut().for_each(|p| assert_eq!(p.hear().as_deref(), Some("met")));
    let pid = Pid::from_raw(all[1].child.id() as i32);
    kill(pid, Signal::SIGSTOP).unwrap();
    std::fs::write(scratch.0.join("stopped"), "").unwrap();
    for rank in [0, 2] {
        assert_eq!(all[rank].hear().as_deref(), Some("went on [0, 2]"), "rank {rank}");
    }
    kill(pid, Signal::SIGCONT).unwrap();
    assert_eq!(all[1].hear().as_deref(), Some("left out"));
    for (rank, process) in all.iter_mut().enumerate() {
        assert_eq!(process.hear().as_deref(), Some("right"), "rank {rank}");
    }
}

/// A rank of the test above.
#[test]
fn stopping_process() {
    let Some(variables) = variables("group::fault_tests::stopping_process") else { return };
    let number = |name: &str| variables[name].parse::<usize>().unwrap();
    let mut group = Group::meet(options(number("RANK"), number("RANKS"), Path::new(&variables["DIR"]))).unwrap();
    say("met");
    while !Path::new(&variables["DIR"]).join("stopped").exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    // A stop is not a death: it is only seen as silence.
    match group.shrink(Duration::from_secs(12)) {
        Ok(()) => {
            say(format!("went on {:?}", group.members()));
            while group.agree(true, PATIENCE).unwrap().returned.is_empty() {
                reduces_right(&mut group, PATIENCE).unwrap();
            }
        }
        Err(error) => {
            assert!(group.is_excluded(), "{error}");
            say("left out");
        }
    }
    group.recover(PATIENCE).unwrap();
    assert_eq!(group.members(), [0, 1, 2]);
    reduces_right(&mut group, PATIENCE).unwrap();
    say("right");
}

/// Everything that a left-out rank has mapped for writing and shares with others, by the kernel's list.
fn shared_and_writable() -> Vec<(u64, u64)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapping = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let shared = rest.starts_with("rw-s") && rest.contains("pcieipc");
        shared.then_some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
    };
    maps.lines().filter_map(mapping).collect()
}

#[test]
fn what_a_left_out_rank_still_writes_reaches_nobody() {
    let scratch = Scratch::new();
    let mut all: Vec<Process> = (0..4).map(|rank| start("scribbling_process", rank, 4, &scratch, &[])).collect();
    all.iter_mut().for_each(|p| assert_eq!(p.hear().as_deref(), Some("met")));
    let mut scribbled = all.remove(1);
    assert_eq!(scribbled.hear().as_deref(), Some("scribbles"));
    for process in &mut all {
        assert_eq!(process.hear().as_deref(), Some("right"));
    }
}

/// A rank of the test above: rank 1 does not answer, and writes to all that it shares with the others as long as they work.
#[test]
fn scribbling_process() {
    use std::os::unix::fs::FileExt;
    let Some(variables) = variables("group::fault_tests::scribbling_process") else { return };
    let number = |name: &str| variables[name].parse::<usize>().unwrap();
    let mut group = Group::meet(options(number("RANK"), number("RANKS"), Path::new(&variables["DIR"]))).unwrap();
    // Who has met may go on before the others have.
    assert!(group.agree(true, PATIENCE).unwrap().ok);
    let shrunk = |rank: usize| Path::new(&variables["DIR"]).join(format!("shrunk-{rank}"));
    say("met");
    if number("RANK") != 1 {
        group.shrink(Duration::from_secs(8)).unwrap();
        assert_eq!(group.members(), [0, 2, 3]);
        std::fs::write(shrunk(number("RANK")), "").unwrap();
        for _ in 0..200 {
            reduces_right(&mut group, PATIENCE).unwrap();
        }
        assert!(group.agree(true, PATIENCE).unwrap().failed.is_empty());
        say("right");
        return;
    }
    // Until the last of them has read on the old board what they decided.
    while ![0, 2, 3].into_iter().all(|rank| shrunk(rank).exists()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let mapped = shared_and_writable();
    // The board, and a ring towards each of the others.
    assert!(mapped.len() >= 4, "{mapped:?}");
    let memory = std::fs::File::options().write(true).open("/proc/self/mem").unwrap();
    for round in (0..=255u8).cycle() {
        for (start, end) in &mapped {
            memory.write_all_at(&vec![round; (end - start) as usize], *start).unwrap();
        }
        if round == 0 {
            // Heard once; later nobody listens.
            say("scribbles");
        }
    }
}

#[test]
fn abort_from_another_thread_ends_the_calls_of_all_ranks_and_the_group_can_go_on() {
    let answers = threads(
        3,
        |_| (),
        |group| {
            let mut group = group.unwrap();
            let aborter = group.aborter();
            let begun = Instant::now();
            let error = std::thread::scope(|scope| {
                if group.rank() == 1 {
                    // Rank 1 never calls: its program hangs elsewhere, which another thread of it notices.
                    scope.spawn(move || {
                        std::thread::sleep(Duration::from_millis(100));
                        aborter.abort("the input pipeline hangs");
                    });
                    None
                } else {
                    group.all_reduce(&mut vec![1.0f32; 1000], Op::Sum, PATIENCE).err()
                }
            });
            assert!(begun.elapsed() < PATIENCE / 2);
            group.shrink(PATIENCE).unwrap();
            reduces_right(&mut group, PATIENCE).unwrap();
            error
        },
    );
    for rank in [0, 2] {
        let error = answers[rank].as_ref().unwrap();
        assert!(matches!(error, Error::Aborted { by: 1, why, .. } if why == "the input pipeline hangs"), "{error}");
    }
}

#[test]
fn one_that_shrinks_and_one_that_recovers_are_both_told() {
    let answers = threads(
        2,
        |_| (),
        |group| {
            let mut group = group.unwrap();
            if group.rank() == 0 { group.shrink(PATIENCE) } else { group.recover(PATIENCE) }.unwrap_err()
        },
    );
    for (rank, error) in answers.iter().enumerate() {
        assert!(matches!(error, Error::Mismatch { rank: r, what: "what to do after a failure", .. } if *r == rank), "{error}");
    }
}

#[test]
fn a_verdict_is_true_only_if_all_say_so_and_any_number_of_them_can_follow() {
    threads(
        4,
        |_| (),
        |group| {
            let mut group = group.unwrap();
            for round in 0..100 {
                let agreement = group.agree(group.rank() != round % 8, PATIENCE).unwrap();
                assert_eq!((agreement.ok, agreement.failed), (round % 8 > 3, vec![]), "round {round}");
            }
            reduces_right(&mut group, PATIENCE).unwrap();
        },
    );
}
