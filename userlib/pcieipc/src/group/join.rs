// SPDX-License-Identifier: MIT OR Apache-2.0
//! From sockets to links: each pair of ranks passes memory and bells, and all say that they have them.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

use super::{
    GroupLinks,
    mesh::Mesh,
    message::{Message, Silence},
};
use crate::{
    error::{Error, Rank, Result},
    sys::{Bell, Life, failed},
    transport::{
        Peer, RankLinks,
        board::{Board, Watch},
        shm::{Own, Shm},
    },
};

/// What a transport does while a group meets. Ranks are those of the group that is being made.
pub trait Join {
    /// What is passed to a peer.
    fn offer(&mut self, peer: Rank) -> Result<Vec<OwnedFd>>;
    /// What a peer passed.
    fn accept(&mut self, peer: Rank, life: Option<Arc<Life>>, fds: Vec<OwnedFd>) -> Result<()>;
    /// Everything was passed; every wait looks at the board.
    fn finish(self: Box<Self>, watch: Watch) -> Result<Box<dyn GroupLinks>>;
}

/// How the making of links ended.
pub enum Joined {
    /// All members have their links.
    Links(Links),
    /// Not all; the ranks (numbers of the meeting) that did not answer.
    Again { lost: Vec<Rank>, why: Error },
}

/// What a new life of a group stands on.
pub struct Links {
    pub links: Box<dyn GroupLinks>,
    pub board: Arc<Board>,
}

/// Makes links among `members` (numbers of the meeting, this rank among them). A rank whose `transport` could not be had tells the
/// others so, as at every later step at which it gives up.
pub fn join(mesh: &Mesh, members: &[Rank], turn: u32, transport: Result<Box<dyn Join>>, deadline: Instant) -> Result<Joined> {
    let joined = transport.and_then(|transport| connect(mesh, members, turn, transport, deadline));
    let why = match &joined {
        Ok(Joined::Links(_)) => return joined,
        Ok(Joined::Again { why, .. }) | Err(why) => why.to_string(),
    };
    // Whoever goes no further says so: the others would wait for it until the deadline.
    for contact in members.iter().filter_map(|old| mesh.contacts.get(*old)?.as_ref()) {
        let _ = contact.send(&Message::Failed { turn, why: why.clone() }, &[]);
    }
    joined
}

fn connect(mesh: &Mesh, members: &[Rank], turn: u32, mut transport: Box<dyn Join>, deadline: Instant) -> Result<Joined> {
    let again = |lost: Rank, silence: Silence| Joined::Again {
        lost: vec![lost],
        why: Error::Meeting(format!("rank {lost} met, but while links were made {silence}")),
    };
    let peers = || members.iter().enumerate().filter_map(|(new, &old)| Some((new, old, mesh.contacts.get(old)?.as_ref()?)));
    // The lowest member makes the board.
    let (first, mut board) = (members.first().copied().unwrap_or(mesh.rank), None);
    if first == mesh.rank {
        board = Some(Board::new()?);
    }
    for (new, old, contact) in peers() {
        let fds = transport.offer(new)?;
        let borrowed: Vec<_> = fds.iter().map(|f| f.as_fd()).chain(board.iter().map(Board::file)).collect();
        if let Err(silence) = contact.send(&Message::Offer { turn }, &borrowed) {
            return Ok(again(old, silence));
        }
    }
    for (new, old, contact) in peers() {
        match next(mesh.rank, old, contact.receive_of_turn(turn, deadline))? {
            Next::Message(Message::Offer { .. }, mut fds) => {
                if old == first {
                    let file = fds.pop().ok_or_else(|| Error::Corrupt {
                        rank: mesh.rank,
                        peer: new,
                        what: "no board".into(),
                        endpoint: None,
                    });
                    board = Some(Board::from_peer(mesh.rank, new, file?)?);
                }
                transport.accept(new, contact.life.clone(), fds)?;
            }
            Next::Message(other, _) => return Ok(again(old, Silence::Nonsense(format!("{other:?}")))),
            Next::Silence(silence) => return Ok(again(old, silence)),
            Next::Later(why) => return Ok(Joined::Again { lost: vec![], why }),
        }
    }
    let Some(board) = board.map(Arc::new) else {
        return Ok(again(first, Silence::Nonsense("no board".into())));
    };
    let watch = Watch::new(board.clone(), members);
    let links = transport.finish(watch)?;
    for (_, _, contact) in peers() {
        let _ = contact.send(&Message::Ready { turn }, &[]);
    }
    for (_, old, contact) in peers() {
        match next(mesh.rank, old, contact.receive_of_turn(turn, deadline))? {
            Next::Message(Message::Ready { .. }, _) => {}
            Next::Message(other, _) => return Ok(again(old, Silence::Nonsense(format!("{other:?}")))),
            Next::Silence(silence) => return Ok(again(old, silence)),
            Next::Later(why) => return Ok(Joined::Again { lost: vec![], why }),
        }
    }
    Ok(Joined::Links(Links { links, board }))
}

