// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the ranks' reports say about each tensor, taken together.

use std::time::Duration;

use comfy_table::{CellAlignment, Table, TableComponent, presets};
use serde::Serialize;

use crate::{
    gradients::{Number, Tensor},
    ranks::{Counters, TensorDone},
};

/// One tensor, over all ranks.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Its name.
    pub tensor: String,
    /// Its type.
    pub number: Number,
    /// Bytes of one rank's tensor.
    pub bytes: usize,
    /// From the first rank's start to the last rank's end.
    pub seconds: f64,
    /// Sums over the ranks.
    #[serde(flatten)]
    pub counters: Counters,
    /// Elements that were not right, over all ranks; `None` when nobody checked.
    pub wrong: Option<u64>,
    /// The largest difference from the float64 sum.
    pub worst: Option<f64>,
    /// Whether all ranks hold the same bits.
    pub same_bits: bool,
}

/// Collects reports until every rank has spoken about every tensor.
#[derive(Debug)]
pub struct Tally {
    tensors: Vec<(String, Number, usize)>,
    done: Vec<Vec<TensorDone>>,
}

impl Tally {
    /// For these tensors.
    pub fn new(tensors: &[Tensor]) -> Self {
        Self {
            tensors: tensors.iter().map(|tensor| (tensor.name.clone(), tensor.number, tensor.bytes)).collect(),
            done: vec![Vec::new(); tensors.len()],
        }
    }

    /// Takes one report.
    pub fn add(&mut self, done: TensorDone) {
        if let Some(of) = self.done.get_mut(done.index) {
            of.push(done);
        }
    }

    /// How many reports of all tensors have come.
    pub fn reports(&self) -> usize {
        self.done.iter().map(Vec::len).sum()
    }

    /// One row a tensor that anybody reported.
    pub fn rows(&self) -> Vec<Row> {
        self.tensors
            .iter()
            .zip(&self.done)
            .filter(|(_, done)| !done.is_empty())
            .map(|((tensor, number, bytes), done)| Row {
                tensor: tensor.clone(),
                number: *number,
                bytes: *bytes,
                seconds: span(done).as_secs_f64(),
                counters: done.iter().fold(Counters::default(), |sum, one| sum.plus(one.counters)),
                wrong: done.iter().map(|one| one.judgement.map(|judgement| judgement.wrong)).sum(),
                worst: done
                    .iter()
                    .map(|one| one.judgement.map(|judgement| judgement.worst))
                    .try_fold(0f64, |worst, one| Some(worst.max(one?))),
                same_bits: done.windows(2).all(|pair| matches!(pair, [one, other] if one.digest == other.digest)),
            })
            .collect()
    }

    /// Seconds from the first start to the last end.
    pub fn seconds(&self) -> f64 {
        let all: Vec<TensorDone> = self.done.iter().flatten().copied().collect();
        span(&all).as_secs_f64()
    }
}

fn span(done: &[TensorDone]) -> Duration {
    let start = done.iter().map(|one| one.start_ns).min().unwrap_or(0);
    let end = done.iter().map(|one| one.end_ns).max().unwrap_or(0);
    Duration::from_nanos(end.saturating_sub(start))
}

/// What all rows come to.
#[derive(Debug, Clone, Serialize)]
pub struct Total {
    /// Bytes of one rank's tensors.
    pub bytes: usize,
    /// Sums over ranks and tensors.
    #[serde(flatten)]
    pub counters: Counters,
    /// Elements that were not right; `None` when nobody checked.
    pub wrong: Option<u64>,
    /// Whether all ranks hold the same bits of everything.
    pub same_bits: bool,
}

/// Adds rows up.
pub fn total(rows: &[Row]) -> Total {
    Total {
        bytes: rows.iter().map(|row| row.bytes).sum(),
        counters: rows.iter().fold(Counters::default(), |sum, row| sum.plus(row.counters)),
        wrong: rows.iter().map(|row| row.wrong).sum(),
        same_bits: rows.iter().all(|row| row.same_bits),
    }
}

/// The table that a person reads.
pub fn table(rows: &[Row], total: &Total, seconds: f64) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    for between_rows in [TableComponent::HorizontalLines, TableComponent::MiddleIntersections] {
        table.remove_style(between_rows);
    }
    table.set_header(["tensor", "type", "bytes", "time", "doorbells", "interrupts", "wakeups", "wrong"]);
    let wrong = |wrong: Option<u64>| wrong.map_or_else(|| "unchecked".into(), |wrong| wrong.to_string());
    for row in rows {
        table.add_row([
            row.tensor.clone(),
            format!("{:?}", row.number).to_lowercase(),
            row.bytes.to_string(),
            time(row.seconds),
            row.counters.doorbells.to_string(),
            row.counters.interrupts.to_string(),
            row.counters.wakeups.to_string(),
            wrong(row.wrong),
        ]);
    }
    table.add_row([
        format!("all {}", rows.len()),
        String::new(),
        total.bytes.to_string(),
        time(seconds),
        total.counters.doorbells.to_string(),
        total.counters.interrupts.to_string(),
        total.counters.wakeups.to_string(),
        wrong(total.wrong),
    ]);
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// A time with three significant digits and a fitting unit.
pub fn time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s < 1e-3 => (s * 1e6, "µs"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    let digits = match value {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits_and_a_unit() {
        let told = [3.21e-6, 0.000_999_6, 0.007_001, 0.0137, 0.793_08, 10.0, 123.4].map(time);
        assert_eq!(told, ["3.21 µs", "1000 µs", "7.00 ms", "13.7 ms", "793 ms", "10.0 s", "123 s"]);
    }
}
