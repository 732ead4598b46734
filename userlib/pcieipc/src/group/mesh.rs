// SPDX-License-Identifier: MIT OR Apache-2.0
//! A socket between each pair of ranks.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::socket::{SockFlag, accept4, getsockopt, sockopt},
    unistd::{geteuid, getpid},
};

use super::{
    directory::Directory,
    message::{Message, Silence, receive, send},
};
use crate::{
    error::{Error, Rank, Result},
    sys::{Life, failed, wait_readable},
};

/// Of the packets in `message`.
const PROTOCOL: u32 = 1;
/// How often a rank that is not there yet is called.
const CALL_AGAIN: Duration = Duration::from_millis(5);
/// How long one that connects may take to say who it is.
const INTRODUCTION: Duration = Duration::from_secs(2);

/// The socket to one peer, and its process.
#[derive(Debug)]
pub struct Contact {
    socket: OwnedFd,
    /// `None` for a thread of this process.
    pub life: Option<Arc<Life>>,
}

/// All contacts of a rank.
#[derive(Debug)]
pub struct Mesh {
    pub rank: Rank,
    pub contacts: Vec<Option<Contact>>,
}

impl Contact {
    /// Checks who is at the other end: another user is refused.
    fn new(socket: OwnedFd) -> Result<Option<Self>> {
        let credentials = getsockopt(&socket, sockopt::PeerCredentials)
            .map_err(|e| failed("getsockopt(SO_PEERCRED)", "this should not happen")(e.into()))?;
        if credentials.uid() != geteuid().as_raw() {
            return Ok(None);
        }
        let life = if credentials.pid() == getpid().as_raw() {
            None
        } else if credentials.pid() == 0 {
            return Err(Error::Meeting(
                "a peer runs in a process namespace that is not visible from here; run all ranks in one".into(),
            ));
        } else {
            match Life::of_peer(socket.as_fd()) {
                Ok(life) => Some(Arc::new(life)),
                // It has ended already.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
                Err(error) => return Err(failed("pidfd_open", "the library needs Linux 5.3 or later")(error)),
            }
        };
        Ok(Some(Self { socket, life }))
    }

    pub fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), Silence> {
        send(self.socket.as_fd(), message, fds)
    }

    pub fn receive(&self, deadline: Instant) -> Result<(Message, Vec<OwnedFd>), Silence> {
        receive(self.socket.as_fd(), deadline)
    }

    /// Whether its process has ended; waits for that a little, since a process closes its sockets before it has ended.
    pub fn has_ended(&self, wait: Duration) -> bool {
        self.life.as_ref().is_some_and(|l| matches!(wait_readable(&[l.as_fd()], wait), Ok(ready) if ready != 0))
    }
}

