// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which kernel serves a call, and how it is launched: a pure function of what all ranks know, so that they choose the same.

use pcieipc::{
    plan::{self, Algorithm, Collective, Plan, Shape, Tree},
    reduce::Op,
};

/// How a rank's writes reach another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Path {
    /// Through host memory.
    Host,
    /// Straight into the other device's memory, over PCIe.
    Peer,
    /// The same over links with native atomics, where accesses of 16 bytes are whole.
    PeerWide,
}

impl Path {
    /// As reports write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Peer | Self::PeerWide => "peer",
        }
    }
}

/// A kernel and its launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Its name in [`crate::kernels::NAMES`].
    pub kernel: &'static str,
    /// Blocks, each with one warp more than `threads`.
    pub blocks: u32,
    /// Threads that move data.
    pub threads: u32,
    /// For flows, streams and shares: warps that push, or watch.
    pub push_warps: u32,
    /// For streams and shares: bytes of a tile.
    pub tile: u32,
    /// For lines: cycles before the first look. One that comes too early costs a whole trip to host memory.
    pub linger: u32,
    /// For copy engines: bytes that kernels push while the engine starts.
    pub prefix: u64,
}

impl Choice {
    /// What ranks must have in common to understand each other. Kernels of lines do, whatever their launch.
    pub fn plan(&self) -> (&'static str, [u64; 3]) {
        match self.kernel {
            k if k.starts_with("stream") => ("stream", [self.blocks.into(), self.tile.into(), 0]),
            k if k.starts_with("shares") => ("shares", [self.blocks.into(), self.tile.into(), 0]),
            k if k.starts_with("direct") => ("direct", [self.blocks.into(), self.tile.into(), 0]),
            k if k.starts_with("engine") => ("engine", [self.blocks.into(), self.tile.into(), self.prefix]),
            _ => ("lines", [0; 3]),
        }
    }

    /// The steps that the kernel takes for a rank: plans of the library, of bytes, each with the first byte of the tensor that it covers.
    /// A build that traces is compared with them ([`crate::trace`]), and they are what [`pcieipc::plan::check`] proves.
    pub fn plans(&self, ranks: usize, rank: usize, bytes: u64) -> Vec<(u64, Plan)> {
        let (algorithm, chunk, each) = match self.plan().0 {
            // One plan for each round: its shards are the ranks' tiles.
            "shares" => (Algorithm::TwoShot, self.tile.into(), u64::from(self.tile) * ranks as u64),
            "direct" => (Algorithm::Direct, self.tile.into(), u64::from(self.tile) * ranks as u64),
            "lines" => (Algorithm::OneShot, LINE, u64::MAX),
            _ => (Algorithm::OneShot, self.tile.into(), u64::MAX),
        };
        (0..bytes.div_ceil(each))
            .filter_map(|part| {
                let (from, count) = (part * each, each.min(bytes - part * each) as usize);
                let shape = Shape { align: chunk as usize, ..Shape::new(ranks, count, chunk as usize) };
                Some((from, plan::build(Collective::AllReduce, algorithm, shape, rank, &Tree::flat(ranks))?))
            })
            .collect()
    }

    /// Whether it reads the tensors of the other ranks where they lie.
    pub fn by_reading(&self) -> bool {
        self.kernel.starts_with("direct")
    }

    /// Whether copy engines move the data.
    pub fn by_engine(&self) -> bool {
        self.kernel.starts_with("engine")
    }
}

/// What a mailbox has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest tensor that goes as lines.
    pub lines: u64,
    /// Longest tile.
    pub tile: u32,
}

/// The limits, by the path and the number of ranks: each peer takes its own lines and slots.
pub fn limits(path: Path, ranks: usize) -> Limits {
    match (ranks, path) {
        (2, Path::Host) => Limits { lines: 512 << 10, tile: 32 << 10 },
        (2, Path::Peer) => Limits { lines: 1 << 20, tile: 64 << 10 },
        (2, Path::PeerWide) => Limits { lines: 32 << 20, tile: 64 << 10 },
        (_, Path::PeerWide) => Limits { lines: 512 << 10, tile: 16 << 10 },
        _ => Limits { lines: 128 << 10, tile: 16 << 10 },
    }
}

