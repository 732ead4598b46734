// SPDX-License-Identifier: MIT OR Apache-2.0
//! A few bytes and descriptors from every rank to every other, outside the rings: handles of memory, measurements, consent.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Group,
    join::OfTurn,
    message::{Message, Silence},
};
use crate::{
    error::{Error, Rank, Result},
    sys::{Life, failed},
};

/// Most bytes that a rank gives to one exchange.
pub const MAX_EXCHANGE_BYTES: usize = 2048;

/// What one rank gave: bytes and descriptors.
pub type Given = (Vec<u8>, Vec<OwnedFd>);

impl Group {
    /// Gives `bytes` and `files` (at most 8) to all other ranks, and takes what each gives; empty at this rank's own place. All
    /// ranks call it in the same order with the same `what`, which errors name. What comes from a peer is to be checked.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| {
    ///     let (rank, names) = (group.rank(), ["left", "right"]);
    ///     let given = group.exchange("names", names[rank].as_bytes(), &[], Duration::from_secs(60)).unwrap();
    ///     assert_eq!(given[1 - rank].0, names[1 - rank].as_bytes());
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument` for more than 2048 bytes; `Mismatch` when a rank exchanges something else; `Timeout`, `PeerDied`,
    /// `Corrupt`.
    pub fn exchange(
        &mut self,
        what: &'static str,
        bytes: &[u8],
        files: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<Vec<Given>> {
        self.council.at_home()?;
        if bytes.len() > MAX_EXCHANGE_BYTES {
            return Err(Error::Argument(format!("{} bytes in one exchange; at most {MAX_EXCHANGE_BYTES} go", bytes.len())));
        }
        let (begun, rank, turn, number) = (Instant::now(), self.rank(), self.turn, self.registered);
        self.registered = number.wrapping_add(1);
        let unanswered = |peer: Rank, silence: Silence| match silence {
            Silence::Late => Error::Timeout { rank, peer, what, waited: begun.elapsed(), endpoint: None },
            Silence::Closed => Error::PeerDied { rank, peer, what, endpoint: None },
            Silence::Nonsense(what) => Error::Corrupt { rank, peer, what, endpoint: None },
            Silence::Full(error) => failed("recvmsg", "raise the limit of open files")(error),
        };
        let ours = Message::Exchange { turn, number, what: what.to_owned(), bytes: bytes.to_vec() };
        let contacts =
            || self.members.iter().enumerate().filter_map(|(new, &old)| Some((new, self.mesh.contacts.get(old)?.as_ref()?)));
        for (peer, contact) in contacts() {
            contact.send(&ours, files).map_err(|silence| unanswered(peer, silence))?;
        }
        let mut given: Vec<Given> = self.members.iter().map(|_| Given::default()).collect();
        for (peer, contact) in contacts() {
            let silence = match contact.receive_of_turn(turn, begun + timeout) {
                Ok(OfTurn::Now(Message::Exchange { number: n, what: theirs, bytes, .. }, fds)) => {
                    if (n, theirs.as_str()) != (number, what) {
                        let (ours, theirs) = (format!("{what} ({number})"), format!("{theirs} ({n})"));
                        return Err(Error::Mismatch { rank, peer, what: "what to exchange", ours, theirs, endpoint: None });
                    }
                    given[peer] = (bytes, fds);
                    continue;
                }
                Ok(OfTurn::Now(other, fds)) => Silence::Nonsense(format!("{other:?} with {} descriptors", fds.len())),
                Ok(OfTurn::Later) => Silence::Closed,
                Err(silence) => silence,
            };
            return Err(unanswered(peer, silence));
        }
        Ok(given)
    }

    /// By which to see that a rank's process has ended; `None` for this rank, and for ranks of this process.
    ///
    /// ```
    /// pcieipc::group::of_threads(2, |group| {
    ///     assert!(group.lives().iter().all(Option::is_none), "all are threads of this process");
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn lives(&self) -> Vec<Option<Arc<Life>>> {
        self.members.iter().map(|&old| self.mesh.contacts.get(old)?.as_ref()?.life.clone()).collect()
    }
}
