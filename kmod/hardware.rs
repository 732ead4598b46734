// SPDX-License-Identifier: GPL-2.0

//! What may be done to an endpoint's device while it is bound: its DMA mappings, its ring table, its mastering.

use crate::{
    channel::Channel,
    endpoint::Endpoint,
    engine,
    events::Queue,
    limits,
    mapping::{flush_iommu, Mapping, Segment},
    memory::Pages,
    profile::Engine,
    uapi::state,
    window::Taken,
};
use kernel::{
    bindings,
    prelude::*,
    sync::{atomic::Relaxed, Arc},
};

/// In a ring's tag: a ring of another endpoint, which this one may write.
pub(crate) const FOREIGN: u32 = 1 << 31;

/// What it began on the bus before it was taken off has ended, or it is on the bus.
pub(crate) const QUIET: u32 = 0;
/// It is off the bus, and what it began there does not end.
pub(crate) const PENDING: u32 = 1;
/// It did not answer, so nobody knows whether it has heard that it is off the bus.
pub(crate) const UNHEARD: u32 = 2;

/// The largest ring table that is used.
const SLOTS: u32 = 64;

/// What is mapped for an endpoint's engine.
pub(crate) enum Source<'a> {
    /// Host memory.
    Pages(&'a Arc<Pages>),
    /// A part of its own memory.
    Own(Segment),
    /// A part of another endpoint's memory, by bus address.
    Peer(Segment),
}

/// The part of an endpoint that its `hardware` mutex protects.
pub(crate) struct Hardware {
    /// From probe to the beginning of unbind.
    bound: bool,
    mappings: KVec<Mapping>,
    /// Channels whose reader is the endpoint's session.
    channels: KVec<Arc<Channel>>,
    /// The queue of the session that has the endpoint.
    queue: Option<Arc<Queue>>,
    /// Slots of the ring table that are taken, one bit each.
    slots: u64,
    next_key: u64,
    /// Parts of the endpoint's own memory that are taken.
    memory: Taken,
    /// Who uses the engine.
    pub(crate) engine: engine::Use,
    /// Since when, by [`crate::clock`], it does not answer, while nobody has said why ([`crate::missing`]).
    pub(crate) missing_since: Option<u64>,
    /// It was found missing by somebody whose locks did not allow to keep others off it.
    pub(crate) reached: bool,
}

impl Hardware {
    /// Of a device that is being bound.
    pub(crate) const fn new() -> Self {
        Self {
            bound: true,
            mappings: KVec::new(),
            channels: KVec::new(),
            queue: None,
            slots: 0,
            next_key: 1,
            memory: Taken::new(),
            engine: engine::Use::new(),
            missing_since: None,
            reached: false,
        }
    }

    /// Whether the device may be touched.
    pub(crate) fn is_bound(&self) -> bool {
        self.bound
    }

    /// Whether a session has the endpoint.
    pub(crate) fn is_claimed(&self) -> bool {
        self.queue.is_some()
    }

    /// The queue of the endpoint's session.
    pub(crate) fn queue(&self) -> Option<&Arc<Queue>> {
        self.queue.as_ref()
    }

    /// The channels whose reader is the endpoint's session.
    pub(crate) fn channels(&self) -> impl Iterator<Item = &Arc<Channel>> {
        self.channels.iter()
    }

    /// Gives the endpoint to a session.
    pub(crate) fn claim(&mut self, queue: &Arc<Queue>) -> Result {
        if !self.bound {
            return Err(ENODEV);
        }
        if self.queue.is_some() {
            return Err(EBUSY);
        }
        self.queue = Some(queue.clone());
        Ok(())
    }

    /// Takes it back; what is returned is to be dropped without the lock.
    pub(crate) fn release(&mut self) -> Option<Arc<Queue>> {
        self.queue.take()
    }

    /// Lists a channel.
    pub(crate) fn adopt(&mut self, channel: &Arc<Channel>) -> Result {
        if !self.bound {
            return Err(ENODEV);
        }
        Ok(self.channels.push(channel.clone(), GFP_KERNEL)?)
    }

    /// Unlists a channel; what is returned is to be dropped without the lock.
    pub(crate) fn disown(&mut self, channel: &Arc<Channel>) -> Option<Arc<Channel>> {
        let index = self.channels.iter().position(|other| Arc::ptr_eq(other, channel))?;
        self.channels.remove(index).ok()
    }

