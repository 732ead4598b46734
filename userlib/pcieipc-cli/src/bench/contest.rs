// SPDX-License-Identifier: MIT OR Apache-2.0
//! This library beside others, all in turn, round after round: medians and their ratios.

use std::{collections::BTreeMap, fmt::Write, path::Path};

use serde_json::json;

use super::{Job, Memory, measure, peers, picture};
use crate::{failure::Failure, scratch::Scratch, supervisor::Interruption};

/// The times of all contenders.
#[derive(Debug)]
pub struct Contest {
    job: Job,
    rounds: usize,
    /// Name and version; this library's first.
    contenders: Vec<(&'static str, String)>,
    /// Microseconds in each round by contender and size.
    times: BTreeMap<(usize, usize), Vec<f64>>,
    /// Microseconds in each round that the loads and stores of zero copy take on private memory, by size.
    limits: BTreeMap<usize, Vec<f64>>,
    wrong: u64,
    /// Costs of this library by contender and size, medians: bytes stored for each byte of a rank's result, system calls and context
    /// switches a call and rank.
    costs: BTreeMap<(usize, usize), [f64; 3]>,
}

const ORDINARY: &str = "pcieipc, ordinary memory";
const REGISTERED: &str = "pcieipc, registered";
const OURS: [(usize, Memory); 2] = [(0, Memory::Ordinary), (1, Memory::Registered)];

impl Contest {
    /// Measures everything `rounds` times. In a round all contenders have one size before any has the next, since what the machine gives
    /// changes faster than a contender goes through all sizes; every second round they take turns the other way round.
    ///
    /// # Errors
    /// Run when a contender fails.
    pub fn hold(job: &Job, rounds: usize, interruption: &Interruption) -> Result<Self, Failure> {
        let folder = Scratch::new()?;
        let mut peers = peers::find(job, &folder)?;
        let own = env!("CARGO_PKG_VERSION").to_owned();
        let mut contenders = vec![(ORDINARY, own.clone()), (REGISTERED, own)];
        contenders.extend(peers.iter().map(|p| (p.name, p.version.clone())));
        let mut times: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
        let mut limits: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        let mut costs: BTreeMap<(usize, usize), Vec<[f64; 3]>> = BTreeMap::new();
        let mut wrong = 0;
        for round in 0..rounds {
            for &size in &job.sizes {
                eprintln!("round {} of {rounds}: {size} bytes", round + 1);
                let job = Job { sizes: vec![size], ..job.clone() };
                let mut turns: Vec<usize> = (0..contenders.len()).collect();
                if round % 2 == 1 {
                    turns.reverse();
                }
                for which in turns {
                    if interruption.came() {
                        return Err(Failure::Run("interrupted".into()));
                    }
                    let Some(&(_, memory)) = OURS.get(which) else {
                        let us = peers[which - OURS.len()].measure(size, job.time, folder.path(), || interruption.came())?;
                        times.entry((which, size)).or_default().push(us);
                        continue;
                    };
                    let table = measure(&Job { memory, limit: true, ..job.clone() }, interruption)?;
                    wrong += table.wrong();
                    for row in &table.rows {
                        // Two buffers, as Open MPI has them, where this library has that.
                        let Some(timing) = row.out_of_place.or(row.in_place) else { continue };
                        times.entry((which, size)).or_default().push(timing.seconds * 1e6);
                        limits.entry(size).or_default().extend(row.limit.map(|limit| limit * 1e6));
                        costs.entry((which, size)).or_default().push([timing.stored, timing.syscalls, timing.switches]);
                    }
                }
            }
        }
        let middle = |of: Vec<[f64; 3]>| [0, 1, 2].map(|i| median(of.iter().map(|c| c[i]).collect()).unwrap_or(f64::NAN));
        let costs = costs.into_iter().map(|(which, of)| (which, middle(of))).collect();
        Ok(Self { job: job.clone(), rounds, contenders, times, limits, wrong, costs })
    }

    /// What a contender took in each round; nothing where it was not measured.
    fn rounds(&self, which: usize, bytes: usize) -> &[f64] {
        self.times.get(&(which, bytes)).map_or(&[], Vec::as_slice)
    }

