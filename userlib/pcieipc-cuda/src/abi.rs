// SPDX-License-Identifier: MIT OR Apache-2.0
//! The structures that kernels and host share; `kernels/protocol.h` says what each field means and who writes it.

/// Most ranks of a communicator.
pub const MAX_RANKS: usize = 16;
/// Bytes of the headers and credits at the start of each part of a mailbox.
pub const HEADERS_BYTES: u64 = 1024;
/// Most chunks of a tensor that copy engines move: each has a credit, behind the headers.
pub const MAX_CHUNKS: u64 = (HEADERS_BYTES - 64) / 8;
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
    pub finished: [u32; 2],
    pub engine_epoch: u32,
    pub engine_chunks: u32,
    pub emptied: u64,
    pub trace: u64,
    pub pad: [u32; 20],
}

/// A step of a kernel, of a build that traces.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Step {
    pub verb: u32,
    pub peer: u32,
    pub epoch: u32,
    pub bytes: u32,
    pub at: u64,
    pub place: u64,
    pub time: u64,
}

pub const STEP_SEND: u32 = 1;
pub const STEP_TAKE: u32 = 2;
pub const STEP_STORE: u32 = 3;
pub const STEP_SUM: u32 = 4;
pub const STEP_HEAR: u32 = 5;

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
    pub slots: u64,
    pub lines_bytes: u64,
    pub staging: u64,
    pub chunk: u64,
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
    pub prefix: u64,
    pub input_of: u64,
    pub output_of: u64,
    pub layout: Layout,
    pub tx: [u64; MAX_RANKS],
    pub rx: [u64; MAX_RANKS],
}

/// Do nothing.
pub const ARG_NOOP: u32 = 1;
/// Input and output are aligned to 16 bytes.
pub const ARG_ALIGNED: u32 = 2;
/// The kernel that follows may be made resident while this one still waits for the one before.
pub const ARG_EARLY: u32 = 4;

/// The place of a step in registered memory.
pub const REGISTERED: u64 = u64::MAX;

/// A deadline passed.
pub const CODE_TIMEOUT: u32 = 1;
/// Headers differ.
pub const CODE_MISMATCH: u32 = 2;
/// Another rank gave up, or somebody called abort.
pub const CODE_ABORTED: u32 = 3;
/// Two kernels of one communicator ran at once.
pub const CODE_CONCURRENT: u32 = 4;
/// Results differ between ranks.
pub const CODE_DIFFERENT: u32 = 5;

// The kernels assert the same sizes when they are compiled.
const _: () = assert!(size_of::<State>() == 128 && size_of::<Verdict>() == 64 && size_of::<Control>() == 1408);
const _: () = assert!(std::mem::offset_of!(State, trace) == 40 && size_of::<Step>() == 40);
const _: () = assert!(size_of::<Layout>() == 72 && size_of::<Args>() == 448);
const _: () = assert!(std::mem::offset_of!(Args, layout) == 120 && std::mem::offset_of!(Args, tx) == 192);

impl Layout {
    /// A layout for `ranks` ranks: lines for tensors of up to `lines` bytes, slots of `slot` bytes for `blocks` blocks, and for each
    /// sender two chunks of staging of `chunk` bytes, behind both halves.
    pub fn new(ranks: usize, lines: u64, slot: u32, blocks: u64, chunk: u64) -> Self {
        let page = |bytes: u64| bytes.next_multiple_of(4096);
        let flags = HEADERS_BYTES;
        let lines_at = page(flags + MAX_BLOCKS * FLAG_STRIDE);
        let lines_bytes = page(lines);
        let slots = lines_at + lines_bytes;
        let sender = page(slots + blocks * SLOTS * u64::from(slot));
        let half = sender * Self::senders(ranks);
        Self { half, sender, flags, lines: lines_at, slots, lines_bytes, staging: 2 * half, chunk, slot_bytes: slot, pad: 0 }
    }

    /// How many senders a mailbox has places for.
    pub fn senders(ranks: usize) -> u64 {
        (ranks as u64).saturating_sub(1).max(1)
    }

    /// The place of a sender in the mailbox of `reader`, which has none itself.
    pub fn place(reader: usize, sender: usize) -> u64 {
        (if sender > reader { sender - 1 } else { sender }) as u64
    }

    /// Bytes of a mailbox in host memory, which has no staging.
    pub fn host_bytes(&self) -> u64 {
        2 * self.half
    }

    /// Bytes of a mailbox on a device of one of `ranks` ranks.
    pub fn device_bytes(&self, ranks: usize) -> u64 {
        2 * self.half + Self::senders(ranks) * 2 * self.chunk
    }

    /// Where lines are, and how many bytes: of every sender in both halves, and the staging.
    pub fn empties(&self, ranks: usize, staging: bool) -> Vec<(u64, u64)> {
        let parts = (0..2).flat_map(|half| (0..Self::senders(ranks)).map(move |s| (half, s)));
        let mut all: Vec<_> =
            parts.map(|(half, s)| (half * self.half + s * self.sender + self.lines, self.lines_bytes)).collect();
        if staging && self.chunk > 0 {
            all.push((self.staging, Self::senders(ranks) * 2 * self.chunk));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_mailbox_do_not_overlap_and_fit_it() {
        for ranks in [1, 2, 3, 16] {
            let l = Layout::new(ranks, 5000, 8192, 32, 1 << 20);
            assert!(HEADERS_BYTES + MAX_BLOCKS * FLAG_STRIDE <= l.lines && l.lines + l.lines_bytes <= l.slots);
            assert!(l.slots + 32 * SLOTS * 8192 <= l.sender && l.half == l.sender * Layout::senders(ranks));
            let mut ends: Vec<_> = l.empties(ranks, true);
            ends.sort_unstable();
            assert!(ends.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "{ends:?}");
            assert!(ends.iter().all(|(at, bytes)| at % 16 == 0 && at + bytes <= l.device_bytes(ranks)));
            assert!(l.empties(ranks, false).iter().all(|(at, bytes)| at + bytes <= l.host_bytes()));
        }
        assert_eq!((Layout::place(1, 0), Layout::place(0, 1), Layout::place(1, 2)), (0, 0, 1));
    }
}
