// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank's rings to and from all peers.

use std::{
    os::fd::{AsFd, BorrowedFd},
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Counters, Wire,
    board::Watch,
    patience::{LOOKS_BETWEEN_CHECKS, Patience, Pause, processors},
};
use crate::{
    control::{Defence, is_without},
    device::DeviceError,
    error::{EndpointRef, Error, Rank, Result},
    link::{Links, RecordHeader, Shared, SharedMut, Want},
    plan::Shares,
    ring::{LINE, Notice, RECORD_HEADER_BYTES, Reader, Stop, Writer, full_fence, max_record},
    sys::{Bell, Home, Life, failed, wait_readable, yield_now},
};

/// The longest sleep without looking again: what a lost doorbell costs at most.
const SLICE: Duration = Duration::from_millis(25);

/// Records below that are told of before anybody asks whether their reader sleeps.
const SHORT: usize = 1 << 12;

const FOR_A_RECORD: &str = "waiting for a record";
const FOR_ROOM: &str = "waiting for room in a ring";
const AT_THE_END: &str = "confirming a result";
const IN_FLIGHT: &str = "a call in flight";
const TO_MOVE: &str = "moving a record into a ring";

/// A peer as this rank reaches it.
#[derive(Debug)]
pub struct Peer<W: Wire> {
    /// The ring towards it.
    pub writer: Writer<W::Tx>,
    /// The ring from it.
    pub reader: Reader<W::Rx>,
    /// Its process; `None` for a thread of this process.
    pub life: Option<Arc<Life>>,
}

/// [`Links`] over the rings of a [`Wire`].
#[derive(Debug)]
pub struct RankLinks<W: Wire> {
    rank: Rank,
    peers: Vec<Option<Peer<W>>>,
    wire: W,
    bell: Bell,
    data_bytes: usize,
    patience: Patience,
    /// Peers, a bit each, that got a short record and may sleep.
    unrung: u32,
    counters: Counters,
    left: bool,
    /// Where any thread of any rank can end the calls of all.
    watch: Option<Watch>,
    /// When the present call is to be over.
    by: Option<Instant>,
    home: Home,
}

impl Want {
    /// From or to whom, and in words.
    pub(crate) fn of(self) -> (Rank, &'static str) {
        match self {
            Self::Record(from) => (from, FOR_A_RECORD),
            Self::Room { to, .. } => (to, FOR_ROOM),
        }
    }
}

impl<W: Wire> RankLinks<W> {
    /// Links of `rank` over rings of `data_bytes` each. `peers` has one place a rank, empty at this rank's own; `bell` is what
    /// all of them ring.
    pub fn new(rank: Rank, mut peers: Vec<Option<Peer<W>>>, mut wire: W, bell: Bell, data_bytes: usize) -> Self {
        for (peer, place) in peers.iter_mut().enumerate() {
            if let Some(place) = place.as_mut().filter(|_| wire.staging(peer).is_some()) {
                place.writer.keep_apart();
            }
        }
        let patience = Patience::new(peers.len(), processors(peers.iter().flatten().filter_map(|peer| peer.life.as_deref())));
        let counters = Counters::default();
        let (left, watch, by, home) = (false, None, None, Home::here());
        Self { rank, peers, wire, bell, data_bytes, patience, unrung: 0, counters, left, watch, by, home }
    }

    /// With the group's board, which every wait looks at.
    pub(crate) fn watching(mut self, watch: Watch) -> Self {
        self.watch = Some(watch);
        self
    }

    /// What happened until now.
    pub fn counters(&self) -> Counters {
        Counters { dma_bytes: self.wire.carried(), ..self.counters }
    }

    /// The transport's own part.
    pub fn wire(&self) -> &W {
        &self.wire
    }

    pub(crate) fn wire_mut(&mut self) -> &mut W {
        &mut self.wire
    }

    /// Wakes this rank from its sleep on these links, from another thread.
    pub fn waker(&self) -> Option<Bell> {
        self.bell.try_clone().ok()
    }

    /// Makes every call of every peer on these links fail with `Aborted` and this reason.
    pub fn abort(&mut self, why: &str) {
        if let Some(watch) = &self.watch {
            watch.abort(self.rank, why);
        }
        self.post(Notice::Aborted { by: self.rank as u32 }, why);
    }

