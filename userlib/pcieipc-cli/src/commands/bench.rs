// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc bench`: how long collectives take, checked, and beside others' on the same machine.

use std::{path::PathBuf, time::Duration};

use pcieipc::{
    plan::Collective,
    reduce::{Kind, Op},
    topology::Live,
    tune,
};

use super::workload::Workload;
use crate::{
    bench::{self, Contest, Job},
    failure::Failure,
    supervisor::Interruption,
};

/// Measure collectives: the table that nccl-tests users read, every result checked
#[derive(Debug, clap::Args)]
pub struct Bench {
    #[command(flatten)]
    workload: Workload,
    /// Smallest size in bytes, such as 256, 4K, 1M
    #[arg(long, value_name = "SIZE", default_value = "256", value_parser = bytes)]
    min: usize,
    /// Largest size in bytes
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = bytes)]
    max: usize,
    /// Each size is so many times the one before
    #[arg(long, value_name = "F", default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..))]
    factor: u32,
    /// Choose algorithms by what was measured of this machine, now (about two seconds) if it never was
    #[arg(long, conflicts_with = "algorithm")]
    tuned: bool,
    /// Checked mode: every record carries a CRC-32C, and only what matches it is reduced
    #[arg(long)]
    checked: bool,
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
    /// Also draw time against size
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
    number.checked_mul(1 << shift).filter(|b| (1..=16 << 30).contains(b)).ok_or_else(|| "sizes go from 1 to 16G".into())
}

/// From `min` to `max`, each so many times the one before.
///
/// # Errors
/// Use where there are none.
pub fn sizes(min: usize, max: usize, factor: usize) -> Result<Vec<usize>, Failure> {
    if min > max {
        return Err(Failure::Use(format!("no size is at least --min {min} and at most --max {max}")));
    }
    Ok(std::iter::successors(Some(min), |size| size.checked_mul(factor)).take_while(|size| *size <= max).collect())
}

impl Bench {
    pub fn run(self) -> Result<(), Failure> {
        let interruption = Interruption::catch()?;
        let calibration = if self.tuned { Some(super::tune::calibration(&tune::key(&Live::default(), &[]))?) } else { None };
        let job = self.workload.job(sizes(self.min, self.max, self.factor as usize)?)?;
        let job = Job { calibration, checked: self.checked, time: self.time, check: !self.no_check, ..job };
        if self.compare {
            let Workload { collective, kind, op, .. } = self.workload;
            if (collective, kind, op) != (Collective::AllReduce, Kind::F32, Op::Sum) {
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