    /// The mapping with this key.
    pub(crate) fn mapping(&self, key: u64) -> Option<&Mapping> {
        self.mappings.iter().find(|mapping| mapping.key == key)
    }

    /// Number of mappings and of ring slots taken.
    pub(crate) fn usage(&self) -> (usize, u32) {
        (self.mappings.len(), self.slots.count_ones())
    }
}

impl Endpoint {
    /// Maps a ring's data for the endpoint's DMA and tells the endpoint about them.
    ///
    /// # Errors
    ///
    /// As [`crate::status::Status::check`] and [`Mapping::new`]; `ENOSPC` when the ring table has too few slots left.
    pub(crate) fn map(&self, source: Source<'_>, generation: u64, tag: u32) -> Result<(u64, u32)> {
        let mut hardware = self.hardware.lock();
        if !hardware.bound {
            return Err(ENODEV);
        }
        self.status.check(generation)?;
        let key = hardware.next_key;
        hardware.next_key += 1;
        let mut mapping = match source {
            // SAFETY: The device is bound, and unbind unmaps all mappings in the list under the same lock.
            Source::Pages(pages) => unsafe { Mapping::new(self.device(), key, tag, pages) }?,
            Source::Own(segment) => Mapping::of_device(key, tag, segment, true)?,
            Source::Peer(segment) => Mapping::of_device(key, tag, segment, false)?,
        };
        let listed = self
            .take_slots(&mut hardware, &mut mapping)
            .and_then(|()| Ok(hardware.mappings.reserve(1, GFP_KERNEL)?))
            .and_then(|()| self.program(&mapping));
        if let Err(error) = listed {
            self.clear_slots(mapping.slots.iter().copied());
            hardware.slots &= !slot_bits(&mapping.slots);
            // SAFETY: The device is bound, and was told to forget what it may have been told.
            unsafe { self.take_away(&mut mapping) };
            return Err(error);
        }
        let segments = mapping.segments.len() as u32;
        // Cannot fail, room was reserved.
        let _ = hardware.mappings.push(mapping, GFP_KERNEL);
        Ok((key, segments))
    }

    fn take_slots(&self, hardware: &mut Hardware, mapping: &mut Mapping) -> Result {
        let Some(rings) = &self.profile.rings else {
            return Ok(());
        };
        if mapping.own_memory {
            return Ok(());
        }
        let limit = rings.slots.min(SLOTS);
        for _ in 0..mapping.segments.len() {
            let slot = hardware.slots.trailing_ones();
            if slot >= limit {
                return Err(ENOSPC);
            }
            mapping.slots.push(slot, GFP_KERNEL)?;
            hardware.slots |= 1 << slot;
        }
        Ok(())
    }

    /// Writes a mapping's pieces into the ring table.
    fn program(&self, mapping: &Mapping) -> Result {
        let Some(rings) = &self.profile.rings else {
            return Ok(());
        };
        for (piece, (slot, segment)) in mapping.slots.iter().zip(mapping.segments.iter()).enumerate() {
            let base = rings.offset + rings.stride * *slot as usize;
            self.registers.write64(rings.bar, base + rings.address, segment.address)?;
            self.registers.write32(rings.bar, base + rings.length, segment.bytes as u32)?;
            if let Some(tag) = rings.tag {
                let tag_value = mapping.tag | piece as u32 & 0xffff;
                self.registers.write32(rings.bar, base + tag, tag_value)?;
            }
            if let Some(valid) = rings.valid {
                self.registers.write32(rings.bar, base + valid, 1)?;
            }
        }
        Ok(())
    }

    /// Clears a mapping's pieces in the ring table. The read at the end makes sure that the device has seen it.
    fn clear_slots(&self, slots: impl Iterator<Item = u32>) {
        let Some(rings) = &self.profile.rings else {
            return;
        };
        let mut last = None;
        for slot in slots {
            let base = rings.offset + rings.stride * slot as usize;
            // A device that does not take the write any more does not use the ring either.
            if let Some(valid) = rings.valid {
                let _ = self.registers.write32(rings.bar, base + valid, 0);
            }
            let _ = self.registers.write32(rings.bar, base + rings.length, 0);
            let _ = self.registers.write64(rings.bar, base + rings.address, 0);
            last = Some(base + rings.length);
        }
        if let Some(offset) = last {
            let _ = self.registers.read32(rings.bar, offset);
        }
    }

    /// Writes all mappings into the ring table again, after the device lost it.
    ///
    /// # Errors
    ///
    /// `ENODEV` after unbind.
    pub(crate) fn program_all(&self, hardware: &Hardware) -> Result {
        hardware.mappings.iter().try_for_each(|mapping| self.program(mapping))
    }