    /// Ranks that can not be part of a group any more: ended, left in order, or with an endpoint that is not live.
    pub fn lost(&self) -> Vec<Rank> {
        let ended = |(rank, peer): (Rank, &Option<Peer<W>>)| {
            let peer = peer.as_ref()?;
            let closed = matches!(peer.reader.peer_notice(), Ok(Some(Notice::Closed)));
            (closed || peer.life.as_ref().is_some_and(|l| l.has_ended())).then_some(rank)
        };
        let mut lost: Vec<Rank> = self.peers.iter().enumerate().filter_map(ended).chain(self.wire.not_live()).collect();
        lost.sort_unstable();
        lost.dedup();
        lost
    }

    /// Ranks whose endpoint is not live in the generation that the group met with.
    pub fn not_live(&self) -> Vec<Rank> {
        self.wire.not_live()
    }

    /// Tells the peers that this rank leaves in order; what it sent before is still good.
    pub fn leave(&mut self) {
        // A forked child is not the rank that its peers know.
        if !std::mem::replace(&mut self.left, true) && self.home.is_here() {
            self.post(Notice::Closed, "");
        }
    }

    fn post(&mut self, notice: Notice, why: &str) {
        // All are rung below.
        self.unrung = 0;
        for rank in 0..self.peers.len() {
            let Some(peer) = &mut self.peers[rank] else { continue };
            peer.writer.post(notice, why);
            peer.reader.post(notice, why);
            // A peer that can not be rung looks again after a slice.
            let _ = self.wire.ring_reader(rank);
            let _ = self.wire.ring_writer(rank);
        }
    }

    fn peer(&mut self, rank: Rank) -> Result<&mut Peer<W>> {
        let ranks = self.peers.len();
        self.peers.get_mut(rank).and_then(Option::as_mut).ok_or_else(|| {
            Error::Argument(format!("there is no link to rank {rank} in a group of {ranks}, or it is the own rank"))
        })
    }

    /// Turns what a ring answered into the group's answer.
    fn stopped(&self, peer: Rank, what: &'static str, stop: Stop) -> Error {
        match stop {
            Stop::Violation(violation) => Error::Corrupt { rank: self.rank, peer, what: violation.to_string(), endpoint: None },
            Stop::TooLong { len, max } => Error::Argument(format!("a record of {len} bytes is longer than {max}")),
            // An abort often only follows from what this rank can see itself.
            Stop::Notice(_) => match self.root_cause(what) {
                Err(cause) => cause,
                Ok(()) => match self.watch.as_ref().and_then(Watch::aborted) {
                    Some((by, why)) => aborted(by, why),
                    None => self.aborted(peer),
                },
            },
        }
    }

    fn aborted(&self, peer: Rank) -> Error {
        let place = self.peers.get(peer).and_then(Option::as_ref);
        let reason = place.map_or(String::new(), |p| {
            if matches!(p.reader.peer_notice(), Ok(Some(Notice::Aborted { .. }))) {
                p.reader.peer_reason()
            } else {
                p.writer.peer_reason()
            }
        });
        aborted(peer, reason)
    }

    /// Endpoints and peers' processes; one system call.
    fn root_cause(&self, what: &'static str) -> Result<()> {
        self.wire.status()?;
        let (ranks, fds) = self.lives();
        let ended = wait_readable(&fds, Duration::ZERO).map_err(failed("ppoll", "this should not happen"))?;
        self.first_dead(&ranks, ended, what)
    }

    fn lives(&self) -> (Vec<Rank>, Vec<BorrowedFd<'_>>) {
        self.peers.iter().enumerate().filter_map(|(rank, peer)| Some((rank, peer.as_ref()?.life.as_ref()?.as_fd()))).unzip()
    }

    /// The first rank that ended without a word. One that aborted before it ended is not the cause but knows it.
    fn first_dead(&self, ranks: &[Rank], ended: u64, what: &'static str) -> Result<()> {
        let mut aborted = None;
        for (i, &rank) in ranks.iter().enumerate() {
            let Some(peer) = self.peers[rank].as_ref().filter(|_| ended & 1 << i != 0) else { continue };
            // Whatever a process says in its error word it has said before it ended.
            match peer.reader.peer_notice() {
                Ok(Some(Notice::Closed)) => {}
                Ok(Some(Notice::Aborted { .. })) => aborted = Some(rank),
                _ => return Err(Error::PeerDied { rank: self.rank, peer: rank, what, endpoint: None }),
            }
        }
        aborted.map_or(Ok(()), |rank| Err(self.aborted(rank)))
    }

