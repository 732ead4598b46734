// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank's seat in its group: the library's calls that the command needs, and nothing else of it.

use std::time::Duration;

use pcieipc::{
    Result, executor,
    group::{self, Group, GroupOptions},
    plan,
    reduce::{Kind, Op},
};

use crate::{
    gradients::Number,
    module::NODE,
    ranks::{Algorithm, Counters, Job, Transport},
};

/// This process as a member of the group.
#[derive(Debug)]
pub struct Member {
    group: Group,
    /// Counted by the groups before the present one.
    earlier: Counters,
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
            Transport::Kmod { endpoint } => {
                return Err(pcieipc::Error::Argument(format!("endpoint {endpoint}: this version does not drive {NODE} yet")));
            }
        };
        options.meeting_timeout = job.timeout;
        options.executor = executor::Options { algorithm: Some(algorithm(job.algorithm)), ..executor::Options::default() };
        Ok(Self { group: Group::meet(options)?, earlier: Counters::default() })
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
        self.earlier.plus(present)
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

fn kind(number: Number) -> Kind {
    match number {
        Number::F32 => Kind::F32,
        Number::Bf16 => Kind::BF16,
    }
}

fn algorithm(algorithm: Algorithm) -> plan::Algorithm {
    match algorithm {
        Algorithm::TwoShot => plan::Algorithm::TwoShot,
        Algorithm::Ring => plan::Algorithm::Ring,
    }
}
