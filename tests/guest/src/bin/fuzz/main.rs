// SPDX-License-Identifier: MIT OR Apache-2.0
//! fuzz CALLS SEED: at least so many random calls of the ABI, by threads of several processes that end in the middle, while endpoints are
//! reset, unbound, removed and found again; a quarter succeeds, and every answer is one that `uapi/pcieipc.h` documents, and all of
//! these are seen. The kernel's log is judged by whoever runs the machine.

mod foreign;
mod play;
mod provoke;

use std::{
    os::fd::{FromRawFd, OwnedFd},
    panic,
    process::{Child, Command, ExitCode},
    thread,
    time::{Duration, Instant},
};

use guest::{
    call::number,
    injection, machine,
    mapping::PAGE,
    pci::Function,
    random::Random,
    session::{SOON, Session, signals, softdev},
    tally::{Call, Tally},
    wait,
};
use nix::errno::Errno;
use serde_json::json;

/// What only fault injection can provoke.
const INJECTED: &[(Call, Errno)] = &[
    (Call::ENUMERATE, Errno::ENOMEM),
    (Call::CHANNEL_EXPORT, Errno::ENOMEM),
    (Call::CHANNEL_IMPORT, Errno::ENOMEM),
    (Call::CHANNEL_DMABUF, Errno::ENOMEM),
    (Call::ADMIN, Errno::ENOMEM),
    (Call::OPEN, Errno::ENOMEM),
];

/// Threads of each process.
const THREADS: u64 = 2;

/// A process of its own, which is killed at some time.
fn worker(arguments: &[u64]) -> ExitCode {
    let [fd, seed, user] = arguments else { return ExitCode::FAILURE };
    // SAFETY: the parent left this descriptor open for us, and nobody else here has it.
    let tally = Tally::shared(unsafe { OwnedFd::from_raw_fd(*fd as i32) });
    players(&tally, *seed, *user, |_| {
        loop {
            thread::park();
        }
    });
    ExitCode::SUCCESS
}

/// Plays with threads until `meanwhile` returns.
fn players(tally: &Tally, seed: u64, user: u64, meanwhile: impl FnOnce(&Tally)) {
    let pool = play::Pool::new();
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let pool = &pool;
            scope.spawn(move || play::play(tally, pool, Random::of(seed, user * THREADS + thread)));
        }
        meanwhile(tally);
        pool.end();
    });
}

fn start(tally: &Tally, seed: u64, user: u64) -> Child {
    let arguments = ["worker".into(), tally.fd().to_string(), seed.to_string(), user.to_string()];
    let started = Command::new("/proc/self/exe").args(arguments).spawn();
    started.unwrap_or_else(|error| panic!("a second process: {error}"))
}

/// What an administrator does meanwhile; two of these may meet, so errors are as they come.
fn administer(random: &mut Random) {
    let functions = Function::soft_endpoints();
    if let Some(function) = functions.get(random.below(functions.len().max(1) as u64) as usize) {
        let _ = match random.below(8) {
            0..3 => function.unbind(),
            3..5 => function.reset(),
            5 => function.remove(),
            _ => Ok(()),
        };
        if random.one_in(8) {
            softdev(&json!({"cmd": "repeat", "endpoint": random.below(2), "count": 3, "times": 20}));
            softdev(&json!({"cmd": "slow", "endpoint": random.below(2), "bytes_per_s": random.below(3) * 100_000}));
        }
    }
    let _ = Function::rescan();
    for function in Function::soft_endpoints().iter().filter(|function| !function.bound()) {
        let _ = function.bind();
    }
}

/// So many random calls, beside what was counted before.
fn fuzz(tally: &Tally, calls: u64, seed: u64) {
    let mut random = Random::of(seed, 1 << 32);
    let calls = calls + tally.totals().0;
    players(tally, seed, 0, |tally| {
        let mut users = 1..;
        let mut next = || users.next().unwrap_or_default();
        let mut others = [start(tally, seed, next()), start(tally, seed, next())];
        let mut told = Instant::now();
        while tally.totals().0 < calls {
            administer(&mut random);
            thread::sleep(Duration::from_millis(200 + random.below(1500)));
            if random.one_in(3) {
                let other = &mut others[random.below(2) as usize];
                other.kill().and_then(|()| other.wait()).unwrap_or_else(|error| panic!("kill: {error}"));
                *other = start(tally, seed, next());
            }
            if told.elapsed() > Duration::from_secs(15) {
                let (all, good) = tally.totals();
                println!("# {all} calls, {good} of them successful");
                told = Instant::now();
            }
        }
        for mut other in others {
            other.kill().and_then(|()| other.wait()).unwrap_or_else(|error| panic!("kill: {error}"));
        }
    });
}