    /// Endpoints and what peers say, without a system call.
    fn look_around(&self, what: &'static str) -> Result<()> {
        self.wire.status()?;
        if let Some((by, why)) = self.watch.as_ref().and_then(Watch::aborted) {
            // It often only follows from what this rank can see itself.
            self.root_cause(what)?;
            return Err(aborted(by, why));
        }
        for (rank, peer) in self.peers.iter().enumerate() {
            let Some(peer) = peer else { continue };
            for notice in [peer.reader.peer_notice(), peer.writer.peer_notice()] {
                match notice {
                    Ok(None | Some(Notice::Closed)) => {}
                    Ok(Some(notice)) => return Err(self.stopped(rank, what, Stop::Notice(notice))),
                    Err(violation) => return Err(self.stopped(rank, what, violation.into())),
                }
            }
        }
        Ok(())
    }

    /// Whether one of them can be had.
    fn any_ready(&mut self, wants: &[Want]) -> Result<bool> {
        for want in wants {
            if self.is_ready(*want)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn is_ready(&mut self, want: Want) -> Result<bool> {
        let (rank, (_, what)) = (self.rank, want.of());
        let died = |peer| Error::PeerDied { rank, peer, what, endpoint: None };
        match want {
            Want::Record(from) => {
                let reader = &mut self.peer(from)?.reader;
                let ready = reader.try_receive().map(|r| r.is_some());
                let closed = reader.is_closed();
                match ready {
                    Ok(false) if closed => Err(died(from)),
                    Ok(ready) => Ok(ready),
                    Err(stop) => Err(self.stopped(from, what, stop)),
                }
            }
            Want::Room { to, len } => {
                let Peer { writer, reader, .. } = self.peer(to)?;
                let ready = writer.hear(reader.heard()).and_then(|()| writer.try_reserve(len)).map(|r| r.is_some());
                let closed = writer.is_closed();
                match ready {
                    // Nobody will read it.
                    Ok(_) if closed => Err(died(to)),
                    Ok(ready) => Ok(ready),
                    Err(stop) => Err(self.stopped(to, what, stop)),
                }
            }
        }
    }

    /// Waits until it is ready; `Timeout` when that does not come in time.
    fn wait(&mut self, want: Want, deadline: Instant) -> Result<()> {
        if self.is_ready(want)? {
            return Ok(());
        }
        let Some(waited) = self.wait_until(&[want], deadline, false)? else { return Ok(()) };
        let (peer, what) = want.of();
        Err(Error::Timeout { rank: self.rank, peer, what, waited, endpoint: None })
    }

    /// Looks, then sleeps, until one of them is ready (nothing), or the deadline has passed (how long that was; short looks do not count, so
    /// that they need no clock). `early`: or until somebody rings.
    fn wait_until(&mut self, wants: &[Want], deadline: Instant, early: bool) -> Result<Option<Duration>> {
        let what = wants.first().map_or(FOR_A_RECORD, |want| want.of().1);
        // Where ranks share processors the other one is likely to sleep.
        if self.patience.is_crowded() {
            self.settle()?;
        }
        let mut looks = 0;
        loop {
            match self.patience.after(looks) {
                Pause::Look => {}
                Pause::Spin => std::hint::spin_loop(),
                Pause::Yield => yield_now(),
                Pause::Sleep => {
                    let begun = Instant::now();
                    let ready = self.sleep(wants, what, deadline, early)?;
                    let waited = begun.elapsed();
                    self.patience.slept(waited);
                    return Ok((!ready).then_some(waited));
                }
            }
            looks += 1;
            if looks % LOOKS_BETWEEN_CHECKS == 0 {
                self.settle()?;
                self.look_around(what)?;
            }
            if self.any_ready(wants)? {
                self.patience.was_short();
                return Ok(None);
            }
        }
    }

    fn sleep(&mut self, wants: &[Want], what: &'static str, deadline: Instant, early: bool) -> Result<bool> {
        self.settle()?;
        loop {
            self.look_around(what)?;
            let rung = self.counters.wakeups;
            self.arm(wants);
            let slept = match self.any_ready(wants) {
                Ok(false) => self.doze(what, deadline).map(Some),
                Ok(true) => Ok(None),
                Err(error) => Err(error),
            };
            self.disarm(wants);
            let Some(in_time) = slept? else { return Ok(true) };
            if self.any_ready(wants)? || early && self.counters.wakeups != rung {
                return Ok(true);
            }
            if !in_time {
                // The last look: what happened while this rank did not run is told apart from a passed deadline.
                self.root_cause(what)?;
                self.look_around(what)?;
                return Ok(false);
            }
        }
    }

    /// One sleep of at most a slice; false when the deadline has passed.
    fn doze(&mut self, what: &'static str, deadline: Instant) -> Result<bool> {
        let now = Instant::now();
        let Some(left) = deadline.checked_duration_since(now).filter(|d| !d.is_zero()) else { return Ok(false) };
        if is_without(Defence::BoundedWait) {
            wait_readable(&[self.bell.as_fd()], Duration::from_secs(1 << 30))
                .map_err(failed("ppoll", "this should not happen"))?;
        }
        let (ranks, mut fds) = self.lives();
        fds.push(self.bell.as_fd());
        let bell = fds.len() - 1;
        fds.extend(self.wire.news());
        let ready = wait_readable(&fds, left.min(SLICE)).map_err(failed("ppoll", "this should not happen"))?;
        self.counters.sleeps += 1;
        if ready & 1 << bell != 0 {
            self.bell.drain();
            self.counters.wakeups += 1;
        }
        if ready >> bell > 1 {
            self.wire.hear();
        }
        // Before a death is reported, the status is looked at: the death may follow from it.
        self.wire.status()?;
        self.first_dead(&ranks, ready, what)?;
        Ok(true)
    }

    fn arm(&mut self, wants: &[Want]) {
        for want in wants {
            match *want {
                Want::Record(from) => self.peers[from].iter_mut().for_each(|p| p.reader.arm()),
                Want::Room { to, .. } => self.peers[to].iter_mut().for_each(|p| p.writer.arm()),
            }
        }
    }

    fn disarm(&mut self, wants: &[Want]) {
        for want in wants {
            match *want {
                Want::Record(from) => self.peers[from].iter_mut().for_each(|p| p.reader.disarm()),
                Want::Room { to, .. } => self.peers[to].iter_mut().for_each(|p| p.writer.disarm()),
            }
        }
    }

    /// Rings the reader of the ring to a peer.
    fn ring(&mut self, to: Rank) -> Result<()> {
        self.counters.doorbells += 1;
        self.wire.ring_reader(to).inspect_err(|_| {
            if let Some(Some(peer)) = self.peers.get_mut(to) {
                peer.writer.unrung();
            }
        })
    }

    /// Rings those that got short records and sleep. A fence comes before.
    fn ring_sleepers(&mut self) -> Result<()> {
        let mut left = std::mem::take(&mut self.unrung);
        while left != 0 {
            let to = left.trailing_zeros() as Rank;
            left &= left - 1;
            if self.peers.get_mut(to).and_then(Option::as_mut).is_some_and(|peer| peer.writer.must_ring()) {
                self.ring(to)?;
            }
        }
        Ok(())
    }

    /// The same, where this rank may wait or be away for long.
    fn settle(&mut self) -> Result<()> {
        if self.unrung == 0 {
            return Ok(());
        }
        full_fence();
        self.ring_sleepers()
    }

    /// Why a record could not be moved. A ring that is not there any more was let go of by its reader, which has ended, left or gone on.
    fn not_carried(&self, to: Rank, error: Error) -> Error {
        if !matches!(error, Error::Device(DeviceError::NoRing)) {
            return error;
        }
        let seen = self.root_cause(TO_MOVE).and_then(|()| self.look_around(TO_MOVE));
        seen.err().unwrap_or(Error::PeerDied { rank: self.rank, peer: to, what: TO_MOVE, endpoint: None })
    }

    fn room(&mut self, to: Rank, len: usize) -> Result<Option<NonNull<u8>>> {
        let rank = self.rank;
        let Peer { writer, reader, .. } = self.peer(to)?;
        let place = match writer.hear(reader.heard()).and_then(|()| writer.try_reserve(len)) {
            Ok(place) => place.and_then(|mut p| NonNull::new(p.as_mut_ptr())),
            Err(stop) => return Err(self.stopped(to, FOR_ROOM, stop)),
        };
        if writer.is_closed() {
            return Err(Error::PeerDied { rank, peer: to, what: FOR_ROOM, endpoint: None });
        }
        Ok(place.map(|place| self.wire.staging(to).unwrap_or(place)))
    }
}

// SAFETY: rings stay mapped while their Memory lives, which the peers' writers and readers hold until these links are dropped.
// A record is not overwritten by an honest writer, and stays mapped in any case, until it is released; reserved room is this
// rank's alone until it is committed; a staging place belongs to one peer.
unsafe impl<W: Wire> Links for RankLinks<W> {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.peers.len()
    }

    fn max_record(&self) -> usize {
        max_record(self.data_bytes).min(self.wire.longest())
    }

    fn depth(&self, len: usize) -> usize {
        let span = RECORD_HEADER_BYTES + len.next_multiple_of(LINE);
        // At worst all of the room before the wrap but a line is skipped.
        (self.data_bytes - (span - LINE).min(self.data_bytes)) / span
    }

    fn reserve(&mut self, to: Rank, len: usize, deadline: Instant) -> Result<SharedMut<'_>> {
        loop {
            if let Some(place) = self.room(to, len)? {
                // SAFETY: the room that `try_reserve` gave, or the peer's staging place, which is as long as the longest record.
                return Ok(unsafe { SharedMut::new(place, len) });
            }
            self.wait(Want::Room { to, len }, deadline)?;
        }
    }

