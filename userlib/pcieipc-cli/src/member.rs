// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank's seat in its group: the library's calls that the command needs, and nothing else of it.

use std::time::Duration;

use pcieipc::{
    Result,
    device::EndpointId,
    executor,
    group::{self, Group, GroupOptions, KmodOptions},
    plan,
    reduce::{Kind, Op},
    transport::kmod::Mover,
};

use crate::{
    gradients::Number,
    ranks::{self, Algorithm, Counters, Job, Transport},
};

/// This process as a member of the group.
#[derive(Debug)]
pub struct Member {
    group: Group,
    /// Counted by the groups before the present one.
    earlier: Counters,
    /// Of the endpoint, when the session began.
    interrupts_before: u64,
}

impl Member {
    /// Meets the others.
    ///
    /// # Errors
    /// As [`Group::meet`].
    pub fn meet(job: &Job) -> Result<Self> {
        let mut options = GroupOptions::new(job.rank, job.inputs.len(), &job.meeting);
        options.transport = match job.transport {
            Transport::Shm => group::Transport::Shm,
            Transport::Kmod { endpoint, mover } => {
                let endpoint = Some(EndpointId(endpoint));
                let mover = match mover {
                    ranks::Mover::Processor => Mover::Processor,
                    ranks::Mover::Engine => Mover::Engine,
                };
                group::Transport::Kmod(KmodOptions { endpoint, mover, ..KmodOptions::default() })
            }
        };
        options.meeting_timeout = job.timeout;
        options.executor =
            executor::Options { algorithm: algorithm(job.algorithm), checked: job.checked, ..executor::Options::default() };
        let group = Group::meet(options)?;
        let interrupts_before = interrupts(&group);
        Ok(Self { group, earlier: Counters::default(), interrupts_before })
    }

    /// Adds up the buffers of all ranks in place.
    ///
    /// # Errors
    /// As [`Group::all_reduce_bytes`].
    pub fn all_reduce(&mut self, buffer: &mut [u8], number: Number, timeout: Duration) -> Result<()> {
        self.group.all_reduce_bytes(buffer, kind(number), Op::Sum, timeout)
    }

    /// What was counted since the start.
    pub fn counters(&mut self) -> Counters {
        let now = self.group.counters();
        let present = Counters { doorbells: now.doorbells, interrupts: 0, wakeups: now.wakeups, dma_bytes: now.dma_bytes };
        // Links are made anew when a group shrinks, and count from zero; the endpoint's page goes on.
        let interrupts = interrupts(&self.group).saturating_sub(self.interrupts_before);
        Counters { interrupts, ..self.earlier.plus(present) }
    }

    /// Goes on without the ranks that are lost; gives the first numbers of those that are left.
    ///
    /// # Errors
    /// As [`Group::shrink`].
    pub fn shrink(&mut self, timeout: Duration) -> Result<Vec<usize>> {
        let earlier = self.counters();
        self.group.shrink(timeout)?;
        self.earlier = earlier;
        Ok(self.group.members().to_vec())
    }
}

/// Interrupts of the rank's endpoint in its present life.
fn interrupts(group: &Group) -> u64 {
    group.session().map_or(0, |session| session.status().interrupts())
}

fn kind(number: Number) -> Kind {
    match number {
        Number::F32 => Kind::F32,
        Number::Bf16 => Kind::BF16,
    }
}

fn algorithm(algorithm: Algorithm) -> Option<plan::Algorithm> {
    match algorithm {
        Algorithm::Auto => None,
        Algorithm::TwoShot => Some(plan::Algorithm::TwoShot),
        Algorithm::Ring => Some(plan::Algorithm::Ring),
    }
}