/// Most blocks on the host path and on the peer path: what is left is for computing.
pub const BLOCKS: [u32; 2] = [16, 32];

/// Least chunk of staging for which a copy engine is worth while.
pub const LEAST_CHUNK: u64 = 16 << 20;

/// What all calls of a communicator have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// The slowest path of any pair.
    pub path: Path,
    /// How many ranks.
    pub ranks: usize,
    /// Bytes of a chunk of the staging for copy engines; 0 if there is none.
    pub chunk: u64,
    /// Most blocks of a call, as the options have it.
    pub blocks: u32,
}

impl Setting {
    fn most_blocks(self) -> u32 {
        self.blocks.clamp(1, BLOCKS[usize::from(self.path != Path::Host)])
    }

    fn has_engine(self, bytes: u64) -> bool {
        self.path == Path::PeerWide
            && self.ranks == 2
            && self.chunk >= LEAST_CHUNK
            && bytes.div_ceil(self.chunk) <= crate::abi::MAX_CHUNKS
    }

    fn lines(self, kernel: &'static str, bytes: u64, threads: u32, linger: u32) -> Choice {
        let blocks = blocks_for(bytes.div_ceil(LINE), threads, self.most_blocks());
        Choice { kernel, blocks, threads, push_warps: 0, tile: 0, linger, prefix: 0 }
    }

    fn flow(self, kernel: &'static str, bytes: u64, push: u32, take: u32) -> Choice {
        let threads = (push + take) * 32;
        Choice { push_warps: push, ..self.lines(kernel, bytes, threads, 0) }
    }

    fn stream(self, kernel: &'static str, bytes: u64, push: u32, consume: u32, tile: u32) -> Choice {
        let tile = tile.min(limits(self.path, self.ranks).tile);
        let (blocks, threads) = (blocks_for(bytes, tile, self.most_blocks()), (push + consume + 2) * 32);
        Choice { kernel, blocks, threads, push_warps: push, tile, linger: 0, prefix: 0 }
    }

    /// Two-shot: each rank has a tile of a round. Of the warps that do not push, four tell and acquire numbers; adding and copying share
    /// the `rest`.
    fn shares(self, kernel: &'static str, bytes: u64, push: u32, rest: u32, tile: u32) -> Choice {
        let blocks = blocks_for(bytes, tile * self.ranks as u32, self.most_blocks());
        Choice { kernel, blocks, threads: (push + 4 + rest) * 32, push_warps: push, tile, linger: 0, prefix: 0 }
    }

    /// The longest tile of a round with which every block has one.
    fn tile_of_rounds(self, bytes: u64) -> u32 {
        let even = bytes.div_ceil(self.ranks as u64 * u64::from(self.most_blocks())).next_multiple_of(KIB);
        even.clamp(4 * KIB, limits(self.path, self.ranks).tile.into()) as u32
    }

    /// Threads of a block with which all blocks send a tensor at once, a line each.
    fn threads_for_one_pass(self, bytes: u64) -> u32 {
        bytes.div_ceil(LINE * u64::from(self.most_blocks())).next_multiple_of(32).min(1 << 20) as u32
    }

    /// Whether a second trip costs less than the bytes that it saves: of one shot a rank sends n - 1 tensors, of two 2 (n - 1) / n.
    fn is_worth_two_shots(self, bytes: u64) -> bool {
        let ranks = self.ranks as u64;
        let spared = bytes.saturating_mul((ranks - 1) * ranks.saturating_sub(2)) / ranks;
        spared > SECOND_TRIP[usize::from(self.path == Path::PeerWide)]
    }
}

