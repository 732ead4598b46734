// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc cuda tune`: which kernel and launch is the fastest for each size, on this host.

use std::{process::ExitCode, time::Duration};

use super::{
    bench::{median, shape, shown, size},
    crew::Crew,
    order::{Order, Shape},
    team::{Making, Team},
};
use crate::failure::Failure;

/// Measure which kernel and launch is the fastest for each size, for a sum
#[derive(clap::Args)]
pub struct Tune {
    /// How many ranks, each on a device of its own
    #[arg(long, default_value_t = 2)]
    pub ranks: usize,
    /// peer or host
    #[arg(long, default_value = "peer", value_parser = ["peer", "host"])]
    pub path: String,
    #[command(flatten)]
    pub making: Making,
    /// Sizes in bytes, separated by commas; KiB, MiB and GiB as suffixes
    #[arg(long, default_value = "1KiB,4KiB,8KiB,16KiB,64KiB,128KiB,256KiB,512KiB,1MiB,4MiB,16MiB,64MiB")]
    pub sizes: String,
    /// How many of the fastest to show
    #[arg(long, default_value_t = 3)]
    pub top: usize,
}

impl Tune {
    pub fn run(self) -> Result<ExitCode, Failure> {
        let sizes = self.sizes.split(',').map(size).collect::<Result<Vec<_>, _>>()?;
        let place = tempfile::tempdir().map_err(|e| Failure::Run(format!("can not make a directory: {e}")))?;
        let largest = sizes.iter().copied().max().unwrap_or(0);
        let team = Team { side: "ours", ranks: self.ranks, path: &self.path, kinds: "bf16", largest, making: self.making };
        let mut crew = Crew::start(team.workers(place.path())?)?;
        for bytes in sizes {
            // Which there are depends on the devices and on who shares them, which the workers know.
            let told = crew.ask(&Order::Candidates { bytes }, Duration::from_secs(30));
            if let Some(error) = told.iter().find_map(|a| a.error.clone()) {
                return Err(Failure::Run(error));
            }
            let all = told.into_iter().next().map(|a| a.candidates).unwrap_or_default();
            let mut times = Vec::new();
            for (candidate, choice) in all.iter().enumerate() {
                let order = Order::Prepare(Shape { candidate: Some(candidate), ..shape(bytes, "bf16", true, false) });
                if let Some(error) = crew.ask(&order, Duration::from_secs(30)).into_iter().find_map(|a| a.error) {
                    return Err(Failure::Run(format!("{choice}: {error}")));
                }
                let rounds: Vec<f64> = (0..3)
                    .filter_map(|_| {
                        let answers = crew.ask(&Order::Measure, Duration::from_secs(30));
                        answers.iter().map(|a| a.us).collect::<Option<Vec<f64>>>().map(|us| us.into_iter().fold(0.0, f64::max))
                    })
                    .collect();
                times.push((median(&rounds), choice));
            }
            let chosen = times.first().map_or(f64::NAN, |t| t.0);
            times.sort_by(|a, b| a.0.total_cmp(&b.0));
            println!("{} {}: chosen {chosen:.2} us", self.path, shown(bytes));
            for (us, choice) in times.iter().take(self.top) {
                println!("    {us:.2} us  {choice}");
            }
        }
        crew.quit();
        Ok(ExitCode::SUCCESS)
    }
}
