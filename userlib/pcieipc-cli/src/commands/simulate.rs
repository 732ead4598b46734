// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc simulate`: how long collectives would take on a machine that is described in a file.

use std::path::PathBuf;

use pcieipc::{
    plan::{Algorithm, Collective},
    sim::{self, BUILT_IN, Machine, Processes},
    topology::{Address, Topology},
};

use crate::{
    bench::picture::{self, Line},
    commands::bench::{bytes, sizes},
    failure::Failure,
    host_source::{HostSource, place},
    ranks::Mover,
};

/// Predict how long all-reduce takes on a machine one does not have
#[derive(Debug, clap::Args)]
pub struct Simulate {
    /// A machine file, or one that comes with the library; left out, those are listed
    #[arg(long, value_name = "NAME|FILE.json")]
    machine: Option<String>,
    /// In place of --machine: this host's tree, or with --snapshot a saved one's, and ranks on these functions. With --snapshot and without
    /// this, on its first accelerators
    #[arg(long, value_name = "ADDRESS,...", value_delimiter = ',', conflicts_with = "machine")]
    endpoints: Vec<Address>,
    /// How many ranks on the accelerators of a saved host; all of them, at most 16, if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    ranks: Option<u8>,
    /// Who carries records between endpoints
    #[arg(long, value_enum, default_value_t = Mover::Engine)]
    mover: Mover,
    #[command(flatten)]
    source: HostSource,
    /// all-reduce, reduce-scatter, all-gather, reduce, broadcast or all-to-all
    #[arg(long, default_value_t = Collective::AllReduce)]
    collective: Collective,
    /// Smallest size, of a rank's larger buffer
    #[arg(long, value_name = "SIZE", default_value = "1K", value_parser = bytes)]
    min: usize,
    /// Largest size
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = bytes)]
    max: usize,
    /// Bytes of one element
    #[arg(long, value_name = "BYTES", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=8))]
    element: u8,
    /// Also draw time against size
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// One JSON object on standard output instead of the table
    #[arg(long)]
    pub json: bool,
}

/// Bytes, microseconds, and the busiest link in words.
type Row = (usize, f64, String);

impl Simulate {
    pub fn run(self) -> Result<(), Failure> {
        if let Some(machine) = self.of_host()? {
            let name = self.source.snapshot.as_ref().map_or("this host".to_owned(), |p| p.display().to_string());
            return self.predict(&machine, &name);
        }
        let Some(name) = &self.machine else { return self.list() };
        let machine = match BUILT_IN.iter().find(|(n, _)| n == name) {
            Some(_) => sim::built_in(name),
            None => Machine::parse(&std::fs::read_to_string(name).map_err(|e| {
                Failure::Use(format!("{name}: {e}; `pcieipc simulate` without --machine lists those that come with the library"))
            })?),
        }
        .map_err(|e| Failure::Use(format!("{name}: {e}")))?;
        self.predict(&machine, name)
    }

    /// The machines that come with the library.
    fn list(&self) -> Result<(), Failure> {
        let all = BUILT_IN.iter().map(|(name, _)| sim::built_in(name).map(|machine| (*name, machine)));
        let all = all.collect::<Result<Vec<_>, _>>().map_err(|e| Failure::Run(e.to_string()))?;
        if self.json {
            let machines: Vec<_> = all
                .iter()
                .map(|(name, m)| serde_json::json!({ "name": name, "ranks": m.ranks(), "description": m.description }))
                .collect();
            println!("{}", serde_json::json!({ "ok": true, "machines": machines }));
        } else {
            all.iter().for_each(|(name, m)| println!("{name:<22} {:>3} ranks  {}", m.ranks(), m.description));
        }
        Ok(())
    }

