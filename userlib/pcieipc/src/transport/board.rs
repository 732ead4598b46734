// SPDX-License-Identifier: MIT OR Apache-2.0
//! One page that all ranks of a group share: votes, decisions, and the word that aborts.
//!
//! Ranks of one host need no messages to agree: who has seen all votes exchanges the decision word once, and only the first
//! exchange of an instance counts. So every rank reads the same decision, whoever dies before or after which store, and nobody
//! waits for a rank that has to tell.
//!
//! | field | written by | ordering of the store | pairs with |
//! |---|---|---|---|
//! | `masks` of a rank | that rank | Relaxed, before its vote | the load after the vote's |
//! | `vote` of a rank | that rank | Release | the Acquire load of who counts votes |
//! | `decision` | any rank, once an instance | AcqRel exchange | the Acquire load of who waits |
//! | `reason` of a rank | that rank | Relaxed, before its exchange of `abort` | the load after that of `abort` |
//! | `abort` | any rank, once | AcqRel exchange | the Acquire load in every wait |
//! | `shares` | present rank 0, before it takes part in a call | Relaxed | the load of who has ended that call, which rank 0's records order |
//!
//! Ranks are known by the numbers of their first meeting. The page is new with each life of the group, so a rank that was left
//! out can only write one that nobody reads any more.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
};

use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
    unistd::ftruncate,
};

use crate::{
    error::{Error, Rank, Result},
    executor::MAX_RANKS,
    group::step,
    plan::Shares,
    sys::{Access, Mapping, check_sealed, failed},
};

const BYTES: usize = 8192;
const REASON_BYTES: usize = 192;
const SEALS: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_SEAL);

/// What ranks vote on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// `Group::agree`.
    Verdict = 1,
    /// Who is left, for `Group::shrink`.
    Survivors = 2,
    /// Who is left, for `Group::recover`.
    Returned = 3,
    /// Who has come back.
    Newcomers = 4,
    /// Whether the new links stand.
    Commit = 5,
    /// The group ends for this rank: whatever is asked later.
    Leave = 6,
}

impl Question {
    /// The call that asks it.
    pub fn asked_by(self) -> &'static str {
        match self {
            Self::Verdict => "agree",
            Self::Survivors => "shrink",
            Self::Returned | Self::Newcomers => "recover",
            Self::Commit => "new links",
            Self::Leave => "leave",
        }
    }

    fn decode(code: u64) -> Option<Self> {
        [Self::Verdict, Self::Survivors, Self::Returned, Self::Newcomers, Self::Commit, Self::Leave]
            .into_iter()
            .find(|q| *q as u64 == code)
    }
}

/// A set of ranks, by the numbers of the first meeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ranks(pub u16);

impl Ranks {
    pub fn of(ranks: impl IntoIterator<Item = Rank>) -> Self {
        Self(ranks.into_iter().filter(|r| *r < MAX_RANKS).fold(0, |bits, rank| bits | 1 << rank))
    }
    pub fn contains(self, rank: Rank) -> bool {
        rank < MAX_RANKS && self.0 & 1 << rank != 0
    }
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
    pub fn list(self) -> Vec<Rank> {
        (0..MAX_RANKS).filter(|r| self.contains(*r)).collect()
    }
}

/// What one rank says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vote {
    pub instance: u16,
    pub question: Question,
    /// Bits that hold only if all say so.
    pub flags: u16,
    /// Whom it takes to be lost.
    pub lost: Ranks,
    /// Whom it has seen come back.
    pub seen: Ranks,
}

/// What all read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Decision {
    /// Counts from 1; 15 bits.
    pub instance: u16,
    /// Ranks were asked different questions.
    pub mixed: bool,
    pub flags: u16,
    pub lost: Ranks,
    pub seen: Ranks,
}

impl Decision {
    fn encode(self) -> u64 {
        u64::from(self.instance & 0x7fff)
            | u64::from(self.mixed) << 15
            | u64::from(self.flags) << 16
            | u64::from(self.lost.0) << 32
            | u64::from(self.seen.0) << 48
    }

