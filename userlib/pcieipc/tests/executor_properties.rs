// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-reduce against a float64 (for integers: exact) model, over group sizes, counts, offsets in memory, types, operations and algorithms.

use std::time::{Duration, Instant};

use half::{bf16, f16};
use pcieipc::{
    executor::{Executor, Options},
    loopback,
    plan::{Algorithm, Tree},
    reduce::{Element, Kind, Op},
    registered,
};
use proptest::prelude::*;

/// An element type, as the model sees it.
trait Model: Copy + Send + std::fmt::Debug + 'static {
    const KIND: Kind;
    fn bytes(self) -> Vec<u8>;
    fn of_bytes(bytes: &[u8]) -> Self;
    /// A value from anywhere in the type's range.
    fn of_seed(seed: u64) -> Self;
    /// Whether `got` is what these inputs of all ranks give.
    fn agrees(inputs: &[Self], op: Op, got: Self) -> bool;
    /// The one right sum or product of what adds in rank order: one after the other, 16-bit floats in float32, rounded once. Of integers
    /// `agrees` is that already.
    fn in_order(_inputs: &[Self], _op: Op) -> Option<Self> {
        None
    }
}

fn mix(seed: u64) -> u64 {
    let x = (seed ^ seed >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ x >> 32
}

macro_rules! integers {
    ($($t:ty => $kind:ident),*) => { $(
        impl Model for $t {
            const KIND: Kind = Kind::$kind;
            fn bytes(self) -> Vec<u8> { self.to_ne_bytes().to_vec() }
            fn of_bytes(bytes: &[u8]) -> Self { Self::from_ne_bytes(bytes.try_into().unwrap()) }
            fn of_seed(seed: u64) -> Self { mix(seed) as $t }
            fn agrees(inputs: &[Self], op: Op, got: Self) -> bool {
                // Exact in 128 bits, wrapped step by step as the type does.
                let wrapped = |f: fn(i128, i128) -> i128| inputs.iter().skip(1).fold(inputs[0], |a, b| f(a as i128, *b as i128) as $t);
                let want = match op {
                    Op::Sum => wrapped(|a, b| a + b),
                    Op::Prod => wrapped(|a, b| a.wrapping_mul(b)),
                    Op::Min => *inputs.iter().min().unwrap(),
                    Op::Max => *inputs.iter().max().unwrap(),
                    Op::Average => (wrapped(|a, b| a + b) as i128 / inputs.len() as i128) as $t,
                };
                want == got
            }
        }
    )* };
}
integers!(i8 => I8, i16 => I16, i32 => I32, i64 => I64, u8 => U8, u16 => U16, u32 => U32, u64 => U64);

/// The bounds of a float type.
struct Limits {
    /// Half a unit in the last place of 1 where values accumulate, and in the type.
    unit: f64,
    last: f64,
    /// The greatest value where values accumulate, and of the type.
    sums_to: f64,
    most: f64,
    /// The least step.
    least: f64,
}

/// Whether a float agrees with what float64 says. Any order and grouping of the inputs is good, and nothing else: infinity and NaN only where
/// an input or what IEEE makes of them on some way gives it, zeros with their sign.
fn float_agrees(inputs: &[f64], op: Op, got: f64, limits: &Limits) -> bool {
    let n = inputs.len() as f64;
    let &Limits { unit, last, sums_to, most, least } = limits;
    if inputs.iter().any(|x| x.is_nan()) {
        return got.is_nan();
    }
    if let Op::Min | Op::Max = op {
        let want =
            if op == Op::Min { inputs.iter().min_by(|a, b| a.total_cmp(b)) } else { inputs.iter().max_by(|a, b| a.total_cmp(b)) };
        return want.is_some_and(|want| want.to_bits() == got.to_bits());
    }
    if op == Op::Prod {
        let want: f64 = inputs.iter().copied().reduce(|a, x| a * x).unwrap();
        // The product of some of them lies between these.
        let sizes = || inputs.iter().map(|x| x.abs()).filter(|x| x.is_finite() && *x > 0.0);
        let (high, low): (f64, f64) = (sizes().map(|x| x.max(1.0)).product(), sizes().map(|x| x.min(1.0)).product());
        // It may leave the range on the way and not come back, and lose all its digits near zero.
        if high > sums_to / 4.0 || low < least.min(1e-30) * 1e8 {
            return true;
        }
        if want.is_nan() {
            return got.is_nan();
        }
        if inputs.contains(&0.0) || want.is_infinite() {
            return got.to_bits() == want.to_bits();
        }
        if want.abs() > most * 0.99 {
            return got.is_sign_negative() == want.is_sign_negative() && got.abs() >= most * 0.98;
        }
        return (got - want).abs() <= (n + 1.0) * unit * want.abs() + last * want.abs() + least;
    }
    // The sum of some of them lies between these.
    let part = |sign: f64| inputs.iter().map(|x| (x * sign).max(0.0)).sum::<f64>();
    let (above, below) = (part(1.0), part(-1.0));
    let (upwards, downwards) = (above > sums_to * 0.99, below > sums_to * 0.99);
    let infinite = |sign: f64| inputs.contains(&(f64::INFINITY * sign));
    match (infinite(1.0), infinite(-1.0)) {
        (true, true) => return got.is_nan(),
        (false, false) if upwards && downwards => return true,
        _ if got.is_nan() => return upwards && downwards,
        (true, false) => return got == f64::INFINITY,
        (false, true) => return got == f64::NEG_INFINITY,
        (false, false) => {}
    }
    let by = if op == Op::Average { n } else { 1.0 };
    let (want, sizes) = ((above - below) / by, (above + below) / by);
    if upwards || downwards || want.abs() > most * 0.99 {
        let sign = if upwards || downwards { upwards } else { want > 0.0 };
        return got.is_infinite() && (got > 0.0) == sign || (got - want).abs() <= want.abs() * 0.02;
    }
    if inputs.iter().all(|x| *x == 0.0) {
        return got == 0.0 && got.is_sign_negative() == inputs.iter().all(|x| x.is_sign_negative());
    }
    (got - want).abs() <= (n + 1.0) * unit * sizes + last * want.abs() + least
}

macro_rules! floats {
    ($($t:ty => $kind:ident, $bits:ty, $limits:expr, $to:expr, $from:expr, $wide:ty, $up:expr, $down:expr);*) => { $(
        impl Model for $t {
            const KIND: Kind = Kind::$kind;
            fn bytes(self) -> Vec<u8> { self.to_ne_bytes().to_vec() }
            fn of_bytes(bytes: &[u8]) -> Self { Self::from_ne_bytes(bytes.try_into().unwrap()) }
            fn of_seed(seed: u64) -> Self {
                let from: fn(f64) -> $t = $from;
                let random = mix(seed);
                match random % 64 {
                    // Any bits: NaN, infinity, subnormal, huge.
                    0 => <$t>::from_bits(mix(random) as $bits),
                    1 => from(f64::INFINITY),
                    2 => from(f64::NEG_INFINITY),
                    3 => from(f64::NAN),
                    4 => from(-0.0),
                    5..=20 => from(((random >> 8) % 17) as f64 - 8.0),
                    _ => from(((random >> 11) as f64 / (1u64 << 53) as f64 - 0.5) * 6.0),
                }
            }
            fn agrees(inputs: &[Self], op: Op, got: Self) -> bool {
                let to: fn($t) -> f64 = $to;
                let inputs: Vec<f64> = inputs.iter().map(|x| to(*x)).collect();
                float_agrees(&inputs, op, to(got), &$limits)
            }
            fn in_order(inputs: &[Self], op: Op) -> Option<Self> {
                let (up, down): (fn($t) -> $wide, fn($wide) -> $t) = ($up, $down);
                let all = inputs.iter().map(|x| up(*x));
                match op {
                    Op::Sum => all.reduce(|a, x| a + x).map(down),
                    Op::Prod => all.reduce(|a, x| a * x).map(down),
                    _ => None,
                }
            }
        }
    )* };
}
const F32: f64 = f32::EPSILON as f64;
const F32_MAX: f64 = f32::MAX as f64;

fn limits(unit: f64, last: f64, sums_to: f64, most: f64, least: f64) -> Limits {
    Limits { unit, last, sums_to, most, least }
}

floats!(
    // The model itself is float64, in another order.
    f64 => F64, u64, limits(2.0 * f64::EPSILON, f64::EPSILON, f64::MAX, f64::MAX, f64::MIN_POSITIVE), |x| x, |x| x, f64, |x| x, |x| x;
    f32 => F32, u32, limits(F32, F32, F32_MAX, F32_MAX, f32::MIN_POSITIVE as f64), f64::from, |x| x as f32, f32, |x| x, |x| x;
    f16 => F16, u16, limits(F32, 1.0 / 2048.0, F32_MAX, 65504.0, 6e-8), f16::to_f64, f16::from_f64, f32, f16::to_f32, f16::from_f32;
    bf16 => BF16, u16, limits(F32, 1.0 / 256.0, F32_MAX, 3.38e38, 1e-40), bf16::to_f64, bf16::from_f64, f32, bf16::to_f32, bf16::from_f32
);

/// One call.
#[derive(Debug, Clone)]
struct Call {
    ranks: usize,
    count: usize,
    /// Where the buffer starts in memory, by rank: bytes past a cache line.
    skew: Vec<usize>,
    op: Op,
    algorithm: Option<Algorithm>,
    chunk: usize,
    one_shot_up_to: usize,
    seed: u64,
}

fn calls() -> impl Strategy<Value = Call> {
    let count = prop_oneof![3 => 0usize..40, 3 => 40usize..700, 1 => 700usize..4000];
    let op = prop::sample::select(&Op::ALL[..]);
    let algorithms = [
        None,
        Some(Algorithm::OneShot),
        Some(Algorithm::TwoShot),
        Some(Algorithm::Star),
        Some(Algorithm::Ring),
        Some(Algorithm::RecursiveDoubling),
        Some(Algorithm::Hierarchical),
    ];
    let algorithm = prop::sample::select(algorithms.to_vec());
    (1usize..=8, count, prop::collection::vec(0usize..64, 8), op, algorithm, 64usize..4096, 0usize..4096, any::<u64>()).prop_map(
        |(ranks, count, skew, op, algorithm, chunk, one_shot_up_to, seed)| Call {
            ranks,
            count,
            skew,
            op,
            algorithm,
            chunk,
            one_shot_up_to,
            seed,
        },
    )
}

fn value<T: Model>(call: &Call, rank: usize, i: usize) -> T {
    T::of_seed(call.seed.wrapping_add((rank * 100_003 + i) as u64))
}

/// Runs the call on all ranks, each twice; gives what each rank got.
fn run<T: Model>(call: &Call) -> Vec<Vec<T>> {
    let options =
        Options { algorithm: call.algorithm, chunk: call.chunk, one_shot_up_to: call.one_shot_up_to, ..Options::default() };
    let size = T::KIND.size();
    std::thread::scope(|scope| {
        let threads: Vec<_> = loopback::group(call.ranks, 8 * call.ranks + 10, 4096)
            .into_iter()
            .enumerate()
            .map(|(rank, links)| {
                let options = options.clone();
                scope.spawn(move || {
                    let mut executor = Executor::new(links, options).unwrap();
                    // Bytes around the buffer must stay as they are.
                    let mut memory = vec![0xa5u8; 192 + call.count * size];
                    let line = memory.as_ptr().align_offset(64);
                    let start = line + call.skew[rank];
                    let buffer = start..start + call.count * size;
                    let mut answers = Vec::new();
                    for _ in 0..2 {
                        for i in 0..call.count {
                            let at = start + i * size;
                            memory[at..at + size].copy_from_slice(&value::<T>(call, rank, i).bytes());
                        }
                        let deadline = Instant::now() + Duration::from_secs(60);
                        executor.all_reduce_bytes(&mut memory[buffer.clone()], T::KIND, call.op, deadline).unwrap();
                        answers.push(memory[buffer.clone()].to_vec());
                    }
                    assert!(memory[..start].iter().chain(&memory[buffer.end..]).all(|b| *b == 0xa5), "wrote beside the buffer");
                    assert_eq!(answers[0], answers[1], "a repeat gave other bits");
                    answers[0].chunks_exact(size).map(T::of_bytes).collect::<Vec<T>>()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn check<T: Model>(call: &Call) -> Result<(), TestCaseError> {
    let results = run::<T>(call);
    let in_rank_order = call.algorithm.is_none_or(Algorithm::adds_in_rank_order);
    for (rank, result) in results.iter().enumerate() {
        for (i, got) in result.iter().enumerate() {
            let inputs: Vec<T> = (0..call.ranks).map(|r| value(call, r, i)).collect();
            prop_assert!(T::agrees(&inputs, call.op, *got), "rank {rank}, element {i}: {inputs:?} gave {got:?}");
            if in_rank_order {
                prop_assert_eq!(got.bytes(), results[0][i].bytes(), "ranks 0 and {} differ at {}", rank, i);
            }
        }
    }
    Ok(())
}

/// Calls a function of the type that a kind stands for.
macro_rules! of_kind {
    ($kind:expr, $check:ident, $call:expr) => {
        match $kind {
            Kind::F64 => $check::<f64>($call),
            Kind::F32 => $check::<f32>($call),
            Kind::F16 => $check::<f16>($call),
            Kind::BF16 => $check::<bf16>($call),
            Kind::I8 => $check::<i8>($call),
            Kind::I16 => $check::<i16>($call),
            Kind::I32 => $check::<i32>($call),
            Kind::I64 => $check::<i64>($call),
            Kind::U8 => $check::<u8>($call),
            Kind::U16 => $check::<u16>($call),
            Kind::U32 => $check::<u32>($call),
            Kind::U64 => $check::<u64>($call),
        }
    };
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn every_type_operation_count_place_and_algorithm_agrees_with_the_float64_model(call in calls(), kind in prop::sample::select(&Kind::ALL[..])) {
        of_kind!(kind, check, &call)?;
    }
}

/// What the reductions gave one rank: all-reduce with two buffers, reduce-scatter, reduce (at its root), and the first two straight from
/// registered buffers.
struct Given<T> {
    sum: Vec<T>,
    block: Vec<T>,
    root: Option<Vec<T>>,
    direct: Vec<T>,
    direct_block: Vec<T>,
}

/// Every reduction there is, of `call.count` elements a rank, with two buffers.
fn reduce_all<T: Model + Element>(call: &Call, root: usize) -> Vec<Given<T>> {
    let (n, count) = (call.ranks, call.ranks * call.count);
    let part = |odd: usize| (0..n).filter(|r| r % 2 == odd).map(|r| r.to_string()).collect::<Vec<_>>().join(" ");
    let tree: Option<Tree> = (n > 1).then(|| format!("(({}) ({}))", part(1), part(0)).parse().unwrap());
    let options = Options {
        algorithm: call.algorithm,
        chunk: call.chunk,
        direct_chunk: call.chunk,
        one_shot_up_to: call.one_shot_up_to,
        tree,
        ..Options::default()
    };
    let buffers = registered::in_one_process::<T>(n, count).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = loopback::group(n, 8 * n + 10, 4096)
            .into_iter()
            .zip(buffers)
            .enumerate()
            .map(|(rank, (links, mut buffer))| {
                let options = options.clone();
                scope.spawn(move || {
                    let mut executor = Executor::new(links, options).unwrap();
                    let soon = Instant::now() + Duration::from_secs(60);
                    let input: Vec<T> = (0..count).map(|i| value(call, rank, i)).collect();
                    let bits = |of: &[T]| of.iter().map(|x| x.bytes()).collect::<Vec<_>>();
                    let (mut sum, mut block) = (vec![T::of_seed(0); count], vec![T::of_seed(0); call.count]);
                    executor.all_reduce_into(&input, &mut sum, call.op, soon).unwrap();
                    executor.reduce_scatter(&input, &mut block, call.op, soon).unwrap();
                    let mut at_root = vec![T::of_seed(0); if rank == root { count } else { 0 }];
                    executor.reduce(&input, &mut at_root, call.op, root, soon).unwrap();
                    buffer.copy_from_slice(&input);
                    let mut direct_block = vec![T::of_seed(0); call.count];
                    executor.reduce_scatter_registered(&mut buffer, &mut direct_block, call.op, soon).unwrap();
                    let unchanged = bits(&buffer);
                    executor.all_reduce_registered(&mut buffer, call.op, soon).unwrap();
                    let own: Vec<_> = (0..count).map(|i| value::<T>(call, rank, i).bytes()).collect();
                    assert!(bits(&input) == own && unchanged == own, "an input was written to");
                    Given { sum, block, root: (rank == root).then_some(at_root), direct: buffer.to_vec(), direct_block }
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn check_all<T: Model + Element + PartialEq>(call: &Call) -> Result<(), TestCaseError> {
    let root = call.seed as usize % call.ranks;
    let given = reduce_all::<T>(call, root);
    // The bits of plans that add in rank order are the same whatever the collective and wherever the buffers lie; NaN is NaN.
    let is_nan = |x: T| x.ne(&x);
    let same = |a: T, b: T| a.bytes() == b.bytes() || is_nan(a) && is_nan(b);
    let in_rank_order = call.algorithm.is_none_or(Algorithm::adds_in_rank_order);
    for i in 0..call.ranks * call.count {
        let (owner, at) = (i / call.count, i % call.count);
        let inputs: Vec<T> = (0..call.ranks).map(|r| value(call, r, i)).collect();
        let block = &given[owner];
        let mut all = vec![("reduced", given[root].root.as_ref().unwrap()[i])];
        all.extend([("block", block.block[at]), ("block of registered", block.direct_block[at])]);
        all.extend(given.iter().flat_map(|of| [("all-reduce", of.sum[i]), ("all-reduce of registered", of.direct[i])]));
        for &(what, got) in &all {
            prop_assert!(T::agrees(&inputs, call.op, got), "{}, element {}: {:?} gave {:?}", what, i, inputs, got);
            if in_rank_order {
                let want = T::in_order(&inputs, call.op).unwrap_or(all[0].1);
                prop_assert!(
                    same(got, want),
                    "{}, element {}: {:?} gave {:?}, and {:?} in rank order",
                    what,
                    i,
                    inputs,
                    got,
                    want
                );
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_reduction_with_two_buffers_or_registered_ones_agrees_with_the_model_and_with_the_others(
        call in calls(),
        registered in any::<bool>(),
        ranks in 1usize..=16,
        block in 0usize..150,
        kind in prop::sample::select(&Kind::ALL[..]),
    ) {
        // Direct is taken where buffers are registered and no other algorithm is asked for; elsewhere it stands for the default.
        let algorithm = if registered { Some(Algorithm::Direct) } else { call.algorithm };
        let call = Call { ranks, count: block, algorithm, ..call };
        of_kind!(kind, check_all, &call)?;
    }
}

#[test]
fn the_model_is_not_content_with_anything() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    // Infinity is neither NaN nor its opposite, and comes from nowhere else.
    assert!(
        f32::agrees(&[inf, 2.0], Op::Sum, inf)
            && !f32::agrees(&[inf, 2.0], Op::Sum, nan)
            && !f32::agrees(&[inf, 2.0], Op::Sum, -inf)
    );
    assert!(!f32::agrees(&[inf, 2.0], Op::Sum, f32::MAX) && !f32::agrees(&[1.0, 2.0], Op::Sum, inf));
    assert!(f32::agrees(&[inf, -inf], Op::Sum, nan) && !f32::agrees(&[inf, -inf], Op::Sum, 0.0));
    assert!(f32::agrees(&[inf, -2.0], Op::Prod, -inf) && !f32::agrees(&[inf, -2.0], Op::Prod, inf));
    assert!(f32::agrees(&[inf, 0.0], Op::Prod, nan) && !f32::agrees(&[inf, 0.0], Op::Prod, inf));
    assert!(f16::agrees(&[f16::MAX, f16::MAX], Op::Sum, f16::INFINITY) && !f16::agrees(&[f16::MAX, f16::MAX], Op::Sum, f16::NAN));
    // Two of the greatest pass the range on the way, but in f32 a third brings them back.
    assert!(!f16::agrees(&[f16::MAX, f16::MAX, f16::MIN], Op::Sum, f16::NAN));
    // Zeros have a sign.
    assert!(f32::agrees(&[-0.0, -0.0], Op::Sum, -0.0) && !f32::agrees(&[-0.0, -0.0], Op::Sum, 0.0));
    assert!(f32::agrees(&[-0.0, 0.0], Op::Max, 0.0) && !f32::agrees(&[-0.0, 0.0], Op::Max, -0.0));
    assert!(f32::agrees(&[-0.0, 3.0], Op::Prod, -0.0) && !f32::agrees(&[-0.0, 3.0], Op::Prod, 0.0));
    assert!(!f32::agrees(&[1.0, 2.0], Op::Sum, 3.001));
    assert!(!f32::agrees(&[1.0, f32::NAN], Op::Max, 1.0));
    assert!(!bf16::agrees(&[bf16::from_f32(1.0), bf16::from_f32(2.0)], Op::Prod, bf16::from_f32(2.03)));
    assert!(!i8::agrees(&[100, 100], Op::Sum, 100));
    assert!(i8::agrees(&[100, 100], Op::Sum, -56));
    assert!(u16::agrees(&[7, 8], Op::Average, 7));
}
