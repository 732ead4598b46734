// SPDX-License-Identifier: MIT OR Apache-2.0
//! The picture: when each fault came, and who saw what after how long.

use std::fmt::Write as _;

use crate::{record::Record, report::Report, schedule::Kind};

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 190.0;
const PANEL: f64 = 300.0;
/// Decades of the vertical axis: 0.1 ms to 1000 s.
const DECADES: (f64, f64) = (-1.0, 6.0);

const COLOURS: [&str; 20] = [
    "#1f77b4", "#ff7f0e", "#d62728", "#7f0000", "#9467bd", "#8c564b", "#e377c2", "#000000", "#7f7f7f", "#bcbd22", "#17becf",
    "#2ca02c", "#98df8a", "#ff1493", "#c49c94", "#b8860b", "#4b0082", "#9edae5", "#006400", "#aec7e8",
];

fn colour(kind: Kind) -> &'static str {
    COLOURS[Kind::ALL.iter().position(|one| *one == kind).unwrap_or(0)]
}

/// Draws one panel a machine: across, the time of the fault; up, the time after it. A dot is a rank that was told, a bar ends where all
/// ranks were back at work, and a cross is something that went wrong.
pub fn draw(report: &Report) -> String {
    let height = 60.0 + PANEL * report.machines.len() as f64 + 20.0;
    let mut svg = String::new();
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{} faults, seed {}: {} wrong sums, {} hangs, {} leaks, {} kernel reports</text>\n\
         <text x=\"{LEFT}\" y=\"40\">across: when the fault came; up: how long after it a rank was told (dot, one a rank) and all ranks were back \
         at work (bar); cross: something went wrong</text>",
        report.faults, report.seed, report.wrong, report.hangs, report.leaks, report.kernel_reports
    );
    for (number, kind) in report.rows.iter().map(|row| row.kind).enumerate() {
        let y = 70.0 + 16.0 * number as f64;
        let x = WIDTH - RIGHT + 20.0;
        let _ = writeln!(svg, "<circle cx=\"{x}\" cy=\"{y}\" r=\"4\" fill=\"{}\"/>", colour(kind));
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{}\">{}</text>", x + 10.0, y + 4.0, kind.name());
    }
    for (number, machine) in report.machines.iter().enumerate() {
        panel(&mut svg, 60.0 + PANEL * number as f64, &machine.name, &machine.records);
    }
    svg.push_str("</svg>\n");
    svg
}

fn up(top: f64, ns: u64) -> f64 {
    let decade = (ns.max(1) as f64 / 1e6).log10().clamp(DECADES.0, DECADES.1);
    top + 20.0 + (PANEL - 55.0) * (1.0 - (decade - DECADES.0) / (DECADES.1 - DECADES.0))
}

fn panel(svg: &mut String, top: f64, name: &str, records: &[Record]) {
    let end = records.iter().map(|record| record.at_ns.saturating_sub(record.run_ns)).max().unwrap_or(0).max(1);
    let across = |record: &Record| LEFT + (WIDTH - LEFT - RIGHT) * record.at_ns.saturating_sub(record.run_ns) as f64 / end as f64;
    let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"{}\" font-weight=\"bold\">{}</text>", top + 12.0, escaped(name));
    for (decade, label) in (-1..=6).zip(["0.1 ms", "1 ms", "10 ms", "100 ms", "1 s", "10 s", "100 s", "1000 s"]) {
        let y = up(top, 10f64.powi(decade + 6) as u64);
        let _ = writeln!(svg, "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>", WIDTH - RIGHT);
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", LEFT - 6.0, y + 4.0);
    }
    let foot = top + PANEL - 20.0;
    let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"{foot}\">0 s</text>");
    let seconds = end as f64 / 1e9;
    let _ = writeln!(svg, "<text x=\"{}\" y=\"{foot}\" text-anchor=\"end\">{seconds:.0} s</text>", WIDTH - RIGHT);
    for record in records {
        let Some(fault) = record.fault else { continue };
        let (x, colour) = (across(record), colour(fault.kind));
        if let Some(recovered) = record.recovered_ns() {
            let y = up(top, recovered);
            let _ = writeln!(svg, "<path d=\"M{:.1} {y:.1}h6\" stroke=\"{colour}\" stroke-width=\"2\"/>", x - 3.0);
        }
        for (rank, ns) in record.detections() {
            let y = up(top, ns);
            let told = record.seen[rank].failure.as_ref().map_or("", |failure| &failure.kind);
            let title = format!("fault {}, {}: rank {rank} was told {told}", fault.number, fault.kind.name());
            let _ = writeln!(
                svg,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2\" fill=\"{colour}\"><title>{}</title></circle>",
                escaped(&title)
            );
        }
        if !record.is_good() {
            let y = top + 20.0;
            let _ = writeln!(svg, "<path d=\"M{:.1} {y:.1}l8 8m0 -8l-8 8\" stroke=\"red\" stroke-width=\"2\"/>", x - 4.0);
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        record::Seen,
        report::{MachineRun, sum_up},
        schedule::Fault,
        words::Failure,
    };

    #[test]
    fn each_rank_that_was_told_is_a_dot_and_the_return_a_bar() {
        let failure = Failure {
            kind: "PeerDied".into(),
            text: "<&>".into(),
            peer: None,
            round: 1,
            started_ns: 0,
            at_ns: 5_000_000,
            deadline_ms: 1,
        };
        let told = Seen { failure: Some(failure), ..Seen::default() };
        let fault = Fault { number: 0, kind: Kind::Kill, victim: 1, in_flight: true, amount: 0 };
        let record =
            Record { fault: Some(fault), seen: vec![told.clone(), Seen::default(), told], back_ns: Some(9), ..Record::default() };
        let machine = MachineRun { name: "a<b".into(), planned: 1, played: 1, records: vec![record], ..MachineRun::default() };
        let svg = draw(&sum_up(1, "k", vec![machine]));
        assert_eq!(svg.matches("was told PeerDied").count(), 2);
        assert_eq!(svg.matches("h6").count(), 1);
        assert!(svg.contains("a&lt;b") && !svg.contains("a<b"));
    }
}
