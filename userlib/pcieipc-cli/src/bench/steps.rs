// SPDX-License-Identifier: MIT OR Apache-2.0
//! A plan as a picture: the steps of all ranks in the order in which they can run, and the records between them.

use std::collections::{HashMap, VecDeque};

use pcieipc::plan::{Move, Plan, Source, Target};

use crate::demo::figure::canvas::{Canvas, INK, MUTED, PANEL, RULE, Weight};

const MARGIN: f64 = 40.0;
const NAMES: f64 = 70.0;
const COLUMN: f64 = 132.0;
const BOX: f64 = 104.0;
const LANE: f64 = 74.0;
const HEIGHT: f64 = 38.0;
/// The picture would only repeat itself.
const WINDOWS: usize = 2;
/// More would not be read.
const MOST_COLUMNS: usize = 60;

/// By phase.
const COLOURS: [&str; 5] = ["#cfe0fb", "#cdebdc", "#fbe6c4", "#e2d5f3", "#f7d0d3"];

/// A step's place.
struct Placed<'a> {
    rank: usize,
    column: usize,
    step: Move<'a>,
}

/// Draws checked plans: their first windows.
pub fn draw(title: &str, plans: &[Plan]) -> String {
    let (boxes, records) = place(plans);
    let columns = boxes.iter().map(|b| b.column + 1).max().unwrap_or(0);
    let width = MARGIN * 2.0 + NAMES + COLUMN * columns.max(4) as f64;
    let mut canvas = Canvas::new(width);
    canvas.text(MARGIN, 38.0, title, 18.0, INK, Weight::Bold);
    let windows = plans.iter().map(Plan::windows).max().unwrap_or(1);
    let shown = if windows > WINDOWS { format!("the first {WINDOWS} of {windows} windows; ") } else { String::new() };
    let words = format!("{shown}a column is one step later; colours are phases, arrows are records, dashed ones without data");
    canvas.text(MARGIN, 58.0, &words, 12.0, MUTED, Weight::Normal);
    let top = 84.0;
    let corner = |rank: usize, column: usize| (MARGIN + NAMES + COLUMN * column as f64, top + LANE * rank as f64);
    for plan in plans {
        let (x, y) = corner(plan.rank, 0);
        canvas.text(MARGIN, y + HEIGHT / 2.0 + 5.0, &format!("rank {}", plan.rank), 13.0, INK, Weight::Bold);
        canvas.rect(x - 8.0, y - 6.0, COLUMN * columns as f64, HEIGHT + 12.0, PANEL, None, 4.0);
    }
    for record in &records {
        let ((x0, y0), (x1, y1)) = (corner(record.from.0, record.from.1), corner(record.to.0, record.to.1));
        let dashes = if record.data { None } else { Some("3 3") };
        let (colour, wide) = if record.data { ("#5c6b7c", 1.4) } else { (RULE, 1.2) };
        canvas.line((x0 + BOX, y0 + HEIGHT / 2.0), (x1, y1 + HEIGHT / 2.0), colour, wide, dashes);
    }
    for Placed { rank, column, step: Move { window, phase, step, offset, len } } in &boxes {
        let (x, y) = corner(*rank, *column);
        let from: Vec<String> = step.sources.iter().map(source).collect();
        let to: Vec<String> = step.targets.iter().map(target).collect();
        let hint = format!(
            "rank {rank}, phase {phase}, window {window}, shard {}, elements {offset} to {}: {} → {}",
            step.shard,
            offset + len,
            from.join(" + "),
            to.join(", ")
        );
        canvas.hinted_rect([x, y, BOX, HEIGHT], COLOURS[phase % COLOURS.len()], Some(RULE), 4.0, &hint);
        canvas.text(x + 6.0, y + 15.0, &short(&from.join(" + ")), 10.5, INK, Weight::Normal);
        canvas.text(x + 6.0, y + 30.0, &format!("→ {}", short(&to.join(", "))), 10.5, INK, Weight::Normal);
    }
    canvas.finish(top + LANE * plans.len() as f64)
}

/// A record between two boxes, each by rank and column.
struct Record {
    from: (usize, usize),
    to: (usize, usize),
    data: bool,
}

