// SPDX-License-Identifier: MIT OR Apache-2.0
//! A peer that writes anything into everything that it may write: its pages and its data area of a ring, and the board of its group, while it
//! also does what is right.
//!
//! Of the rings one thread plays both ranks, so a seed gives the same run again: the honest rank goes on a little, then the hostile one does, then something
//! of the hostile one's memory is overwritten. The honest rank must end with a result or a typed error, and touch no memory but its own; in
//! checked mode, where no word that was changed since its writer wrote it is combined, a result must also be the right one.
//! `PCIEIPC_FUZZ_SECONDS=1800` runs for half an hour (and the board's test besides for a tenth of it), from the seed in `PCIEIPC_FUZZ_SEED` on.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    ptr::NonNull,
    sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use pcieipc::{
    Error,
    executor::{Executor, Lent, Options, Request},
    group::{self, Group},
    plan::Algorithm,
    reduce::{Element, Op},
    registered,
    ring::{Memory, Reader, Writer},
    sys::Bell,
    transport::{
        Peer, RankLinks,
        shm::{Inward, Outward, Own, Shm},
    },
};

/// Enough for any healthy call; a call that is still not over then is late, and says so.
const ROUNDS: usize = 400;
/// More than any healthy step takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// What the hostile rank can write, as it has it mapped.
struct Reach {
    tail: NonNull<u8>,
    head: NonNull<u8>,
    data: NonNull<u8>,
    bytes: usize,
}

impl Reach {
    fn word(&self, page: NonNull<u8>, at: usize) -> &AtomicU64 {
        // SAFETY: a page has 4096 bytes, `at` is a multiple of 8 below that, and it stays mapped while the test holds its links.
        unsafe { page.add(at).cast().as_ref() }
    }

    /// Overwrites one thing.
    fn spoil(&self, random: &mut Random, number: u64) {
        let pages = [self.tail, self.head];
        let page = random.pick(&pages);
        match random.below(12) {
            // An index or what was given back, most of them near the truth.
            0..=2 => {
                let index = self.word(page, random.pick(&[0, 0, 8]));
                let now = index.load(Ordering::Relaxed);
                let by = random.pick(&[64, 128, 4096, 1, 63, 1 << 14, 1 << 32, u64::MAX, 0u64.wrapping_sub(64)]);
                let to = if random.below(5) == 0 { random.next() } else { now.wrapping_add(by) };
                index.store(to, Ordering::Release);
            }
            3 => {
                // SAFETY: the armed word is at 64, aligned.
                let armed: &AtomicU32 = unsafe { page.add(64).cast().as_ref() };
                armed.store(random.next() as u32, Ordering::Relaxed);
            }
            4 => {
                let word = random.pick(&[0, 1, 2, 3, 2 | 7 << 32, 1 | 9 << 32, u64::MAX]);
                self.word(page, 128).store(word, Ordering::Release);
            }
            5 => {
                for at in 192..384 {
                    // SAFETY: the reason is bytes 192 to 383 of the page.
                    let byte: &AtomicU8 = unsafe { page.add(at).cast().as_ref() };
                    byte.store(random.next() as u8, Ordering::Relaxed);
                }
            }
            // A header line, near the truth or not.
            6..=8 => {
                let line = random.below(self.bytes as u64 / 64) as usize * 64;
                let at = random.below(8) as usize * 8;
                // SAFETY: inside the data area, aligned.
                let word: &AtomicU64 = unsafe { self.data.add(line + at).cast().as_ref() };
                let value = match random.below(5) {
                    0 => 0x5049_5043 | random.below(1 << 14) << 32,
                    1 => random.pick(&[0x5049_5053, 0x5049_5054]) | random.below(1 << 14) << 32,
                    2 => self.word(self.tail, 0).load(Ordering::Relaxed) | random.below(4),
                    3 => word.load(Ordering::Relaxed) ^ 1 << random.below(64),
                    _ => random.next(),
                };
                word.store(value, Ordering::Relaxed);
            }
            // A word of a slot's header, or a whole forged one, near the truth or not.
            9..=10 => {
                let slot = random.pick(&[384, 384 + 1856]);
                let position = self.word(self.tail, slot + 24).load(Ordering::Relaxed);
                let len = random.pick(&[0, 8, 24, 25, 100, 400, 1792, 1793, 1 << 20, u32::MAX as u64]);
                let kind = random.pick(&[0x5049_504c, 0x5049_504d, 0x5049_5043]);
                let near = position.wrapping_add(random.pick(&[0, 1, 2, 4, u64::MAX]));
                let given_back = random.pick(&[0, 1, 2, 3, number, u64::MAX, 1 << 63]);
                let words = [kind | len << 32, random.below(4) << 32 | number, random.next(), given_back, near];
                let (one, places) = (random.below(8) as usize, [0, 8, 16, 32, 24]);
                for (at, value) in places.into_iter().zip(words) {
                    if one > 4 || places[one] == at {
                        self.word(self.tail, slot + at).store(value, Ordering::Release);
                    }
                }
            }
            // A whole forged record where the next one is due.
            _ => {
                let tail = self.word(self.tail, 0);
                let now = tail.load(Ordering::Relaxed);
                let place = now as usize & (self.bytes - 1) & !63;
                let len = random.pick(&[0, 8, 64, 100, 4096, 8000, 1 << 20, u32::MAX as u64]);
                let kind = random.pick(&[0x5049_5043, 0x5049_5054]);
                let words = [kind | len << 32, random.below(4) << 32 | number, random.next(), now | random.below(4)];
                for (i, value) in words.into_iter().enumerate() {
                    // SAFETY: inside the data area, aligned.
                    let word: &AtomicU64 = unsafe { self.data.add(place + i * 8).cast().as_ref() };
                    word.store(value, Ordering::Relaxed);
                }
                tail.store(now.wrapping_add(64 + len.next_multiple_of(64)), Ordering::Release);
            }
        }
    }
}

