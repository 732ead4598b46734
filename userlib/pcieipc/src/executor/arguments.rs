// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments of one call, and the word by which ranks compare them.

use std::sync::Arc;

use crate::{
    error::{Error, Rank, Result},
    plan::{Collective, Plan},
    reduce::{Element, Kind, Op},
    registered::{Places, Registered},
};

/// One call's arguments. Private to the executor, so that the pointers never outlive the borrow they were made from.
#[derive(Debug, Clone)]
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
    /// Where the peers' registered buffers lie in this process, if they are.
    pub peers: Option<Arc<Places>>,
    /// A rank's input starts so many bytes times its number into its buffer.
    pub peer_stride: usize,
    /// Which registered buffers and which part of them, so that ranks see when they pass different ones.
    pub place: u64,
}

/// Who calls.
#[derive(Debug, Clone, Copy)]
pub struct Group {
    pub rank: Rank,
    pub ranks: usize,
}

impl Group {
    fn member(self, rank: Rank) -> Result<()> {
        if rank < self.ranks { Ok(()) } else { Err(Error::Argument(format!("no rank {rank} in a group of {}", self.ranks))) }
    }

    fn other(self, rank: Rank) -> Result<()> {
        self.member(rank)?;
        if rank == self.rank { Err(Error::Argument("a message to oneself".into())) } else { Ok(()) }
    }
}

