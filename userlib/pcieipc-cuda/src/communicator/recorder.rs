// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the kernels of a build that traces write their steps.

use pcieipc::{Error, Result};

use crate::{
    abi::Step,
    driver::{Address, Device, Stream},
};

/// Steps that there is room for.
const ROOM: u32 = 1 << 20;
/// The counter, the room, and what fills them up to 16 bytes.
const HEAD: u64 = 16;
const STEP: u64 = size_of::<Step>() as u64;

/// Device memory for steps; it stays for good, since graphs may record into it.
#[derive(Debug)]
pub struct Recorder {
    at: Address,
}

impl Recorder {
    pub fn new(device: &dyn Device) -> Result<Self> {
        let recorder = Self { at: device.alloc(HEAD + u64::from(ROOM) * STEP)? };
        recorder.empty(device)?;
        Ok(recorder)
    }

    /// For the state of a rank.
    pub fn address(&self) -> Address {
        self.at
    }

    fn empty(&self, device: &dyn Device) -> Result<()> {
        device.fill(self.at, 0, HEAD / 4, Stream(0))?;
        device.synchronize(Stream(0))?;
        device.write(self.at + 4, &ROOM.to_le_bytes())
    }

    /// Takes what was recorded.
    pub fn take(&self, device: &dyn Device) -> Result<Vec<Step>> {
        let mut count = [0; 4];
        device.read(&mut count, self.at)?;
        let count = u32::from_le_bytes(count);
        if count > ROOM {
            self.empty(device)?;
            return Err(Error::Argument(format!(
                "{count} steps were recorded and there is room for {ROOM}; trace shorter calls"
            )));
        }
        let mut bytes = vec![0; (u64::from(count) * STEP) as usize];
        device.read(&mut bytes, self.at + HEAD)?;
        self.empty(device)?;
        Ok(bytes.chunks_exact(STEP as usize).map(step).collect())
    }
}

fn step(bytes: &[u8]) -> Step {
    let word = |at: usize| bytes[at..at + 4].iter().rev().fold(0u32, |n, byte| n << 8 | u32::from(*byte));
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    Step { verb: word(0), peer: word(4), epoch: word(8), bytes: word(12), at: long(16), place: long(24), time: long(32) }
}
