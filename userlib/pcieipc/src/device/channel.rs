// SPDX-License-Identifier: MIT OR Apache-2.0
//! A channel as its reader has it.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
};

use nix::errno::Errno;

use super::{DeviceError, session::short_page};
use crate::{
    abi::*,
    ring::{IndexPage, MIN_DATA_BYTES, Memory},
    sys::{Access, Call, Kernel, Mapping},
};

/// The session that a channel belongs to; kept open by its channels.
#[derive(Debug, Clone)]
pub(super) struct Owner {
    pub kernel: Arc<dyn Kernel>,
    pub fd: Arc<OwnedFd>,
    pub page: usize,
}

/// A ring in memory of the module, read by this process. Dropping it ends the channel; the writer's mappings stay valid
/// memory.
#[derive(Debug)]
pub struct Channel {
    handle: Handle,
    segments: u32,
    data: Mapping,
    tail: Mapping,
    head: Mapping,
}

impl Channel {
    pub(super) fn create(owner: &Owner, data_bytes: usize, vector: u32) -> Result<Self, DeviceError> {
        let mut raw = pcieipc_channel_create::sized();
        (raw.data_bytes, raw.vector) = (data_bytes as u64, vector);
        let what = || format!("a channel of {} KiB", data_bytes >> 10);
        owner.kernel.call(owner.fd.as_fd(), Call::ChannelCreate(&mut raw)).map_err(|source| {
            match source.raw_os_error().map(Errno::from_raw) {
                Some(Errno::ENOMEM) => DeviceError::Memory { what: what(), limit: super::error::memlock() },
                Some(Errno::ENOSPC) => DeviceError::Limit { what: what() },
                _ => DeviceError::new("PCIEIPC_IOCTL_CHANNEL_CREATE", source),
            }
        })?;
        // From here on the channel is ended if anything fails.
        let handle = Handle { owner: owner.clone(), id: raw.channel };
        let map = |offset, bytes, access| {
            let mapping = owner.kernel.map(owner.fd.as_fd(), offset, bytes, access);
            let mapping = mapping.map_err(|source| DeviceError::Other { call: "mmap of a channel", source: source.into() })?;
            if mapping.bytes() < bytes { Err(short_page()) } else { Ok(mapping) }
        };
        let data = map(raw.data_offset, data_bytes, Access::Read)?;
        let tail = map(raw.tail_offset, owner.page, Access::Read)?;
        let head = map(raw.head_offset, owner.page, Access::ReadWrite)?;
        if !data_bytes.is_power_of_two() || data_bytes < MIN_DATA_BYTES {
            return Err(DeviceError::Limit { what: what() });
        }
        Ok(Self { handle, segments: raw.segments, data, tail, head })
    }

    /// Its id within the session.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// println!("channel {}", channel.id());
    /// # Ok(())
    /// # }
    /// ```
    pub fn id(&self) -> u32 {
        self.handle.id
    }

    /// Pieces of contiguous bus addresses; 1 when the device sees one range.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// println!("{} pieces", channel.segments());
    /// # Ok(())
    /// # }
    /// ```
    pub fn segments(&self) -> u32 {
        self.segments
    }

    /// The writer's descriptor, to be passed with SCM_RIGHTS; a channel has one at a time.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// let writers = Export::new(channel.export()?)?; // usually in another process, which got the descriptor through a socket
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Busy` while another one is out.
    pub fn export(&self) -> Result<OwnedFd, DeviceError> {
        let mut raw = pcieipc_channel_fd::sized();
        raw.channel = self.handle.id;
        self.handle.owner.kernel.call(self.handle.owner.fd.as_fd(), Call::ChannelExport(&mut raw)).map_err(
            |source| match source.raw_os_error().map(Errno::from_raw) {
                Some(Errno::EBUSY) => DeviceError::Busy {
                    what: format!("channel {}", self.handle.id),
                    hint: "its writer's descriptor is still open somewhere; close that one first",
                },
                _ => DeviceError::new("PCIEIPC_IOCTL_CHANNEL_EXPORT", source),
            },
        )?;
        // SAFETY: the module has just made this descriptor for us; nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(raw.fd) })
    }

    /// Wakes the writer if it sleeps in poll or on its eventfd, because room was given back.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// channel.freed()?; // wakes the writer that waits for room
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Gone` and others, by the endpoint's state.
    pub fn freed(&self) -> Result<(), DeviceError> {
        let mut raw = pcieipc_channel::sized();
        raw.channel = self.handle.id;
        let call = Call::ChannelFreed(&mut raw);
        self.handle
            .owner
            .kernel
            .call(self.handle.owner.fd.as_fd(), call)
            .map_err(|e| DeviceError::new("PCIEIPC_IOCTL_CHANNEL_FREED", e))
    }
}

/// An id within a session, ended when it is dropped.
#[derive(Debug)]
struct Handle {
    owner: Owner,
    id: u32,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut raw = pcieipc_channel::sized();
        raw.channel = self.id;
        // Whatever it answers, nothing of ours depends on it: the session's end destroys what is left.
        let _ = self.owner.kernel.call(self.owner.fd.as_fd(), Call::ChannelDestroy(&mut raw));
    }
}

// SAFETY: the mappings are as long as checked in `create`, page-aligned, and live as long as the channel, whatever becomes of
// the endpoint (the module's promise). The head page is mapped writable in this process alone, and through this value alone:
// the module makes one channel for each create call.
unsafe impl Memory for Channel {
    fn data(&self) -> NonNull<u8> {
        self.data.start()
    }
    fn data_bytes(&self) -> usize {
        self.data.bytes()
    }
    fn tail(&self) -> &IndexPage {
        super::export::page(&self.tail)
    }
    fn head(&self) -> &IndexPage {
        super::export::page(&self.head)
    }
}

/// Another session's channel as a destination of the own engine. Dropping it ends the import, not the channel.
#[derive(Debug)]
pub struct Import(Handle);

impl Import {
    pub(super) fn new(owner: &Owner, exported: BorrowedFd<'_>) -> Result<Self, DeviceError> {
        let mut raw = pcieipc_channel_fd::sized();
        raw.fd = exported.as_raw_fd();
        let call = Call::ChannelImport(&mut raw);
        owner.kernel.call(owner.fd.as_fd(), call).map_err(|e| DeviceError::new("PCIEIPC_IOCTL_CHANNEL_IMPORT", e))?;
        Ok(Self(Handle { owner: owner.clone(), id: raw.channel }))
    }

    /// Its id within the session.
    ///
    /// ```no_run
    /// # use pcieipc::device::{Bell, Export, Node};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// # let channel = session.channel(1 << 20, 0)?;
    /// use std::os::fd::AsFd;
    /// println!("{}", session.import(channel.export()?.as_fd())?.id());
    /// # Ok(())
    /// # }
    /// ```
    pub fn id(&self) -> u32 {
        self.0.id
    }
}
