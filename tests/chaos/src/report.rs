// SPDX-License-Identifier: MIT OR Apache-2.0
//! All records of all machines, summed up: the table, and `report.json`.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::{
    judge::{self, Outcome},
    record::Record,
    schedule::Kind,
};

/// What begins a line that holds a [`Record`] in a machine's output.
pub const RECORD: &str = "chaos-record ";
/// What begins the line that holds what was left in the end.
pub const LEFT: &str = "chaos-left ";

/// Some durations, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// How many there are.
    pub count: usize,
    /// The middle one.
    pub median: f64,
    /// One in a hundred is longer.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

impl Spread {
    /// Of these, in nanoseconds.
    pub fn of(mut all: Vec<u64>) -> Option<Self> {
        all.sort_unstable();
        let at = |share: usize| all.get((all.len() * share).div_ceil(100).max(1) - 1).map(|ns| *ns as f64 / 1e6);
        Some(Self { count: all.len(), median: at(50)?, p99: at(99)?, max: at(100)? })
    }
}

/// All faults of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Which.
    pub kind: Kind,
    /// How many.
    pub count: usize,
    /// Of these, with a collective in flight.
    pub in_flight: usize,
    /// Until the last rank knew.
    pub detected_ms: Option<Spread>,
    /// Until all ranks were back at work; for faults that nobody may notice, until the rounds after it were compared.
    pub recovered_ms: Option<Spread>,
    /// From the endpoint's return, or the order to meet, until all ranks were back at work.
    pub after_return_ms: Option<Spread>,
    /// From the order to shrink until the survivors were at work.
    pub shrunk_ms: Option<Spread>,
    /// After which all ranks were back.
    pub all_back: usize,
    /// Wrong sums.
    pub wrong: u64,
    /// Ranks that did not answer.
    pub hangs: usize,
    /// After which more was held than before.
    pub leaks: usize,
    /// That went otherwise than the kind must.
    pub otherwise: usize,
}

/// What one machine did.
#[derive(Clone, Debug, Default, Serialize)]
pub struct MachineRun {
    /// Its name.
    pub name: String,
    /// Faults that it was to play.
    pub planned: usize,
    /// Its records.
    #[serde(skip)]
    pub records: Vec<Record>,
    /// Faults that it played.
    pub played: usize,
    /// Lines of the kernel's log that a healthy kernel never says.
    pub kernel_reports: Vec<String>,
    /// What was left in the end.
    pub leaks: Vec<String>,
    /// Why the run as a whole is no good, such as a machine that did not come to its end.
    pub complaints: Vec<String>,
    /// How long it ran.
    pub seconds: f64,
}

/// Everything.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// Faults played.
    pub faults: usize,
    /// Which kernel.
    pub kernel: String,
    /// Sums compared.
    pub compared: u64,
    /// Wrong sums.
    pub wrong: u64,
    /// Ranks that did not answer, and machines that did not end.
    pub hangs: usize,
    /// Lines of kernel logs that a healthy kernel never says.
    pub kernel_reports: usize,
    /// Faults after which more was held than before, and machines in which something was left.
    pub leaks: usize,
    /// Faults that went otherwise than their kind must, and complaints of machines.
    pub otherwise: usize,
    /// Until the last rank knew, over all faults that are told by the tree or a process's end.
    pub detected_ms: Option<Spread>,
    /// Answers after their deadline, no memory pressure.
    pub overrun_ms: Option<Spread>,
    /// By kind.
    pub rows: Vec<Row>,
    /// By machine.
    pub machines: Vec<MachineRun>,
    /// All that was wrong, with the fault that it followed.
    pub problems: Vec<String>,
}

/// Reads a machine's output.
pub fn read(name: &str, output: &str) -> MachineRun {
    let mut run = MachineRun { name: name.into(), ..MachineRun::default() };
    for line in output.lines() {
        if let Some(record) = line.strip_prefix(RECORD) {
            match serde_json::from_str(record) {
                Ok(record) => run.records.push(record),
                Err(error) => run.complaints.push(format!("a record that cannot be read: {error}")),
            }
        } else if let Some(left) = line.strip_prefix(LEFT) {
            let left: Option<Left> = serde_json::from_str(left).ok();
            let Some(left) = left else { continue };
            run.planned = left.planned;
            run.leaks = left.leaks;
        }
    }
    run.played = run.records.len();
    run
}

/// What a machine says last.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Left {
    /// Faults that it was to play.
    pub planned: usize,
    /// What was still held.
    pub leaks: Vec<String>,
}

fn is_told(kind: Kind) -> bool {
    // A stopped process is told by the deadline alone.
    kind != Kind::Stop && matches!(judge::outcome(kind, false), Outcome::Told(_) | Outcome::Bereft(_))
}