/// The links of two ranks, and what the second can write.
fn pair(data_bytes: usize) -> (RankLinks<Shm>, RankLinks<Shm>, Reach) {
    let (a, b) = (Own::new(data_bytes).unwrap(), Own::new(data_bytes).unwrap());
    let (to_b, to_a) = (a.file().try_clone_to_owned().unwrap(), b.file().try_clone_to_owned().unwrap());
    let (here, there) = (a.join(0, 1, to_a).unwrap(), b.join(1, 0, to_b).unwrap());
    let (out, inward) = (&there.0, &there.1);
    let reach = Reach {
        tail: NonNull::from(out.tail()).cast(),
        head: NonNull::from(inward.head()).cast(),
        data: out.data(),
        bytes: data_bytes,
    };
    let bells = [Bell::new().unwrap(), Bell::new().unwrap()];
    let links = |rank: usize, (out, inward): (Outward, Inward)| {
        let peer = Peer { writer: Writer::new(out), reader: Reader::new(inward), life: None };
        let mut peers = [None, None];
        peers[1 - rank] = Some(peer);
        let mut theirs = [None, None];
        theirs[1 - rank] = Some(bells[1 - rank].try_clone().unwrap());
        RankLinks::new(rank, peers.into(), Shm::new(theirs.into()), bells[rank].try_clone().unwrap(), data_bytes)
    };
    (links(0, here), links(1, there), reach)
}

fn typed(error: &Error) -> bool {
    match error {
        Error::Corrupt { rank: 0, peer: 1, what, .. } => !what.is_empty(),
        Error::Mismatch { rank: 0, peer: 1, .. } | Error::PeerDied { rank: 0, peer: 1, .. } => true,
        Error::Aborted { by: 1, why, .. } => !why.chars().any(char::is_control),
        Error::Timeout { rank: 0, .. } => true,
        // A call after the one that failed.
        Error::Argument(why) => why.contains("an earlier collective"),
        _ => false,
    }
}

/// How calls ended.
#[derive(Debug, Default)]
struct Tally {
    good: usize,
    /// Of those, in checked mode: what they gave was compared with what it must be.
    right: usize,
    corrupt: usize,
    mismatch: usize,
    other: usize,
}

/// What the calls are of: each type holds the numbers below exactly.
trait Number: Element + PartialEq + std::fmt::Debug {
    const UNTOUCHED: Self;
    fn of(value: u64) -> Self;
}
impl Number for u32 {
    const UNTOUCHED: Self = 0xa5a5_a5a5;
    fn of(value: u64) -> Self {
        value as u32
    }
}
impl Number for f32 {
    const UNTOUCHED: Self = f32::from_bits(0xa5a5_a5a5);
    fn of(value: u64) -> Self {
        value as f32
    }
}
impl Number for i64 {
    const UNTOUCHED: Self = 0x5a5a_5a5a_5a5a_5a5a;
    fn of(value: u64) -> Self {
        value as i64
    }
}

/// What the honest rank puts in at a place, and what the hostile one does. Neighbours differ, and so do calls.
fn mine(i: usize) -> u64 {
    3 + i as u64 * 7 % 1000
}
fn theirs(call: u64, i: usize) -> u64 {
    1 + call * 1000 + i as u64 * 13 % 1000
}