/// Runs the plans: a step's column is after the rank's step before it and after those whose records it takes.
fn place(plans: &[Plan]) -> (Vec<Placed<'_>>, Vec<Record>) {
    let programs: Vec<Vec<Move<'_>>> = plans.iter().map(|p| p.program().filter(|m| m.window < WINDOWS).collect()).collect();
    let mut next = vec![(0usize, 0usize); plans.len()];
    let mut links: HashMap<(usize, usize), VecDeque<(usize, bool)>> = HashMap::new();
    let (mut boxes, mut records) = (Vec::new(), Vec::new());
    let mut moved = true;
    while std::mem::take(&mut moved) {
        for rank in 0..plans.len() {
            let (at, mut column) = next[rank];
            let Some(step) = programs[rank].get(at) else { continue };
            let senders = || {
                step.step.sources.iter().filter_map(|source| match *source {
                    Source::Link { from, .. } | Source::Signal(from) => Some(from),
                    _ => None,
                })
            };
            let waiting = |from: usize| links.get(&(from, rank)).and_then(VecDeque::front).copied();
            let Some(arrived) = senders().map(waiting).collect::<Option<Vec<_>>>() else { continue };
            column = arrived.iter().map(|(sent, _)| sent + 1).fold(column, usize::max);
            for from in senders() {
                if let Some((sent, data)) = links.get_mut(&(from, rank)).and_then(VecDeque::pop_front) {
                    records.push(Record { from: (from, sent), to: (rank, column), data });
                }
            }
            for target in &step.step.targets {
                if let Target::Link { to, .. } | Target::Signal(to) = *target {
                    links.entry((rank, to)).or_default().push_back((column, matches!(target, Target::Link { .. })));
                }
            }
            boxes.push(Placed { rank, column, step: *step });
            next[rank] = (at + 1, column + 1);
            moved = true;
        }
    }
    boxes.retain(|b| b.column < MOST_COLUMNS);
    records.retain(|r| r.to.1 < MOST_COLUMNS);
    (boxes, records)
}

fn source(source: &Source) -> String {
    match source {
        Source::Input(_) => "input".into(),
        Source::Output(_) => "output".into(),
        Source::Scratch(number) => format!("scratch {number}"),
        Source::Link { from, .. } => format!("{from}"),
        Source::Signal(from) => format!("signal {from}"),
        Source::PeerInput { of, .. } => format!("input of {of}"),
        Source::PeerOutput { of, .. } => format!("output of {of}"),
    }
}

fn target(target: &Target) -> String {
    match target {
        Target::Output(_) => "output".into(),
        Target::Scratch(number) => format!("scratch {number}"),
        Target::Link { to, .. } => format!("to {to}"),
        Target::Signal(to) => format!("signal {to}"),
    }
}

/// As much as fits into a box; all of it is in the hint.
fn short(text: &str) -> String {
    if text.chars().count() <= 17 { text.into() } else { text.chars().take(16).chain(['…']).collect() }
}

#[cfg(test)]
mod tests {
    use pcieipc::plan::{self, Algorithm, Collective, Shape, Tree};

    use super::*;

    #[test]
    fn every_step_of_the_first_windows_is_drawn_after_what_it_waits_for() {
        for algorithm in [Algorithm::OneShot, Algorithm::TwoShot, Algorithm::Ring, Algorithm::Hierarchical] {
            let (n, tree) = (6, Tree::groups(&[3, 3]));
            let shape = Shape::new(n, 6000, 200);
            let plans: Vec<Plan> =
                (0..n).map(|r| plan::build(Collective::AllReduce, algorithm, shape, r, &tree).unwrap()).collect();
            let (boxes, records) = place(&plans);
            let all: usize = plans.iter().map(|p| p.program().filter(|m| m.window < WINDOWS).count()).sum();
            assert_eq!(boxes.len(), all, "{algorithm}");
            assert!(records.iter().all(|r| r.from.1 < r.to.1));
            let svg = draw("title", &plans);
            assert!(svg.starts_with("<svg") && svg.matches("<title>").count() == all, "{algorithm}");
        }
    }
}
