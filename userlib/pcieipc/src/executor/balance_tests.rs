// SPDX-License-Identifier: MIT OR Apache-2.0
//! All ranks change to other shards at the same call, however far some are ahead.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use super::*;
use crate::{
    link::{RecordHeader, Shared, SharedMut, Want},
    loopback::{self, Loopback},
    reduce::Op,
};

/// What ranks share: what was told for a look, by turns, and how fast the last rank's link is.
#[derive(Default)]
struct Place {
    told: Mutex<[Shares; 2]>,
    speed: AtomicU32,
}

struct Weighed {
    links: Loopback,
    place: Arc<Place>,
}

// SAFETY: everything is the loopback's.
unsafe impl Links for Weighed {
    fn rank(&self) -> Rank {
        self.links.rank()
    }
    fn ranks(&self) -> usize {
        self.links.ranks()
    }
    fn max_record(&self) -> usize {
        self.links.max_record()
    }
    fn depth(&self, len: usize) -> usize {
        self.links.depth(len)
    }
    fn reserve(&mut self, to: Rank, len: usize, deadline: Instant) -> Result<SharedMut<'_>> {
        self.links.reserve(to, len, deadline)
    }
    fn try_reserve(&mut self, to: Rank, len: usize) -> Result<Option<SharedMut<'_>>> {
        self.links.try_reserve(to, len)
    }
    fn commit(&mut self, to: Rank, header: RecordHeader, len: usize) -> Result<()> {
        self.links.commit(to, header, len)
    }
    fn receive(&mut self, from: Rank, deadline: Instant) -> Result<(RecordHeader, Shared<'_>)> {
        self.links.receive(from, deadline)
    }
    fn try_receive(&mut self, from: Rank) -> Result<Option<(RecordHeader, Shared<'_>)>> {
        self.links.try_receive(from)
    }
    fn release(&mut self, from: Rank) -> Result<()> {
        self.links.release(from)
    }
    fn wait_for(&mut self, wants: &[Want], deadline: Instant) -> Result<()> {
        self.links.wait_for(wants, deadline)
    }
    fn confirm(&mut self) -> Result<()> {
        self.links.confirm()
    }
    fn tell_shares(&mut self, look: u32) {
        assert_eq!(self.rank(), 0);
        let last = f64::from(self.place.speed.load(Ordering::Relaxed));
        let shares = Shares::for_rates(&[8.0, 8.0, 8.0, last]);
        self.place.told.lock().unwrap()[look as usize % 2] = shares;
    }
    fn told_shares(&self, look: u32) -> Option<Shares> {
        Some(self.place.told.lock().unwrap()[look as usize % 2])
    }
}

const CALLS: u32 = 6 * BETWEEN_LOOKS;
const COUNT: usize = 600;

/// Calls of four ranks that keep up to `ahead(rank)` of them in flight, while the last rank's link changes; gives each rank's last shares.
fn run(ahead: impl Fn(Rank) -> usize) -> Vec<Shares> {
    let place = Arc::new(Place::default());
    place.speed.store(8, Ordering::Relaxed);
    let options = Options { algorithm: Some(Algorithm::TwoShot), chunk: 256, ..Options::default() };
    std::thread::scope(|scope| {
        let running: Vec<_> = loopback::group(4, 16, 4096)
            .into_iter()
            .map(|links| {
                let (place, options, ahead) = (place.clone(), options.clone(), ahead(links.rank()));
                scope.spawn(move || {
                    let mut executor = Executor::new(Weighed { links, place: place.clone() }, options).unwrap();
                    let rank = executor.rank();
                    let by = Instant::now() + Duration::from_secs(120);
                    let right = |buffer: Vec<u32>, call: u32| {
                        assert!(buffer.iter().zip(0..).all(|(got, at)| *got == 4 * (call + at) + 6), "rank {rank}, call {call}");
                    };
                    let mut flying = VecDeque::new();
                    for call in 0..CALLS {
                        if rank == 0 {
                            let speed = [8, 2, 2, 4, 8, 1][(call / BETWEEN_LOOKS) as usize];
                            place.speed.store(speed, Ordering::Relaxed);
                        }
                        let buffer: Vec<u32> = (0..COUNT as u32).map(|at| call + at + rank as u32).collect();
                        flying.push_back((call, executor.start_all_reduce(buffer, Op::Sum, by).unwrap()));
                        // Calls that not all of the ranks make at once with an all-reduce.
                        if call % 50 == 0 {
                            executor.broadcast(&mut [1u8], 1, by).unwrap();
                        }
                        while flying.len() > ahead {
                            let (call, request) = flying.pop_front().unwrap();
                            right(executor.wait(request).unwrap(), call);
                        }
                    }
                    for (call, request) in flying {
                        right(executor.wait(request).unwrap(), call);
                    }
                    executor.shares()
                })
            })
            .collect();
        running.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// The last look used what was told at the one before it.
fn last() -> Shares {
    Shares::default()
}

#[test]
fn ranks_change_to_other_shards_at_the_same_call() {
    assert_eq!(run(|_| 0), vec![last(); 4]);
}

#[test]
fn ranks_change_to_other_shards_at_the_same_call_with_many_calls_in_flight() {
    assert_eq!(run(|rank| [0, 200, 70, 9][rank]), vec![last(); 4]);
}

#[test]
fn shares_that_were_told_are_used_from_the_next_look_on() {
    let place = Arc::new(Place::default());
    place.speed.store(2, Ordering::Relaxed);
    let shares: Vec<(bool, bool)> = std::thread::scope(|scope| {
        let running: Vec<_> = loopback::group(4, 16, 4096)
            .into_iter()
            .map(|links| {
                let place = place.clone();
                scope.spawn(move || {
                    let mut executor = Executor::new(Weighed { links, place }, Options::default()).unwrap();
                    let by = Instant::now() + Duration::from_secs(60);
                    for _ in 0..BETWEEN_LOOKS {
                        executor.all_reduce(&mut [1u8], Op::Sum, by).unwrap();
                    }
                    let before = executor.shares().are_equal();
                    executor.all_reduce(&mut [1u8], Op::Sum, by).unwrap();
                    (before, executor.shares().are_equal())
                })
            })
            .collect();
        running.into_iter().map(|r| r.join().unwrap()).collect()
    });
    assert_eq!(shares, vec![(true, false); 4]);
}