    /// Clears the whole ring table: a device may keep it over a reset, with rings that were taken away meanwhile, or have it
    /// from somebody who drove the device before.
    pub(crate) fn clear_all_slots(&self) {
        self.clear_slots(0..self.profile.rings.as_ref().map_or(0, |rings| rings.slots));
    }

    /// Takes a mapping's memory away from the device. Does nothing for a key that is not there any more.
    pub(crate) fn unmap(&self, key: u64) {
        let mut hardware = self.hardware.lock();
        let Some(index) = hardware.mappings.iter().position(|mapping| mapping.key == key) else {
            return;
        };
        let Ok(mut mapping) = hardware.mappings.remove(index) else {
            return;
        };
        // Unless it is LIVE the device may not be touched: it may be in a recovery or a reset. It is off the bus then, and before it comes
        // back it forgets all rings and its engine's orders.
        let reachable = self.status.state() == state::LIVE;
        let mut stopped = true;
        if hardware.engine.uses(key) {
            stopped = !reachable || engine::stop(self);
            hardware.engine.abort(ENOENT);
        }
        if reachable {
            self.clear_slots(mapping.slots.iter().copied());
        }
        // It may be silent since a moment ago, and nobody has noticed: then it has not heard that, and is missing from now on. Callers hold
        // locks, so the monitor keeps others off it.
        if reachable && !self.answers() {
            self.miss(&mut hardware);
            hardware.reached = true;
        }
        hardware.slots &= !slot_bits(&mapping.slots);
        // SAFETY: A mapping in the list implies that the device is bound; it was told to forget the ring, or is off the bus.
        unsafe { self.take_away(&mut mapping) };
        // Before the device has the bus again, which says of later rings only that it reaches nothing.
        self.keep_if_reached(&mapping);
        if !stopped && self.status.state() == state::LIVE {
            // Where that fails the endpoint is not LIVE any more, which is told.
            let _ = engine::reset(self, &mut hardware);
        }
        drop(hardware);
        // The pages, if this was the last reference, are freed only now: unmapped, flushed, and without the lock.
        drop(mapping);
    }

    /// Unmaps and flushes.
    ///
    /// # Safety
    ///
    /// The device is bound, and does not use the pages.
    unsafe fn take_away(&self, mapping: &mut Mapping) {
        // SAFETY: By the requirements of this function.
        unsafe {
            mapping.unmap(self.device());
            flush_iommu(self.device());
        }
    }

    /// Takes a part of the endpoint's own memory.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` without memory, `ENODEV` after unbind, `ENOSPC` when it is used up.
    pub(crate) fn take_memory(&self, bytes: u64) -> Result<u64> {
        if self.memory_bytes == 0 {
            return Err(EOPNOTSUPP);
        }
        let mut hardware = self.hardware.lock();
        if !hardware.bound {
            return Err(ENODEV);
        }
        hardware.memory.take(self.memory_bytes, bytes)
    }

    /// Gives it back.
    pub(crate) fn give_memory(&self, start: u64) {
        self.hardware.lock().memory.give(start);
    }

    /// Stops the device from mastering the bus, and waits until what it began has ended, 0.7 s at most.
    pub(crate) fn silence(&self) {
        self.silence_in(self.status.state());
    }

    /// The same where the state was `last` a moment ago.
    fn silence_in(&self, last: u32) {
        // SAFETY: `pdev` holds a reference.
        unsafe { bindings::pci_clear_master(self.pci()) };
        if !self.answers() {
            // Whether it has heard that, and what it has begun, nobody can tell. One that was pulled out reaches nothing; the kernel gives one whose
            // recovery failed up in the same words, but that one is there, and DEAD.
            let pulled_out = self.is_removed() && last != state::DEAD;
            self.restless.store(if pulled_out { QUIET } else { UNHEARD }, Relaxed);
            return;
        }
        // SAFETY: As above.
        let ended = unsafe { bindings::pci_wait_for_pending_transaction(self.pci()) } != 0;
        self.restless.store(if ended { QUIET } else { PENDING }, Relaxed);
        if !ended {
            limits::say(|| dev_warn!(self.pdev, "is off the bus, but what it began there does not end\n"));
        }
    }

    /// Whether what it began on the bus before it was taken off has ended. Where that was not so when it was taken off, it is looked once more.
    pub(crate) fn is_quiet(&self) -> bool {
        if self.restless.load(Relaxed) != QUIET {
            self.silence();
        }
        self.restless.load(Relaxed) == QUIET
    }

