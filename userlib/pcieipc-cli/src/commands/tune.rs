// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc tune`: measure this machine once, and say which size takes which algorithm and why.

use pcieipc::{
    executor,
    plan::{Collective, Tree},
    topology::{Address, Live},
    tune::{self, Calibration, Choice, Explanation, Tuner, Ways},
};

use crate::{
    bench::Verdict,
    commands::bench::{bytes, sizes},
    failure::Failure,
    host_source::{HostSource, place},
    ranks::Mover,
    scratch::Scratch,
};

/// Measure this machine (a few seconds, once) and say which size takes which algorithm
#[derive(Debug, clap::Args)]
pub struct Tune {
    /// For how many ranks the choices are listed (1 to 16)
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    ranks: u8,
    /// PCI address of each rank's endpoint: the calibration is filed under their place in the tree
    #[arg(long, value_name = "ADDRESS,...", value_delimiter = ',')]
    endpoints: Vec<Address>,
    /// Who carries the records between these endpoints: engines use the endpoints' links, processors do not
    #[arg(long, value_enum, default_value_t = Mover::Processor)]
    mover: Mover,
    #[command(flatten)]
    source: HostSource,
    /// all-reduce, reduce or broadcast
    #[arg(long, default_value_t = Collective::AllReduce)]
    collective: Collective,
    /// Smallest size
    #[arg(long, value_name = "SIZE", default_value = "64", value_parser = bytes)]
    min: usize,
    /// Largest size
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = bytes)]
    max: usize,
    /// Measure anew even if this machine was measured before
    #[arg(long)]
    again: bool,
    /// Also say what each candidate is predicted to take
    #[arg(long)]
    explain: bool,
    /// Also measure what is predicted (all-reduce of up to as many ranks as processors), and say how far off it is
    #[arg(long)]
    validate: bool,
    /// One JSON object on standard output
    #[arg(long)]
    pub json: bool,
}

impl Tune {
    pub fn run(self) -> Result<(), Failure> {
        let ranks = if self.endpoints.is_empty() { usize::from(self.ranks) } else { self.endpoints.len() };
        let collectives = [Collective::AllReduce, Collective::Reduce, Collective::Broadcast];
        if !collectives.contains(&self.collective) {
            return Err(Failure::Use(format!("{} has one plan in rank order; there is nothing to choose", self.collective)));
        }
        if ranks > executor::MAX_RANKS {
            return Err(Failure::Use(format!("{ranks} endpoints: a group has 1 to {} ranks", executor::MAX_RANKS)));
        }
        let source = self.source.open()?;
        let placed = match self.endpoints.is_empty() && self.source.is_live() {
            true if self.mover == Mover::Engine => {
                return Err(Failure::Use("--mover engine is about the links of endpoints; name them with --endpoints".into()));
            }
            true => None,
            false => Some(place(source.as_ref(), &self.endpoints, ranks)?),
        };
        let tree = placed.as_ref().map_or_else(|| Tree::flat(ranks), |p| p.tree.clone());
        let ways = placed.as_ref().filter(|_| self.mover == Mover::Engine).map(|p| p.ways.clone());
        // What is measured is this machine, also where the tree is another host's.
        let key = tune::key(&Live::default(), if self.source.is_live() { &self.endpoints } else { &[] });
        let before = if self.again { None } else { tune::stored(&key) };
        let calibration = match before {
            Some(found) => found,
            None if self.again => {
                // Ranks meet below it, so that what is deleted is theirs alone.
                let meeting = Scratch::new()?;
                let found = Calibration::measure(&meeting.path().join("tune"))?;
                tune::store(&key, &found)?;
                found
            }
            None => self::calibration(&key)?,
        };
        let tuner = Tuner::new(tree.clone(), ranks, calibration).over(ways.clone());
        let sizes = sizes(self.min, self.max, 2)?;
        let options = executor::Options::default();
        let explain = |size| {
            let class = tuner.class(size);
            tuner.explain(self.collective, class, options.usual(self.collective, class))
        };
        let rows: Vec<(usize, Explanation)> = sizes.into_iter().map(|size| (size, explain(size))).collect();
        let verdict = match self.validate {
            false => None,
            // Larger sizes take what was predicted for the largest class; their own times are not predicted.
            true => {
                let own: Vec<_> = rows.iter().filter(|(size, _)| tuner.class(*size) == *size).cloned().collect();
                Some(Verdict::of(self.collective, ranks, &own)?)
            }
        };
        if self.json {
            let mut report = self.report(&tree, ways.as_ref(), &key, calibration, before.is_some(), &rows);
            report["validation"] = verdict.as_ref().map_or(serde_json::Value::Null, Verdict::json);
            println!("{report}");
            return Ok(());
        }
        let Calibration { step_ns, hop_ns, processors, megabytes } = calibration;
        let rates = tune::RECORDS.iter().zip(megabytes).map(|(r, m)| format!("{} with {} KiB", gbps(m), r >> 10));
        println!("# {} among {ranks} ranks, tree {tree}", self.collective);
        if !self.source.is_live() {
            println!("# the tree is the saved host's, the rates of processors and memory are this machine's");
        }
        if let Some(ways) = &ways {
            for (rank, way) in ways.up.iter().enumerate() {
                let rates: Vec<String> = way.iter().map(|link| format!("{} GB/s", gbps(ways.links[*link]))).collect();
                println!("# rank {rank}: links up to the root {}", rates.join(", "));
            }
        }
        println!(
            "# {}: a step {step_ns} ns, a hop {hop_ns} ns, {processors} processors; GB/s of records: {}",
            if before.is_some() { "measured earlier (--again measures anew)" } else { "measured now" },
            rates.collect::<Vec<_>>().join(", ")
        );
        println!("#{:>11}  {:<24}why", "size (B)", "takes");
        for (size, row) in &rows {
            println!("{size:>12}  {:<24}{}", name(row.choice), why(row));
            if self.explain {
                row.candidates.iter().for_each(|(c, us)| println!("{:>12}    {us:>12.2} us  {}", "", name(*c)));
            }
        }
        if let Some(verdict) = verdict {
            print!("{}", verdict.text());
        }
        Ok(())
    }

