// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which kernel serves a call, and how it is launched: a pure function of what all ranks know, so that they choose the same.

use pcieipc::reduce::{Kind, Op};

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
    /// For streams: warps that push.
    pub push_warps: u32,
    /// For streams: bytes of a tile.
    pub tile: u32,
}

/// What a mailbox has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest tensor that goes as narrow lines.
    pub narrow: u64,
    /// Longest tensor that goes as whole lines.
    pub whole: u64,
    /// Longest tile.
    pub tile: u32,
}

/// The limits, by the path and the number of ranks: each peer takes its own lines and slots.
pub fn limits(path: Path, ranks: usize) -> Limits {
    let whole = |bytes| if path == Path::PeerWide { bytes } else { 0 };
    match (ranks, path) {
        (2, Path::Host) => Limits { narrow: 1 << 20, whole: 0, tile: 32 << 10 },
        (2, _) => Limits { narrow: 1 << 20, whole: whole(8 << 20), tile: 64 << 10 },
        _ => Limits { narrow: 128 << 10, whole: whole(512 << 10), tile: 16 << 10 },
    }
}

/// Most blocks on the host path and on the peer path: what is left is for computing.
pub const BLOCKS: [u32; 2] = [16, 32];

fn blocks_for(units: u64, threads: u32, most: u32) -> u32 {
    units.div_ceil(u64::from(threads)).clamp(1, u64::from(most)) as u32
}

/// The choice for a call of `bytes` bytes between `ranks` ranks whose slowest path is `path`.
#[allow(clippy::match_overlapping_arm, reason = "a table of upper bounds reads better than one of ranges")]
pub fn choose(path: Path, ranks: usize, bytes: u64, kind: Kind, op: Op) -> Choice {
    let _ = kind;
    let limits = limits(path, ranks);
    let most = BLOCKS[usize::from(path != Path::Host)];
    let lines = |kernel, threads, unit: u64| {
        let units = bytes.div_ceil(unit);
        Choice { kernel, blocks: blocks_for(units, threads, most), threads, push_warps: 0, tile: 0 }
    };
    let two = ranks == 2 && op == Op::Sum;
    let sum = op == Op::Sum;
    let stream = |warps: [u32; 2], tile: u32| {
        let tile = tile.min(limits.tile);
        let kernel = match (two, sum) {
            (true, _) => "stream_sum_two_u4",
            (_, true) => "stream_sum_many_u2",
            _ => "stream_any_many_u1",
        };
        let blocks = blocks_for(bytes, tile, most);
        Choice { kernel, blocks, threads: (warps[0] + warps[1] + 2) * 32, push_warps: warps[0], tile }
    };
    let narrow = |threads, unroll| {
        let kernel = match (two, sum, unroll) {
            (true, _, 4) => "narrow_sum_two_u4",
            (true, _, _) => "narrow_sum_two_u1",
            (_, true, _) => "narrow_sum_many_u1",
            _ => "narrow_any_many_u1",
        };
        lines(kernel, threads, 8)
    };
    let whole = |threads, unroll| {
        let kernel = match (two, sum, unroll) {
            (true, _, 2) => "whole_sum_two_u2",
            (true, _, _) => "whole_sum_two_u1",
            (_, true, _) => "whole_sum_many_u1",
            _ => "whole_any_many_u1",
        };
        lines(kernel, threads, 16)
    };
    let longest = if path == Path::PeerWide { limits.whole } else { limits.narrow };
    match path {
        _ if ranks > 2 && bytes > longest => stream([4, 12], 16 << 10),
        Path::Host => match bytes {
            ..=2048 => narrow(128, 1),
            ..=4096 => narrow(704, 1),
            ..=16384 => narrow(128, 1),
            ..=65536 => narrow(512, 1),
            ..=131_072 => stream([4, 8], 16 << 10),
            ..=524_288 => stream([4, 12], 16 << 10),
            ..=2_097_152 => stream([4, 4], 16 << 10),
            ..=8_388_608 => stream([8, 16], 8 << 10),
            ..=33_554_432 => stream([4, 8], 16 << 10),
            _ => stream([8, 16], 32 << 10),
        },
        Path::PeerWide => match bytes {
            ..=1024 => whole(96, 1),
            ..=65536 => whole(128, 1),
            ..=131_072 => whole(256, 1),
            ..=262_144 => whole(512, 1),
            ..=1_572_864 => whole(512, 2),
            ..=6_291_456 => whole(704, 2),
            ..=8_388_608 => whole(992, 2),
            ..=33_554_432 => stream([4, 16], 64 << 10),
            ..=134_217_728 => stream([4, 8], 64 << 10),
            _ => stream([4, 12], 64 << 10),
        },
        Path::Peer => match bytes {
            ..=16384 => narrow(128, 1),
            ..=1_048_576 => narrow(512, 1),
            ..=33_554_432 => stream([4, 8], 16 << 10),
            _ => stream([4, 12], 64 << 10),
        },
    }
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} x {}", self.kernel, self.blocks, self.threads)?;
        if self.tile > 0 {
            write!(f, " ({} push) tile {} KiB", self.push_warps, self.tile >> 10)?;
        }
        Ok(())
    }
}

