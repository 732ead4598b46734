// SPDX-License-Identifier: MIT OR Apache-2.0
//! The open node: versions, limits, and the endpoints that are there.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
};

use nix::errno::Errno;

use super::{DeviceError, Distance, EndpointId, EndpointInfo, Event, Session};
use crate::{
    abi::*,
    sys::{Call, Kernel, Linux},
};

/// Where the module's node is.
pub const NODE: &str = "/dev/pcieipc";

/// The oldest module that this library works with.
const OLDEST_MODULE: u32 = 1;

/// What the module allows, and what it can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// The module's ABI version.
    pub version: u32,
    /// The oldest library that it accepts.
    pub oldest: u32,
    /// `PCIEIPC_CAP_*`.
    pub caps: u64,
    /// Largest data area of one channel, in bytes.
    pub max_channel_bytes: u64,
    /// Largest sum of data areas of one session, in bytes.
    pub max_session_bytes: u64,
    /// Largest sum of data areas of all sessions, in bytes.
    pub max_total_bytes: u64,
    /// Most channels of one session, made and imported.
    pub max_channels: u32,
    /// Most bytes of one copy by an engine.
    pub max_copy_bytes: u32,
    /// Most endpoints.
    pub max_endpoints: u32,
    /// Events that a session's queue holds.
    pub event_queue: u32,
    /// Rate limit of ring calls of one session; 0 for none.
    pub doorbells_per_second: u32,
    /// Bytes of a page.
    pub page_size: u32,
    /// Most sessions of one user; 0 when the module is older than this limit.
    pub max_sessions: u32,
    /// Most events of correctable errors that an endpoint gives in a second.
    pub correctable_per_second: u32,
    /// How often the module looks at a link, in milliseconds.
    pub link_sample_ms: u32,
    /// Interrupts of a vector in a tenth of a second above which it is silenced for a while; 0 for never, and from a module that does not say.
    pub storm_interrupts: u32,
}

/// `/dev/pcieipc`, opened, and of a version that this library works with.
#[derive(Debug)]
pub struct Node {
    pub(super) kernel: Arc<dyn Kernel>,
    pub(super) fd: Arc<OwnedFd>,
    limits: Limits,
}

impl Node {
    /// Opens the node.
    ///
    /// ```no_run
    /// # use pcieipc::device::Node;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let node = Node::open()?;
    /// println!("{:?}", node.limits());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `NotLoaded`, `NoPermission`, `Version`.
    pub fn open() -> Result<Self, DeviceError> {
        Self::open_with(Arc::new(Linux), Path::new(NODE))
    }