/// What a link carries in the time that the second trip takes, about 8 µs: over PCIe or through the host, and over NVLink. A model: more
/// than two devices could not be measured.
const SECOND_TRIP: [u64; 2] = [400_000, 2_800_000];

const LINE: u64 = 16;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn blocks_for(units: u64, threads: u32, most: u32) -> u32 {
    units.div_ceil(u64::from(threads)).clamp(1, u64::from(most)) as u32
}

/// The choice for a call of `bytes` bytes. Ranks may differ in `in_place`; what they choose works together all the same.
pub fn choose(setting: Setting, bytes: u64, op: Op, in_place: bool) -> Choice {
    let choice = match (setting.path, setting.ranks == 2 && op == Op::Sum) {
        (path, false) => general(setting, path, bytes, op == Op::Sum),
        (Path::Host, _) => through_host(setting, bytes),
        (Path::Peer, _) => over_pcie(setting, bytes),
        (Path::PeerWide, _) if setting.most_blocks() <= 16 => over_nvlink_by_few(setting, bytes),
        (Path::PeerWide, _) => over_nvlink(setting, bytes, in_place),
    };
    // Some were measured with all blocks that there are.
    Choice { blocks: choice.blocks.min(setting.most_blocks()), ..choice }
}

/// The choice for registered tensors, which are read where they lie; none where staging is better or peers can not be reached.
pub fn choose_registered(s: Setting, bytes: u64, op: Op) -> Option<Choice> {
    if s.path == Path::Host || s.ranks < 2 || bytes <= limits(s.path, s.ranks).lines {
        return None;
    }
    let kernel = if op == Op::Sum { "direct_sum_many_u2" } else { "direct_any_many_u1" };
    let even = bytes.div_ceil(s.ranks as u64 * u64::from(s.most_blocks())).next_multiple_of(KIB);
    let tile = even.clamp(4 * KIB, 64 * KIB) as u32;
    let blocks = blocks_for(bytes, tile * s.ranks as u32, s.most_blocks());
    Some(Choice { kernel, blocks, threads: 26 * 32, push_warps: 0, tile, linger: 0, prefix: 0 })
}

/// More than two ranks, or another operation than a sum.
fn general(s: Setting, path: Path, bytes: u64, sum: bool) -> Choice {
    let (lines, stream, shares) = match (path, sum) {
        (Path::PeerWide, true) => ("whole_sum_many_u1", "stream_sum_many_u2", "shares_sum_many_u2"),
        (Path::PeerWide, false) => ("whole_any_many_u1", "stream_any_many_u1", "shares_any_many_u1"),
        (_, true) => ("pair_sum_many_u1", "stream_sum_many_u2", "shares_sum_many_u2"),
        (_, false) => ("pair_any_many_u1", "stream_any_many_u1", "shares_any_many_u1"),
    };
    // Longer ones of two ranks would do as lines too, but one thread of a general kernel has only one on its way.
    match bytes {
        _ if s.is_worth_two_shots(bytes) => s.shares(shares, bytes, 6, 16, s.tile_of_rounds(bytes)),
        _ if bytes > limits(path, s.ranks).lines.min(MIB) => s.stream(stream, bytes, 4, 12, 16 << 10),
        // Wide enough for one pass.
        _ if bytes <= 64 * KIB => s.lines(lines, bytes, s.threads_for_one_pass(bytes).clamp(128, 512), 0),
        _ => s.lines(lines, bytes, 512, 0),
    }
}

