// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every raw call on `/dev/pcieipc`, behind a trait that tests replace.

use std::{
    ffi::c_void,
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
};

use nix::errno::Errno;

use super::{Access, Mapping};
use crate::abi::*;

macro_rules! calls {
    ($($(#[$doc:meta])* $variant:ident($record:ident) = $number:ident, $name:literal;)*) => {
        /// An ioctl and its structure, which the kernel reads and writes back.
        #[derive(Debug)]
        pub enum Call<'a> {
            $($(#[$doc])* $variant(&'a mut $record),)*
        }

        impl Call<'_> {
            /// The name, for errors.
            pub fn name(&self) -> &'static str {
                match self { $(Self::$variant(_) => $name,)* }
            }

            fn number(&self) -> u32 {
                match self { $(Self::$variant(_) => $number,)* }
            }

            fn record(&mut self) -> *mut c_void {
                match self { $(Self::$variant(record) => (&raw mut **record).cast(),)* }
            }
        }
    };
}

calls! {
    /// Versions, limits and capabilities.
    Query(pcieipc_query) = pcieipc_call_PCIEIPC_CALL_QUERY, "PCIEIPC_IOCTL_QUERY";
    /// One endpoint.
    EndpointInfo(pcieipc_endpoint_info) = pcieipc_call_PCIEIPC_CALL_ENDPOINT_INFO, "PCIEIPC_IOCTL_ENDPOINT_INFO";
    /// How far two endpoints are apart.
    Distance(pcieipc_distance) = pcieipc_call_PCIEIPC_CALL_DISTANCE, "PCIEIPC_IOCTL_DISTANCE";
    /// Take an endpoint.
    Attach(pcieipc_attach) = pcieipc_call_PCIEIPC_CALL_ATTACH, "PCIEIPC_IOCTL_ATTACH";
    /// Go on in the present generation.
    Recover(pcieipc_recover) = pcieipc_call_PCIEIPC_CALL_RECOVER, "PCIEIPC_IOCTL_RECOVER";
    /// What has become of the session.
    State(pcieipc_session_state) = pcieipc_call_PCIEIPC_CALL_STATE, "PCIEIPC_IOCTL_STATE";
    /// Make a channel.
    ChannelCreate(pcieipc_channel_create) = pcieipc_call_PCIEIPC_CALL_CHANNEL_CREATE, "PCIEIPC_IOCTL_CHANNEL_CREATE";
    /// End a channel.
    ChannelDestroy(pcieipc_channel) = pcieipc_call_PCIEIPC_CALL_CHANNEL_DESTROY, "PCIEIPC_IOCTL_CHANNEL_DESTROY";
    /// The writer's descriptor.
    ChannelExport(pcieipc_channel_fd) = pcieipc_call_PCIEIPC_CALL_CHANNEL_EXPORT, "PCIEIPC_IOCTL_CHANNEL_EXPORT";
    /// Another's channel as a destination of the own engine.
    ChannelImport(pcieipc_channel_fd) = pcieipc_call_PCIEIPC_CALL_CHANNEL_IMPORT, "PCIEIPC_IOCTL_CHANNEL_IMPORT";
    /// Room was given back.
    ChannelFreed(pcieipc_channel) = pcieipc_call_PCIEIPC_CALL_CHANNEL_FREED, "PCIEIPC_IOCTL_CHANNEL_FREED";
    /// The engine copies.
    Copy(pcieipc_copy) = pcieipc_call_PCIEIPC_CALL_COPY, "PCIEIPC_IOCTL_COPY";
    /// Who is woken by a vector.
    VectorEventfd(pcieipc_vector_eventfd) = pcieipc_call_PCIEIPC_CALL_VECTOR_EVENTFD, "PCIEIPC_IOCTL_VECTOR_EVENTFD";
    /// Ring the own endpoint.
    Ring(pcieipc_ring) = pcieipc_call_PCIEIPC_CALL_RING, "PCIEIPC_IOCTL_RING";
    /// A doorbell without system calls.
    DoorbellMap(pcieipc_doorbell) = pcieipc_call_PCIEIPC_CALL_DOORBELL_MAP, "PCIEIPC_IOCTL_DOORBELL_MAP";
    /// An administrator's wish.
    Admin(pcieipc_admin) = pcieipc_call_PCIEIPC_CALL_ADMIN, "PCIEIPC_IOCTL_ADMIN";
    /// What an exported descriptor is.
    ExportInfo(pcieipc_export_info) = pcieipc_call_PCIEIPC_CALL_EXPORT_INFO, "PCIEIPC_IOCTL_EXPORT_INFO";
    /// Ring the channel's reader.
    ExportRing(pcieipc_ring) = pcieipc_call_PCIEIPC_CALL_EXPORT_RING, "PCIEIPC_IOCTL_EXPORT_RING";
    /// Who is woken when there is room.
    ExportEventfd(pcieipc_export_eventfd) = pcieipc_call_PCIEIPC_CALL_EXPORT_EVENTFD, "PCIEIPC_IOCTL_EXPORT_EVENTFD";
    /// A doorbell without system calls, for the writer.
    ExportDoorbell(pcieipc_doorbell) = pcieipc_call_PCIEIPC_CALL_EXPORT_DOORBELL, "PCIEIPC_IOCTL_EXPORT_DOORBELL";
}

/// What the library asks of the kernel for a device.
pub trait Kernel: Send + Sync + std::fmt::Debug {
    /// Opens the node: a new session.
    ///
    /// # Errors
    /// As open(2).
    fn open(&self, node: &Path) -> io::Result<OwnedFd>;
    /// One call.
    ///
    /// # Errors
    /// As `uapi/pcieipc.h` says.
    fn call(&self, fd: BorrowedFd<'_>, call: Call<'_>) -> io::Result<()>;
    /// PCIEIPC_IOCTL_ENUMERATE, which has an array beside its structure: writes as many ids as fit and says how many
    /// endpoints there are.
    ///
    /// # Errors
    /// As `uapi/pcieipc.h` says.
    fn enumerate(&self, fd: BorrowedFd<'_>, ids: &mut [u32]) -> io::Result<usize>;
    /// Maps memory of the descriptor.
    ///
    /// # Errors
    /// As mmap(2).
    fn map(&self, fd: BorrowedFd<'_>, offset: u64, bytes: usize, access: Access) -> io::Result<Mapping>;
    /// Reads the events that wait, as many as fit; none when there are none.
    ///
    /// # Errors
    /// As read(2).
    fn events(&self, fd: BorrowedFd<'_>, events: &mut [pcieipc_event]) -> io::Result<usize>;
}

/// The kernel that this process runs on.
#[derive(Debug, Clone, Copy, Default)]
pub struct Linux;

impl Kernel for Linux {
    fn open(&self, node: &Path) -> io::Result<OwnedFd> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        Ok(File::options().read(true).write(true).custom_flags(flags).open(node)?.into())
    }

    fn call(&self, fd: BorrowedFd<'_>, mut call: Call<'_>) -> io::Result<()> {
        // SAFETY: the number belongs to the record's type, whose first field holds its size, so the kernel reads and writes
        // inside it; it is exclusively borrowed. No record of `Call` holds an address.
        unsafe { ioctl(fd, call.number(), call.record()) }
    }

    fn enumerate(&self, fd: BorrowedFd<'_>, ids: &mut [u32]) -> io::Result<usize> {
        let mut record = pcieipc_enumerate::sized();
        record.ids = ids.as_mut_ptr() as u64;
        record.count = u32::try_from(ids.len()).unwrap_or(u32::MAX);
        // SAFETY: the record is as for `call`; it points to `count` ids, which are exclusively borrowed.
        unsafe { ioctl(fd, pcieipc_call_PCIEIPC_CALL_ENUMERATE, (&raw mut record).cast()) }?;
        Ok(record.count as usize)
    }

    fn map(&self, fd: BorrowedFd<'_>, offset: u64, bytes: usize, access: Access) -> io::Result<Mapping> {
        Mapping::new(fd, offset, bytes, access)
    }

    fn events(&self, fd: BorrowedFd<'_>, events: &mut [pcieipc_event]) -> io::Result<usize> {
        const RECORD: usize = size_of::<pcieipc_event>();
        let mut bytes = vec![0; events.len() * RECORD];
        let mut file = File::from(fd.try_clone_to_owned()?);
        let count = match file.read(&mut bytes) {
            Ok(count) => count / RECORD,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(error) => return Err(error),
        };
        for (event, bytes) in events.iter_mut().zip(bytes.chunks_exact(RECORD)).take(count) {
            // SAFETY: RECORD bytes; every bit pattern is an event, and the read does not ask for alignment.
            *event = unsafe { bytes.as_ptr().cast::<pcieipc_event>().read_unaligned() };
        }
        Ok(count)
    }
}

/// # Safety
/// `record` points to what `number` reads and writes.
unsafe fn ioctl(fd: BorrowedFd<'_>, number: u32, record: *mut c_void) -> io::Result<()> {
    loop {
        super::count::made_one();
        // SAFETY: as the caller promises; the descriptor is open.
        let answer = unsafe { libc::ioctl(fd.as_raw_fd(), number as libc::Ioctl, record) };
        match Errno::result(answer) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
