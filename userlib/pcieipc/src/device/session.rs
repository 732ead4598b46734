// SPDX-License-Identifier: MIT OR Apache-2.0
//! A session with one endpoint.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use nix::errno::Errno;

use super::{Channel, DeviceError, EndpointId, EndpointInfo, Import, Node, State, Status, channel::Owner, node::no_endpoint};
use crate::{
    abi::*,
    sys::{Access, Bell, Call},
};

/// An endpoint, taken. Dropping it, and all channels made from it, gives the endpoint back.
#[derive(Debug)]
pub struct Session {
    node: Node,
    endpoint: EndpointId,
    generation: AtomicU64,
    vectors: u32,
    status: Status,
}

/// What the module says about a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionState {
    /// The endpoint's state.
    pub state: State,
    /// The endpoint's present life.
    pub generation: u64,
    /// The life that the session belongs to.
    pub attached_generation: u64,
    /// Locked memory that is charged for this session's channels, in bytes.
    pub locked_bytes: u64,
    /// Doorbells rung by this session.
    pub doorbells: u64,
    /// Events lost by this session's queue.
    pub events_lost: u64,
    /// Channels made and imported.
    pub channels: u32,
    /// Events that wait.
    pub events: u32,
}

impl Session {
    pub(super) fn attach(node: Node, endpoint: EndpointId, vectors: u32) -> Result<Self, DeviceError> {
        let mut attach = pcieipc_attach::sized();
        (attach.endpoint, attach.vectors) = (endpoint.0, vectors);
        node.call(Call::Attach(&mut attach)).map_err(|source| match source.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EBUSY) => DeviceError::Busy {
                what: endpoint.to_string(),
                hint: "another process is attached to it; end that one or take another endpoint (`pcieipc info`)",
            },
            Some(Errno::EPERM) => DeviceError::NotProtected { endpoint },
            _ => no_endpoint(source, endpoint),
        })?;
        let page = node.limits().page_size as usize;
        let mapping = node
            .kernel
            .map(node.fd.as_fd(), attach.status_offset, page, Access::Read)
            .map_err(|source| DeviceError::Other { call: "mmap of the status page", source: source.into() })?;
        let status = Status::new(mapping).ok_or_else(short_page)?;
        Ok(Self { node, endpoint, generation: attach.generation.into(), vectors, status })
    }

    /// The open node.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// println!("{:?}", session.node().limits());
    /// # Ok(())
    /// # }
    /// ```
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// The endpoint.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// assert_eq!(session.endpoint(), first);
    /// # Ok(())
    /// # }
    /// ```
    pub fn endpoint(&self) -> EndpointId {
        self.endpoint
    }

    /// The life of the endpoint that this session belongs to.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// assert_eq!(session.generation(), session.status().word().generation);
    /// # Ok(())
    /// # }
    /// ```
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// How many interrupt vectors the session has.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// assert!(session.vectors() >= 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn vectors(&self) -> u32 {
        self.vectors
    }

    /// The endpoint's status page.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// println!("{:?}", session.status().word());
    /// # Ok(())
    /// # }
    /// ```
    pub fn status(&self) -> &Status {
        &self.status
    }

    /// The endpoint, as it is now.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// println!("{}", session.info()?.address);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `NoEndpoint` when it is gone for long.
    pub fn info(&self) -> Result<EndpointInfo, DeviceError> {
        self.node.endpoint(self.endpoint)
    }

    /// What has become of the session.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// println!("{:?}", session.state()?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Other`.
    pub fn state(&self) -> Result<SessionState, DeviceError> {
        let mut raw = pcieipc_session_state::sized();
        self.node.call(Call::State(&mut raw)).map_err(|e| DeviceError::new("PCIEIPC_IOCTL_STATE", e))?;
        Ok(SessionState {
            state: State::from_code(raw.state),
            generation: raw.generation,
            attached_generation: raw.attached_generation,
            locked_bytes: raw.locked_bytes,
            doorbells: raw.doorbells,
            events_lost: raw.events_lost,
            channels: raw.channels,
            events: raw.events,
        })
    }

    /// Goes on in the endpoint's present life; channels keep their memory, ids, mappings and exports.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// let life = session.recover()?; // after an error of the endpoint
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Recovering` when it is too early; `Gone`.
    pub fn recover(&self) -> Result<u64, DeviceError> {
        let mut raw = pcieipc_recover::sized();
        self.node.call(Call::Recover(&mut raw)).map_err(|e| DeviceError::new("PCIEIPC_IOCTL_RECOVER", e))?;
        self.generation.store(raw.generation, Ordering::Relaxed);
        Ok(raw.generation)
    }

    /// Makes a channel whose reader is this session, with a data area of `data_bytes` (a power of two, at least a page);
    /// its writer's doorbell raises `vector`.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// let channel = session.channel(1 << 20, 0)?; // a ring of 1 MiB; vector 0 wakes its reader
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Limit`, `Memory`, `Recovering`, `Stale`, `Gone`.
    pub fn channel(&self, data_bytes: usize, vector: u32) -> Result<Channel, DeviceError> {
        Channel::create(&self.owner(), data_bytes, vector)
    }

    /// Makes another session's channel a destination of this endpoint's engine. The descriptor stays the caller's.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// use std::os::fd::AsFd;
    /// let import = session.import(channel.export()?.as_fd())?; // its own, for the example
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Limit`, `Unsupported`, `Recovering`, `Stale`, `Gone`.
    pub fn import(&self, exported: BorrowedFd<'_>) -> Result<Import, DeviceError> {
        Import::new(&self.owner(), exported)
    }

    /// The endpoint's engine copies `bytes` from one channel of this session to another, made or imported; returns when
    /// the data is there.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// let other = session.channel(1 << 20, 0)?;
    /// session.copy((channel.id(), 0), (other.id(), 0), 4096, std::time::Duration::from_secs(1))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `EngineTimeout` (the engine is stopped), `Engine`, `NoRing`, `Unsupported`, `Recovering`, `Stale`, `Gone`; `Other` for a range
    /// outside the channels.
    pub fn copy(&self, from: (u32, u64), to: (u32, u64), bytes: u32, timeout: Duration) -> Result<(), DeviceError> {
        let mut raw = pcieipc_copy::sized();
        ((raw.from, raw.from_offset), (raw.to, raw.to_offset), raw.bytes) = (from, to, bytes);
        raw.timeout_ms = (timeout.as_millis() as u32).clamp(1, 10_000);
        self.node.call(Call::Copy(&mut raw)).map_err(|error| match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ENOENT) => DeviceError::NoRing,
            _ => DeviceError::new("PCIEIPC_IOCTL_COPY", error),
        })
    }

    /// A vector rings this bell from now on, and so does every change of the endpoint's state.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// let bell = Bell::new()?;
    /// session.set_bell(0, &bell)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Other`.
    pub fn set_bell(&self, vector: u32, bell: &Bell) -> Result<(), DeviceError> {
        let mut raw = pcieipc_vector_eventfd::sized();
        (raw.vector, raw.fd) = (vector, bell.as_fd().as_raw_fd());
        self.node.call(Call::VectorEventfd(&mut raw)).map_err(|e| DeviceError::new("PCIEIPC_IOCTL_VECTOR_EVENTFD", e))
    }

    /// Rings the own endpoint.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// session.ring(0)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `RateLimited`, `Recovering`, `Stale`, `Gone`.
    pub fn ring(&self, vector: u32) -> Result<(), DeviceError> {
        let mut raw = pcieipc_ring::sized();
        raw.vector = vector;
        self.node.call(Call::Ring(&mut raw)).map_err(|e| DeviceError::new("PCIEIPC_IOCTL_RING", e))
    }

    fn owner(&self) -> Owner {
        let page = self.node.limits().page_size as usize;
        Owner { kernel: self.node.kernel.clone(), fd: self.node.fd.clone(), page }
    }
}

impl AsFd for Session {
    /// Readable when an event waits; hung up when the endpoint is gone or dead.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.node.fd.as_fd()
    }
}

pub(super) fn short_page() -> DeviceError {
    DeviceError::Other { call: "mmap", source: Arc::new(std::io::ErrorKind::UnexpectedEof.into()) }
}
