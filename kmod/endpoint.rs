// SPDX-License-Identifier: GPL-2.0

//! An endpoint: one PCIe function, from probe to the last user who remembers it.
//!
//! It outlives its binding, because sessions, exported descriptors and interrupts hold references. What belongs to the
//! device itself is reached only through [`Registers`], which end at unbind, and under the lock of [`Hardware`], which says
//! whether the device is still bound. After unbind nothing touches the device any more.

use crate::{
    channel::Channel,
    dmabuf::Provider,
    engine::Finished,
    events::{Event, Queue},
    hardware::Hardware,
    iommu,
    link::{self, Link},
    profile::{BellValue, Profile},
    recovery::Brake,
    registers::{Registers, Value},
    registry,
    status::Status,
    trace,
    uapi::{self, kind, state},
    vector::Vector,
};
use kernel::{
    bindings, fmt, new_mutex, pci,
    prelude::*,
    seq_file::SeqFile,
    seq_print,
    sync::{
        aref::ARef,
        atomic::{Atomic, Relaxed, Release},
        Arc, Mutex,
    },
};

/// What tells one device from another; constant while it is bound.
#[derive(Clone, Copy)]
pub(crate) struct Identity {
    /// domain << 16 | bus << 8 | devfn
    pub(crate) address: u32,
    /// Vendor id.
    pub(crate) vendor: u16,
    /// Device id.
    pub(crate) device: u16,
    /// Device Serial Number, 0 when it has none.
    pub(crate) serial: u64,
    /// -1 when unknown.
    pub(crate) numa_node: i32,
}

/// A PCI address as the ABI has it.
///
/// # Errors
///
/// `EOVERFLOW` for a domain beyond 16 bits, such as those behind Intel's VMD: it would be the address of another device.
fn address_in(domain: u32, bus: u8, devfn: u32) -> Result<u32> {
    if domain > u16::MAX.into() {
        return Err(EOVERFLOW);
    }
    Ok(domain << 16 | u32::from(bus) << 8 | devfn)
}

/// A PCI address, shown as domain:bus:device.function.
pub(crate) struct Address(u32);

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (domain, bus, devfn) = (self.0 >> 16, self.0 >> 8 & 0xff, self.0 & 0xff);
        write!(f, "{domain:04x}:{bus:02x}:{:02x}.{}", devfn >> 3, devfn & 7)
    }
}

/// Counters of an endpoint, all lives of this binding.
pub(crate) struct Counters {
    /// Doorbells rung through the module.
    pub(crate) doorbells: Atomic<u64>,
    /// Events that full queues lost.
    pub(crate) events_lost: Atomic<u64>,
    /// Bytes that the engine moved.
    pub(crate) dma_bytes: Atomic<u64>,
    /// Correctable errors reported.
    pub(crate) correctable: Atomic<u64>,
}

/// For whom an interrupt is.
pub(crate) struct Raised {
    /// The engine has finished.
    pub(crate) engine: bool,
    /// A doorbell was rung.
    pub(crate) user: bool,
}

