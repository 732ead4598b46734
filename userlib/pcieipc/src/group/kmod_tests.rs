// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups over channels of a module in this process.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use super::{Group, GroupOptions, KmodOptions, Transport};
use crate::{
    device::fake::{FakeKernel, GONE, RECOVERING},
    error::{Error, Rank, Result},
    reduce::Op,
    transport::kmod::Mover,
};

const PATIENCE: Duration = Duration::from_secs(30);

/// Runs `body` once a rank, each in a thread with a group of its own.
fn ranks<R: Send>(kernel: &Arc<FakeKernel>, count: usize, mover: Mover, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    let options = KmodOptions { mover, kernel: kernel.clone(), ..Default::default() };
    ranks_with(&options, count, body)
}

/// The same with other options.
fn ranks_with<R: Send>(all: &KmodOptions, count: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let directory: PathBuf = std::env::temp_dir().join(format!("pcieipc-fake-{}-{number}", std::process::id()));
    let meet = |rank: Rank| {
        let mut options = GroupOptions::new(rank, count, &directory);
        options.transport = Transport::Kmod(all.clone());
        options.ring_bytes = 1 << 16;
        Group::meet(options)
    };
    let answers = std::thread::scope(|scope| {
        let (meet, body) = (&meet, &body);
        let running: Vec<_> = (0..count).map(|rank| scope.spawn(move || meet(rank).map(body))).collect();
        running.into_iter().map(|t| t.join().unwrap()).collect::<Result<Vec<R>>>()
    });
    let _ = std::fs::remove_dir_all(&directory);
    answers.unwrap()
}

fn reduces_right(group: &mut Group, members: &[Rank], count: usize) -> Result<()> {
    let value = |rank: usize, at: usize| ((rank * 7919 + at * 31) % 2048) as f32 - 1000.0;
    let own = members[group.rank()];
    let mut buffer: Vec<f32> = (0..count).map(|at| value(own, at)).collect();
    group.all_reduce(&mut buffer, Op::Sum, PATIENCE)?;
    for (at, got) in buffer.iter().enumerate() {
        let exact: f64 = members.iter().map(|r| f64::from(value(*r, at))).sum();
        assert_eq!(f64::from(*got), exact, "element {at}");
    }
    Ok(())
}

#[test]
fn four_ranks_reduce_right_by_processor_and_by_engine() {
    for mover in [Mover::Processor, Mover::Engine] {
        let kernel = FakeKernel::new(4);
        let moved = ranks(&kernel, 4, mover, |mut group| {
            for count in [1, 1000, 100_000] {
                reduces_right(&mut group, &[0, 1, 2, 3], count).unwrap();
            }
            group.counters()
        });
        for (rank, counters) in moved.iter().enumerate() {
            assert_eq!(counters.dma_bytes, kernel.world().endpoints[rank].dma_bytes);
            let expected = if mover == Mover::Engine { counters.bytes + 64 * counters.records } else { 0 };
            assert_eq!(counters.dma_bytes, expected, "each record and its header, once");
        }
    }
}

#[test]
fn a_lost_doorbell_costs_time_but_no_record() {
    let kernel = FakeKernel::new(2);
    kernel.world().deaf = true;
    ranks(&kernel, 2, Mover::Processor, |mut group| {
        for _ in 0..5 {
            // The peer is asleep when the record comes.
            if group.rank() == 0 {
                std::thread::sleep(Duration::from_millis(30));
            }
            reduces_right(&mut group, &[0, 1], 1000).unwrap();
        }
    });
}

#[test]
fn a_state_other_than_live_is_told_to_every_rank_and_names_the_endpoint() {
    for (state, gone) in [(GONE, true), (RECOVERING, false)] {
        let kernel = FakeKernel::new(4);
        let (calls, begun) = (AtomicUsize::new(0), Instant::now());
        let errors = ranks(&kernel, 4, Mover::Processor, |mut group| {
            loop {
                if calls.fetch_add(1, Ordering::Relaxed) == 20 {
                    kernel.set_state(2, state);
                }
                if let Err(error) = reduces_right(&mut group, &[0, 1, 2, 3], 50_000) {
                    break error;
                }
            }
        });
        for error in errors {
            let named = match &error {
                Error::EndpointGone { peer, endpoint } => gone && (*peer, endpoint.id, endpoint.generation) == (2, 3, 12),
                Error::EndpointRecovering { peer, endpoint } => !gone && (*peer, endpoint.id, endpoint.generation) == (2, 3, 12),
                _ => false,
            };
            assert!(named, "{error}");
        }
        assert!(begun.elapsed() < PATIENCE / 2);
    }
}

