// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls at random, by threads that share sessions and descriptors: mostly well-formed, so that many succeed, often not.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use guest::{
    abi::*,
    call::{Record, raw, request},
    forms::{Fence, forms},
    mapping::{Mapping, PAGE},
    random::Random,
    session::Node,
    tally::{Call, Tally},
    wait,
};
use nix::{
    errno::Errno,
    fcntl::OFlag,
    poll::PollFlags,
    sys::{
        eventfd::{EfdFlags, EventFd},
        mman::{MapFlags, MmapAdvise, ProtFlags, madvise},
    },
};

use crate::provoke::{ask, open_node, read};

const SESSIONS: usize = 3;
const CHANNELS: usize = 4;

/// A session and what is known of its channels; the numbers may be out of date.
struct Place {
    node: Node,
    endpoint: AtomicU32,
    channels: [AtomicU32; CHANNELS],
    /// Bells and status pages.
    offsets: [std::sync::atomic::AtomicU64; 3],
}

/// What the threads of one process share.
pub struct Pool {
    places: [RwLock<Option<Arc<Place>>>; SESSIONS],
    exports: [RwLock<Option<Arc<OwnedFd>>>; CHANNELS],
    eventfd: EventFd,
    over: AtomicBool,
}

impl Pool {
    /// Nothing open.
    pub fn new() -> Self {
        let eventfd = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap_or_else(|error| panic!("eventfd: {error}"));
        Self {
            places: [const { RwLock::new(None) }; SESSIONS],
            exports: [const { RwLock::new(None) }; CHANNELS],
            eventfd,
            over: AtomicBool::new(false),
        }
    }

    /// The threads end soon.
    pub fn end(&self) {
        self.over.store(true, Relaxed);
    }
}

fn get<T>(place: &RwLock<Option<Arc<T>>>) -> Option<Arc<T>> {
    place.read().ok()?.clone()
}

fn put<T>(place: &RwLock<Option<Arc<T>>>, value: Option<Arc<T>>) {
    let old = place.write().map(|mut place| std::mem::replace(&mut *place, value));
    drop(old);
}

/// One thread's play.
pub fn play(tally: &Tally, pool: &Pool, mut random: Random) {
    let (fence, node) = (Fence::new(), Node::open(OFlag::O_NONBLOCK));
    let mut player = Player { tally, pool, random: &mut random, fence: &fence, all: &node };
    while !pool.over.load(Relaxed) {
        player.turn();
    }
}

struct Player<'a> {
    tally: &'a Tally,
    pool: &'a Pool,
    random: &'a mut Random,
    fence: &'a Fence,
    /// Attached to nothing.
    all: &'a Node,
}