/// Two ranks, some calls, with `spoils` of 100 steps followed by something hostile.
fn run(seed: u64, tally: &mut Tally) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    match random.below(4) {
        0 => run_of::<f32>(seed, random, tally),
        1 => run_of::<i64>(seed, random, tally),
        _ => run_of::<u32>(seed, random, tally),
    }
}

fn run_of<T: Number>(seed: u64, mut random: Random, tally: &mut Tally) {
    let (here, there, reach) = pair(random.pick(&[16 << 10, 32 << 10]));
    let checked = random.below(3) == 0;
    let options = Options {
        algorithm: random.pick(&[None, Some(Algorithm::TwoShot), Some(Algorithm::Ring), Some(Algorithm::Star)]),
        chunk: random.pick(&[64, 256, 1024, 4096]),
        direct_chunk: random.pick(&[64, 4096]),
        one_shot_up_to: random.pick(&[0, 256, 4096]),
        checked,
        ..Options::default()
    };
    let (mut honest, mut hostile) = (Executor::new(here, options.clone()).unwrap(), Executor::new(there, options).unwrap());
    let spoils = random.pick(&[1, 5, 30]);
    let far = Instant::now() + Duration::from_secs(3600);
    // The rooms live until the executor that was lent them is gone.
    let mut calls: Vec<Call<T>> = Vec::new();
    for number in 0..4u64 {
        let (count, op) = (random.pick(&[0usize, 1, 10, 63, 64, 100, 1000, 3000]), random.pick(&[Op::Sum, Op::Sum, Op::Max]));
        let (mut input, mut output) = (Room::new(count, mine), Room::new(count, |_| 7));
        if let Ok(call) = honest.start_all_reduce_into((input.lend(), output.lend()), op, far) {
            calls.push(Call { call, input, output, number, op });
        }
        let _ = hostile.start_all_reduce((0..count).map(|i| T::of(theirs(number, i))).collect::<Vec<_>>(), op, far).map(drop);
    }
    // Where the hostile rank may write what the honest one reads, its own registered buffer.
    let count = random.pick(&[1usize, 100, 3000]);
    let mut buffers = registered::in_one_process::<T>(2, count).unwrap();
    let (mut other, mut own) = (buffers.pop().unwrap(), buffers.pop().unwrap());
    (0..count).for_each(|i| (own[i], other[i]) = (T::of(mine(i)), T::of(theirs(4, i))));
    let place = other.as_mut_ptr().cast::<u8>();
    let direct = honest.start_all_reduce_registered(own, Op::Sum, far);
    let theirs_direct = hostile.start_all_reduce_registered(other, Op::Sum, far);
    let message = honest.start_receive(vec![1u8; 200], 1, far);
    let _ = hostile.start_send(vec![2u8; 200], 0, far).map(drop);
    for number in 0..ROUNDS as u64 {
        if random.below(100) < spoils {
            reach.spoil(&mut random, number);
            // Through rings it is what the rank puts in, and any sum of it is right.
            if !checked {
                let at = random.below((count * size_of::<T>()) as u64) as usize;
                // SAFETY: inside the buffer, which the request holds or has handed back to what is dropped last.
                unsafe { place.add(at).write_volatile(random.next() as u8) };
            }
        }
        let _ = hostile.progress();
        match honest.progress() {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    // What is not over by now waits for what will not come.
    drop(honest);
    let right = |i: usize, of: T, call: u64, op: Op| {
        of == T::of(if op == Op::Sum { mine(i) + theirs(call, i) } else { mine(i).max(theirs(call, i)) })
    };
    for Call { call, input, output, number, op } in calls {
        assert!(call.is_done());
        assert!(input.is_whole() && output.is_whole(), "seed {seed}: something was written beside a buffer");
        assert!(input.elements().iter().enumerate().all(|(i, x)| *x == T::of(mine(i))), "seed {seed}: an input was overwritten");
        if tally.count(seed, checked, answer(call)).is_some() {
            let mut all = output.elements().iter().enumerate();
            assert!(all.all(|(i, x)| right(i, *x, number, op)), "seed {seed}: call {number} gave a wrong {op} for a good one");
        }
    }
    if let Some(buffer) = direct.ok().and_then(|call| tally.count(seed, checked, answer(call))) {
        let mut all = buffer.iter().enumerate();
        assert!(all.all(|(i, x)| right(i, *x, 4, Op::Sum)), "seed {seed}: registered buffers gave a wrong sum for a good one");
    }
    if let Some(message) = message.ok().and_then(|call| tally.count(seed, checked, answer(call))) {
        assert_eq!(message, [2; 200], "seed {seed}: a wrong message for a good one");
    }
    drop((hostile, theirs_direct));
}

impl Tally {
    /// Counts an answer, whose error must be a typed one; gives what must be right.
    fn count<B>(&mut self, seed: u64, checked: bool, answer: Result<B, Error>) -> Option<B> {
        match answer {
            Ok(buffers) => {
                self.good += 1;
                self.right += usize::from(checked);
                return checked.then_some(buffers);
            }
            Err(Error::Corrupt { .. }) => self.corrupt += 1,
            Err(Error::Mismatch { .. }) => self.mismatch += 1,
            Err(_) => self.other += 1,
        }
        if let Err(error) = &answer {
            let ended = matches!(error, Error::Aborted { by: 0, why, .. } if why.contains("before this call was over"));
            assert!(ended || typed(error), "seed {seed}: {error:?}");
        }
        None
    }
}

/// One that the honest rank has begun.
struct Call<T: Number> {
    call: Request<Buffers<T>>,
    input: Room<T>,
    output: Room<T>,
    number: u64,
    op: Op,
}

/// Input and output.
type Buffers<T> = (Lent<T>, Lent<T>);

/// A buffer with a room on either side, which shows what is written beside it.
struct Room<T>(Vec<T>);

impl<T: Number> Room<T> {
    const BESIDE: usize = 1024;

    fn new(count: usize, fill: impl Fn(usize) -> u64) -> Self {
        let beside = || std::iter::repeat_n(T::UNTOUCHED, Self::BESIDE);
        Self(beside().chain((0..count).map(|i| T::of(fill(i)))).chain(beside()).collect())
    }

    fn lend(&mut self) -> Lent<T> {
        let count = self.elements().len();
        let start = NonNull::from(&mut self.0[Self::BESIDE..]).cast();
        // SAFETY: the vector is not resized, and lives and is let alone until the executor is dropped, which ends all calls.
        unsafe { Lent::new(start, count) }
    }

    fn elements(&self) -> &[T] {
        &self.0[Self::BESIDE..self.0.len() - Self::BESIDE]
    }

    fn is_whole(&self) -> bool {
        let (before, rest) = self.0.split_at(Self::BESIDE);
        before.iter().chain(&rest[rest.len() - Self::BESIDE..]).all(|x| *x == T::UNTOUCHED)
    }
}

/// How a request ended; one that is over needs no executor.
fn answer<B: Send + 'static>(call: Request<B>) -> Result<B, Error> {
    let mut anybody = Executor::new(pcieipc::loopback::group(1, 1, 64).remove(0), Options::default()).unwrap();
    anybody.wait(call).map_err(|failed| failed.error)
}

#[test]
fn whatever_a_peer_writes_into_its_memory_the_answer_is_a_result_or_a_typed_error() {
    let variable = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let first = variable("PCIEIPC_FUZZ_SEED").unwrap_or(1);
    let (mut tally, begun) = (Tally::default(), Instant::now());
    let mut seed = first;
    match variable("PCIEIPC_FUZZ_SECONDS") {
        Some(seconds) => {
            while begun.elapsed() < Duration::from_secs(seconds) {
                run(seed, &mut tally);
                seed += 1;
            }
        }
        None => {
            for _ in 0..3000 {
                run(seed, &mut tally);
                seed += 1;
            }
        }
    }
    println!("seeds {first} to {}: {tally:?} in {:?}", seed - 1, begun.elapsed());
    // The runs reach what they are for.
    assert!(tally.good > tally.right && tally.right > 0 && tally.corrupt > 0 && tally.mismatch > 0, "{tally:?}");
}

#[test]
fn a_waiting_rank_ends_within_its_bound_while_its_peer_scribbles_from_another_thread() {
    for seed in 1..=20u64 {
        let (here, there, reach) = pair(16 << 10);
        let mut honest = Executor::new(here, Options { chunk: 512, ..Options::default() }).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        // The addresses, for a thread that may use them: they are those of atomics.
        let places = [reach.tail, reach.head, reach.data].map(|p| p.as_ptr() as usize);
        std::thread::scope(|scope| {
            let stop = &stop;
            scope.spawn(move || {
                let _ = &there;
                let at = |place: usize| NonNull::new(place as *mut u8).unwrap();
                let reach = Reach { tail: at(places[0]), head: at(places[1]), data: at(places[2]), bytes: 16 << 10 };
                let mut random = Random(seed);
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    reach.spoil(&mut random, number);
                    number += 1;
                    if number % 64 == 0 {
                        std::thread::yield_now();
                    }
                }
            });
            let begun = Instant::now();
            let answer = honest.all_reduce(&mut vec![1.0f32; 5000], Op::Sum, begun + Duration::from_millis(500));
            stop.store(true, Ordering::Relaxed);
            assert!(begun.elapsed() < Duration::from_secs(20), "seed {seed} took {:?}", begun.elapsed());
            if let Err(error) = answer {
                assert!(typed(&error), "seed {seed}: {error:?}");
            }
        });
    }
}

