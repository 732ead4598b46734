// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sessions, channels and exported descriptors, as thin as the ABI itself. Everything panics on an unexpected error.

use std::{
    fs::File,
    io::Read,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    poll::PollFlags,
    sys::{
        eventfd::{EfdFlags, EventFd},
        mman::ProtFlags,
        stat::Mode,
    },
};
use rig::guest::Host;
use serde_json::{Value, json};

use crate::{
    abi::*,
    call::{Record, call, number},
    mapping::{Mapping, PAGE, READ_WRITE},
    pci::Function,
    wait,
};

/// Wake-ups under emulation on a busy host, which may stand still for seconds; what comes is not waited for any longer.
pub const SOON: Duration = Duration::from_secs(15);

/// An open node without an endpoint.
#[derive(Debug)]
pub struct Node(File);

impl Node {
    /// Opens it, non-blocking or not.
    pub fn open(flags: OFlag) -> Self {
        let opened = open("/dev/pcieipc", OFlag::O_RDWR | OFlag::O_CLOEXEC | flags, Mode::empty());
        Self(File::from(opened.unwrap_or_else(|error| panic!("/dev/pcieipc: {error}"))))
    }

    /// A call.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn call<T: Record>(&self, number: u8, record: &mut T) -> Result<(), Errno> {
        call(&self.0, number, record)
    }

    /// A call that must succeed.
    pub fn get<T: Record>(&self, number: u8, mut record: T) -> T {
        self.call(number, &mut record).unwrap_or_else(|error| panic!("call {number:#x}: {error}"));
        record
    }

    /// Versions and limits.
    pub fn query(&self) -> pcieipc_query {
        let versions = pcieipc_query { user_version: PCIEIPC_ABI_VERSION, user_oldest: PCIEIPC_ABI_OLDEST, ..Record::new() };
        self.get(number::QUERY, versions)
    }

    /// All endpoints.
    pub fn endpoints(&self) -> Vec<u32> {
        let mut ids = [0u32; 64];
        let list = pcieipc_enumerate { ids: ids.as_mut_ptr() as u64, count: 64, ..Record::new() };
        let count = self.get(number::ENUMERATE, list).count as usize;
        ids[..count].to_vec()
    }

    /// One endpoint.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn info(&self, endpoint: u32) -> Result<pcieipc_endpoint_info, Errno> {
        let mut info = pcieipc_endpoint_info { endpoint, ..Record::new() };
        self.call(number::ENDPOINT_INFO, &mut info).map(|()| info)
    }

    /// Takes an endpoint.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn attach(&self, endpoint: u32, generation: u64) -> Result<pcieipc_attach, Errno> {
        let mut attach = pcieipc_attach { endpoint, generation, ..Record::new() };
        self.call(number::ATTACH, &mut attach).map(|()| attach)
    }

    /// The events that wait.
    pub fn events(&self) -> Vec<pcieipc_event> {
        let mut events = Vec::new();
        while wait::polled(&self.0, PollFlags::POLLIN, Duration::ZERO).contains(PollFlags::POLLIN) {
            match self.read_event() {
                Ok(event) => events.push(event),
                Err(Errno::EAGAIN) => break,
                Err(error) => panic!("read: {error}"),
            }
        }
        events
    }

    /// One event.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn read_event(&self) -> Result<pcieipc_event, Errno> {
        let mut bytes = [0; size_of::<pcieipc_event>()];
        let read = (&self.0).read(&mut bytes).map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(0)))?;
        assert_eq!(read, bytes.len(), "read() gives whole records");
        // SAFETY: plain integers without padding; any bits are valid.
        Ok(unsafe { std::mem::transmute::<[u8; size_of::<pcieipc_event>()], pcieipc_event>(bytes) })
    }

    /// Maps.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn map(&self, offset: u64, len: usize, protection: ProtFlags) -> Result<Mapping, Errno> {
        Mapping::new(&self.0, offset, len, protection)
    }
}

impl AsFd for Node {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Node {
    fn from(fd: OwnedFd) -> Self {
        Self(File::from(fd))
    }
}

/// A session that is attached to an endpoint.
#[derive(Debug)]
pub struct Session {
    /// Its file.
    pub node: Node,
    /// The endpoint's id.
    pub endpoint: u32,
    /// What attaching told.
    pub attached: pcieipc_attach,
    /// The status page.
    pub status: Mapping,
}

impl Session {
    /// Attaches to the `index`-th endpoint.
    pub fn nth(index: usize) -> Self {
        let node = Node::open(OFlag::empty());
        let endpoint = node.endpoints()[index];
        Self::on(node, endpoint)
    }

