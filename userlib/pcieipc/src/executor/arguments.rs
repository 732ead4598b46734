// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments of one call, and the word by which ranks compare them.

use super::MAX_RANKS;
use crate::{
    error::{Error, Rank},
    plan::{Collective, Plan},
    reduce::{Element, Kind, Op},
};

/// One call's arguments. Private to the executor, so that the pointers never outlive the borrow they were made from.
#[derive(Debug, Clone, Copy)]
pub struct Arguments {
    pub collective: Collective,
    pub kind: Kind,
    pub op: Op,
    /// What the plan's shape counts.
    pub count: usize,
    pub root: Rank,
    pub peer: Rank,
    pub input: *const u8,
    pub input_count: usize,
    pub output: *mut u8,
    pub output_count: usize,
    /// Where the peers' registered inputs and outputs lie in this process; null where there are none.
    pub peers: ([*const u8; MAX_RANKS], [*const u8; MAX_RANKS]),
    /// Which registered buffers and which part of them, so that ranks see when they pass different ones.
    pub place: u64,
}

const NO_PEERS: ([*const u8; MAX_RANKS], [*const u8; MAX_RANKS]) = ([std::ptr::null(); MAX_RANKS], [std::ptr::null(); MAX_RANKS]);

impl Arguments {
    /// One buffer as input and output. The caller holds the borrow until the call has ended. `S` is `kind`'s type, or bytes.
    pub fn in_place<S>(collective: Collective, kind: Kind, buffer: &mut [S]) -> Self {
        let count = size_of_val(buffer) / kind.size();
        let pointer = buffer.as_mut_ptr().cast::<u8>();
        let (input, output) = (pointer.cast_const(), pointer);
        Self {
            collective,
            kind,
            op: Op::Sum,
            count,
            root: 0,
            peer: 0,
            input,
            input_count: count,
            output,
            output_count: count,
            peers: NO_PEERS,
            place: 0,
        }
    }

    /// Two buffers. The caller holds both borrows until the call has ended.
    pub fn between<T: Element>(collective: Collective, count: usize, input: &[T], output: &mut [T]) -> Self {
        Self {
            collective,
            kind: T::KIND,
            op: Op::Sum,
            count,
            root: 0,
            peer: 0,
            input: input.as_ptr().cast(),
            input_count: input.len(),
            output: output.as_mut_ptr().cast(),
            output_count: output.len(),
            peers: NO_PEERS,
            place: 0,
        }
    }

    pub fn with_op(self, op: Op) -> Self {
        Self { op, ..self }
    }

    pub fn with_ranks(self, root: Rank, peer: Rank) -> Self {
        Self { root, peer, ..self }
    }

    /// The word that every record of the call carries: type, operation and collective in clear, so that a disagreement can be
    /// named, and a hash of everything else.
    pub fn word(&self, plan: &Plan) -> u32 {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        let shape = &plan.shape;
        for value in [
            plan.algorithm as usize,
            shape.ranks,
            shape.count,
            shape.chunk,
            shape.root,
            shape.peer,
            plan.depth,
            self.place as usize,
        ] {
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
        ("count, root or algorithm (compared by hash)", format!("{:05x}", ours & 0xf_ffff), format!("{:05x}", theirs & 0xf_ffff))
    };
    Error::Mismatch { rank, peer, what, ours, theirs }
}