/// The boards that this process has open.
fn boards() -> Vec<File> {
    let is_board =
        |path: &std::path::Path| std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("memfd:pcieipc-board"));
    let all = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    all.filter(|path| is_board(path)).filter_map(|path| File::options().write(true).open(path).ok()).collect()
}

/// Overwrites one word of the board: most often a vote, its masks or the decision.
fn spoil_board(random: &mut Random) -> (u64, u64) {
    let place = 64 + 256 * random.below(4);
    let at = match random.below(12) {
        0..=2 => 0,
        3..=5 => place,
        6..=7 => place + 8,
        8 => place + 16 + 8 * random.below(24),
        9 => 64 + 256 * 16 + 8 * random.below(8),
        10 if random.below(4) == 0 => 8,
        _ => 8 * random.below(1024),
    };
    let word = match random.below(4) {
        // An instance near the truth, a question, some flags, or masks of few ranks.
        0 => random.below(8) | random.below(8) << 16 | random.below(4) << 32,
        1 => random.below(16) | random.below(16) << 32 | random.below(16) << 48,
        2 => 1 | random.below(20) << 32,
        _ => random.next(),
    };
    (at, word)
}

/// What an honest rank does: any answer is good that comes in time and is no failure of the system's.
fn go_on(group: &mut Group, seed: u64, answers: &[AtomicUsize; 2]) {
    let short = Duration::from_millis(40);
    for turn in 0..6 {
        let mut buffer = vec![1u32; 500];
        for which in 0..4 {
            let begun = Instant::now();
            let answer = match which {
                0 | 2 => group.all_reduce(&mut buffer, Op::Max, short),
                1 => group.agree(turn % 2 == 0, short).map(drop),
                _ if answers[1].load(Ordering::Relaxed) > 0 => group.shrink(short),
                _ => continue,
            };
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "seed {seed}, turn {turn}, call {which} took {:?}",
                begun.elapsed()
            );
            answers[usize::from(answer.is_err())].fetch_add(1, Ordering::Relaxed);
            if let Err(error) = answer {
                assert!(!matches!(error, Error::System { .. }), "seed {seed}: {error:?}");
                assert!(!error.to_string().chars().any(char::is_control), "seed {seed}: {error:?}");
            }
        }
    }
}

