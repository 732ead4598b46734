// SPDX-License-Identifier: MIT OR Apache-2.0
//! The longest tensors of two ranks go by copy engines: `kernels/engine.h` says how.

use std::sync::Arc;

use pcieipc::Result;

use crate::{
    abi::{ARG_NOOP, Args, Layout},
    driver::{Address, Device, Event, Function, Launch, Stream},
};

/// The lane on which copies run beside the kernel that reads what comes, and the kernel that holds them back.
#[derive(Debug)]
pub struct Engine {
    lane: Stream,
    fork: Event,
    join: Event,
    gate: Function,
    captured: bool,
}

/// A copy of one chunk, and whether it uses a part of the staging again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Copy {
    chunk: u32,
    from: u64,
    to: u64,
    again: bool,
}

/// What engines copy of a tensor: not the first bytes, nor the last ones where they do not fill a line; kernels push those.
fn copies(bytes: u64, prefix: u64, chunk: u64) -> impl Iterator<Item = Copy> {
    let whole = bytes & !15;
    (0..bytes.div_ceil(chunk.max(1))).map(move |number| {
        let start = number * chunk;
        let (from, to) = (start.max(prefix).min(whole), (start + chunk).min(whole));
        Copy { chunk: number as u32, from, to: to.max(from), again: number >= 2 }
    })
}

impl Engine {
    pub fn new(device: &Arc<dyn Device>, gate: Function) -> Result<Self> {
        let (lane, fork, join) = (device.lane()?, device.event(false)?, device.event(false)?);
        Ok(Self { lane, fork, join, gate, captured: false })
    }

    /// Whether a graph holds its copies.
    pub fn is_captured(&self) -> bool {
        self.captured
    }

    /// Loads the gate.
    pub fn warm_up(&self, device: &dyn Device, args: &Args) -> Result<()> {
        // SAFETY: with this flag a kernel touches nothing.
        unsafe { self.gate(device, &Args { flags: ARG_NOOP, ..*args }, 0, Stream(0)) }
    }

    /// # Safety
    /// As for [`Device::launch`].
    unsafe fn gate(&self, device: &dyn Device, args: &Args, chunk: u32, stream: Stream) -> Result<()> {
        let args = Args { piece: chunk, ..*args };
        // SAFETY: the caller's promise.
        unsafe { device.launch(self.gate, Launch { blocks: 1, threads: 32, overlap: false }, &args, stream) }
    }

    /// Enqueues a call: the first gate, then copies beside the kernel, then both are waited for.
    ///
    /// # Safety
    /// As for [`Device::launch`].
    pub unsafe fn launch(
        &mut self,
        device: &dyn Device,
        kernel: Function,
        launch: Launch,
        args: &Args,
        stream: Stream,
        capture: Option<u64>,
    ) -> Result<()> {
        let (rank, peer) = (args.rank as usize, 1 - args.rank as usize);
        let layout = &args.layout;
        let staging: Address = args.tx[peer] + layout.staging + Layout::place(peer, rank) * 2 * layout.chunk;
        // SAFETY: the caller's promise.
        unsafe { self.gate(device, args, 0, stream) }?;
        device.record(self.fork, stream)?;
        device.wait(self.lane, self.fork)?;
        // From here on the lane is part of a capture.
        self.captured |= capture.is_some();
        // SAFETY: the caller's promise.
        unsafe { device.launch(kernel, Launch { overlap: false, ..launch }, args, stream) }?;
        for copy in copies(args.bytes, args.prefix, layout.chunk) {
            if copy.again {
                // SAFETY: the caller's promise.
                unsafe { self.gate(device, args, copy.chunk, self.lane) }?;
            }
            if copy.to > copy.from {
                let to = staging + copy.from % (2 * layout.chunk);
                device.copy(to, args.input + copy.from, copy.to - copy.from, self.lane)?;
            }
        }
        device.record(self.join, self.lane)?;
        device.wait(stream, self.join)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_what_kernels_push_make_up_the_tensor() {
        const CHUNK: u64 = 4096;
        for bytes in [0, 1, 15, 16, 17, 100, 4095, 4096, 4097, 8192, 12289, 65536 + 7] {
            for prefix in [0, 16, 1024, 4096].map(|p: u64| p.min(bytes & !15)) {
                let mut next = prefix;
                for copy in copies(bytes, prefix, CHUNK) {
                    if copy.to > copy.from {
                        assert_eq!(copy.from, next);
                        next = copy.to;
                        assert!(copy.from / CHUNK == (copy.to - 1) / CHUNK && copy.from / CHUNK == u64::from(copy.chunk));
                    }
                    assert_eq!(copy.again, copy.chunk >= 2);
                }
                assert_eq!(next, bytes & !15, "{bytes} bytes, {prefix} pushed");
            }
        }
    }
}