impl Player<'_> {
    fn turn(&mut self) {
        let index = self.random.below(SESSIONS as u64) as usize;
        let Some(place) = get(&self.pool.places[index]) else {
            self.open(index);
            return;
        };
        if self.random.one_in(2000) {
            put(&self.pool.places[index], None);
            return;
        }
        let outcome = match self.random.below(100) {
            0..72 => self.cheap(&place),
            72..80 => self.on_export(),
            80..88 => self.costly(&place),
            88..97 => self.mangled(&place),
            _ => self.mapping(&place),
        };
        match outcome {
            Err(Errno::ESTALE) if self.random.one_in(2) => {
                let _ = ask(self.tally, &place.node, Call::RECOVER, &mut pcieipc_recover::new());
            }
            // Often enough to go on soon, seldom enough to go on with a session that is over.
            Err(Errno::ENODEV | Errno::ENOTCONN) if self.random.one_in(8) => put(&self.pool.places[index], None),
            _ => {}
        }
    }

    fn an_endpoint(&mut self) -> u32 {
        let ids = self.all.endpoints();
        if ids.is_empty() || self.random.one_in(50) { self.random.bits() as u32 } else { self.random.of_these(&ids) }
    }

    fn a_channel(&mut self, place: &Place) -> u32 {
        let slot = self.random.below(CHANNELS as u64) as usize;
        if self.random.one_in(30) { self.random.below(40) as u32 } else { place.channels[slot].load(Relaxed) }
    }

    fn open(&mut self, index: usize) {
        let Ok(node) = open_node(self.tally, "/dev/pcieipc") else { return };
        let place = Place {
            node,
            endpoint: AtomicU32::new(self.an_endpoint()),
            channels: Default::default(),
            offsets: Default::default(),
        };
        self.attach(&place);
        put(&self.pool.places[index], Some(Arc::new(place)));
    }

    fn attach(&mut self, place: &Place) {
        // Whichever is free; not all are taken by one process.
        for _ in 0..4 {
            let endpoint = self.an_endpoint();
            let mut attach = pcieipc_attach { endpoint, ..Record::new() };
            if ask(self.tally, &place.node, Call::ATTACH, &mut attach).is_ok() {
                place.endpoint.store(endpoint, Relaxed);
                place.offsets[0].store(attach.status_offset, Relaxed);
                for slot in 0..2 {
                    let _ = self.create(place, slot);
                }
                return;
            }
        }
    }

    fn create(&mut self, place: &Place, slot: usize) -> Result<(), Errno> {
        let mut create = pcieipc_channel_create {
            data_bytes: (PAGE as u64) << self.random.below(5),
            vector: self.random.below(8) as u32,
            flags: u32::from(self.random.one_in(6)) * PCIEIPC_CHANNEL_DEVICE_MEMORY,
            ..Record::new()
        };
        ask(self.tally, &place.node, Call::CHANNEL_CREATE, &mut create)?;
        let old = place.channels[slot].swap(create.channel, Relaxed);
        place.offsets[1].store(create.data_offset, Relaxed);
        if old != 0 {
            let _ = ask(self.tally, &place.node, Call::CHANNEL_DESTROY, &mut pcieipc_channel { channel: old, ..Record::new() });
        }
        Ok(())
    }

    /// Calls that only look, or change little.
    fn cheap(&mut self, place: &Place) -> Result<(), Errno> {
        let (tally, node) = (self.tally, &place.node);
        let own = place.endpoint.load(Relaxed);
        // A session without an endpoint is seldom asked what needs one.
        let attached = place.offsets[0].load(Relaxed) != 0 || self.random.one_in(8);
        match self.random.below(if attached { 24 } else { 9 }) {
            0 | 1 => {
                let query = pcieipc_query { user_version: self.random.below(8) as u32, user_oldest: 1, ..Record::new() };
                ask(tally, node, Call::QUERY, &mut { query })
            }
            2 | 3 => {
                let mut ids = [0u32; 8];
                let list =
                    pcieipc_enumerate { ids: ids.as_mut_ptr() as u64, count: self.random.below(9) as u32, ..Record::new() };
                ask(tally, node, Call::ENUMERATE, &mut { list })
            }
            4..8 => ask(tally, node, Call::ENDPOINT_INFO, &mut pcieipc_endpoint_info { endpoint: own, ..Record::new() }),
            8 => {
                let to = self.an_endpoint();
                ask(tally, node, Call::DISTANCE, &mut pcieipc_distance { from: own, to, ..Record::new() })
            }
            9..14 => ask(tally, node, Call::STATE, &mut pcieipc_session_state::new()),
            14..17 => {
                let channel = self.a_channel(place);
                ask(tally, node, Call::CHANNEL_FREED, &mut pcieipc_channel { channel, ..Record::new() })
            }
            17 | 18 => {
                let fd = self.random.of_these(&[self.pool.eventfd.as_fd().as_raw_fd(), -1, -2, -2]);
                let (vector, flags) = (self.random.below(8) as u32, self.random.below(2) as u32);
                ask(tally, node, Call::VECTOR_EVENTFD, &mut pcieipc_vector_eventfd { flags, vector, fd, ..Record::new() })
            }
            19 => {
                let mut bell = pcieipc_doorbell { vector: self.random.below(8) as u32, ..Record::new() };
                let outcome = ask(tally, node, Call::DOORBELL_MAP, &mut bell);
                place.offsets[2].store(bell.map_offset, Relaxed);
                outcome
            }
            20 | 21 => {
                let polled = wait::polled(node, PollFlags::POLLIN, Duration::ZERO);
                tally.add(Call::POLL, Ok(()))?;
                if !polled.contains(PollFlags::POLLIN) && !self.random.one_in(16) {
                    return Ok(());
                }
                let mut records = [0u8; 256];
                let len = self.random.of_these(&[63, 64, 65, 192, 256]);
                read(tally, node, records.as_mut_ptr().cast(), len)
            }
            22 => ask(tally, node, Call::RING, &mut pcieipc_ring { vector: self.random.below(8) as u32, ..Record::new() }),
            _ => ask(tally, node, Call::RECOVER, &mut pcieipc_recover::new()),
        }
    }

    fn on_export(&mut self) -> Result<(), Errno> {
        let slot = self.random.below(CHANNELS as u64) as usize;
        let Some(export) = get(&self.pool.exports[slot]) else { return Ok(()) };
        let tally = self.tally;
        match self.random.below(12) {
            0..5 => ask(tally, &*export, Call::EXPORT_INFO, &mut pcieipc_export_info::new()),
            5 | 6 => ask(tally, &*export, Call::EXPORT_RING, &mut pcieipc_ring::new()),
            7 | 8 => {
                let fd = self.random.of_these(&[self.pool.eventfd.as_fd().as_raw_fd(), -1]);
                ask(tally, &*export, Call::EXPORT_EVENTFD, &mut pcieipc_export_eventfd { fd, ..Record::new() })
            }
            9 => ask(tally, &*export, Call::EXPORT_DOORBELL, &mut pcieipc_doorbell::new()),
            10 => {
                wait::polled(&*export, PollFlags::POLLOUT, Duration::ZERO);
                tally.add(Call::POLL, Ok(()))
            }
            _ => {
                // Where the writer's areas are is in its answer.
                let mut info = pcieipc_export_info::new();
                ask(tally, &*export, Call::EXPORT_INFO, &mut info)?;
                let offset = self.random.of_these(&[info.data_offset, info.tail_offset, info.head_offset, info.status_offset]);
                self.map(export.as_fd(), offset)
            }
        }
        // What an exported descriptor answers says nothing of the session that was chosen.
        .or(Ok(()))
    }

    /// Calls that make, end or move something.
    fn costly(&mut self, place: &Place) -> Result<(), Errno> {
        let (tally, node) = (self.tally, &place.node);
        let channel = self.a_channel(place);
        match self.random.below(16) {
            0..3 => {
                let slot = self.random.below(CHANNELS as u64) as usize;
                self.create(place, slot)
            }
            3 => ask(tally, node, Call::CHANNEL_DESTROY, &mut pcieipc_channel { channel, ..Record::new() }),
            4..8 => {
                let mut out = pcieipc_channel_fd { channel, ..Record::new() };
                ask(tally, node, Call::CHANNEL_EXPORT, &mut out)?;
                // SAFETY: the kernel has just made this descriptor for us.
                let export = unsafe { OwnedFd::from_raw_fd(out.fd) };
                put(&self.pool.exports[self.random.below(CHANNELS as u64) as usize], Some(Arc::new(export)));
                Ok(())
            }
            8..10 => {
                let export = get(&self.pool.exports[self.random.below(CHANNELS as u64) as usize]);
                let fd = export.as_ref().map_or(-1, |export| export.as_raw_fd());
                let mut import = pcieipc_channel_fd { fd, ..Record::new() };
                ask(tally, node, Call::CHANNEL_IMPORT, &mut import)?;
                place.channels[self.random.below(CHANNELS as u64) as usize].store(import.channel, Relaxed);
                Ok(())
            }
            10..13 => {
                let copy = pcieipc_copy {
                    from: channel,
                    to: self.a_channel(place),
                    from_offset: self.random.below(64),
                    to_offset: self.random.below(5000),
                    bytes: self.random.below(4096) as u32,
                    timeout_ms: self.random.below(200) as u32,
                    flags: u32::from(self.random.one_in(4)) * PCIEIPC_COPY_RING,
                    ..Record::new()
                };
                ask(tally, node, Call::COPY, &mut { copy })
            }
            13 => {
                self.attach(place);
                Ok(())
            }
            14 if !self.random.one_in(4) => {
                let mut share = pcieipc_channel_fd { channel, ..Record::new() };
                ask(tally, node, Call::CHANNEL_DMABUF, &mut share)?;
                // SAFETY: the kernel has just made this descriptor for us.
                drop(unsafe { OwnedFd::from_raw_fd(share.fd) });
                Ok(())
            }
            14 if self.random.one_in(2) => {
                let action = self.random.of_these(&[PCIEIPC_ADMIN_RESET, PCIEIPC_ADMIN_RESCAN]);
                ask(tally, node, Call::ADMIN, &mut pcieipc_admin { action, endpoint: self.an_endpoint(), ..Record::new() })
                    .or(Ok(()))
            }
            _ => {
                put(&self.pool.exports[self.random.below(CHANNELS as u64) as usize], None);
                Ok(())
            }
        }
    }

    /// A call whose structure, size or address is wrong somewhere.
    fn mangled(&mut self, place: &Place) -> Result<(), Errno> {
        let forms = forms(place.endpoint.load(Relaxed), self.a_channel(place));
        let form = &forms[self.random.below(forms.len() as u64) as usize];
        let export = get(&self.pool.exports[self.random.below(CHANNELS as u64) as usize]);
        let fd = match &export {
            Some(export) if form.export != self.random.one_in(20) => export.as_fd(),
            _ => place.node.as_fd(),
        };
        let mut bytes = form.bytes.clone();
        match self.random.below(4) {
            0 => {
                let size = self.random.of_these(&[0, 1, 8, bytes.len() as u32 - 1, bytes.len() as u32 + 8, 4096, 4097, u32::MAX]);
                bytes[..4].copy_from_slice(&size.to_ne_bytes());
            }
            // Whatever the fields then say: but for where ENUMERATE writes, and what an administrator does.
            1 | 2 if ![Call::ENUMERATE, Call::ADMIN].contains(&Call::numbered(form.number)) => {
                for _ in 0..=self.random.below(3) {
                    let at = 4 + self.random.below(bytes.len() as u64 - 4) as usize;
                    bytes[at] = self.random.of_these(&[0, 1, 2, 4, 0x10, 0x7f, 0x80, 0xff]);
                }
            }
            _ => {
                let tail = self.random.of_these(&[1usize, 8, 64]);
                let longer = bytes.len() + tail;
                bytes.resize(longer, self.random.below(2) as u8);
                bytes[..4].copy_from_slice(&(longer as u32).to_ne_bytes());
            }
        }
        let nowhere =
            [std::ptr::null_mut(), std::ptr::without_provenance_mut(1 << 63), std::ptr::without_provenance_mut(usize::MAX - 7)];
        let address = if self.random.one_in(10) { self.random.of_these(&nowhere) } else { self.fence.end(&bytes) };
        let number = if self.random.one_in(30) { self.random.below(256) as u8 } else { form.number };
        if Call::numbered(number) != Call::numbered(form.number) && Call::numbered(number) != Call::UNKNOWN {
            return Ok(());
        }
        // A call that the descriptor does not have is an unknown one.
        let known = Call::numbered(number);
        let counted = if known.is_export() == is_export(fd, export.as_deref()) { known } else { Call::UNKNOWN };
        // SAFETY: what is written is at most the structure, and goes to the fence's page; where ENUMERATE writes is as the form says.
        let outcome = self.tally.add(counted, unsafe { raw(fd, request(number), address) });
        if outcome.is_ok() && [Call::CHANNEL_EXPORT, Call::CHANNEL_DMABUF].contains(&counted) {
            // The descriptor's number lies in the answer.
            // SAFETY: the fence holds the answer where the structure was, and the kernel has just made the descriptor.
            unsafe { drop(OwnedFd::from_raw_fd((*address.cast::<pcieipc_channel_fd>()).fd)) };
        }
        outcome
    }

    /// A range of offsets, right or wrong; what is mapped is touched and given back.
    fn mapping(&mut self, place: &Place) -> Result<(), Errno> {
        let offset = match self.random.below(8) {
            0 => u64::from(self.a_channel(place)) << 40 | self.random.below(8) << 36 | self.random.below(64) << 12,
            1 => self.random.bits() & 0x3fff_ffff_ffff_f000,
            2..4 => place.offsets[0].load(Relaxed),
            4 => place.offsets[2].load(Relaxed),
            _ => place.offsets[1].load(Relaxed),
        };
        self.map(place.node.as_fd(), offset)
    }

    fn map(&mut self, fd: BorrowedFd<'_>, offset: u64) -> Result<(), Errno> {
        let len = PAGE << self.random.below(3);
        let read = ProtFlags::PROT_READ;
        let write = read | ProtFlags::PROT_WRITE;
        let protection = self.random.of_these(&[read, read, write, write, read | ProtFlags::PROT_EXEC]);
        let flags = if self.random.one_in(10) { MapFlags::MAP_PRIVATE } else { MapFlags::MAP_SHARED };
        let mapping = self.tally.add(Call::MMAP, Mapping::with_flags(fd, offset, len, protection, flags))?;
        let at = self.random.below(len as u64 / 8) as usize * 8;
        mapping.load(at);
        // Doorbell pages and device memory take stores too; whatever is stored is only data.
        if protection.contains(ProtFlags::PROT_WRITE) {
            mapping.store32(at, 1);
        }
        if self.random.one_in(4) {
            // SAFETY: the range is this mapping; nothing refers into it.
            let _ = unsafe { madvise(mapping.address(), mapping.len(), MmapAdvise::MADV_DONTNEED) };
            mapping.load(at);
        }
        Ok(())
    }
}

fn is_export(fd: BorrowedFd<'_>, export: Option<&OwnedFd>) -> bool {
    export.is_some_and(|export| export.as_raw_fd() == fd.as_raw_fd())
}
