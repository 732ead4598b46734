// SPDX-License-Identifier: GPL-2.0

//! A session: one open file of the node, attached to at most one endpoint, and owner of its channels.

use crate::{
    bell,
    bucket::Bucket,
    channel::Channel,
    endpoint::Endpoint,
    eventfd::EventFd,
    events::Queue,
    inline::checked_index,
    iommu, limits,
    mmap::{self, Area},
    registry,
    uapi::{self, state},
    window,
};
mod channels;

use kernel::{
    bindings, new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    seq_file::SeqFile,
    seq_print,
    sync::{
        atomic::{Acquire, Atomic, Relaxed, Release},
        Arc, Mutex, SetOnce,
    },
};

/// A channel that the session made or imported.
struct Entry {
    id: u32,
    channel: Arc<Channel>,
    /// Key of the data area's mapping at the session's endpoint.
    key: u64,
    own: bool,
}

/// What the session has; under its mutex, which is never held across user memory or a copy.
struct Table {
    entries: KVec<Entry>,
    next_id: u32,
    /// Bytes of the data areas of own channels.
    bytes: u64,
    /// Own and imported channels that are being made, counted against the limits.
    pending: u32,
}

/// See the module's documentation.
#[pin_data(PinnedDrop)]
pub(crate) struct Session {
    /// The process that opened it; only a name, held so that it is not given to another process.
    mm: *mut bindings::mm_struct,
    /// The one endpoint that it may see, for a session of an endpoint's node.
    only: Option<u32>,
    /// Its events.
    pub(crate) queue: Arc<Queue>,
    endpoint: SetOnce<Arc<Endpoint>>,
    generation: Atomic<u64>,
    doorbells: Atomic<u64>,
    bucket: Bucket,
    #[pin]
    table: Mutex<Table>,
}

// SAFETY: `mm` is only compared and dropped, which any thread may do.
unsafe impl Send for Session {}
// SAFETY: As above; the rest is synchronized by itself.
unsafe impl Sync for Session {}

impl Session {
    /// A session of the calling process, attached to nothing.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory, `ENOSPC` over the limit of sessions, `EPERM` for a kernel thread, `ENODEV` when the node's endpoint is gone.
    pub(crate) fn new(only: Option<u32>) -> Result<Arc<Self>> {
        if only.is_some_and(|id| registry::find(id).is_none()) {
            return Err(ENODEV);
        }
        let mm = current_mm();
        if mm.is_null() {
            return Err(EPERM);
        }
        let queue = Arc::pin_init(Queue::new(only)?, GFP_KERNEL_ACCOUNT)?;
        // SAFETY: The calling task's own `mm` is valid; the reference is given back in `drop`.
        unsafe { bindings::mmgrab(mm) };
        let session = Arc::pin_init(
            pin_init!(Self {
                mm,
                only,
                queue,
                endpoint: SetOnce::new(),
                generation: Atomic::new(0),
                doorbells: Atomic::new(0),
                bucket: Bucket::new(),
                table <- new_mutex!(
                    Table { entries: KVec::new(), next_id: 1, bytes: 0, pending: 0 },
                    "pcieipc_session"
                ),
            }),
            GFP_KERNEL_ACCOUNT,
        )
        .inspect_err(|_| {
            // SAFETY: Taken above, and the session that would give it back was not made.
            unsafe { bindings::mmdrop(mm) }
        })?;
        registry::listen(&session.queue)?;
        Ok(session)
    }

    /// Whether the session may know of an endpoint.
    pub(crate) fn may_see(&self, endpoint: u32) -> bool {
        self.only.is_none_or(|only| only == endpoint)
    }

    /// An endpoint that the session may know of.
    ///
    /// # Errors
    ///
    /// `ENOENT`.
    pub(crate) fn find_endpoint(&self, id: u32) -> Result<Arc<Endpoint>> {
        if !self.may_see(id) {
            return Err(ENOENT);
        }
        registry::find(id).ok_or(ENOENT)
    }

