// SPDX-License-Identifier: MIT OR Apache-2.0
use std::{
    path::Path as FilePath,
    sync::Arc,
    time::{Duration, Instant},
};

use pcieipc::{
    Error,
    group::{Group, GroupOptions},
    reduce::{Kind, Op},
};

use super::{Communicator, Options, PathChoice, Tensor};
use crate::{
    abi::{ARG_EARLY, CODE_ABORTED, CODE_DIFFERENT, CODE_MISMATCH, CODE_TIMEOUT, Verdict},
    choice::Path,
    driver::{
        Device, PeerClaim, Stream,
        fake::{CAPTURED, Fake, World},
    },
};

const WIDE: PeerClaim = PeerClaim { access: true, native_atomics: true, rank: 0 };
const PCIE: PeerClaim = PeerClaim { access: true, native_atomics: false, rank: 1 };

fn options(path: PathChoice) -> Options {
    Options {
        path,
        kinds: vec![Kind::F32],
        deadline: Duration::from_millis(500),
        setup: Duration::from_secs(20),
        ..Options::default()
    }
}

/// Makes a communicator of the devices, a thread a rank, and gives it to `run`.
fn ranks<R: Send>(
    devices: Vec<Fake>,
    options: impl Fn(usize) -> Options + Sync,
    run: impl Fn(Result<Communicator, Error>) -> R + Sync,
) -> Vec<R> {
    let place = tempfile::tempdir().unwrap();
    let (count, place, options, run): (usize, &FilePath, _, _) = (devices.len(), place.path(), &options, &run);
    std::thread::scope(|scope| {
        let threads: Vec<_> = devices
            .into_iter()
            .enumerate()
            .map(|(rank, device)| {
                scope.spawn(move || {
                    let group = Group::meet(GroupOptions::new(rank, count, place.join("meeting"))).unwrap();
                    let device: Arc<dyn Device> = Arc::new(device);
                    run(Communicator::new(group, device, options(rank)))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn two(claim: PeerClaim) -> Vec<Fake> {
    let world = Arc::new(World::default());
    (0..2).map(|ordinal| Fake::new(&world, ordinal, claim)).collect()
}

fn path_and_reason(made: Result<Communicator, Error>) -> (Path, String) {
    let made = made.unwrap();
    let reason = made.paths().filter_map(|(_, why)| why).collect::<Vec<_>>().join("; ");
    (made.path(), reason)
}

#[test]
fn devices_that_reach_each_other_take_the_path_that_was_proved() {
    assert_eq!(ranks(two(WIDE), |_| options(PathChoice::Auto), path_and_reason), vec![(Path::PeerWide, String::new()); 2]);
    assert_eq!(ranks(two(PCIE), |_| options(PathChoice::Auto), path_and_reason), vec![(Path::Peer, String::new()); 2]);
}

#[test]
fn a_claim_that_fails_the_proof_disables_the_path_for_both_and_one_says_why() {
    let world = Arc::new(World::default());
    let devices = vec![Fake::new(&world, 0, WIDE), Fake::new(&world, 1, WIDE).deaf()];
    let found = ranks(devices, |_| options(PathChoice::Auto), path_and_reason);
    assert!(found.iter().all(|(path, _)| *path == Path::Host), "{found:?}");
    assert!(found[0].1.contains("did not arrive"), "{found:?}");
}

#[test]
fn the_peer_path_is_refused_with_the_reason_where_it_is_not_there() {
    let errors = ranks(two(PeerClaim::default()), |_| options(PathChoice::Peer), |made| made.unwrap_err().to_string());
    assert!(errors.iter().all(|e| e.contains("can not reach each other")), "{errors:?}");
    let world = Arc::new(World::default());
    let devices = (0..2).map(|i| Fake::new(&world, i, WIDE).partitioned()).collect();
    let found = ranks(devices, |_| options(PathChoice::Auto), path_and_reason);
    assert!(found.iter().all(|(path, why)| *path == Path::Host && why.contains("partitioned")), "{found:?}");
}

#[test]
fn one_pair_without_a_path_makes_all_choose_what_serves_the_slowest() {
    let world = Arc::new(World::default());
    let devices = vec![Fake::new(&world, 0, WIDE), Fake::new(&world, 1, WIDE), Fake::new(&world, 2, PeerClaim::default())];
    let found = ranks(
        devices,
        |_| options(PathChoice::Auto),
        |made| {
            let made = made.unwrap();
            (made.path(), made.paths().map(|(path, _)| path).collect::<Vec<_>>())
        },
    );
    assert!(found.iter().all(|(path, _)| *path == Path::Host), "{found:?}");
    assert_eq!(found[0].1, [None, Some(Path::PeerWide), Some(Path::Host)]);
}

#[test]
fn peer_memory_stays_within_a_device_where_that_was_asked_for() {
    let world = Arc::new(World::default());
    let devices = [0, 1, 0, 1].map(|ordinal| Fake::new(&world, ordinal, WIDE)).into();
    let found = ranks(
        devices,
        |_| options(PathChoice::Device),
        |made| {
            let made = made.unwrap();
            let pairs: Vec<_> = made.paths().map(|(path, why)| (path, why.map(str::to_owned))).collect();
            (made.rank(), made.path(), pairs)
        },
    );
    for (rank, path, pairs) in found {
        assert_eq!(path, Path::Host);
        for (peer, (path, why)) in pairs.into_iter().enumerate() {
            let right = if peer % 2 == rank % 2 { Path::PeerWide } else { Path::Host };
            assert_eq!(path, (peer != rank).then_some(right), "{rank} to {peer}");
            assert_eq!(why.is_some_and(|w| w.contains("within a device")), right == Path::Host, "{rank} to {peer}");
        }
    }
}

#[test]
fn ranks_with_different_options_are_told_so() {
    let different = |rank| Options { kinds: vec![[Kind::F32, Kind::I8][rank]], ..options(PathChoice::Auto) };
    let errors = ranks(two(WIDE), different, |made| made.unwrap_err());
    assert!(errors.iter().all(|e| matches!(e, Error::Mismatch { .. })), "{errors:?}");
}

#[test]
fn calls_of_no_blocks_are_refused_and_few_blocks_are_kept_to() {
    let of = |blocks| move |_| Options { blocks, ..options(PathChoice::Auto) };
    let errors = ranks(two(WIDE), of(0), |made| made.unwrap_err());
    assert!(errors.iter().all(|e| matches!(e, Error::Argument(_))), "{errors:?}");
    let blocks = ranks(two(WIDE), of(5), |made| {
        let made = made.unwrap();
        [1u64 << 10, 512 << 10, 1 << 20, 64 << 20].map(|bytes| made.choice(bytes, Op::Sum, false).blocks)
    });
    assert_eq!(blocks, [[1, 5, 5, 5]; 2]);
}

#[test]
fn arguments_that_can_not_be_served_are_refused_before_anything_is_launched() {
    ranks(
        two(WIDE),
        |_| options(PathChoice::Auto),
        |made| {
            let mut c = made.unwrap();
            let tensor = |at, count| Tensor { at, count };
            // SAFETY: refused, or not looked at by a device in memory.
            unsafe {
                let mut call = |input, output, kind| c.all_reduce(input, output, kind, Op::Sum, Stream(1));
                assert!(matches!(call(tensor(256, 4), tensor(256, 5), Kind::F32), Err(Error::Argument(_))));
                assert!(matches!(call(tensor(258, 4), tensor(256, 4), Kind::F32), Err(Error::Argument(_))));
                assert!(matches!(call(tensor(256, u64::MAX), tensor(256, u64::MAX), Kind::F32), Err(Error::Argument(_))));
                assert!(matches!(call(tensor(256, 4), tensor(256, 4), Kind::F64), Err(Error::Argument(_))));
                assert!(call(tensor(256, 4), tensor(256, 4), Kind::F32).is_ok());
            }
        },
    );
}

#[test]
fn a_type_that_was_not_named_is_loaded_when_it_is_first_used_but_not_while_a_graph_is_captured() {
    ranks(
        two(WIDE),
        |_| options(PathChoice::Auto),
        |made| {
            let mut c = made.unwrap();
            let tensor = Tensor { at: 256, count: 4 };
            let refused = c.prepare(Kind::F64, CAPTURED);
            assert!(matches!(refused, Err(Error::Argument(why)) if why.contains("f64")));
            // What is there already may be captured.
            c.prepare(Kind::F32, CAPTURED).unwrap();
            c.prepare(Kind::F64, Stream(1)).unwrap();
            c.prepare(Kind::F64, CAPTURED).unwrap();
            // SAFETY: not looked at by a device in memory.
            unsafe { c.all_reduce(tensor, tensor, Kind::F64, Op::Sum, Stream(1)) }.unwrap();
            // Not while the other rank is still at what is above.
            c.group.exchange("the end of the calls", &[], &[], Duration::from_secs(20)).unwrap();
            c.abort("enough");
            assert!(matches!(c.prepare(Kind::I8, Stream(1)), Err(Error::Aborted { .. })));
        },
    );
}

#[test]
fn what_a_kernel_wrote_is_the_error_of_the_next_check_and_of_later_calls() {
    let judged = ranks(
        two(WIDE),
        |_| options(PathChoice::Auto),
        |made| {
            let mut c = made.unwrap();
            let write = |code, ours, theirs, header_word| {
                let verdict = Verdict {
                    code,
                    peer: 1 - c.args.rank,
                    what: 1,
                    ours,
                    theirs,
                    waited_ns: 7,
                    header_word,
                    ..Verdict::default()
                };
                c.words.pretend(c.rank(), Verdict { written: 1, ..verdict });
            };
            let code = [CODE_TIMEOUT, CODE_MISMATCH][c.rank()];
            write(code, 4, 8, 1);
            let first = c.check().unwrap_err();
            let tensor = Tensor { at: 256, count: 1 };
            // SAFETY: refused.
            let later = unsafe { c.all_reduce(tensor, tensor, Kind::F32, Op::Sum, Stream(1)) }.unwrap_err();
            assert_eq!(first.to_string(), later.to_string());
            first
        },
    );
    assert!(
        matches!(&judged[0], Error::Timeout { rank: 0, peer: 1, what: "a line of data", waited, .. } if waited.as_nanos() == 7)
    );
    assert!(
        matches!(&judged[1], Error::Mismatch { rank: 1, peer: 0, what: "the length in bytes", ours, theirs, .. } if ours == "4" && theirs == "8")
    );
}

#[test]
fn an_abort_is_told_to_all_ranks_with_its_reason() {
    let told = ranks(
        two(WIDE),
        |_| options(PathChoice::Auto),
        |made| {
            let mut c = made.unwrap();
            if c.rank() == 1 {
                c.abort("enough");
            }
            let until = Instant::now() + Duration::from_secs(10);
            loop {
                match c.check() {
                    Err(error) => return error.to_string(),
                    Ok(()) => assert!(Instant::now() < until, "never told"),
                }
                std::thread::yield_now();
            }
        },
    );
    assert!(told.iter().all(|t| t.contains("rank 1") && t.contains("enough")), "{told:?}");
}

#[test]
fn a_kernel_that_gave_up_because_of_another_names_that_one() {
    let told = ranks(
        two(WIDE),
        |_| options(PathChoice::Auto),
        |made| {
            let mut c = made.unwrap();
            if c.rank() == 0 {
                c.words.pretend(0, Verdict { code: CODE_ABORTED, peer: 1, written: 1, ..Verdict::default() });
                return c.check().unwrap_err().to_string();
            }
            String::new()
        },
    );
    assert!(told[0].contains("rank 1"), "{told:?}");
}

/// Two ranks, as if each were a process.
fn apart() -> (Arc<World>, Vec<Fake>) {
    let world = Arc::new(World::default());
    let devices = (0..2).map(|ordinal| Fake::new(&world, ordinal, WIDE).apart()).collect();
    (world, devices)
}

#[test]
fn registered_memory_is_opened_once_and_closed_before_it_is_given_back() {
    let (world, devices) = apart();
    let counts = ranks(
        devices,
        |_| options(PathChoice::Auto),
        |made| {
            let mut c = made.unwrap();
            let device = c.device().clone();
            let memory = device.alloc(1 << 16).unwrap();
            let of_mailbox = world.open();
            assert!(of_mailbox > 0);
            let mut register = |from: u64, bytes: u64| {
                // SAFETY: given back below, after it is no longer registered.
                unsafe { c.register(from, bytes) }.unwrap()
            };
            let [first, second] = [register(memory + 4096, 8192), register(memory + 16384, 4096)];
            // Where the other's tensor is: as far from the start of its memory as here.
            let range = &c.ranges[0];
            assert!(range.holds(memory + 4096, 8192) && !range.holds(memory + 4096, 8193) && !range.holds(memory + 4095, 1));
            let mut table = [0u8; 16];
            device.read(&mut table, range.table).unwrap();
            let starts: Vec<u64> = table.chunks(8).map(|b| b.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))).collect();
            assert_eq!(starts[c.rank()], memory + 4096);
            assert_eq!(device.about(starts[1 - c.rank()]).unwrap().base + 4096, starts[1 - c.rank()]);
            assert_eq!(device.about(starts[1 - c.rank()]).unwrap().device, 1 - c.rank() as i32);
            let counts = world.open();
            c.deregister(second).unwrap();
            c.deregister(first).unwrap();
            assert!(matches!(c.deregister(first), Err(Error::Argument(_))), "twice");
            // The device in memory refuses this while anybody has it open.
            device.free(memory).unwrap();
            c.group().exchange("the test", &[], &[], Duration::from_secs(5)).unwrap();
            (counts, world.open() == of_mailbox)
        },
    );
    for (now, as_before) in counts {
        // Each mailbox, and each memory once though two tensors of it are registered.
        assert_eq!((now, as_before), (4, true));
    }
    assert_eq!(world.open(), 0, "mailboxes too");
}

#[test]
fn memory_of_several_pieces_is_opened_piece_by_piece_from_where_it_begins() {
    let (world, devices) = apart();
    ranks(
        devices,
        |_| options(PathChoice::Auto),
        |made| {
            let mut c = made.unwrap();
            let device = c.device().clone();
            // More files than one message carries.
            let (memory, pieces) = device.alloc_pieces(21, 4096).unwrap();
            // SAFETY: given back below, after it is no longer registered.
            let made = unsafe { c.register(memory + 4096 + 64, 17 * 4096) }.unwrap();
            let mut table = [0u8; 16];
            device.read(&mut table, c.ranges[0].table).unwrap();
            let other = &table[8 * (1 - c.rank())..][..8];
            let other = other.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
            // The second piece of the other's memory, and 64 bytes.
            assert_eq!(device.about(other).unwrap().base + 64, other);
            c.deregister(made).unwrap();
            device.unmap(memory, &pieces).unwrap();
        },
    );
    assert_eq!(world.open(), 0);
}

#[test]
fn memory_that_can_not_be_shared_is_refused_on_all_ranks_with_the_reason_and_nothing_stays_open() {
    let (world, devices) = apart();
    ranks(
        devices,
        |_| options(PathChoice::Auto),
        |made| {
            let mut c = made.unwrap();
            let (device, rank) = (c.device().clone(), c.rank());
            let plain = device.alloc(8192).unwrap();
            let pooled = device.alloc_pooled(8192).unwrap();
            let at_one = |here, there| if rank == 1 { here } else { there };
            let mut refused = |at, bytes| {
                // SAFETY: refused.
                unsafe { c.register(at, bytes) }.unwrap_err()
            };
            for (at, bytes, why) in [
                (at_one(pooled, plain), 4096, "stream-ordered pool"),
                (at_one(plain + 8, plain), 4096, "aligned to 16 bytes"),
                (at_one(plain + 4096, plain), 8192, "past the end"),
                (at_one(16, plain), 4096, "no such memory"),
            ] {
                let error = refused(at, bytes);
                let text = error.to_string();
                assert!(matches!(error, Error::Argument(_)) && text.contains("rank 1") && text.contains(why), "{text}");
            }
            assert!(matches!(refused(plain, at_one(4096, 2048)), Error::Mismatch { .. }));
            // The others see nothing wrong with an empty one either.
            assert!(refused(plain, 0).to_string().contains("no memory"));
            // And the communicator goes on.
            // SAFETY: given back below.
            let good = unsafe { c.register(plain, 4096) }.unwrap();
            c.deregister(good).unwrap();
            device.free(plain).unwrap();
        },
    );
    assert_eq!(world.open(), 0);
}

#[test]
fn a_rank_that_can_not_open_what_was_offered_tells_all() {
    let world = Arc::new(World::default());
    let devices = vec![Fake::new(&world, 0, WIDE).apart().closed(), Fake::new(&world, 1, WIDE).apart()];
    ranks(
        devices,
        |_| options(PathChoice::Auto),
        |made| {
            let mut c = made.unwrap();
            let memory = c.device().alloc(4096).unwrap();
            // SAFETY: refused.
            let told = unsafe { c.register(memory, 4096) }.unwrap_err().to_string();
            assert!(told.contains("rank 0 can not open rank 1's memory") && told.contains("it opens nothing"), "{told}");
            c.device().free(memory).unwrap();
        },
    );
    assert_eq!(world.open(), 0);
}

#[test]
fn registered_memory_is_refused_on_the_host_path() {
    ranks(
        two(WIDE),
        |_| options(PathChoice::Host),
        |made| {
            let mut c = made.unwrap();
            let memory = c.device().alloc(4096).unwrap();
            // SAFETY: refused.
            assert!(matches!(unsafe { c.register(memory, 4096) }, Err(Error::Argument(why)) if why.contains("peer memory")));
        },
    );
}

#[test]
fn long_calls_on_registered_memory_name_its_place_and_short_ones_are_staged() {
    let (world, devices) = apart();
    ranks(
        devices,
        |_| options(PathChoice::Auto),
        |made| {
            let mut c = made.unwrap();
            let device = c.device().clone();
            let bytes = 34u64 << 20;
            let memory = device.alloc(2 * bytes).unwrap();
            let tensor = |at: u64, bytes: u64| Tensor { at: memory + at, count: bytes / 4 };
            let long = 33u64 << 20;
            let call = |c: &mut Communicator, input, output| {
                // SAFETY: a device in memory does not look at it.
                unsafe { c.all_reduce(input, output, Kind::F32, Op::Sum, Stream(1)) }.unwrap();
                world.last(c.rank() as i32)
            };
            let staged = call(&mut c, tensor(0, long), tensor(bytes, long));
            assert_eq!((staged.input_of, staged.output_of), (0, 0));
            // SAFETY: given back below.
            let made = unsafe { [c.register(memory, bytes), c.register(memory + bytes, bytes)] }.map(Result::unwrap);
            let [first, second] = [0, 1].map(|i| c.ranges[i].table);
            let direct = call(&mut c, tensor(0, long), tensor(bytes, long));
            assert_eq!((direct.input_of, direct.output_of), (first, second));
            let elsewhere = call(&mut c, tensor(16, long), tensor(bytes, long));
            let in_place = call(&mut c, tensor(0, long), tensor(0, long));
            assert_eq!((in_place.input_of, in_place.output_of), (first, first));
            // Ranks that call at different places have different plans.
            let plans = [direct, elsewhere, in_place, staged].map(|args| args.header[3]);
            assert!((0..4).all(|i| (0..i).all(|j| plans[i] != plans[j])), "{plans:?}");
            let short = call(&mut c, tensor(0, 1 << 20), tensor(bytes, 1 << 20));
            let across = call(&mut c, tensor(bytes - 64, long), tensor(0, long));
            assert_eq!((short.input_of, across.input_of), (0, 0));
            made.into_iter().for_each(|made| c.deregister(made).unwrap());
            let after = call(&mut c, tensor(0, long), tensor(bytes, long));
            assert_eq!((after.input_of, after.header), (0, staged.header));
            c.group().exchange("the test", &[], &[], Duration::from_secs(5)).unwrap();
            device.free(memory).unwrap();
        },
    );
    assert_eq!(world.open(), 0);
}

#[test]
fn ranks_that_share_a_device_have_room_on_it_together() {
    let blocks = |devices: &[i32]| {
        let world = Arc::new(World::default());
        let devices = devices.iter().map(|ordinal| Fake::new(&world, *ordinal, WIDE)).collect();
        let all = ranks(devices, |_| options(PathChoice::Auto), |made| made.unwrap().setting().blocks);
        assert!(all.iter().all(|blocks| *blocks == all[0]), "{all:?}");
        all[0]
    };
    // 132 multiprocessors, for one kernel of each rank that runs and one that waits.
    assert_eq!([blocks(&[0, 1]), blocks(&[0, 0]), blocks(&[0, 0, 1]), blocks(&[0, 0, 0, 0])], [32, 32, 32, 16]);
}

#[test]
fn a_row_of_short_calls_does_not_fill_the_device_with_kernels_that_wait() {
    let early = |ordinals: [i32; 2], overlap: bool, path| {
        let world = Arc::new(World::default());
        let devices = ordinals.iter().map(|ordinal| Fake::new(&world, *ordinal, WIDE)).collect();
        let options = |_| Options { overlap, ..options(path) };
        let all = ranks(devices, options, |made| {
            let mut c = made.unwrap();
            let short = Tensor { at: 256, count: 4 };
            let long = Tensor { at: 256, count: 1 << 18 };
            let of = |c: &mut Communicator, tensor| {
                c.group().exchange("turn", &[], &[], Duration::from_secs(5)).unwrap();
                // SAFETY: a device in memory does not look at it.
                unsafe { c.all_reduce(tensor, tensor, Kind::F32, Op::Sum, Stream(1)) }.unwrap();
                world.last(ordinals[c.rank()]).flags & ARG_EARLY != 0
            };
            [short; 10]
                .map(|tensor| of(&mut c, tensor))
                .into_iter()
                .chain([long, short].map(|tensor| of(&mut c, tensor)))
                .collect::<Vec<_>>()
        });
        all.into_iter().next().unwrap()
    };
    let row = [true, true, true, true, true, true, true, false];
    let right: Vec<bool> = row.into_iter().cycle().take(10).chain([false, true]).collect();
    assert_eq!(early([0, 1], true, PathChoice::Host), right);
    assert_eq!(early([0, 1], true, PathChoice::Peer), [false; 12], "nothing is gained there");
    assert_eq!(early([0, 0], true, PathChoice::Host), [false; 12], "the other rank needs the room");
    assert_eq!(early([0, 1], false, PathChoice::Host), [false; 12]);
}

#[test]
fn a_result_that_is_another_on_one_rank_is_corrupt_and_names_who_differs() {
    let told = ranks(
        two(WIDE),
        |_| Options { checked: true, ..options(PathChoice::Auto) },
        |made| {
            let mut c = made.unwrap();
            let tensor = Tensor { at: c.device().alloc(4096).unwrap(), count: 4 };
            // SAFETY: a device in memory runs no kernel of ours.
            unsafe { c.all_reduce(tensor, tensor, Kind::F32, Op::Sum, Stream(1)) }.unwrap();
            c.group().exchange("the call", &[], &[], Duration::from_secs(5)).unwrap();
            let verdict =
                Verdict { code: CODE_DIFFERENT, peer: 1 - c.args.rank, ours: 5, theirs: 6, written: 1, ..Verdict::default() };
            c.words.pretend(c.rank(), verdict);
            c.check().unwrap_err()
        },
    );
    for (rank, error) in told.into_iter().enumerate() {
        assert!(
            matches!(&error, Error::Corrupt { rank: r, peer, what, .. } if (*r, *peer) == (rank, 1 - rank) && what.contains("0x6")),
            "{error}"
        );
    }
    let different = |rank| Options { checked: rank == 0, ..options(PathChoice::Auto) };
    let errors = ranks(two(WIDE), different, |made| made.unwrap_err());
    assert!(errors.iter().all(|e| matches!(e, Error::Mismatch { .. })), "{errors:?}");
}
