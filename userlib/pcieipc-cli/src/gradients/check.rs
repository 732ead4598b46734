// SPDX-License-Identifier: MIT OR Apache-2.0
//! The independent judgement: every element of a sum against the same sum in float64.

use super::Number;

/// How the elements of one tensor compare with the float64 sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Judgement {
    /// Elements that differ by more than rounding can explain.
    pub wrong: u64,
    /// The largest difference.
    pub worst: f64,
}

/// Compares `sum` with the float64 sum of `inputs`, all bytes of the same type and count.
///
/// An element is wrong when it is farther from the float64 sum than the arithmetic allows: n − 1 additions in single precision
/// in any order err by at most (n − 1) u/(1 − (n − 1) u) · Σ|x|, with u = 2⁻²⁴; a 16-bit type then rounds once, by half a unit of its last
/// place. A sum that may pass the largest single-precision number on its way may end as an infinity or NaN. Nothing is left for a second rounding, a lost shard or a term added twice to hide in, but for terms below that bound.
pub fn judge(number: Number, inputs: &[Vec<u8>], sum: &[u8]) -> Judgement {
    let mut judgement = Judgement::default();
    let width = number.bytes();
    let count = inputs.iter().map(Vec::len).min().unwrap_or(0) / width;
    if sum.len() != count * width {
        return Judgement { wrong: count.max(sum.len() / width) as u64, worst: f64::INFINITY };
    }
    for index in 0..count {
        let (mut exact, mut size) = (0f64, 0f64);
        for input in inputs {
            let value = element(number, input, index);
            exact += value;
            size += value.abs();
        }
        let got = element(number, sum, index);
        let off = (got - exact).abs();
        let good = match exact.is_finite() {
            true => off <= bound(number, inputs.len(), exact, size) || size > f64::from(f32::MAX) && !got.is_finite(),
            false => same_special(got, exact),
        };
        if !good {
            judgement.wrong += 1;
        }
        if off > judgement.worst {
            judgement.worst = off;
        }
    }
    judgement
}

fn bound(number: Number, ranks: usize, exact: f64, size: f64) -> f64 {
    let unit = 2f64.powi(-24);
    let steps = ranks.saturating_sub(1) as f64 * unit;
    let added = steps / (1.0 - steps) * size;
    let rounded = match number {
        Number::F32 => 0.0,
        // Half a unit of the last of bf16's 8 significant bits, of a value as large as the single-precision sum may be; below the
        // smallest normal number the unit stays the same.
        Number::Bf16 => (2f64.powi(-8) / (1.0 + 2f64.powi(-8)) * (exact.abs() + added)).max(2f64.powi(-134)),
    };
    added + rounded
}

fn same_special(got: f64, exact: f64) -> bool {
    got == exact || got.is_nan() && exact.is_nan()
}

fn element(number: Number, bytes: &[u8], index: usize) -> f64 {
    let at = index * number.bytes();
    match (number, bytes.get(at..at + number.bytes())) {
        (Number::F32, Some(&[a, b, c, d])) => f64::from(f32::from_le_bytes([a, b, c, d])),
        (Number::Bf16, Some(&[a, b])) => half::bf16::from_le_bytes([a, b]).to_f64(),
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn bf16s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect()
    }

    #[test]
    fn single_precision_sums_in_any_order_are_right() {
        let inputs: Vec<Vec<f32>> = vec![vec![1e7, -3.3e-5], vec![0.1, 7.7e-6], vec![-1e7, 1.0], vec![0.3, -1.0]];
        let bytes: Vec<_> = inputs.iter().map(|values| f32s(values)).collect();
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3], [1, 3, 0, 2]] {
            let sums: Vec<f32> = (0..2).map(|at| order.iter().fold(0f32, |sum, &rank| sum + inputs[rank][at])).collect();
            assert_eq!(judge(Number::F32, &bytes, &f32s(&sums)).wrong, 0, "{order:?}");
        }
    }

    #[test]
    fn a_rank_left_out_or_added_twice_is_wrong_in_every_element() {
        let bytes = [f32s(&[1.0, -2.0, 0.5]), f32s(&[0.25, 4.0, 8.0])];
        assert_eq!(judge(Number::F32, &bytes, &bytes[0]).wrong, 3);
        assert_eq!(judge(Number::F32, &bytes, &f32s(&[1.5, 6.0, 16.5])).wrong, 3);
        assert_eq!(judge(Number::F32, &bytes, &f32s(&[1.25, 2.0, 8.5])), Judgement::default());
    }

    #[test]
    fn one_flipped_bit_of_the_upper_mantissa_is_wrong() {
        let bytes = [f32s(&[1.0]), f32s(&[2.0])];
        let flipped = f32::from_bits(3f32.to_bits() ^ 1 << 4);
        assert_eq!(judge(Number::F32, &bytes, &f32s(&[flipped])).wrong, 1);
    }

    #[test]
    fn bf16_rounded_once_is_right_and_rounded_at_every_hop_is_wrong() {
        // 1 + three times 2⁻⁸: once rounded 1.0117…, at every hop it stays at 1.
        let inputs = [1.0f32, 0.00390625, 0.00390625, 0.00390625];
        let bytes = inputs.map(|value| bf16s(&[value]));
        assert_eq!(judge(Number::Bf16, &bytes, &bf16s(&[inputs.iter().sum()])).wrong, 0);
        assert_eq!(judge(Number::Bf16, &bytes, &bf16s(&[1.0])).wrong, 1);
    }

    #[test]
    fn an_overflow_on_the_way_is_no_error_of_the_transport() {
        let bytes = [f32s(&[f32::MAX, 1.0]), f32s(&[f32::MAX, 1.0]), f32s(&[-f32::MAX, 1.0])];
        assert_eq!(judge(Number::F32, &bytes, &f32s(&[f32::INFINITY, 3.0])).wrong, 0);
        assert_eq!(judge(Number::F32, &bytes, &f32s(&[f32::MAX, f32::INFINITY])).wrong, 1);
    }

    #[test]
    fn a_short_sum_is_wrong_and_a_lost_nan_too() {
        let bytes = [f32s(&[1.0, f32::NAN]), f32s(&[2.0, 1.0])];
        assert_eq!(judge(Number::F32, &bytes, &f32s(&[3.0])).wrong, 2);
        assert_eq!(judge(Number::F32, &bytes, &f32s(&[3.0, 1.0])).wrong, 1);
        assert_eq!(judge(Number::F32, &bytes, &f32s(&[3.0, f32::NAN])).wrong, 0);
    }
}