    /// Refuses what is for the node of all endpoints.
    ///
    /// # Errors
    ///
    /// `EPERM`.
    pub(crate) fn check_unrestricted(&self) -> Result {
        match self.only {
            None => Ok(()),
            Some(_) => Err(EPERM),
        }
    }

    /// Refuses calls from a process other than the one that opened the session.
    ///
    /// # Errors
    ///
    /// `EPERM`.
    pub(crate) fn check_caller(&self) -> Result {
        if current_mm() == self.mm {
            Ok(())
        } else {
            Err(EPERM)
        }
    }

    /// The endpoint.
    ///
    /// # Errors
    ///
    /// `ENOTCONN` when the session is not attached.
    pub(crate) fn endpoint(&self) -> Result<&Arc<Endpoint>> {
        self.endpoint.as_ref().ok_or(ENOTCONN)
    }

    /// The endpoint, if it may be used now.
    ///
    /// # Errors
    ///
    /// Also what the endpoint's state says.
    fn usable(&self) -> Result<(&Arc<Endpoint>, u64)> {
        let endpoint = self.endpoint()?;
        let generation = self.generation.load(Acquire);
        endpoint.status.check(generation)?;
        Ok((endpoint, generation))
    }

    /// Whether the endpoint is gone or dead, so that nothing more will come of it.
    pub(crate) fn is_over(&self) -> bool {
        self.endpoint().is_ok_and(|endpoint| matches!(endpoint.status.state(), state::DEAD | state::GONE))
    }

    /// Whether the endpoint is gone or dead and the event that tells it is in the queue: an end of file before that event
    /// would hide it.
    pub(crate) fn is_end_told(&self) -> bool {
        self.endpoint().is_ok_and(|endpoint| endpoint.end_told.load(Acquire) != 0)
    }

