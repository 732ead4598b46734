// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc cuda trace`: what kernels did, step by step, against the plans that they declare.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use pcieipc_cuda::trace::{Step, meet};

use super::{
    bench::{shown, size},
    crew::Crew,
    order::{Order, Trial},
    team::{Making, Team},
};
use crate::failure::Failure;

/// Compare the steps of kernels with the plans that they declare, with kernels that record every step
#[derive(clap::Args)]
pub struct Trace {
    /// How many ranks; several share a device when there are more ranks than devices
    #[arg(long, default_value_t = 2)]
    pub ranks: usize,
    /// peer, host, auto, or device (peer memory between ranks of one device, host memory between devices)
    #[arg(long, default_value = "auto", value_parser = ["peer", "host", "auto", "device"])]
    pub path: String,
    #[command(flatten)]
    pub making: Making,
    /// Sizes in bytes, separated by commas; KiB and MiB as suffixes
    #[arg(long, default_value = "2,1002,4KiB,65542,300002,1MiB")]
    pub sizes: String,
}

/// The steps that a rank wrote beside `file`.
fn read(file: &Path, rank: usize) -> Result<Vec<Step>, Failure> {
    let file = file.with_extension(rank.to_string());
    let text = std::fs::read(&file).map_err(|e| Failure::Run(format!("{}: {e}", file.display())))?;
    let steps: Vec<(u32, u32, u32, u32, u64, u64, u64)> =
        serde_json::from_slice(&text).map_err(|e| Failure::Run(e.to_string()))?;
    let step = |(verb, peer, epoch, bytes, at, place, time)| Step { verb, peer, epoch, bytes, at, place, time };
    Ok(steps.into_iter().map(step).collect())
}

impl Trace {
    pub fn run(self) -> Result<ExitCode, Failure> {
        let sizes = self.sizes.split(',').map(size).collect::<Result<Vec<_>, _>>()?;
        let place = tempfile::tempdir().map_err(|e| Failure::Run(format!("can not make a directory: {e}")))?;
        let (ranks, path, making) = (self.ranks, self.path.as_str(), self.making);
        let mut commands =
            Team { side: "ours", ranks, path, kinds: "bf16,i32", largest: 1 << 20, making }.workers(place.path())?;
        for command in &mut commands {
            command.env("PCIEIPC_KERNEL_DEFINES", "PCIEIPC_TRACE");
        }
        let mut crew = Crew::start(commands)?;
        let (mut passed, mut failed, wait) = (0u32, 0u32, Duration::from_secs(240));
        let mut kernels = BTreeSet::new();
        let file: PathBuf = place.path().join("steps");
        let mut compare = |crew: &mut Crew, bytes, op: &str, in_place, candidate, registered| -> Result<(), Failure> {
            let trial = Trial::Steps {
                bytes,
                kind: if op == "sum" { "bf16" } else { "i32" }.into(),
                op: op.into(),
                in_place,
                candidate,
                registered,
                file: file.clone(),
            };
            let answers = crew.ask(&Order::Check(trial), wait);
            let told = answers.iter().find_map(|a| a.error.clone().or((a.wrong > 0).then(|| a.text.clone())));
            let told = match told {
                Some(told) => Some(told),
                None => meet(&(0..ranks).map(|rank| read(&file, rank)).collect::<Result<Vec<_>, _>>()?).err(),
            };
            let name = answers.first().map(|a| a.text.clone()).unwrap_or_default();
            kernels.insert(name.split(' ').next().unwrap_or_default().to_owned());
            match told {
                None => {
                    println!("ok   {op}{} {name}", if in_place { " in place" } else { "" });
                    passed += 1;
                }
                Some(told) => {
                    println!("FAIL {op} of {}: {told}", shown(bytes));
                    failed += 1;
                }
            }
            Ok(())
        };
        for &bytes in &sizes {
            let bytes = bytes.next_multiple_of(2);
            for in_place in [false, true] {
                compare(&mut crew, bytes, "sum", in_place, None, false)?;
            }
            compare(&mut crew, bytes.next_multiple_of(4), "max", false, None, false)?;
            // Each kernel that a tuner may try, once. What copy engines write is recorded by nobody.
            let told = crew.ask(&Order::Candidates { bytes }, wait);
            let names = told.into_iter().next().map(|a| a.candidates).unwrap_or_default();
            let mut seen = BTreeSet::new();
            for (candidate, name) in names.iter().enumerate() {
                let kernel = name.split(' ').next().unwrap_or_default();
                if !kernel.starts_with("engine") && seen.insert(kernel.to_owned()) {
                    compare(&mut crew, bytes, "sum", false, Some(candidate), false)?;
                }
            }
            if self.path == "peer" {
                for (op, in_place) in [("sum", false), ("sum", true), ("min", true)] {
                    compare(&mut crew, bytes.next_multiple_of(4), op, in_place, None, true)?;
                }
            }
        }
        crew.quit();
        println!(
            "{passed} passed, {failed} failed; {} kernels: {}",
            kernels.len(),
            kernels.into_iter().collect::<Vec<_>>().join(" ")
        );
        Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