/// Threads that a kernel's registers allow in a block, its service warp included.
fn most_threads(kernel: &str) -> u32 {
    match kernel {
        k if k.starts_with("stream") => 896,
        k if k.ends_with("u4") => 768,
        _ => 1024,
    }
}

/// What a tuner tries for a sum of two ranks; the first is what [`choose`] takes.
pub fn candidates(path: Path, bytes: u64) -> Vec<Choice> {
    let (most, limits) = (BLOCKS[usize::from(path != Path::Host)], limits(path, 2));
    let mut all = vec![choose(path, 2, bytes, Kind::BF16, Op::Sum)];
    let formats: [(&str, u64, u64, bool); 4] = [
        ("narrow_sum_two_u1", 8, 1, bytes <= limits.narrow),
        ("narrow_sum_two_u4", 8, 4, bytes <= limits.narrow),
        ("whole_sum_two_u1", 16, 1, bytes <= limits.whole),
        ("whole_sum_two_u2", 16, 2, bytes <= limits.whole),
    ];
    for (kernel, unit, unroll, fits) in formats {
        for blocks in [1, 2, 4, 8, 16, 32].into_iter().filter(|b| fits && *b <= most) {
            for threads in [64, 96, 128, 192, 256, 352, 512, 704, 992].into_iter().filter(|t| t + 32 <= most_threads(kernel)) {
                let (units, at_once) = (bytes.div_ceil(unit), u64::from(blocks * threads) * unroll);
                let passes = units.div_ceil(at_once);
                if passes <= 2 && at_once < units * 3 || (blocks == most && threads >= 704) {
                    all.push(Choice { kernel, blocks, threads, push_warps: 0, tile: 0 });
                }
            }
        }
    }
    if bytes >= 128 << 10 {
        for tile in [8u32 << 10, 16 << 10, 32 << 10, 64 << 10].into_iter().filter(|t| *t <= limits.tile) {
            for warps in [[4, 4], [4, 8], [4, 12], [4, 16], [8, 8], [8, 16]] {
                let blocks = blocks_for(bytes, tile, most);
                let threads = (warps[0] + warps[1] + 2) * 32;
                all.push(Choice { kernel: "stream_sum_two_u4", blocks, threads, push_warps: warps[0], tile });
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

    #[test]
    fn every_size_gets_a_kernel_that_exists_and_fits_a_device() {
        for path in PATHS {
            for ranks in 2..=16 {
                for op in Op::ALL {
                    for bytes in (0..=31).flat_map(|k| [1u64 << k, (1 << k) + 1, (1 << k) - 1]) {
                        let choice = choose(path, ranks, bytes, Kind::F32, op);
                        assert!(NAMES.contains(&choice.kernel), "{choice:?}");
                        let limit = most_threads(choice.kernel);
                        assert!(choice.threads % 32 == 0 && choice.threads + 32 <= limit, "{choice:?}");
                        assert!(choice.blocks >= 1 && u64::from(choice.blocks) <= MAX_BLOCKS);
                        assert!(choice.blocks <= BLOCKS[usize::from(path != Path::Host)], "{choice:?}");
                        assert!(choice.tile <= limits(path, ranks).tile && choice.tile % 16 == 0);
                        assert!(choice.kernel.contains("two") == (ranks == 2 && op == Op::Sum));
                        if path == Path::Host {
                            assert!(!choice.kernel.starts_with("whole"), "16 bytes are not whole in host memory");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn lines_fit_the_room_that_the_layout_gives_them() {
        for (path, ranks) in PATHS.into_iter().flat_map(|p| [(p, 2), (p, 3), (p, 16)]) {
            for bytes in (0..=32).map(|k| 1u64 << k) {
                let (choice, limits) = (choose(path, ranks, bytes, Kind::F32, Op::Sum), limits(path, ranks));
                assert!(!choice.kernel.starts_with("narrow") || bytes <= limits.narrow);
                assert!(!choice.kernel.starts_with("whole") || bytes <= limits.whole);
            }
        }
    }
}