    /// Keeps the pages of what was mapped from being given back when the device may still reach them: it was taken off the bus, what it
    /// had begun there did not end, and no IOMMU is in between.
    fn keep_if_reached(&self, mapping: &Mapping) {
        if self.restless.load(Relaxed) != QUIET && !self.iommu.protects() {
            self.keep(mapping);
        }
    }

    /// Keeps the pages of what was mapped, whatever is known of the device.
    fn keep(&self, mapping: &Mapping) {
        if let Some(pages) = mapping.host_pages() {
            pages.keep();
            let bytes = pages.bytes();
            limits::say(|| dev_warn!(self.pdev, "may still reach {bytes} bytes of memory, which nobody gets any more\n"));
        }
    }

    /// Lets the device master the bus again.
    pub(crate) fn unsilence(&self) {
        self.restless.store(QUIET, Relaxed);
        // SAFETY: `pdev` holds a reference, and the driver is bound.
        unsafe { bindings::pci_set_master(self.pci()) };
    }

    /// A copy stops that would ring the reader of this mapping, or with `any` one that uses it at all; its caller is told why.
    pub(crate) fn stop_using(&self, key: u64, any: bool, why: Error) {
        let mut hardware = self.hardware.lock();
        let concerned = if any { hardware.engine.uses(key) } else { hardware.engine.rings(key) };
        if !hardware.bound || self.status.state() != state::LIVE || !concerned {
            return;
        }
        let stopped = engine::stop(self);
        hardware.engine.abort(why);
        if !stopped && self.status.state() == state::LIVE {
            // Where that fails the endpoint is not LIVE any more, which is told.
            let _ = engine::reset(self, &mut hardware);
        }
    }

    /// Nobody else's device reaches this one any more when this returns: engines of other endpoints have stopped, and drivers that imported
    /// its memory, for which this waits, have let go. The endpoint is not LIVE, so none begins anew. Called without `hardware`, which others
    /// need meanwhile.
    pub(crate) fn keep_others_off(&self) {
        self.each_channel(Channel::stop_peers);
        // After all engines, because other drivers take their time.
        self.each_channel(Channel::tell_importers);
    }

    /// One channel at a time, because locks of others must not be taken under this endpoint's. From the last to the first: one that is
    /// added meanwhile finds the endpoint's new state, and one that ends meanwhile, which lets its importers go itself, makes none be
    /// left out.
    fn each_channel(&self, act: impl Fn(&Channel)) {
        let mut index = self.hardware.lock().channels.len();
        while index > 0 {
            index -= 1;
            let channel = self.hardware.lock().channels.get(index).cloned();
            if let Some(channel) = channel {
                act(&channel);
            }
        }
    }

    /// The driver lets go of the device. Waits for the device, never for a user.
    pub(crate) fn unbind(&self) {
        let mut hardware = self.hardware.lock();
        hardware.bound = false;
        let (last, generation) = (self.status.state(), self.status.generation());
        self.change(&mut hardware, state::GONE, generation);
        if hardware.engine.is_busy() && self.profile.engine != Engine::None {
            engine::stop(self);
            hardware.engine.abort(ENODEV);
        }
        self.clear_all_slots();
        self.silence_in(last);
        let mut mappings = core::mem::replace(&mut hardware.mappings, KVec::new());
        hardware.slots = 0;
        for mapping in mappings.iter_mut() {
            // SAFETY: The device is bound until unbind returns; it cannot master the bus any more.
            unsafe { mapping.unmap(self.device()) };
            self.keep_if_reached(mapping);
        }
        // SAFETY: As above.
        unsafe { flush_iommu(self.device()) };
        drop(hardware);
        self.keep_others_off();
        // The addresses of its memory may belong to another device next.
        self.each_channel(|channel| {
            if channel.is_device_memory() {
                channel.drop_importers();
            }
        });
        drop(mappings);
    }
}

fn slot_bits(slots: &[u32]) -> u64 {
    slots.iter().fold(0, |bits, slot| bits | 1 << slot)
}

#[kunit_tests(pcieipc_hardware)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_a_mapping_are_bits_of_the_table() {
        assert_eq!(slot_bits(&[]), 0);
        assert_eq!(slot_bits(&[0, 3]), 0b1001);
        assert_eq!(slot_bits(&[SLOTS - 1]), 1 << 63);
    }
}