    fn us(&self, which: usize, bytes: usize) -> Option<f64> {
        median(self.rounds(which, bytes).to_vec())
    }

    /// The best of the others in each round; nothing without others.
    fn best_peers(&self, bytes: usize) -> Vec<f64> {
        let of =
            |round: usize| (OURS.len()..self.contenders.len()).filter_map(move |i| self.rounds(i, bytes).get(round).copied());
        (0..self.rounds).map_while(|round| of(round).reduce(f64::min)).collect()
    }

    /// In each round, what a contender took beside the best of the others in that same round.
    fn ratios(&self, which: usize, bytes: usize) -> Vec<f64> {
        self.rounds(which, bytes).iter().zip(self.best_peers(bytes)).map(|(us, best)| us / best).collect()
    }

    /// What share of the memory's own speed registered buffers reach.
    fn of_limit(&self, bytes: usize) -> Option<f64> {
        median(self.limits.get(&bytes)?.iter().zip(self.rounds(1, bytes)).map(|(limit, us)| limit / us).collect())
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
                .enumerate()
                .map(|(which, (name, _))| picture::Line {
                    name: (*name).into(),
                    points: self.medians(which).map(|(bytes, us)| (bytes as f64, us)).collect(),
                })
                .collect();
            let picture = picture::draw(&format!("all-reduce of {} ranks, float32 sum, this machine", self.job.ranks), &lines);
            std::fs::write(file, picture).map_err(|e| Failure::Run(format!("{}: {e}", file.display())))?;
        }
        if self.wrong > 0 { Err(Failure::Told(format!("{} wrong elements", self.wrong))) } else { Ok(()) }
    }

    /// Bytes and microseconds of what a contender measured.
    fn medians(&self, which: usize) -> impl Iterator<Item = (usize, f64)> {
        self.job.sizes.iter().filter_map(move |&bytes| Some((bytes, self.us(which, bytes)?)))
    }

