// SPDX-License-Identifier: MIT OR Apache-2.0
//! The few seconds in which a machine is measured: real collectives of two ranks over shared memory.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use super::{CHUNKS, Calibration, Choice, RECORDS, time};
use crate::{
    error::{Error, Result},
    group::{Group, GroupOptions},
    plan::{Algorithm, Collective, Tree},
    reduce::Op,
    sim::{Machine, Processes},
};

/// Bytes at which rates are measured, and elements of the short messages.
const LONG: usize = 4 << 20;
const SHORT: usize = 32;
const ELEMENT: usize = 4;
/// How long each of the eight measurements goes on, and how many batches it makes at least and at most.
const TIME: Duration = Duration::from_millis(200);
const BATCHES: (usize, usize) = (3, 4000);
const PATIENCE: Duration = Duration::from_secs(10);

/// Processors that this process may use.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

impl Calibration {
    /// Measures this machine with two ranks over shared memory, in threads; two seconds where nothing else runs. `directory` is where they
    /// meet; it must not be there yet and is deleted again.
    ///
    /// ```no_run
    /// # fn main() -> pcieipc::Result<()> {
    /// let found = pcieipc::tune::Calibration::measure(&std::env::temp_dir().join("my-measurement"))?;
    /// println!("a step takes {} ns", found.step_ns);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Group::meet`] and [`Group::all_reduce`]; `System` when no thread can be started.
    pub fn measure(directory: &Path) -> Result<Self> {
        let found = Self::from(processors(), |choice, count| {
            let calls = if count * ELEMENT <= CHUNKS[0] { 100 } else { 1 };
            measured(directory, choice, count, calls)
        })?;
        if found.is_plausible() {
            Ok(found)
        } else {
            Err(Error::Argument(format!("measuring gave {found:?}, which no machine does; measure again when it is quiet")))
        }
    }

    /// What makes the model take the times that two ranks take with these choices and counts.
    pub(super) fn from(processors: usize, mut us: impl FnMut(Choice, usize) -> Result<f64>) -> Result<Self> {
        let one_shot = of(Algorithm::OneShot, CHUNKS[0]);
        let two_shot = of(Algorithm::TwoShot, CHUNKS[0]);
        let short = [us(one_shot, SHORT)?, us(two_shot, SHORT)?];
        let next = us(one_shot, RECORDS[0] / ELEMENT)?;
        let on = |choice, count, step_us, hop_us, gbps| {
            on(Processes { step_us, hop_us, gbps, processors }, choice, count).unwrap_or(0.0)
        };
        // How many steps and hops lie behind each other: the model's time is linear in both.
        let parts = |choice| (on(choice, SHORT, 1.0, 1e-6, 1e6), on(choice, SHORT, 1e-6, 1.0, 1e6));
        // What the few bytes of the short messages take is not known yet, and is soon: an eighth of the error is left each time.
        let (mut step_us, mut hop_us, mut of_bytes) = (0.0, 0.0, [0.0; 2]);
        for _ in 0..8 {
            (step_us, hop_us) = solve([parts(one_shot), parts(two_shot)], [short[0] - of_bytes[0], short[1] - of_bytes[1]]);
            let gbps = rate(next, |gbps| on(one_shot, RECORDS[0] / ELEMENT, step_us, hop_us, gbps));
            of_bytes = [one_shot, two_shot].map(|choice| on(choice, SHORT, 1e-6, 1e-6, gbps));
        }
        let mut megabytes = [0; RECORDS.len()];
        for (found, record) in megabytes.iter_mut().zip(RECORDS) {
            // One record, or many one behind the other.
            let (choice, count) = if CHUNKS.contains(&record) {
                (of(Algorithm::TwoShot, record), LONG / ELEMENT)
            } else {
                (one_shot, record / ELEMENT)
            };
            let us = if record == RECORDS[0] { next } else { us(choice, count)? };
            *found = (rate(us, |gbps| on(choice, count, step_us, hop_us, gbps)) * 1e3).round() as u32;
        }
        let whole = |us: f64| (us * 1e3).round() as u32;
        let processors = u32::try_from(processors).unwrap_or(u32::MAX);
        Ok(Self { step_ns: whole(step_us).max(1), hop_ns: whole(hop_us), processors, megabytes })
    }
}

fn of(algorithm: Algorithm, chunk: usize) -> Choice {
    Choice { algorithm, chunk }
}

/// Microseconds of two ranks on the model.
fn on(rates: Processes, choice: Choice, count: usize) -> Option<f64> {
    let tree = Tree::flat(2);
    time(&Machine::of_processes(&tree, rates).ok()?, &tree, 2, (Collective::AllReduce, choice), count, ELEMENT)
}

/// The rate with which the model takes so long: its time falls with the rate.
fn rate(us: f64, model: impl Fn(f64) -> f64) -> f64 {
    let (mut low, mut high) = (1e-3f64, 1e4f64);
    for _ in 0..40 {
        let middle = (low * high).sqrt();
        if model(middle) > us { low = middle } else { high = middle }
    }
    high
}

/// Step and hop, in microseconds, that give both times; where no positive ones do, steps alone give the first.
pub(super) fn solve(parts: [(f64, f64); 2], times: [f64; 2]) -> (f64, f64) {
    let [(a, b), (c, d)] = parts;
    let [x, y] = times;
    let determinant = a * d - b * c;
    let (step, hop) = ((x * d - b * y) / determinant, (a * y - x * c) / determinant);
    if step.is_finite() && hop.is_finite() && step > 0.0 && hop >= 0.0 { (step, hop) } else { (x / a.max(1.0), 0.0) }
}

/// Microseconds of an all-reduce of two ranks: the middle one of some batches. The best would be disturbed least by other work, but is also
/// faster than what calls usually take.
fn measured(directory: &Path, choice: Choice, count: usize, calls: usize) -> Result<f64> {
    let rank = |rank| -> Result<f64> {
        let mut options = GroupOptions::new(rank, 2, directory);
        options.executor.algorithm = Some(choice.algorithm);
        options.executor.chunk = choice.chunk;
        options.meeting_timeout = PATIENCE;
        let mut group = Group::meet(options)?;
        let mut buffer = vec![0.0f32; count];
        let mut times = Vec::new();
        let begin = Instant::now();
        // The first batch warms up.
        for batch in 0..=BATCHES.1 {
            let start = Instant::now();
            for _ in 0..calls {
                group.all_reduce(&mut buffer, Op::Sum, PATIENCE)?;
            }
            if batch > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e6 / calls as f64);
            }
            // Rank 0 decides for both.
            let mut enough = [u8::from(batch >= BATCHES.0 && begin.elapsed() > TIME)];
            group.broadcast(&mut enough, 0, PATIENCE)?;
            if enough != [0] {
                break;
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    };
    let result = std::thread::scope(|scope| {
        let other = std::thread::Builder::new().spawn_scoped(scope, || rank(1)).map_err(|source| Error::System {
            call: "pthread_create",
            hint: "raise the limit of threads (ulimit -u)".into(),
            source: source.into(),
        })?;
        let mine = rank(0);
        let theirs = other.join().map_err(|_| Error::Argument("a rank that was measured panicked; please report it".into()))?;
        Ok(mine?.max(theirs?))
    });
    let _ = std::fs::remove_dir_all(directory);
    result
}
