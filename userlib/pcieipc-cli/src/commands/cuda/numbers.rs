// SPDX-License-Identifier: MIT OR Apache-2.0
//! Data for checks: the same everywhere from a seed, and its reduction by the library's own arithmetic.

use half::{bf16, f16};
use pcieipc::{
    plan::Form,
    reduce::{In, Isa, Kind, Op, Out, fold},
};

/// A stream of words (SplitMix64).
pub struct Words(pub u64);

impl Words {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// `count` elements of a type: floats of moderate size with all their bits used, integers of all sizes.
pub fn fill(kind: Kind, count: usize, seed: u64) -> Vec<u8> {
    let mut words = Words(seed);
    let mut bytes = Vec::with_capacity(count * kind.size());
    for _ in 0..count {
        let word = words.next();
        let real = (word >> 11) as f64 / (1u64 << 53) as f64 * 4.0 - 2.0;
        match kind {
            Kind::F64 => bytes.extend(real.to_le_bytes()),
            Kind::F32 => bytes.extend((real as f32).to_le_bytes()),
            Kind::F16 => bytes.extend(f16::from_f64(real).to_le_bytes()),
            Kind::BF16 => bytes.extend(bf16::from_f64(real).to_le_bytes()),
            _ => bytes.extend(&word.to_le_bytes()[..kind.size()]),
        }
    }
    bytes
}

/// What all ranks must get.
pub fn reduced(kind: Kind, op: Op, sources: &[Vec<u8>]) -> Vec<u8> {
    let mut result = vec![0u8; sources.first().map_or(0, Vec::len)];
    let inputs: Vec<In> = sources.iter().map(|s| In { ptr: s.as_ptr(), form: Form::Element }).collect();
    let outputs = [Out { ptr: result.as_mut_ptr(), form: Form::Element, stream: false }];
    let count = result.len() / kind.size();
    // SAFETY: all vectors have the same length and do not overlap; the instruction set was detected.
    unsafe { fold(Isa::detect(), kind, op, &inputs, &outputs, count, Some(sources.len())) };
    result
}