/// Two ranks, measured on two H200 through host memory.
fn through_host(s: Setting, bytes: u64) -> Choice {
    let stream = |push, consume, tile| s.stream("stream_sum_two_u4", bytes, push, consume, tile);
    match bytes {
        _ if bytes <= 2 * KIB => s.lines("pair_sum_two_u1", bytes, 128, 300),
        _ if bytes <= 4 * KIB => s.lines("pair_sum_two_u1", bytes, 256, 300),
        _ if bytes <= 11 * KIB => s.lines("pair_sum_two_u1", bytes, 704, 300),
        _ if bytes <= 22 * KIB => Choice { blocks: 1, ..s.lines("pair_sum_two_u2", bytes, 704, 0) },
        _ if bytes <= 32 * KIB => s.lines("pair_sum_two_u1", bytes, 128, 1800),
        _ if bytes <= 64 * KIB => s.lines("pair_sum_two_u1", bytes, 256, 1800),
        _ if bytes <= 128 * KIB => Choice { blocks: 16, ..s.lines("pair_sum_two_u1", bytes, 704, 1800) },
        _ if bytes <= 384 * KIB => Choice { blocks: 16, ..s.lines("pair_sum_two_u2", bytes, 992, 600) },
        _ if bytes <= 512 * KIB => s.flow("pair_flow_sum_two_p4u2", bytes, 1, 8),
        _ if bytes <= 3 * MIB / 2 => stream(4, 4, 16 << 10),
        _ if bytes <= 12 * MIB => stream(4, 4, 8 << 10),
        _ if bytes <= 128 * MIB => stream(4, 8, 16 << 10),
        _ => stream(8, 8, 16 << 10),
    }
}

/// Two ranks over PCIe; no such pair could be measured.
fn over_pcie(s: Setting, bytes: u64) -> Choice {
    match bytes {
        _ if bytes <= 16 * KIB => s.lines("pair_sum_two_u1", bytes, 128, 0),
        _ if bytes <= MIB => s.lines("pair_sum_two_u1", bytes, 512, 0),
        _ if bytes <= 32 * MIB => s.stream("stream_sum_two_u4", bytes, 4, 8, 16 << 10),
        _ => s.stream("stream_sum_two_u4", bytes, 4, 12, 64 << 10),
    }
}

/// Two ranks, measured on two H200 with NVLink between them.
fn over_nvlink(s: Setting, bytes: u64, in_place: bool) -> Choice {
    let one = |threads| s.lines("whole_sum_two_u1", bytes, threads, 0);
    let two = |threads| s.lines("whole_sum_two_u2", bytes, threads, 0);
    match bytes {
        _ if bytes <= KIB => one(96),
        _ if bytes <= 64 * KIB => one(128),
        _ if bytes <= 128 * KIB => one(256),
        _ if bytes <= 256 * KIB => one(512),
        _ if bytes <= 384 * KIB => one(768),
        _ if bytes <= 448 * KIB => one(896),
        _ if bytes <= 512 * KIB => Choice { blocks: 32, ..s.lines("whole_wide_sum_two_u1", bytes, 992, 0) },
        _ if bytes <= 700 * KIB => two(768),
        _ if bytes <= 896 * KIB => two(896),
        _ if bytes <= 3 * MIB / 2 && in_place => two(512),
        _ if bytes <= 3 * MIB / 2 => s.flow("whole_flow_sum_two_p4u1", bytes, 4, 20),
        _ if bytes <= 5 * MIB / 2 => s.flow("whole_flow_sum_two_p4u2", bytes, 4, 16),
        _ if bytes <= 5 * MIB => s.flow("whole_flow_sum_two_p8u2", bytes, 4, 16),
        _ if bytes <= 7 * MIB && !in_place => s.flow("whole_flow_sum_two_p4u2", bytes, 4, 24),
        _ if bytes <= 20 * MIB || bytes <= 32 * MIB && in_place => s.flow("whole_flow_sum_two_p8u2", bytes, 4, 16),
        _ if bytes <= 32 * MIB => s.flow("whole_flow_sum_two_p8u2", bytes, 4, 20),
        _ if s.has_engine(bytes) => Choice { prefix: 2 * MIB, ..s.stream("engine_sum_two_u4", bytes, 8, 16, 32 << 10) },
        _ if bytes <= 128 * MIB => s.stream("stream_sum_two_u4", bytes, 4, 8, 64 << 10),
        _ => s.stream("stream_sum_two_u4", bytes, 4, 12, 64 << 10),
    }
}

