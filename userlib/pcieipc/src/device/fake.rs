// SPDX-License-Identifier: MIT OR Apache-2.0
//! A module in this process, as far as the library can tell: endpoints, channels in memory files, doorbells as eventfds.

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use nix::{
    errno::Errno,
    sys::{
        memfd::{MFdFlags, memfd_create},
        stat::fstat,
    },
};

use crate::{
    abi::*,
    sys::{Access, Bell, Call, Kernel, Mapping},
};

pub const PAGE: u64 = 4096;
pub const LIVE: u64 = 1;
pub const RECOVERING: u64 = 2;
pub const GONE: u64 = 4;

#[derive(Debug)]
pub struct FakeKernel {
    world: Mutex<World>,
}

#[derive(Debug)]
pub struct World {
    pub versions: (u32, u32),
    /// The next calls of these names fail so.
    pub fail: HashMap<&'static str, Errno>,
    /// Doorbells that raise nothing any more.
    pub deaf: bool,
    /// Engines flip a bit of what they copy.
    pub flips: bool,
    /// The endpoint, by index, whose engine finishes nothing.
    pub stuck: Option<usize>,
    /// The endpoint, by index, whose next channel is refused, as in the moment before a reset.
    pub refused: Option<usize>,
    /// Whose engine was to copy, and how long that might take, in milliseconds.
    pub copies: Vec<(usize, u32)>,
    pub calls: HashMap<&'static str, usize>,
    pub endpoints: Vec<Endpoint>,
    pub events: Vec<pcieipc_event>,
    /// What an exported channel says about its size, instead of the truth.
    pub claimed_bytes: Option<u64>,
    /// Where endpoints are said to be, by id; the others are all at one place.
    pub addresses: HashMap<u32, u32>,
    sessions: HashMap<u64, usize>,
    exports: HashMap<u64, (u64, u32)>,
    channels: HashMap<(u64, u32), Channel>,
    last_channel: u32,
}

#[derive(Debug)]
pub struct Endpoint {
    file: OwnedFd,
    page: Mapping,
    pub generation: u64,
    pub serial: u64,
    pub doorbells: u64,
    pub dma_bytes: u64,
    attached: Option<u64>,
    vectors: HashMap<u32, Bell>,
}

#[derive(Debug, Clone)]
struct Channel {
    endpoint: usize,
    vector: u32,
    bytes: u64,
    pieces: [Arc<OwnedFd>; 3],
    exported: bool,
    freed: Option<Arc<Bell>>,
    /// Of which it is the import.
    of: Option<(u64, u32)>,
}

fn memory(bytes: u64) -> OwnedFd {
    let file = memfd_create("fake", MFdFlags::MFD_CLOEXEC).unwrap();
    File::from(file.try_clone().unwrap()).set_len(bytes).unwrap();
    file
}

fn key(fd: BorrowedFd<'_>) -> u64 {
    fstat(fd).unwrap().st_ino
}

fn answer(errno: Errno) -> io::Error {
    errno.into()
}

impl FakeKernel {
    pub fn new(endpoints: usize) -> Arc<Self> {
        let endpoint = |i: usize| Endpoint::new(10 + i as u64, 100 + i as u64);
        Arc::new(Self {
            world: Mutex::new(World {
                versions: (1, 1),
                fail: HashMap::new(),
                deaf: false,
                flips: false,
                stuck: None,
                refused: None,
                copies: Vec::new(),
                calls: HashMap::new(),
                endpoints: (0..endpoints).map(endpoint).collect(),
                events: Vec::new(),
                claimed_bytes: None,
                addresses: HashMap::new(),
                sessions: HashMap::new(),
                exports: HashMap::new(),
                channels: HashMap::new(),
                last_channel: 0,
            }),
        })
    }

    pub fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    /// The endpoint is live again, in a new life.
    pub fn renew(&self, endpoint: usize) {
        self.world().endpoints[endpoint].generation += 100;
        self.set_state(endpoint, LIVE);
    }