enum Next {
    Message(Message, Vec<OwnedFd>),
    Silence(Silence),
    Later(Error),
}

fn next(rank: Rank, peer: Rank, received: Result<OfTurn, Silence>) -> Result<Next> {
    match received {
        Ok(OfTurn::Now(Message::Failed { why, .. }, _)) => {
            Err(Error::Meeting(format!("rank {peer} could not make its links to rank {rank}: {why}")))
        }
        Ok(OfTurn::Now(message, fds)) => Ok(Next::Message(message, fds)),
        Ok(OfTurn::Later) => Ok(Next::Later(Error::Meeting(format!("rank {peer} began again while links were made")))),
        Err(silence) => Ok(Next::Silence(silence)),
    }
}

/// A packet, set against the turn that this rank is in.
pub enum OfTurn {
    /// Of this turn.
    Now(Message, Vec<OwnedFd>),
    /// Of a later one.
    Later,
}

impl super::mesh::Contact {
    /// The next packet that is not of an earlier turn.
    pub fn receive_of_turn(&self, turn: u32, deadline: Instant) -> Result<OfTurn, Silence> {
        loop {
            let (message, fds) = self.receive(deadline)?;
            let its = match &message {
                Message::Hello { .. } => return Err(Silence::Nonsense("a second introduction".into())),
                // Said to one that returns, which has heard it from another already.
                Message::Members { .. } | Message::Committed { .. } => continue,
                Message::Offer { turn }
                | Message::Ready { turn }
                | Message::Buffer { turn, .. }
                | Message::Exchange { turn, .. }
                | Message::Failed { turn, .. } => *turn,
            };
            if its == turn {
                return Ok(OfTurn::Now(message, fds));
            }
            if its > turn {
                return Ok(OfTurn::Later);
            }
        }
    }
}

/// Links over shared memory on their way.
pub struct JoinShm {
    rank: Rank,
    data_bytes: usize,
    bell: Bell,
    offered: Vec<Option<Own>>,
    bells: Vec<Option<Bell>>,
    peers: Vec<Option<Peer<Shm>>>,
}

impl JoinShm {
    pub fn new(rank: Rank, ranks: usize, data_bytes: usize) -> Result<Self> {
        let bell = Bell::new().map_err(failed("eventfd", "raise the limit of open files"))?;
        Ok(Self {
            rank,
            data_bytes,
            bell,
            offered: (0..ranks).map(|_| None).collect(),
            bells: (0..ranks).map(|_| None).collect(),
            peers: (0..ranks).map(|_| None).collect(),
        })
    }
}

impl Join for JoinShm {
    fn offer(&mut self, peer: Rank) -> Result<Vec<OwnedFd>> {
        let own = Own::new(self.data_bytes)?;
        let copy =
            |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().map_err(failed("dup", "raise the limit of open files"));
        let fds = vec![copy(own.file())?, copy(self.bell.as_fd())?];
        self.offered[peer] = Some(own);
        Ok(fds)
    }

    fn accept(&mut self, peer: Rank, life: Option<Arc<Life>>, fds: Vec<OwnedFd>) -> Result<()> {
        let count = fds.len();
        let Ok([file, bell]) = <[OwnedFd; 2]>::try_from(fds) else {
            return Err(Error::Corrupt {
                rank: self.rank,
                peer,
                what: format!("{count} descriptors instead of 2"),
                endpoint: None,
            });
        };
        let Some(own) = self.offered[peer].take() else {
            return Err(Error::Corrupt { rank: self.rank, peer, what: "a second offer".into(), endpoint: None });
        };
        let (outward, inward) = own.join(self.rank, peer, file)?;
        self.bells[peer] = Some(Bell::from_peer(bell));
        self.peers[peer] =
            Some(Peer { writer: crate::ring::Writer::new(outward), reader: crate::ring::Reader::new(inward), life });
        Ok(())
    }

    fn finish(self: Box<Self>, watch: Watch) -> Result<Box<dyn GroupLinks>> {
        let Self { rank, data_bytes, bell, bells, peers, .. } = *self;
        Ok(Box::new(RankLinks::new(rank, peers, Shm::new(bells), bell, data_bytes).watching(watch)))
    }
}