/// The same with few blocks; measured with 8 and 16 at 64 KiB, 1 and 16 MiB.
fn over_nvlink_by_few(s: Setting, bytes: u64) -> Choice {
    let once = s.threads_for_one_pass(bytes).clamp(96, 992);
    match bytes {
        _ if bytes <= 256 * KIB => s.lines("whole_sum_two_u1", bytes, once, 0),
        _ if bytes <= 4 * MIB => s.flow("whole_flow_sum_two_p4u2", bytes, 8, 16),
        _ if s.has_engine(bytes) && bytes > 32 * MIB => over_nvlink(s, bytes, false),
        _ => s.stream("stream_sum_two_u4", bytes, 8, 8, 64 << 10),
    }
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} x {}", self.kernel, self.blocks, self.threads)?;
        if self.push_warps > 0 {
            write!(f, ", {} push", self.push_warps)?;
        }
        if self.tile > 0 {
            write!(f, ", tile {} KiB", self.tile >> 10)?;
        }
        if self.linger > 0 {
            write!(f, ", linger {}", self.linger)?;
        }
        if self.prefix > 0 {
            write!(f, ", prefix {} KiB", self.prefix >> 10)?;
        }
        Ok(())
    }
}

/// Threads that a kernel's registers allow in a block, its service warp included.
#[cfg(test)]
fn most_threads(kernel: &str) -> u32 {
    if ["stream", "engine", "shares", "direct"].iter().any(|k| kernel.starts_with(k)) { 896 } else { 1024 }
}

/// What a tuner tries for a sum; the first is what [`choose`] takes.
pub fn candidates(setting: Setting, bytes: u64) -> Vec<Choice> {
    let mut all = vec![choose(setting, bytes, Op::Sum, false)];
    all.extend(if setting.ranks == 2 { candidates_of_two(setting, bytes) } else { candidates_of_many(setting, bytes) });
    all
}

fn candidates_of_many(setting: Setting, bytes: u64) -> Vec<Choice> {
    let limits = limits(setting.path, setting.ranks);
    let lines = if setting.path == Path::PeerWide { "whole_sum_many_u1" } else { "pair_sum_many_u1" };
    let mut all = Vec::new();
    if bytes <= limits.lines.min(MIB) {
        all.extend([128, 256, 512, 768].map(|threads| setting.lines(lines, bytes, threads, 0)));
    }
    for tile in [4u32 << 10, 8 << 10, 16 << 10].into_iter().filter(|t| bytes >= 32 * KIB && *t <= limits.tile) {
        all.extend([[4, 8], [4, 12]].map(|[push, consume]| setting.stream("stream_sum_many_u2", bytes, push, consume, tile)));
        let shares = |[push, rest]: [u32; 2]| setting.shares("shares_sum_many_u2", bytes, push, rest, tile);
        all.extend([[4, 8], [4, 16], [6, 16], [8, 14]].map(shares));
    }
    all
}

