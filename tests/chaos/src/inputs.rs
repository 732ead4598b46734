// SPDX-License-Identifier: MIT OR Apache-2.0
//! What ranks bring to a call, and the sum that they must get: made here, without the library.

/// Which call it is; every input depends on all of it, so that data of another call is a wrong sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Counts the groups of a run.
    pub epoch: u32,
    /// Counts the calls of a group.
    pub round: u32,
}

/// How many elements a call has: from one to some rings full, the small ones more often.
pub fn count(call: Call) -> usize {
    const COUNTS: [usize; 8] = [1, 33, 1000, 4096, 777, 16_384, 2, 40_961];
    COUNTS[(mixed(call, 0, 0) >> 7) as usize % COUNTS.len()]
}

fn mixed(call: Call, member: usize, at: usize) -> u32 {
    let mut x = (at as u32).wrapping_mul(0x9e37_79b1)
        ^ (member as u32 + 1).wrapping_mul(0x85eb_ca6b)
        ^ call.round.wrapping_mul(0xc2b2_ae35)
        ^ call.epoch.wrapping_mul(0x27d4_eb2f);
    x ^= x >> 15;
    x = x.wrapping_mul(0x2c1b_3c6d);
    x ^ (x >> 13)
}

/// What `member` brings at place `at`: whole numbers, of which any sum is exact in single precision.
pub fn value(call: Call, member: usize, at: usize) -> i32 {
    (mixed(call, member, at) & 0xfff) as i32 - 2048
}

/// The buffer that `member` brings.
pub fn fill(call: Call, member: usize, buffer: &mut Vec<f32>) {
    buffer.clear();
    buffer.extend((0..count(call)).map(|at| value(call, member, at) as f32));
}

/// Elements of `sum` that are not the sum over `members`, and where the first is.
pub fn wrong(call: Call, members: &[usize], sum: &[f32]) -> (usize, usize) {
    let mut wrong = usize::from(sum.len() != count(call));
    let mut first = usize::MAX;
    for (at, &got) in sum.iter().enumerate() {
        let right: i32 = members.iter().map(|&member| value(call, member, at)).sum();
        if got != right as f32 {
            wrong += 1;
            first = first.min(at);
        }
    }
    (wrong, first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summed(call: Call, members: &[usize]) -> Vec<f32> {
        let mut sum = vec![0.0; count(call)];
        let mut buffer = Vec::new();
        for &member in members {
            fill(call, member, &mut buffer);
            sum.iter_mut().zip(&buffer).for_each(|(sum, value)| *sum += value);
        }
        sum
    }

    #[test]
    fn a_sum_of_another_call_of_fewer_ranks_or_with_one_bit_changed_is_wrong() {
        let call = (0..).map(|round| Call { epoch: 3, round }).find(|call| count(*call) == 1000).unwrap();
        let members = [0, 1, 2, 3];
        let mut sum = summed(call, &members);
        assert_eq!(wrong(call, &members, &sum).0, 0);
        assert!(wrong(call, &[0, 1, 3], &sum).0 > 900);
        let earlier = Call { round: call.round.wrapping_sub(1), ..call };
        let stale: Vec<f32> = (0..1000).map(|at| members.iter().map(|m| value(earlier, *m, at)).sum::<i32>() as f32).collect();
        assert!(wrong(call, &members, &stale).0 > 900);
        sum[77] = f32::from_bits(sum[77].to_bits() ^ 1);
        assert_eq!(wrong(call, &members, &sum), (1, 77));
    }
}
