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
    /// Costs of this library by contender and size, medians: bytes stored for each byte of a rank's result, system calls and context
    /// switches a call and rank.
    costs: BTreeMap<(usize, usize), [f64; 3]>,
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
        let mut costs: BTreeMap<(usize, usize), Vec<[f64; 3]>> = BTreeMap::new();
        let mut wrong = 0;
        let mut names =
            vec![(ORDINARY, env!("CARGO_PKG_VERSION").to_owned()), (REGISTERED, env!("CARGO_PKG_VERSION").to_owned())];
        names.extend(peers.iter().map(|p| (p.name, p.version.clone())));
        for round in 0..rounds {
            for (which, memory) in [Memory::Ordinary, Memory::Registered].into_iter().enumerate() {
                eprintln!("round {} of {rounds}: {}", round + 1, names[which].0);
                let table = measure(&Job { memory, limit: true, ..job.clone() }, interruption)?;
                wrong += table.wrong();
                for row in &table.rows {
                    // Two buffers, as Open MPI has them, where this library has that.
                    let Some(timing) = row.out_of_place.or(row.in_place) else { continue };
                    times.entry((which, row.bytes)).or_default().push(timing.seconds * 1e6);
                    if let Some(limit) = row.limit {
                        limits.entry(row.bytes).or_default().push(limit * 1e6);
                    }
                    costs.entry((which, row.bytes)).or_default().push([timing.stored, timing.syscalls, timing.switches]);
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
        let contenders = names.into_iter().enumerate().map(|(i, (name, version))| (name, version, pick(i))).collect();
        let limits = limits.into_iter().map(|(bytes, t)| (bytes, median(&t))).collect();
        let middle = |of: Vec<[f64; 3]>| [0, 1, 2].map(|i| median(&of.iter().map(|c| c[i]).collect::<Vec<_>>()));
        let costs = costs.into_iter().map(|(which, of)| (which, middle(of))).collect();
        Ok(Self { job: job.clone(), rounds, contenders, limits, wrong, costs })
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
            print!("{}", self.csv());
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

    fn csv(&self) -> String {
        let mut out = "bytes,contender,us\n".to_owned();
        for (name, _, times) in &self.contenders {
            // Names of ours have a comma.
            let name = if name.contains(',') { format!("\"{name}\"") } else { (*name).to_owned() };
            for (bytes, us) in times {
                let _ = writeln!(out, "{bytes},{name},{us:.3}");
            }
        }
        out
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
            .map(|((which, bytes), [stored, syscalls, switches])| {
                json!({ "contender": self.contenders[*which].0, "bytes": bytes, "stored_per_byte": stored, "syscalls_per_call": syscalls, "switches_per_call": switches })
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
        out.push_str("# ratio: this library's time to the best of the others' (Open MPI with two buffers as ours in ordinary memory, Gloo with one); reg.: with one registered buffer\n");
        for (which, (name, ..)) in self.contenders.iter().enumerate().take(2) {
            let most = |i: usize| self.costs.iter().filter(|((w, _), _)| *w == which).map(|(_, c)| c[i]).fold(0.0, f64::max);
            let _ = writeln!(
                out,
                "# {name}: at most {:.2} bytes stored for each of a rank's result, {:.2} system calls and {:.2} context switches a call and rank",
                most(0),
                most(1),
                most(2)
            );
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sizes; the peers' times are such that each of them is once the better one.
    fn contest() -> Contest {
        let times = |small: f64, large: f64| BTreeMap::from([(1024, small), (4096, large)]);
        let contenders = vec![
            (ORDINARY, "1".to_owned(), times(5.0, 40.0)),
            (REGISTERED, "1".to_owned(), times(4.0, 20.0)),
            ("Open MPI", "2".to_owned(), times(10.0, 100.0)),
            ("Gloo", "3".to_owned(), times(50.0, 80.0)),
        ];
        Contest {
            job: Job { sizes: vec![1024, 4096], ..crate::bench::sample("all-reduce", 2) },
            rounds: 3,
            contenders,
            limits: BTreeMap::from([(1024, 1.0), (4096, 15.0)]),
            wrong: 0,
            costs: BTreeMap::from([((0, 1024), [2.0, 0.0, 0.5]), ((0, 4096), [1.5, 0.25, 0.0]), ((1, 4096), [1.0, 0.0, 0.0])]),
        }
    }

    #[test]
    fn ratios_are_to_the_best_of_the_others_at_each_size() {
        let said = contest().json();
        let of = |key: &str| [&said["rows"][0][key], &said["rows"][1][key]].map(|v| v.as_f64().unwrap());
        assert_eq!(of("best_peer_us"), [10.0, 80.0]);
        assert_eq!((of("ratio_ordinary"), of("ratio_registered")), ([0.5, 0.5], [0.4, 0.25]));
        assert_eq!(of("registered_of_memory_limit"), [0.25, 0.75]);
        assert_eq!((&said["ok"], &said["rows"][1]["us"]["Gloo"]), (&true.into(), &80.0.into()));
        assert_eq!(said["costs"][0]["contender"], ORDINARY);

        let text = contest().text();
        let rows: Vec<Vec<&str>> = text.lines().filter(|l| !l.starts_with('#')).map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["1024", "5.00", "4.00", "10.00", "50.00", "0.500", "0.400"]);
        assert_eq!(rows[1], ["4096", "40.00", "20.00", "100.00", "80.00", "0.500", "0.250"]);
        assert!(
            text.contains("at most 2.00 bytes stored for each of a rank's result, 0.25 system calls and 0.50 context"),
            "{text}"
        );
        assert!(text.contains("4096 bytes registered run at 75 % of what the memory allows"), "{text}");
        assert!(contest().csv().contains("\n4096,\"pcieipc, registered\",20.000\n"), "{}", contest().csv());
    }

    #[test]
    fn without_others_there_is_no_ratio_and_a_wrong_element_is_a_failure() {
        let mut alone = contest();
        alone.contenders.truncate(2);
        assert_eq!(alone.json()["rows"][0]["ratio_ordinary"], serde_json::Value::Null);
        assert!(alone.text().lines().any(|l| l.split_whitespace().eq(["1024", "5.00", "4.00", "-", "-"])), "{}", alone.text());
        alone.wrong = 3;
        assert_eq!(alone.json()["ok"], false);
        assert!(matches!(alone.report(true, false, None), Err(Failure::Told(why)) if why == "3 wrong elements"));
    }

    #[test]
    fn the_middle_of_the_rounds_counts() {
        assert_eq!((median(&[9.0, 1.0, 2.0]), median(&[4.0])), (2.0, 4.0));
    }
}