    fn decode(word: u64) -> Self {
        Self {
            instance: word as u16 & 0x7fff,
            mixed: word & 1 << 15 != 0,
            flags: (word >> 16) as u16,
            lost: Ranks((word >> 32) as u16),
            seen: Ranks((word >> 48) as u16),
        }
    }
}

/// The next instance: 15 bits, never 0.
pub fn after(instance: u16) -> u16 {
    if instance >= 0x7fff { 1 } else { instance + 1 }
}

#[repr(C, align(64))]
struct Place {
    vote: AtomicU64,
    masks: AtomicU64,
    reason: [AtomicU8; REASON_BYTES],
}

#[repr(C, align(64))]
struct Page {
    decision: AtomicU64,
    /// 0, or 1 with the rank in the upper half. Every wait reads it.
    abort: AtomicU64,
    places: [Place; MAX_RANKS],
    /// For two looks at the links, by turns.
    shares: [[AtomicU64; SHARE_WORDS]; 2],
}

const SHARE_WORDS: usize = size_of::<[u16; MAX_RANKS]>() / 8;

const _: () = assert!(size_of::<Page>() <= BYTES);

/// The page of one life of a group, as one rank has it mapped.
#[derive(Debug)]
pub struct Board {
    file: OwnedFd,
    mapping: Mapping,
}

