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
    message::{Message, Silence, peek, receive, send},
};
use crate::{
    error::{Error, Rank, Result},
    sys::{Life, failed, wait_readable},
};

/// Of the packets in `message`, and of what lies in the memory that ranks share then: the ring has slots since 3.
const PROTOCOL: u32 = 3;
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

    /// Waits for one packet. The end of its process counts, also when somebody else still holds the socket.
    pub fn receive(&self, deadline: Instant) -> Result<(Message, Vec<OwnedFd>), Silence> {
        receive(self.socket.as_fd(), self.life.as_ref().map(|l| l.as_fd()), deadline)
    }

    /// The next packet, which stays, if there is one.
    pub fn peek(&self) -> Result<Option<Message>, Silence> {
        peek(self.socket.as_fd())
    }

    /// Whether the other end was closed: by one that left, or by the last holder after its process has ended. For a thread of
    /// this process it is all that can be seen.
    pub fn is_closed(&self) -> bool {
        matches!(peek(self.socket.as_fd()), Err(Silence::Closed))
    }

    /// Whether its process has ended; waits for that a little, since a process closes its sockets before it has ended.
    pub fn has_ended(&self, wait: Duration) -> bool {
        self.life.as_ref().is_some_and(|l| matches!(wait_readable(&[l.as_fd()], wait), Ok(ready) if ready != 0))
    }
}

/// Whom a rank meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meeting {
    /// All, for the first time.
    First,
    /// Those that return, as one that has stayed.
    Stayed,
    /// Those that have stayed, and others that return, as one that returns.
    Returning,
}

/// What all meetings of a rank share.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    pub directory: &'a Directory,
    pub configuration: &'a [(String, String)],
}

impl Mesh {
    /// A rank that has met nobody yet.
    pub fn alone(rank: Rank, ranks: usize) -> Self {
        Self { rank, contacts: (0..ranks).map(|_| None).collect() }
    }

    /// Meets all ranks.
    pub fn meet(place: Place<'_>, rank: Rank, ranks: usize, deadline: Instant) -> Result<Self> {
        let (mut mesh, begun) = (Self::alone(rank, ranks), Instant::now());
        let missing = mesh.gather(place, Meeting::First, deadline)?;
        if missing.is_empty() {
            return Ok(mesh);
        }
        let missing: Vec<String> = missing.iter().map(|r| r.to_string()).collect();
        Err(Error::Meeting(format!(
            "rank {} did not come within {:.1?}; start it with the same directory, or look why it ended",
            missing.join(", "),
            begun.elapsed()
        )))
    }

