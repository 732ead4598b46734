// SPDX-License-Identifier: MIT OR Apache-2.0
//! Links over channels of the module on their way, and the session that they stand on.

use std::{os::fd::OwnedFd, path::PathBuf, sync::Arc};

use super::{GroupLinks, join::Join, near::Host};
use crate::{
    device::{DeviceError, EndpointId, NODE, Node, Session, State},
    error::{Error, Rank, Result},
    ring::{Reader, Writer},
    sys::{Bell, Kernel, Life, Linux, failed},
    transport::{
        Peer, RankLinks,
        kmod::{Kmod, Mover, Wiring},
    },
};

/// How a rank uses the module.
#[derive(Debug, Clone)]
pub struct KmodOptions {
    /// The rank's endpoint; `None` takes the one that is at the rank's place among the live ones.
    pub endpoint: Option<EndpointId>,
    /// Who moves records into a peer's ring.
    pub mover: Mover,
    /// The module's node.
    pub node: PathBuf,
    /// Who executes system calls; tests have their own.
    pub kernel: Arc<dyn Kernel>,
    /// Whose PCIe tree the group plans for and follows; `None` for none. The same, one or none, on all ranks.
    pub host: Option<Host>,
}

impl Default for KmodOptions {
    fn default() -> Self {
        Self { endpoint: None, mover: Mover::default(), node: NODE.into(), kernel: Arc::new(Linux), host: Some(Host::default()) }
    }
}

impl KmodOptions {
    /// Takes the rank's endpoint.
    pub(super) fn attach(&self, rank: Rank, ranks: usize) -> Result<Arc<Session>> {
        let node = Node::open_with(self.kernel.clone(), &self.node)?;
        let endpoint = match self.endpoint {
            Some(endpoint) => endpoint,
            None => by_rank(&node, rank, ranks)?,
        };
        let vectors = node.endpoint(endpoint)?.vectors.min(ranks.saturating_sub(1) as u32).max(1);
        Ok(Arc::new(node.attach(endpoint, vectors)?))
    }
}

fn by_rank(node: &Node, rank: Rank, ranks: usize) -> Result<EndpointId> {
    let mut live = Vec::new();
    for id in node.endpoints()? {
        match node.endpoint(id) {
            Ok(info) if info.state == State::Live => live.push(id),
            // Gone since it was listed.
            Ok(_) | Err(DeviceError::NoEndpoint(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    live.get(rank).copied().ok_or_else(|| {
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
        let wiring = Wiring::new(session, options.kernel.clone(), (rank, ranks), data_bytes, options.mover, &bell)?;
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
            return Err(Error::Corrupt { rank: self.rank, peer, what: format!("{count} descriptors instead of 1") });
        };
        let (outward, inward) = self.wiring.accept(peer, fd, &self.bell)?;
        self.peers[peer] = Some(Peer { writer: Writer::new(outward), reader: Reader::new(inward), life });
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Box<dyn GroupLinks>> {
        let Self { rank, data_bytes, bell, wiring, peers } = *self;
        Ok(Box::new(RankLinks::new(rank, peers, wiring.finish(), bell, data_bytes)))
    }
}
