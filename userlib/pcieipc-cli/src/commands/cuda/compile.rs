// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc cuda compile`: fills the cache of kernels, for devices that need not be here.

use std::{
    process::ExitCode,
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use pcieipc::reduce::Kind;
use pcieipc_cuda::kernels;

use super::side::kind;
use crate::failure::Failure;

/// Compile all kernels into the cache, also for devices that are not here
#[derive(clap::Args)]
pub struct Compile {
    /// Compute capabilities, separated by commas
    #[arg(long, default_value = "7.5,8.0,8.6,8.9,9.0,10.0,12.0")]
    pub capabilities: String,
    /// Element types, by name, separated by commas
    #[arg(long, default_value = "f64,f32,f16,bf16,i8,i16,i32,i64,u8,u16,u32,u64")]
    pub kinds: String,
}

impl Compile {
    pub fn run(self) -> Result<ExitCode, Failure> {
        let capability = |text: &str| -> Result<(u32, u32), Failure> {
            text.split_once('.')
                .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)))
                .ok_or_else(|| Failure::Use(format!("{text} is not a compute capability")))
        };
        let capabilities = self.capabilities.split(',').map(capability).collect::<Result<Vec<_>, _>>()?;
        let kinds = self.kinds.split(',').map(kind).collect::<Result<Vec<_>, _>>()?;
        let work: Vec<((u32, u32), Option<Kind>)> =
            capabilities.iter().flat_map(|c| kinds.iter().map(|k| (*c, Some(*k))).chain([(*c, None)])).collect();
        let (next, begun) = (AtomicUsize::new(0), Instant::now());
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        let run = || -> Result<usize, Failure> {
            let mut done = 0;
            while let Some((capability, kind)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                match kind {
                    Some(kind) => kernels::image(*kind, *capability)?,
                    None => kernels::probe_image(*capability)?,
                };
                done += 1;
            }
            Ok(done)
        };
        let done: Vec<Result<usize, Failure>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
            threads
                .into_iter()
                .map(|t| t.join().unwrap_or_else(|_| Err(Failure::Run("a compiling thread ended".into()))))
                .collect()
        });
        let total = done.into_iter().sum::<Result<usize, Failure>>()?;
        println!("{total} files of kernels for {} in {:.1?}", self.capabilities, begun.elapsed());
        Ok(ExitCode::SUCCESS)
    }
}
