// SPDX-License-Identifier: MIT OR Apache-2.0
//! A peer that writes anything into everything that it may write: its pages and its data area, while it also does what is right.
//!
//! One thread plays both ranks, so a seed gives the same run again: the honest rank goes on a little, then the hostile one does, then something
//! of the hostile one's memory is overwritten. The honest rank must end with a result or a typed error, and touch no memory but its own.
//! `PCIEIPC_FUZZ_SECONDS=1800` runs for half an hour, from the seed in `PCIEIPC_FUZZ_SEED` on.

use std::{
    ptr::NonNull,
    sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use pcieipc::{
    Error,
    executor::{Executor, Options, Request},
    plan::Algorithm,
    reduce::Op,
    ring::{Memory, Reader, Writer},
    sys::Bell,
    transport::{
        Peer, RankLinks,
        shm::{Inward, Outward, Own, Shm},
    },
};

/// Enough for any healthy call; a call that is still not over then is late, and says so.
const ROUNDS: usize = 400;

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
        // SAFETY: a page has 384 bytes, `at` is a multiple of 8 below that, and it stays mapped while the test holds its links.
        unsafe { page.add(at).cast().as_ref() }
    }

    /// Overwrites one thing.
    fn spoil(&self, random: &mut Random, number: u64) {
        let pages = [self.tail, self.head];
        let page = random.pick(&pages);
        match random.below(10) {
            // An index, most of them near the truth.
            0..=2 => {
                let index = self.word(page, 0);
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

/// How a run ended.
#[derive(Debug, Default)]
struct Tally {
    good: usize,
    corrupt: usize,
    mismatch: usize,
    other: usize,
}

/// Two ranks, some calls, with `spoils` of 100 steps followed by something hostile.
fn run(seed: u64, tally: &mut Tally) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let (here, there, reach) = pair(random.pick(&[16 << 10, 32 << 10]));
    let options = Options {
        algorithm: random.pick(&[None, Some(Algorithm::TwoShot), Some(Algorithm::Ring), Some(Algorithm::Star)]),
        chunk: random.pick(&[64, 256, 1024, 4096]),
        one_shot_up_to: random.pick(&[0, 256, 4096]),
        ..Options::default()
    };
    let (mut honest, mut hostile) = (Executor::new(here, options.clone()).unwrap(), Executor::new(there, options).unwrap());
    let spoils = random.pick(&[1, 5, 30]);
    let far = Instant::now() + Duration::from_secs(3600);
    // A room of its own on either side of the buffer shows what is written beside it.
    let mut calls: Vec<Request<Buffers>> = Vec::new();
    for number in 0..4u32 {
        let count = random.pick(&[0usize, 1, 10, 63, 64, 100, 1000, 3000]);
        if let Ok(call) = honest.start_all_reduce_into((vec![3; count], vec![7; count]), Op::Sum, far) {
            calls.push(call);
        }
        let _ = hostile.start_all_reduce(vec![number; count], Op::Sum, far).map(drop);
    }
    let message = honest.start_receive(vec![1u8; 200], 1, far);
    let _ = hostile.start_send(vec![2u8; 200], 0, far).map(drop);
    for number in 0..ROUNDS as u64 {
        if random.below(100) < spoils {
            reach.spoil(&mut random, number);
        }
        let _ = hostile.progress();
        match honest.progress() {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    // What is not over by now waits for what will not come.
    drop(honest);
    for call in calls {
        assert!(call.is_done());
        // A request that is over needs no executor.
        match answer(call) {
            Ok((input, _)) => {
                assert!(input.iter().all(|x| *x == 3));
                tally.good += 1;
            }
            Err((error, input)) => {
                assert!(input.iter().all(|x| *x == 3), "seed {seed}: an input was overwritten");
                match &error {
                    Error::Corrupt { .. } => tally.corrupt += 1,
                    Error::Mismatch { .. } => tally.mismatch += 1,
                    _ => tally.other += 1,
                }
                let ended = matches!(&error, Error::Aborted { by: 0, why, .. } if why.contains("before this call was over"));
                assert!(ended || typed(&error), "seed {seed}: {error:?}");
            }
        }
    }
    drop(message);
}

/// Input and output.
type Buffers = (Vec<u32>, Vec<u32>);

/// The buffers, or why and the input.
#[expect(clippy::result_large_err, reason = "the error gives the input back")]
fn answer(call: Request<Buffers>) -> Result<Buffers, (Error, Vec<u32>)> {
    let mut anybody = Executor::new(pcieipc::loopback::group(1, 1, 64).remove(0), Options::default()).unwrap();
    anybody.wait(call).map_err(|failed| (failed.error, failed.buffers.map(|b| b.0).unwrap_or_default()))
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
    assert!(tally.good > 0 && tally.corrupt > 0 && tally.mismatch > 0, "{tally:?}");
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
