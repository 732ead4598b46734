// SPDX-License-Identifier: MIT OR Apache-2.0
//! A job's rows as text, CSV, JSON and a picture.

use std::fmt::Write;

use serde_json::json;

use super::{Job, Row, Timing, picture};

/// What was measured.
#[derive(Debug)]
pub struct Table {
    /// Of what.
    pub job: Job,
    /// Size by size.
    pub rows: Vec<Row>,
}

impl Table {
    /// Bytes moved by each rank's link for each byte of the buffer, at best: busbw is algbw times this.
    fn bus_factor(&self) -> f64 {
        let n = self.job.ranks as f64;
        match self.job.collective.as_str() {
            "all-reduce" => 2.0 * (n - 1.0) / n,
            "reduce-scatter" | "all-gather" | "all-to-all" => (n - 1.0) / n,
            _ => 1.0,
        }
    }

    /// Wrong elements of all rows.
    pub fn wrong(&self) -> u64 {
        self.timings().map(|(_, t)| t.wrong).sum()
    }

    fn timings(&self) -> impl Iterator<Item = (&Row, &Timing)> {
        self.rows.iter().flat_map(|row| row.out_of_place.iter().chain(&row.in_place).map(move |t| (row, t)))
    }

    fn average_bus(&self) -> f64 {
        let all: Vec<f64> = self.timings().map(|(row, t)| row.bytes as f64 / t.seconds / 1e9 * self.bus_factor()).collect();
        all.iter().sum::<f64>() / all.len().max(1) as f64
    }

    /// The table that nccl-tests prints.
    pub fn text(&self) -> String {
        let job = &self.job;
        let mut out = format!(
            "# {} of {} ranks, {:?} memory, {}{}\n#\n",
            job.collective,
            job.ranks,
            job.memory,
            job.algorithm.as_deref().unwrap_or(if job.calibration.is_some() { "tuned" } else { "default algorithm" }),
            if job.checked { ", checked" } else { "" }
        );
        let _ = writeln!(out, "#{:>52}{:>38}", "out-of-place", "in-place");
        let half = format!("{:>10}{:>9}{:>9}{:>8}", "time", "algbw", "busbw", "#wrong");
        let _ = writeln!(out, "#{:>11}{:>13}{:>6}{:>7}{:>6}{half}  {half}", "size", "count", "type", "redop", "root");
        let units = format!("{:>10}{:>9}{:>9}{:>8}", "(us)", "(GB/s)", "(GB/s)", "");
        let _ = writeln!(out, "#{:>11}{:>13}{:>6}{:>7}{:>6}{units}  {units}", "(B)", "(elements)", "", "", "");
        for row in &self.rows {
            let half = |timing: Option<&Timing>| match timing {
                None => format!("{:>10}{:>9}{:>9}{:>8}", "-", "-", "-", "-"),
                Some(t) => {
                    let algbw = row.bytes as f64 / t.seconds / 1e9;
                    let wrong = if job.check { t.wrong.to_string() } else { "N/A".into() };
                    format!("{:>10.2}{algbw:>9.2}{:>9.2}{wrong:>8}", t.seconds * 1e6, algbw * self.bus_factor())
                }
            };
            let (redop, root) = match job.collective.as_str() {
                "reduce" => (job.op.as_str(), job.root.to_string()),
                "all-reduce" | "reduce-scatter" => (job.op.as_str(), "-1".into()),
                "broadcast" => ("none", job.root.to_string()),
                _ => ("none", "-1".into()),
            };
            let (first, second) = (half(row.out_of_place.as_ref()), half(row.in_place.as_ref()));
            let _ = writeln!(out, "{:>12}{:>13}{:>6}{redop:>7}{root:>6}{first}  {second}", row.bytes, row.count, job.kind);
        }
        let wrong = self.wrong();
        let _ = writeln!(out, "# Out of bounds values : {wrong} {}", if wrong == 0 { "OK" } else { "FAILED" });
        let _ = writeln!(out, "# Avg bus bandwidth    : {:.4}", self.average_bus());
        let most = |f: fn(&Timing) -> f64| self.timings().map(|(_, t)| f(t)).fold(0.0, f64::max);
        let _ = writeln!(out, "# Bytes stored per byte of a rank's result, at most : {:.2}", most(|t| t.stored));
        let _ = writeln!(
            out,
            "# System calls and context switches a call and rank, at most : {:.2} and {:.2}",
            most(|t| t.syscalls),
            most(|t| t.switches)
        );
        out
    }

    /// Where the time of a call went, averaged over ranks and some traced calls.
    pub fn phases(&self) -> String {
        let half = format!("{:>12}{:>12}{:>12}", "waiting", "combining", "publishing");
        let mut out = format!("# Microseconds a call and rank, traced\n#{:>37}{:>38}\n", "out-of-place", "in-place");
        let _ = writeln!(out, "#{:>11}{half}  {half}", "size");
        for row in &self.rows {
            let half = |timing: Option<&Timing>| match timing {
                None => format!("{:>12}{:>12}{:>12}", "-", "-", "-"),
                Some(t) => format!("{:>12.2}{:>12.2}{:>12.2}", t.waiting * 1e6, t.combining * 1e6, t.publishing * 1e6),
            };
            let (first, second) = (half(row.out_of_place.as_ref()), half(row.in_place.as_ref()));
            let _ = writeln!(out, "{:>12}{first}  {second}", row.bytes);
        }
        out
    }

    /// One line a size.
    pub fn csv(&self) -> String {
        let mut out = "bytes,count,type,op,ranks,memory,place,us,algbw,busbw,wrong,stored,syscalls,switches,waiting_us,combining_us,publishing_us\n".to_owned();
        for row in &self.rows {
            for (place, timing) in [("out-of-place", &row.out_of_place), ("in-place", &row.in_place)] {
                let Some(t) = timing else { continue };
                let algbw = row.bytes as f64 / t.seconds / 1e9;
                let (job, bus) = (&self.job, algbw * self.bus_factor());
                let _ = writeln!(
                    out,
                    "{},{},{},{},{},{:?},{place},{:.3},{algbw:.4},{bus:.4},{},{:.3},{:.3},{:.3},{:.3},{:.3},{:.3}",
                    row.bytes,
                    row.count,
                    job.kind,
                    job.op,
                    job.ranks,
                    job.memory,
                    t.seconds * 1e6,
                    t.wrong,
                    t.stored,
                    t.syscalls,
                    t.switches,
                    t.waiting * 1e6,
                    t.combining * 1e6,
                    t.publishing * 1e6
                );
            }
        }
        out
    }

    /// Everything.
    pub fn json(&self) -> serde_json::Value {
        json!({ "ok": self.wrong() == 0, "job": self.job, "rows": self.rows, "average_busbw": self.average_bus() })
    }

    /// Time against size.
    pub fn plot(&self) -> String {
        let line = |name: &str, pick: fn(&Row) -> Option<Timing>| picture::Line {
            name: name.into(),
            points: self.rows.iter().filter_map(|r| Some((r.bytes as f64, pick(r)?.seconds * 1e6))).collect(),
        };
        let lines = [line("out of place", |r| r.out_of_place), line("in place", |r| r.in_place)];
        picture::draw(&format!("{} of {} ranks", self.job.collective, self.job.ranks), &lines)
    }
}
