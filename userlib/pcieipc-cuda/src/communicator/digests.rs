// SPDX-License-Identifier: MIT OR Apache-2.0
//! The check of results between ranks: after a call each rank makes a number of its result, all exchange theirs, and every rank compares.

use std::sync::Arc;

use pcieipc::Result;

use crate::{
    abi::{ARG_ALIGNED, ARG_NOOP, Args},
    driver::{Address, Device, Function, Launch, Stream},
};

/// The kernels, and a number for each rank: what this one gives, and what all gave.
#[derive(Debug)]
pub struct Digests {
    digest: Function,
    same: Function,
    pub own: Address,
    pub all: Address,
    ranks: u64,
}

const LAUNCH: Launch = Launch { blocks: 16, threads: 512, overlap: false };

impl Digests {
    pub fn new(device: &Arc<dyn Device>, ranks: usize) -> Result<Self> {
        let module = device.kernels(None)?;
        let (digest, same) = (device.function(module, "digest")?, device.function(module, "same")?);
        let bytes = 8 * ranks as u64;
        let own = device.alloc(bytes)?;
        match device.alloc(bytes) {
            Ok(all) => Ok(Self { digest, same, own, all, ranks: ranks as u64 }),
            Err(error) => {
                device.free(own)?;
                Err(error)
            }
        }
    }

    /// Bytes of the numbers of all ranks.
    pub fn bytes(&self) -> u64 {
        8 * self.ranks
    }

    /// Loads the kernels.
    pub fn warm_up(&self, device: &dyn Device, args: &Args) -> Result<()> {
        let args = Args { flags: ARG_NOOP, bytes: 0, output: self.own, input: self.all, ranks: 0, ..*args };
        // SAFETY: a tensor of no bytes and no ranks to compare: the first kernel adds 0 to a number of ours.
        unsafe {
            device.launch(self.digest, LAUNCH, &args, Stream(0))?;
            device.launch(self.same, Launch { blocks: 1, threads: 32, overlap: false }, &args, Stream(0))
        }
    }

    /// Enqueues making this rank's number of a result; the others' places are empty, so that a sum brings all together.
    ///
    /// # Safety
    /// As for [`Device::launch`].
    pub unsafe fn make(&self, device: &dyn Device, args: &Args, result: Address, bytes: u64, stream: Stream) -> Result<()> {
        device.fill(self.own, 0, self.bytes() / 4, stream)?;
        let flags = if result % 16 == 0 { ARG_ALIGNED } else { 0 };
        let output = self.own + 8 * u64::from(args.rank);
        // SAFETY: the caller's promise for the result; the number is ours.
        unsafe { device.launch(self.digest, LAUNCH, &Args { input: result, output, bytes, flags, ..*args }, stream) }
    }

    /// Enqueues the comparison, when the numbers of all are there.
    ///
    /// # Safety
    /// As for [`Device::launch`].
    pub unsafe fn compare(&self, device: &dyn Device, args: &Args, stream: Stream) -> Result<()> {
        let launch = Launch { blocks: 1, threads: 32, overlap: false };
        // SAFETY: the numbers are ours; the state is as for every kernel.
        unsafe { device.launch(self.same, launch, &Args { input: self.all, bytes: self.bytes(), ..*args }, stream) }
    }

    /// Gives the memory back.
    pub fn free(self, device: &dyn Device) {
        // Fails only when the context is gone.
        let _ = device.free(self.own).and_then(|()| device.free(self.all));
    }
}
