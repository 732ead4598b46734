// SPDX-License-Identifier: MIT OR Apache-2.0
//! Links between threads of one process: for tests, examples and the first try of an idea. No shared memory, no speed.

use std::{
    collections::VecDeque,
    ptr::NonNull,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::{
    error::{Error, Rank, Result},
    link::{Links, RecordHeader, Shared, SharedMut, Want},
};

/// Storage of a record, aligned like a cache line.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

#[derive(Debug)]
struct Record {
    header: RecordHeader,
    lines: Vec<Line>,
    len: usize,
}

#[derive(Debug, Default)]
struct Queue {
    records: VecDeque<Record>,
    /// Records that the reader holds but has not released.
    held: usize,
}

#[derive(Debug)]
struct State {
    queues: Vec<Queue>,
    alive: Vec<bool>,
}

#[derive(Debug)]
struct Hub {
    ranks: usize,
    depth: usize,
    max_record: usize,
    state: Mutex<State>,
    news: Condvar,
}

/// One thread's end of a group. Dropping it counts as the rank's death.
#[derive(Debug)]
pub struct Loopback {
    hub: Arc<Hub>,
    rank: Rank,
    reserved: Vec<Option<Record>>,
    held: Vec<Option<Record>>,
}

/// A group of `ranks` ends; each link holds `depth` records of at most `max_record` bytes.
///
/// ```
/// use pcieipc::{link::Links, loopback};
///
/// // Three ranks, four records a link, records of up to 4096 bytes.
/// let ranks = loopback::group(3, 4, 4096);
/// assert_eq!((ranks[2].rank(), ranks[2].ranks()), (2, 3));
/// ```
pub fn group(ranks: usize, depth: usize, max_record: usize) -> Vec<Loopback> {
    let queues = (0..ranks * ranks).map(|_| Queue::default()).collect();
    let state = Mutex::new(State { queues, alive: vec![true; ranks] });
    let hub = Arc::new(Hub { ranks, depth, max_record, state, news: Condvar::new() });
    (0..ranks)
        .map(|rank| Loopback {
            hub: hub.clone(),
            rank,
            reserved: (0..ranks).map(|_| None).collect(),
            held: (0..ranks).map(|_| None).collect(),
        })
        .collect()
}

impl Loopback {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.hub.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` gives something.
    fn wait<R>(
        &self,
        peer: Rank,
        what: &'static str,
        deadline: Option<Instant>,
        ready: impl Fn(&mut State) -> Option<R>,
    ) -> Result<Option<R>> {
        let start = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(found) = ready(&mut state) {
                return Ok(Some(found));
            }
            if !state.alive[peer] {
                return Err(Error::PeerDied { rank: self.rank, peer, what, endpoint: None });
            }
            let Some(deadline) = deadline else { return Ok(None) };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout { rank: self.rank, peer, what, waited: start.elapsed(), endpoint: None });
            }
            state = self.hub.news.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn reserve_until(&mut self, to: Rank, len: usize, deadline: Option<Instant>) -> Result<Option<SharedMut<'_>>> {
        assert!(len <= self.hub.max_record, "a record of {len} bytes is too long");
        let (at, depth) = (self.rank * self.hub.ranks + to, self.hub.depth);
        let room = |s: &mut State| (s.queues[at].records.len() + s.queues[at].held < depth).then_some(());
        if self.wait(to, "waiting for room", deadline, room)?.is_none() {
            return Ok(None);
        }
        let record = self.reserved[to].get_or_insert_with(|| Record {
            header: RecordHeader::default(),
            lines: vec![Line([0; 64]); len.div_ceil(64).max(1)],
            len,
        });
        let start = NonNull::from(record.lines.as_mut_slice()).cast();
        // SAFETY: the lines live on the heap, untouched until `commit`, and nobody else has them.
        Ok(Some(unsafe { SharedMut::new(start, len) }))
    }

    fn receive_until(&mut self, from: Rank, deadline: Option<Instant>) -> Result<Option<(RecordHeader, Shared<'_>)>> {
        if self.held[from].is_none() {
            let at = from * self.hub.ranks + self.rank;
            let next = |s: &mut State| {
                let record = s.queues[at].records.pop_front()?;
                s.queues[at].held += 1;
                Some(record)
            };
            self.held[from] = self.wait(from, "waiting for a record", deadline, next)?;
        }
        Ok(self.held[from].as_ref().map(|record| {
            let start = NonNull::from(record.lines.as_slice()).cast();
            // SAFETY: the lines live on the heap, untouched until `release`.
            (record.header, unsafe { Shared::new(start, record.len) })
        }))
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.lock().alive[self.rank] = false;
        self.hub.news.notify_all();
    }
}

// SAFETY: records live on the heap and are neither moved nor freed between `receive` and `release`, or `reserve` and `commit`.
unsafe impl Links for Loopback {
    fn rank(&self) -> Rank {
        self.rank
    }
    fn ranks(&self) -> usize {
        self.hub.ranks
    }
    fn max_record(&self) -> usize {
        self.hub.max_record
    }
    fn depth(&self, _len: usize) -> usize {
        self.hub.depth
    }
    fn reserve(&mut self, to: Rank, len: usize, deadline: Instant) -> Result<SharedMut<'_>> {
        let rank = self.rank;
        self.reserve_until(to, len, Some(deadline))?.ok_or(Error::Corrupt {
            rank,
            peer: to,
            what: "a wait without an end".into(),
            endpoint: None,
        })
    }
    fn try_reserve(&mut self, to: Rank, len: usize) -> Result<Option<SharedMut<'_>>> {
        self.reserve_until(to, len, None)
    }
    fn commit(&mut self, to: Rank, header: RecordHeader, len: usize) -> Result<()> {
        let Some(mut record) = self.reserved[to].take() else {
            return Err(Error::Argument(format!("commit to rank {to} without a reservation")));
        };
        record.header = header;
        record.len = len;
        let at = self.rank * self.hub.ranks + to;
        self.lock().queues[at].records.push_back(record);
        self.hub.news.notify_all();
        Ok(())
    }
    fn receive(&mut self, from: Rank, deadline: Instant) -> Result<(RecordHeader, Shared<'_>)> {
        let rank = self.rank;
        self.receive_until(from, Some(deadline))?.ok_or(Error::Corrupt {
            rank,
            peer: from,
            what: "a wait without an end".into(),
            endpoint: None,
        })
    }
    fn try_receive(&mut self, from: Rank) -> Result<Option<(RecordHeader, Shared<'_>)>> {
        self.receive_until(from, None)
    }
    fn release(&mut self, from: Rank) -> Result<()> {
        if self.held[from].take().is_some() {
            let at = from * self.hub.ranks + self.rank;
            self.lock().queues[at].held -= 1;
            self.hub.news.notify_all();
        }
        Ok(())
    }
    fn wait_for(&mut self, wants: &[Want], deadline: Instant) -> Result<()> {
        let (ranks, rank) = (self.hub.ranks, self.rank);
        let held = |from: Rank| self.held[from].is_some();
        let ready = |s: &State, want: &Want| match *want {
            Want::Record(from) => held(from) || !s.alive[from] || !s.queues[from * ranks + rank].records.is_empty(),
            Want::Room { to, .. } => {
                let queue = &s.queues[rank * ranks + to];
                !s.alive[to] || queue.records.len() + queue.held < self.hub.depth
            }
        };
        let mut state = self.lock();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || wants.iter().any(|want| ready(&state, want)) {
                return Ok(());
            }
            state = self.hub.news.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
    fn confirm(&mut self) -> Result<()> {
        Ok(())
    }
}
