// SPDX-License-Identifier: GPL-2.0

//! A channel: a ring with one reader, who made it, and one writer, who got its descriptor.
//!
//! The kernel knows three areas, data, tail and head, and who may write which; what is in them is the users' business.

use crate::{
    bucket::Bucket, distance, endpoint::Endpoint, eventfd::EventFd, hardware::Source, inline, limits, mapping::Segment,
    memory::Pages, mmap, profile::Engine, window::Window,
};
use kernel::{
    bindings,
    fs::File,
    new_mutex, new_spinlock_irq,
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full, Relaxed, Release},
        poll::{PollCondVarBox, PollTable},
        Arc, Mutex, SpinLockIrq,
    },
};

/// Most imports of one channel: with its own endpoint's there are eight mappings of its pages, which is what the DMA API's debugging can count.
const IMPORTS: usize = 7;

/// Endpoints of others for whose engines the data area is mapped.
struct Importers {
    open: bool,
    list: KVec<(Arc<Endpoint>, u64)>,
}

/// Where a channel's data area is.
#[derive(Clone)]
pub(crate) enum Data {
    /// In host memory, which outlives the device.
    Host(Arc<Pages>),
    /// In the endpoint's own memory.
    Device(Arc<Window>),
}

impl Data {
    /// Its size.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Host(pages) => pages.bytes(),
            Self::Device(window) => window.bytes,
        }
    }

    /// What its own endpoint's engine is told.
    fn own(&self) -> Source<'_> {
        match self {
            Self::Host(pages) => Source::Pages(pages),
            Self::Device(window) => Source::Own(Segment { address: window.start, bytes: window.bytes }),
        }
    }

    /// Maps it into a new VMA.
    ///
    /// # Errors
    ///
    /// As [`mmap::map`] and [`Window::map`].
    ///
    /// # Safety
    ///
    /// As [`mmap::map`].
    pub(crate) unsafe fn map(&self, vma: *mut bindings::vm_area_struct, first: usize, writable: bool) -> Result {
        // SAFETY: By the requirements of this function.
        unsafe {
            match self {
                Self::Host(pages) => mmap::map(vma, pages, first, writable),
                Self::Device(window) => window.map(vma, writable),
            }
        }
    }
}

/// See the module's documentation.
#[pin_data]
pub(crate) struct Channel {
    /// Id within the session, and in the endpoint's ring table.
    pub(crate) id: u32,
    /// Vector that wakes the reader.
    pub(crate) vector: u32,
    /// The reader's endpoint.
    pub(crate) endpoint: Arc<Endpoint>,
    /// The data area.
    pub(crate) data: Data,
    /// The writer's page.
    pub(crate) tail: Arc<Pages>,
    /// The reader's page.
    pub(crate) head: Arc<Pages>,
    /// The data area's DMA mapping at the reader's endpoint.
    pub(crate) key: u64,
    /// Its pieces.
    pub(crate) segments: u32,
    /// The reader's generation.
    generation: Atomic<u64>,
    /// 1 while a descriptor is out.
    exported: Atomic<u32>,
    /// How often room was given back.
    freed: Atomic<u64>,
    waiters: PollCondVarBox,
    #[pin]
    writer: SpinLockIrq<Option<EventFd>>,
    #[pin]
    importers: Mutex<Importers>,
    closed: Atomic<u32>,
    /// Limits the rings through the descriptor.
    bucket: Bucket,
}

