// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rings in memory of the module, woken by endpoints.
//!
//! Each rank makes one channel a peer on its own endpoint and passes the writer's descriptor to that peer. A record goes into
//! the ring by the processor or, with [`Mover::Engine`], by the writer's endpoint; the reader is rung by its endpoint's
//! doorbell, an interrupt that ends on an eventfd, and only when it sleeps.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Degraded, Wire};
use crate::{
    control::{Defence, is_without},
    device::{Channel, DeviceError, EndpointId, Event, Export, Import, Session, State, Status},
    error::{EndpointRef, Error, Rank, Result},
    ring::{IndexPage, LINE, Memory, RECORD_HEADER_BYTES, max_record},
    sys::{Bell, Kernel},
    topology::LinkState,
};

/// How long one copy of an engine may take; one that takes longer does not work.
const COPY_TIMEOUT: Duration = Duration::from_secs(2);
const BY_ENGINE: &str = "having its endpoint move a record";

/// Who moves a record into the reader's ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mover {
    /// The processor stores it there.
    #[default]
    Processor,
    /// The writer's endpoint copies it there with its engine.
    Engine,
}

/// The ring towards a peer.
#[derive(Debug)]
pub struct Outward(Arc<Export>);

// SAFETY: the export keeps its promise; `Outward` can not be cloned and is made once for each export, in `Wiring::accept`.
unsafe impl Memory for Outward {
    fn data(&self) -> NonNull<u8> {
        self.0.data()
    }
    fn data_bytes(&self) -> usize {
        self.0.data_bytes()
    }
    fn tail(&self) -> &IndexPage {
        self.0.tail()
    }
    fn head(&self) -> &IndexPage {
        self.0.head()
    }
}

/// The ring from a peer.
#[derive(Debug)]
pub struct Inward(Arc<Channel>);

// SAFETY: the channel keeps its promise; `Inward` can not be cloned and is made once for each channel, in `Wiring::accept`.
unsafe impl Memory for Inward {
    fn data(&self) -> NonNull<u8> {
        self.0.data()
    }
    fn data_bytes(&self) -> usize {
        self.0.data_bytes()
    }
    fn tail(&self) -> &IndexPage {
        self.0.tail()
    }
    fn head(&self) -> &IndexPage {
        self.0.head()
    }
}

/// The endpoints, doorbells and engines of a group.
#[derive(Debug)]
pub struct Kmod {
    rank: Rank,
    peers: Vec<Option<PeerEnd>>,
    stage: Option<Stage>,
    carried: u64,
    session: Arc<Session>,
    generation: u64,
    /// The own link when the group's links were made.
    link: Option<LinkState>,
    /// Whether a link below that is an error.
    strict: bool,
    /// Events that nobody has asked for yet, and whether the kernel's queue wakes sleepers.
    heard: VecDeque<Event>,
    listens: bool,
    /// The own engine did not move what it was told to.
    idle: bool,
}

/// So many events are kept for [`Wire::events`]; older ones are dropped.
const HEARD: usize = 1024;

#[derive(Debug)]
struct PeerEnd {
    channel: Arc<Channel>,
    export: Arc<Export>,
    import: Option<Import>,
    link: Option<LinkState>,
}

/// Memory of the own endpoint's engine in which records wait to be copied: a place a peer.
#[derive(Debug)]
struct Stage {
    // Before the channel, whose end it would otherwise outlive for a moment.
    memory: Export,
    channel: Channel,
    place_bytes: usize,
}

impl Stage {
    fn new(session: &Session, kernel: Arc<dyn Kernel>, ranks: usize, data_bytes: usize) -> Result<Self, DeviceError> {
        // The header stands right before the payload, so that both are one copy.
        let place_bytes = RECORD_HEADER_BYTES + longest(session, data_bytes);
        let bytes = (place_bytes * ranks).next_power_of_two();
        let channel = session.channel(bytes, 0)?;
        let memory = Export::with(kernel, channel.export()?)?;
        Ok(Self { memory, channel, place_bytes })
    }