    /// Attaches to the `index`-th endpoint.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn try_nth(index: usize) -> Result<Self, Errno> {
        let node = Node::open(OFlag::empty());
        let endpoint = *node.endpoints().get(index).ok_or(Errno::ENOENT)?;
        let attached = node.attach(endpoint, 0)?;
        let status = node.map(attached.status_offset, PAGE, ProtFlags::PROT_READ)?;
        Ok(Self { node, endpoint, attached, status })
    }

    /// Attaches.
    pub fn on(node: Node, endpoint: u32) -> Self {
        let attached = node.attach(endpoint, 0).unwrap_or_else(|error| panic!("attach to {endpoint}: {error}"));
        let status =
            node.map(attached.status_offset, PAGE, ProtFlags::PROT_READ).unwrap_or_else(|error| panic!("status: {error}"));
        Self { node, endpoint, attached, status }
    }

    /// State and generation by the status page.
    pub fn state(&self) -> (u32, u64) {
        let word = self.status.load(0);
        ((word & 0xff) as u32, word >> 8)
    }

    /// Its endpoint.
    pub fn info(&self) -> pcieipc_endpoint_info {
        self.node.info(self.endpoint).unwrap_or_else(|error| panic!("info: {error}"))
    }

    /// The PCI function.
    pub fn function(&self) -> Function {
        Function::at(self.info().address)
    }

    /// A channel that this session reads.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn create(&self, data_bytes: u64, vector: u32) -> Result<Channel<'_>, Errno> {
        let mut made = pcieipc_channel_create { data_bytes, vector, ..Record::new() };
        self.node.call(number::CHANNEL_CREATE, &mut made)?;
        Ok(Channel { session: self, made })
    }

    /// Sends a vector's interrupts to a new non-blocking eventfd.
    pub fn eventfd(&self, vector: u32) -> EventFd {
        let eventfd =
            EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).unwrap_or_else(|error| panic!("{error}"));
        self.set_eventfd(vector, eventfd.as_fd().as_raw_fd(), 0).unwrap_or_else(|error| panic!("vector {vector}: {error}"));
        eventfd
    }

    /// Sets a vector's eventfd.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn set_eventfd(&self, vector: u32, fd: i32, flags: u32) -> Result<(), Errno> {
        self.node.call(number::VECTOR_EVENTFD, &mut pcieipc_vector_eventfd { flags, vector, fd, ..Record::new() })
    }

    /// Rings a doorbell of its own endpoint.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn ring(&self, vector: u32) -> Result<(), Errno> {
        self.node.call(number::RING, &mut pcieipc_ring { vector, ..Record::new() })
    }

    /// What has become of it.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn session_state(&self) -> Result<pcieipc_session_state, Errno> {
        let mut state = pcieipc_session_state::new();
        self.node.call(number::STATE, &mut state).map(|()| state)
    }
}

/// A channel that a session reads.
#[derive(Debug)]
pub struct Channel<'a> {
    session: &'a Session,
    /// What creating told.
    pub made: pcieipc_channel_create,
}

impl Channel<'_> {
    /// Its id.
    pub fn id(&self) -> u32 {
        self.made.channel
    }

    /// The data, read-only.
    pub fn data(&self) -> Mapping {
        self.map(self.made.data_offset, self.made.data_bytes as usize, ProtFlags::PROT_READ)
    }

    /// The writer's page, read-only.
    pub fn tail(&self) -> Mapping {
        self.map(self.made.tail_offset, PAGE, ProtFlags::PROT_READ)
    }

    /// The reader's page.
    pub fn head(&self) -> Mapping {
        self.map(self.made.head_offset, PAGE, READ_WRITE)
    }

    fn map(&self, offset: u64, len: usize, protection: ProtFlags) -> Mapping {
        self.session.node.map(offset, len, protection).unwrap_or_else(|error| panic!("map {offset:#x}: {error}"))
    }

    /// The writer's descriptor.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn export(&self) -> Result<Export, Errno> {
        export(&self.session.node, self.id())
    }

    /// Destroys it.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn destroy(&self) -> Result<(), Errno> {
        self.session.node.call(number::CHANNEL_DESTROY, &mut pcieipc_channel { channel: self.id(), ..Record::new() })
    }

    /// Tells the writer of freed space.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn freed(&self) -> Result<(), Errno> {
        self.session.node.call(number::CHANNEL_FREED, &mut pcieipc_channel { channel: self.id(), ..Record::new() })
    }
}