/// Counts those that have ended, also in a panic.
struct Ends<'a>(&'a AtomicUsize);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

#[test]
fn whatever_a_rank_writes_on_the_board_of_its_group_the_others_answer_within_their_bound() {
    let variable = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let (first, seconds) = (variable("PCIEIPC_FUZZ_SEED").unwrap_or(1), variable("PCIEIPC_FUZZ_SECONDS").map(|s| s / 10));
    // Of good answers and of errors.
    let (answers, begun) = ([AtomicUsize::new(0), AtomicUsize::new(0)], Instant::now());
    let mut seed = first;
    while seconds.map_or(seed < first + 12, |s| begun.elapsed() < Duration::from_secs(s)) {
        let (ready, done, begun) = (AtomicBool::new(false), AtomicUsize::new(0), Instant::now());
        group::of_threads(3, |mut group| {
            if group.rank() < 2 {
                let _ends = Ends(&done);
                while !ready.load(Ordering::Acquire) && begun.elapsed() < PATIENCE {
                    std::thread::yield_now();
                }
                go_on(&mut group, seed, &answers);
                return;
            }
            let boards = boards();
            assert!(!boards.is_empty(), "a rank has its board open");
            ready.store(true, Ordering::Release);
            let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
            while done.load(Ordering::Acquire) < 2 {
                // Between its bad words it takes part, so that there is something to be spoiled.
                let _ = group.all_reduce(&mut vec![2u32; 500], Op::Max, Duration::from_millis(20));
                for _ in 0..random.below(4) {
                    let (at, word) = spoil_board(&mut random);
                    boards.iter().for_each(|board| board.write_all_at(&word.to_le_bytes(), at).unwrap());
                }
                let _ = group.agree(true, Duration::from_millis(20));
            }
        })
        .unwrap();
        seed += 1;
    }
    println!("seeds {first} to {}: {answers:?} good and bad answers in {:?}", seed - 1, begun.elapsed());
    assert!(answers.iter().all(|n| n.load(Ordering::Relaxed) > 0), "{answers:?}");
}
