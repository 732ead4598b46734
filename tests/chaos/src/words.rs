// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the conductor and its ranks say to each other: one JSON object a line.

use serde::{Deserialize, Serialize};

/// How a group is made and called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// Records are moved by the endpoints' engines.
    pub engine: bool,
    /// Records carry a checksum.
    pub checked: bool,
}

/// From the conductor to a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Leave the present group, if there is one, and meet in this directory.
    Meet {
        /// Where.
        directory: String,
        /// How many ranks there are.
        ranks: usize,
        /// Serial number of the own endpoint; shared memory without.
        serial: Option<u64>,
        /// How.
        setup: Setup,
        /// For how long.
        timeout_ms: u64,
        /// Counts the groups.
        epoch: u32,
    },
    /// Take the place of a rank whose process has ended, in the group that met in this directory.
    Rejoin {
        /// Where.
        directory: String,
        /// How many ranks there are.
        ranks: usize,
        /// Serial number of the own endpoint; shared memory without.
        serial: Option<u64>,
        /// How.
        setup: Setup,
        /// For how long.
        timeout_ms: u64,
        /// Counts the groups.
        epoch: u32,
    },
    /// Wait until all ranks are there again, and go on with them.
    Recover {
        /// For how long.
        timeout_ms: u64,
        /// Counts the groups.
        epoch: u32,
    },
    /// Reduce until so many rounds are done in this group.
    Run {
        /// Rounds since the group met.
        until: u32,
        /// Of each call.
        deadline_ms: u64,
    },
    /// Say to all whether the last call was good, and learn what all say.
    Agree {
        /// Whether it was.
        ok: bool,
        /// For how long.
        timeout_ms: u64,
    },
    /// Go on without those that are lost.
    Shrink {
        /// For how long to look for agreement.
        timeout_ms: u64,
        /// Counts the groups.
        epoch: u32,
    },
    /// At once: fork a child that lives so long, and start another program.
    Fork {
        /// Life of the child.
        ms: u64,
    },
    /// At once: flip bits in the data areas of the own rings in shared memory, for so long.
    Scribble {
        /// How long.
        ms: u64,
        /// Of the places.
        seed: u64,
    },
    /// Say what this process holds.
    Count,
    /// Leave the group.
    Leave,
}

/// What a call answered instead of a sum.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Name of the error's variant.
    pub kind: String,
    /// Its text.
    pub text: String,
    /// The rank that it names, by its number at the meeting.
    pub peer: Option<usize>,
    /// Which call.
    pub round: u32,
    /// When the call began.
    pub started_ns: u64,
    /// When it answered.
    pub at_ns: u64,
    /// The call's deadline.
    pub deadline_ms: u64,
}

/// What a process holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holdings {
    /// Open descriptors, by what they are, sorted.
    pub descriptors: Vec<String>,
    /// Locked memory.
    pub locked_kib: u64,
    /// Mappings.
    pub mappings: usize,
}

impl Holdings {
    /// What is held beyond `before`, or no more, in words; nothing when it is the same.
    pub fn beside(&self, before: &Self) -> Option<String> {
        if self == before {
            return None;
        }
        let missing = |of: &[String], in_: &[String]| {
            let mut rest = in_.to_vec();
            let extra = of.iter().filter(|name| match rest.iter().position(|one| one == *name) {
                Some(at) => {
                    rest.swap_remove(at);
                    false
                }
                None => true,
            });
            extra.cloned().collect::<Vec<_>>()
        };
        let (more, less) = (missing(&self.descriptors, &before.descriptors), missing(&before.descriptors, &self.descriptors));
        let (locked, were_locked, mapped, were_mapped) = (self.locked_kib, before.locked_kib, self.mappings, before.mappings);
        Some(format!(
            "descriptors {more:?} more and {less:?} less, {locked} KiB locked (was {were_locked}), {mapped} mappings (was {were_mapped})"
        ))
    }
}

/// From a rank to the conductor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Said {
    /// The group has met.
    Met {
        /// When.
        at_ns: u64,
    },
    /// Meeting or shrinking failed.
    Refused(Failure),
    /// Some more rounds are done.
    Rounds {
        /// In this group.
        done: u32,
    },
    /// The rounds that were asked for are done, each compared.
    Held {
        /// In this group.
        done: u32,
        /// When the first round of this order was compared.
        first_ns: u64,
        /// When the last was.
        at_ns: u64,
        /// The longest call.
        longest_ns: u64,
    },
    /// A call answered an error.
    Failed(Failure),
    /// A call answered Ok, and the sum was not the sum.
    Wrong {
        /// Which call.
        round: u32,
        /// Wrong elements.
        elements: usize,
        /// Where the first is.
        first: usize,
    },
    /// All that are left have this answer.
    Agreed {
        /// Whether the last call was good for all.
        ok: bool,
        /// Who can not go on.
        failed: Vec<usize>,
    },
    /// The group goes on.
    Shrunk {
        /// Numbers of the meeting.
        members: Vec<usize>,
        /// When.
        at_ns: u64,
    },
    /// See [`Order::Count`].
    Counted(Holdings),
    /// The group was left.
    Left,
    /// The process has ended; said by the conductor's side.
    Ended,
}