    fn place(&self, peer: Rank) -> NonNull<u8> {
        // SAFETY: the memory has a place for each rank of the group, and peers are ranks of the group.
        unsafe { self.memory.data().add(peer * self.place_bytes) }
    }
}

/// The longest payload of one copy and of one record.
fn longest(session: &Session, data_bytes: usize) -> usize {
    let copy = session.node().limits().max_copy_bytes as usize;
    (copy.saturating_sub(RECORD_HEADER_BYTES) / LINE * LINE).min(max_record(data_bytes))
}

/// A rank's channels and exports while a group meets.
#[derive(Debug)]
pub struct Wiring {
    wire: Kmod,
    kernel: Arc<dyn Kernel>,
    data_bytes: usize,
    offered: Vec<Option<Channel>>,
}

impl Wiring {
    /// For `rank` of `ranks`, whose endpoint is that of `session`; all its vectors ring `bell`.
    ///
    /// # Errors
    /// As for the module's calls.
    pub fn new(
        session: Arc<Session>,
        kernel: Arc<dyn Kernel>,
        (rank, ranks): (Rank, usize),
        data_bytes: usize,
        mover: Mover,
        bell: &Bell,
    ) -> Result<Self> {
        for vector in 0..session.vectors() {
            session.set_bell(vector, bell)?;
        }
        let stage = match mover {
            Mover::Engine => Some(Stage::new(&session, kernel.clone(), ranks, data_bytes)?),
            Mover::Processor => None,
        };
        let (generation, link) = (session.generation(), session.status().link());
        let peers = (0..ranks).map(|_| None).collect();
        let wire = Kmod {
            rank,
            peers,
            stage,
            carried: 0,
            session,
            generation,
            link,
            strict: false,
            heard: VecDeque::new(),
            listens: true,
            idle: false,
        };
        Ok(Self { wire, kernel, data_bytes, offered: (0..ranks).map(|_| None).collect() })
    }

    /// With links that train down as errors.
    pub fn strict(mut self, strict: bool) -> Self {
        self.wire.strict = strict;
        self
    }

    /// Makes the channel from `peer` and the descriptor for it.
    ///
    /// # Errors
    /// As for the module's calls.
    pub fn offer(&mut self, peer: Rank) -> Result<OwnedFd> {
        let vector = peer as u32 % self.wire.session.vectors().max(1);
        let channel = self.wire.session.channel(self.data_bytes, vector)?;
        let fd = channel.export()?;
        self.offered[peer] = Some(channel);
        Ok(fd)
    }

    /// Takes the descriptor that `peer` made for this rank.
    ///
    /// # Errors
    /// `Corrupt` when it is not a channel as agreed; as for the module's calls.
    pub fn accept(&mut self, peer: Rank, fd: OwnedFd, bell: &Bell) -> Result<(Outward, Inward)> {
        let corrupt = |what: String| Error::Corrupt { rank: self.wire.rank, peer, what, endpoint: None };
        let export = Export::with(self.kernel.clone(), fd).map_err(|e| corrupt(format!("no exported channel ({e})")))?;
        if export.data_bytes() != self.data_bytes {
            return Err(corrupt(format!("a channel of {} bytes instead of {}", export.data_bytes(), self.data_bytes)));
        }
        let channel = self.offered[peer].take().ok_or_else(|| corrupt("a second offer".into()))?;
        export.set_bell(bell)?;
        let import = match self.wire.stage {
            Some(_) => Some(self.wire.session.import(std::os::fd::AsFd::as_fd(&export))?),
            None => None,
        };
        let (channel, export) = (Arc::new(channel), Arc::new(export));
        let link = export.status().link();
        self.wire.peers[peer] = Some(PeerEnd { channel: channel.clone(), export: export.clone(), import, link });
        Ok((Outward(export), Inward(channel)))
    }

    /// Everything was passed.
    pub fn finish(self) -> Kmod {
        self.wire
    }
}

