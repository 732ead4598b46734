// SPDX-License-Identifier: MIT OR Apache-2.0
//! This library beside others, all in turn, round after round: medians and their ratios.

use std::{collections::BTreeMap, fmt::Write, path::Path};

use serde_json::json;

use super::{Job, Memory, measure, peers, picture};
use crate::{failure::Failure, scratch::Scratch, supervisor::Interruption};

/// The medians of all contenders.
#[derive(Debug)]
pub struct Contest {
    job: Job,
    rounds: usize,
    /// Name, version, and microseconds by size; this library's first.
    contenders: Vec<(&'static str, String, BTreeMap<usize, f64>)>,
    /// Microseconds that the loads and stores of zero copy take on private memory.
    limits: BTreeMap<usize, f64>,
    wrong: u64,
    /// Costs of this library by contender and size: bytes stored, system calls, context switches.
    costs: Vec<(&'static str, usize, [f64; 3])>,
}

const ORDINARY: &str = "pcieipc, ordinary memory";
const REGISTERED: &str = "pcieipc, registered";

impl Contest {
    /// Measures everything `rounds` times.
    ///
    /// # Errors
    /// Run when a contender fails.
    pub fn hold(job: &Job, rounds: usize, interruption: &Interruption) -> Result<Self, Failure> {
        let folder = Scratch::new()?;
        let peers = peers::find(job, &folder)?;
        let mut times: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
        let mut limits: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        let mut contest = Self { job: job.clone(), rounds, contenders: vec![], limits: BTreeMap::new(), wrong: 0, costs: vec![] };
        let mut names =
            vec![(ORDINARY, env!("CARGO_PKG_VERSION").to_owned()), (REGISTERED, env!("CARGO_PKG_VERSION").to_owned())];
        names.extend(peers.iter().map(|p| (p.name, p.version.clone())));
        for round in 0..rounds {
            for (which, memory) in [Memory::Ordinary, Memory::Registered].into_iter().enumerate() {
                eprintln!("round {} of {rounds}: {}", round + 1, names[which].0);
                let table = measure(&Job { memory, limit: true, ..job.clone() }, interruption)?;
                contest.wrong += table.wrong();
                for row in &table.rows {
                    // The same call as the others make: two buffers, where this library has that.
                    let Some(timing) = row.out_of_place.or(row.in_place) else { continue };
                    times.entry((which, row.bytes)).or_default().push(timing.seconds * 1e6);
                    if let Some(limit) = row.limit {
                        limits.entry(row.bytes).or_default().push(limit * 1e6);
                    }
                    if round == 0 {
                        contest.costs.push((names[which].0, row.bytes, [timing.stored, timing.syscalls, timing.switches]));
                    }
                }
            }
            for (i, peer) in peers.iter().enumerate() {
                if interruption.came() {
                    return Err(Failure::Run("interrupted".into()));
                }
                eprintln!("round {} of {rounds}: {}", round + 1, peer.name);
                for (bytes, us) in peer.measure(job)? {
                    times.entry((i + 2, bytes)).or_default().push(us);
                }
            }
        }
        let pick = |which| times.iter().filter(|((w, _), _)| *w == which).map(|((_, bytes), t)| (*bytes, median(t))).collect();
        contest.contenders = names.into_iter().enumerate().map(|(i, (name, version))| (name, version, pick(i))).collect();
        contest.limits = limits.into_iter().map(|(bytes, t)| (bytes, median(&t))).collect();
        Ok(contest)
    }

    fn us(&self, which: usize, bytes: usize) -> Option<f64> {
        self.contenders.get(which)?.2.get(&bytes).copied()
    }

    fn best_peer(&self, bytes: usize) -> Option<f64> {
        (2..self.contenders.len()).filter_map(|i| self.us(i, bytes)).reduce(f64::min)
    }

    /// Prints the result.
    ///
    /// # Errors
    /// Run when the picture can not be written, Told when an element was wrong.
    pub fn report(&self, as_json: bool, csv: bool, plot: Option<&Path>) -> Result<(), Failure> {
        if as_json {
            println!("{:#}", self.json());
        } else if csv {
            println!("bytes,contender,us");
            for (name, _, times) in &self.contenders {
                times.iter().for_each(|(bytes, us)| println!("{bytes},{name},{us:.3}"));
            }
        } else {
            print!("{}", self.text());
        }
        if let Some(file) = plot {
            let lines: Vec<picture::Line> = self
                .contenders
                .iter()
                .map(|(name, _, times)| picture::Line {
                    name: (*name).into(),
                    points: times.iter().map(|(b, t)| (*b as f64, *t)).collect(),
                })
                .collect();
            let picture = picture::draw(&format!("all-reduce of {} ranks, float32 sum, this machine", self.job.ranks), &lines);
            std::fs::write(file, picture).map_err(|e| Failure::Run(format!("{}: {e}", file.display())))?;
        }
        if self.wrong > 0 { Err(Failure::Told(format!("{} wrong elements", self.wrong))) } else { Ok(()) }
    }

    fn json(&self) -> serde_json::Value {
        let rows: Vec<_> = self
            .job
            .sizes
            .iter()
            .map(|&bytes| {
                let best = self.best_peer(bytes);
                let ratio = |which| Some(self.us(which, bytes)? / best?);
                let us: BTreeMap<&str, f64> =
                    self.contenders.iter().filter_map(|(n, _, t)| Some((*n, *t.get(&bytes)?))).collect();
                json!({
                    "bytes": bytes, "us": us, "best_peer_us": best, "ratio_ordinary": ratio(0), "ratio_registered": ratio(1),
                    "memory_limit_us": self.limits.get(&bytes),
                    "registered_of_memory_limit": self.limits.get(&bytes).and_then(|l| Some(l / self.us(1, bytes)?)),
                })
            })
            .collect();
        let costs: Vec<_> = self
            .costs
            .iter()
            .map(|(name, bytes, [stored, syscalls, switches])| {
                json!({ "contender": name, "bytes": bytes, "stored_per_byte": stored, "syscalls_per_call": syscalls, "switches_per_call": switches })
            })
            .collect();
        let versions: BTreeMap<&str, &String> = self.contenders.iter().map(|(n, v, _)| (*n, v)).collect();
        json!({
            "ok": self.wrong == 0, "ranks": self.job.ranks, "processors": std::thread::available_parallelism().map_or(0, |n| n.get()),
            "type": "f32", "op": "sum", "rounds": self.rounds, "wrong": self.wrong, "versions": versions, "rows": rows, "costs": costs,
        })
    }

    fn text(&self) -> String {
        let mut out =
            format!("# all-reduce of {} ranks, f32 sum, microseconds, medians of {} rounds\n", self.job.ranks, self.rounds);
        let _ = write!(out, "#{:>11}", "size (B)");
        for (name, ..) in &self.contenders {
            let _ = write!(out, "{name:>26}");
        }
        let _ = writeln!(out, "{:>12}{:>12}", "ratio", "ratio reg.");
        for &bytes in &self.job.sizes {
            let _ = write!(out, "{bytes:>12}");
            for which in 0..self.contenders.len() {
                let _ = match self.us(which, bytes) {
                    Some(us) => write!(out, "{us:>26.2}"),
                    None => write!(out, "{:>26}", "-"),
                };
            }
            for which in [0, 1] {
                let _ = match (self.us(which, bytes), self.best_peer(bytes)) {
                    (Some(us), Some(best)) => write!(out, "{:>12.3}", us / best),
                    _ => write!(out, "{:>12}", "-"),
                };
            }
            out.push('\n');
        }
        out.push_str("# ratio: this library's time to the better of the others', the same call (two buffers); reg.: one registered buffer\n");
        if let Some((bytes, limit)) = self.limits.iter().next_back() {
            if let Some(us) = self.us(1, *bytes) {
                let _ = writeln!(out, "# {bytes} bytes registered run at {:.0} % of what the memory allows", limit / us * 100.0);
            }
        }
        out
    }
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}