/// Everything in its time, each apart from the others; none of the two is what a failure leaves behind.
fn provoke_all(tally: &Tally, injects: bool) {
    foreign::doorbells_that_are_not_allowed(tally);
    foreign::a_module_that_is_full(tally);
    foreign::reload();
    let bell = Session::nth(0).node.get(number::DOORBELL_MAP, guest::call::Record::new());
    let bell: guest::abi::pcieipc_doorbell = bell;
    type Provocation<'a> = (&'static str, Box<dyn Fn() + 'a>);
    let mut all: Vec<Provocation<'_>> = vec![
        ("bad structures", Box::new(|| provoke::bad_structures(tally))),
        ("wrong ids", Box::new(|| provoke::wrong_ids(tally))),
        ("reads", Box::new(|| provoke::reads(tally))),
        ("states", Box::new(|| provoke::states(tally))),
        ("limits", Box::new(|| provoke::limits(tally))),
        ("bad devices", Box::new(|| provoke::bad_devices(tally))),
        ("a poor device", Box::new(|| foreign::a_poor_device(tally, bell.map_offset))),
        ("a device that reaches all memory", Box::new(|| foreign::a_device_that_reaches_all_memory(tally))),
    ];
    if injects {
        all.push(("no memory", Box::new(|| provoke::no_memory(tally))));
    }
    for (name, provoke) in all {
        let begin = Instant::now();
        if panic::catch_unwind(panic::AssertUnwindSafe(provoke)).is_err() {
            println!("# {name}: not as expected");
            machine::repair();
        }
        println!("# {name}: {} ms", begin.elapsed().as_millis());
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let numbers: Vec<u64> = arguments.iter().filter_map(|argument| argument.parse().ok()).collect();
    if arguments.first().is_some_and(|first| first == "worker") {
        return worker(&numbers);
    }
    let (calls, seed) = (numbers.first().copied().unwrap_or(100_000), numbers.get(1).copied().unwrap_or(1));
    println!("KTAP version 1\n1..5\n# seed {seed}");
    let mut code = ExitCode::SUCCESS;
    let mut promise = |number: u32, kept: bool, name: &str| {
        println!("{} {number} {name}", if kept { "ok" } else { "not ok" });
        if !kept {
            code = ExitCode::FAILURE;
        }
    };
    let tally = Tally::new();
    let injects = injection::prepare();
    let pages = machine::module_state("pages");
    let provoked = panic::catch_unwind(panic::AssertUnwindSafe(|| provoke_all(&tally, injects))).is_ok();
    // These are refused on purpose, and a busy machine makes some of them again and again; the quarter is that of random calls.
    let (all_provoked, good_provoked) = tally.totals();
    let played = panic::catch_unwind(panic::AssertUnwindSafe(|| fuzz(&tally, calls, seed))).is_ok();

    let (all, good) = tally.totals();
    tally.lines().iter().for_each(|line| println!("# {line}"));
    println!("# {all} calls, {good} of them successful");
    let (all, good) = (all - all_provoked, good - good_provoked);
    println!("# of these {all} at random, {good} of them successful");
    promise(1, provoked && played && all >= calls, "calls_race_with_each_other_and_an_administrator");
    promise(2, good >= all / 4, "a_quarter_of_random_calls_succeeds");
    let (injected, missing): (Vec<_>, Vec<_>) = tally
        .missing()
        .into_iter()
        .partition(|pair| !injects && INJECTED.iter().any(|(call, error)| (call.name(), *error) == *pair));
    if !injected.is_empty() {
        println!("# only with fault injection, which this kernel has not: {injected:?}");
    }
    println!("# documented and not seen: {missing:?}");
    promise(3, missing.is_empty(), "every_documented_answer_of_every_call_is_seen");
    let undocumented = tally.undocumented();
    println!("# seen and not documented: {undocumented:?}");
    promise(4, undocumented.is_empty(), "no_call_gives_an_answer_that_is_not_documented");

    let works = panic::catch_unwind(|| {
        machine::repair();
        let given_back =
            wait::until(SOON, || machine::module_state("pages") == pages && machine::module_state("channel bytes") == 0);
        assert!(given_back, "{} pages are left, {pages} were there at first", machine::module_state("pages"));
        let session = Session::nth(0);
        let eventfd = session.eventfd(0);
        session.create(PAGE as u64, 0).unwrap_or_else(|error| panic!("{error}"));
        session.ring(0).unwrap_or_else(|error| panic!("{error}"));
        signals(&eventfd, SOON) == 1
    });
    promise(5, works.is_ok_and(|works| works), "everything_works_afterwards_and_no_memory_is_left");
    code
}
