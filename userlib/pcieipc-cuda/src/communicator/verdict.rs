// SPDX-License-Identifier: MIT OR Apache-2.0
//! From what kernels and hosts wrote to the library's errors.

use std::time::Duration;

use pcieipc::Error;

use crate::{
    abi::{CODE_CONCURRENT, CODE_DIFFERENT, CODE_MISMATCH, CODE_TIMEOUT, Verdict},
    control::{Told, Words},
};

const STEPS: [&str; 5] =
    ["the header of a call", "a line of data", "a tile of data", "a copy engine's data", "the credit for a copy engine"];
const HEADER: [&str; 4] = ["type and operation", "the length in bytes", "the length in bytes (high half)", "the plan"];

/// What this rank's calls came to, if they failed or can not go on.
pub fn of(words: &Words, rank: usize, ranks: usize) -> Option<Error> {
    let verdict = words.verdict(rank);
    // What a host told says more than that kernels gave up because of it.
    let told = || (0..ranks).find_map(|by| by_host(words, rank, by));
    match verdict {
        Some(verdict) if [CODE_TIMEOUT, CODE_MISMATCH, CODE_CONCURRENT, CODE_DIFFERENT].contains(&verdict.code) => {
            Some(by_kernel(rank, &verdict))
        }
        Some(verdict) => Some(told().unwrap_or_else(|| by_peer(words, rank, verdict.peer as usize % ranks.max(1)))),
        None => told(),
    }
}

fn by_host(words: &Words, rank: usize, by: usize) -> Option<Error> {
    match words.told(by) {
        Told::Nothing => None,
        Told::Died(peer) => Some(Error::PeerDied { rank, peer, what: "an all-reduce of device memory", endpoint: None }),
        Told::Aborted(why) => Some(Error::Aborted { by, why, endpoint: None }),
    }
}

/// Another rank's kernels gave up first: their reason, as far as it concerns us.
fn by_peer(words: &Words, rank: usize, by: usize) -> Error {
    match words.verdict(by) {
        Some(theirs) if [CODE_MISMATCH, CODE_DIFFERENT].contains(&theirs.code) => {
            let turned = Verdict { peer: by as u32, ours: theirs.theirs, theirs: theirs.ours, ..theirs };
            by_kernel(rank, &turned)
        }
        Some(theirs) if theirs.code == CODE_TIMEOUT => Error::Aborted {
            by,
            why: format!("it waited {:?} for rank {}", Duration::from_nanos(theirs.waited_ns), theirs.peer),
            endpoint: None,
        },
        _ => Error::Aborted { by, why: "its kernels gave up".into(), endpoint: None },
    }
}

fn by_kernel(rank: usize, verdict: &Verdict) -> Error {
    let peer = verdict.peer as usize;
    match verdict.code {
        CODE_TIMEOUT => Error::Timeout {
            rank,
            peer,
            what: STEPS.get(verdict.what as usize).copied().unwrap_or("an all-reduce"),
            waited: Duration::from_nanos(verdict.waited_ns),
            endpoint: None,
        },
        CODE_MISMATCH => Error::Mismatch {
            rank,
            peer,
            what: HEADER.get(verdict.header_word as usize).copied().unwrap_or("a call"),
            ours: verdict.ours.to_string(),
            theirs: verdict.theirs.to_string(),
            endpoint: None,
        },
        CODE_DIFFERENT => Error::Corrupt {
            rank,
            peer,
            what: format!("its result of an all-reduce is another (number {:#x}, here {:#x})", verdict.theirs, verdict.ours),
            endpoint: None,
        },
        _ => Error::Argument(
            "two calls of one communicator ran at once; enqueue its calls and its graphs' replays on streams that are ordered"
                .into(),
        ),
    }
}