    /// Meets all ranks to which there is no contact: calls the lower ones, is called by the higher ones. Gives those that did not
    /// come in time. One that returns stops early, when it has been told by one that has stayed who makes links.
    pub fn gather(&mut self, place: Place<'_>, meeting: Meeting, deadline: Instant) -> Result<Vec<Rank>> {
        let (rank, ranks) = (self.rank, self.contacts.len());
        let mut unanswered = vec![false; ranks];
        if self.missing().is_empty() {
            return Ok(Vec::new());
        }
        let listener = place.directory.take(rank, ranks)?;
        let returning = meeting == Meeting::Returning;
        let configuration = place.configuration.to_vec();
        let hello = Message::Hello { protocol: PROTOCOL, rank, ranks, returning, configuration };
        loop {
            for (lower, unanswered) in unanswered.iter_mut().enumerate().take(rank) {
                if self.contacts[lower].is_none() {
                    *unanswered = self.call(place.directory, lower, &hello)?;
                }
            }
            while self.answer(listener.socket.as_fd(), place, meeting, &hello, deadline)? {}
            if meeting == Meeting::First {
                self.nobody_has_left()?;
            } else if returning && self.told_who_is_there(place, &mut unanswered)? {
                return Ok(self.missing());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if self.missing().is_empty() || left.is_zero() {
                // The lower ranks' answers to our calls.
                for lower in (0..rank).filter(|r| std::mem::take(&mut unanswered[*r])) {
                    self.hear_answer(lower, place, meeting, deadline)?;
                }
                let missing = self.missing();
                if missing.is_empty() || left.is_zero() {
                    return Ok(missing);
                }
            }
            // Only lower ranks have to be called again; higher ones make the socket readable.
            let again = returning || (0..rank).any(|r| self.contacts[r].is_none());
            let nap = if again { CALL_AGAIN } else { Duration::from_millis(200) };
            wait_readable(&[listener.socket.as_fd()], left.min(nap)).map_err(failed("ppoll", "this should not happen"))?;
        }
    }

    /// Ranks to which there is no contact.
    pub fn missing(&self) -> Vec<Rank> {
        self.contacts.iter().enumerate().filter(|(r, c)| *r != self.rank && c.is_none()).map(|(r, _)| r).collect()
    }

    /// The answer of a rank that was called. One that does not answer has not come, except at the first meeting, which ends.
    fn hear_answer(&mut self, lower: Rank, place: Place<'_>, meeting: Meeting, deadline: Instant) -> Result<()> {
        let Some(contact) = &self.contacts[lower] else { return Ok(()) };
        let answer = match contact.receive(deadline) {
            Ok((message, _)) if meeting.takes(&message) => self.check_hello(&message, Some(lower), place).map(drop),
            Ok((message, _)) => Err(Error::Meeting(format!("rank {lower} met another group: {message:?}"))),
            Err(silence) => Err(Error::Meeting(format!("rank {lower} met but then {silence}"))),
        };
        if answer.is_err() {
            self.contacts[lower] = None;
        }
        if meeting == Meeting::First { answer } else { Ok(()) }
    }

    /// Calls a rank; says whether it is there, so that its answer is to be heard.
    fn call(&mut self, directory: &Directory, lower: Rank, hello: &Message) -> Result<bool> {
        let Some(socket) = directory.call(lower)? else { return Ok(false) };
        let Some(contact) = Contact::new(socket)? else { return Ok(false) };
        // One that has ended since is called again.
        if contact.send(hello, &[]).is_err() {
            return Ok(false);
        }
        self.contacts[lower] = Some(contact);
        Ok(true)
    }

    /// Takes one caller, if there is one.
    fn answer(
        &mut self,
        listener: BorrowedFd<'_>,
        place: Place<'_>,
        meeting: Meeting,
        hello: &Message,
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
        // One that says nothing, or nonsense, is not of this group; nor is one that comes for another meeting.
        let Ok((message @ Message::Hello { .. }, _)) = contact.receive(by) else { return Ok(true) };
        if !meeting.takes(&message) {
            return Ok(true);
        }
        // Answered before it is checked, so that the caller sees what differs too.
        let answered = contact.send(hello, &[]);
        let rank = match self.check_hello(&message, None, place) {
            Ok(rank) => rank,
            // It was told; those that have stayed go on.
            Err(_) if meeting == Meeting::Stayed => return Ok(true),
            Err(error) => return Err(error),
        };
        let twice = || Err(Error::Meeting(format!("two processes say that they are rank {rank}; give each rank its own number")));
        if rank <= self.rank {
            return if meeting == Meeting::Stayed { Ok(true) } else { twice() };
        }
        if answered.is_ok() {
            match &self.contacts[rank] {
                Some(before) if !before.has_ended(Duration::ZERO) && !before.is_closed() => {
                    if meeting == Meeting::First {
                        return twice();
                    }
                }
                _ => self.contacts[rank] = Some(contact),
            }
        }
        Ok(true)
    }

    /// Compares the caller's view with ours; gives its rank.
    fn check_hello(&self, message: &Message, expected: Option<Rank>, place: Place<'_>) -> Result<Rank> {
        let ours = place.configuration;
        let Message::Hello { protocol, rank: peer, ranks, configuration: theirs, .. } = message else {
            return Err(Error::Meeting(format!("a process did not say who it is, but {message:?}")));
        };
        let (rank, peer) = (self.rank, *peer);
        let mismatch =
            |what, ours: String, theirs: String| Err(Error::Mismatch { rank, peer, what, ours, theirs, endpoint: None });
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
                return Err(Error::PeerDied { rank: self.rank, peer: rank, what: "meeting", endpoint: None });
            }
        }
        Ok(())
    }

    /// Whether one that has stayed has said who makes links. Contacts that have gone again are forgotten.
    fn told_who_is_there(&mut self, place: Place<'_>, unanswered: &mut [bool]) -> Result<bool> {
        let mut told = false;
        for (peer, unanswered) in unanswered.iter_mut().enumerate() {
            // Its answer to our call may come first. Who has stayed answers before it has others told who is there.
            while let Some(contact) = &self.contacts[peer] {
                match contact.peek() {
                    Ok(Some(message @ Message::Hello { .. })) => {
                        let _ = contact.receive(Instant::now());
                        *unanswered = false;
                        self.check_hello(&message, Some(peer), place)?;
                    }
                    Ok(found) => {
                        told |= matches!(found, Some(Message::Members { .. }));
                        break;
                    }
                    Err(_) => self.contacts[peer] = None,
                }
            }
        }
        Ok(told)
    }
}

impl Meeting {
    /// Whether one that says this belongs to the meeting.
    fn takes(self, hello: &Message) -> bool {
        let Message::Hello { returning, .. } = hello else { return true };
        match self {
            Self::First => !returning,
            Self::Stayed => *returning,
            Self::Returning => true,
        }
    }
}
