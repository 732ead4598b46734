// SPDX-License-Identifier: MIT OR Apache-2.0
//! `report.svg`: the figures, the tree with the endpoints, and the time line by rank.

pub mod canvas;
pub mod timeline;
mod tree;

use super::Report;
use crate::tally::time;
use canvas::{Canvas, INK, MUTED, PANEL, Weight};

const WIDTH: f64 = 1200.0;
const MARGIN: f64 = 40.0;

/// Draws a report.
pub fn draw(report: &Report) -> String {
    let mut canvas = Canvas::new(WIDTH);
    let inside = WIDTH - 2.0 * MARGIN;
    let mut y = 46.0;
    let title =
        format!("{} ranks add up {} of real gradients, lose one in the middle, and go on", report.ranks, bytes(report.bytes));
    canvas.text(MARGIN, y, &title, 22.0, INK, Weight::Bold);
    y += 26.0;
    let path = if report.transport == "kmod" { "/dev/pcieipc: rings, doorbells, MSI-X" } else { "plain shared memory" };
    canvas.text(MARGIN, y, &format!("{path} · Linux {} · {}", report.kernel, time(report.seconds)), 14.0, MUTED, Weight::Normal);
    y += 24.0;
    y = cards(&mut canvas, report, y, inside);
    y = tree::draw(&mut canvas, report, MARGIN, y + 34.0, inside);
    y = timeline::draw(&mut canvas, report, MARGIN, y + 44.0, inside);
    canvas.finish(y + 30.0)
}

fn cards(canvas: &mut Canvas, report: &Report, y: f64, inside: f64) -> f64 {
    let slowest = report.fault.errors.iter().map(|error| error.after).fold(0.0, f64::max);
    let mut cards = vec![
        (report.wrong.to_string(), "wrong elements".to_owned()),
        (report.doorbells.to_string(), "doorbells rung".into()),
        (report.interrupts.to_string(), "interrupts taken".into()),
        (report.wakeups.to_string(), "wakeups".into()),
        (time(slowest), format!("all told (bound {})", time(report.fault.bound))),
        (format!("{} of {}", report.survivors, report.ranks), "ranks went on".into()),
    ];
    if report.transport == "kmod" {
        cards.insert(4, (bytes(report.dma_bytes as usize), "moved by engines".into()));
    }
    let gap = 12.0;
    let width = (inside - gap * (cards.len() - 1) as f64) / cards.len() as f64;
    for (index, (figure, label)) in cards.iter().enumerate() {
        let x = MARGIN + index as f64 * (width + gap);
        canvas.rect(x, y, width, 74.0, PANEL, None, 8.0);
        canvas.text(x + 14.0, y + 36.0, figure, 24.0, INK, Weight::Bold);
        canvas.text(x + 14.0, y + 58.0, label, 11.5, MUTED, Weight::Normal);
    }
    y + 74.0
}

/// Bytes with a fitting decimal unit.
fn bytes(bytes: usize) -> String {
    match bytes as f64 {
        b if b >= 1e9 => format!("{:.1} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b if b >= 1e3 => format!("{:.0} kB", b / 1e3),
        b => format!("{b} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::{
        Loss, Node, SurvivorError,
        story::{Span, What},
    };

    fn node(address: &str, rank: Option<usize>, children: Vec<Node>) -> Node {
        Node { address: address.into(), rank, children }
    }

    /// Four endpoints behind a switch; rank 2 is lost after 0.3 of 0.5 seconds.
    fn report() -> Report {
        let ports = (0..4).map(|rank| {
            node(&format!("0000:02:0{rank}.0"), None, vec![node(&format!("0000:0{}:00.0", rank + 3), Some(rank), vec![])])
        });
        let span = |rank, what, start, end, label: &str| Span { rank, what, start, end, label: label.into() };
        let timeline =
            (0..4).flat_map(|rank| {
                let mut spans = vec![span(rank, What::Meet, 0.0, 0.08 + rank as f64 * 0.004, "meet")];
                spans.extend((0..24).map(|at| {
                    span(rank, What::Reduce, 0.1 + f64::from(at) * 0.005, 0.1049 + f64::from(at) * 0.005, "fc0.weight")
                }));
                spans.extend(
                    (0..4).map(|at| span(rank, What::Round, 0.22 + f64::from(at) * 0.02, 0.239 + f64::from(at) * 0.02, "round")),
                );
                spans.push(span(rank, What::Broken, 0.3, 0.31, "a < b & \"gone\""));
                if rank != 2 {
                    spans.push(span(rank, What::Shrink, 0.312, 0.37, "shrink to 3 ranks"));
                    spans.extend((0..24).map(|at| {
                        span(rank, What::After, 0.38 + f64::from(at) * 0.005, 0.3848 + f64::from(at) * 0.005, "fc0.weight")
                    }));
                }
                spans
            });
        let errors = [0, 1, 3].map(|rank| SurvivorError { rank, kind: "EndpointGone".into(), text: "gone".into(), after: 0.007 });
        Report {
            ranks: 4,
            bytes: 344_208,
            wrong: 0,
            doorbells: 2304,
            interrupts: 2298,
            wakeups: 1890,
            transport: "kmod",
            why: String::new(),
            kernel: "7.3.4+deb13-amd64".into(),
            fault: Loss {
                kind: "endpoint removed",
                rank: 2,
                endpoint: Some("0000:05:00.0".into()),
                at: 0.303,
                bound: 10.0,
                errors: errors.into(),
            },
            survivors: 3,
            dma_bytes: 1_376_832,
            seconds: 0.5,
            tensors: Vec::new(),
            after: Vec::new(),
            timeline: timeline.collect(),
            endpoints: Vec::new(),
            tree: vec![node("0000:00:03.0", None, vec![node("0000:01:00.0", None, ports.collect())])],
        }
    }

    #[test]
    fn every_endpoint_every_rank_and_the_fault_are_drawn() {
        let drawn = draw(&report());
        for part in ["endpoint 0000:03:00.0", "endpoint 0000:06:00.0", "rank 2: removed", "EndpointGone after 7.00 ms", "3 of 4"]
        {
            assert!(drawn.contains(part), "{part} is not in {drawn}");
        }
        // One bar a span, and its text can not break the file.
        assert_eq!(drawn.matches("<title>").count(), report().timeline.len());
        assert!(drawn.contains("a &lt; b &amp; ") && !drawn.contains("a < b"), "{drawn}");
    }

    #[test]
    fn a_run_over_shared_memory_is_drawn_without_a_tree() {
        let drawn = draw(&Report { tree: Vec::new(), transport: "shm", ..report() });
        assert!(drawn.contains("shared memory") && drawn.contains("process of rank 3"), "{drawn}");
        assert!(!drawn.contains("moved by engines"), "{drawn}");
    }
}
