// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments of one call, and the word by which ranks compare them.

use crate::{
    error::{Error, Rank},
    plan::{Collective, Plan},
    reduce::{Kind, Op},
};

/// One call's arguments. Private to the executor, so that the pointers never outlive the borrow they were made from.
#[derive(Debug, Clone, Copy)]
pub struct Arguments {
    pub collective: Collective,
    pub kind: Kind,
    pub op: Op,
    pub input: *const u8,
    pub input_count: usize,
    pub output: *mut u8,
    pub output_count: usize,
}

impl Arguments {
    /// # Safety
    /// `input` is readable for `input_count` elements of `kind` and `output` writable for `output_count`, exclusively, for as
    /// long as the arguments are used. They are the same memory or do not overlap.
    pub unsafe fn new(
        collective: Collective,
        kind: Kind,
        op: Op,
        input: *const u8,
        input_count: usize,
        output: *mut u8,
        output_count: usize,
    ) -> Self {
        Self { collective, kind, op, input, input_count, output, output_count }
    }

    /// The word that every record of the call carries: type, operation and collective in clear, so that a disagreement can be
    /// named, and a hash of everything else.
    pub fn word(&self, plan: &Plan) -> u32 {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for value in [plan.algorithm as usize, plan.ranks, plan.input, plan.output, plan.chunk] {
            hash = (hash ^ value as u64).wrapping_mul(0x0000_0100_0000_01b3);
            hash ^= hash >> 29;
        }
        let named = (self.kind as u32) | (self.op as u32) << 4 | (self.collective as u32) << 8;
        named << 20 | (hash as u32 ^ (hash >> 32) as u32) & 0xf_ffff
    }
}

/// Says on what two ranks disagree whose words differ.
pub fn mismatch(rank: Rank, peer: Rank, ours: u32, theirs: u32) -> Error {
    let field = |word: u32, shift: u32| (word >> (20 + shift)) & 15;
    let kind = |w: u32| Kind::from_code(field(w, 0) as u8).map_or("an unknown type", Kind::name);
    let op = |w: u32| Op::from_code(field(w, 4) as u8).map_or("an unknown operation", Op::name);
    let (what, ours, theirs) = if field(ours, 8) != field(theirs, 8) {
        ("the collective", format!("number {}", field(ours, 8)), format!("number {}", field(theirs, 8)))
    } else if field(ours, 0) != field(theirs, 0) {
        ("the element type", kind(ours).into(), kind(theirs).into())
    } else if field(ours, 4) != field(theirs, 4) {
        ("the operation", op(ours).into(), op(theirs).into())
    } else {
        ("count, algorithm or chunk (compared by hash)", format!("{:05x}", ours & 0xf_ffff), format!("{:05x}", theirs & 0xf_ffff))
    };
    Error::Mismatch { rank, peer, what, ours, theirs }
}