#[test]
fn survivors_of_a_removal_go_on_and_the_rank_without_endpoint_is_told() {
    let kernel = FakeKernel::new(4);
    let calls = AtomicUsize::new(0);
    ranks(&kernel, 4, Mover::Engine, |mut group| {
        let rank = group.rank();
        loop {
            if calls.fetch_add(1, Ordering::Relaxed) == 12 {
                kernel.set_state(1, GONE);
            }
            if reduces_right(&mut group, &[0, 1, 2, 3], 20_000).is_err() {
                break;
            }
        }
        let result = group.shrink(PATIENCE);
        if rank == 1 {
            assert!(matches!(result, Err(Error::EndpointGone { peer: 1, .. })), "{result:?}");
            return;
        }
        result.unwrap();
        assert_eq!(group.members(), [0, 2, 3]);
        for count in [1, 20_000] {
            reduces_right(&mut group, &[0, 2, 3], count).unwrap();
        }
    });
}

#[test]
fn more_ranks_than_live_endpoints_is_said_before_anybody_waits() {
    let kernel = FakeKernel::new(2);
    kernel.set_state(0, GONE);
    let mut options = GroupOptions::new(1, 2, std::env::temp_dir().join(format!("pcieipc-none-{}", std::process::id())));
    options.transport = Transport::Kmod(KmodOptions { kernel, ..Default::default() });
    let begun = Instant::now();
    let error = Group::meet(options).unwrap_err();
    assert!(error.to_string().contains("1 live endpoints for 2 ranks"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

/// Reduces until an error; gives it.
fn until_an_error(group: &mut Group, members: &[Rank], mut before: impl FnMut()) -> Error {
    loop {
        before();
        if let Err(error) = reduces_right(group, members, 20_000) {
            return error;
        }
    }
}

/// Of three: the others, until the rank that was left out waits for them.
fn works_without_rank_1(group: &mut Group, shrunk: &AtomicUsize) {
    assert_eq!(group.members(), [0, 2]);
    reduces_right(group, &[0, 2], 1000).unwrap();
    shrunk.fetch_add(1, Ordering::Relaxed);
    // Both learn in the same call that somebody waits.
    while group.agree(true, PATIENCE).unwrap().returned.is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// And the one that was left out.
fn until_both_shrank(shrunk: &AtomicUsize) {
    while shrunk.load(Ordering::Relaxed) < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn all_ranks_are_back_when_an_endpoint_recovered_was_reset_or_was_put_back() {
    for (away, back) in [(RECOVERING, FakeKernel::renew as fn(&FakeKernel, usize)), (GONE, FakeKernel::put_back)] {
        let kernel = FakeKernel::new(4);
        let (calls, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
        ranks(&kernel, 4, Mover::Engine, |mut group| {
            until_an_error(&mut group, &[0, 1, 2, 3], || {
                if calls.fetch_add(1, Ordering::Relaxed) == 12 {
                    kernel.set_state(2, away);
                }
            });
            // It comes back while the others wait already.
            if failed.fetch_add(1, Ordering::Relaxed) == 3 {
                back(&kernel, 2);
            }
            let generation = group.session().unwrap().generation();
            group.recover(PATIENCE).unwrap();
            assert_eq!(group.members(), [0, 1, 2, 3]);
            let now = group.session().unwrap();
            assert_eq!(now.generation() > generation, group.rank() == 2);
            assert_eq!(now.endpoint().0, if group.rank() == 2 && away == GONE { 5 } else { group.rank() as u32 + 1 });
            for count in [1, 20_000] {
                reduces_right(&mut group, &[0, 1, 2, 3], count).unwrap();
            }
        });
    }
}

#[test]
fn nobody_waits_for_a_rank_whose_endpoint_went_while_links_were_made() {
    let kernel = FakeKernel::new(3);
    let (calls, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    ranks(&kernel, 3, Mover::Processor, |mut group| {
        until_an_error(&mut group, &[0, 1, 2], || {
            if calls.fetch_add(1, Ordering::Relaxed) == 9 {
                kernel.set_state(2, RECOVERING);
            }
        });
        if failed.fetch_add(1, Ordering::Relaxed) == 2 {
            kernel.world().refused = Some(1);
            kernel.renew(2);
        }
        let begun = Instant::now();
        group.recover(PATIENCE).unwrap();
        assert!(begun.elapsed() < PATIENCE / 4, "{:?}", begun.elapsed());
        assert_eq!(kernel.world().refused, None);
        reduces_right(&mut group, &[0, 1, 2], 20_000).unwrap();
    });
}

#[test]
fn a_rank_that_was_left_out_for_its_endpoint_comes_back_later() {
    let kernel = FakeKernel::new(3);
    let (calls, shrunk) = (AtomicUsize::new(0), AtomicUsize::new(0));
    ranks(&kernel, 3, Mover::Processor, |mut group| {
        until_an_error(&mut group, &[0, 1, 2], || {
            if calls.fetch_add(1, Ordering::Relaxed) == 9 {
                kernel.set_state(1, GONE);
            }
        });
        if group.rank() == 1 {
            assert!(matches!(group.shrink(PATIENCE), Err(Error::EndpointGone { peer: 1, .. })));
            assert!(group.is_excluded());
            until_both_shrank(&shrunk);
            kernel.put_back(1);
        } else {
            group.shrink(PATIENCE).unwrap();
            works_without_rank_1(&mut group, &shrunk);
        }
        group.recover(PATIENCE).unwrap();
        assert_eq!(group.members(), [0, 1, 2]);
        reduces_right(&mut group, &[0, 1, 2], 20_000).unwrap();
    });
}

#[test]
fn an_endpoint_that_stays_away_is_named_to_its_rank_and_the_others_can_shrink() {
    let kernel = FakeKernel::new(3);
    let calls = AtomicUsize::new(0);
    ranks(&kernel, 3, Mover::Processor, |mut group| {
        let rank = group.rank();
        until_an_error(&mut group, &[0, 1, 2], || {
            if calls.fetch_add(1, Ordering::Relaxed) == 9 {
                kernel.set_state(0, GONE);
            }
        });
        let error = group.recover(Duration::from_secs(3)).unwrap_err();
        if rank == 0 {
            assert!(matches!(error, Error::EndpointGone { peer: 0, .. }), "{error}");
            return;
        }
        assert!(matches!(&error, Error::Meeting(why) if why.contains("rank 0 did not come back")), "{error}");
        group.shrink(PATIENCE).unwrap();
        assert_eq!(group.members(), [1, 2]);
        reduces_right(&mut group, &[1, 2], 20_000).unwrap();
    });
}

#[test]
fn a_rank_that_asks_and_never_waits_is_told_of_an_endpoint_long_before_its_deadline() {
    let kernel = FakeKernel::new(2);
    let (met, told) = (AtomicUsize::new(0), AtomicUsize::new(0));
    ranks(&kernel, 2, Mover::Processor, |mut group| {
        group.barrier(PATIENCE).unwrap();
        // Who is still on its way out of the barrier would hear of the endpoint there.
        met.fetch_add(1, Ordering::Relaxed);
        while met.load(Ordering::Relaxed) < 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        if group.rank() == 1 {
            // It has other things to do.
            while told.load(Ordering::Relaxed) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        let request = group.start_all_reduce(vec![1.0f32; 20_000], Op::Sum, PATIENCE).unwrap();
        kernel.set_state(1, GONE);
        let begun = Instant::now();
        while !request.test(&mut group) {}
        told.store(1, Ordering::Relaxed);
        assert!(begun.elapsed() < PATIENCE / 4, "{:?}", begun.elapsed());
        let error = request.wait(&mut group).unwrap_err().error;
        assert!(matches!(error, Error::EndpointGone { peer: 1, endpoint } if endpoint.id == 2), "{error}");
    });
}

#[test]
fn a_worse_link_is_an_error_on_every_rank_only_where_it_was_asked_for_and_recover_goes_on_with_it() {
    for strict in [false, true] {
        let kernel = FakeKernel::new(3);
        (0..3).for_each(|endpoint| kernel.set_link(endpoint, 4, 16));
        let calls = AtomicUsize::new(0);
        let options = KmodOptions { degraded_link_is_error: strict, kernel: kernel.clone(), ..Default::default() };
        ranks_with(&options, 3, |mut group| {
            let before = || {
                if calls.fetch_add(1, Ordering::Relaxed) == 9 {
                    kernel.set_link(2, 1, 1);
                }
            };
            if strict {
                let error = until_an_error(&mut group, &[0, 1, 2], before);
                let named = matches!(&error, Error::LinkDegraded { peer: 2, endpoint, before, now }
                    if (endpoint.id, endpoint.generation) == (3, 12) && before == "16 GT/s x16" && now == "2.5 GT/s x1");
                assert!(named, "{error}");
                group.recover(PATIENCE).unwrap();
                assert!(group.degraded_links().is_empty());
            } else {
                for _ in 0..10 {
                    before();
                    reduces_right(&mut group, &[0, 1, 2], 1000).unwrap();
                }
                let degraded = group.degraded_links();
                assert!(matches!(&degraded[..], [one] if one.rank == 2 && one.now.below(one.before)), "{degraded:?}");
            }
            reduces_right(&mut group, &[0, 1, 2], 20_000).unwrap();
        });
    }
}

#[test]
fn returned_devices_are_told_apart_by_serial_number_function_and_place() {
    // Two functions of a card, and another card whose maker gave it the same number.
    let kernel = FakeKernel::new(3);
    for (endpoint, address) in [0x100u32, 0x101, 0x200].into_iter().enumerate() {
        let mut world = kernel.world();
        world.endpoints[endpoint].serial = 7;
        world.addresses.insert(endpoint as u32 + 1, address);
        // Their next lives, put back in the other order.
        world.addresses.insert(6 - endpoint as u32, address);
    }
    let (calls, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    ranks(&kernel, 3, Mover::Processor, |mut group| {
        until_an_error(&mut group, &[0, 1, 2], || {
            if calls.fetch_add(1, Ordering::Relaxed) == 9 {
                (0..3).for_each(|endpoint| kernel.set_state(endpoint, GONE));
            }
        });
        if failed.fetch_add(1, Ordering::Relaxed) == 2 {
            for endpoint in [2, 1, 0] {
                std::thread::sleep(Duration::from_millis(50));
                kernel.put_back(endpoint);
            }
        }
        group.recover(PATIENCE).unwrap();
        assert_eq!(group.session().unwrap().endpoint().0, 6 - group.rank() as u32);
        reduces_right(&mut group, &[0, 1, 2], 1000).unwrap();
    });
}

#[test]
fn a_device_with_a_number_of_its_own_is_found_in_another_slot_and_one_without_in_its_own() {
    for serial in [7, 0] {
        let kernel = FakeKernel::new(2);
        let elsewhere = if serial == 0 { 0x300 } else { 0x400 };
        {
            let mut world = kernel.world();
            world.endpoints[1].serial = serial;
            world.addresses.extend([(1, 0x200), (2, 0x300), (3, elsewhere)]);
        }
        let (calls, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
        ranks(&kernel, 2, Mover::Processor, |mut group| {
            until_an_error(&mut group, &[0, 1], || {
                if calls.fetch_add(1, Ordering::Relaxed) == 9 {
                    kernel.set_state(1, GONE);
                }
            });
            if failed.fetch_add(1, Ordering::Relaxed) == 1 {
                kernel.put_back(1);
            }
            group.recover(PATIENCE).unwrap();
            assert_eq!(group.session().unwrap().endpoint().0, [1, 3][group.rank()], "serial {serial}");
            reduces_right(&mut group, &[0, 1], 1000).unwrap();
        });
    }
}

#[test]
fn a_rank_whose_engine_does_nothing_is_known_to_all_left_out_and_back_when_its_endpoint_passes_a_test() {
    let kernel = FakeKernel::new(3);
    let (calls, shrunk) = (AtomicUsize::new(0), AtomicUsize::new(0));
    ranks(&kernel, 3, Mover::Engine, |mut group| {
        let rank = group.rank();
        let error = until_an_error(&mut group, &[0, 1, 2], || {
            if calls.fetch_add(1, Ordering::Relaxed) == 9 {
                kernel.world().stuck = Some(1);
            }
        });
        if rank == 1 {
            assert!(matches!(error, Error::EndpointGone { peer: 1, endpoint } if endpoint.id == 2), "{error}");
        }
        let agreement = group.agree(false, PATIENCE).unwrap();
        assert_eq!((agreement.ok, agreement.failed), (false, vec![1]));
        let result = group.shrink(PATIENCE);
        if rank == 1 {
            assert!(matches!(result, Err(Error::EndpointGone { peer: 1, .. })), "{result:?}");
            // It lives, in the same generation, and still does nothing.
            let error = group.recover(Duration::from_millis(300)).unwrap_err();
            assert!(matches!(error, Error::EndpointGone { peer: 1, .. }), "{error}");
            until_both_shrank(&shrunk);
            kernel.world().stuck = None;
        } else {
            result.unwrap();
            works_without_rank_1(&mut group, &shrunk);
        }
        group.recover(PATIENCE).unwrap();
        assert_eq!(group.members(), [0, 1, 2]);
        reduces_right(&mut group, &[0, 1, 2], 20_000).unwrap();
    });
}

#[test]
fn no_copy_of_an_engine_outlasts_the_deadline_of_its_call_and_a_late_one_is_a_timeout() {
    let kernel = FakeKernel::new(2);
    ranks(&kernel, 2, Mover::Engine, |mut group| {
        group.all_reduce(&mut vec![1.0f32; 1000], Op::Sum, PATIENCE).unwrap();
        // Who has its sum may go on before the other has its own.
        assert!(group.agree(true, PATIENCE).unwrap().ok);
        if group.rank() == 1 {
            let mut world = kernel.world();
            assert!(world.copies.contains(&(1, 2000)), "{:?}", world.copies);
            world.stuck = Some(1);
        }
        let error = group.all_reduce(&mut vec![1.0f32; 1000], Op::Sum, Duration::from_millis(300)).unwrap_err();
        if group.rank() == 1 {
            let named = matches!(&error, Error::Timeout { rank: 1, peer: 1, endpoint: Some(e), .. } if e.id == 2);
            assert!(named, "{error}");
            let mut world = kernel.world();
            let last = world.copies.iter().rfind(|(endpoint, _)| *endpoint == 1);
            assert!(last.is_some_and(|(_, ms)| *ms <= 300), "{:?}", world.copies);
            world.stuck = None;
        }
        // A short deadline proves nothing against an endpoint.
        group.shrink(PATIENCE).unwrap();
        reduces_right(&mut group, &[0, 1], 20_000).unwrap();
    });
}

#[test]
fn a_ring_that_nobody_reads_any_more_is_not_blamed_on_an_endpoint_that_lives() {
    for mover in [Mover::Processor, Mover::Engine] {
        let kernel = FakeKernel::new(2);
        ranks(&kernel, 2, mover, |mut group| {
            reduces_right(&mut group, &[0, 1], 1000).unwrap();
            group.barrier(PATIENCE).unwrap();
            if group.rank() == 0 {
                // By then the other sleeps, so that it has to be rung.
                std::thread::sleep(Duration::from_millis(200));
                kernel.end_channels(1);
            }
            let result = group.all_reduce(&mut vec![1.0f32; 1000], Op::Sum, Duration::from_secs(2));
            match (mover, group.rank(), &result) {
                // The record lies in the ring, and who only looks finds it.
                (Mover::Processor, _, Ok(())) => {}
                // No record can be moved to it.
                (Mover::Engine, 0, Err(Error::PeerDied { peer: 1, endpoint: Some(_), .. })) => {}
                (Mover::Engine, 1, Err(Error::Aborted { by: 0, .. })) => {}
                _ => panic!("{mover:?}, rank {}: {result:?}", group.rank()),
            }
        });
    }
}

#[test]
fn what_the_module_says_is_heard_in_order_and_once() {
    let kernel = FakeKernel::new(1);
    ranks(&kernel, 1, Mover::Processor, |mut group| {
        assert!(group.events().is_empty());
        for sequence in 1..=3 {
            kernel.world().events.push(crate::abi::pcieipc_event { sequence, endpoint: 1, generation: 10, ..Default::default() });
        }
        assert_eq!(group.events().iter().map(|event| event.sequence).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(group.events().is_empty());
    });
}