    fn report(
        &self,
        tree: &Tree,
        ways: Option<&Ways>,
        key: &str,
        calibration: Calibration,
        earlier: bool,
        rows: &[(usize, Explanation)],
    ) -> serde_json::Value {
        let choice = |c: Choice| serde_json::json!({ "algorithm": c.algorithm.name(), "chunk": c.chunk });
        let rows: Vec<_> = rows
            .iter()
            .map(|(size, row)| {
                let candidates: Vec<_> = row
                    .candidates
                    .iter()
                    .map(|(c, us)| serde_json::json!({ "algorithm": c.algorithm.name(), "chunk": c.chunk, "us": us }))
                    .collect();
                serde_json::json!({
                    "bytes": size, "choice": choice(row.choice), "default": choice(row.default), "why": why(row), "candidates": candidates,
                })
            })
            .collect();
        serde_json::json!({
            "ok": true, "collective": self.collective.name(), "tree": tree.to_string(), "links": ways, "key": key, "measured_earlier": earlier,
            "calibration": calibration, "rows": rows,
        })
    }
}

/// This machine's, measured on first use, which is said.
pub fn calibration(key: &str) -> Result<Calibration, Failure> {
    if tune::stored(key).is_none() {
        eprintln!("measuring this machine, once ...");
    }
    Ok(tune::stored_or_measured(key)?)
}

fn gbps(megabytes: u32) -> String {
    format!("{:.1}", f64::from(megabytes) / 1e3)
}

fn name(choice: Choice) -> String {
    format!("{}, {} KiB", choice.algorithm, choice.chunk >> 10)
}

/// In words.
fn why(row: &Explanation) -> String {
    let us = |choice| row.candidates.iter().find(|(c, _)| *c == choice).map(|(_, us)| *us);
    match (us(row.choice), us(row.default)) {
        (Some(_), Some(usual)) if row.choice == row.default => {
            format!("the default; nothing is predicted to be 5 % faster than its {usual:.1} us")
        }
        (Some(chosen), Some(usual)) => format!("{chosen:.1} us predicted; the default, {}, takes {usual:.1}", name(row.default)),
        _ => "the default; nothing is predicted for more ranks than processors".into(),
    }
}
