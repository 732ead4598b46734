// SPDX-License-Identifier: MIT OR Apache-2.0

use std::{
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use super::super::{Buffer, Executor, Options, Request};
use crate::{
    error::Error,
    loopback::{self, Loopback},
    plan::Algorithm,
    reduce::Op,
};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// Runs `body` once a rank, each in a thread of its own, over links of `depth` records of a page.
fn ranks<R: Send>(n: usize, depth: usize, options: &Options, body: impl Fn(Executor<Loopback>) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let run = |links| {
            let (executor, body) = (Executor::new(links, options.clone()).unwrap(), &body);
            scope.spawn(move || body(executor))
        };
        let threads: Vec<_> = loopback::group(n, depth, 4096).into_iter().map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn vector(rank: usize, call: usize, count: usize) -> Vec<i64> {
    (0..count).map(|i| (rank * 1_000_003 + call * 1009 + i) as i64).collect()
}

fn total(n: usize, call: usize, count: usize) -> Vec<i64> {
    (0..count).map(|i| (0..n).map(|r| vector(r, call, i + 1)[i]).sum()).collect()
}

#[test]
fn calls_in_flight_give_the_right_sums_in_whatever_order_they_are_waited_for() {
    let counts = [1usize, 1000, 0, 77, 513, 64, 2000, 3, 40, 41, 42, 900];
    for algorithm in [None, Some(Algorithm::TwoShot), Some(Algorithm::Ring), Some(Algorithm::Star)] {
        for n in [1, 2, 3, 5] {
            let options = Options { algorithm, chunk: 512, one_shot_up_to: 256, ..Options::default() };
            ranks(n, 2 * n + 4, &options, |mut ex| {
                let rank = ex.rank();
                let mut requests: Vec<_> = counts
                    .iter()
                    .enumerate()
                    .map(|(call, &count)| ex.start_all_reduce(vector(rank, call, count), Op::Sum, soon()).unwrap())
                    .enumerate()
                    .collect();
                // Each rank waits in another order.
                requests.rotate_left(rank * 5 % counts.len());
                if rank % 2 == 1 {
                    requests.reverse();
                }
                for (call, request) in requests {
                    assert_eq!(ex.wait(request).unwrap(), total(n, call, counts[call]), "{algorithm:?} {n} ranks, call {call}");
                }
                assert_eq!(ex.in_flight(), 0);
            });
        }
    }
}

#[test]
fn every_collective_can_be_in_flight_beside_every_other() {
    for n in [2, 3, 4] {
        ranks(n, 8 * n, &Options { chunk: 256, ..Options::default() }, |mut ex| {
            let (rank, count) = (ex.rank(), 100);
            let out = |len: usize| vec![0i64; len];
            let blocks = || vector(rank, 0, n * count);
            for _ in 0..3 {
                let scatter = ex.start_reduce_scatter((blocks(), out(count)), Op::Sum, soon()).unwrap();
                let gather = ex.start_all_gather((vector(rank, 1, count), out(n * count)), soon()).unwrap();
                let barrier = ex.start_barrier(soon()).unwrap();
                let exchange = ex.start_all_to_all((blocks(), out(n * count)), soon()).unwrap();
                let message = match rank {
                    0 => Some(ex.start_send(vector(0, 9, count), n - 1, soon()).unwrap()),
                    r if r == n - 1 => Some(ex.start_receive(out(count), 0, soon()).unwrap()),
                    _ => None,
                };
                let reduce = ex.start_reduce((vector(rank, 2, count), out(count)), Op::Max, 1, soon()).unwrap();
                let broadcast = ex.start_broadcast(vector(rank, 3, count), 1, soon()).unwrap();
                let into = ex.start_all_reduce_into((vector(rank, 4, count), out(count)), Op::Sum, soon()).unwrap();

                assert_eq!(ex.wait(into).unwrap().1, total(n, 4, count));
                assert_eq!(ex.wait(broadcast).unwrap(), vector(1, 3, count));
                let (_, most) = ex.wait(reduce).unwrap();
                assert!(rank != 1 || most == vector(n - 1, 2, count));
                if let Some(message) = message {
                    assert_eq!(ex.wait(message).unwrap(), vector(0, 9, count));
                }
                let (_, blocks) = ex.wait(exchange).unwrap();
                assert_eq!(blocks[..count], vector(0, 0, n * count)[rank * count..][..count]);
                ex.wait(barrier).unwrap();
                let (_, all) = ex.wait(gather).unwrap();
                assert_eq!(all[count..2 * count], vector(1, 1, count));
                let (_, own) = ex.wait(scatter).unwrap();
                assert_eq!(own, total(n, 0, n * count)[rank * count..][..count]);
            }
        });
    }
}

#[test]
fn a_later_call_ends_while_an_earlier_one_waits_for_another_rank() {
    let through = AtomicUsize::new(0);
    ranks(3, 4, &Options::default(), |mut ex| {
        let rank = ex.rank();
        if rank == 2 {
            let begun = Instant::now();
            while through.load(Ordering::SeqCst) < 2 {
                assert!(begun.elapsed() < Duration::from_secs(30), "the messages wait for this rank");
                std::thread::yield_now();
            }
            ex.send(&[4u8], 0, soon()).unwrap();
            ex.send(&[4u8], 1, soon()).unwrap();
            return;
        }
        // This waits for rank 2, which waits for the messages to be through.
        let late = ex.start_receive(vec![0u8], 2, soon()).unwrap();
        let other = 1 - rank;
        let sent = ex.start_send(vec![rank as u32; 10], other, soon()).unwrap();
        let got = ex.start_receive(vec![7u32; 10], other, soon()).unwrap();
        ex.wait(sent).unwrap();
        assert_eq!(ex.wait(got).unwrap(), vec![other as u32; 10]);
        assert!(!late.is_done());
        through.fetch_add(1, Ordering::SeqCst);
        assert_eq!(ex.wait(late).unwrap(), [4]);
    });
}

#[test]
fn blocking_calls_queue_behind_calls_in_flight_and_many_buckets_are_reduced_at_once() {
    ranks(4, 8, &Options { chunk: 256, one_shot_up_to: 128, ..Options::default() }, |mut ex| {
        let rank = ex.rank();
        let request = ex.start_all_reduce(vector(rank, 0, 700), Op::Sum, soon()).unwrap();
        let mut buckets: Vec<Vec<i64>> = (1..30).map(|call| vector(rank, call, call * 13 % 300)).collect();
        let mut slices: Vec<&mut [i64]> = buckets.iter_mut().map(Vec::as_mut_slice).collect();
        ex.all_reduce_many(&mut slices, Op::Sum, soon()).unwrap();
        for (call, bucket) in (1..).zip(&buckets) {
            assert_eq!(*bucket, total(4, call, bucket.len()), "bucket {call}");
        }
        assert!(request.is_done(), "it was started before them");
        assert_eq!(ex.wait(request).unwrap(), total(4, 0, 700));
    });
}

/// Counts how often such a buffer was dropped.
struct Counted(Vec<f32>, Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: as for the vector inside.
unsafe impl Buffer for Counted {
    type Element = f32;
    fn elements(&mut self) -> NonNull<[f32]> {
        self.0.elements()
    }
}

#[test]
fn a_call_whose_request_is_dropped_goes_on_and_frees_its_buffer_when_it_is_over() {
    let freed = Arc::new(AtomicUsize::new(0));
    ranks(2, 4, &Options { chunk: 64, ..Options::default() }, |mut ex| {
        let buffer = Counted(vec![1.0; 5000], freed.clone());
        drop(ex.start_all_reduce(buffer, Op::Sum, soon()).unwrap());
        assert!(ex.in_flight() <= 1);
        let mut after = [ex.rank() as i32];
        ex.all_reduce(&mut after, Op::Sum, soon()).unwrap();
        assert_eq!((after, ex.in_flight()), ([1], 0));
    });
    assert_eq!(freed.load(Ordering::SeqCst), 2);
}

#[test]
fn a_call_that_fails_ends_all_in_flight_with_its_error_and_gives_the_buffers_back() {
    let answers = ranks(3, 4, &Options::default(), |mut ex| {
        if ex.rank() == 2 {
            return Vec::new();
        }
        let first = ex.start_all_reduce(vec![1.0f64; 100], Op::Sum, soon()).unwrap();
        let second = ex.start_all_gather((vec![1u8; 5], vec![0u8; 15]), soon());
        let failed = ex.wait(first).unwrap_err();
        assert_eq!(failed.buffers.map(|b| b.len()), Some(100));
        // The second was in flight, or was refused because the first had failed already.
        let second = second.map_or_else(|failed| failed, |request| ex.wait(request).unwrap_err());
        assert_eq!(second.buffers.as_ref().map(|b| b.1.len()), Some(15));
        let refused = ex.start_barrier(soon()).unwrap_err();
        assert!(matches!(refused.error, Error::Argument(_)));
        vec![(failed.error, second.error, ex)]
    });
    for (first, second, _) in answers.iter().flatten() {
        assert!(matches!(first, Error::PeerDied { .. }), "{first}");
        assert!(matches!(second, Error::PeerDied { .. } | Error::Argument(_)), "{second}");
    }
}

#[test]
fn a_bounded_wait_ends_while_the_call_goes_on_and_the_call_ends_by_its_own_deadline() {
    let answers = ranks(2, 4, &Options::default(), |mut ex| {
        if ex.rank() == 1 {
            // Takes the message, but does not come to the barrier.
            let got = ex.start_receive(vec![0u8], 0, soon()).unwrap();
            assert_eq!(ex.wait(got).unwrap(), [5]);
            return (None, ex);
        }
        let sent = ex.start_send(vec![5u8], 1, soon()).unwrap();
        ex.wait(sent).unwrap();
        let begun = Instant::now();
        let request = ex.start_barrier(begun + Duration::from_millis(150)).unwrap();
        assert!(!ex.wait_until(&request, begun + Duration::from_millis(20)));
        assert!(begun.elapsed() >= Duration::from_millis(20) && !request.is_done());
        let error = ex.wait(request).unwrap_err().error;
        assert!(begun.elapsed() >= Duration::from_millis(150));
        (Some(error), ex)
    });
    assert!(matches!(answers[0].0, Some(Error::Timeout { rank: 0, peer: 1, .. })), "{:?}", answers[0].0);
}

#[test]
fn what_is_refused_before_it_begins_comes_back_with_its_buffers() {
    let mut ex = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default()).unwrap();
    let failed = ex.start_all_reduce_into((vec![1u8; 3], vec![0u8; 4]), Op::Sum, soon()).unwrap_err();
    assert!(matches!(failed.error, Error::Argument(_)));
    assert_eq!(failed.buffers.map(|(i, o)| (i.len(), o.len())), Some((3, 4)));
    assert!(matches!(ex.start_send(vec![1u8], 0, soon()), Err(failed) if failed.buffers == Some(vec![1])));
    assert_eq!(ex.in_flight(), 0);
}

#[test]
fn a_request_of_another_group_is_refused_and_goes_on_there() {
    let mut groups = loopback::group(2, 4, 4096).into_iter().map(|l| Executor::new(l, Options::default()).unwrap());
    let (mut here, mut peer) = (groups.next().unwrap(), groups.next().unwrap());
    let mut other = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default()).unwrap();
    let request = here.start_all_reduce(vec![1u32; 4], Op::Sum, soon()).unwrap();
    let failed = other.wait(request).unwrap_err();
    assert!(matches!(failed.error, Error::Argument(_)) && failed.buffers.is_none());
    let theirs = peer.start_all_reduce(vec![2u32; 4], Op::Sum, soon()).unwrap();
    while here.progress().unwrap() > 0 {}
    assert_eq!(peer.wait(theirs).unwrap(), [3; 4]);
}

#[test]
fn calls_in_flight_when_their_executor_ends_are_aborted_and_give_their_buffers_back() {
    let mut groups = loopback::group(2, 4, 4096).into_iter().map(|l| Executor::new(l, Options::default()).unwrap());
    let (mut here, _peer) = (groups.next().unwrap(), groups.next().unwrap());
    let request: Request<Vec<u32>> = here.start_all_reduce(vec![1u32; 4], Op::Sum, soon()).unwrap();
    drop(here);
    let failed = request.answer().unwrap_err();
    assert!(matches!(failed.error, Error::Aborted { by: 0, .. }) && failed.buffers.is_some());
}
