// SPDX-License-Identifier: MIT OR Apache-2.0
//! Links over channels of the module on their way, and the session that they stand on.

use std::{
    os::fd::OwnedFd,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{GroupLinks, join::Join, near::Host};
use crate::{
    device::{DeviceError, EndpointId, EndpointInfo, NODE, Node, Session, State},
    error::{EndpointRef, Error, Rank, Result},
    ring::{Reader, Writer},
    sys::{Bell, Kernel, Life, Linux, failed},
    transport::{
        Peer, RankLinks,
        board::Watch,
        kmod::{Kmod, Mover, Wiring},
    },
};

/// How a rank uses the module.
#[derive(Debug, Clone)]
pub struct KmodOptions {
    /// The rank's endpoint; `None` takes the one that is at the rank's place among the live ones; a
    /// process that takes the place of another takes the first that is free.
    pub endpoint: Option<EndpointId>,
    /// Who moves records into a peer's ring.
    pub mover: Mover,
    /// Whether a link that trains down is the error `LinkDegraded`; otherwise it only shows in `Group::degraded_links`.
    pub degraded_link_is_error: bool,
    /// The module's node.
    pub node: PathBuf,
    /// Who executes system calls; tests have their own.
    pub kernel: Arc<dyn Kernel>,
    /// Whose PCIe tree the group plans for and follows; `None` for none. The same, one or none, on all ranks.
    pub host: Option<Host>,
}

impl Default for KmodOptions {
    fn default() -> Self {
        Self {
            endpoint: None,
            mover: Mover::default(),
            degraded_link_is_error: false,
            node: NODE.into(),
            kernel: Arc::new(Linux),
            host: Some(Host::default()),
        }
    }
}

impl KmodOptions {
    /// Takes the rank's endpoint; `returning`: in place of a process that had it.
    pub(super) fn attach(&self, rank: Rank, ranks: usize, returning: bool) -> Result<Taken> {
        let node = Node::open_with(self.kernel.clone(), &self.node)?;
        let endpoint = match self.endpoint {
            Some(endpoint) => endpoint,
            None => by_rank(&node, rank, ranks, returning)?,
        };
        let info = node.endpoint(endpoint)?;
        let known = Known::of(&info, &listed(&node)?);
        let vectors = info.vectors.min(ranks.saturating_sub(1) as u32).max(1);
        let session = Arc::new(node.attach(endpoint, vectors)?);
        Ok(Taken { session, vectors, known, suspect: false })
    }
}

/// How often the module is asked for an endpoint that is away.
const ASK_AGAIN: Duration = Duration::from_millis(10);
/// How long an endpoint that did nothing may take for each answer when it is tried out.
const TRIED: Duration = Duration::from_secs(1);

/// A rank's endpoint, and by what it is known again when it returns under another id.
#[derive(Debug)]
pub(super) struct Taken {
    pub session: Arc<Session>,
    vectors: u32,
    known: Known,
    /// It lived and did nothing; it has to pass a test, or to begin a new life.
    suspect: bool,
}

/// A device, as it can be told from others.
#[derive(Debug)]
struct Known {
    /// Makers that give all cards one number leave only the place to tell them by, so it is none then.
    serial: Option<u64>,
    address: String,
    ids: (u16, u16),
}

impl Known {
    /// `all` are the endpoints that are listed.
    fn of(info: &EndpointInfo, all: &[EndpointInfo]) -> Self {
        let there = |other: &EndpointInfo| !matches!(other.state, State::Dead | State::Gone);
        let twin = |other: &EndpointInfo| there(other) && other.address != info.address && has_number_of(other, info);
        let serial = info.serial.filter(|_| !all.iter().any(twin));
        Self { serial, address: info.address.clone(), ids: (info.vendor, info.device) }
    }

    /// Whether this is the device, returned.
    fn is(&self, now: &EndpointInfo) -> bool {
        match self.serial {
            Some(_) if now.serial.is_some() => now.serial == self.serial && function(&now.address) == function(&self.address),
            _ => now.address == self.address && (now.vendor, now.device) == self.ids,
        }
    }
}

/// Device and function of an address.
fn function(address: &str) -> Option<&str> {
    address.rsplit(':').next()
}

/// All functions of a card have its serial number, so the function's own number counts too.
fn has_number_of(one: &EndpointInfo, other: &EndpointInfo) -> bool {
    one.serial == other.serial && function(&one.address) == function(&other.address)
}

/// All endpoints that the module lists.
fn listed(node: &Node) -> Result<Vec<EndpointInfo>, DeviceError> {
    Ok(node.endpoints()?.into_iter().filter_map(|id| node.endpoint(id).ok()).collect())
}

impl Taken {
    /// It lives and does nothing.
    pub(super) fn suspect(&mut self) {
        self.suspect = true;
    }

    /// Waits for the endpoint's present life, and takes it.
    pub(super) fn restore(&mut self, options: &KmodOptions, rank: Rank, by: Instant) -> Result<()> {
        loop {
            let word = self.session.status().word();
            let endpoint = EndpointRef { id: self.session.endpoint().0, generation: self.session.generation() };
            let away = match word.state {
                State::Live if word.generation == endpoint.generation => {
                    let limit = TRIED.min(by.saturating_duration_since(Instant::now()).max(ASK_AGAIN));
                    // It takes the vectors' bells; the links that had them are over, and new ones set their own.
                    if !self.suspect || self.session.self_test(limit).is_ok() {
                        self.suspect = false;
                        return Ok(());
                    }
                    Error::EndpointGone { peer: rank, endpoint }
                }
                State::Live => match self.session.recover() {
                    Ok(_) => {
                        self.suspect = false;
                        return Ok(());
                    }
                    Err(DeviceError::Recovering | DeviceError::Stale) => Error::EndpointRecovering { peer: rank, endpoint },
                    Err(DeviceError::Gone) => Error::EndpointGone { peer: rank, endpoint },
                    Err(other) => return Err(other.into()),
                },
                State::Recovering => Error::EndpointRecovering { peer: rank, endpoint },
                _ => match self.find_again(options) {
                    Ok(Some(session)) => {
                        self.session = Arc::new(session);
                        self.suspect = false;
                        return Ok(());
                    }
                    // It came and went, or a session that ends still has it.
                    Ok(None) | Err(DeviceError::Busy { .. } | DeviceError::NoEndpoint(_) | DeviceError::Gone) => {
                        Error::EndpointGone { peer: rank, endpoint }
                    }
                    Err(DeviceError::Recovering | DeviceError::Stale) => Error::EndpointRecovering { peer: rank, endpoint },
                    Err(other) => return Err(other.into()),
                },
            };
            if Instant::now() >= by {
                return Err(away);
            }
            std::thread::sleep(ASK_AGAIN);
        }
    }

    /// The same device in a later life: by its serial number, or at the same place where it has none. `Busy` when another session has it.
    fn find_again(&mut self, options: &KmodOptions) -> Result<Option<Session>, DeviceError> {
        let node = Node::open_with(options.kernel.clone(), &options.node)?;
        let all = listed(&node)?;
        let returned =
            |info: &&EndpointInfo| info.state == State::Live && info.id != self.session.endpoint() && self.known.is(info);
        let Some(info) = all.iter().find(returned) else { return Ok(None) };
        let session = node.attach(info.id, self.vectors.min(info.vectors).max(1))?;
        // Its twin may be away as well.
        let serial = self.known.serial;
        self.known = Known::of(info, &all);
        self.known.serial = self.known.serial.filter(|_| serial.is_some());
        Ok(Some(session))
    }
}

fn by_rank(node: &Node, rank: Rank, ranks: usize, returning: bool) -> Result<EndpointId> {
    let mut live = Vec::new();
    for id in node.endpoints()? {
        match node.endpoint(id) {
            Ok(info) if info.state == State::Live && !(returning && info.attached) => live.push(id),
            // Gone since it was listed.
            Ok(_) | Err(DeviceError::NoEndpoint(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    live.get(if returning { 0 } else { rank }).copied().ok_or_else(|| {
        Error::Argument(format!(
            "{} live endpoints for {ranks} ranks: bind more (`pcieipc info` lists them), start fewer ranks, or use shared memory",
            live.len()
        ))
    })
}

pub(super) struct JoinKmod {
    rank: Rank,
    data_bytes: usize,
    bell: Bell,
    wiring: Wiring,
    peers: Vec<Option<Peer<Kmod>>>,
}

impl JoinKmod {
    pub fn new(rank: Rank, ranks: usize, data_bytes: usize, options: &KmodOptions, session: Arc<Session>) -> Result<Self> {
        let bell = Bell::new().map_err(failed("eventfd", "raise the limit of open files"))?;
        let wiring = Wiring::new(session, options.kernel.clone(), (rank, ranks), data_bytes, options.mover, &bell)?
            .strict(options.degraded_link_is_error);
        Ok(Self { rank, data_bytes, bell, wiring, peers: (0..ranks).map(|_| None).collect() })
    }
}

impl Join for JoinKmod {
    fn offer(&mut self, peer: Rank) -> Result<Vec<OwnedFd>> {
        Ok(vec![self.wiring.offer(peer)?])
    }

    fn accept(&mut self, peer: Rank, life: Option<Arc<Life>>, fds: Vec<OwnedFd>) -> Result<()> {
        let count = fds.len();
        let Ok([fd]) = <[OwnedFd; 1]>::try_from(fds) else {
            return Err(Error::Corrupt {
                rank: self.rank,
                peer,
                what: format!("{count} descriptors instead of 1"),
                endpoint: None,
            });
        };
        let (outward, inward) = self.wiring.accept(peer, fd, &self.bell)?;
        self.peers[peer] = Some(Peer { writer: Writer::new(outward), reader: Reader::new(inward), life });
        Ok(())
    }

    fn finish(self: Box<Self>, watch: Watch) -> Result<Box<dyn GroupLinks>> {
        let Self { rank, data_bytes, bell, wiring, peers } = *self;
        Ok(Box::new(RankLinks::new(rank, peers, wiring.finish(), bell, data_bytes).watching(watch)))
    }
}