    /// The device of an endpoint that is gone is put back: a new endpoint.
    pub fn put_back(&self, endpoint: usize) {
        let mut world = self.world();
        let (generation, serial) = (world.endpoints[endpoint].generation + 100, world.endpoints[endpoint].serial);
        world.endpoints.push(Endpoint::new(generation, serial));
    }

    /// What the kernel does when the process of an endpoint's session ends, but for the process.
    pub fn end_channels(&self, endpoint: usize) {
        self.world().channels.retain(|_, channel| channel.endpoint != endpoint || channel.of.is_some());
    }

    /// What the status page says of an endpoint's link.
    pub fn set_link(&self, endpoint: usize, speed: u32, width: u32) {
        let world = self.world();
        let at = std::mem::offset_of!(pcieipc_status, link);
        // SAFETY: the page is mapped and longer than the structure, whose field is aligned; readers load it as an atomic, too.
        let link = unsafe { AtomicU32::from_ptr(world.endpoints[endpoint].page.start().as_ptr().add(at).cast()) };
        link.store(speed | width << 8, Ordering::Relaxed);
    }

    /// Changes an endpoint's state: status first, then everybody is woken.
    pub fn set_state(&self, endpoint: usize, state: u64) {
        let world = self.world();
        world.endpoints[endpoint].store(state);
        world.endpoints[endpoint].vectors.values().for_each(|b| b.ring().unwrap());
        for channel in world.channels.values().filter(|c| c.endpoint == endpoint) {
            channel.freed.iter().for_each(|b| b.ring().unwrap());
        }
    }
}

impl Endpoint {
    fn new(generation: u64, serial: u64) -> Self {
        let file = memory(PAGE);
        let page = Mapping::new(file.as_fd(), 0, PAGE as usize, Access::ReadWrite).unwrap();
        let vectors = HashMap::new();
        let endpoint = Self { file, page, generation, serial, doorbells: 0, dma_bytes: 0, attached: None, vectors };
        endpoint.store(LIVE);
        endpoint
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: the page is mapped, aligned, and its first word is the status word.
        unsafe { AtomicU64::from_ptr(self.page.start().as_ptr().cast()) }
    }

    fn store(&self, state: u64) {
        self.word().store(self.generation << 8 | state, Ordering::Release);
    }

    fn check(&self) -> io::Result<()> {
        match self.word().load(Ordering::Acquire) & 0xff {
            LIVE => Ok(()),
            RECOVERING => Err(answer(Errno::EIO)),
            _ => Err(answer(Errno::ENODEV)),
        }
    }
}

impl World {
    fn own(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.sessions.get(&key(fd)).copied().ok_or_else(|| answer(Errno::ENOTCONN))
    }

    fn channel(&mut self, session: u64, id: u32) -> io::Result<&mut Channel> {
        self.channels.get_mut(&(session, id)).ok_or_else(|| answer(Errno::ENOENT))
    }

    fn export(&mut self, fd: BorrowedFd<'_>) -> io::Result<&mut Channel> {
        let (session, id) = *self.exports.get(&key(fd)).ok_or_else(|| answer(Errno::ENOTTY))?;
        self.channels.get_mut(&(session, id)).ok_or_else(|| answer(Errno::ENODEV))
    }