/// See the module's documentation.
#[pin_data]
pub(crate) struct Endpoint {
    /// Never used again.
    pub(crate) id: u32,
    /// The device.
    pub(crate) pdev: ARef<pci::Device>,
    /// The port above it.
    pub(crate) bridge: Option<ARef<pci::Device>>,
    /// What it is.
    pub(crate) identity: Identity,
    /// How it is driven.
    pub(crate) profile: Profile,
    /// The IOMMU in front of it.
    pub(crate) iommu: iommu::View,
    /// Bytes of its own memory.
    pub(crate) memory_bytes: u64,
    /// Where its memory starts as the processor sees it.
    pub(crate) memory_start: u64,
    /// What is added to an address of the processor to give the bus address, for peers: of the doorbells.
    pub(crate) bus_offset: u64,
    /// The same of the memory.
    pub(crate) memory_bus_offset: u64,
    /// By what other drivers reach its memory.
    pub(crate) provider: Provider,
    /// Bus-side start of the doorbell BAR as the processor sees it, for mapped doorbells.
    pub(crate) doorbell_start: u64,
    /// State and generation.
    pub(crate) status: Status,
    /// Its vectors.
    pub(crate) vectors: KVec<Pin<KBox<Vector>>>,
    /// The engine's, whose storms end like those of the others.
    pub(crate) engine_interrupt: Pin<KBox<Vector>>,
    /// Its registers.
    pub(crate) registers: Registers,
    /// Counters.
    pub(crate) counters: Counters,
    /// Vectors that saw a storm since the last look, one bit each.
    pub(crate) storms: Atomic<u64>,
    /// 1 when the event of the endpoint's end is in all queues; the status page says it a moment earlier.
    pub(crate) end_told: Atomic<u32>,
    /// What is known of what it began on the bus before it was taken off: [`crate::hardware::QUIET`] or worse.
    pub(crate) restless: Atomic<u32>,
    /// Its link as last sampled, and its best.
    pub(crate) link: Link,
    /// Limits events about correctable errors.
    #[pin]
    pub(crate) correctable: Mutex<Brake>,
    /// Closed while it changes whether mapped doorbells may touch the device; taken in faults.
    #[pin]
    pub(crate) bell_gate: Mutex<()>,
    /// Completed by the engine's interrupt.
    #[pin]
    pub(crate) finished: Finished,
    /// What may be done to the device, and what was.
    #[pin]
    pub(crate) hardware: Mutex<Hardware>,
}

impl Endpoint {
    /// A new endpoint, LIVE in a generation of its own, not yet registered.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory.
    pub(crate) fn new(
        pdev: &pci::Device<kernel::device::Core<'_>>,
        profile: Profile,
        registers: Registers,
        vectors: u32,
    ) -> Result<Arc<Self>> {
        let raw = pci_raw(pdev);
        // SAFETY: The device is being probed, so it, its bus and the bridge above it are valid.
        let (identity, bridge) = unsafe {
            let bus = (*raw).bus;
            let domain = crate::inline::pci_domain_nr(bus) as u32;
            let address = address_in(domain, (*bus).number, (*raw).devfn).inspect_err(|_| {
                dev_err!(pdev, "its domain {domain:#x} has no place in the ABI's addresses\n");
            })?;
            let identity = Identity {
                address,
                vendor: (*raw).vendor,
                device: (*raw).device,
                serial: bindings::pci_get_dsn(raw),
                numa_node: (*raw).dev.numa_node,
            };
            let port = crate::inline::pci_upstream_bridge(raw).cast::<pci::Device>();
            let bridge = if port.is_null() { None } else { Some(ARef::from(&*port)) };
            (identity, bridge)
        };
        let mut list = KVec::with_capacity(vectors as usize, GFP_KERNEL)?;
        for index in 0..vectors {
            list.push(KBox::pin_init(Vector::new(index), GFP_KERNEL)?, GFP_KERNEL)?;
        }
        let engine_interrupt = KBox::pin_init(Vector::new(profile.engine_vector.unwrap_or(0)), GFP_KERNEL)?;
        let memory_bytes = profile.memory_bar.map_or(Ok(0), |bar| pdev.resource_len(bar))?;
        let memory_start = profile.memory_bar.map_or(Ok(0), |bar| pdev.resource_start(bar))?;
        // SAFETY: The device is being probed; what this sets up ends with the binding.
        let bus_offset = unsafe { crate::inline::peer_offset(raw, profile.doorbell.bar) }?;
        // SAFETY: As above.
        let memory_bus_offset = profile.memory_bar.map_or(Ok(0), |bar| unsafe { crate::inline::peer_offset(raw, bar) })?;
        let provider = match profile.memory_bar {
            // SAFETY: As above, and peer traffic was just set up.
            Some(bar) => unsafe { crate::inline::peer_provider(raw, bar) },
            None => Provider::new(core::ptr::null_mut()),
        };
        let doorbell_start = pdev.resource_start(profile.doorbell.bar)?;
        let link = Link::new(raw);
        let status = Status::new(state::LIVE, registry::next_generation())?;
        status.set_link(link.now());
        let id = registry::next_id();
        // SAFETY: As above.
        let iommu = unsafe { iommu::View::of(device_raw(pdev)) };
        Arc::pin_init(
            pin_init!(Self {
                id,
                pdev: ARef::from(&**pdev),
                bridge,
                identity,
                profile,
                iommu,
                memory_bytes,
                memory_start,
                bus_offset,
                memory_bus_offset,
                provider,
                doorbell_start,
                status,
                vectors: list,
                engine_interrupt,
                registers,
                counters: Counters {
                    doorbells: Atomic::new(0),
                    events_lost: Atomic::new(0),
                    dma_bytes: Atomic::new(0),
                    correctable: Atomic::new(0),
                },
                storms: Atomic::new(0),
                end_told: Atomic::new(0),
                restless: Atomic::new(crate::hardware::QUIET),
                link,
                correctable <- new_mutex!(Brake::new(), "pcieipc_correctable"),
                bell_gate <- new_mutex!((), "pcieipc_bell"),
                finished <- Finished::new(),
                hardware <- new_mutex!(Hardware::new(), "pcieipc_hardware"),
            }),
            GFP_KERNEL,
        )
    }

