// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the ranks of a benchmark put in and what must come out of it.

use pcieipc::{
    plan::Collective,
    reduce::{Element, Op},
};

/// The greatest number that every type holds, and every type exactly.
const MOST: usize = i8::MAX as usize;

/// An element that small whole numbers can be made of.
pub trait Number: Element + PartialEq + Default {
    /// This number.
    fn of(value: u8) -> Self;
}

macro_rules! numbers {
    ($($t:ty),*) => { $(impl Number for $t { fn of(value: u8) -> Self { Self::from(value) } })* };
}
numbers!(f64, f32, half::f16, half::bf16, i16, i32, i64, u8, u16, u32, u64);
impl Number for i8 {
    fn of(value: u8) -> Self {
        value as i8
    }
}

/// The inputs and the right outputs of one collective, seen from one rank. Neighbours differ, ranks differ, and no rank's input is the
/// result, so that data that is left where it was, moved, left out or taken twice shows; and no operation leaves what every type holds.
#[derive(Debug, Clone, Copy)]
pub struct Answers {
    /// What is called.
    pub collective: Collective,
    /// The operation.
    pub op: Op,
    /// The root, where there is one.
    pub root: usize,
    /// How many ranks.
    pub ranks: usize,
    /// Whose inputs and outputs.
    pub rank: usize,
}

impl Answers {
    /// What this rank puts in.
    pub fn inputs<T: Number>(&self, count: usize) -> Vec<T> {
        (0..count).map(|i| T::of(self.value(self.rank, i) as u8)).collect()
    }

    /// How many elements of this rank's output are not what they must be.
    pub fn wrong<T: Number>(&self, output: &[T]) -> u64 {
        if self.collective == Collective::Reduce && self.rank != self.root {
            return 0;
        }
        let block = (output.len() / self.ranks).max(1);
        let want = |i: usize| match self.collective {
            Collective::AllReduce | Collective::Reduce => self.combined(i),
            Collective::ReduceScatter => self.combined(self.rank * output.len() + i),
            Collective::AllGather => self.value(i / block, i % block),
            Collective::AllToAll => self.value(i / block, self.rank * block + i % block),
            _ => self.value(self.root, i),
        };
        output.iter().enumerate().filter(|(i, x)| **x != T::of(want(*i) as u8)).count() as u64
    }

    /// Element `i` of a rank's input.
    fn value(&self, rank: usize, i: usize) -> usize {
        let share = MOST / self.ranks;
        // One rank's turn at each element: the others give what alone would be another result.
        let turn = (i + rank) % self.ranks == 0;
        if !self.collective.reduces() {
            return scattered(i, rank) % (MOST + 1);
        }
        match self.op {
            Op::Sum => scattered(i, rank) % (share + 1),
            Op::Prod => 1 + if turn { scattered(i, 0) % MOST } else { 0 },
            Op::Min | Op::Max => scattered(i, rank) % (MOST + 1),
            // The answer is one more than what all have in common.
            Op::Average => scattered(i, 0) % share + if turn { self.ranks } else { 0 },
        }
    }

    /// All ranks' elements `i`, combined.
    fn combined(&self, i: usize) -> usize {
        let values = (0..self.ranks).map(|rank| self.value(rank, i));
        match self.op {
            Op::Sum => values.sum(),
            Op::Prod => values.product(),
            Op::Min => values.min().unwrap_or(0),
            Op::Max => values.max().unwrap_or(0),
            Op::Average => values.sum::<usize>() / self.ranks,
        }
    }
}

