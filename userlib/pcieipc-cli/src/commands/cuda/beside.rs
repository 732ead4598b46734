// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc cuda beside`: all-reduce and a matrix product on the same devices at the same time, and what each costs the other.

use std::{process::ExitCode, time::Duration};

use comfy_table::{Table, presets::NOTHING};

use super::{
    bench::{median, shape, shown, size},
    crew::Crew,
    order::{Beside as Times, Order},
    product::SIDE,
    side::PRODUCTS,
    team::{Making, Team},
};
use crate::failure::Failure;

/// Measure all-reduce beside a running matrix product: what each costs the other
#[derive(clap::Args)]
pub struct Beside {
    /// peer or host
    #[arg(long, default_value = "peer")]
    pub path: String,
    #[command(flatten)]
    pub making: Making,
    /// Sizes in bytes, separated by commas; KiB, MiB and GiB as suffixes
    #[arg(long, default_value = "64KiB,1MiB,16MiB,64MiB")]
    pub sizes: String,
    /// Ours, or NCCL as the environment sets it
    #[arg(long, default_value = "ours", value_parser = ["ours", "nccl"])]
    pub side: String,
    /// How often; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
}

impl Beside {
    pub fn run(self) -> Result<ExitCode, Failure> {
        let sizes = self.sizes.split(',').map(size).collect::<Result<Vec<_>, _>>()?;
        let largest = sizes.iter().copied().max().unwrap_or(0);
        let place = tempfile::tempdir().map_err(|e| Failure::Run(format!("can not make a directory: {e}")))?;
        let team = Team { side: &self.side, ranks: 2, path: &self.path, kinds: "bf16", largest, making: self.making };
        let mut crew = Crew::start(team.workers(place.path())?)?;
        let mut table = Table::new();
        table.load_preset(NOTHING);
        table.set_header(["bytes", "alone us", "beside us", "TFLOP/s alone", "TFLOP/s beside", "product's time"]);
        for bytes in sizes {
            let shape = shape(bytes, "bf16", true, false);
            let mut ask = |replays| {
                let answers = crew.ask(&Order::Beside { shape: shape.clone(), replays }, Duration::from_secs(120));
                match answers.iter().find_map(|a| a.error.clone()) {
                    Some(error) => Err(Failure::Run(error)),
                    None => Ok(answers.into_iter().filter_map(|a| a.beside).collect::<Vec<Times>>()),
                }
            };
            // As many calls as take longer than the products, and the same on both ranks.
            let first = ask(0)?;
            let most = |pick: fn(&Times) -> f64| first.iter().map(pick).fold(1.0, f64::max);
            let calls = most(|t| t.product_alone) * f64::from(PRODUCTS) * 1.3 / most(|t| t.alone);
            let replays = (calls / f64::from(shape.calls)).ceil().clamp(1.0, 1e5) as u32;
            let mut rounds = Vec::new();
            for _ in 0..self.rounds {
                rounds.extend(ask(replays)?);
            }
            let middle = |pick: fn(&Times) -> f64| median(&rounds.iter().map(pick).collect::<Vec<_>>());
            let rate = |us: f64| 2.0 * (SIDE as f64).powi(3) / us / 1e6;
            let (alone, beside) = (middle(|t| t.product_alone), middle(|t| t.product_beside));
            table.add_row([
                shown(bytes),
                format!("{:.2}", middle(|t| t.alone)),
                format!("{:.2}", middle(|t| t.beside)),
                format!("{:.0}", rate(alone)),
                format!("{:.0}", rate(beside)),
                format!("{:.3}", beside / alone),
            ]);
        }
        println!("{} on the {} path beside products of {SIDE} x {SIDE} bf16 matrices", self.side, self.path);
        println!("{table}");
        crew.quit();
        Ok(ExitCode::SUCCESS)
    }
}