impl Board {
    /// A new page, all zero.
    pub fn new() -> Result<Self> {
        #[cfg(feature = "controls")]
        if let Some(file) = unquarantined::last() {
            return Self::again(file);
        }
        let hint = "free some memory or raise the limit of open files";
        let file = memfd_create("pcieipc-board", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)
            .map_err(|e| failed("memfd_create", hint)(e.into()))?;
        ftruncate(&file, BYTES as i64).map_err(|e| failed("ftruncate", hint)(e.into()))?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(SEALS)).map_err(|e| failed("fcntl(F_ADD_SEALS)", hint)(e.into()))?;
        let mapping = Mapping::new(file.as_fd(), 0, BYTES, Access::ReadWrite).map_err(failed("mmap", hint))?;
        #[cfg(feature = "controls")]
        unquarantined::keep(&file);
        Ok(Self { file, mapping })
    }

    /// The page of the life before, with its abort taken back: what must never be done.
    #[cfg(feature = "controls")]
    fn again(file: OwnedFd) -> Result<Self> {
        let mapping = Mapping::new(file.as_fd(), 0, BYTES, Access::ReadWrite).map_err(failed("mmap", "free some memory"))?;
        let board = Self { file, mapping };
        board.page().abort.store(0, Ordering::Release);
        Ok(board)
    }

    /// The page that `peer` made.
    ///
    /// # Errors
    /// `Corrupt` when it may shrink under a reader or has another size.
    pub fn from_peer(rank: Rank, peer: Rank, file: OwnedFd) -> Result<Self> {
        let corrupt = |what: String| Error::Corrupt { rank, peer, what, endpoint: None };
        // All ranks write it, so any of them may punch a hole; what is read there then is zero.
        check_sealed(file.as_fd(), "a board", BYTES, SealFlag::F_SEAL_SHRINK).map_err(corrupt)?;
        let mapping = Mapping::new(file.as_fd(), 0, BYTES, Access::ReadWrite)
            .map_err(|e| corrupt(format!("a board that can not be mapped ({e})")))?;
        Ok(Self { file, mapping })
    }

    /// What to pass to the others.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn page(&self) -> &Page {
        // SAFETY: the mapping is page-aligned, BYTES long and stays while `self` lives (the file is sealed against shrinking);
        // a Page is made of atomics only, for which every bit pattern is good.
        unsafe { self.mapping.start().cast::<Page>().as_ref() }
    }

    /// Casts this rank's vote. Its earlier instances have been decided.
    pub fn vote(&self, rank: Rank, vote: Vote) {
        let Some(place) = self.page().places.get(rank) else { return };
        step();
        place.masks.store(u64::from(vote.lost.0) | u64::from(vote.seen.0) << 16, Ordering::Relaxed);
        step();
        let word = u64::from(vote.instance) | (vote.question as u64) << 16 | u64::from(vote.flags) << 32;
        place.vote.store(word, Ordering::Release);
        step();
    }

    /// What a rank has voted last; nothing for a word that is none.
    pub fn voted(&self, rank: Rank) -> Option<Vote> {
        let place = self.page().places.get(rank)?;
        let word = place.vote.load(Ordering::Acquire);
        let question = Question::decode(word >> 16 & 0xffff)?;
        let masks = place.masks.load(Ordering::Relaxed);
        let (lost, seen) = (Ranks(masks as u16), Ranks((masks >> 16) as u16));
        Some(Vote { instance: word as u16, question, flags: (word >> 32) as u16, lost, seen })
    }

    /// The last decision.
    pub fn decision(&self) -> Decision {
        Decision::decode(self.page().decision.load(Ordering::Acquire))
    }

    /// Decides, unless somebody was first; gives what holds.
    pub fn decide(&self, before: Decision, now: Decision) -> Decision {
        let decision = &self.page().decision;
        step();
        let found = match decision.compare_exchange(before.encode(), now.encode(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => now,
            Err(word) => Decision::decode(word),
        };
        step();
        found
    }

    /// Ends all calls of all ranks; the first one and its reason stay.
    pub fn abort(&self, by: Rank, why: &str) {
        let (page, mut end) = (self.page(), why.len().min(REASON_BYTES - 1));
        let Some(place) = page.places.get(by).filter(|_| self.aborted().is_none()) else { return };
        while !why.is_char_boundary(end) {
            end -= 1;
        }
        for (to, byte) in place.reason.iter().zip(why.as_bytes()[..end].iter().chain([&0])) {
            to.store(*byte, Ordering::Relaxed);
        }
        let _ = page.abort.compare_exchange(0, 1 | (by as u64) << 32, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Says which shards ranks own from the look with this number on.
    pub fn tell_shares(&self, look: u32, shares: Shares) {
        let bytes = shares.to_bytes();
        for (to, word) in self.page().shares[look as usize % 2].iter().zip(bytes.chunks_exact(8)) {
            to.store(u64::from_le_bytes(std::array::from_fn(|i| word[i])), Ordering::Relaxed);
        }
    }

    /// What was said for this look.
    pub fn told_shares(&self, look: u32, ranks: usize) -> Shares {
        let mut bytes = [0; 8 * SHARE_WORDS];
        for (to, word) in bytes.chunks_exact_mut(8).zip(&self.page().shares[look as usize % 2]) {
            to.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        Shares::from_bytes(bytes, ranks)
    }

    /// Who has aborted, if anybody. One load.
    pub fn aborted(&self) -> Option<Rank> {
        let word = self.page().abort.load(Ordering::Acquire);
        (word != 0).then_some((word >> 32) as usize)
    }

    /// The reason that a rank gave, with everything unprintable replaced.
    pub fn reason(&self, of: Rank) -> String {
        let Some(place) = self.page().places.get(of) else { return String::new() };
        let bytes: Vec<u8> = place.reason.iter().map(|b| b.load(Ordering::Relaxed)).take_while(|b| *b != 0).collect();
        String::from_utf8_lossy(&bytes).chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
    }
}

/// The board that this process made last, for builds that can do without the quarantine of memory.
#[cfg(feature = "controls")]
mod unquarantined {
    use std::{
        os::fd::OwnedFd,
        sync::{Mutex, PoisonError},
    };

    use crate::control::{Defence, is_without};

    static LAST: Mutex<Option<OwnedFd>> = Mutex::new(None);

    pub fn keep(file: &OwnedFd) {
        if is_without(Defence::Quarantine) {
            *LAST.lock().unwrap_or_else(PoisonError::into_inner) = file.try_clone().ok();
        }
    }

    pub fn last() -> Option<OwnedFd> {
        LAST.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.try_clone().ok()
    }
}

/// A rank's view of the board while it waits in a call.
#[derive(Debug, Clone)]
pub struct Watch {
    board: Arc<Board>,
    /// The numbers of the first meeting, by present rank.
    members: Vec<Rank>,
}

impl Watch {
    pub fn new(board: Arc<Board>, members: &[Rank]) -> Self {
        Self { board, members: members.to_vec() }
    }

    /// Who has ended the calls of all ranks, and why; by present rank. One load as long as nobody has.
    pub fn aborted(&self) -> Option<(Rank, String)> {
        let by = self.board.aborted()?;
        let present = self.members.iter().position(|r| *r == by).unwrap_or(by);
        Some((present, self.board.reason(by)))
    }

    /// See [`Board::tell_shares`].
    pub fn tell_shares(&self, look: u32, shares: Shares) {
        self.board.tell_shares(look, shares);
    }

    /// See [`Board::told_shares`].
    pub fn told_shares(&self, look: u32) -> Shares {
        self.board.told_shares(look, self.members.len())
    }

    /// Ends the calls of all ranks.
    pub fn abort(&self, by: Rank, why: &str) {
        if let Some(by) = self.members.get(by) {
            self.board.abort(*by, why);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vote(instance: u16) -> Vote {
        Vote { instance, question: Question::Verdict, flags: 5, lost: Ranks(2), seen: Ranks(0x8000) }
    }

    #[test]
    fn a_vote_and_a_decision_are_read_as_they_were_written() {
        let board = Board::new().unwrap();
        assert_eq!(board.voted(3), None);
        board.vote(3, vote(7));
        assert_eq!(board.voted(3), Some(vote(7)));
        let decision = Decision { instance: 0x7fff, mixed: true, flags: 0xffff, lost: Ranks(0x8001), seen: Ranks(0x7ffe) };
        assert_eq!(Decision::decode(decision.encode()), decision);
        assert_eq!(after(0x7fff), 1);
    }

    #[test]
    fn only_the_first_decision_of_an_instance_counts() {
        let board = Board::new().unwrap();
        let before = board.decision();
        let (first, second) = (Decision { instance: 1, flags: 1, ..before }, Decision { instance: 1, flags: 2, ..before });
        assert_eq!(board.decide(before, first), first);
        assert_eq!(board.decide(before, second), first);
        assert_eq!(board.decision(), first);
    }

    #[test]
    fn the_first_abort_stays_and_its_reason_is_cut_and_printable() {
        let board = Board::new().unwrap();
        assert_eq!(board.aborted(), None);
        board.abort(4, &format!("bad\n{}", "ü".repeat(200)));
        board.abort(1, "later");
        assert_eq!(board.aborted(), Some(4));
        let reason = board.reason(4);
        assert!(reason.starts_with("bad\u{fffd}ü") && reason.len() < REASON_BYTES + 4, "{reason}");
    }

    #[test]
    fn shares_of_two_looks_do_not_touch_each_other() {
        let board = Board::new().unwrap();
        assert!(board.told_shares(0, 4).are_equal());
        let (one, two) = (Shares::for_rates(&[8.0, 8.0, 2.0, 8.0]), Shares::for_rates(&[1.0, 8.0, 8.0, 8.0]));
        board.tell_shares(7, one);
        board.tell_shares(8, two);
        assert_eq!((board.told_shares(7, 4), board.told_shares(8, 4)), (one, two));
    }

    #[test]
    fn a_board_that_may_shrink_or_has_another_size_is_refused() {
        let loose = memfd_create("test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&loose, BYTES as i64).unwrap();
        assert!(matches!(Board::from_peer(0, 1, loose), Err(Error::Corrupt { peer: 1, .. })));
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(matches!(Board::from_peer(0, 1, file.into()), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn two_mappings_of_a_board_are_one() {
        let board = Board::new().unwrap();
        let other = Board::from_peer(1, 0, board.file().try_clone_to_owned().unwrap()).unwrap();
        board.vote(0, vote(1));
        assert_eq!(other.voted(0), Some(vote(1)));
    }
}
