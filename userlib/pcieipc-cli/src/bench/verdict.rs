// SPDX-License-Identifier: MIT OR Apache-2.0
//! Predictions beside measurements of the same plans on this machine.

use std::{fmt::Write, time::Duration};

use pcieipc::{
    executor::Options,
    plan::{Algorithm, Collective},
    tune::Explanation,
};
use serde_json::json;

use super::{Job, Memory, Over, measure};
use crate::{failure::Failure, supervisor::Interruption};

/// How far predictions are from what was measured.
#[derive(Debug)]
pub struct Verdict {
    rows: Vec<Row>,
    /// How much slower than the fastest that was measured the choice is, by size.
    choices: Vec<(usize, f64)>,
}

/// One algorithm at one size, with the default chunk.
#[derive(Debug)]
struct Row {
    bytes: usize,
    algorithm: Algorithm,
    predicted: f64,
    measured: f64,
}

impl Verdict {
    /// Measures what is predicted, wherever the plan has the default chunk.
    ///
    /// # Errors
    /// Use for other collectives than all-reduce and where nothing is predicted, Run when a rank fails.
    pub fn of(collective: Collective, ranks: usize, explained: &[(usize, Explanation)]) -> Result<Self, Failure> {
        if collective != Collective::AllReduce {
            return Err(Failure::Use("--validate measures all-reduce; leave --collective away".into()));
        }
        let chunk = Options::default().chunk;
        let mut algorithms: Vec<Algorithm> = Vec::new();
        for (_, row) in explained {
            for (choice, _) in &row.candidates {
                if !algorithms.contains(&choice.algorithm) {
                    algorithms.push(choice.algorithm);
                }
            }
        }
        if algorithms.is_empty() {
            return Err(Failure::Use(
                "nothing is predicted for more ranks than processors, so there is nothing to validate".into(),
            ));
        }
        let interruption = Interruption::catch()?;
        let mut rows = Vec::new();
        for algorithm in algorithms {
            let job = Job {
                ranks,
                over: Over::Shm,
                collective: collective.name().into(),
                kind: "f32".into(),
                op: "sum".into(),
                root: 0,
                algorithm: Some(algorithm.name().into()),
                calibration: None,
                checked: false,
                memory: Memory::Ordinary,
                sizes: explained.iter().map(|(size, _)| *size).collect(),
                time: Duration::from_millis(20),
                check: true,
                limit: false,
                trace: None,
            };
            eprintln!("measuring {algorithm} ...");
            let table = measure(&job, &interruption)?;
            for ((bytes, explained), measured) in explained.iter().zip(&table.rows) {
                let found = explained.candidates.iter().find(|(c, _)| c.algorithm == algorithm && c.chunk == chunk);
                // The model was calibrated by all-reduces in place.
                if let (Some((_, predicted)), Some(timing)) = (found, &measured.in_place) {
                    rows.push(Row { bytes: *bytes, algorithm, predicted: *predicted, measured: timing.seconds * 1e6 });
                }
            }
        }
        let choices = explained.iter().filter_map(|(bytes, explained)| {
            let of = |algorithm| rows.iter().find(|r| r.bytes == *bytes && r.algorithm == algorithm).map(|r| r.measured);
            let fastest = rows.iter().filter(|r| r.bytes == *bytes).map(|r| r.measured).reduce(f64::min)?;
            Some((*bytes, of(explained.choice.algorithm)? / fastest - 1.0))
        });
        let choices = choices.collect();
        Ok(Self { rows, choices })
    }

    fn errors(&self) -> impl Iterator<Item = f64> {
        self.rows.iter().map(|r| r.predicted / r.measured - 1.0)
    }

    /// The middle error (without its sign), and the least and greatest.
    fn summary(&self) -> (f64, f64, f64) {
        let mut sizes: Vec<f64> = self.errors().map(f64::abs).collect();
        sizes.sort_by(f64::total_cmp);
        let middle = sizes.get(sizes.len() / 2).copied().unwrap_or(f64::NAN);
        (middle, self.errors().fold(f64::INFINITY, f64::min), self.errors().fold(f64::NEG_INFINITY, f64::max))
    }

    /// A table.
    pub fn text(&self) -> String {
        let mut out = format!(
            "# predicted and measured (two ranks or more, in place)\n#{:>11}  {:<20}{:>14}{:>14}{:>9}\n",
            "size (B)", "algorithm", "predicted us", "measured us", "error"
        );
        for row in &self.rows {
            let error = (row.predicted / row.measured - 1.0) * 100.0;
            let _ = writeln!(
                out,
                "{:>12}  {:<20}{:>14.2}{:>14.2}{error:>8.0}%",
                row.bytes,
                row.algorithm.name(),
                row.predicted,
                row.measured
            );
        }
        let (middle, least, greatest) = self.summary();
        let _ = writeln!(
            out,
            "# error: {:.0} % in the middle, from {:+.0} to {:+.0} %",
            middle * 100.0,
            least * 100.0,
            greatest * 100.0
        );
        let good = self.choices.iter().filter(|(_, slower)| *slower <= 0.1).count();
        let worst = self.choices.iter().map(|(_, slower)| *slower).fold(0.0, f64::max);
        let _ = writeln!(
            out,
            "# the choice was within 10 % of the fastest that was measured at {good} of {} sizes, at worst {:.0} % slower",
            self.choices.len(),
            worst * 100.0
        );
        out
    }

    /// The same as data.
    pub fn json(&self) -> serde_json::Value {
        let (middle, least, greatest) = self.summary();
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|r| json!({ "bytes": r.bytes, "algorithm": r.algorithm.name(), "predicted_us": r.predicted, "measured_us": r.measured }))
            .collect();
        let choices: Vec<_> =
            self.choices.iter().map(|(bytes, slower)| json!({ "bytes": bytes, "slower_than_fastest": slower })).collect();
        json!({ "rows": rows, "choices": choices, "error_median": middle, "error_least": least, "error_greatest": greatest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_of_what_was_measured_and_choices_are_beside_the_fastest() {
        let row = |bytes, algorithm, predicted, measured| Row { bytes, algorithm, predicted, measured };
        let rows = vec![
            row(1024, Algorithm::OneShot, 5.0, 10.0),
            row(1024, Algorithm::TwoShot, 11.0, 10.0),
            row(4096, Algorithm::TwoShot, 25.0, 20.0),
        ];
        let verdict = Verdict { rows, choices: vec![(1024, 0.0), (4096, 0.5)] };
        let said = verdict.json();
        assert_eq!(
            (&said["error_least"], &said["error_median"], &said["error_greatest"]),
            (&(-0.5).into(), &0.25.into(), &0.25.into())
        );
        let text = verdict.text();
        assert!(text.contains("# error: 25 % in the middle, from -50 to +25 %"), "{text}");
        assert!(text.contains("within 10 % of the fastest that was measured at 1 of 2 sizes, at worst 50 % slower"), "{text}");
        assert!(text.lines().any(|l| l.split_whitespace().eq(["1024", "one-shot", "5.00", "10.00", "-50%"])), "{text}");
    }
}
