// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lower half: what each rank did when.

use super::{
    Report,
    canvas::{Canvas, INK, MUTED, PANEL, RED, RULE, Weight},
};
use crate::{demo::story::What, tally::time};

const LANE: f64 = 46.0;
const BAR: f64 = 26.0;
const NAMES: f64 = 70.0;

/// Kinds of spans in the order of the legend.
const KINDS: [(What, &str, &str); 6] = [
    (What::Meet, "meet", "#b9c4d0"),
    (What::Reduce, "reduce, tensor by tensor", "#2f6fde"),
    (What::Round, "reduce all as one message, over and over", "#7fb0f5"),
    (What::Broken, "the call that the loss broke", RED),
    (What::Shrink, "shrink", "#f0a732"),
    (What::After, "reduce among the survivors", "#2c9c6a"),
];

/// The colour that a rank has in the tree.
pub fn colour_of_rank(rank: usize) -> &'static str {
    const COLOURS: [&str; 4] = ["#2f6fde", "#2c9c6a", "#8a56c9", "#d9822b"];
    COLOURS.get(rank % COLOURS.len()).copied().unwrap_or(INK)
}

fn colour(what: What) -> &'static str {
    KINDS.iter().find(|(kind, _, _)| *kind == what).map_or(INK, |(_, _, colour)| colour)
}

/// Draws it from `y` on and gives the lower edge.
pub fn draw(canvas: &mut Canvas, report: &Report, x: f64, y: f64, width: f64) -> f64 {
    canvas.text(x, y, "What each rank did when", 15.0, INK, Weight::Bold);
    let legend = legend(canvas, x, y + 24.0, width);
    let (left, top) = (x + NAMES, legend + 42.0);
    let scale = (width - NAMES) / report.seconds.max(1e-9);
    let bottom = top + LANE * report.ranks as f64;

    let step = tick(report.seconds);
    let mut at = 0.0;
    while at <= report.seconds {
        let tick = left + at * scale;
        canvas.line((tick, top - 6.0), (tick, bottom), RULE, 1.0, None);
        canvas.centred(tick, bottom + 18.0, &time_label(at, step), 11.0, MUTED, Weight::Normal);
        at += step;
    }
    for rank in 0..report.ranks {
        let lane = top + LANE * rank as f64;
        canvas.text(x, lane + BAR / 2.0 + 5.0, &format!("rank {rank}"), 13.0, INK, Weight::Bold);
        canvas.rect(left, lane, width - NAMES, BAR, PANEL, None, 3.0);
    }
    for span in &report.timeline {
        let lane = top + LANE * span.rank as f64;
        let start = left + span.start * scale;
        let wide = ((span.end - span.start) * scale).max(0.8);
        let hint = format!("rank {}: {} ({})", span.rank, span.label, time(span.end - span.start));
        // A hairline of the panel between neighbours keeps them apart where there is room for it.
        let wide = if wide > 3.0 { wide - 0.7 } else { wide };
        canvas.hinted_rect([start, lane, wide, BAR], colour(span.what), None, 0.0, &hint);
    }
    let fault = left + report.fault.at * scale;
    canvas.line((fault, top - 12.0), (fault, bottom - (LANE - BAR) + 6.0), RED, 1.5, Some("4 3"));
    canvas.centred(fault.clamp(left + 70.0, x + width - 70.0), top - 16.0, report.fault.kind, 12.0, RED, Weight::Bold);
    for error in &report.fault.errors {
        let lane = top + LANE * error.rank as f64;
        let at = left + (report.fault.at + error.after) * scale;
        canvas.text(
            at.min(x + width - 160.0),
            lane + BAR + 12.0,
            &format!("{} after {}", error.kind, time(error.after)),
            10.0,
            RED,
            Weight::Normal,
        );
    }
    bottom + 20.0
}

fn legend(canvas: &mut Canvas, x: f64, y: f64, width: f64) -> f64 {
    let (mut at, mut line) = (x, y);
    for (_, name, colour) in KINDS {
        let wide = 34.0 + name.len() as f64 * 6.4;
        if at + wide > x + width {
            (at, line) = (x, line + 20.0);
        }
        canvas.rect(at, line - 10.0, 12.0, 12.0, colour, None, 2.0);
        canvas.text(at + 18.0, line, name, 12.0, MUTED, Weight::Normal);
        at += wide;
    }
    line
}

/// The step of the axis: 1, 2 or 5 times a power of ten, for 5 to 12 ticks.
pub fn tick(seconds: f64) -> f64 {
    let rough = seconds.max(1e-6) / 10.0;
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|times| times * power).find(|step| *step >= rough).unwrap_or(power * 10.0)
}

pub fn time_label(at: f64, step: f64) -> String {
    match step {
        s if s >= 1.0 => format!("{at:.0} s"),
        s if s >= 0.1 => format!("{at:.1} s"),
        s if s >= 1e-3 => format!("{:.0} ms", at * 1e3),
        _ => format!("{:.0} µs", at * 1e6),
    }
}
