// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checked mode against links that change what they carry.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use super::*;
use crate::{
    error::Error,
    link::{RecordHeader, Shared, SharedMut, Want},
    loopback::{self, Loopback},
    reduce::Op,
};

/// What happens to the one record that is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    None,
    /// One bit of the payload.
    Flip,
    /// The second half of the payload is that of another record.
    Torn,
    /// The header of another shard.
    Misplaced,
    /// The header of another step.
    Step,
    /// An epoch long ago.
    Epoch,
    /// Arguments of another call.
    Call,
    /// As another rank sent it.
    Foreign,
}

/// Links whose `at`th record to rank `to` is damaged after its checksum was made.
struct Damaged {
    links: Loopback,
    damage: Damage,
    to: Rank,
    left: AtomicU32,
}

// SAFETY: everything is the loopback's, except that bytes of a reservation are changed before it is committed.
unsafe impl Links for Damaged {
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
    fn commit(&mut self, to: Rank, mut header: RecordHeader, len: usize) -> Result<()> {
        // The reservation again, at the same place.
        let room = self.links.reserve(to, len, Instant::now() + Duration::from_secs(5))?.as_mut_ptr();
        if to == self.to && len > 1 && self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            // SAFETY: `len` bytes are reserved there, for this rank alone.
            let bytes = unsafe { std::slice::from_raw_parts_mut(room, len) };
            match self.damage {
                Damage::None => {}
                Damage::Flip => bytes[len / 3] ^= 0x10,
                Damage::Torn => bytes[len / 2..].fill(0x5a),
                Damage::Misplaced => header.shard ^= 1,
                Damage::Step => header.step = header.step.wrapping_sub(1),
                Damage::Epoch => header.epoch = header.epoch.wrapping_sub(1),
                Damage::Call => header.call ^= 1,
                // SAFETY: as above; a whole record of the same call and place, but from another rank.
                Damage::Foreign => header.crc = unsafe { checksum::checksum(to, self.rank(), header, room, len) },
            }
        }
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
}

const COUNT: usize = 5000;
const ALGORITHMS: [Algorithm; 6] = [
    Algorithm::OneShot,
    Algorithm::TwoShot,
    Algorithm::Star,
    Algorithm::Ring,
    Algorithm::RecursiveDoubling,
    Algorithm::Hierarchical,
];

fn input(rank: usize, at: usize) -> f32 {
    ((rank * 7919 + at * 31) % 2048) as f32 - 1000.0
}

/// Three calls of four ranks, where rank 1 damages the `at`th record to rank 2; what each rank got, and whether an Ok was right.
fn run(algorithm: Algorithm, checked: bool, damage: Damage, at: u32) -> Vec<(Vec<Error>, usize)> {
    let options = Options { algorithm: Some(algorithm), chunk: 2048, checked, ..Options::default() };
    std::thread::scope(|scope| {
        let running: Vec<_> = loopback::group(4, 16, 4096)
            .into_iter()
            .map(|links| {
                let left = AtomicU32::new(if links.rank() == 1 { at } else { 0 });
                let links = Damaged { links, damage, to: 2, left };
                let options = options.clone();
                scope.spawn(move || {
                    let mut executor = Executor::new(links, options).unwrap();
                    let (rank, mut errors, mut wrong) = (executor.rank(), Vec::new(), 0);
                    for _ in 0..3 {
                        let mut buffer: Vec<f32> = (0..COUNT).map(|i| input(rank, i)).collect();
                        match executor.all_reduce(&mut buffer, Op::Sum, Instant::now() + Duration::from_secs(20)) {
                            Ok(()) => {
                                let right = |i: usize| (0..4).map(|r| input(r, i)).sum::<f32>();
                                wrong += buffer.iter().enumerate().filter(|(i, got)| **got != right(*i)).count();
                            }
                            Err(error) => {
                                errors.push(error);
                                break;
                            }
                        }
                    }
                    (errors, wrong)
                })
            })
            .collect();
        running.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn a_torn_misplaced_repeated_or_foreign_shard_is_corrupt_and_no_rank_that_got_ok_holds_a_wrong_sum() {
    let damages = [Damage::Flip, Damage::Torn, Damage::Misplaced, Damage::Step, Damage::Epoch, Damage::Call, Damage::Foreign];
    for algorithm in ALGORITHMS {
        let mut found = 0;
        for damage in damages {
            for at in [1, 3] {
                let got = run(algorithm, true, damage, at);
                assert!(got.iter().all(|(_, wrong)| *wrong == 0), "{algorithm:?} {damage:?} {at}: a wrong sum");
                // Not every algorithm sends from 1 to 2.
                let Some(error) = got[2].0.first() else { continue };
                let named = matches!(error, Error::Corrupt { rank: 2, peer: 1, what, .. } if what.contains("record") && what.contains("call"));
                assert!(named, "{algorithm:?} {damage:?} {at}: {error}");
                found += 1;
            }
        }
        let direct = !matches!(algorithm, Algorithm::Star | Algorithm::RecursiveDoubling | Algorithm::Hierarchical);
        assert!(!direct || found == 2 * damages.len(), "{algorithm:?}: {found}");
    }
}

#[test]
fn without_checked_mode_a_flipped_bit_is_not_noticed_so_the_test_above_can_fail() {
    let got = run(Algorithm::TwoShot, false, Damage::Flip, 1);
    assert!(got.iter().any(|(errors, wrong)| errors.is_empty() && *wrong > 0));
}

#[test]
fn every_algorithm_sums_right_in_checked_mode() {
    for algorithm in ALGORITHMS {
        for (errors, wrong) in run(algorithm, true, Damage::None, 0) {
            assert!(errors.is_empty() && wrong == 0, "{algorithm:?}: {errors:?} {wrong}");
        }
    }
}
