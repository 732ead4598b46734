// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-reduce against a float64 (for integers: exact) model, over group sizes, counts, offsets in memory, types, operations and algorithms.

use std::time::{Duration, Instant};

use half::{bf16, f16};
use pcieipc::{
    executor::{Executor, Options},
    loopback,
    plan::Algorithm,
    reduce::{Kind, Op},
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

/// Whether a float agrees with what float64 says: `unit` is half a unit in the last place of 1 where values accumulate, `last` that of the type,
/// `most` its greatest value, `least` its least step.
fn float_agrees(inputs: &[f64], op: Op, got: f64, [unit, last, most, least]: [f64; 4]) -> bool {
    let n = inputs.len() as f64;
    if let Op::Min | Op::Max = op {
        if inputs.iter().any(|x| x.is_nan()) {
            return got.is_nan();
        }
        let pick = if op == Op::Min { f64::min } else { f64::max };
        return got == inputs.iter().copied().reduce(pick).unwrap();
    }
    let (want, sizes) = match op {
        Op::Prod => (inputs.iter().product::<f64>(), inputs.iter().product::<f64>().abs()),
        _ => (inputs.iter().sum::<f64>(), inputs.iter().map(|x| x.abs()).sum::<f64>()),
    };
    let (want, sizes) = if op == Op::Average { (want / n, sizes / n) } else { (want, sizes) };
    if want.is_nan() {
        return got.is_nan();
    }
    // A product may leave the type's range on the way and not come back, and lose all its digits near zero.
    if op == Op::Prod {
        let mut reach = (0f64, f64::INFINITY);
        inputs.iter().fold(1.0, |a, x| {
            let p = f64::abs(a * x);
            reach = (reach.0.max(p), reach.1.min(p));
            a * x
        });
        if reach.0 > most / 4.0 || reach.1 < least * 1e8 {
            return true;
        }
    }
    if want.is_infinite() || want.abs() > most {
        return got == want || got.is_infinite() && got.signum() == want.signum() || got.abs() >= most * 0.99 || got.is_nan();
    }
    if sizes > most / 4.0 {
        // Sums of that size may pass the greatest value on the way.
        return true;
    }
    (got - want).abs() <= (n + 1.0) * unit * sizes + last * want.abs() + least
}

macro_rules! floats {
    ($($t:ty => $kind:ident, $bits:ty, $limits:expr, $to:expr, $from:expr);*) => { $(
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
                float_agrees(&inputs, op, to(got), $limits)
            }
        }
    )* };
}
const F32: f64 = f32::EPSILON as f64;
floats!(
    // The model itself is float64, in another order.
    f64 => F64, u64, [2.0 * f64::EPSILON, f64::EPSILON, f64::MAX, f64::MIN_POSITIVE], |x| x, |x| x;
    f32 => F32, u32, [F32, F32, f32::MAX as f64, f32::MIN_POSITIVE as f64], f64::from, |x| x as f32;
    f16 => F16, u16, [F32, 1.0 / 2048.0, 65504.0, 6e-8], f16::to_f64, f16::from_f64;
    bf16 => BF16, u16, [F32, 1.0 / 256.0, 3.38e38, 1e-40], bf16::to_f64, bf16::from_f64
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn every_type_operation_count_place_and_algorithm_agrees_with_the_float64_model(call in calls(), kind in prop::sample::select(&Kind::ALL[..])) {
        match kind {
            Kind::F64 => check::<f64>(&call)?,
            Kind::F32 => check::<f32>(&call)?,
            Kind::F16 => check::<f16>(&call)?,
            Kind::BF16 => check::<bf16>(&call)?,
            Kind::I8 => check::<i8>(&call)?,
            Kind::I16 => check::<i16>(&call)?,
            Kind::I32 => check::<i32>(&call)?,
            Kind::I64 => check::<i64>(&call)?,
            Kind::U8 => check::<u8>(&call)?,
            Kind::U16 => check::<u16>(&call)?,
            Kind::U32 => check::<u32>(&call)?,
            Kind::U64 => check::<u64>(&call)?,
        }
    }
}

#[test]
fn the_model_is_not_content_with_anything() {
    assert!(!f32::agrees(&[1.0, 2.0], Op::Sum, 3.001));
    assert!(!f32::agrees(&[1.0, f32::NAN], Op::Max, 1.0));
    assert!(!bf16::agrees(&[bf16::from_f32(1.0), bf16::from_f32(2.0)], Op::Prod, bf16::from_f32(2.03)));
    assert!(!i8::agrees(&[100, 100], Op::Sum, 100));
    assert!(i8::agrees(&[100, 100], Op::Sum, -56));
    assert!(u16::agrees(&[7, 8], Op::Average, 7));
}