    /// Opens a node through a kernel of the caller's choice, such as a test's.
    ///
    /// ```no_run
    /// # use pcieipc::device::Node;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use pcieipc::{device::NODE, sys::Linux};
    /// let node = Node::open_with(std::sync::Arc::new(Linux), NODE.as_ref())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Node::open`].
    pub fn open_with(kernel: Arc<dyn Kernel>, path: &Path) -> Result<Self, DeviceError> {
        let fd = kernel.open(path).map_err(|source| {
            let path = path.display().to_string();
            match source.raw_os_error().map(Errno::from_raw) {
                Some(Errno::ENOENT | Errno::ENXIO | Errno::ENODEV) => DeviceError::NotLoaded { path },
                Some(Errno::EACCES | Errno::EPERM) => DeviceError::NoPermission { path },
                _ => DeviceError::Other { call: "open", source: source.into() },
            }
        })?;
        let mut query = pcieipc_query::sized();
        (query.user_version, query.user_oldest) = (PCIEIPC_ABI_VERSION, OLDEST_MODULE);
        let answer = kernel.call(fd.as_fd(), Call::Query(&mut query));
        // The module fills the structure in all the same when the versions exclude each other.
        let excluded = answer.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EPROTO));
        if excluded || (answer.is_ok() && (query.version < OLDEST_MODULE || query.oldest > PCIEIPC_ABI_VERSION)) {
            return Err(DeviceError::Version {
                module: query.version,
                module_oldest: query.oldest,
                library: PCIEIPC_ABI_VERSION,
                library_oldest: OLDEST_MODULE,
            });
        }
        answer.map_err(|source| DeviceError::new("PCIEIPC_IOCTL_QUERY", source))?;
        let limits = Limits {
            version: query.version,
            oldest: query.oldest,
            caps: query.caps,
            max_channel_bytes: query.max_channel_bytes,
            max_session_bytes: query.max_session_bytes,
            max_total_bytes: query.max_total_bytes,
            max_channels: query.max_channels,
            max_copy_bytes: query.max_copy_bytes,
            max_endpoints: query.max_endpoints,
            event_queue: query.event_queue,
            doorbells_per_second: query.doorbells_per_second,
            page_size: query.page_size.max(4096),
            max_sessions: query.max_sessions,
            correctable_per_second: query.correctable_per_second,
            link_sample_ms: query.link_sample_ms,
            storm_interrupts: query.storm_interrupts,
        };
        Ok(Self { kernel, fd: Arc::new(fd), limits })
    }

    /// Limits and capabilities of the module.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// println!("{:?}", node.limits());
    /// # Ok(())
    /// # }
    /// ```
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The ids of all endpoints that the module drives, in the order in which they were bound.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// for id in node.endpoints()? {
    ///     println!("{:?}", node.endpoint(id)?);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Other`.
    pub fn endpoints(&self) -> Result<Vec<EndpointId>, DeviceError> {
        let mut ids = vec![0; 16];
        loop {
            let count = self
                .kernel
                .enumerate(self.fd.as_fd(), &mut ids)
                .map_err(|source| DeviceError::new("PCIEIPC_IOCTL_ENUMERATE", source))?;
            if count <= ids.len() {
                return Ok(ids[..count].iter().copied().map(EndpointId).collect());
            }
            // More came; the module's limit bounds how long this goes on.
            ids.resize(count.min(1 << 16), 0);
        }
    }

    /// One endpoint.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// println!("{}", node.endpoint(first)?.address);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `NoEndpoint`.
    pub fn endpoint(&self, id: EndpointId) -> Result<EndpointInfo, DeviceError> {
        let mut info = pcieipc_endpoint_info::sized();
        info.endpoint = id.0;
        self.call(Call::EndpointInfo(&mut info)).map_err(|e| no_endpoint(e, id))?;
        Ok((&info).into())
    }

    /// How far two endpoints are apart.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// println!("{:?}", node.distance(first, node.endpoints()?[1])?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `NoEndpoint`, `Gone`.
    pub fn distance(&self, from: EndpointId, to: EndpointId) -> Result<Distance, DeviceError> {
        let mut distance = pcieipc_distance::sized();
        (distance.from, distance.to) = (from.0, to.0);
        self.call(Call::Distance(&mut distance)).map_err(|e| no_endpoint(e, from))?;
        Ok((&distance).into())
    }

    /// The events that wait, at most 64; none when there are none.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// for event in node.events()? {
    ///     println!("{event:?}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Other`.
    pub fn events(&self) -> Result<Vec<Event>, DeviceError> {
        let mut raw = [pcieipc_event::default(); 64];
        let count = self
            .kernel
            .events(self.fd.as_fd(), &mut raw)
            .map_err(|source| DeviceError::Other { call: "read", source: source.into() })?;
        Ok(raw[..count.min(raw.len())].iter().map(Event::from).collect())
    }

    /// Takes an endpoint for this session, with `vectors` interrupt vectors.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// let session = node.attach(first, 1)?;
    /// println!("life {}", session.generation());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Busy` when another session has it; `NoEndpoint`; `NotProtected`; `Recovering`; `Gone`.
    pub fn attach(self, endpoint: EndpointId, vectors: u32) -> Result<Session, DeviceError> {
        Session::attach(self, endpoint, vectors)
    }

    pub(super) fn call(&self, call: Call<'_>) -> Result<(), std::io::Error> {
        self.kernel.call(self.fd.as_fd(), call)
    }
}

impl AsFd for Node {
    /// Readable when an event waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

pub(super) fn no_endpoint(source: std::io::Error, id: EndpointId) -> DeviceError {
    match source.raw_os_error() {
        Some(libc::ENOENT) => DeviceError::NoEndpoint(id),
        _ => DeviceError::new("PCIEIPC_IOCTL_ENDPOINT_INFO", source),
    }
}