    /// The device as the DMA API takes it.
    pub(crate) fn device(&self) -> *mut bindings::device {
        device_raw(&self.pdev)
    }

    /// The device as the PCI core takes it.
    pub(crate) fn pci(&self) -> *mut bindings::pci_dev {
        pci_raw(&self.pdev)
    }

    /// Delivers an event about this endpoint to all who are to see it.
    pub(crate) fn tell(&self, kind: u32, detail: [u64; 4]) {
        let lost = registry::publish(&Event { kind, endpoint: self.id, generation: self.status.generation(), detail });
        self.counters.events_lost.add(lost, Relaxed);
    }

    /// Changes the state, tells it and wakes everybody. The order is what readers rely on: word, events, wake-ups.
    /// The caller holds `hardware`, so changes are told in the order in which they happened; one that ends LIVE stops the device next, and
    /// then, without the lock, calls [`Endpoint::keep_others_off`].
    pub(crate) fn change(&self, hardware: &mut Hardware, to: u32, generation: u64) {
        let from = self.status.state();
        if from == to || from == state::GONE {
            return;
        }
        self.status.set(to, generation);
        trace::state(self.id, from, to, generation);
        self.zap_bells();
        self.zap_windows();
        self.tell(kind::STATE, [u64::from(from), u64::from(to), 0, 0]);
        if matches!(to, state::DEAD | state::GONE) {
            self.end_told.store(1, Release);
        }
        for vector in self.vectors.iter() {
            vector.wake();
        }
        for channel in hardware.channels() {
            channel.wake_writer();
        }
        if let Some(queue) = hardware.queue() {
            queue.wake();
        }
        self.finished.complete();
    }

    /// Gives the endpoint to a session of generation `wanted` (0 for any).
    ///
    /// # Errors
    ///
    /// `EBUSY` it has a session, `ESTALE` it lives in another generation, `EIO`, `ENODEV` as its state says.
    pub(crate) fn claim(&self, queue: &Arc<Queue>, wanted: u64) -> Result<u64> {
        let mut hardware = self.hardware.lock();
        let generation = self.status.generation();
        self.status.check(if wanted == 0 { generation } else { wanted })?;
        hardware.claim(queue)?;
        Ok(generation)
    }

