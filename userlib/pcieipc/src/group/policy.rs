// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a group does after a call has failed.

use std::time::Duration;

use super::Group;
use crate::error::{Error, Result};

/// What [`Group::mend`] does; the same on all ranks, which compare it when they meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Policy {
    /// Nothing: the error is the program's.
    #[default]
    Fail,
    /// Goes on with the ranks that are left.
    Shrink {
        /// How long that may take; longer than any rank computes between two calls.
        within: Duration,
    },
    /// Waits until all ranks are there again: endpoints that recover or are put back, processes that are replaced.
    Recover {
        /// How long to wait.
        within: Duration,
        /// Whether to shrink, and how long that may take, when the time has passed without all ranks.
        then_shrink: Option<Duration>,
    },
}

/// How the group goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mended {
    /// With fewer ranks: see [`Group::members`].
    Shrunk,
    /// With all ranks that met.
    Recovered,
}

impl Group {
    /// Does what the group's [`Policy`] says about the error of a call. All ranks call it after an error; a rank whose call
    /// succeeded gets the error of its next one. Afterwards the step that failed is done again by all: see [`Group::agree`] for how
    /// ranks know which step that is.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use pcieipc::{group::{Group, GroupOptions, Policy}, reduce::Op};
    /// # fn main() -> pcieipc::Result<()> {
    /// let mut options = GroupOptions::new(0, 4, "/run/user/1000/my-group");
    /// options.policy = Policy::Recover { within: Duration::from_secs(30), then_shrink: Some(Duration::from_secs(5)) };
    /// let mut group = Group::meet(options)?;
    /// let inputs = vec![1.0f32; 1 << 20];
    /// let mut gradients = inputs.clone();
    /// while let Err(error) = group.all_reduce_into(&inputs, &mut gradients, Op::Sum, Duration::from_secs(10)) {
    ///     group.mend(error)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The error itself with [`Policy::Fail`], and `Argument` always; otherwise as for [`Group::shrink`] and [`Group::recover`].
    pub fn mend(&mut self, error: Error) -> Result<Mended> {
        if matches!(error, Error::Argument(_)) {
            return Err(error);
        }
        match self.options.policy {
            Policy::Fail => Err(error),
            Policy::Shrink { within } => self.shrink(within).map(|()| Mended::Shrunk),
            Policy::Recover { within, then_shrink } => match (self.recover(within), then_shrink) {
                (Ok(()), _) => Ok(Mended::Recovered),
                (Err(_), Some(within)) if !self.is_excluded() => self.shrink(within).map(|()| Mended::Shrunk),
                (Err(error), _) => Err(error),
            },
        }
    }
}