impl Kmod {
    /// The session with the own endpoint.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    fn end(&self, peer: Rank) -> Result<&PeerEnd> {
        self.peers.get(peer).and_then(Option::as_ref).ok_or_else(|| Error::Argument(format!("there is no link to rank {peer}")))
    }

    /// What a call answered that needs the endpoint of `peer`.
    fn answer(&self, peer: Rank, endpoint: EndpointRef, error: DeviceError) -> Result<()> {
        match error {
            // The sleeper looks again by itself.
            DeviceError::RateLimited => Ok(()),
            DeviceError::Stale if is_without(Defence::GenerationCheck) => Ok(()),
            DeviceError::Gone => Err(Error::EndpointGone { peer, endpoint }),
            DeviceError::Recovering | DeviceError::Stale => Err(Error::EndpointRecovering { peer, endpoint }),
            other => Err(other.into()),
        }
    }

    fn own(&self) -> EndpointRef {
        endpoint_ref(self.session.endpoint(), self.generation)
    }

    /// The links of all ranks as they were and as they are, where both are known.
    fn all_links(&self) -> impl Iterator<Item = Degraded> + '_ {
        let own = std::iter::once((self.rank, self.own(), self.link, self.session.status()));
        let others = self.peers.iter().enumerate().filter_map(|(rank, end)| {
            let end = end.as_ref()?;
            Some((rank, endpoint_ref(end.export.endpoint(), end.export.generation()), end.link, end.export.status()))
        });
        own.chain(others).filter_map(|(rank, endpoint, before, status)| {
            Some(Degraded { rank, endpoint, before: before?, now: status.link()? })
        })
    }

    /// The endpoints of all ranks with what became of them.
    fn all(&self) -> impl Iterator<Item = (Rank, Result<()>)> + '_ {
        let own = match live(self.rank, self.own(), self.session.status()) {
            Ok(()) if self.idle => Err(Error::EndpointGone { peer: self.rank, endpoint: self.own() }),
            seen => seen,
        };
        let others = self.peers.iter().enumerate().filter_map(|(rank, end)| {
            let export = &end.as_ref()?.export;
            Some((rank, live(rank, endpoint_ref(export.endpoint(), export.generation()), export.status())))
        });
        std::iter::once((self.rank, own)).chain(others)
    }
}

fn endpoint_ref(id: EndpointId, generation: u64) -> EndpointRef {
    EndpointRef { id: id.0, generation }
}

fn live(peer: Rank, endpoint: EndpointRef, status: &Status) -> Result<()> {
    let word = status.word();
    match word.state {
        State::Live if word.generation == endpoint.generation || is_without(Defence::GenerationCheck) => Ok(()),
        // A newer life: what was under way in the older one is lost.
        State::Live | State::Recovering => Err(Error::EndpointRecovering { peer, endpoint }),
        _ => Err(Error::EndpointGone { peer, endpoint }),
    }
}

impl Wire for Kmod {
    type Tx = Outward;
    type Rx = Inward;

    fn ring_reader(&mut self, peer: Rank) -> Result<()> {
        let export = &self.end(peer)?.export;
        match export.ring() {
            Ok(()) => Ok(()),
            Err(error) => {
                self.status()?;
                match error {
                    // The endpoint lives, so it is the reader that has ended or gone on. Its process and the board tell which.
                    DeviceError::Gone => Ok(()),
                    error => self.answer(peer, endpoint_ref(export.endpoint(), export.generation()), error),
                }
            }
        }
    }

    fn ring_writer(&mut self, peer: Rank) -> Result<()> {
        match self.end(peer)?.channel.freed() {
            Ok(()) => Ok(()),
            Err(error) => self.answer(self.rank, self.own(), error),
        }
    }

    fn status(&self) -> Result<()> {
        self.all().try_for_each(|(_, result)| result)?;
        match self.all_links().find(|link| self.strict && link.now.below(link.before)) {
            None => Ok(()),
            Some(Degraded { rank: peer, endpoint, before, now }) => {
                Err(Error::LinkDegraded { peer, endpoint, before: before.to_string(), now: now.to_string() })
            }
        }
    }