    fn execute(&mut self, fd: BorrowedFd<'_>, call: Call<'_>) -> io::Result<()> {
        match call {
            Call::Query(q) => {
                (q.version, q.oldest) = self.versions;
                (q.max_copy_bytes, q.max_channels, q.page_size) = (1 << 20, 256, PAGE as u32);
                if q.user_version < q.oldest || q.version < q.user_oldest {
                    return Err(answer(Errno::EPROTO));
                }
            }
            Call::EndpointInfo(info) => {
                let endpoint =
                    self.endpoints.get((info.endpoint as usize).wrapping_sub(1)).ok_or_else(|| answer(Errno::ENOENT))?;
                info.state = (endpoint.word().load(Ordering::Acquire) & 0xff) as u32;
                (info.generation, info.vectors, info.serial) = (endpoint.generation, 7, endpoint.serial);
                let address = self.addresses.get(&info.endpoint).copied().unwrap_or(0x0001_0318);
                (info.address, info.numa_node, info.iommu_group) = (address, -1, 5);
                info.ep_flags = PCIEIPC_EP_DMA_ENGINE;
                (info.doorbells, info.dma_bytes) = (endpoint.doorbells, endpoint.dma_bytes);
            }
            Call::Attach(a) => {
                let index = (a.endpoint as usize).wrapping_sub(1);
                let endpoint = self.endpoints.get_mut(index).ok_or_else(|| answer(Errno::ENOENT))?;
                if endpoint.attached.is_some() {
                    return Err(answer(Errno::EBUSY));
                }
                endpoint.check()?;
                endpoint.attached = Some(key(fd));
                (a.generation, a.status_offset) = (endpoint.generation, 3 * PAGE);
                self.sessions.insert(key(fd), index);
            }
            Call::Recover(r) => {
                let own = self.own(fd)?;
                self.endpoints[own].check()?;
                r.generation = self.endpoints[own].generation;
            }
            Call::ChannelCreate(c) => {
                let endpoint = self.own(fd)?;
                self.endpoints[endpoint].check()?;
                if self.refused == Some(endpoint) {
                    self.refused = None;
                    return Err(answer(Errno::EIO));
                }
                self.last_channel += 1;
                c.channel = self.last_channel;
                c.segments = 1;
                let at = |area: u64| (u64::from(c.channel) * 4 + area) * PAGE;
                (c.data_offset, c.tail_offset, c.head_offset) = (at(0), at(1), at(2));
                let pieces = [memory(c.data_bytes), memory(PAGE), memory(PAGE)].map(Arc::new);
                let (vector, bytes) = (c.vector, c.data_bytes);
                let made = Channel { endpoint, vector, bytes, pieces, exported: false, freed: None, of: None };
                self.channels.insert((key(fd), c.channel), made);
            }
            Call::ChannelDestroy(c) => {
                self.channels.remove(&(key(fd), c.channel)).ok_or_else(|| answer(Errno::ENOENT))?;
            }
            Call::ChannelExport(c) => {
                let channel = self.channel(key(fd), c.channel)?;
                if std::mem::replace(&mut channel.exported, true) {
                    return Err(answer(Errno::EBUSY));
                }
                let exported = memory(PAGE);
                self.exports.insert(key(exported.as_fd()), (key(fd), c.channel));
                c.fd = std::os::fd::IntoRawFd::into_raw_fd(exported);
            }
            Call::ChannelImport(c) => {
                // SAFETY: the caller's own descriptor, open during the call.
                let exported = unsafe { BorrowedFd::borrow_raw(c.fd) };
                let of = self.exports.get(&key(exported)).copied();
                let imported = Channel { of, ..self.export(exported)?.clone() };
                self.last_channel += 1;
                c.channel = self.last_channel;
                self.channels.insert((key(fd), c.channel), imported);
            }
            Call::ChannelFreed(c) => {
                self.channel(key(fd), c.channel)?.freed.iter().for_each(|b| b.ring().unwrap());
            }
            Call::Copy(c) => {
                let own = self.own(fd)?;
                self.endpoints[own].check()?;
                self.copies.push((own, c.timeout_ms));
                let (from, to) = (self.channel(key(fd), c.from)?.clone(), self.channel(key(fd), c.to)?.clone());
                if to.of.is_some_and(|of| !self.channels.contains_key(&of)) {
                    return Err(answer(Errno::ENOENT));
                }
                if self.stuck == Some(own) {
                    return Err(answer(Errno::ETIMEDOUT));
                }
                let fits = |at: u64, channel: &Channel| at + u64::from(c.bytes) <= channel.bytes;
                if !fits(c.from_offset, &from) || !fits(c.to_offset, &to) {
                    return Err(answer(Errno::EINVAL));
                }
                let mut bytes = vec![0; c.bytes as usize];
                File::from(from.pieces[0].try_clone()?).read_exact_at(&mut bytes, c.from_offset)?;
                if let (true, Some(last)) = (self.flips, bytes.last_mut()) {
                    *last ^= 1;
                }
                File::from(to.pieces[0].try_clone()?).write_all_at(&bytes, c.to_offset)?;
                self.endpoints[own].dma_bytes += u64::from(c.bytes);
            }
            Call::VectorEventfd(v) => {
                let own = self.own(fd)?;
                // SAFETY: the caller's own descriptor, open during the call.
                let bell = unsafe { BorrowedFd::borrow_raw(v.fd) }.try_clone_to_owned()?;
                self.endpoints[own].vectors.insert(v.vector, Bell::from_peer(bell));
            }
            Call::ExportInfo(info) => {
                let claimed = self.claimed_bytes;
                let channel = self.export(fd)?.clone();
                info.endpoint = channel.endpoint as u32 + 1;
                info.generation = self.endpoints[channel.endpoint].generation;
                info.data_bytes = claimed.unwrap_or(channel.bytes);
                (info.data_offset, info.tail_offset, info.head_offset, info.status_offset) = (0, PAGE, 2 * PAGE, 3 * PAGE);
            }
            Call::ExportRing(_) => {
                let channel = self.export(fd)?.clone();
                let deaf = self.deaf;
                let endpoint = &mut self.endpoints[channel.endpoint];
                endpoint.check()?;
                endpoint.doorbells += 1;
                if !deaf {
                    endpoint.vectors.get(&channel.vector).iter().for_each(|b| b.ring().unwrap());
                }
            }
            Call::ExportEventfd(e) => {
                // SAFETY: the caller's own descriptor, open during the call.
                let bell = unsafe { BorrowedFd::borrow_raw(e.fd) }.try_clone_to_owned()?;
                self.export(fd)?.freed = Some(Arc::new(Bell::from_peer(bell)));
            }
            other => panic!("the fake has no {}", other.name()),
        }
        Ok(())
    }
}