    /// A machine of a host's tree. A tree says nothing of processors and memory, so these are round numbers.
    fn of_host(&self) -> Result<Option<Machine>, Failure> {
        const ROUND: Processes = Processes { step_us: 1.0, hop_us: 0.5, gbps: 10.0, processors: 16 };
        if self.endpoints.is_empty() && self.source.is_live() {
            return Ok(None);
        }
        if self.machine.is_some() {
            return Err(Failure::Use("--machine and --snapshot both say which machine it is; give one of them".into()));
        }
        let source = self.source.open()?;
        let ranks = match (self.endpoints.len(), self.ranks) {
            (0, Some(ranks)) => usize::from(ranks),
            (0, None) => Topology::read(source.as_ref()).peers().len().clamp(1, 16),
            (named, Some(ranks)) if usize::from(ranks) != named => {
                return Err(Failure::Use(format!("{named} endpoints for {ranks} ranks; name one a rank")));
            }
            (named, _) => named,
        };
        let placed = place(source.as_ref(), &self.endpoints, ranks)?;
        let mut machine = Machine::of_processes(&placed.tree, ROUND).map_err(|e| Failure::Use(e.to_string()))?;
        if self.mover == Mover::Engine {
            machine = machine.over(&placed.ways);
        }
        let endpoints: Vec<String> = placed.endpoints.iter().map(Address::to_string).collect();
        machine.description = format!(
            "{}; links of the tree, and round numbers for processors (a step {} us, a hop {} us, {} GB/s)",
            endpoints.join(", "),
            ROUND.step_us,
            ROUND.hop_us,
            ROUND.gbps
        );
        Ok(Some(machine))
    }

    fn predict(&self, machine: &Machine, name: &str) -> Result<(), Failure> {
        let sizes = sizes(self.min, self.max, 4)?;
        let mut lines: Vec<(Algorithm, Vec<Row>)> = Vec::new();
        for algorithm in Algorithm::ALL.into_iter().filter(|a| *a != Algorithm::Direct) {
            // An algorithm that a size has no prediction for is left out: all rows are of all sizes.
            let row = sizes.iter().map(|&size| {
                let p = sim::predict(machine, self.collective, algorithm, size, self.element.into())?;
                let busiest = p.busiest.map_or(String::new(), |(link, part)| format!("{link} ({:.0} %)", part * 100.0));
                Some((size, p.us, busiest))
            });
            if let Some(row) = row.collect::<Option<Vec<Row>>>() {
                lines.push((algorithm, row));
            }
        }
        if lines.is_empty() {
            return Err(Failure::Use(format!("{} has no plans to simulate, or none that end", self.collective)));
        }
        if let Some(file) = &self.plot {
            let curves: Vec<Line> = lines
                .iter()
                .map(|(a, row)| Line { name: a.name().into(), points: row.iter().map(|(s, us, _)| (*s as f64, *us)).collect() })
                .collect();
            let title = format!("{}, {} ranks, predicted: {}", self.collective, machine.ranks(), name);
            std::fs::write(file, picture::draw(&title, &curves)).map_err(|e| Failure::Run(format!("{}: {e}", file.display())))?;
        }
        if self.json {
            let rows: Vec<_> = lines
                .iter()
                .flat_map(|(a, row)| {
                    row.iter().map(
                        |(s, us, busiest)| serde_json::json!({ "algorithm": a.name(), "bytes": s, "us": us, "busiest": busiest }),
                    )
                })
                .collect();
            println!(
                "{}",
                serde_json::json!({ "ok": true, "machine": name, "ranks": machine.ranks(), "collective": self.collective.name(), "rows": rows })
            );
            return Ok(());
        }
        println!("# {}, {} ranks, predicted microseconds: {}", self.collective, machine.ranks(), machine.description);
        print!("#{:>11}", "size (B)");
        lines.iter().for_each(|(a, _)| print!("{:>20}", a.name()));
        println!("  best, its busiest link");
        for (i, size) in sizes.iter().enumerate() {
            print!("{size:>12}");
            lines.iter().for_each(|(_, row)| print!("{:>20.2}", row[i].1));
            let best = lines.iter().min_by(|a, b| a.1[i].1.total_cmp(&b.1[i].1));
            println!("  {}", best.map_or(String::new(), |(a, row)| format!("{a}, {}", row[i].2)));
        }
        Ok(())
    }
}
