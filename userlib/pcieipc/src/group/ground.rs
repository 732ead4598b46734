// SPDX-License-Identifier: MIT OR Apache-2.0
//! What has to be there before links can be made, and outlives them: nothing for shared memory, an endpoint over the module.

use std::time::{Duration, Instant};

use super::{
    KmodOptions, Transport,
    join::{Join, JoinShm},
    join_kmod::{JoinKmod, Taken},
};
use crate::error::{Error, Rank, Result};

/// What a rank's links stand on.
#[derive(Debug)]
pub(super) enum Ground {
    Shm,
    Kmod(KmodOptions, Taken),
}

impl Ground {
    pub(super) fn join(&self, rank: Rank, ranks: usize, ring_bytes: usize) -> Result<Box<dyn Join>> {
        Ok(match self {
            Self::Shm => Box::new(JoinShm::new(rank, ranks, ring_bytes)?),
            Self::Kmod(options, taken) => Box::new(JoinKmod::new(rank, ranks, ring_bytes, options, taken.session.clone())?),
        })
    }

    /// What it holds lives and does nothing, so it is tried out before it is used again.
    pub(super) fn suspect(&mut self) {
        if let Self::Kmod(_, taken) = self {
            taken.suspect();
        }
    }

    /// Waits until it holds again what it held: an endpoint that recovers, or its next life.
    pub(super) fn restore(&mut self, rank: Rank, by: Instant) -> Result<()> {
        match self {
            Self::Shm => Ok(()),
            Self::Kmod(options, taken) => taken.restore(options, rank, by),
        }
    }
}

impl Transport {
    /// What has to be there before links can be made, and outlives them.
    pub(super) fn ground(&self, rank: Rank, ranks: usize, returning: bool) -> Result<Ground> {
        match self {
            Self::Shm => Ok(Ground::Shm),
            Self::Kmod(options) => Ok(Ground::Kmod(options.clone(), options.attach(rank, ranks, returning)?)),
        }
    }

    /// Like [`Transport::ground`], in place of a process that may not have let go of its endpoint yet.
    pub(super) fn ground_by(&self, rank: Rank, ranks: usize, deadline: Instant) -> Result<Ground> {
        loop {
            match self.ground(rank, ranks, true) {
                Err(Error::Device(_) | Error::Argument(_)) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                result => return result,
            }
        }
    }
}