    fn try_reserve(&mut self, to: Rank, len: usize) -> Result<Option<SharedMut<'_>>> {
        let place = self.room(to, len)?;
        if place.is_none() {
            self.settle()?;
        }
        // SAFETY: as in `reserve`.
        Ok(place.map(|place| unsafe { SharedMut::new(place, len) }))
    }

    fn commit(&mut self, to: Rank, header: RecordHeader, len: usize) -> Result<()> {
        let staged = self.wire.staging(to).is_some();
        let Self { peers, wire, counters, unrung, by, .. } = self;
        let Some(Some(peer)) = peers.get_mut(to) else {
            return Err(Error::Argument(format!("there is no link to rank {to}")));
        };
        if !peer.writer.is_reserved() {
            return Err(Error::Argument(format!("nothing is reserved on the link to rank {to}")));
        }
        peer.writer.acknowledge(peer.reader.given_back());
        let sleeps = if len < SHORT && !staged {
            // Whether the reader sleeps is asked before this rank waits, releases, works for long or is done.
            if peer.writer.commit_only(header, len) {
                *unrung |= 1 << to;
            }
            false
        } else if staged {
            let (Some(line), Some(offset)) = (peer.writer.header_line(header, len), peer.writer.reserved_offset()) else {
                return Ok(());
            };
            if let Err(error) = wire.carry(to, offset, line, len, *by) {
                return Err(self.not_carried(to, error));
            }
            peer.writer.publish(len)
        } else {
            peer.writer.commit(header, len)
        };
        counters.records += 1;
        counters.bytes += len as u64;
        if sleeps { self.ring(to) } else { Ok(()) }
    }

    fn receive(&mut self, from: Rank, deadline: Instant) -> Result<(RecordHeader, Shared<'_>)> {
        self.wait(Want::Record(from), deadline)?;
        let rank = self.rank;
        // It was just seen there.
        let record = self.peer(from)?.reader.current();
        record.ok_or_else(|| Error::Aborted { by: from, why: format!("the ring to rank {rank} ended"), endpoint: None })
    }

    fn try_receive(&mut self, from: Rank) -> Result<Option<(RecordHeader, Shared<'_>)>> {
        if !self.is_ready(Want::Record(from))? {
            self.settle()?;
            return Ok(None);
        }
        Ok(self.peer(from)?.reader.current())
    }

    fn release(&mut self, from: Rank) -> Result<()> {
        let peer = self.peer(from)?;
        if peer.reader.release() {
            if let Err(error) = self.wire.ring_writer(from) {
                self.peer(from)?.reader.unrung();
                return Err(error);
            }
            self.counters.doorbells += 1;
        }
        // To give a record back makes a fence, if it was in the ring; else there is one before this rank waits or is done.
        if self.peer(from)?.reader.is_by_slot() {
            return Ok(());
        }
        self.ring_sleepers()
    }

    fn nudge(&mut self) -> Result<()> {
        self.settle()
    }

    fn wait_for(&mut self, wants: &[Want], deadline: Instant) -> Result<()> {
        if self.any_ready(wants)? {
            return Ok(());
        }
        self.wait_until(wants, deadline, true).map(drop)
    }

    fn confirm(&mut self) -> Result<()> {
        self.settle()?;
        self.look_around(AT_THE_END)
    }

    fn survey(&mut self) -> Result<()> {
        self.settle()?;
        self.root_cause(IN_FLIGHT)?;
        self.look_around(IN_FLIGHT)
    }

    fn until(&mut self, deadline: Instant) {
        self.by = Some(deadline);
    }

    fn endpoint(&self, rank: Rank) -> Option<EndpointRef> {
        self.wire.endpoint(rank)
    }

    fn tell_shares(&mut self, look: u32) {
        if let Some(watch) = &self.watch {
            watch.tell_shares(look, self.wire.rates().map_or(Shares::default(), |rates| Shares::for_rates(&rates)));
        }
    }

    fn told_shares(&self, look: u32) -> Option<Shares> {
        Some(self.watch.as_ref()?.told_shares(look))
    }
}

fn aborted(by: Rank, why: String) -> Error {
    Error::Aborted { by, why: if why.is_empty() { "no reason given".into() } else { why }, endpoint: None }
}

impl<W: Wire> Drop for RankLinks<W> {
    fn drop(&mut self) {
        self.leave();
    }
}