fn candidates_of_two(setting: Setting, bytes: u64) -> Vec<Choice> {
    let (most, limits) = (setting.most_blocks(), limits(setting.path, 2));
    let mut all = Vec::new();
    let wide = setting.path == Path::PeerWide;
    let lines: &[(&str, u64)] = match wide {
        true => &[("whole_sum_two_u1", 1), ("whole_sum_two_u2", 2), ("whole_wide_sum_two_u1", 1)],
        false => &[("pair_sum_two_u1", 1), ("pair_sum_two_u2", 2)],
    };
    for &(kernel, unroll) in lines.iter().filter(|_| bytes <= limits.lines.min(2 * MIB)) {
        for blocks in [1, 2, 4, 8, 16, 32].into_iter().filter(|b| *b <= most) {
            for threads in [64, 96, 128, 192, 256, 352, 512, 704, 768, 896, 992] {
                let (units, at_once) = (bytes.div_ceil(LINE), u64::from(blocks * threads) * unroll);
                let passes = units.div_ceil(at_once);
                if passes <= 2 && at_once < units * 3 || (blocks == most && threads >= 704) {
                    for linger in [0, 300, 600, 1800] {
                        all.push(Choice { blocks, ..setting.lines(kernel, bytes, threads, linger) });
                    }
                }
            }
        }
    }
    let flows: &[&str] = match wide {
        true => &["whole_flow_sum_two_p4u1", "whole_flow_sum_two_p4u2", "whole_flow_sum_two_p8u2"],
        false => &["pair_flow_sum_two_p4u2"],
    };
    for kernel in flows.iter().filter(|_| bytes >= 256 * KIB && bytes <= limits.lines) {
        for [push, take] in [[1, 8], [2, 6], [2, 14], [4, 8], [4, 12], [4, 16], [4, 20], [4, 24], [8, 16]] {
            all.push(setting.flow(kernel, bytes, push, take));
        }
    }
    for tile in [8u32 << 10, 16 << 10, 32 << 10, 64 << 10].into_iter().filter(|t| bytes >= 128 * KIB && *t <= limits.tile) {
        for [push, consume] in [[4, 4], [4, 8], [4, 12], [4, 16], [8, 8], [8, 16]] {
            all.push(setting.stream("stream_sum_two_u4", bytes, push, consume, tile));
            for prefix in [0, 2 * MIB, 4 * MIB].into_iter().filter(|_| bytes >= 16 * MIB && setting.has_engine(bytes)) {
                all.push(Choice { prefix, ..setting.stream("engine_sum_two_u4", bytes, push, consume, tile) });
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{abi::MAX_BLOCKS, kernels::NAMES};

    const PATHS: [Path; 3] = [Path::Host, Path::Peer, Path::PeerWide];

    /// With and without staging, with few blocks and all.
    fn settings(ranks: usize) -> impl Iterator<Item = Setting> {
        let chunks = move |path| [0, 64 * MIB].map(|chunk| Setting { path, ranks, chunk, blocks: 32 });
        let few = |s: Setting| [1, 3, 8, 32].map(|blocks| Setting { blocks, ..s });
        PATHS.into_iter().flat_map(chunks).flat_map(few)
    }

    fn check(setting: Setting, choice: &Choice, bytes: u64) {
        let Setting { path, ranks, chunk, blocks } = setting;
        assert!(NAMES.contains(&choice.kernel), "{choice:?}");
        let limit = most_threads(choice.kernel);
        assert!(choice.threads % 32 == 0 && choice.threads + 32 <= limit, "{choice:?}");
        assert!(choice.blocks >= 1 && u64::from(choice.blocks) <= MAX_BLOCKS);
        assert!(choice.blocks <= BLOCKS[usize::from(path != Path::Host)].min(blocks), "{choice:?}");
        assert!(choice.tile <= limits(path, ranks).tile && choice.tile % 16 == 0);
        assert!(choice.push_warps * 32 < choice.threads && choice.push_warps < 32);
        if path != Path::PeerWide {
            assert!(!choice.kernel.starts_with("whole"), "16 bytes are whole only over links with native atomics");
        }
        if choice.by_engine() {
            assert!(chunk % u64::from(choice.tile) == 0 && choice.prefix <= chunk && choice.prefix % 16 == 0);
            assert!(bytes.div_ceil(chunk) <= crate::abi::MAX_CHUNKS && path == Path::PeerWide && ranks == 2);
        } else if choice.plan().0 == "lines" {
            assert!(bytes <= limits(path, ranks).lines, "{choice:?} for {bytes}");
        }
    }

    #[test]
    fn every_size_gets_a_kernel_that_exists_and_fits_a_device_and_its_mailbox() {
        for setting in (2..=16).flat_map(settings) {
            for (op, in_place) in Op::ALL.into_iter().flat_map(|op| [(op, false), (op, true)]) {
                for bytes in (0..=34).flat_map(|k| [1u64 << k, (1 << k) + 1, (1 << k) - 1, 3 << k]) {
                    let choice = choose(setting, bytes, op, in_place);
                    check(setting, &choice, bytes);
                    assert!(choice.kernel.contains("two") == (setting.ranks == 2 && op == Op::Sum));
                }
            }
        }
    }

    #[test]
    fn a_rank_in_place_and_one_out_of_place_have_the_same_plan() {
        for setting in [2, 3].into_iter().flat_map(settings) {
            for bytes in (0..=34).flat_map(|k| [1u64 << k, (1 << k) - 1, 3 << k]) {
                let [one, other] = [true, false].map(|in_place| choose(setting, bytes, Op::Sum, in_place).plan());
                assert_eq!(one, other, "{setting:?} {bytes}");
            }
        }
    }

    #[test]
    fn no_rank_of_three_and_more_sends_a_long_tensor_to_every_other() {
        for setting in (3..=16).flat_map(settings) {
            for op in Op::ALL {
                for bytes in [16 * MIB, 1 << 30, (1 << 30) + 7, 1 << 34] {
                    let choice = choose(setting, bytes, op, false);
                    assert!(
                        choice.kernel.starts_with("shares") && choice.blocks == setting.most_blocks(),
                        "{setting:?} {choice}"
                    );
                }
                let short = choose(setting, KIB, op, false);
                assert!(short.plan().0 == "lines", "{setting:?} {short}");
            }
        }
        // Two ranks send all they have in either form, and one trip is shorter.
        assert!(settings(2).all(|s| !choose(s, 1 << 30, Op::Max, false).kernel.starts_with("shares")));
    }

    #[test]
    fn tiles_of_rounds_give_every_block_work_as_soon_as_they_can() {
        for setting in (3..=16).flat_map(settings) {
            for bytes in (16..=34).map(|k| 1u64 << k) {
                let choice = choose(setting, bytes, Op::Sum, false);
                if choice.plan().0 == "shares" {
                    let rounds = bytes.div_ceil(u64::from(choice.tile) * setting.ranks as u64);
                    assert!(u64::from(choice.blocks) <= rounds, "{setting:?} {choice}");
                    let least = u64::from(setting.most_blocks()) * 3 / 4;
                    assert!(choice.tile == 4 << 10 || u64::from(choice.blocks) >= least, "{setting:?} {bytes} {choice}");
                }
            }
        }
    }

    #[test]
    fn few_blocks_are_wider_so_that_short_tensors_still_take_one_pass() {
        for (blocks, threads) in [(16, 256), (8, 512)] {
            let setting = Setting { path: Path::PeerWide, ranks: 2, chunk: 0, blocks };
            let choice = choose(setting, 64 * KIB, Op::Sum, false);
            assert_eq!((choice.kernel, choice.blocks, choice.threads), ("whole_sum_two_u1", blocks, threads));
        }
    }

    #[test]
    fn registered_tensors_are_read_where_they_lie_when_they_are_too_long_for_lines() {
        for setting in (2..=16).flat_map(settings) {
            for op in Op::ALL {
                for bytes in (0..=34).flat_map(|k| [1u64 << k, (1 << k) + 1, 3 << k]) {
                    let choice = choose_registered(setting, bytes, op);
                    let long = setting.path != Path::Host && bytes > limits(setting.path, setting.ranks).lines;
                    assert_eq!(choice.is_some(), long, "{setting:?} {bytes}");
                    if let Some(choice) = choice {
                        // No slot holds its tiles.
                        check(setting, &Choice { tile: choice.tile.min(4 << 10), ..choice }, bytes);
                        assert!(choice.by_reading() && choice.tile % 16 == 0 && choice.tile >= 4 << 10);
                    }
                }
            }
        }
    }

    #[test]
    fn candidates_are_choices_too() {
        for setting in [2, 3, 8, 16].into_iter().flat_map(settings) {
            for bytes in (4..=30).map(|k| 1u64 << k) {
                candidates(setting, bytes).iter().for_each(|choice| check(setting, choice, bytes));
            }
        }
    }
}