/// The writer's descriptor of a session's channel.
///
/// # Errors
/// The kernel's errno.
pub fn export(node: &Node, channel: u32) -> Result<Export, Errno> {
    let mut exported = pcieipc_channel_fd { channel, ..Record::new() };
    node.call(number::CHANNEL_EXPORT, &mut exported)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(Export(unsafe { OwnedFd::from_raw_fd(exported.fd) }))
}

/// The writer's descriptor of a channel.
#[derive(Debug)]
pub struct Export(pub OwnedFd);

impl Export {
    /// What it is.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn info(&self) -> Result<pcieipc_export_info, Errno> {
        let mut info = pcieipc_export_info::new();
        call(&self.0, number::EXPORT_INFO, &mut info).map(|()| info)
    }

    /// Maps data, tail, head and status, in that order.
    pub fn maps(&self) -> [Mapping; 4] {
        let info = self.info().unwrap_or_else(|error| panic!("export info: {error}"));
        let map = |offset, len, protection| {
            Mapping::new(&self.0, offset, len, protection).unwrap_or_else(|error| panic!("map export {offset:#x}: {error}"))
        };
        [
            map(info.data_offset, info.data_bytes as usize, READ_WRITE),
            map(info.tail_offset, PAGE, READ_WRITE),
            map(info.head_offset, PAGE, ProtFlags::PROT_READ),
            map(info.status_offset, PAGE, ProtFlags::PROT_READ),
        ]
    }

    /// Rings the reader.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn ring(&self) -> Result<(), Errno> {
        call(&self.0, number::EXPORT_RING, &mut pcieipc_ring::new())
    }

    /// What is signalled at freed space and at any end.
    pub fn eventfd(&self) -> EventFd {
        let eventfd =
            EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).unwrap_or_else(|error| panic!("{error}"));
        let mut set = pcieipc_export_eventfd { fd: eventfd.as_fd().as_raw_fd(), ..Record::new() };
        call(&self.0, number::EXPORT_EVENTFD, &mut set).unwrap_or_else(|error| panic!("export eventfd: {error}"));
        eventfd
    }
}

impl AsFd for Export {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// How often an eventfd was signalled since the last look, waiting up to `limit` for the first.
pub fn signals(eventfd: &EventFd, limit: Duration) -> u64 {
    match wait::polled(eventfd, PollFlags::POLLIN, limit).contains(PollFlags::POLLIN) {
        true => eventfd.read().unwrap_or_else(|error| panic!("eventfd: {error}")),
        false => 0,
    }
}

/// Asks the server that plays the endpoints.
pub fn softdev(request: &Value) -> Value {
    let mut host = Host::connect().unwrap_or_else(|error| panic!("{error}"));
    host.softdev(request).unwrap_or_else(|error| panic!("{request}: {error}"))
}

/// How the server that plays the endpoints sees the one with this serial number; its number there is under `endpoint`.
pub fn played(serial: u64) -> Value {
    let list = softdev(&json!({"cmd": "list"}));
    let found = list["endpoints"].as_array().and_then(|all| all.iter().find(|one| one["serial"] == serial));
    found.unwrap_or_else(|| panic!("no endpoint with serial {serial:#x} in {list}")).clone()
}

/// Waits until an endpoint with this serial number lives, and gives its id.
pub fn living(serial: u64) -> u32 {
    let node = Node::open(OFlag::empty());
    let mut found = None;
    let lives = |info: &pcieipc_endpoint_info| info.serial == serial && info.state == PCIEIPC_STATE_LIVE;
    wait::until(SOON, || {
        found = node.endpoints().into_iter().find(|&id| node.info(id).is_ok_and(|info| lives(&info)));
        found.is_some()
    });
    found.unwrap_or_else(|| panic!("no endpoint with serial {serial:#x} lives"))
}
