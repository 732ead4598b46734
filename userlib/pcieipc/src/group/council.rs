// SPDX-License-Identifier: MIT OR Apache-2.0
//! How ranks decide something together, so that all that are left read the same answer.
//!
//! Each casts a vote on the group's [`Board`] and waits until everybody has voted, has died (its process's descriptor says so),
//! has left, or is too late. Whoever sees that first writes the decision; the first one counts for all. A rank that the decision
//! takes to be lost stays lost on this board: when it comes late, it reads that the others went on without it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::mesh::Mesh;
use crate::{
    control::{Defence, is_without},
    error::{Error, Rank, Result},
    sys::{Home, failed, wait_readable},
    transport::board::{Board, Decision, Question, Ranks, Vote, after},
};

/// Pauses between two looks at the board: short at first, then so long that a long wait costs nothing. A death ends a pause.
const FIRST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// What a rank says of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ballot {
    pub question: Question,
    /// Bits that hold only if all say so.
    pub flags: u16,
    /// Members that the asker takes to be lost for good.
    pub lost: Ranks,
    /// For [`Question::Newcomers`] those that all must have seen, for others those that any has seen.
    pub seen: Ranks,
}

/// One rank's seat at the board of the group's present life.
#[derive(Debug)]
pub struct Council {
    board: Arc<Board>,
    me: Rank,
    members: Ranks,
    last: Decision,
    resigned: bool,
    home: Home,
}

impl Council {
    /// `members` are those that have the board.
    pub fn new(board: Arc<Board>, me: Rank, members: &[Rank]) -> Self {
        let last = if is_without(Defence::Quarantine) { board.decision() } else { Decision::default() };
        Self { board, me, members: Ranks::of(members.iter().copied()), last, resigned: false, home: Home::here() }
    }

    pub fn board(&self) -> &Arc<Board> {
        &self.board
    }

    /// Members that no decision took to be lost.
    pub fn present(&self) -> Ranks {
        self.members.without(self.last.lost)
    }

    /// Whether the others have decided to go on without this rank.
    pub fn is_excluded(&self) -> bool {
        self.resigned || self.board.decision().lost.contains(self.me)
    }

    /// # Errors
    /// `Argument` in a forked child.
    pub fn at_home(&self) -> Result<()> {
        if self.home.is_here() {
            return Ok(());
        }
        Err(Error::Argument(
            "this process is a copy that fork made; a group is of the process that met, and is used there only".into(),
        ))
    }

    /// Votes that this rank is lost, and does not wait for the others.
    pub fn resign(&mut self, ballot: Ballot) {
        self.board.vote(self.me, self.vote(ballot));
        self.resigned = true;
    }

    fn vote(&self, ballot: Ballot) -> Vote {
        let Ballot { question, flags, lost, seen } = ballot;
        Vote { instance: after(self.last.instance), question, flags, lost, seen }
    }

    /// Votes, and waits for the decision. Who has not voted by `by` is lost. All members call it in the same order.
    ///
    /// # Errors
    /// `Mismatch` when ranks were asked different questions, which all of them are told; `Meeting` when the others went on without
    /// this rank; `System`.
    pub fn decide(&mut self, mesh: &Mesh, ballot: Ballot, by: Instant) -> Result<Decision> {
        let before = self.last;
        let instance = after(before.instance);
        self.board.vote(self.me, self.vote(ballot));
        let mut pause = FIRST_PAUSE;
        let decision = loop {
            let now = self.board.decision();
            if now.instance != before.instance {
                break now;
            }
            let late = Instant::now() >= by;
            if let Some(proposal) = self.count(mesh, ballot.question, instance, late)? {
                break self.board.decide(before, proposal);
            }
            self.rest(mesh, pause)?;
            pause = (pause * 2).min(LONGEST_PAUSE);
        };
        if decision.lost.contains(self.me) || decision.instance != instance {
            return Err(excluded());
        }
        // Whatever is in the word, nobody comes back on this board.
        self.last = Decision { lost: decision.lost.or(before.lost), ..decision };
        if decision.mixed {
            let differs = |rank: &Rank| self.board.voted(*rank).is_some_and(|vote| vote.question != ballot.question);
            let peer = self.present().list().into_iter().find(differs).unwrap_or(self.me);
            let (ours, theirs) =
                (ballot.question.asked_by(), self.board.voted(peer).map_or("something else", |v| v.question.asked_by()));
            let (ours, theirs) = (ours.into(), theirs.into());
            return Err(Error::Mismatch {
                rank: self.me,
                peer,
                what: "what to do after a failure",
                ours,
                theirs,
                endpoint: None,
            });
        }
        Ok(self.last)
    }

