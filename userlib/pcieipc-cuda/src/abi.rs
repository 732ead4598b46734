// SPDX-License-Identifier: MIT OR Apache-2.0
//! The structures that kernels and host share; `kernels/protocol.h` says what each field means and who writes it.

/// Most ranks of a communicator.
pub const MAX_RANKS: usize = 16;
/// Bytes of the headers at the start of each part of a mailbox.
pub const HEADERS_BYTES: u64 = 256;
/// Between the flags of two blocks.
pub const FLAG_STRIDE: u64 = 32;
/// Most blocks of a stream.
pub const MAX_BLOCKS: u64 = 64;
/// Slots of a block.
pub const SLOTS: u64 = 16;

/// The state of a rank, in device memory.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct State {
    pub epoch: u32,
    pub dead: u32,
    pub busy: u32,
    pub arrived: u32,
    pub finished: u32,
    pub pad: [u32; 27],
}

/// Why a kernel gave up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Verdict {
    pub code: u32,
    pub peer: u32,
    pub what: u32,
    pub epoch: u32,
    pub ours: u64,
    pub theirs: u64,
    pub waited_ns: u64,
    pub header_word: u32,
    pub written: u32,
    pub pad: [u32; 4],
}

/// Host memory that all ranks map.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Control {
    pub abort: [u64; MAX_RANKS],
    pub failed: [u64; MAX_RANKS],
    pub deadline_ns: [u64; MAX_RANKS],
    pub verdict: [Verdict; MAX_RANKS],
}

/// Where the parts of a mailbox lie.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Layout {
    pub half: u64,
    pub sender: u64,
    pub flags: u64,
    pub lines: u64,
    pub whole: u64,
    pub slots: u64,
    pub lines_bytes: u64,
    pub whole_bytes: u64,
    pub slot_bytes: u32,
    pub pad: u32,
}

/// The one argument of every kernel.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Args {
    pub state: u64,
    pub control: u64,
    pub input: u64,
    pub output: u64,
    pub bytes: u64,
    pub rank: u32,
    pub ranks: u32,
    pub header: [u32; 4],
    pub push_warps: u32,
    pub piece: u32,
    pub op: u32,
    pub flags: u32,
    pub empty: [u32; 4],
    pub layout: Layout,
    pub tx: [u64; MAX_RANKS],
    pub rx: [u64; MAX_RANKS],
}

/// Do nothing.
pub const ARG_NOOP: u32 = 1;
/// Input and output are aligned to 16 bytes.
pub const ARG_ALIGNED: u32 = 2;

/// A deadline passed.
pub const CODE_TIMEOUT: u32 = 1;
/// Headers differ.
pub const CODE_MISMATCH: u32 = 2;
/// Another rank gave up, or somebody called abort.
pub const CODE_ABORTED: u32 = 3;
/// Two kernels of one communicator ran at once.
pub const CODE_CONCURRENT: u32 = 4;

// The kernels assert the same sizes when they are compiled.
const _: () = assert!(size_of::<State>() == 128 && size_of::<Verdict>() == 64 && size_of::<Control>() == 1408);
const _: () = assert!(size_of::<Layout>() == 72 && size_of::<Args>() == 424);
const _: () = assert!(std::mem::offset_of!(Args, layout) == 96 && std::mem::offset_of!(Args, tx) == 168);

impl Layout {
    /// A layout for `ranks` ranks: lines for tensors of up to `narrow` and `whole` bytes, and slots of `slot` bytes for
    /// `blocks` blocks.
    pub fn new(ranks: usize, narrow: u64, whole: u64, slot: u32, blocks: u64) -> Self {
        let page = |bytes: u64| bytes.next_multiple_of(4096);
        let flags = HEADERS_BYTES;
        let lines = page(flags + MAX_BLOCKS * FLAG_STRIDE);
        let lines_bytes = page(2 * narrow);
        let whole_at = lines + lines_bytes;
        let whole_bytes = page(whole);
        let slots = whole_at + whole_bytes;
        let sender = page(slots + blocks * SLOTS * u64::from(slot));
        Self {
            half: sender * ranks as u64,
            sender,
            flags,
            lines,
            whole: whole_at,
            slots,
            lines_bytes,
            whole_bytes,
            slot_bytes: slot,
            pad: 0,
        }
    }

    /// Bytes of a whole mailbox.
    pub fn bytes(&self) -> u64 {
        2 * self.half
    }
}
