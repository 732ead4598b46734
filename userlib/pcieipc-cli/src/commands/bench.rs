// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc bench`: how long collectives take, checked, and beside others' on the same machine.

use std::{path::PathBuf, time::Duration};

use clap::ValueEnum;
use pcieipc::{
    plan::{Algorithm, Collective},
    reduce::{Kind, Op},
    topology::Live,
    tune,
};

use crate::{
    bench::{self, Contest, Job, Memory, Over},
    failure::Failure,
    ranks::{Asked, Mover},
    supervisor::Interruption,
    transport,
};

/// Measure collectives: the table that nccl-tests users read, every result checked
#[derive(Debug, clap::Args)]
pub struct Bench {
    /// How many ranks, one process each (1 to 16)
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    ranks: u8,
    /// all-reduce, reduce-scatter, all-gather, reduce, broadcast or all-to-all
    #[arg(long, default_value_t = Collective::AllReduce)]
    collective: Collective,
    /// Smallest size in bytes, such as 256, 4K, 1M
    #[arg(long, value_name = "SIZE", default_value = "256", value_parser = bytes)]
    min: usize,
    /// Largest size in bytes
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = bytes)]
    max: usize,
    /// Each size is so many times the one before
    #[arg(long, value_name = "F", default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..))]
    factor: u32,
    /// f64 f32 f16 bf16 i8 i16 i32 i64 u8 u16 u32 u64
    #[arg(long = "type", value_name = "TYPE", default_value_t = Kind::F32)]
    kind: Kind,
    /// sum, prod, min, max or avg
    #[arg(long, default_value_t = Op::Sum)]
    op: Op,
    /// The root of a reduce or broadcast
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    root: u8,
    /// Ordinary memory, or buffers registered once that all ranks can read (all-reduce only)
    #[arg(long, value_enum, default_value_t = Memory::Ordinary)]
    memory: Memory,
    /// one-shot, two-shot, star, ring, recursive-doubling or hierarchical, instead of the default choice
    #[arg(long)]
    algorithm: Option<Algorithm>,
    /// Choose algorithms by what `pcieipc tune` has stored for this machine
    #[arg(long, conflicts_with = "algorithm")]
    tuned: bool,
    /// Checked mode: every record carries a CRC-32C, and only what matches it is reduced
    #[arg(long)]
    checked: bool,
    /// What carries the records
    #[arg(long, value_enum, default_value_t = Asked::Auto)]
    transport: Asked,
    /// With kmod: who moves the records
    #[arg(long, value_enum, default_value_t = Mover::Processor)]
    mover: Mover,
    /// About how long each size is measured, five times over
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = humantime::parse_duration)]
    time: Duration,
    /// After the table, where the time of each size went: waiting, combining, publishing
    #[arg(long)]
    phases: bool,
    /// Do not compare the results with what they must be
    #[arg(long)]
    no_check: bool,
    /// One JSON object on standard output instead of the table
    #[arg(long, conflicts_with = "csv")]
    pub json: bool,
    /// Comma-separated values on standard output instead of the table
    #[arg(long)]
    csv: bool,
    /// Also draw time and bandwidth against size
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Run Open MPI and Gloo too, where they are installed, in turn with this, and print ratios (all-reduce, f32, sum)
    #[arg(long)]
    compare: bool,
    /// With --compare: how often everything is measured; medians count
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
}

/// A size such as 256, 4K, 1M.
pub fn bytes(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.trim_end_matches(['i', 'B']).find(|c: char| !c.is_ascii_digit()) {
        Some(at) => text.split_at(at),
        None => (text.trim_end_matches(['i', 'B']), ""),
    };
    let shift = match unit.trim_end_matches(['i', 'B']).to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return Err("write for example 256, 4K, 1M or 1G".into()),
    };
    let number: usize = digits.parse().map_err(|_| "write for example 256, 4K, 1M or 1G".to_owned())?;
    number.checked_shl(shift).filter(|b| (1..=16 << 30).contains(b)).ok_or_else(|| "sizes go from 1 to 16G".into())
}

impl Bench {
    pub fn run(self) -> Result<(), Failure> {
        let ranks = usize::from(self.ranks);
        if usize::from(self.root) >= ranks {
            return Err(Failure::Use(format!("there is no rank {} among {ranks}", self.root)));
        }
        if matches!(self.collective, Collective::SendReceive | Collective::Barrier) {
            return Err(Failure::Use(format!("{} has no table here; take all-reduce or another", self.collective)));
        }
        if self.memory == Memory::Registered && self.collective != Collective::AllReduce {
            return Err(Failure::Use("registered buffers are for all-reduce; leave --memory away".into()));
        }
        let interruption = Interruption::catch()?;
        let choice = transport::choose(self.transport, ranks, &[])?;
        eprintln!("transport: {} ({})", choice.name, choice.why);
        let calibration = match self.tuned {
            false => None,
            true => Some(tune::stored(&tune::key(&Live::default(), &[])).ok_or_else(|| {
                Failure::Use("nothing is stored for this machine; run `pcieipc tune` first, or leave --tuned away".into())
            })?),
        };
        let over = if choice.endpoints.is_empty() {
            Over::Shm
        } else {
            Over::Kmod { endpoints: choice.endpoints.iter().map(|e| e.id.0).collect(), mover: self.mover }
        };
        let job = Job {
            ranks,
            over,
            collective: self.collective.name().into(),
            kind: self.kind.name().into(),
            op: self.op.name().into(),
            root: self.root.into(),
            algorithm: self.algorithm.map(|a| a.name().into()),
            calibration,
            checked: self.checked,
            memory: self.memory,
            sizes: std::iter::successors(Some(self.min), |s| s.checked_mul(self.factor as usize))
                .take_while(|s| *s <= self.max)
                .collect(),
            time: self.time,
            check: !self.no_check,
            limit: false,
            trace: None,
        };
        if self.compare {
            if self.collective != Collective::AllReduce || self.kind != Kind::F32 || self.op != Op::Sum {
                return Err(Failure::Use("--compare measures all-reduce of f32 sums".into()));
            }
            return Contest::hold(&job, self.rounds.max(1), &interruption)?.report(self.json, self.csv, self.plot.as_deref());
        }
        let table = bench::measure(&job, &interruption)?;
        let wrong = table.wrong();
        if self.json {
            println!("{}", table.json());
        } else if self.csv {
            print!("{}", table.csv());
        } else {
            print!("{}", table.text());
            if self.phases {
                print!("{}", table.phases());
            }
        }
        if let Some(file) = &self.plot {
            std::fs::write(file, table.plot()).map_err(|e| Failure::Run(format!("{}: {e}", file.display())))?;
        }
        if wrong > 0 { Err(Failure::Told(format!("{wrong} wrong elements"))) } else { Ok(()) }
    }
}

impl ValueEnum for Memory {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Ordinary, Self::Registered]
    }
    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        Some(clap::builder::PossibleValue::new(match self {
            Self::Ordinary => "ordinary",
            Self::Registered => "registered",
        }))
    }
}
