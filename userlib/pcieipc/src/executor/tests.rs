// SPDX-License-Identifier: MIT OR Apache-2.0

use std::time::{Duration, Instant};

use half::{bf16, f16};

use super::*;
use crate::{loopback, plan::Tree, reduce::Op};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Runs `body` once a rank, each in a thread of its own.
fn ranks<R: Send>(n: usize, depth: usize, options: &Options, body: impl Fn(Executor<loopback::Loopback>) -> R + Sync) -> Vec<R> {
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = loopback::group(n, depth, 4096)
            .into_iter()
            .map(|links| {
                let executor = Executor::new(links, options.clone()).unwrap();
                scope.spawn(move || body(executor))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn input(rank: usize, i: usize) -> f64 {
    (((rank * 7919 + i * 104_729) % 2003) as f64 - 1001.0) / 64.0
}

const ALGORITHMS: [Algorithm; 6] = [
    Algorithm::OneShot,
    Algorithm::TwoShot,
    Algorithm::Star,
    Algorithm::Ring,
    Algorithm::RecursiveDoubling,
    Algorithm::Hierarchical,
];

#[test]
fn every_group_size_and_count_sums_right_in_place() {
    for algorithm in ALGORITHMS {
        for n in 1..=16usize {
            let tree = Some(Tree::groups(&[n.div_ceil(2), n / 2]).to_string().replace("()", "").parse().unwrap());
            let options = Options { algorithm: Some(algorithm), chunk: 64, tree, ..Options::default() };
            let counts = [0, 1, 2, 3, 15, 16, 17, 31, 64, 100, 257, 1000];
            let results = ranks(n, 8 * n + 10, &options, |mut executor| {
                let rank = executor.rank();
                counts.map(|count| {
                    let mut buffer: Vec<f32> = (0..count).map(|i| input(rank, i) as f32).collect();
                    executor.all_reduce(&mut buffer, Op::Sum, soon()).unwrap();
                    buffer
                })
            });
            for result in results {
                for (count, buffer) in counts.into_iter().zip(result) {
                    // The inputs are multiples of 1/64 below 2^10: sums of 16 are exact in f32, in any order.
                    let want: Vec<f32> = (0..count).map(|i| (0..n).map(|r| input(r, i)).sum::<f64>() as f32).collect();
                    assert_eq!(buffer, want, "{algorithm:?} {n} ranks, {count} elements");
                }
            }
        }
    }
}

#[test]
fn sixteen_bit_floats_are_rounded_once_by_every_algorithm() {
    for algorithm in ALGORITHMS {
        for n in [2, 3, 5, 8] {
            let options = Options { algorithm: Some(algorithm), chunk: 128, ..Options::default() };
            let results = ranks(n, 8 * n + 10, &options, |mut executor| {
                let rank = executor.rank();
                let mut b: Vec<bf16> = (0..777).map(|i| bf16::from_f64(input(rank, i))).collect();
                let mut h: Vec<f16> = (0..333).map(|i| f16::from_f64(input(rank, i))).collect();
                executor.all_reduce(&mut b, Op::Sum, soon()).unwrap();
                executor.all_reduce(&mut h, Op::Average, soon()).unwrap();
                (b, h)
            });
            for (b, h) in results {
                for (i, b) in b.into_iter().enumerate() {
                    let want: f64 = (0..n).map(|r| bf16::from_f64(input(r, i)).to_f64()).sum();
                    assert_eq!(b, bf16::from_f64(want), "{algorithm:?} {n} {i}");
                }
                for (i, h) in h.into_iter().enumerate() {
                    let want: f32 = (0..n).map(|r| f16::from_f64(input(r, i)).to_f32()).sum();
                    assert_eq!(h, f16::from_f32(want / n as f32), "{algorithm:?} {n} {i}");
                }
            }
        }
    }
}

#[test]
fn the_bits_of_the_default_plans_do_not_depend_on_rank_size_or_algorithm() {
    let mut bits: Vec<Vec<u32>> = Vec::new();
    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
        let options = Options { algorithm: Some(algorithm), chunk: 64, ..Options::default() };
        bits.extend(ranks(5, 4, &options, |mut executor| {
            let rank = executor.rank();
            let mut buffer: Vec<f32> = (0..500).map(|i| (input(rank, i) * 1.1).exp2() as f32).collect();
            executor.all_reduce(&mut buffer, Op::Sum, soon()).unwrap();
            buffer.into_iter().map(f32::to_bits).collect()
        }));
    }
    assert!(bits.windows(2).all(|w| w[0] == w[1]));
}

#[test]
fn out_of_place_leaves_the_input_alone() {
    let sums = ranks(3, 4, &Options::default(), |mut executor| {
        let (from, mut to) = (vec![executor.rank() as i64 + 1; 5000], vec![0; 5000]);
        executor.all_reduce_into(&from, &mut to, Op::Prod, soon()).unwrap();
        assert_eq!(from, vec![executor.rank() as i64 + 1; 5000]);
        to
    });
    assert!(sums.iter().flatten().all(|&x| x == 6));
}

#[test]
fn ranks_that_disagree_get_mismatch_and_nobody_waits_beyond_the_deadline() {
    let errors = ranks(2, 4, &Options::default(), |mut executor| {
        let deadline = Instant::now() + Duration::from_millis(300);
        let result = if executor.rank() == 0 {
            executor.all_reduce(&mut [1.0f32; 8], Op::Sum, deadline)
        } else {
            executor.all_reduce(&mut [1i32; 8], Op::Sum, deadline)
        };
        (result.unwrap_err(), executor)
    });
    for (error, _) in &errors {
        assert!(matches!(error, Error::Mismatch { what: "the element type", .. }), "{error}");
    }
    let errors = ranks(2, 4, &Options::default(), |mut executor| {
        let count = 100 + executor.rank();
        (executor.all_reduce(&mut vec![1.0f32; count], Op::Sum, soon()).unwrap_err(), executor)
    });
    assert!(errors.iter().all(|(e, _)| matches!(e, Error::Mismatch { .. })));
}

#[test]
fn a_dead_peer_is_named() {
    let answers = ranks(3, 4, &Options::default(), |mut executor| {
        if executor.rank() == 2 {
            return None;
        }
        Some((executor.all_reduce(&mut [1.0f32; 8], Op::Sum, soon()).unwrap_err(), executor))
    });
    for (error, _) in answers.iter().flatten() {
        assert!(matches!(error, Error::PeerDied { peer: 2, .. }), "{error}");
    }
}

#[test]
fn an_absent_peer_is_a_timeout_and_the_group_says_no_until_it_recovers() {
    let answers = ranks(2, 4, &Options::default(), |mut executor| {
        if executor.rank() == 1 {
            std::thread::sleep(Duration::from_millis(200));
            return (None, executor);
        }
        let error = executor.all_reduce(&mut [1.0f32; 8], Op::Sum, Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert!(matches!(executor.all_reduce(&mut [1.0f32; 8], Op::Sum, soon()), Err(Error::Argument(_))));
        (Some(error), executor)
    });
    assert!(matches!(answers[0].0, Some(Error::Timeout { rank: 0, peer: 1, .. })));
}

#[test]
fn all_other_collectives_move_what_they_promise() {
    for algorithm in [None, Some(Algorithm::Ring), Some(Algorithm::TwoShot), Some(Algorithm::Star), Some(Algorithm::Hierarchical)]
    {
        for n in [1, 2, 3, 4, 7, 16] {
            let options = Options { algorithm, chunk: 64, ..Options::default() };
            ranks(n, 8 * n + 10, &options, |mut ex| {
                let rank = ex.rank();
                for count in [0, 1, 5, 100] {
                    let value = |r: usize, i: usize| (r * 1000 + i) as i32;
                    let total = |i: usize| (0..n).map(|r| value(r, i)).sum::<i32>();
                    let blocks: Vec<i32> = (0..n * count).map(|i| value(rank, i)).collect();
                    let mut one = vec![-1; count];
                    let mut all = vec![-1; n * count];

                    ex.reduce_scatter(&blocks, &mut one, Op::Sum, soon()).unwrap();
                    assert_eq!(one, (0..count).map(|i| total(rank * count + i)).collect::<Vec<_>>());

                    ex.all_gather(&blocks[..count], &mut all, soon()).unwrap();
                    assert_eq!(all, (0..n).flat_map(|r| (0..count).map(move |i| value(r, i))).collect::<Vec<_>>());

                    ex.all_to_all(&blocks, &mut all, soon()).unwrap();
                    assert_eq!(all, (0..n).flat_map(|r| (0..count).map(move |i| value(r, rank * count + i))).collect::<Vec<_>>());

                    let root = count % n;
                    let mut out = vec![-1; if rank == root { count } else { 0 }];
                    ex.reduce(&blocks[..count], &mut out, Op::Sum, root, soon()).unwrap();
                    assert!(out.iter().enumerate().all(|(i, &x)| x == total(i)));

                    let mut buffer = blocks[..count].to_vec();
                    ex.broadcast(&mut buffer, root, soon()).unwrap();
                    assert_eq!(buffer, (0..count).map(|i| value(root, i)).collect::<Vec<_>>());

                    if n > 1 && rank == n - 1 {
                        ex.send(&blocks[..count], 0, soon()).unwrap();
                    } else if n > 1 && rank == 0 {
                        ex.receive(&mut one, n - 1, soon()).unwrap();
                        assert_eq!(one, (0..count).map(|i| value(n - 1, i)).collect::<Vec<_>>());
                    }
                    ex.barrier(soon()).unwrap();
                }
            });
        }
    }
}

#[test]
fn a_barrier_holds_everybody_until_the_last_has_come_whoever_that_is() {
    for algorithm in [None, Some(Algorithm::RecursiveDoubling)] {
        for n in [2, 3, 4, 7] {
            let come = std::sync::atomic::AtomicUsize::new(0);
            let options = Options { algorithm, ..Options::default() };
            ranks(n, 4, &options, |mut ex| {
                for last in 0..n {
                    if ex.rank() == last {
                        // Time for a barrier that holds nobody to let the others go.
                        std::thread::sleep(Duration::from_millis(3));
                    }
                    come.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    ex.barrier(soon()).unwrap();
                    assert!(come.load(std::sync::atomic::Ordering::SeqCst) >= n * (last + 1), "{algorithm:?}, {n} ranks");
                }
            });
        }
    }
}

#[test]
fn a_repeated_short_call_gives_the_bits_of_its_plan() {
    for n in [2, 3, 5, 16] {
        ranks(n, 4, &Options::default(), |mut ex| {
            let rank = ex.rank();
            let all = Kind::ALL.into_iter().flat_map(|kind| Op::ALL.map(|op| (kind, op)));
            for (which, (kind, op)) in all.enumerate().filter(|(which, _)| n == 2 || which % 7 == n % 7) {
                // Over the look that is due after so many calls, and at lengths that no vector has.
                let (calls, count) = if (n, which) == (2, 0) { (150, 13) } else { (3, 13 + which) };
                for call in 0..calls {
                    let mut by_plan: Vec<u8> =
                        (0..count * kind.size()).map(|i| (rank * 151 + call * 31 + i * 73) as u8).collect();
                    // Half of the exponents, so that no float is NaN, whose bits are anybody's.
                    by_plan.chunks_exact_mut(kind.size()).for_each(|element| element[kind.size() - 1] &= 0xbf);
                    let mut short = by_plan.clone();
                    ex.last_short = None;
                    ex.all_reduce_bytes(&mut by_plan, kind, op, soon()).unwrap();
                    assert!(ex.last_short.is_some(), "a call that could be made again without its plan");
                    ex.all_reduce_bytes(&mut short, kind, op, soon()).unwrap();
                    assert_eq!(short, by_plan, "{kind:?} {op:?}, {n} ranks, call {call}");
                }
            }
        });
    }
}

#[test]
fn wrong_lengths_and_ranks_are_refused_before_anything_is_sent() {
    ranks(2, 4, &Options::default(), |mut ex| {
        assert!(ex.all_reduce_into(&[1.0f32], &mut [0.0; 2], Op::Sum, soon()).is_err());
        assert!(ex.all_reduce_bytes(&mut [0; 7], Kind::F16, Op::Sum, soon()).is_err());
        assert!(ex.reduce_scatter(&[1u8; 3], &mut [0; 2], Op::Sum, soon()).is_err());
        assert!(ex.all_gather(&[1u8; 3], &mut [0; 2], soon()).is_err());
        assert!(ex.all_to_all(&[1u8; 3], &mut [0; 3], soon()).is_err());
        assert!(ex.broadcast(&mut [1u8], 2, soon()).is_err());
        let me = ex.rank();
        assert!(ex.send(&[1u8], me, soon()).is_err() && ex.receive(&mut [1u8], 9, soon()).is_err());
        // The group is as good as new.
        let mut buffer = [1u32; 3];
        ex.all_reduce(&mut buffer, Op::Max, soon()).unwrap();
        ex.all_reduce_many(&mut [&mut buffer[..1], &mut [], &mut []], Op::Sum, soon()).unwrap();
        assert_eq!(buffer, [2, 1, 1]);
    });
}

#[test]
fn registered_buffers_sum_right_without_data_on_the_links() {
    for n in [1, 2, 3, 5, 8] {
        for direct_chunk in [64, 4096] {
            let options = Options { algorithm: Some(Algorithm::Direct), direct_chunk, ..Options::default() };
            let counts = [0, 1, 2, 17, 100, 1000, 5003];
            let buffers = counts.map(|count| {
                std::sync::Mutex::new(
                    crate::registered::in_one_process::<f32>(n, count).unwrap().into_iter().map(Some).collect::<Vec<_>>(),
                )
            });
            ranks(n, 4, &options, |mut ex| {
                let rank = ex.rank();
                for (count, buffers) in counts.into_iter().zip(&buffers) {
                    let mut buffer = buffers.lock().unwrap()[rank].take().unwrap();
                    for round in 0..3 {
                        buffer.iter_mut().enumerate().for_each(|(i, x)| *x = input(rank + round, i) as f32);
                        ex.all_reduce_registered(&mut buffer, Op::Sum, soon()).unwrap();
                        let want: Vec<f32> =
                            (0..count).map(|i| (0..n).map(|r| input(r + round, i)).sum::<f64>() as f32).collect();
                        assert_eq!(*buffer, *want, "{n} ranks, {count} elements");
                    }
                }
            });
        }
    }
}

#[test]
fn registered_buffers_are_gathered_scattered_and_broadcast_where_they_lie() {
    for n in [1, 2, 3, 5] {
        for direct_chunk in [64, 4096] {
            let options = Options { direct_chunk, ..Options::default() };
            for block in [0, 1, 100, 3000] {
                let buffers = crate::registered::in_one_process::<i32>(n, n * block).unwrap();
                let buffers = std::sync::Mutex::new(buffers.into_iter().map(Some).collect::<Vec<_>>());
                ranks(n, 4, &options, |mut ex| {
                    let rank = ex.rank();
                    let mut buffer = buffers.lock().unwrap()[rank].take().unwrap();
                    let value = |r: usize, i: usize| (r * 100_000 + i) as i32;
                    for round in 0..3 {
                        buffer.fill(-1);
                        (0..block).for_each(|i| buffer[rank * block + i] = value(rank, i + round));
                        ex.all_gather_registered(&mut buffer, soon()).unwrap();
                        let want = |r: usize| (0..block).map(move |i| value(r, i + round));
                        assert_eq!(*buffer, (0..n).flat_map(want).collect::<Vec<_>>(), "gather, {n} ranks, blocks of {block}");

                        buffer.iter_mut().enumerate().for_each(|(i, x)| *x = value(rank, i + round));
                        let mut sum = vec![-1; block];
                        ex.reduce_scatter_registered(&mut buffer, &mut sum, Op::Sum, soon()).unwrap();
                        let total = |i: usize| (0..n).map(|r| value(r, rank * block + i + round)).sum::<i32>();
                        assert_eq!(sum, (0..block).map(total).collect::<Vec<_>>(), "scatter, {n} ranks, blocks of {block}");
                        assert!(buffer.iter().enumerate().all(|(i, x)| *x == value(rank, i + round)));

                        let root = round % n;
                        ex.broadcast_registered(&mut buffer, root, soon()).unwrap();
                        assert!(buffer.iter().enumerate().all(|(i, x)| *x == value(root, i + round)), "broadcast, {n} ranks");
                    }
                });
            }
        }
    }
}