    /// Takes the endpoint back from its session.
    pub(crate) fn release(&self) {
        // First, because once the endpoint is free the next session may set its own at once.
        for vector in self.vectors.iter() {
            vector.clear();
        }
        let queue = self.hardware.lock().release();
        drop(queue);
    }

    /// Rings doorbell `vector` in `generation`. The store is posted: it is on its way when this returns.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a vector that the endpoint has not, and what the endpoint's state says.
    pub(crate) fn ring(&self, vector: u32, generation: u64) -> Result {
        let index = crate::inline::checked_index(vector, self.vectors.len())?;
        let bell = &self.profile.doorbell;
        let value = self.bell_value(index);
        let value = if bell.width == 8 { Value::Eight(u64::from(value)) } else { Value::Four(value) };
        self.registers.write_if(bell.bar, bell.offset_of(index), value, || self.status.check(generation))?;
        self.counters.doorbells.add(1, Relaxed);
        trace::doorbell(self.id, vector);
        Ok(())
    }

    /// What is stored to ring `vector`.
    pub(crate) fn bell_value(&self, vector: usize) -> u32 {
        match self.profile.doorbell.value {
            BellValue::Constant(value) => value,
            BellValue::Vector(base) => base.wrapping_add(vector as u32),
            // Replaced in probe by what the register held.
            BellValue::OwnId { .. } => 0,
        }
    }

    /// Where another endpoint's engine rings `vector`, and with what. Only 4-byte doorbells.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` for other doorbells.
    pub(crate) fn bell_address(&self, vector: u32) -> Result<(u64, u32)> {
        let index = crate::inline::checked_index(vector, self.vectors.len())?;
        let bell = &self.profile.doorbell;
        if bell.width != 4 {
            return Err(EOPNOTSUPP);
        }
        let address = self.doorbell_start.wrapping_add(bell.offset_of(index) as u64).wrapping_add(self.bus_offset);
        Ok((address, self.bell_value(index)))
    }

    /// Acknowledges an interrupt on vector `index` at a device that wants it, and tells for whom it is. In a reset the device is left alone.
    pub(crate) fn acknowledge(&self, index: usize) -> Raised {
        let Some(acknowledge) = &self.profile.acknowledge else {
            let engine = self.profile.engine_vector == Some(index as u32);
            return Raised { engine, user: !engine };
        };
        let live = || if self.status.state() == state::LIVE { Ok(()) } else { Err(EIO) };
        let pending = self.registers.read32_if(acknowledge.bar, acknowledge.status, live).unwrap_or(0);
        let clear = Value::Four(pending);
        if pending == 0 || self.registers.write_if(acknowledge.bar, acknowledge.clear, clear, live).is_err() {
            return Raised { engine: false, user: false };
        }
        Raised { engine: pending & acknowledge.engine != 0, user: pending & !acknowledge.engine != 0 }
    }

    /// The vector with this number, a user's or the engine's.
    pub(crate) fn vector(&self, index: usize) -> Option<&Vector> {
        if self.profile.engine_vector == Some(index as u32) {
            return Some(&self.engine_interrupt);
        }
        self.vectors.get(index).map(|vector| &**vector)
    }

    /// The engine's vector fired.
    pub(crate) fn engine_finished(&self) {
        self.finished.complete();
    }

    /// A vector was masked because it fired too often; the monitor tells it and enables it again.
    pub(crate) fn storm(&self, vector: u32) {
        let mut seen = self.storms.load(Relaxed);
        while let Err(now) = self.storms.cmpxchg(seen, seen | 1 << (vector & 63), Relaxed) {
            seen = now;
        }
    }

