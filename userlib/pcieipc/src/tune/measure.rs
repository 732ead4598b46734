// SPDX-License-Identifier: MIT OR Apache-2.0
//! The few seconds in which a machine is measured: real collectives of two ranks over shared memory.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use super::{CHUNKS, Calibration, Choice, time};
use crate::{
    error::{Error, Result},
    group::{Group, GroupOptions},
    plan::{Algorithm, Collective, Tree},
    reduce::Op,
    sim::{Machine, Processes},
};

/// Bytes at which rates are measured, and elements of the short messages.
const LONG: usize = 4 << 20;
const SHORT: usize = 16;
/// How long each of the five measurements goes on, and how many batches it makes at least and at most.
const TIME: Duration = Duration::from_millis(300);
const BATCHES: (usize, usize) = (3, 40);
const PATIENCE: Duration = Duration::from_secs(10);

/// Processors that this process may use.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

impl Calibration {
    /// Measures this machine with two ranks over shared memory, in threads; a second or two where nothing else runs. `directory` is where they
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
        let shared = processors();
        let one_shot = of(Algorithm::OneShot, CHUNKS[0]);
        let two_shot = of(Algorithm::TwoShot, CHUNKS[0]);
        let short = [measured(directory, one_shot, SHORT, 20)?, measured(directory, two_shot, SHORT, 20)?];
        // How many steps and hops lie behind each other: the model's time is linear in both.
        let parts = |choice| {
            let unit = |step_us, hop_us| {
                let machine = Processes { step_us, hop_us, gbps: 1e6, processors: shared };
                on(machine, choice, SHORT).unwrap_or(0.0)
            };
            (unit(1.0, 1e-6), unit(1e-6, 1.0))
        };
        let (step, hop) = solve([parts(one_shot), parts(two_shot)], short);
        let mut megabytes = [0; 3];
        for (rate, chunk) in megabytes.iter_mut().zip(CHUNKS) {
            let choice = of(Algorithm::TwoShot, chunk);
            let us = measured(directory, choice, LONG / 4, 1)?;
            let at = |gbps| on(Processes { step_us: step, hop_us: hop, gbps, processors: shared }, choice, LONG / 4);
            // The model's time falls with the rate.
            let (mut low, mut high) = (1e-3f64, 1e4f64);
            for _ in 0..40 {
                let middle = (low * high).sqrt();
                if at(middle).is_some_and(|t| t > us) { low = middle } else { high = middle }
            }
            *rate = (high * 1e3).round() as u32;
        }
        let whole = |us: f64| (us * 1e3).round() as u32;
        let processors = u32::try_from(shared).unwrap_or(u32::MAX);
        let found = Self { step_ns: whole(step).max(1), hop_ns: whole(hop), processors, megabytes };
        if found.is_plausible() {
            Ok(found)
        } else {
            Err(Error::Argument(format!("measuring gave {found:?}, which no machine does; measure again when it is quiet")))
        }
    }
}

fn of(algorithm: Algorithm, chunk: usize) -> Choice {
    Choice { algorithm, chunk }
}

/// Microseconds of two ranks on the model.
fn on(rates: Processes, choice: Choice, count: usize) -> Option<f64> {
    let tree = Tree::flat(2);
    time(&Machine::of_processes(&tree, rates).ok()?, &tree, 2, (Collective::AllReduce, choice), count, 4)
}

/// Step and hop, in microseconds, that give both times; where no positive ones do, steps alone give the first.
pub(super) fn solve(parts: [(f64, f64); 2], times: [f64; 2]) -> (f64, f64) {
    let [(a, b), (c, d)] = parts;
    let [x, y] = times;
    let determinant = a * d - b * c;
    let (step, hop) = ((x * d - b * y) / determinant, (a * y - x * c) / determinant);
    if step.is_finite() && hop.is_finite() && step > 0.0 && hop >= 0.0 { (step, hop) } else { (x / a.max(1.0), 0.0) }
}

/// Microseconds of an all-reduce of two ranks: the best of some batches, which is what other work on the machine disturbs least.
fn measured(directory: &Path, choice: Choice, count: usize, calls: usize) -> Result<f64> {
    let rank = |rank| -> Result<f64> {
        let mut options = GroupOptions::new(rank, 2, directory);
        options.executor.algorithm = Some(choice.algorithm);
        options.executor.chunk = choice.chunk;
        options.meeting_timeout = PATIENCE;
        let mut group = Group::meet(options)?;
        let mut buffer = vec![0.0f32; count];
        let mut best = f64::INFINITY;
        let begin = Instant::now();
        // The first batch warms up.
        for batch in 0..=BATCHES.1 {
            let start = Instant::now();
            for _ in 0..calls {
                group.all_reduce(&mut buffer, Op::Sum, PATIENCE)?;
            }
            if batch > 0 {
                best = best.min(start.elapsed().as_secs_f64() * 1e6 / calls as f64);
            }
            // Rank 0 decides for both.
            let mut enough = [u8::from(batch >= BATCHES.0 && begin.elapsed() > TIME)];
            group.broadcast(&mut enough, 0, PATIENCE)?;
            if enough != [0] {
                break;
            }
        }
        Ok(best)
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