    /// ATTACH, up to where the caller has to be told.
    pub(crate) fn claim(&self, call: &mut uapi::pcieipc_attach) -> Result<Claim<'_>> {
        let endpoint = self.find_endpoint(call.endpoint)?;
        if self.endpoint.as_ref().is_some() {
            return Err(EBUSY);
        }
        let unsafe_because = iommu::may_attach(&endpoint)?;
        let generation = endpoint.claim(&self.queue, call.generation)?;
        call.vectors = endpoint.vectors.len() as u32;
        call.generation = generation;
        call.status_offset = Area::Status.offset(0);
        Ok(Claim { session: self, endpoint: Some(endpoint), generation, unsafe_because })
    }

    /// The own channel with the next greater number.
    fn next_own(&self, last: u32) -> Option<(u32, Arc<Channel>)> {
        let table = self.table.lock();
        let later = table.entries.iter().filter(|entry| entry.own && entry.id > last);
        later.min_by_key(|entry| entry.id).map(|entry| (entry.id, entry.channel.clone()))
    }

    /// RECOVER.
    pub(crate) fn recover(&self, call: &mut uapi::pcieipc_recover) -> Result {
        let endpoint = self.endpoint()?;
        // From the beginning, so that of two recoveries the later one tells the channels last.
        let table = self.table.lock();
        let generation = {
            let hardware = endpoint.hardware.lock();
            let generation = endpoint.status.generation();
            endpoint.status.check(generation)?;
            if generation != self.generation.load(Relaxed) {
                endpoint.program_all(&hardware)?;
            }
            self.generation.store(generation, Release);
            generation
        };
        for entry in table.entries.iter().filter(|entry| entry.own) {
            entry.channel.recover(generation);
        }
        drop(table);
        // Without the table, because drivers that import memory may take their time, and mmap() takes it. Whoever is told asks what is then, so
        // of two recoveries it does not matter who tells.
        let mut last = 0;
        while let Some((id, channel)) = self.next_own(last) {
            channel.tell_importers();
            last = id;
        }
        call.generation = generation;
        Ok(())
    }

    /// STATE.
    pub(crate) fn describe(&self, call: &mut uapi::pcieipc_session_state) -> Result {
        let endpoint = self.endpoint()?;
        let word = endpoint.status.word();
        call.endpoint = endpoint.id;
        call.state = uapi::status_state(word);
        call.generation = uapi::status_generation(word);
        call.attached_generation = self.generation.load(Acquire);
        call.doorbells = self.doorbells.load(Relaxed);
        call.events_lost = self.queue.lost();
        call.events = self.queue.waiting() as u32;
        let table = self.table.lock();
        call.channels = table.entries.len() as u32;
        let own = table.entries.iter().filter(|entry| entry.own);
        call.locked_bytes = own.map(|entry| entry.channel.charged_bytes()).sum();
        Ok(())
    }

    /// VECTOR_EVENTFD.
    pub(crate) fn set_eventfd(&self, call: &uapi::pcieipc_vector_eventfd) -> Result {
        if call.flags & !uapi::PCIEIPC_VECTOR_MASK != 0 || call.fd < -2 {
            return Err(EINVAL);
        }
        let endpoint = self.endpoint()?;
        let index = checked_index(call.vector, endpoint.vectors.len())?;
        let vector = endpoint.vectors.get(index).ok_or(EINVAL)?;
        if self.is_over() {
            return Err(ENODEV);
        }
        let eventfd = match call.fd {
            -2 => None,
            -1 => Some(None),
            fd => Some(Some(EventFd::from_fd(fd)?)),
        };
        drop(vector.direct(eventfd, call.flags & uapi::PCIEIPC_VECTOR_MASK != 0));
        // The change may have come, and have been told, before the eventfd was there.
        if call.fd >= 0 && endpoint.status.check(self.generation.load(Acquire)).is_err() {
            vector.wake();
        }
        Ok(())
    }

    /// RING.
    pub(crate) fn ring(&self, vector: u32) -> Result {
        let (endpoint, generation) = self.usable()?;
        self.bucket.take(limits::doorbells_per_second())?;
        endpoint.ring(vector, generation)?;
        self.doorbells.add(1, Relaxed);
        Ok(())
    }

    /// DOORBELL_MAP.
    pub(crate) fn bell(&self, call: &mut uapi::pcieipc_doorbell) -> Result {
        let (endpoint, _) = self.usable()?;
        bell::describe(endpoint, call.vector, call)
    }

    /// Tells about the session in its fdinfo, in the manner of DRM's usage statistics.
    pub(crate) fn show(&self, seq: &SeqFile) {
        seq_print!(seq, "pcieipc-abi:\t{}\n", uapi::PCIEIPC_ABI_VERSION);
        let Ok(endpoint) = self.endpoint() else {
            return;
        };
        endpoint.show_fdinfo(seq);
        let table = self.table.lock();
        let own = || table.entries.iter().filter(|entry| entry.own);
        let locked: u64 = own().map(|entry| entry.channel.charged_bytes()).sum();
        let (made, imported) = (own().count(), table.entries.len() - own().count());
        drop(table);
        seq_print!(seq, "pcieipc-attached-generation:\t{}\n", self.generation.load(Acquire));
        seq_print!(seq, "pcieipc-channels:\t{made}\n");
        seq_print!(seq, "pcieipc-imports:\t{imported}\n");
        seq_print!(seq, "pcieipc-memory-locked:\t{} KiB\n", locked >> 10);
        seq_print!(seq, "pcieipc-doorbells:\t{}\n", self.doorbells.load(Relaxed));
        seq_print!(seq, "pcieipc-events-waiting:\t{}\n", self.queue.waiting());
        seq_print!(seq, "pcieipc-events-lost:\t{}\n", self.queue.lost());
    }

    /// Maps what `page_offset` means.
    ///
    /// # Errors
    ///
    /// `ENOENT` when nothing is there, and those of [`mmap::map`].
    ///
    /// # Safety
    ///
    /// As [`mmap::map`].
    pub(crate) unsafe fn mmap(&self, vma: *mut bindings::vm_area_struct, page_offset: usize) -> Result {
        if bell::is_bell(page_offset) {
            let (endpoint, generation) = self.usable()?;
            // SAFETY: By the requirements of this function.
            return unsafe { bell::map(vma, endpoint, generation, None, page_offset) };
        }
        if window::is_window(page_offset) {
            let found = self.find_window(window::start_of(page_offset))?;
            // SAFETY: By the requirements of this function.
            return unsafe { found.map(vma, false) };
        }
        let (id, area, first) = mmap::decode(page_offset)?;
        if area == Area::Status && id == 0 {
            let endpoint = self.endpoint()?;
            // SAFETY: By the requirements of this function.
            return unsafe { mmap::map(vma, endpoint.status.pages(), first, false) };
        }
        let channel = self.find_own(id)?;
        let (pages, writable) = match area {
            // SAFETY: By the requirements of this function.
            Area::Data => return unsafe { channel.data.map(vma, first, false) },
            Area::Tail => (&channel.tail, false),
            Area::Head => (&channel.head, true),
            Area::Status => return Err(ENOENT),
        };
        // SAFETY: By the requirements of this function.
        unsafe { mmap::map(vma, pages, first, writable) }
    }

    /// The file was closed everywhere.
    pub(crate) fn close(&self) {
        registry::stop_listening(&self.queue);
        let entries = {
            let mut table = self.table.lock();
            table.bytes = 0;
            core::mem::replace(&mut table.entries, KVec::new())
        };
        if let Ok(endpoint) = self.endpoint() {
            for entry in entries.iter() {
                entry.end(endpoint);
            }
            endpoint.release();
        }
    }
}