    fn csv(&self) -> String {
        let mut out = "bytes,contender,us\n".to_owned();
        for (which, (name, _)) in self.contenders.iter().enumerate() {
            // Names of ours have a comma.
            let name = if name.contains(',') { format!("\"{name}\"") } else { (*name).to_owned() };
            for (bytes, us) in self.medians(which) {
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
                let us: BTreeMap<&str, f64> =
                    self.contenders.iter().enumerate().filter_map(|(i, (n, _))| Some((*n, self.us(i, bytes)?))).collect();
                json!({
                    "bytes": bytes, "us": us, "best_peer_us": median(self.best_peers(bytes)),
                    "ratio_ordinary": median(self.ratios(0, bytes)), "ratio_registered": median(self.ratios(1, bytes)),
                    "ratios_ordinary": self.ratios(0, bytes), "ratios_registered": self.ratios(1, bytes),
                    "memory_limit_us": self.limits.get(&bytes).and_then(|l| median(l.clone())),
                    "registered_of_memory_limit": self.of_limit(bytes),
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
        let versions: BTreeMap<&str, &String> = self.contenders.iter().map(|(n, v)| (*n, v)).collect();
        json!({
            "ok": self.wrong == 0, "ranks": self.job.ranks, "processors": std::thread::available_parallelism().map_or(0, |n| n.get()),
            "type": "f32", "op": "sum", "rounds": self.rounds, "wrong": self.wrong, "versions": versions, "rows": rows, "costs": costs,
        })
    }

    fn text(&self) -> String {
        let mut out =
            format!("# all-reduce of {} ranks, f32 sum, microseconds, medians of {} rounds\n", self.job.ranks, self.rounds);
        let _ = write!(out, "#{:>11}", "size (B)");
        for (name, _) in &self.contenders {
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
                let _ = match median(self.ratios(which, bytes)) {
                    Some(ratio) => write!(out, "{ratio:>12.3}"),
                    None => write!(out, "{:>12}", "-"),
                };
            }
            out.push('\n');
        }
        out.push_str("# ratio: this library's time to the best of the others' in the same round, the median of the rounds (Open MPI with two buffers as ours in ordinary memory, Gloo with one); reg.: with one registered buffer\n");
        for (which, (name, _)) in self.contenders.iter().enumerate().take(2) {
            let most = |i: usize| self.costs.iter().filter(|((w, _), _)| *w == which).map(|(_, c)| c[i]).fold(0.0, f64::max);
            let _ = writeln!(
                out,
                "# {name}: at most {:.2} bytes stored for each of a rank's result, {:.2} system calls and {:.2} context switches a call and rank",
                most(0),
                most(1),
                most(2)
            );
        }
        if let Some((bytes, share)) = self.limits.keys().next_back().and_then(|bytes| Some((bytes, self.of_limit(*bytes)?))) {
            let _ = writeln!(out, "# {bytes} bytes registered run at {:.0} % of what the memory allows", share * 100.0);
        }
        out
    }
}

fn median(mut times: Vec<f64>) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sizes and three rounds, in which each of the others is the best one at times, and the middle round of one contender is not that
    /// of another.
    fn contest() -> Contest {
        let contenders = [(ORDINARY, "1"), (REGISTERED, "1"), ("Open MPI", "2"), ("Gloo", "3")].map(|(n, v)| (n, v.to_owned()));
        let times = [
            (0, 1024, [2.0, 9.0, 10.0]),
            (1, 1024, [1.0, 8.0, 4.0]),
            (2, 1024, [10.0, 10.0, 50.0]),
            (3, 1024, [50.0, 50.0, 40.0]),
            (0, 4096, [40.0, 40.0, 60.0]),
            (1, 4096, [20.0, 16.0, 20.0]),
            (2, 4096, [100.0, 160.0, 60.0]),
            (3, 4096, [80.0, 80.0, 200.0]),
        ];
        Contest {
            job: Job { sizes: vec![1024, 4096], ..crate::bench::sample("all-reduce", 2) },
            rounds: 3,
            contenders: contenders.into(),
            times: times.map(|(which, bytes, rounds)| ((which, bytes), rounds.into())).into(),
            limits: BTreeMap::from([(1024, vec![1.0, 2.0, 1.0]), (4096, vec![5.0, 12.0, 18.0])]),
            wrong: 0,
            costs: BTreeMap::from([((0, 1024), [2.0, 0.0, 0.5]), ((0, 4096), [1.5, 0.25, 0.0]), ((1, 4096), [1.0, 0.0, 0.0])]),
        }
    }

    #[test]
    fn ratios_are_to_the_best_of_the_others_in_the_same_round_at_each_size() {
        let said = contest().json();
        let of = |key: &str| [&said["rows"][0][key], &said["rows"][1][key]].map(|v| v.as_f64().unwrap());
        assert_eq!(of("best_peer_us"), [10.0, 80.0]);
        // 2 to 10, 9 to 10, 10 to 40. Medians divided would give 0.9; the one peer beside which the library looks worst, 0.2.
        assert_eq!(of("ratio_ordinary"), [0.25, 0.5]);
        assert_eq!(of("ratio_registered"), [0.1, 0.25]);
        assert_eq!(said["rows"][0]["ratios_ordinary"], json!([0.2, 0.9, 0.25]));
        assert_eq!(of("registered_of_memory_limit"), [0.25, 0.75]);
        assert_eq!((&said["ok"], &said["rows"][1]["us"]["Gloo"]), (&true.into(), &80.0.into()));
        assert_eq!(said["costs"][0]["contender"], ORDINARY);

        let text = contest().text();
        let rows: Vec<Vec<&str>> = text.lines().filter(|l| !l.starts_with('#')).map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["1024", "9.00", "4.00", "10.00", "50.00", "0.250", "0.100"]);
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
        assert!(alone.text().lines().any(|l| l.split_whitespace().eq(["1024", "9.00", "4.00", "-", "-"])), "{}", alone.text());
        alone.wrong = 3;
        assert_eq!(alone.json()["ok"], false);
        assert!(matches!(alone.report(true, false, None), Err(Failure::Told(why)) if why == "3 wrong elements"));
    }

    #[test]
    fn the_middle_of_the_rounds_counts() {
        assert_eq!((median(vec![9.0, 1.0, 2.0]), median(vec![4.0]), median(vec![])), (Some(2.0), Some(4.0), None));
    }
}