impl Channel {
    /// Makes a channel on `endpoint`, mapped for it and listed with it.
    ///
    /// # Errors
    ///
    /// As [`Pages::charged`] and [`Endpoint::map`].
    pub(crate) fn new(
        endpoint: &Arc<Endpoint>,
        generation: u64,
        id: u32,
        vector: u32,
        data_bytes: u64,
        device_memory: bool,
    ) -> Result<Arc<Self>> {
        let node = endpoint.identity.numa_node;
        let data = if device_memory {
            Data::Device(Window::new(endpoint, generation, data_bytes)?)
        } else {
            Data::Host(Pages::charged((data_bytes / PAGE_SIZE as u64) as usize, node)?)
        };
        let tail = Pages::charged(1, node)?;
        let head = Pages::charged(1, node)?;
        let waiters = PollCondVarBox::new(c"pcieipc_writer", kernel::static_lock_class!())?;
        let (key, segments) = endpoint.map(data.own(), generation, (id & 0x7fff) << 16)?;
        let channel = Arc::pin_init(
            pin_init!(Self {
                id,
                vector,
                endpoint: endpoint.clone(),
                data,
                tail,
                head,
                key,
                segments,
                generation: Atomic::new(generation),
                exported: Atomic::new(0),
                freed: Atomic::new(0),
                waiters,
                writer <- new_spinlock_irq!(None, "pcieipc_writer"),
                importers <- new_mutex!(Importers { open: true, list: KVec::new() }, "pcieipc_importers"),
                closed: Atomic::new(0),
                bucket: Bucket::new(),
            }),
            GFP_KERNEL_ACCOUNT,
        )
        .inspect_err(|_| endpoint.unmap(key))?;
        endpoint.adopt(&channel).inspect_err(|_| endpoint.unmap(key))?;
        Ok(channel)
    }

    /// Pages that its maker is charged for.
    pub(crate) fn charged_bytes(&self) -> u64 {
        // Device memory has a page that takes its place when the device is gone.
        let data = if self.is_device_memory() { PAGE_SIZE as u64 } else { self.data.bytes() };
        data + self.tail.bytes() + self.head.bytes()
    }

    /// Drivers that import its data area, where that is device memory, may map it or have let go of it when this returns.
    pub(crate) fn tell_importers(&self) {
        if let Data::Device(window) = &self.data {
            window.tell_importers();
        }
    }

    /// Whether the data area is in the endpoint's own memory.
    pub(crate) fn is_device_memory(&self) -> bool {
        matches!(self.data, Data::Device(_))
    }