impl Kernel for FakeKernel {
    fn open(&self, _node: &Path) -> io::Result<OwnedFd> {
        if let Some(errno) = self.world().fail.get("open") {
            return Err(answer(*errno));
        }
        Ok(memory(PAGE))
    }

    fn call(&self, fd: BorrowedFd<'_>, call: Call<'_>) -> io::Result<()> {
        let mut world = self.world();
        *world.calls.entry(call.name()).or_default() += 1;
        match world.fail.get(call.name()) {
            Some(errno) => Err(answer(*errno)),
            None => world.execute(fd, call),
        }
    }

    fn enumerate(&self, _fd: BorrowedFd<'_>, ids: &mut [u32]) -> io::Result<usize> {
        let count = self.world().endpoints.len();
        ids.iter_mut().zip(1..=count as u32).for_each(|(to, id)| *to = id);
        Ok(count)
    }

    fn map(&self, fd: BorrowedFd<'_>, offset: u64, bytes: usize, access: Access) -> io::Result<Mapping> {
        let mut world = self.world();
        let (page, area) = (offset / PAGE / 4, (offset / PAGE % 4) as usize);
        let session = world.sessions.contains_key(&key(fd));
        let may_write = if session { area == 2 } else { area < 2 };
        if access == Access::ReadWrite && !may_write {
            return Err(answer(Errno::EACCES));
        }
        let piece = if area == 3 {
            let endpoint = if session { world.own(fd)? } else { world.export(fd)?.endpoint };
            world.endpoints[endpoint].file.try_clone()?
        } else if session {
            world.channel(key(fd), page as u32)?.pieces[area].try_clone()?
        } else {
            world.export(fd)?.pieces[area].try_clone()?
        };
        debug_assert!(piece.as_raw_fd() >= 0);
        Mapping::new(piece.as_fd(), 0, bytes, access)
    }

    fn events(&self, _fd: BorrowedFd<'_>, events: &mut [pcieipc_event]) -> io::Result<usize> {
        let waiting: Vec<_> = self.world().events.drain(..).take(events.len()).collect();
        events[..waiting.len()].copy_from_slice(&waiting);
        Ok(waiting.len())
    }
}