impl Mesh {
    /// Meets all ranks: calls the lower ones, is called by the higher ones.
    pub fn meet(
        directory: &Directory,
        rank: Rank,
        ranks: usize,
        configuration: &[(String, String)],
        deadline: Instant,
    ) -> Result<Self> {
        let mut mesh = Self { rank, contacts: (0..ranks).map(|_| None).collect() };
        if ranks == 1 {
            return Ok(mesh);
        }
        let begun = Instant::now();
        let place = directory.take(rank, ranks)?;
        let hello = Message::Hello { protocol: PROTOCOL, rank, ranks, configuration: configuration.to_vec() };
        loop {
            for lower in 0..rank {
                if mesh.contacts[lower].is_none() {
                    mesh.call(directory, lower, &hello)?;
                }
            }
            while mesh.answer(place.socket.as_fd(), &hello, configuration, deadline)? {}
            mesh.nobody_has_left()?;
            let missing: Vec<String> =
                (0..ranks).filter(|&r| r != rank && mesh.contacts[r].is_none()).map(|r| r.to_string()).collect();
            if missing.is_empty() {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Meeting(format!(
                    "rank {} did not come within {:.1?}; start it with the same directory, or look why it ended",
                    missing.join(", "),
                    begun.elapsed()
                )));
            }
            // Only lower ranks have to be called again; higher ones make the socket readable.
            let nap = if (0..rank).any(|r| mesh.contacts[r].is_none()) { CALL_AGAIN } else { Duration::from_millis(200) };
            wait_readable(&[place.socket.as_fd()], left.min(nap)).map_err(failed("ppoll", "this should not happen"))?;
        }
        // The lower ranks' answers to our calls.
        for lower in 0..rank {
            let Some(contact) = &mesh.contacts[lower] else { continue };
            match contact.receive(deadline) {
                Ok((message, _)) => mesh.check_hello(&message, Some(lower), configuration).map(drop)?,
                Err(silence) => return Err(Error::Meeting(format!("rank {lower} met but then {silence}"))),
            }
        }
        Ok(mesh)
    }

    fn call(&mut self, directory: &Directory, lower: Rank, hello: &Message) -> Result<()> {
        let Some(socket) = directory.call(lower)? else { return Ok(()) };
        let Some(contact) = Contact::new(socket)? else { return Ok(()) };
        // One that has ended since is called again.
        if contact.send(hello, &[]).is_ok() {
            self.contacts[lower] = Some(contact);
        }
        Ok(())
    }

    /// Takes one caller, if there is one.
    fn answer(
        &mut self,
        listener: BorrowedFd<'_>,
        hello: &Message,
        configuration: &[(String, String)],
        deadline: Instant,
    ) -> Result<bool> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = match accept4(listener.as_raw_fd(), flags) {
            // SAFETY: just returned by accept4, owned by nobody else.
            Ok(fd) => unsafe { OwnedFd::from_raw_fd(fd) },
            Err(Errno::EAGAIN) => return Ok(false),
            Err(Errno::EINTR | Errno::ECONNABORTED) => return Ok(true),
            Err(error) => return Err(failed("accept4", "raise the limit of open files")(error.into())),
        };
        let Some(contact) = Contact::new(socket)? else { return Ok(true) };
        let by = deadline.min(Instant::now() + INTRODUCTION);
        // One that says nothing, or nonsense, is not of this group.
        let Ok((message @ Message::Hello { .. }, _)) = contact.receive(by) else { return Ok(true) };
        // Answered before it is checked, so that the caller sees what differs too.
        let answered = contact.send(hello, &[]);
        let rank = self.check_hello(&message, None, configuration)?;
        if rank <= self.rank {
            return Err(Error::Meeting(format!("two processes say that they are rank {rank}; give each rank its own number")));
        }
        if answered.is_ok() {
            match &self.contacts[rank] {
                Some(before) if !before.has_ended(Duration::ZERO) => {
                    return Err(Error::Meeting(format!(
                        "two processes say that they are rank {rank}; give each rank its own number"
                    )));
                }
                _ => self.contacts[rank] = Some(contact),
            }
        }
        Ok(true)
    }

    /// Compares the caller's view with ours; gives its rank.
    fn check_hello(&self, message: &Message, expected: Option<Rank>, ours: &[(String, String)]) -> Result<Rank> {
        let Message::Hello { protocol, rank: peer, ranks, configuration: theirs } = message else {
            return Err(Error::Meeting(format!("a process did not say who it is, but {message:?}")));
        };
        let (rank, peer) = (self.rank, *peer);
        let mismatch = |what, ours: String, theirs: String| Err(Error::Mismatch { rank, peer, what, ours, theirs });
        if *protocol != PROTOCOL {
            return mismatch("the version of the meeting protocol", PROTOCOL.to_string(), protocol.to_string());
        }
        if *ranks != self.contacts.len() {
            return mismatch("the number of ranks", self.contacts.len().to_string(), ranks.to_string());
        }
        if peer >= *ranks || expected.is_some_and(|e| e != peer) {
            return Err(Error::Meeting(format!("a process says that it is rank {peer} of {ranks}, where that can not be")));
        }
        if theirs != ours {
            let show = |c: &[(String, String)], other: &[(String, String)]| {
                let differing: Vec<String> = c.iter().filter(|e| !other.contains(e)).map(|(k, v)| format!("{k}={v}")).collect();
                if differing.is_empty() { "nothing".to_owned() } else { differing.join(", ") }
            };
            return mismatch("the configuration", show(ours, theirs), show(theirs, ours));
        }
        Ok(peer)
    }

    fn nobody_has_left(&self) -> Result<()> {
        for (rank, contact) in self.contacts.iter().enumerate() {
            if contact.as_ref().is_some_and(|c| c.has_ended(Duration::ZERO)) {
                return Err(Error::PeerDied { rank: self.rank, peer: rank, what: "meeting" });
            }
        }
        Ok(())
    }
}