    fn news(&self) -> Option<BorrowedFd<'_>> {
        self.listens.then(|| self.session.node().as_fd())
    }

    fn hear(&mut self) {
        let events = self.session.node().events().unwrap_or_default();
        // A descriptor that is readable without end, as after its node's end, must not keep a sleeper awake.
        self.listens = !events.is_empty();
        self.heard.extend(events);
        let excess = self.heard.len().saturating_sub(HEARD);
        self.heard.drain(..excess);
    }

    fn events(&mut self) -> Vec<Event> {
        self.hear();
        self.listens = true;
        self.heard.drain(..).collect()
    }

    fn endpoint(&self, rank: Rank) -> Option<EndpointRef> {
        if rank == self.rank {
            return Some(self.own());
        }
        let export = &self.peers.get(rank)?.as_ref()?.export;
        Some(endpoint_ref(export.endpoint(), export.generation()))
    }

    fn degraded(&self) -> Vec<Degraded> {
        self.all_links().filter(|link| link.now.below(link.before)).collect()
    }

    fn rates(&self) -> Option<Vec<f64>> {
        // Records that processors store do not travel over the endpoints' links.
        self.stage.as_ref()?;
        let mut rates = vec![0.0; self.peers.len()];
        for link in self.all_links() {
            *rates.get_mut(link.rank)? = link.now.raw_gbps();
        }
        Some(rates)
    }

    fn not_live(&self) -> Vec<Rank> {
        self.all().filter_map(|(rank, result)| result.is_err().then_some(rank)).collect()
    }

    fn longest(&self) -> usize {
        if self.stage.is_some() { self.stage.as_ref().map_or(0, |s| s.place_bytes - RECORD_HEADER_BYTES) } else { usize::MAX }
    }

    fn staging(&mut self, peer: Rank) -> Option<NonNull<u8>> {
        let place = self.stage.as_ref()?.place(peer);
        // SAFETY: a place is longer than a header.
        Some(unsafe { place.add(RECORD_HEADER_BYTES) })
    }

    fn carry(
        &mut self,
        peer: Rank,
        offset: u64,
        header: [u8; RECORD_HEADER_BYTES],
        len: usize,
        by: Option<Instant>,
    ) -> Result<()> {
        let Some(stage) = &self.stage else { return Ok(()) };
        let end = self.end(peer)?;
        let Some(import) = &end.import else { return Err(Error::Argument(format!("rank {peer}'s channel is not imported"))) };
        // SAFETY: the place starts with room for a header, and only this rank writes to it.
        unsafe { stage.place(peer).copy_from_nonoverlapping(NonNull::from(&header).cast(), header.len()) };
        let bytes = (RECORD_HEADER_BYTES + len) as u32;
        let from = (stage.channel.id(), (peer * stage.place_bytes) as u64);
        let begun = Instant::now();
        let limit = by.map_or(COPY_TIMEOUT, |by| by.saturating_duration_since(begun).min(COPY_TIMEOUT));
        match self.session.copy(from, (import.id(), offset), bytes, limit) {
            Ok(()) => {
                self.carried += u64::from(bytes);
                Ok(())
            }
            Err(error) => {
                // Whose endpoint it was shows in the status; if neither, the own one has the engine.
                self.status()?;
                let (rank, endpoint) = (self.rank, self.own());
                match error {
                    DeviceError::EngineTimeout if limit < COPY_TIMEOUT => {
                        let waited = begun.elapsed();
                        Err(Error::Timeout { rank, peer: rank, what: BY_ENGINE, waited, endpoint: Some(endpoint) })
                    }
                    DeviceError::EngineTimeout | DeviceError::Engine => {
                        // Its status goes on saying that it lives; the others hear it from this rank.
                        self.idle = true;
                        Err(Error::EndpointGone { peer: rank, endpoint })
                    }
                    error => self.answer(rank, endpoint, error),
                }
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.idle
    }

    fn carried(&self) -> u64 {
        self.carried
    }
}