/// A number without a pattern in `i` or `rank` (the last steps of splitmix64).
fn scattered(i: usize, rank: usize) -> usize {
    let mut x = (i as u64).wrapping_add((rank as u64) << 48).wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (x >> 33) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNT: usize = 48;
    const COLLECTIVES: [Collective; 6] = [
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::Reduce,
        Collective::Broadcast,
        Collective::AllToAll,
    ];

    fn all() -> impl Iterator<Item = Answers> {
        let groups = (1..=16).flat_map(|ranks| [0, ranks / 2, ranks - 1].map(|rank| (ranks, rank)));
        groups.flat_map(|(ranks, rank)| {
            COLLECTIVES.into_iter().flat_map(move |collective| {
                let root = if collective == Collective::Reduce { rank } else { ranks / 3 };
                Op::ALL.map(|op| Answers { collective, op, root, ranks, rank })
            })
        })
    }

    /// What the collective makes of the inputs, by its definition, in numbers that nothing overflows.
    fn run(answers: &Answers, inputs: &[Vec<i64>]) -> Vec<i64> {
        let (n, rank) = (answers.ranks, answers.rank);
        let fold = |i: usize| {
            let all = inputs.iter().map(|of| of[i]);
            match answers.op {
                Op::Sum => all.sum(),
                Op::Prod => all.product(),
                Op::Min => all.min().unwrap(),
                Op::Max => all.max().unwrap(),
                Op::Average => all.sum::<i64>() / n as i64,
            }
        };
        let block = COUNT / n;
        match answers.collective {
            Collective::AllReduce | Collective::Reduce => (0..COUNT).map(fold).collect(),
            Collective::ReduceScatter => (rank * block..(rank + 1) * block).map(fold).collect(),
            Collective::AllGather => inputs.iter().flat_map(|of| of[..block].to_vec()).collect(),
            Collective::AllToAll => inputs.iter().flat_map(|of| of[rank * block..(rank + 1) * block].to_vec()).collect(),
            _ => inputs[answers.root].clone(),
        }
    }

    fn inputs(answers: &Answers) -> Vec<Vec<i64>> {
        (0..answers.ranks).map(|rank| Answers { rank, ..*answers }.inputs(COUNT)).collect()
    }

    fn wrong(answers: &Answers, output: &[i64]) -> u64 {
        answers.wrong(output)
    }

    #[test]
    fn what_a_collective_makes_of_the_inputs_is_right_and_fits_into_every_type() {
        for answers in all() {
            let output = run(&answers, &inputs(&answers));
            assert_eq!(wrong(&answers, &output), 0, "{answers:?}");
            assert!(inputs(&answers).iter().flatten().chain(&output).all(|x| (0..=127).contains(x)), "{answers:?}");
            if answers.op != Op::Prod && answers.collective.reduces() {
                let sums = (0..COUNT).map(|i| inputs(&answers).iter().map(|of| of[i]).sum::<i64>());
                assert!(answers.op == Op::Min || answers.op == Op::Max || sums.max() <= Some(127), "{answers:?}");
            }
        }
    }

    #[test]
    fn every_single_wrong_element_is_counted() {
        for answers in all() {
            let mut output = run(&answers, &inputs(&answers));
            for i in 0..output.len() {
                output[i] ^= 1;
                assert_eq!(wrong(&answers, &output), i as u64 + 1, "{answers:?}");
            }
        }
    }

    #[test]
    fn data_that_is_moved_or_left_alone_is_counted() {
        for answers in all() {
            let output = run(&answers, &inputs(&answers));
            let mut found = vec![("all zero", vec![0; output.len()])];
            for by in 1..output.len() {
                let mut shifted = output.clone();
                shifted.rotate_left(by);
                found.push(("shifted", shifted));
            }
            for len in [4, 8, 16].into_iter().filter(|len| 2 * len <= output.len()) {
                let mut swapped = output.clone();
                let (left, right) = swapped.split_at_mut(len);
                left.swap_with_slice(&mut right[..len]);
                found.push(("two chunks swapped", swapped));
            }
            if answers.collective == Collective::AllReduce && answers.ranks > 1 {
                found.push(("the input", inputs(&answers)[answers.rank].clone()));
            }
            for (what, output) in found {
                assert!(wrong(&answers, &output) > 0, "{what}: {answers:?}");
            }
        }
    }

    #[test]
    fn a_rank_left_out_or_taken_in_the_place_of_another_is_counted() {
        for answers in all().filter(|a| a.collective.reduces() && a.ranks > 1) {
            for who in 0..answers.ranks {
                // Each rank must have a least or greatest element, or a factor, among those that are looked at.
                let few = answers.ranks > 8 && !matches!(answers.op, Op::Sum | Op::Average);
                if few || answers.collective == Collective::ReduceScatter {
                    continue;
                }
                let all = inputs(&answers);
                let (mut without, mut twice) = (all.clone(), all.clone());
                let other = usize::from(who == 0);
                match answers.op {
                    Op::Prod => without[who].fill(1),
                    Op::Min | Op::Max => without[who].copy_from_slice(&all[other]),
                    _ => without[who].fill(0),
                }
                twice[other].clone_from(&all[who]);
                assert!(wrong(&answers, &run(&answers, &without)) > 0, "without rank {who}: {answers:?}");
                assert!(wrong(&answers, &run(&answers, &twice)) > 0, "rank {who} twice: {answers:?}");
            }
        }
    }
}