    /// Fills in what the ABI tells about an endpoint.
    pub(crate) fn describe(&self, info: &mut uapi::pcieipc_endpoint_info) {
        let word = self.status.word();
        let link = self.status.link();
        let best = self.link.best();
        info.state = uapi::status_state(word);
        info.generation = uapi::status_generation(word);
        info.serial = self.identity.serial;
        info.address = self.identity.address;
        info.vendor = self.identity.vendor;
        info.device = self.identity.device;
        info.numa_node = self.identity.numa_node;
        info.iommu = self.iommu.kind;
        info.iommu_group = self.iommu.group;
        info.ep_flags = self.flags();
        info.vectors = self.vectors.len() as u32;
        info.link_speed = link::speed(link);
        info.link_width = link::width(link);
        info.link_speed_max = link::speed(best);
        info.link_width_max = link::width(best);
        info.memory_bytes = self.memory_bytes;
        info.doorbells = self.counters.doorbells.load(Relaxed);
        info.interrupts = self.status.interrupts();
        info.events_lost = self.counters.events_lost.load(Relaxed);
        info.dma_bytes = self.counters.dma_bytes.load(Relaxed);
        info.correctable = self.counters.correctable.load(Relaxed);
        info.profile = self.profile.name;
    }

    /// The address as other tools write it.
    pub(crate) fn address(&self) -> Address {
        Address(self.identity.address)
    }

    /// The endpoint's part of a file's fdinfo.
    pub(crate) fn show_fdinfo(&self, seq: &SeqFile) {
        let word = self.status.word();
        seq_print!(seq, "pcieipc-endpoint:\t{}\n", self.id);
        seq_print!(seq, "pcieipc-pdev:\t{}\n", self.address());
        seq_print!(seq, "pcieipc-state:\t{}\n", state::name(uapi::status_state(word)));
        seq_print!(seq, "pcieipc-generation:\t{}\n", uapi::status_generation(word));
    }

    fn flags(&self) -> u32 {
        let mut flags = 0;
        if self.hardware.lock().is_claimed() {
            flags |= uapi::PCIEIPC_EP_ATTACHED;
        }
        if self.profile.engine != crate::profile::Engine::None {
            flags |= uapi::PCIEIPC_EP_DMA_ENGINE;
        }
        if self.profile.rings.is_some() {
            flags |= uapi::PCIEIPC_EP_RING_REGISTERS;
        }
        if self.profile.doorbell.isolated {
            flags |= uapi::PCIEIPC_EP_DOORBELL_PAGE;
        }
        if self.memory_bytes > 0 {
            flags |= uapi::PCIEIPC_EP_MEMORY;
        }
        if self.profile.user_dma {
            flags |= uapi::PCIEIPC_EP_USER_DMA;
        }
        flags
    }

    /// Lists a channel whose reader is this endpoint's session.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory, `ENODEV` after unbind.
    pub(crate) fn adopt(&self, channel: &Arc<Channel>) -> Result {
        self.hardware.lock().adopt(channel)
    }

    /// Unlists a channel, and takes its memory away from the device.
    pub(crate) fn disown(&self, channel: &Arc<Channel>) {
        let listed = self.hardware.lock().disown(channel);
        drop(listed);
        self.unmap(channel.key);
    }
}

/// The `struct device` of a PCI device.
pub(crate) fn device_raw<C: kernel::device::DeviceContext>(pdev: &pci::Device<C>) -> *mut bindings::device {
    // SAFETY: Computes the address of a field of a valid device.
    unsafe { &raw mut (*pci_raw(pdev)).dev }
}

/// The `struct pci_dev` of a PCI device.
pub(crate) fn pci_raw<C: kernel::device::DeviceContext>(pdev: &pci::Device<C>) -> *mut bindings::pci_dev {
    // CAST: `pci::Device` is a transparent wrapper of `struct pci_dev`.
    core::ptr::from_ref(pdev).cast_mut().cast()
}

#[kunit_tests(pcieipc_endpoint)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_that_of_one_device() {
        assert!(address_in(0, 3, 0x08).is_ok_and(|address| address == 0x0308));
        assert!(address_in(0xffff, 0xff, 0xff).is_ok_and(|address| address == u32::MAX));
        assert!(address_in(0x1_0000, 3, 0x08).is_err());
    }
}
