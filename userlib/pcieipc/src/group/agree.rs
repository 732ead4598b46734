// SPDX-License-Identifier: MIT OR Apache-2.0
//! What all survivors can learn alike.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::{
    Group,
    council::{Ballot, Council, excluded},
    directory::Directory,
};
use crate::{
    error::{Rank, Result},
    transport::board::{Board, Question, Ranks},
};

/// What all survivors read alike. Ranks are counted as when the group first met.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Agreement {
    /// Every survivor said `true`.
    pub ok: bool,
    /// Members that can not go on: died, left, did not vote in time, or have an endpoint that is not live. [`Group::shrink`] goes
    /// on without them, [`Group::recover`] waits for them.
    pub failed: Vec<Rank>,
    /// Ranks that are not in the group now and ask to be taken back; [`Group::recover`] does that.
    pub returned: Vec<Rank>,
}

/// Ends the calls of all ranks, from any thread; made by [`Group::aborter`].
#[derive(Debug, Clone)]
pub struct Aborter {
    board: Arc<Mutex<Arc<Board>>>,
    me: Rank,
}

impl Aborter {
    pub(super) fn new(board: Arc<Board>, me: Rank) -> Self {
        Self { board: Arc::new(Mutex::new(board)), me }
    }

    /// The group has a new life.
    pub(super) fn follow(&self, board: Arc<Board>) {
        *self.board.lock().unwrap_or_else(PoisonError::into_inner) = board;
    }

    /// Makes the present and further calls of all ranks, this one's too, fail with `Aborted` and this reason (cut after 191
    /// bytes), until the group shrinks or recovers. Does not block. Who sleeps in a call sees it after 25 ms at most.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let watchdog = group.aborter();
    ///     if group.rank() == 0 {
    ///         std::thread::spawn(move || watchdog.abort("took too long"));
    ///     }
    ///     let error = loop {
    ///         if let Err(error) = group.barrier(second) {
    ///             break error;
    ///         }
    ///     };
    ///     assert!(error.to_string().contains("took too long"));
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn abort(&self, why: &str) {
        self.board.lock().unwrap_or_else(PoisonError::into_inner).abort(self.me, why);
    }
}

impl Group {
    /// Learns what all survivors learn: whether each of them said `ok`, and who has failed. All ranks call it at the same point,
    /// whether their last collective succeeded or not: one rank's `Ok` can be another's error, and this tells both what to do. Whoever
    /// dies at whichever step, all that return from it return the same.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use pcieipc::{group::Group, reduce::Op};
    /// # fn step(group: &mut Group, gradients: &mut [f32], inputs: &[f32]) -> pcieipc::Result<()> {
    /// let second = Duration::from_secs(1);
    /// let result = group.all_reduce_into(inputs, gradients, Op::Sum, second);
    /// let agreed = group.agree(result.is_ok(), second)?;
    /// if !agreed.ok || !agreed.failed.is_empty() {
    ///     group.shrink(second)?; // and do the step again
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Mismatch` when another rank shrinks or recovers instead; `Meeting` when the others decided without this rank, which was
    /// late; `System`.
    pub fn agree(&mut self, ok: bool, timeout: Duration) -> Result<Agreement> {
        self.council.at_home()?;
        if self.council.is_excluded() {
            return Err(excluded());
        }
        let by = Instant::now() + timeout;
        let seen = Ranks::of(self.not_live()).or(self.asking());
        let ballot = Ballot { question: Question::Verdict, flags: u16::from(ok), lost: Ranks::default(), seen };
        // Calls in flight go on meanwhile.
        self.engine.leave();
        let decision = self.council.decide(&self.mesh, ballot, by).map_err(|error| self.naming(error))?;
        let members = Ranks::of(self.members.iter().copied());
        let failed = decision.lost.or(decision.seen).and(members);
        if !failed.is_empty() {
            self.engine.get().links().abort("the ranks agreed that some have failed; shrink or recover the group");
        }
        Ok(Agreement { ok: decision.flags & 1 != 0, failed: failed.list(), returned: decision.seen.without(members).list() })
    }

    /// Ends the calls of all ranks from any thread: a watchdog's, a signal handler's thread, another library's.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let aborter = group.aborter();
    ///     aborter.abort("as an example");
    ///     assert!(group.barrier(second).is_err());
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn aborter(&self) -> Aborter {
        self.aborter.clone()
    }

    /// Members whose endpoint is not live, as when the group first met.
    pub(super) fn not_live(&mut self) -> Vec<Rank> {
        let members = self.members.clone();
        self.engine.get().links().not_live().iter().filter_map(|new| members.get(*new).copied()).collect()
    }

    /// Ranks outside the group that wait in its directory.
    fn asking(&self) -> Ranks {
        let Ok(directory) = Directory::open(&self.options.directory) else { return Ranks::default() };
        let absent = (0..self.options.ranks).filter(|r| !self.members.contains(r));
        Ranks::of(absent.filter(|r| matches!(directory.call(*r), Ok(Some(_)))))
    }

    pub(super) fn seat(&mut self, council: Council) {
        self.aborter.follow(council.board().clone());
        self.council = council;
    }
}