    /// The generation of the reader's session.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Acquire)
    }

    /// The reader goes on in a new generation. Importers are told by [`Channel::tell_importers`], which may wait for them.
    pub(crate) fn recover(&self, generation: u64) {
        self.generation.store(generation, Release);
        if let Data::Device(window) = &self.data {
            window.set_generation(generation);
        }
        self.wake_writer();
    }

    /// Whether the reader destroyed it or went away.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Acquire) != 0
    }

    /// Whether the writer may go on.
    ///
    /// # Errors
    ///
    /// `ENODEV` when the reader or its endpoint is gone, and what the endpoint's state says.
    pub(crate) fn check(&self) -> Result {
        if self.is_closed() {
            return Err(ENODEV);
        }
        self.endpoint.status.check(self.generation())
    }

    /// Takes the right to have the one descriptor.
    ///
    /// # Errors
    ///
    /// `EBUSY` when it is out.
    pub(crate) fn take_export(&self) -> Result {
        match self.exported.cmpxchg(0, 1, Full) {
            Ok(_) => Ok(()),
            Err(_) => Err(EBUSY),
        }
    }

    /// The descriptor was closed everywhere.
    pub(crate) fn drop_export(&self) {
        drop(self.set_writer(None));
        self.exported.store(0, Release);
    }

    /// Sets the writer's eventfd; the old one is returned to be dropped without the lock.
    pub(crate) fn set_writer(&self, eventfd: Option<EventFd>) -> Option<EventFd> {
        core::mem::replace(&mut *self.writer.lock(), eventfd)
    }

    /// The reader gave room back.
    pub(crate) fn give_room(&self) {
        self.freed.add(1, Relaxed);
        self.wake_writer();
    }

    /// How often room was given back.
    pub(crate) fn freed(&self) -> u64 {
        self.freed.load(Relaxed)
    }

    /// Wakes the writer, in poll and by its eventfd.
    pub(crate) fn wake_writer(&self) {
        self.waiters.notify_all();
        if let Some(eventfd) = &*self.writer.lock() {
            eventfd.signal();
        }
    }

    /// Registers a writer that polls.
    pub(crate) fn register(&self, table: &PollTable<'_>, file: &File) {
        table.register_wait(file, &self.waiters);
    }

    /// Counts one ring of the reader, by whichever way, against what this channel's writers may.
    ///
    /// # Errors
    ///
    /// `EAGAIN` over the rate limit.
    pub(crate) fn take_ring(&self) -> Result {
        self.bucket.take(limits::doorbells_per_second())
    }

    /// The writer rings the reader.
    ///
    /// # Errors
    ///
    /// As [`Channel::check`]; `EAGAIN` over the rate limit.
    pub(crate) fn ring(&self) -> Result {
        self.check()?;
        self.take_ring()?;
        if self.is_device_memory() {
            // What was stored through a write-combining mapping goes first.
            inline::wmb();
        }
        self.endpoint.ring(self.vector, self.generation())
    }

    /// Maps the data area for another endpoint's engine too.
    ///
    /// # Errors
    ///
    /// As [`Endpoint::map`]; `ENODEV` when the channel is closed; `EOPNOTSUPP` for device memory that the engine does not reach directly; `ENOSPC` when it
    /// has been imported too often.
    pub(crate) fn import(&self, endpoint: &Arc<Endpoint>, generation: u64, id: u32) -> Result<u64> {
        let source = match &self.data {
            Data::Device(window) if !Arc::ptr_eq(endpoint, &self.endpoint) => {
                if endpoint.profile.engine != Engine::Soft {
                    return Err(EOPNOTSUPP);
                }
                distance::check_direct(endpoint, &self.endpoint)?;
                Source::Peer(Segment { address: window.bus_address(), bytes: window.bytes })
            }
            data => data.own(),
        };
        let mut importers = self.importers.lock();
        if !importers.open {
            return Err(ENODEV);
        }
        if importers.list.len() >= IMPORTS {
            limits::say(|| pr_info!("refused an import: the channel has {IMPORTS} already\n"));
            return Err(ENOSPC);
        }
        importers.list.reserve(1, GFP_KERNEL)?;
        let tag = crate::hardware::FOREIGN | (id & 0x7fff) << 16;
        let (key, _) = endpoint.map(source, generation, tag)?;
        // Cannot fail, room was reserved.
        let _ = importers.list.push((endpoint.clone(), key), GFP_KERNEL);
        Ok(key)
    }

    /// Takes an import back.
    pub(crate) fn unimport(&self, endpoint: &Arc<Endpoint>, key: u64) {
        let mut importers = self.importers.lock();
        let index = importers.list.iter().position(|(other, other_key)| *other_key == key && Arc::ptr_eq(other, endpoint));
        let entry = index.and_then(|index| importers.list.remove(index).ok());
        // Under the lock, so that the unbind of our endpoint, which looks at the list, does not overtake this.
        endpoint.unmap(key);
        drop(importers);
        drop(entry);
    }

    /// Engines of other endpoints that reach the device of this one stop: they ring the reader, or use a data area in device memory.
    /// None begins anew, because the endpoint said before that it does not live.
    pub(crate) fn stop_peers(&self) {
        // Whatever generation: why no session may use it now.
        let why = self.endpoint.status.check(0).err().unwrap_or(ENODEV);
        let importers = self.importers.lock();
        for (endpoint, key) in importers.list.iter() {
            endpoint.stop_using(*key, self.is_device_memory(), why);
        }
    }

    /// No engine of another endpoint reaches the data area any more, and none will.
    pub(crate) fn drop_importers(&self) {
        let mut importers = self.importers.lock();
        importers.open = false;
        let list = core::mem::replace(&mut importers.list, KVec::new());
        for (endpoint, key) in list.iter() {
            endpoint.unmap(*key);
        }
        drop(importers);
        drop(list);
    }

    /// The reader destroys it: no device reaches its memory any more; users keep what they mapped.
    pub(crate) fn close(self: &Arc<Self>) {
        if self.closed.cmpxchg(0, 1, Full).is_err() {
            return;
        }
        // The writer may have mapped doorbells, which were its own as long as it was the channel's.
        self.endpoint.zap_bells();
        self.drop_importers();
        // While it is listed, because an unbind in between asks only those that are to let go of the memory.
        if let Data::Device(window) = &self.data {
            window.set_generation(0);
            window.tell_importers();
        }
        self.endpoint.disown(self);
        self.wake_writer();
    }
}
