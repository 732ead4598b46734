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
        let verdict = match wrong {
            _ if !job.check => "not checked",
            0 => "OK",
            _ => "FAILED",
        };
        let _ = writeln!(out, "# Out of bounds values : {wrong} {verdict}");
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

#[cfg(test)]
mod tests {
    use super::*;

    fn timing(us: f64, wrong: u64) -> Timing {
        Timing {
            seconds: us / 1e6,
            wrong,
            stored: 1.5,
            syscalls: 0.25,
            switches: 2.0,
            waiting: us / 4e6,
            combining: us / 2e6,
            publishing: us / 8e6,
        }
    }

    /// 8000 bytes in 2 µs are 4 GB/s; 16000 in 8 µs are 2.
    fn table(collective: &str, wrong: u64) -> Table {
        let first =
            Row { bytes: 8000, count: 2000, out_of_place: Some(timing(2.0, 0)), in_place: Some(timing(4.0, 0)), limit: None };
        let second = Row { bytes: 16000, count: 4000, out_of_place: Some(timing(8.0, wrong)), in_place: None, limit: None };
        Table { job: crate::bench::sample(collective, 4), rows: vec![first, second] }
    }

    fn words(text: &str) -> Vec<Vec<&str>> {
        text.lines().filter(|line| !line.starts_with('#')).map(|line| line.split_whitespace().collect()).collect()
    }

    #[test]
    fn the_columns_and_the_footer_are_those_of_nccl_tests() {
        let text = table("all-reduce", 0).text();
        let head = text.lines().find(|line| line.contains("redop")).unwrap();
        let half = ["time", "algbw", "busbw", "#wrong"];
        let columns = ["#", "size", "count", "type", "redop", "root"].into_iter().chain(half).chain(half);
        assert!(head.split_whitespace().eq(columns), "{head}");
        // Of 4 ranks the bus carries 2·3/4 of what the algorithm does.
        let rows = words(&text);
        let first = ["8000", "2000", "f32", "sum", "-1", "2.00", "4.00", "6.00", "0", "4.00", "2.00", "3.00", "0"];
        assert_eq!(rows[0], first);
        assert_eq!(rows[1], ["16000", "4000", "f32", "sum", "-1", "8.00", "2.00", "3.00", "0", "-", "-", "-", "-"]);
        assert!(text.contains("\n# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 4.0000\n"), "{text}");
        assert!(text.contains("per byte of a rank's result, at most : 1.50\n"), "{text}");
        assert!(text.contains("a call and rank, at most : 0.25 and 2.00\n"), "{text}");
        // Each column ends where its name does.
        let ends = |line: &str, name: &str| line.find(name).map(|at| at + name.len());
        let row = text.lines().find(|line| line.contains(" 8000 ")).unwrap();
        assert_eq!(ends(head, "size"), ends(row, "8000"));
        assert_eq!(ends(head, "count"), ends(row, "2000"));
        assert_eq!(ends(head, "redop"), ends(row, "sum"));
        assert_eq!(head.len(), row.len());
    }

    #[test]
    fn the_bus_carries_what_each_collective_needs_at_best() {
        let bus = [
            ("all-reduce", "6.0000"),
            ("reduce-scatter", "3.0000"),
            ("all-gather", "3.0000"),
            ("all-to-all", "3.0000"),
            ("reduce", "4.0000"),
            ("broadcast", "4.0000"),
        ];
        for (collective, busbw) in bus {
            let csv = table(collective, 0).csv();
            let row = csv.lines().nth(1).unwrap();
            assert_eq!(
                row,
                format!("8000,2000,f32,sum,4,Ordinary,out-of-place,2.000,4.0000,{busbw},0,1.500,0.250,2.000,0.500,1.000,0.250")
            );
            assert_eq!(csv.lines().count(), 4, "{csv}");
            let columns = |line: &str| line.split(',').count();
            assert!(csv.lines().all(|line| columns(line) == columns(row)), "{csv}");
        }
        let redop_and_root = |collective| words(&table(collective, 0).text())[0][3..5].join(" ");
        assert_eq!(["reduce", "broadcast", "all-gather"].map(redop_and_root), ["sum 1", "none 1", "none -1"]);
    }

    #[test]
    fn a_wrong_element_fails_in_every_format_and_what_was_not_checked_is_not_called_right() {
        let bad = table("all-reduce", 3);
        assert_eq!((bad.wrong(), &bad.json()["ok"]), (3, &false.into()));
        assert!(bad.text().contains("# Out of bounds values : 3 FAILED"), "{}", bad.text());
        assert_eq!(words(&bad.text())[1][8], "3");
        assert!(bad.csv().lines().nth(3).unwrap().contains(",3.0000,3,"), "{}", bad.csv());
        let mut unchecked = table("all-reduce", 0);
        unchecked.job.check = false;
        assert_eq!(words(&unchecked.text())[0][8], "N/A");
        assert!(!unchecked.text().contains("OK"), "{}", unchecked.text());
    }

    #[test]
    fn phases_are_microseconds_of_waiting_combining_and_publishing() {
        let text = table("all-reduce", 0).phases();
        assert_eq!(words(&text)[0], ["8000", "0.50", "1.00", "0.25", "1.00", "2.00", "0.50"]);
        assert_eq!(words(&text)[1], ["16000", "2.00", "4.00", "1.00", "-", "-", "-"]);
    }

    #[test]
    fn the_picture_has_a_curve_a_place_and_a_mark_a_size_further_right_and_up_with_size_and_time() {
        let svg = table("all-reduce", 0).plot();
        let mut reader = quick_xml::Reader::from_str(&svg);
        let (mut curves, mut marks) = (0, Vec::new());
        loop {
            match reader.read_event().unwrap() {
                quick_xml::events::Event::Eof => break,
                quick_xml::events::Event::Empty(tag) | quick_xml::events::Event::Start(tag) => match tag.name().as_ref() {
                    b"polyline" => curves += 1,
                    b"circle" => {
                        let number = |name: &str| {
                            let value = tag
                                .try_get_attribute(name)
                                .unwrap()
                                .unwrap()
                                .normalized_value(quick_xml::XmlVersion::Implicit1_0)
                                .unwrap();
                            value.parse::<f64>().unwrap()
                        };
                        marks.push((number("cx"), number("cy")));
                    }
                    _ => {}
                },
                _ => {}
            }
        }
        assert_eq!((curves, marks.len()), (2, 3), "{svg}");
        // 8000 bytes: 2 µs and in place 4; 16000: 8.
        let [small, large, in_place] = marks[..] else { panic!("{marks:?}") };
        assert!(large.0 > small.0 && large.1 < in_place.1 && in_place.1 < small.1 && small.0 == in_place.0, "{marks:?}");
    }
}