fn row(kind: Kind, records: &[&Record]) -> Row {
    let spread = |of: &dyn Fn(&Record) -> Option<u64>| Spread::of(records.iter().filter_map(|record| of(record)).collect());
    Row {
        kind,
        count: records.len(),
        in_flight: records.iter().filter(|record| record.in_flight).count(),
        detected_ms: spread(&Record::detected_ns),
        recovered_ms: spread(&Record::recovered_ns),
        after_return_ms: spread(&Record::after_return_ns),
        shrunk_ms: spread(&Record::shrunk_within_ns),
        all_back: records.iter().filter(|record| record.back_ns.is_some()).count(),
        wrong: records.iter().map(|record| record.wrong).sum(),
        hangs: records.iter().map(|record| record.hangs.len()).sum(),
        leaks: records.iter().filter(|record| !record.leaks.is_empty()).count(),
        otherwise: records.iter().filter(|record| !record.complaints.is_empty()).count(),
    }
}

/// Sums up.
pub fn sum_up(seed: u64, kernel: &str, machines: Vec<MachineRun>) -> Report {
    let records: Vec<&Record> = machines.iter().flat_map(|machine| &machine.records).collect();
    let of = |kind: Kind| -> Vec<&Record> {
        records.iter().copied().filter(|record| record.fault.is_some_and(|fault| fault.kind == kind)).collect()
    };
    let rows: Vec<Row> = Kind::ALL.into_iter().map(|kind| row(kind, &of(kind))).filter(|row| row.count > 0).collect();
    let detected = records.iter().filter(|record| record.fault.is_some_and(|fault| is_told(fault.kind)));
    let overruns = records.iter().filter(|record| record.fault.is_some_and(|fault| fault.kind != Kind::MemoryPressure));
    let mut problems = Vec::new();
    for machine in &machines {
        for record in machine.records.iter().filter(|record| !record.is_good()) {
            let name = record.fault.map_or("?", |fault| fault.kind.name());
            let number = record.fault.map_or(0, |fault| fault.number);
            let mut say = |what: &str| problems.push(format!("{}, fault {number}, {name}: {what}", machine.name));
            if record.wrong > 0 {
                say(&format!("{} wrong sums", record.wrong));
            }
            record.hangs.iter().chain(&record.leaks).chain(&record.complaints).for_each(|what| say(what));
        }
        let whole = machine.complaints.iter().chain(&machine.leaks).chain(&machine.kernel_reports);
        problems.extend(whole.map(|what| format!("{}: {what}", machine.name)));
    }
    Report {
        seed,
        faults: records.len(),
        kernel: kernel.into(),
        compared: records.iter().map(|record| record.compared).sum(),
        wrong: rows.iter().map(|row| row.wrong).sum(),
        hangs: rows.iter().map(|row| row.hangs).sum::<usize>()
            + machines.iter().filter(|machine| machine.played < machine.planned || machine.planned == 0).count(),
        kernel_reports: machines.iter().map(|machine| machine.kernel_reports.len()).sum(),
        leaks: rows.iter().map(|row| row.leaks).sum::<usize>()
            + machines.iter().map(|machine| machine.leaks.len()).sum::<usize>(),
        otherwise: rows.iter().map(|row| row.otherwise).sum::<usize>()
            + machines.iter().map(|machine| machine.complaints.len()).sum::<usize>(),
        detected_ms: Spread::of(detected.filter_map(|record| record.detected_ns()).collect()),
        overrun_ms: Spread::of(overruns.flat_map(|record| record.overruns_ns.iter().copied()).collect()),
        rows,
        problems,
        machines,
    }
}

impl Report {
    /// Whether all went as it must.
    pub fn is_good(&self) -> bool {
        self.wrong == 0 && self.hangs == 0 && self.kernel_reports == 0 && self.leaks == 0 && self.otherwise == 0
    }