    /// What follows from the votes; nothing while somebody may still vote.
    fn count(&self, mesh: &Mesh, question: Question, instance: u16, late: bool) -> Result<Option<Decision>> {
        let present = self.present();
        let mut lost = self.dead(mesh)?;
        let mut votes = Vec::new();
        for rank in present.list() {
            match self.board.voted(rank) {
                Some(Vote { question: Question::Leave, .. }) => lost = lost.or(Ranks::of([rank])),
                Some(vote) if vote.instance == instance => votes.push((rank, vote)),
                _ if lost.contains(rank) => {}
                _ if late => lost = lost.or(Ranks::of([rank])),
                _ => return Ok(None),
            }
        }
        lost = votes.iter().fold(lost, |all, (_, vote)| all.or(vote.lost)).and(self.members).or(self.last.lost);
        let mut decision = Decision { instance, mixed: false, flags: u16::MAX, lost, seen: Ranks::default() };
        let all_must_see = question == Question::Newcomers;
        if all_must_see {
            decision.seen = Ranks(u16::MAX);
        }
        for (_, vote) in votes.iter().filter(|(rank, _)| !lost.contains(*rank)) {
            decision.mixed |= vote.question != question;
            decision.flags &= vote.flags;
            decision.seen = if all_must_see { decision.seen.and(vote.seen) } else { decision.seen.or(vote.seen) };
        }
        Ok(Some(decision))
    }

    /// Present members whose process has ended. A thread of this process says so itself, with [`Question::Leave`].
    fn dead(&self, mesh: &Mesh) -> Result<Ranks> {
        let others = || self.present().list().into_iter().filter(|r| *r != self.me);
        let without_contact = others().filter(|r| mesh.contacts.get(*r).is_none_or(Option::is_none));
        let (ranks, fds) = self.lives(mesh);
        let ended = wait_readable(&fds, Duration::ZERO).map_err(failed("ppoll", "this should not happen"))?;
        let ended = ranks.iter().enumerate().filter(|(i, _)| ended & 1 << i != 0).map(|(_, rank)| *rank);
        Ok(Ranks::of(without_contact.chain(ended)))
    }

    /// Waits a little, or until a process ends whose end is not known yet.
    fn rest(&self, mesh: &Mesh, pause: Duration) -> Result<()> {
        let (_, fds) = self.lives(mesh);
        // One that has ended after it voted would be readable from now on.
        let ended = wait_readable(&fds, Duration::ZERO).map_err(failed("ppoll", "this should not happen"))?;
        if ended == 0 {
            wait_readable(&fds, pause).map_err(failed("ppoll", "this should not happen"))?;
        } else {
            std::thread::sleep(pause);
        }
        Ok(())
    }

    fn lives<'a>(&self, mesh: &'a Mesh) -> (Vec<Rank>, Vec<std::os::fd::BorrowedFd<'a>>) {
        use std::os::fd::AsFd;
        let life = |rank: Rank| Some((rank, mesh.contacts.get(rank)?.as_ref()?.life.as_ref()?.as_fd()));
        self.present().list().into_iter().filter(|r| *r != self.me).filter_map(life).unzip()
    }
}

impl Drop for Council {
    fn drop(&mut self) {
        // On a board that is used again, it would be said of the new life.
        // Nor would a forked child's leaving be that of the rank.
        if !self.resigned && !is_without(Defence::Quarantine) && self.home.is_here() {
            let nothing = Ranks::default();
            self.board.vote(self.me, self.vote(Ballot { question: Question::Leave, flags: 0, lost: nothing, seen: nothing }));
        }
    }
}

/// The answer for a rank that was left out.
pub fn excluded() -> Error {
    Error::Meeting("the others went on without this rank, which was lost or late; call recover to join them again".into())
}
