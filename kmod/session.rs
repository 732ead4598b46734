// SPDX-License-Identifier: GPL-2.0

//! A session: one open file of the node, attached to at most one endpoint, and owner of its channels.

use crate::{
    bell,
    bucket::Bucket,
    channel::{Channel, Data},
    distance,
    endpoint::Endpoint,
    engine,
    eventfd::EventFd,
    events::Queue,
    export::{self, Export},
    inline::checked_index,
    iommu, limits,
    mmap::{self, Area},
    profile::Engine,
    registry,
    uapi::{self, state},
    window::{self, Window},
};
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
    /// `ENOMEM` without memory, `EPERM` for a kernel thread, `ENODEV` when the node's endpoint is gone.
    pub(crate) fn new(only: Option<u32>) -> Result<Arc<Self>> {
        if only.is_some_and(|id| registry::find(id).is_none()) {
            return Err(ENODEV);
        }
        let mm = current_mm();
        if mm.is_null() {
            return Err(EPERM);
        }
        let queue = Arc::pin_init(Queue::new(only)?, GFP_KERNEL)?;
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
            GFP_KERNEL,
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

    /// ATTACH.
    pub(crate) fn attach(&self, call: &mut uapi::pcieipc_attach) -> Result {
        let endpoint = self.find_endpoint(call.endpoint)?;
        if self.endpoint.as_ref().is_some() {
            return Err(EBUSY);
        }
        iommu::may_attach(&endpoint)?;
        let generation = endpoint.claim(&self.queue, call.generation)?;
        let table = self.table.lock();
        if self.endpoint.as_ref().is_some() {
            drop(table);
            endpoint.release();
            return Err(EBUSY);
        }
        call.vectors = endpoint.vectors.len() as u32;
        call.generation = generation;
        call.status_offset = Area::Status.offset(0);
        self.generation.store(generation, Release);
        self.queue.attach(endpoint.id);
        // Cannot fail: `table` is locked and it was empty above.
        let _ = self.endpoint.populate(endpoint);
        drop(table);
        Ok(())
    }

    /// RECOVER.
    pub(crate) fn recover(&self, call: &mut uapi::pcieipc_recover) -> Result {
        let endpoint = self.endpoint()?;
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
        let table = self.table.lock();
        for entry in table.entries.iter().filter(|entry| entry.own) {
            entry.channel.recover(generation);
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

    /// Reserves an id and room for a channel of `bytes`.
    fn reserve(&self, bytes: u64) -> Result<u32> {
        let mut table = self.table.lock();
        if table.entries.len() as u32 + table.pending >= limits::channels() {
            limits::say(|| pr_info!("refused a channel: over max_channels={}\n", limits::channels()));
            return Err(ENOSPC);
        }
        if bytes > limits::session_bytes().saturating_sub(table.bytes) {
            limits::say(|| pr_info!("refused {bytes} bytes: over max_session_bytes={}\n", limits::session_bytes()));
            return Err(ENOSPC);
        }
        let id = table.next_id;
        if id >= 1 << 20 {
            return Err(ENOSPC);
        }
        let room = 1 + table.pending as usize;
        table.entries.reserve(room, GFP_KERNEL)?;
        table.next_id += 1;
        table.bytes += bytes;
        table.pending += 1;
        Ok(id)
    }

    /// Enters a channel for which room was reserved, or gives the room back.
    fn settle(&self, bytes: u64, entry: Option<Entry>) {
        let mut table = self.table.lock();
        table.pending -= 1;
        match entry {
            // Room was reserved for all that are pending, so this does not allocate.
            Some(entry) => drop(table.entries.push(entry, GFP_KERNEL)),
            None => table.bytes -= bytes,
        }
    }

    /// CHANNEL_CREATE.
    pub(crate) fn create(&self, call: &mut uapi::pcieipc_channel_create) -> Result {
        if call.flags & !uapi::PCIEIPC_CHANNEL_DEVICE_MEMORY != 0 {
            return Err(EINVAL);
        }
        let device_memory = call.flags & uapi::PCIEIPC_CHANNEL_DEVICE_MEMORY != 0;
        let bytes = call.data_bytes;
        if !bytes.is_power_of_two() || bytes < PAGE_SIZE as u64 {
            return Err(EINVAL);
        }
        let (endpoint, generation) = self.usable()?;
        let vector = checked_index(call.vector, endpoint.vectors.len())? as u32;
        if bytes > limits::channel_bytes() {
            limits::say(|| pr_info!("refused {bytes} bytes: over max_channel_bytes={}\n", limits::channel_bytes()));
            return Err(ENOSPC);
        }
        let id = self.reserve(bytes)?;
        let made = Channel::new(endpoint, generation, id, vector, bytes, device_memory);
        let channel = match made {
            Ok(channel) => channel,
            Err(error) => {
                self.settle(bytes, None);
                return Err(error);
            }
        };
        call.channel = id;
        call.data_offset = match &channel.data {
            Data::Host(_) => Area::Data.offset(id),
            Data::Device(window) => window.offset(),
        };
        call.tail_offset = Area::Tail.offset(id);
        call.head_offset = Area::Head.offset(id);
        call.segments = channel.segments;
        let entry = Entry { id, key: channel.key, channel, own: true };
        self.settle(bytes, Some(entry));
        Ok(())
    }

    /// CHANNEL_DESTROY.
    pub(crate) fn destroy(&self, id: u32) -> Result {
        let endpoint = self.endpoint()?;
        let entry = {
            let mut table = self.table.lock();
            let index = table.entries.iter().position(|entry| entry.id == id).ok_or(ENOENT)?;
            let entry = table.entries.remove(index).map_err(|_| ENOENT)?;
            if entry.own {
                table.bytes -= entry.channel.data.bytes();
            }
            entry
        };
        entry.end(endpoint);
        Ok(())
    }

    fn find(&self, id: u32) -> Result<(Arc<Channel>, u64, bool)> {
        let table = self.table.lock();
        let entry = table.entries.iter().find(|entry| entry.id == id).ok_or(ENOENT)?;
        Ok((entry.channel.clone(), entry.key, entry.own))
    }

    /// The own channel's data area that holds a byte of the endpoint's memory.
    fn find_window(&self, at: u64) -> Result<Arc<Window>> {
        let table = self.table.lock();
        let mut own = table.entries.iter().filter(|entry| entry.own);
        own.find_map(|entry| match &entry.channel.data {
            Data::Device(window) if (window.start..window.start + window.bytes).contains(&at) => Some(window.clone()),
            _ => None,
        })
        .ok_or(ENOENT)
    }

    fn find_own(&self, id: u32) -> Result<Arc<Channel>> {
        match self.find(id)? {
            (channel, _, true) => Ok(channel),
            _ => Err(ENOENT),
        }
    }

    /// CHANNEL_EXPORT: a new descriptor, not yet visible to the process.
    pub(crate) fn export(&self, id: u32) -> Result<export::Descriptor> {
        self.usable()?;
        Export::descriptor(self.find_own(id)?)
    }

    /// CHANNEL_IMPORT.
    pub(crate) fn import(&self, call: &mut uapi::pcieipc_channel_fd) -> Result {
        let (endpoint, generation) = self.usable()?;
        if endpoint.profile.engine == Engine::None {
            return Err(EOPNOTSUPP);
        }
        let channel = Export::channel_of(call.fd)?;
        let id = self.reserve(0)?;
        match channel.import(endpoint, generation, id) {
            Ok(key) => {
                call.channel = id;
                let entry = Entry { id, channel, key, own: false };
                self.settle(0, Some(entry));
                Ok(())
            }
            Err(error) => {
                self.settle(0, None);
                Err(error)
            }
        }
    }

    /// CHANNEL_FREED.
    pub(crate) fn freed(&self, id: u32) -> Result {
        self.usable()?;
        self.find_own(id)?.give_room();
        Ok(())
    }

    /// COPY.
    pub(crate) fn copy(&self, call: &uapi::pcieipc_copy) -> Result {
        let (endpoint, generation) = self.usable()?;
        if endpoint.profile.engine == Engine::None {
            return Err(EOPNOTSUPP);
        }
        let bytes = u64::from(call.bytes);
        if bytes == 0 || call.bytes > limits::COPY_BYTES || call.timeout_ms == 0 || call.timeout_ms > limits::COPY_MS {
            return Err(EINVAL);
        }
        let (from, from_key, _) = self.find(call.from)?;
        let (to, to_key, _) = self.find(call.to)?;
        check_range(from.data.bytes(), call.from_offset, bytes)?;
        check_range(to.data.bytes(), call.to_offset, bytes)?;
        let apart = call.from_offset.abs_diff(call.to_offset) >= bytes;
        if Arc::ptr_eq(&from, &to) && !apart {
            return Err(EINVAL);
        }
        let request = engine::Request {
            from: engine::Place { key: from_key, offset: call.from_offset },
            to: engine::Place { key: to_key, offset: call.to_offset },
            bytes,
            timeout_ms: call.timeout_ms,
            generation,
            bell: self.bell_of(call, endpoint, &to)?,
        };
        engine::copy(endpoint, &request)
    }

    /// The doorbell that the engine is to ring after a copy.
    fn bell_of(&self, call: &uapi::pcieipc_copy, endpoint: &Endpoint, to: &Channel) -> Result<Option<(u64, u32)>> {
        if call.flags & !uapi::PCIEIPC_COPY_RING != 0 {
            return Err(EINVAL);
        }
        if call.flags == 0 {
            return Ok(None);
        }
        to.check()?;
        distance::check_direct(endpoint, &to.endpoint)?;
        Ok(Some(to.endpoint.bell_address(to.vector)?))
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
        if call.fd != -2 {
            let eventfd = if call.fd >= 0 { Some(EventFd::from_fd(call.fd)?) } else { None };
            drop(vector.set_eventfd(eventfd));
        }
        vector.set_masked(call.flags & uapi::PCIEIPC_VECTOR_MASK != 0);
        Ok(())
    }

    /// RING.
    pub(crate) fn ring(&self, vector: u32) -> Result {
        let (endpoint, _) = self.usable()?;
        self.bucket.take(limits::doorbells_per_second())?;
        endpoint.ring(vector)?;
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
            return unsafe { bell::map(vma, endpoint, generation, page_offset) };
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

fn check_range(area: u64, offset: u64, bytes: u64) -> Result {
    let end = offset.checked_add(bytes).ok_or(EINVAL)?;
    if end > area {
        return Err(EINVAL);
    }
    Ok(())
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
}
