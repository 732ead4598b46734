// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank of a bench or a check: reads orders, answers.

use std::{
    io::{BufRead, Write},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
};

use pcieipc::group::{Group, GroupOptions};
use pcieipc_cuda::{
    Communicator, Options, PathChoice,
    driver::{Cuda, Device, Driver},
};

use super::{
    check::Trials,
    nccl::Nccl,
    order::{Answer, Order},
    side::{Side, Stage, kind},
    team::Making,
};
use crate::failure::Failure;

/// One rank of a measurement
#[derive(clap::Args)]
pub struct Worker {
    #[arg(long)]
    pub side: String,
    #[arg(long)]
    pub rank: usize,
    #[arg(long)]
    pub ranks: usize,
    #[arg(long)]
    pub directory: PathBuf,
    #[arg(long, default_value = "auto")]
    pub path: String,
    /// Element types, by name, separated by commas
    #[arg(long, default_value = "bf16")]
    pub kinds: String,
    /// The longest tensor in bytes
    #[arg(long, default_value_t = 1 << 30)]
    pub largest: u64,
    #[command(flatten)]
    pub making: Making,
}

/// What a worker was made of, to make it again.
pub struct Ground {
    pub device: Arc<dyn Device>,
    pub options: Options,
    pub directory: PathBuf,
    pub rank: usize,
    pub ranks: usize,
}

impl Ground {
    pub fn meet(&self, place: &str) -> Result<Group, Failure> {
        Ok(Group::meet(GroupOptions::new(self.rank, self.ranks, self.directory.join(place)))?)
    }
}

impl Worker {
    pub fn run(self) -> Result<ExitCode, Failure> {
        let cuda = Cuda::start()?;
        let devices = cuda.devices()?;
        if devices.is_empty() {
            return Err(Failure::Run("there is no CUDA device".into()));
        }
        let device = cuda.open(devices[self.rank % devices.len()].ordinal)?;
        let path = match self.path.as_str() {
            "auto" => PathChoice::Auto,
            "peer" => PathChoice::Peer,
            "host" => PathChoice::Host,
            "device" => PathChoice::Device,
            other => return Err(Failure::Use(format!("there is no path {other}"))),
        };
        let kinds = self.kinds.split(',').map(kind).collect::<Result<Vec<_>, _>>()?;
        let Making { staging, blocks, no_overlap, checked, deadline } = self.making;
        let options = Options { path, kinds, deadline, staging, blocks, overlap: !no_overlap, checked, ..Options::default() };
        let ground = Ground {
            device: device.clone(),
            options: options.clone(),
            directory: self.directory.clone(),
            rank: self.rank,
            ranks: self.ranks,
        };
        let mut group = ground.meet("first")?;
        // A group that NCCL's workers met in is kept, since its end is the peers' death.
        let mut kept = None;
        let mut side = if self.side == "nccl" {
            let side = Side::Nccl(Nccl::new(&mut group, device)?);
            kept = Some(group);
            side
        } else {
            Side::Ours(Box::new(Communicator::new(group, device, options)?))
        };
        let mut stage: Option<Stage> = None;
        let mut trials = Trials::new(ground);
        let mut output = std::io::stdout();
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|e| Failure::Run(e.to_string()))?;
            let order: Order =
                serde_json::from_str(&line).map_err(|e| Failure::Use(format!("an order that is not understood: {e}")))?;
            let done = match order {
                Order::Prepare(shape) => (|| {
                    if stage.is_none() {
                        stage = Some(Stage::new(&side, self.largest)?);
                    }
                    stage.as_mut().map_or(Ok(()), |s| s.prepare(&mut side, shape))?;
                    Ok(Answer::default())
                })(),
                Order::Candidates { bytes } => Ok(Answer { candidates: side.candidates(bytes), ..Answer::default() }),
                Order::Measure => match &mut stage {
                    Some(stage) => stage.measure(&mut side).map(|us| Answer { us: Some(us), ..Answer::default() }),
                    None => Err(Failure::Use("nothing was prepared".into())),
                },
                Order::Beside { shape, replays } => (|| {
                    if stage.is_none() {
                        stage = Some(Stage::new(&side, self.largest)?);
                    }
                    let beside = stage.as_mut().map(|s| s.beside(&mut side, shape, replays)).transpose()?;
                    Ok(Answer { beside, ..Answer::default() })
                })(),
                Order::Check(trial) => match &mut side {
                    Side::Ours(communicator) => trials.run(communicator, trial),
                    Side::Nccl(_) => Err(Failure::Use("only our side is checked".into())),
                },
                Order::Quit => break,
            };
            let answer = done.unwrap_or_else(|e| Answer { error: Some(e.to_string()), ..Answer::default() });
            let text = serde_json::to_string(&answer).map_err(|e| Failure::Run(e.to_string()))?;
            writeln!(output, "{text}").and_then(|()| output.flush()).map_err(|e| Failure::Run(e.to_string()))?;
        }
        if let Side::Ours(communicator) = side {
            drop(communicator);
            let _ = writeln!(output, "{{}}").and_then(|()| output.flush());
            return Ok(ExitCode::SUCCESS);
        }
        drop(kept);
        // NCCL's communicator and a graph that did not finish may hold the process: it has nothing left to do.
        let _ = writeln!(output, "{{}}").and_then(|()| output.flush());
        std::process::exit(0)
    }
}
