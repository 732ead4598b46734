// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a path does, not what it claims: distinct patterns are written each way, by a kernel and by a copy engine, and read back.

use std::sync::Arc;

use pcieipc::Result;

use crate::{
    abi::Args,
    driver::{Address, Device, Function, Launch, Stream},
};

/// Bytes of each pattern.
pub const PATTERN_BYTES: u64 = 256 << 10;

/// The kernels that prove and measure.
#[derive(Debug, Clone)]
pub struct Probe {
    device: Arc<dyn Device>,
    store: Function,
    check: Function,
    push: Function,
    pull: Function,
    pingpong: Function,
}

const EMPTY: Args = Args {
    state: 0,
    control: 0,
    input: 0,
    output: 0,
    bytes: 0,
    rank: 0,
    ranks: 0,
    header: [0; 4],
    push_warps: 0,
    piece: 0,
    op: 0,
    flags: 0,
    empty: [0; 4],
    prefix: 0,
    input_of: 0,
    output_of: 0,
    layout: crate::abi::Layout {
        half: 0,
        sender: 0,
        flags: 0,
        lines: 0,
        slots: 0,
        lines_bytes: 0,
        staging: 0,
        chunk: 0,
        slot_bytes: 0,
        pad: 0,
    },
    tx: [0; 16],
    rx: [0; 16],
};

/// The seed of what `from` writes to `to`, by an engine or by a kernel.
fn seed(from: usize, to: usize, engine: bool) -> u32 {
    0x5eed_0001 + (from as u32) * 0x100_0193 + (to as u32) * 0x1_0001 + u32::from(engine)
}

impl Probe {
    /// Loads the kernels.
    ///
    /// # Errors
    /// `System`.
    pub fn new(device: &Arc<dyn Device>) -> Result<Self> {
        let module = device.kernels(None)?;
        let function = |name| device.function(module, name);
        Ok(Self {
            device: device.clone(),
            store: function("probe_store")?,
            check: function("probe_check")?,
            push: function("probe_push")?,
            pull: function("probe_pull")?,
            pingpong: function("probe_pingpong")?,
        })
    }

    fn run(&self, function: Function, blocks: u32, threads: u32, args: &Args, stream: Stream) -> Result<()> {
        // SAFETY: the callers below pass addresses that live until they have synchronized.
        unsafe { self.device.launch(function, Launch { blocks, threads, overlap: false }, args, stream) }
    }

    /// Writes the patterns of `from` to `to` at `target`, which has room for two.
    ///
    /// # Errors
    /// `System`.
    pub fn write(&self, target: Address, from: usize, to: usize) -> Result<()> {
        let header = |engine| [seed(from, to, engine), 0, 0, 0];
        let own = self.device.alloc(PATTERN_BYTES)?;
        let done = (|| {
            self.run(
                self.store,
                4,
                512,
                &Args { output: target, bytes: PATTERN_BYTES, header: header(false), ..EMPTY },
                Stream(0),
            )?;
            self.run(self.store, 4, 512, &Args { output: own, bytes: PATTERN_BYTES, header: header(true), ..EMPTY }, Stream(0))?;
            self.device.copy(target + PATTERN_BYTES, own, PATTERN_BYTES, Stream(0))?;
            self.device.synchronize(Stream(0))
        })();
        self.device.free(own)?;
        done
    }

    /// Counts the words of the patterns of `from` to `to` that are wrong at `place`: as a kernel reads them, and as a copy
    /// engine does.
    ///
    /// # Errors
    /// `System`.
    pub fn wrong(&self, place: Address, from: usize, to: usize) -> Result<u32> {
        let own = self.device.alloc(PATTERN_BYTES + 256)?;
        let done = (|| {
            self.device.fill(own + PATTERN_BYTES, 0, 1, Stream(0))?;
            for engine in [false, true] {
                let at = place + if engine { PATTERN_BYTES } else { 0 };
                self.device.copy(own, at, PATTERN_BYTES, Stream(0))?;
                for input in [at, own] {
                    let args = Args {
                        input,
                        output: own + PATTERN_BYTES,
                        bytes: PATTERN_BYTES,
                        header: [seed(from, to, engine), 0, 0, 0],
                        ..EMPTY
                    };
                    self.run(self.check, 4, 512, &args, Stream(0))?;
                }
            }
            self.device.synchronize(Stream(0))?;
            let mut word = [0; 4];
            self.device.read(&mut word, own + PATTERN_BYTES)?;
            Ok(u32::from_le_bytes(word))
        })();
        self.device.free(own)?;
        done
    }

    /// Enqueues `bytes` of stores to, or loads from, a ring of `ring` bytes at `place`.
    ///
    /// # Errors
    /// `System`.
    pub fn stream(&self, place: Address, pull: bool, ring: u32, bytes: u64, state: Address, stream: Stream) -> Result<()> {
        let args = Args { state, input: place, output: place, bytes, piece: ring, ..EMPTY };
        self.run(if pull { self.pull } else { self.push }, 16, 512, &args, stream)
    }

    /// Enqueues this side of `rounds` rounds of a flag to and fro; the mean round in ns goes to `result`.
    ///
    /// # Errors
    /// `System`.
    pub fn pingpong(
        &self,
        first: bool,
        theirs: Address,
        mine: Address,
        rounds: u32,
        result: Address,
        stream: Stream,
    ) -> Result<()> {
        let mut args = Args { output: result, rank: u32::from(!first), op: rounds, header: [0, 2000, 0, 0], ..EMPTY };
        args.tx[0] = theirs;
        args.rx[0] = mine;
        self.run(self.pingpong, 1, 1, &args, stream)
    }
}
