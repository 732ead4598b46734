// SPDX-License-Identifier: MIT OR Apache-2.0

use half::{bf16, f16};

use super::*;

fn isas() -> Vec<Isa> {
    let mut all = vec![Isa::Baseline];
    if Isa::detect() != Isa::Baseline {
        all.push(Isa::Avx2);
    }
    if Isa::detect() == Isa::Avx512 {
        all.push(Isa::Avx512);
    }
    all
}

#[cfg(all(target_arch = "x86_64", pcieipc_avx512))]
#[test]
fn the_kernels_for_avx_512_are_among_those_tested_where_the_processor_has_it() {
    let has = std::is_x86_feature_detected!("avx512bw") && std::is_x86_feature_detected!("avx512vl");
    assert_eq!(isas().contains(&Isa::Avx512), has);
}

fn fold_vecs<T: Element>(isa: Isa, op: Op, sources: &[Vec<T>], divisor: Option<usize>) -> Vec<T> {
    let mut out = sources[0].clone();
    let ins: Vec<In> = sources.iter().map(|s| In { ptr: s.as_ptr().cast(), form: Form::Element }).collect();
    let outs = [Out::new(out.as_mut_ptr().cast(), Form::Element)];
    // SAFETY: all vectors have the same length and `isa` is one that was detected.
    unsafe { fold(isa, T::KIND, op, &ins, &outs, sources[0].len(), divisor) };
    out
}

#[test]
fn f32_sums_equal_a_sequential_sum_bit_for_bit_on_every_instruction_set() {
    for len in [0, 1, 63, 64, 65, 1000] {
        let sources: Vec<Vec<f32>> =
            (0..5).map(|r| (0..len).map(|i| (i as f32 + 0.1) * (r as f32 - 1.7) * 1e3).collect()).collect();
        let want: Vec<f32> = (0..len).map(|i| sources[1..].iter().fold(sources[0][i], |a, s| a + s[i])).collect();
        for isa in isas() {
            assert_eq!(fold_vecs(isa, Op::Sum, &sources, None), want, "{isa:?} {len}");
        }
    }
}

#[test]
fn sixteen_bit_floats_accumulate_in_f32_and_round_once() {
    let sources: Vec<Vec<bf16>> = [256.0, 0.75, 0.75].iter().map(|&x| vec![bf16::from_f32(x); 70]).collect();
    let halves: Vec<Vec<f16>> = [2048.0, 0.75, 0.75].iter().map(|&x| vec![f16::from_f32(x); 70]).collect();
    for isa in isas() {
        // Rounded at each addition, 256 + 0.75 would stay 256 or jump to 258 by another way; the f32 sum is 257.5 -> 258.
        assert_eq!(fold_vecs(isa, Op::Sum, &sources, None), vec![bf16::from_f32(257.5); 70]);
        assert_eq!(fold_vecs(isa, Op::Sum, &halves, None), vec![f16::from_f32(2049.5); 70]);
    }
}

#[test]
fn min_and_max_propagate_nan_and_order_zeros_in_whole_vectors_and_in_what_is_left_over() {
    fn on<T: Element>(of: fn(f32) -> T, to: fn(T) -> f32) {
        // Seven cases, so that each comes to each lane; the expected ones by what IEEE 754-2019 calls minimum and maximum.
        let nan = f32::NAN;
        let a = [nan, 1.0, 0.0, -0.0, f32::NEG_INFINITY, 2.0, nan];
        let b = [1.0, nan, -0.0, 0.0, 1.0, 3.0, nan];
        let least = [nan, nan, -0.0, -0.0, f32::NEG_INFINITY, 2.0, nan];
        let most = [nan, nan, 0.0, 0.0, 1.0, 3.0, nan];
        let long = |of_them: [f32; 7], len: usize| (0..len).map(|i| of_them[i % 7]).collect::<Vec<f32>>();
        for (isa, len) in isas().into_iter().flat_map(|isa| [7, 64, 7 * 64 + 5].map(|len| (isa, len))) {
            let sources = [a, b].map(|x| long(x, len).into_iter().map(of).collect::<Vec<T>>());
            for (op, want) in [(Op::Min, least), (Op::Max, most)] {
                for (i, (got, want)) in fold_vecs(isa, op, &sources, None).into_iter().map(to).zip(long(want, len)).enumerate() {
                    let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                    assert!(same, "{:?} {isa:?} {op:?}, element {i} of {len}: {got} instead of {want}", T::KIND);
                }
            }
        }
    }
    on::<f32>(|x| x, |x| x);
    on::<f64>(f64::from, |x| x as f32);
    on::<f16>(f16::from_f32, f16::to_f32);
    on::<bf16>(bf16::from_f32, bf16::to_f32);
}

#[test]
fn integers_wrap_and_averages_truncate() {
    for isa in isas() {
        assert_eq!(fold_vecs(isa, Op::Sum, &[vec![i8::MAX; 65], vec![1; 65]], None), vec![i8::MIN; 65]);
        assert_eq!(fold_vecs(isa, Op::Prod, &[vec![u64::MAX; 65], vec![3; 65]], None), vec![u64::MAX.wrapping_mul(3); 65]);
        assert_eq!(fold_vecs(isa, Op::Average, &[vec![-4i32; 65], vec![-3; 65]], Some(2)), vec![-3; 65]);
        assert_eq!(fold_vecs(isa, Op::Average, &[vec![1f64; 65], vec![2.0; 65]], Some(2)), vec![1.5; 65]);
    }
}

#[test]
fn misaligned_sources_and_targets_give_the_same_bits() {
    let bytes: Vec<u8> = (0..4 * 200 + 3).map(|i| (i * 37 % 251) as u8).collect();
    let mut want: Option<Vec<u8>> = None;
    for isa in isas() {
        for skew in [0, 1, 2, 3, 16, 64] {
            let mut moved = vec![0u8; skew];
            moved.extend_from_slice(&bytes[..800]);
            let mut out = vec![0u8; 864];
            let ins = [In { ptr: moved[skew..].as_ptr(), form: Form::Element }; 2];
            let outs = [Out { stream: true, ..Out::new(out[skew..].as_mut_ptr(), Form::Element) }];
            // SAFETY: 200 u32 fit behind each pointer.
            unsafe { fold(isa, Kind::U32, Op::Sum, &ins, &outs, 200, None) };
            let got = out[skew..skew + 800].to_vec();
            assert_eq!(*want.get_or_insert_with(|| got.clone()), got);
        }
    }
}

#[test]
fn every_half_is_the_same_on_every_instruction_set() {
    let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let zeros = vec![f16::from_bits(0x8000); all.len()];
    for isa in isas() {
        let sums = fold_vecs(isa, Op::Sum, &[all.clone(), zeros.clone()], None);
        for (before, after) in all.iter().zip(sums) {
            assert!(before.to_bits() == after.to_bits() || before.is_nan() && after.is_nan(), "{isa:?} {before:?}");
        }
        let doubled = fold_vecs(isa, Op::Sum, &[all.clone(), all.clone()], None);
        for (before, after) in all.iter().zip(doubled) {
            let want = f16::from_f32(before.to_f32() * 2.0);
            assert!(want.to_bits() == after.to_bits() || want.is_nan() && after.is_nan(), "{isa:?} {before:?}");
        }
    }
}