/// A length that does not fit.
fn lengths(what: &str, input: usize, output: usize) -> Error {
    Error::Argument(format!("{input} elements in and {output} out do not fit {what}"))
}

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
            peers: None,
            peer_stride: 0,
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
            peers: None,
            peer_stride: 0,
            place: 0,
        }
    }

    #[inline]
    pub fn all_reduce<T: Element>(buffer: &mut [T], op: Op) -> Self {
        Self::in_place(Collective::AllReduce, T::KIND, buffer).with_op(op)
    }

    pub fn all_reduce_into<T: Element>(input: &[T], output: &mut [T], op: Op) -> Result<Self> {
        if input.len() != output.len() {
            return Err(lengths("an all-reduce, which keeps the length", input.len(), output.len()));
        }
        Ok(Self::between(Collective::AllReduce, input.len(), input, output).with_op(op))
    }

    pub fn all_reduce_registered<T: Element>(group: Group, buffer: &mut Registered<T>, op: Op) -> Result<Self> {
        let peers = Some(buffer.places().clone());
        Ok(Self { peers, ..Self::all_reduce_alone(group, buffer, op)? })
    }

    /// The same without the peers' places, which a short call has no use for: to hold them would be a good part of its time.
    pub fn all_reduce_alone<T: Element>(group: Group, buffer: &mut Registered<T>, op: Op) -> Result<Self> {
        let place = Self::place(group, buffer)?;
        Ok(Self { place, ..Self::all_reduce(buffer, op) })
    }

    pub fn broadcast_registered<T: Element>(group: Group, buffer: &mut Registered<T>, root: Rank) -> Result<Self> {
        let (peers, place) = Self::registered(group, buffer)?;
        Ok(Self { peers, place, ..Self::broadcast(group, buffer, root)? })
    }

    /// The input is this rank's block of the buffer.
    pub fn all_gather_registered<T: Element>(group: Group, buffer: &mut Registered<T>) -> Result<Self> {
        let (peers, place) = Self::registered(group, buffer)?;
        if buffer.len() % group.ranks != 0 {
            return Err(Error::Argument(format!("{} elements are not a block for each of {} ranks", buffer.len(), group.ranks)));
        }
        let block = buffer.len() / group.ranks;
        let peer_stride = block * size_of::<T>();
        let whole = Self::in_place(Collective::AllGather, T::KIND, buffer);
        let input = whole.input.wrapping_add(group.rank * peer_stride);
        Ok(Self { count: block, input, input_count: block, peers, peer_stride, place, ..whole })
    }

    pub fn reduce_scatter_registered<T: Element>(
        group: Group,
        input: &mut Registered<T>,
        output: &mut [T],
        op: Op,
    ) -> Result<Self> {
        let (peers, place) = Self::registered(group, input)?;
        Ok(Self { peers, place, ..Self::reduce_scatter(group, input, output, op)? })
    }

    /// Where all ranks' buffers lie in this process, and which one it is.
    fn registered<T: Element>(group: Group, buffer: &Registered<T>) -> Result<(Option<Arc<Places>>, u64)> {
        Ok((Some(buffer.places().clone()), Self::place(group, buffer)?))
    }

    /// Which of the group's registered buffers it is.
    fn place<T: Element>(group: Group, buffer: &Registered<T>) -> Result<u64> {
        if buffer.ranks() != group.ranks {
            let (of, ranks) = (buffer.ranks(), group.ranks);
            return Err(Error::Argument(format!("the buffer is registered among {of} ranks, not {ranks}")));
        }
        Ok(u64::from(buffer.number()) + 1)
    }

    pub fn reduce_scatter<T: Element>(group: Group, input: &[T], output: &mut [T], op: Op) -> Result<Self> {
        if Some(input.len()) != output.len().checked_mul(group.ranks) {
            return Err(lengths("a reduce-scatter, which takes one block for each rank", input.len(), output.len()));
        }
        Ok(Self::between(Collective::ReduceScatter, output.len(), input, output).with_op(op))
    }

    pub fn all_gather<T: Element>(group: Group, input: &[T], output: &mut [T]) -> Result<Self> {
        if Some(output.len()) != input.len().checked_mul(group.ranks) {
            return Err(lengths("an all-gather, which gives one block for each rank", input.len(), output.len()));
        }
        Ok(Self::between(Collective::AllGather, input.len(), input, output))
    }

    pub fn all_to_all<T: Element>(group: Group, input: &[T], output: &mut [T]) -> Result<Self> {
        if output.len() != input.len() || input.len() % group.ranks != 0 {
            return Err(lengths("an all-to-all, which exchanges one block with each rank", input.len(), output.len()));
        }
        Ok(Self::between(Collective::AllToAll, input.len() / group.ranks, input, output))
    }

    pub fn reduce<T: Element>(group: Group, input: &[T], output: &mut [T], op: Op, root: Rank) -> Result<Self> {
        group.member(root)?;
        let here = root == group.rank;
        if here && output.len() != input.len() {
            return Err(lengths("a reduce, which keeps the length", input.len(), output.len()));
        }
        let output = if here { output } else { &mut [] };
        Ok(Self::between(Collective::Reduce, input.len(), input, output).with_op(op).with_ranks(root, 0))
    }

    pub fn broadcast<T: Element>(group: Group, buffer: &mut [T], root: Rank) -> Result<Self> {
        group.member(root)?;
        let arguments = Self::in_place(Collective::Broadcast, T::KIND, buffer).with_ranks(root, 0);
        let input_count = if root == group.rank { arguments.input_count } else { 0 };
        Ok(Self { input_count, ..arguments })
    }

    pub fn send<T: Element>(group: Group, data: &[T], to: Rank) -> Result<Self> {
        group.other(to)?;
        Ok(Self::between(Collective::SendReceive, data.len(), data, &mut []).with_ranks(group.rank, to))
    }

    pub fn receive<T: Element>(group: Group, buffer: &mut [T], from: Rank) -> Result<Self> {
        group.other(from)?;
        Ok(Self::between(Collective::SendReceive, buffer.len(), &[], buffer).with_ranks(from, group.rank))
    }

    pub fn barrier() -> Self {
        Self::between::<u8>(Collective::Barrier, 0, &[], &mut [])
    }

    #[inline]
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
            shape.shares.fingerprint(),
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
    Error::Mismatch { rank, peer, what, ours, theirs, endpoint: None }
}