    /// For people.
    pub fn table(&self) -> String {
        let mut text = String::new();
        let line = |text: &mut String, cells: [String; 11]| {
            let [kind, rest @ ..] = cells;
            let _ = write!(text, "{kind:<16}");
            for (cell, width) in rest.iter().zip([6, 10, 19, 19, 15, 15, 6, 6, 6, 10]) {
                let _ = write!(text, "{cell:>width$}");
            }
            text.push('\n');
        };
        let heads = [
            "fault",
            "count",
            "in flight",
            "detected within",
            "recovered within",
            "after return",
            "after shrink",
            "wrong",
            "hangs",
            "leaks",
            "otherwise",
        ];
        line(&mut text, heads.map(str::to_owned));
        let both = |spread: Option<Spread>| spread.map_or("-".into(), |s| format!("{} / {}", time(s.median), time(s.max)));
        let middle = |spread: Option<Spread>| spread.map_or("-".into(), |s| time(s.median));
        for row in &self.rows {
            let cells = [
                row.kind.name().into(),
                row.count.to_string(),
                row.in_flight.to_string(),
                both(row.detected_ms),
                both(row.recovered_ms),
                middle(row.after_return_ms),
                middle(row.shrunk_ms),
                row.wrong.to_string(),
                row.hangs.to_string(),
                row.leaks.to_string(),
                row.otherwise.to_string(),
            ];
            line(&mut text, cells);
        }
        text.push_str("times: median / longest, or the median; detected: until the last rank knew\n");
        for machine in &self.machines {
            let _ = writeln!(
                text,
                "{:<40} {} of {} faults in {:.0} s, {} kernel reports",
                machine.name,
                machine.played,
                machine.planned,
                machine.seconds,
                machine.kernel_reports.len()
            );
        }
        let _ = writeln!(
            text,
            "seed {}, {} faults, {} sums compared: {} wrong, {} hangs, {} leaks, {} kernel reports, {} otherwise",
            self.seed, self.faults, self.compared, self.wrong, self.hangs, self.leaks, self.kernel_reports, self.otherwise
        );
        if let Some(detected) = self.detected_ms {
            let _ = writeln!(text, "known to all ranks: median {}, 99 % {}", time(detected.median), time(detected.p99));
        }
        match self.overrun_ms {
            Some(over) => {
                let (p99, max) = (time(over.p99), time(over.max));
                let _ =
                    writeln!(text, "{} answers after their deadline: 99 % by at most {p99}, all by at most {max}", over.count);
            }
            None => text.push_str("no answer came after its deadline\n"),
        }
        text
    }
}

fn time(ms: f64) -> String {
    match ms {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 1000.0 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{record::Seen, schedule::Fault};

    fn record(kind: Kind) -> Record {
        let fault = Fault { number: 3, kind, victim: 0, in_flight: true, amount: 0 };
        Record { fault: Some(fault), seen: vec![Seen::default()], back_ns: Some(2_000_000), in_flight: true, ..Record::default() }
    }

    fn machine(records: Vec<Record>) -> MachineRun {
        let planned = records.len();
        MachineRun { name: "m".into(), planned, played: planned, records, ..MachineRun::default() }
    }

    #[test]
    fn a_spread_is_of_what_was_measured() {
        let spread = Spread::of((1..=200).map(|ms| ms * 1_000_000).collect()).unwrap();
        assert_eq!((spread.count, spread.median, spread.p99, spread.max), (200, 100.0, 198.0, 200.0));
        assert_eq!(Spread::of(vec![]), None);
        assert_eq!(Spread::of(vec![7_000_000]).unwrap().p99, 7.0);
    }

    #[test]
    fn anything_wrong_anywhere_makes_the_report_bad_and_is_told() {
        assert!(sum_up(1, "k", vec![machine(vec![record(Kind::Kill)])]).is_good());
        let bad: [fn(&mut Record); 4] = [
            |r| r.wrong = 1,
            |r| r.hangs.push("rank 2 did not answer".into()),
            |r| r.leaks.push("one page".into()),
            |r| r.complaints.push("rank 1 was not told".into()),
        ];
        for spoil in bad {
            let mut spoiled = record(Kind::Fatal);
            spoil(&mut spoiled);
            let report = sum_up(1, "k", vec![machine(vec![spoiled])]);
            assert!(!report.is_good() && report.problems.len() == 1, "{report:?}");
        }
        let mut whole = machine(vec![record(Kind::Kill)]);
        whole.kernel_reports.push("BUG: x".into());
        assert!(!sum_up(1, "k", vec![whole]).is_good());
    }

    #[test]
    fn a_machine_that_did_not_come_to_its_end_is_a_hang() {
        let mut short = machine(vec![record(Kind::Kill)]);
        short.planned = 2;
        assert_eq!(sum_up(1, "k", vec![short]).hangs, 1);
        assert_eq!(sum_up(1, "k", vec![read("m", "it never said anything\n")]).hangs, 1);
    }

    #[test]
    fn records_are_read_back_from_the_output_of_a_machine() {
        let line = format!("{RECORD}{}", serde_json::to_string(&record(Kind::Death)).unwrap());
        let left = format!("{LEFT}{}", serde_json::to_string(&Left { planned: 1, leaks: vec![] }).unwrap());
        let run = read("m", &format!("# words\n{line}\n{left}\n"));
        assert_eq!((run.records, run.planned, run.played), (vec![record(Kind::Death)], 1, 1));
    }

    #[test]
    fn the_table_has_a_row_for_each_kind() {
        let report = sum_up(9, "k", vec![machine(vec![record(Kind::Kill), record(Kind::Death), record(Kind::Kill)])]);
        let table = report.table();
        assert!(table.contains("kill                 2") && table.contains("death                1"), "{table}");
        assert!(table.contains("seed 9, 3 faults"), "{table}");
    }
}
