// SPDX-License-Identifier: MIT OR Apache-2.0
//! What every rank did when, as a picture: waiting, combining, publishing, step by step.

use super::trace::Recording;
use crate::{
    demo::figure::{
        canvas::{Canvas, INK, MUTED, PANEL, RULE, Weight},
        timeline::{tick, time_label},
    },
    tally::time,
};

const WIDTH: f64 = 1200.0;
const MARGIN: f64 = 40.0;
const NAMES: f64 = 80.0;
const LANE: f64 = 40.0;
const BAR: f64 = 24.0;
const WAIT: &str = "#dfe5ec";
const PUBLISH: &str = "#16202c";
/// By phase.
const COMBINE: [&str; 5] = ["#2f6fde", "#2c9c6a", "#f0a732", "#8a56c9", "#d1343c"];

/// Draws it; what is thinner than a hair is left out.
pub fn draw(recording: &Recording) -> String {
    let start = recording.start();
    let end = recording.steps().map(|(_, step)| step.ended).max().unwrap_or(start);
    let seconds = (end.saturating_sub(start) as f64 / 1e9).max(1e-9);
    let job = &recording.job;
    let mut canvas = Canvas::new(WIDTH);
    let bytes = job.sizes.first().copied().unwrap_or(0);
    let calls = job.trace.unwrap_or(0);
    let title = format!("{calls} × {} of {bytes} bytes, {} ranks: {}", job.collective, job.ranks, time(seconds));
    canvas.text(MARGIN, 40.0, &title, 19.0, INK, Weight::Bold);
    let mut at = MARGIN;
    let phases = recording.steps().map(|(_, step)| usize::from(step.phase) + 1).max().unwrap_or(0);
    let combine = (0..phases).map(|phase| (format!("combining, phase {phase}"), COMBINE[phase % COMBINE.len()]));
    for (name, colour) in [("waiting".to_owned(), WAIT)].into_iter().chain(combine).chain([("publishing".to_owned(), PUBLISH)]) {
        canvas.rect(at, 58.0, 12.0, 12.0, colour, None, 2.0);
        canvas.text(at + 18.0, 68.0, &name, 12.0, MUTED, Weight::Normal);
        at += 40.0 + name.len() as f64 * 6.6;
    }
    let (left, top) = (MARGIN + NAMES, 112.0);
    let scale = (WIDTH - left - MARGIN) / seconds;
    let bottom = top + LANE * job.ranks as f64;
    let step = tick(seconds);
    let mut mark = 0.0;
    while mark <= seconds {
        canvas.line((left + mark * scale, top - 8.0), (left + mark * scale, bottom), RULE, 1.0, None);
        canvas.centred(left + mark * scale, top - 14.0, &time_label(mark, step), 11.0, MUTED, Weight::Normal);
        mark += step;
    }
    for rank in 0..job.ranks {
        let lane = top + LANE * rank as f64;
        canvas.text(MARGIN, lane + BAR / 2.0 + 5.0, &format!("rank {rank}"), 13.0, INK, Weight::Bold);
        canvas.rect(left, lane, WIDTH - left - MARGIN, BAR, PANEL, None, 3.0);
    }
    for (rank, step) in recording.steps() {
        let lane = top + LANE * rank as f64;
        let hint = format!(
            "call {}, phase {}, window {}, shard {}: {} bytes",
            step.call, step.phase, step.window, step.shard, step.bytes
        );
        let colour = COMBINE[usize::from(step.phase) % COMBINE.len()];
        for (from, to, colour) in
            [(step.begun, step.ready, WAIT), (step.ready, step.combined, colour), (step.combined, step.ended, PUBLISH)]
        {
            let x = left + from.saturating_sub(start) as f64 / 1e9 * scale;
            let wide = to.saturating_sub(from) as f64 / 1e9 * scale;
            if wide >= 0.1 {
                canvas.hinted_rect([x, lane, wide, BAR], colour, None, 0.0, &hint);
            }
        }
    }
    for rank in 0..job.ranks {
        let [waiting, combining, publishing] = recording.totals(rank).map(|us| time(us / 1e6));
        let lane = top + LANE * rank as f64;
        let words = format!("waiting {waiting}, combining {combining}, publishing {publishing}");
        canvas.text(left + 4.0, lane + BAR + 12.0, &words, 10.0, MUTED, Weight::Normal);
    }
    canvas.finish(bottom + 20.0)
}