/// An endpoint that a session has taken and is not attached to yet; dropped, it is free again.
pub(crate) struct Claim<'a> {
    session: &'a Session,
    endpoint: Option<Arc<Endpoint>>,
    generation: u64,
    /// What taints the kernel once it is attached.
    unsafe_because: Option<&'static str>,
}

impl Claim<'_> {
    /// Attaches the session.
    ///
    /// # Errors
    ///
    /// `EBUSY` when another thread attached it meanwhile.
    pub(crate) fn settle(mut self) -> Result {
        let session = self.session;
        let _table = session.table.lock();
        if session.endpoint.as_ref().is_some() {
            return Err(EBUSY);
        }
        if let Some(endpoint) = self.endpoint.take() {
            session.generation.store(self.generation, Release);
            session.queue.attach(endpoint.id);
            if let Some(reason) = self.unsafe_because {
                iommu::taint(&endpoint, reason);
            }
            // Cannot fail: the table is locked and it was empty above.
            let _ = session.endpoint.populate(endpoint);
        }
        Ok(())
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if let Some(endpoint) = self.endpoint.take() {
            endpoint.release();
        }
    }
}

impl Entry {
    /// Ends the channel, or the import of another session's.
    fn end(&self, endpoint: &Arc<Endpoint>) {
        if self.own {
            self.channel.close();
        } else {
            self.channel.unimport(endpoint, self.key);
        }
    }
}

#[pinned_drop]
impl PinnedDrop for Session {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: Gives back the reference that `new` took.
        unsafe { bindings::mmdrop(self.mm) };
    }
}

fn current_mm() -> *mut bindings::mm_struct {
    // SAFETY: The calling task is valid, and its `mm` is changed by itself only.
    unsafe { (*bindings::get_current()).mm }
}

/// QUERY.
pub(crate) fn query(call: &mut uapi::pcieipc_query) {
    call.version = uapi::PCIEIPC_ABI_VERSION;
    call.oldest = uapi::PCIEIPC_ABI_OLDEST;
    call.caps = crate::capabilities();
    call.max_channel_bytes = limits::channel_bytes();
    call.max_session_bytes = limits::session_bytes();
    call.max_total_bytes = limits::total_bytes();
    call.max_channels = limits::channels();
    call.max_copy_bytes = limits::COPY_BYTES;
    call.max_endpoints = limits::ENDPOINTS;
    call.event_queue = limits::event_queue() as u32;
    call.doorbells_per_second = limits::doorbells_per_second();
    call.page_size = PAGE_SIZE as u32;
    call.correctable_per_second = limits::correctable_per_second();
    call.link_sample_ms = limits::link_sample_ms();
    call.max_sessions = limits::sessions();
    call.storm_interrupts = limits::storm_interrupts();
}
