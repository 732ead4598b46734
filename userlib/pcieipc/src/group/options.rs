// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a rank brings to a meeting, and how ranks reach each other.

use std::{path::PathBuf, time::Duration};

use super::{KmodOptions, Policy};
use crate::{
    error::{Error, Rank, Result},
    executor::{MAX_RANKS, Options as ExecutorOptions},
    topology::{Address, Live},
    transport::shm,
    tune,
};

/// How the ranks of a group reach each other.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Transport {
    /// Shared memory between processes; no module, no hardware.
    Shm,
    /// Channels of `/dev/pcieipc`, each rank with an endpoint of its own.
    Kmod(KmodOptions),
}

impl Transport {
    /// The name as the command and reports write it.
    ///
    /// ```
    /// assert_eq!(pcieipc::group::Transport::Shm.name(), "shm");
    /// ```
    pub fn name(&self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Kmod(_) => "kmod",
        }
    }

    /// Whether the ranks look at the PCIe tree when they meet.
    pub(super) fn follows_tree(&self) -> bool {
        matches!(self, Self::Kmod(options) if options.host.is_some())
    }
}

/// What a rank brings to a meeting.
#[derive(Debug, Clone)]
pub struct GroupOptions {
    /// This rank, from 0.
    pub rank: Rank,
    /// How many ranks there are, 1 to 16.
    pub ranks: usize,
    /// The directory in which they meet: made with mode 0700 if it is not there. One group at a time meets in it.
    pub directory: PathBuf,
    /// How they reach each other; the same on all ranks.
    pub transport: Transport,
    /// Data area of the ring from each rank to each other one, in bytes: a power of two, at least 16 KiB; the same on all ranks.
    pub ring_bytes: usize,
    /// How long the meeting may take.
    pub meeting_timeout: Duration,
    /// How collectives are run; the same on all ranks.
    pub executor: ExecutorOptions,
    /// Whether a thread of the group goes on with calls in flight while the caller computes. Ranks may differ in it.
    pub helper_thread: bool,
    /// What [`Group::mend`](super::Group::mend) does after an error; the same on all ranks.
    pub policy: Policy,
    /// Further names and values that must be the same on all ranks, such as a model's name; compared when they meet.
    pub configuration: Vec<(String, String)>,
}

impl GroupOptions {
    /// Shared memory, rings of 1 MiB, 30 s to meet.
    ///
    /// ```
    /// use pcieipc::group::GroupOptions;
    ///
    /// let options = GroupOptions { ring_bytes: 4 << 20, ..GroupOptions::new(0, 2, "/run/user/1000/my-group") };
    /// assert_eq!(options.transport.name(), "shm");
    /// ```
    pub fn new(rank: Rank, ranks: usize, directory: impl Into<PathBuf>) -> Self {
        Self {
            rank,
            ranks,
            directory: directory.into(),
            transport: Transport::Shm,
            ring_bytes: 1 << 20,
            meeting_timeout: Duration::from_secs(30),
            executor: ExecutorOptions::default(),
            helper_thread: false,
            policy: Policy::default(),
            configuration: Vec::new(),
        }
    }

    /// With this machine's calibration for these endpoints (none over shared memory): the stored one, or, on first use, one that is measured
    /// now, which takes about two seconds, and stored. Ranks that come at once measure once and get the same; they compare it when they meet. Nothing is
    /// measured where there are more ranks than processors, for which nothing is predicted; without one the group also goes where nothing can be stored.
    ///
    /// ```no_run
    /// use pcieipc::group::GroupOptions;
    ///
    /// let options = GroupOptions::new(0, 2, "/run/user/1000/my-group").tuned(&[]);
    /// if options.executor.calibration.is_none() {
    ///     println!("nothing could be measured; `pcieipc tune` says why");
    /// }
    /// ```
    pub fn tuned(mut self, endpoints: &[Address]) -> Self {
        self.executor.calibration = tune::on_first_use(&Live::default(), endpoints, self.ranks);
        self
    }

    /// Rank and number of ranks, if they are possible.
    pub(super) fn checked(&self) -> Result<(Rank, usize)> {
        let (rank, ranks) = (self.rank, self.ranks);
        if ranks == 0 || ranks > MAX_RANKS || rank >= ranks {
            return Err(Error::Argument(format!("rank {rank} of {ranks}: a group has 1 to {MAX_RANKS} ranks, counted from 0")));
        }
        shm::check_size(self.ring_bytes)?;
        Ok((rank, ranks))
    }

    /// Everything that ranks must agree on.
    pub(super) fn agreed(&self) -> Vec<(String, String)> {
        let mut entries = vec![
            ("library".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
            ("transport".to_owned(), self.transport.name().to_owned()),
            ("ring_bytes".to_owned(), self.ring_bytes.to_string()),
            ("executor".to_owned(), format!("{:?}", self.executor)),
            ("follows the tree".to_owned(), self.transport.follows_tree().to_string()),
            ("policy".to_owned(), format!("{:?}", self.policy)),
        ];
        entries.extend(self.configuration.iter().cloned());
        entries
    }
}
