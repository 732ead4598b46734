// SPDX-License-Identifier: MIT OR Apache-2.0
//! A channel as its writer has it.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
};

use super::{DeviceError, EndpointId, Status, session::short_page};
use crate::{
    abi::*,
    ring::{IndexPage, MIN_DATA_BYTES, Memory},
    sys::{Access, Bell, Call, Kernel, Linux, Mapping},
};

/// The writer's end of a channel, made from the descriptor that its reader passed.
#[derive(Debug)]
pub struct Export {
    kernel: Arc<dyn Kernel>,
    fd: OwnedFd,
    endpoint: EndpointId,
    generation: u64,
    data: Mapping,
    tail: Mapping,
    head: Mapping,
    status: Status,
}

impl Export {
    /// Maps what the descriptor stands for.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// let writers = Export::new(channel.export()?)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Other` when it is not an exported channel, or one that is too small for the ring protocol.
    pub fn new(fd: OwnedFd) -> Result<Self, DeviceError> {
        Self::with(Arc::new(Linux), fd)
    }

    /// As [`Export::new`], through a kernel of the caller's choice.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// let writers = Export::with(std::sync::Arc::new(pcieipc::sys::Linux), channel.export()?)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Export::new`].
    pub fn with(kernel: Arc<dyn Kernel>, fd: OwnedFd) -> Result<Self, DeviceError> {
        let mut raw = pcieipc_export_info::sized();
        kernel.call(fd.as_fd(), Call::ExportInfo(&mut raw)).map_err(|e| DeviceError::new("PCIEIPC_IOCTL_EXPORT_INFO", e))?;
        let data_bytes = usize::try_from(raw.data_bytes).unwrap_or(0);
        if !data_bytes.is_power_of_two() || data_bytes < MIN_DATA_BYTES {
            return Err(short_page());
        }
        let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten().map_or(4096, |p| p as usize);
        let map = |offset, bytes, access| {
            let mapping = kernel.map(fd.as_fd(), offset, bytes, access);
            let mapping =
                mapping.map_err(|source| DeviceError::Other { call: "mmap of an exported channel", source: source.into() })?;
            if mapping.bytes() < bytes { Err(short_page()) } else { Ok(mapping) }
        };
        let data = map(raw.data_offset, data_bytes, Access::ReadWrite)?;
        let tail = map(raw.tail_offset, page, Access::ReadWrite)?;
        let head = map(raw.head_offset, page, Access::Read)?;
        let status = Status::new(map(raw.status_offset, page, Access::Read)?).ok_or_else(short_page)?;
        Ok(Self { endpoint: EndpointId(raw.endpoint), generation: raw.generation, kernel, fd, data, tail, head, status })
    }

    /// The reader's endpoint.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// assert_eq!(Export::new(channel.export()?)?.endpoint(), first);
    /// # Ok(())
    /// # }
    /// ```
    pub fn endpoint(&self) -> EndpointId {
        self.endpoint
    }

    /// The life of the reader's endpoint that the reader's session belonged to when this was made.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// assert_eq!(Export::new(channel.export()?)?.generation(), session.generation());
    /// # Ok(())
    /// # }
    /// ```
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The status page of the reader's endpoint.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// println!("{:?}", Export::new(channel.export()?)?.status().word());
    /// # Ok(())
    /// # }
    /// ```
    pub fn status(&self) -> &Status {
        &self.status
    }

    /// Rings the reader's doorbell.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// Export::new(channel.export()?)?.ring()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `RateLimited`, `Recovering`, `Stale`, `Gone`.
    pub fn ring(&self) -> Result<(), DeviceError> {
        let mut raw = pcieipc_ring::sized();
        let call = Call::ExportRing(&mut raw);
        self.kernel.call(self.fd.as_fd(), call).map_err(|e| DeviceError::new("PCIEIPC_IOCTL_EXPORT_RING", e))
    }

    /// This bell is rung from now on when the reader gives back room, or when reader or endpoint ends.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// Export::new(channel.export()?)?.set_bell(&Bell::new()?)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Other`.
    pub fn set_bell(&self, bell: &Bell) -> Result<(), DeviceError> {
        let mut raw = pcieipc_export_eventfd::sized();
        raw.fd = bell.as_fd().as_raw_fd();
        let call = Call::ExportEventfd(&mut raw);
        self.kernel.call(self.fd.as_fd(), call).map_err(|e| DeviceError::new("PCIEIPC_IOCTL_EXPORT_EVENTFD", e))
    }
}

impl AsFd for Export {
    /// Writable when there is room; hung up when reader or endpoint ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

pub(super) fn page(mapping: &Mapping) -> &IndexPage {
    // SAFETY: callers map at least a page for it, which stays mapped while the mapping lives; it is page-aligned and made of
    // atomics, and one that is mapped read-only is only loaded from.
    unsafe { mapping.start().cast::<IndexPage>().as_ref() }
}

// SAFETY: the mappings are as long as checked in `with`, page-aligned, and live as long as this value, whatever becomes of the
// endpoint (the module's promise). A channel has one exported descriptor, so its tail page is written through one value.
unsafe impl Memory for Export {
    fn data(&self) -> NonNull<u8> {
        self.data.start()
    }
    fn data_bytes(&self) -> usize {
        self.data.bytes()
    }
    fn tail(&self) -> &IndexPage {
        page(&self.tail)
    }
    fn head(&self) -> &IndexPage {
        page(&self.head)
    }
}
