// SPDX-License-Identifier: GPL-2.0

//! The PCI driver: probe and unbind.

use crate::{
    endpoint::{device_raw, pci_raw, Endpoint},
    endpoint_node::EndpointNode,
    engine,
    monitor::Running,
    msix,
    profile::{BellValue, Engine, Profile, Signature, ENGINE_BAR, ENGINE_BYTES},
    profile_config,
    registers::Registers,
    registry,
    vector::Handler,
};
use kernel::{
    bindings,
    device::{self, Core},
    dma::{Device as _, DmaMask},
    error::to_result,
    irq,
    page::PAGE_SIZE,
    pci,
    prelude::*,
    sync::Arc,
};

/// The driver of all endpoints.
pub(crate) struct Driver;

/// What a bound device owns; dropped after unbind, in this order.
pub(crate) struct Bound<'bound> {
    /// They run until they are freed, so they go first.
    _irqs: KVec<Pin<KBox<irq::Registration<'bound, Handler>>>>,
    _vectors: KBox<pci::IrqVectorRegistration<'bound>>,
    monitor: Running,
    _node: EndpointNode,
    endpoint: Arc<Endpoint>,
    _memory: Memtype,
    _disable: Enabled,
}

impl Bound<'_> {
    /// The endpoint.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }
}

/// An enabled device; dropping it disables the device.
struct Enabled(*mut bindings::pci_dev);

// SAFETY: Held by `Bound` only, whose drop runs with the device lock held.
unsafe impl Send for Enabled {}
// SAFETY: It has no methods.
unsafe impl Sync for Enabled {}

impl Drop for Enabled {
    fn drop(&mut self) {
        // SAFETY: The device is valid until the driver core has let go of it, which is after this drop.
        unsafe { bindings::pci_disable_device(self.0) };
    }
}

/// The endpoint's memory, which may be mapped write-combining; without that it is mapped uncached, which is as right but slower.
struct Memtype {
    start: u64,
    bytes: u64,
}

impl Memtype {
    fn new(start: u64, bytes: u64) -> Self {
        // SAFETY: The range is a BAR of a device that is being probed.
        let reserved = bytes > 0 && unsafe { crate::inline::reserve_memtype_wc(start, bytes) };
        Self { start, bytes: if reserved { bytes } else { 0 } }
    }
}

impl Drop for Memtype {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: Reserved in `new`. No mapping of the memory is left: unbind zapped them, and they do not come back.
            unsafe { crate::inline::free_memtype_wc(self.start, self.bytes) };
        }
    }
}

const fn id(vendor: u32, device: u32) -> pci::DeviceId {
    // SAFETY: `pci::DeviceId` is a transparent wrapper of `pci_device_id`; it offers no constructor for a vendor without a name.
    unsafe {
        core::mem::transmute::<bindings::pci_device_id, pci::DeviceId>(bindings::pci_device_id {
            vendor,
            device,
            subvendor: !0,
            subdevice: !0,
            class: 0,
            class_mask: 0,
            driver_data: 0,
            override_only: 0,
        })
    }
}

// Only the soft endpoint; all others are bound by an administrator through driver_override.
kernel::pci_device_table!(TABLE, <Driver as pci::Driver>::IdInfo, [(id(0x1234, 0x7069), Profile::SOFT)]);

impl pci::Driver for Driver {
    type IdInfo = Profile;
    type Data<'bound> = Bound<'bound>;
    const ID_TABLE: pci::IdTable<Self::IdInfo> = &TABLE;

    fn probe<'bound>(
        pdev: &'bound pci::Device<Core<'_>>,
        info: Option<&'bound Profile>,
    ) -> impl PinInit<Bound<'bound>, Error> + 'bound {
        pin_init::pin_init_scope(move || Ok::<_, Error>(bind(pdev, info)))
    }

    fn unbind<'bound>(_pdev: &'bound pci::Device<Core<'_>>, this: Pin<&Bound<'bound>>) {
        this.monitor.disarm();
        registry::remove(&this.endpoint);
        this.endpoint.unbind();
    }
}

fn bind<'bound>(pdev: &'bound pci::Device<Core<'_>>, info: Option<&'bound Profile>) -> Result<Bound<'bound>> {
    let mut profile = chosen_profile(pdev, info)?;
    // SAFETY: The device is being probed.
    if unsafe { crate::inline::pci_channel_offline(pci_raw(pdev)) } {
        dev_warn!(pdev, "the kernel has not recovered it from an error; if that lasts, remove and rescan it\n");
        return Err(EIO);
    }
    restore_addresses(pdev, profile.doorbell.bar)?;
    // SAFETY: The device is being probed.
    unsafe { msix::Layout::of(pci_raw(pdev)) }.check(&profile).inspect_err(|_| {
        dev_err!(pdev, "the profile overlaps the interrupt table\n");
    })?;
    check_bars(pdev, &profile)?;
    pdev.enable_device_mem()?;
    let enabled = Enabled(pci_raw(pdev));
    // SAFETY: No DMA has been set up yet.
    unsafe { pdev.dma_set_mask_and_coherent(mask(profile.dma_bits)?)? };
    // SAFETY: The device is being probed. Pieces of a ring are as large as they can be.
    unsafe { bindings::dma_set_max_seg_size(device_raw(pdev), u32::MAX) };

    let mut registers = Registers::new();
    map_bars(pdev, &profile, &mut registers)?;
    if let Some(bar) = profile.memory_bar {
        // Mapped to users only, never to the kernel as a whole, but nobody else's. Given back behind the binding.
        // SAFETY: The device is being probed.
        to_result(unsafe { bindings::pcim_request_region(pci_raw(pdev), bar as i32, c"pcieipc".as_char_ptr()) })?;
    }
    if let Some(signature) = &profile.signature {
        check_signature(pdev, &registers, signature)?;
    }
    if let BellValue::OwnId { register } = profile.doorbell.value {
        // The id does not change while the device is there, so it is read once and not at each ring.
        let id = registers.read32(profile.doorbell.bar, register)?;
        profile.doorbell.value = BellValue::Vector(id << 16);
    }

    let (vectors, wanted) = allocate_vectors(pdev, &mut profile)?;
    let endpoint = Endpoint::new(pdev, profile, registers, wanted)?;
    // SAFETY: The device is being probed. This is the state that a recovery restores: off the bus, until `resume`.
    unsafe { bindings::pci_save_state(pci_raw(pdev)) };
    endpoint.clear_all_slots();
    engine::restart(&endpoint)?;
    pdev.set_master();
    let memory = Memtype::new(endpoint.memory_start, endpoint.memory_bytes);
    let irqs = request_irqs(&vectors, &endpoint)?;
    let monitor = Running::new(endpoint.clone())?;
    registry::add(&endpoint)?;
    let node = EndpointNode::new(&endpoint).inspect_err(|_| {
        registry::remove(&endpoint);
        endpoint.unbind();
    })?;
    registry::announce(&endpoint);
    dev_info!(pdev, "endpoint {} ({} vectors, generation {})\n", endpoint.id, wanted, endpoint.status.generation());
    Ok(Bound { _irqs: irqs, _vectors: vectors, monitor, _node: node, endpoint, _memory: memory, _disable: enabled })
}

/// What an administrator says goes before what the module knows: by its own table or, of a device bound by override, by its ids.
fn chosen_profile(pdev: &pci::Device<device::Bound>, info: Option<&Profile>) -> Result<Profile> {
    // SAFETY: The device is being probed.
    let (vendor, device) = unsafe { ((*pci_raw(pdev)).vendor, (*pci_raw(pdev)).device) };
    let known = || info.or_else(|| Profile::built_in(vendor, device)).copied();
    let profile = profile_config::find(vendor, device).or_else(known);
    profile.ok_or(ENODEV).inspect_err(|_| {
        dev_err!(pdev, "no profile describes {vendor:04x}:{device:04x}\n");
    })
}

/// Gives a device its configuration back that a reset took while no driver was there to do so, as in the kernel's recovery from an error.
///
/// # Errors
///
/// `ENODEV` when that does not help.
fn restore_addresses(pdev: &pci::Device<device::Bound>, bar: u32) -> Result {
    if pdev.resource_start(bar)? == 0 || !has_no_address(pdev, bar) {
        return Ok(());
    }
    // SAFETY: The device is being probed. Without a state that was saved this does nothing; it is kept for the next time.
    unsafe {
        bindings::pci_restore_state(pci_raw(pdev));
        bindings::pci_save_state(pci_raw(pdev));
    }
    if has_no_address(pdev, bar) {
        dev_err!(pdev, "has lost its addresses in a reset; remove and rescan it\n");
        return Err(ENODEV);
    }
    dev_info!(pdev, "had lost its addresses in a reset, which are restored\n");
    Ok(())
}

/// Whether the register of a BAR, or both of one of 64 bits, hold no address.
fn has_no_address(pdev: &pci::Device<device::Bound>, bar: u32) -> bool {
    let register = |bar: u32| {
        let mut value = !0;
        let offset = bindings::PCI_BASE_ADDRESS_0 + 4 * bar;
        // SAFETY: The device is being probed. What cannot be read is not nothing.
        unsafe { bindings::pci_read_config_dword(pci_raw(pdev), offset as i32, &mut value) };
        value
    };
    let low = register(bar);
    let wide = low & bindings::PCI_BASE_ADDRESS_MEM_TYPE_MASK == bindings::PCI_BASE_ADDRESS_MEM_TYPE_64;
    low & !0xf == 0 && (!wide || register(bar + 1) == 0)
}

fn mask(bits: u32) -> Result<DmaMask> {
    DmaMask::try_new(bits)
}

fn map_bars(pdev: &pci::Device<device::Bound>, profile: &Profile, registers: &mut Registers) -> Result {
    registers.map(pdev, profile.doorbell.bar)?;
    if profile.engine != Engine::None {
        registers.map(pdev, ENGINE_BAR)?;
    }
    if let Some(rings) = &profile.rings {
        registers.map(pdev, rings.bar)?;
    }
    if let Some(acknowledge) = &profile.acknowledge {
        registers.map(pdev, acknowledge.bar)?;
    }
    Ok(())
}

/// Refuses a profile that reaches beyond a BAR, or whose doorbell pages would be shared with something else.
fn check_bars(pdev: &pci::Device<device::Bound>, profile: &Profile) -> Result {
    let fits = |bar: u32, end: usize| -> Result<bool> { Ok(end as u64 <= pdev.resource_len(bar)?) };
    let bell = &profile.doorbell;
    let mut end = bell.offset_of(profile.vectors.saturating_sub(1) as usize) + bell.width as usize;
    let bars = [
        Some(bell.bar),
        profile.rings.as_ref().map(|rings| rings.bar),
        profile.acknowledge.as_ref().map(|acknowledge| acknowledge.bar),
        profile.memory_bar,
        (profile.engine != Engine::None).then_some(ENGINE_BAR),
    ];
    // SAFETY: The device is being probed, and all numbers are those of BARs.
    let mut good = bars.into_iter().flatten().all(|bar| unsafe { crate::inline::is_memory_or_absent(pci_raw(pdev), bar) });
    if bell.isolated {
        end = end.next_multiple_of(PAGE_SIZE);
        good &= pdev.resource_start(bell.bar)? % PAGE_SIZE as u64 == 0;
    }
    good &= fits(bell.bar, end)?;
    if let Some(rings) = &profile.rings {
        good &= fits(rings.bar, rings.offset + rings.stride * rings.slots as usize)?;
    }
    if profile.engine != Engine::None {
        good &= fits(ENGINE_BAR, ENGINE_BYTES)?;
    }
    if let Some(acknowledge) = &profile.acknowledge {
        good &= fits(acknowledge.bar, acknowledge.status.max(acknowledge.clear) + 4)?;
    }
    if good {
        Ok(())
    } else {
        dev_err!(pdev, "the profile reaches beyond the device's BARs\n");
        Err(EINVAL)
    }
}

fn check_signature(pdev: &pci::Device<device::Bound>, registers: &Registers, signature: &Signature) -> Result {
    let value = registers.read32(signature.bar, signature.offset)?;
    if value & signature.mask != signature.value {
        dev_err!(pdev, "BAR {} does not look like this profile: {value:#x}\n", signature.bar);
        return Err(ENODEV);
    }
    Ok(())
}

type Vectors<'bound> = KBox<pci::IrqVectorRegistration<'bound>>;

/// Allocates what the profile wants or what there is; returns how many are for users.
fn allocate_vectors<'bound>(pdev: &'bound pci::Device<device::Bound>, profile: &mut Profile) -> Result<(Vectors<'bound>, u32)> {
    let types = pci::IrqTypes::default().with(pci::IrqType::Msi).with(pci::IrqType::MsiX);
    let all = profile.engine_vector.map_or(profile.vectors, |vector| profile.vectors.max(vector + 1));
    let vectors = KBox::new(pdev.alloc_irq_vectors(1, all.max(1), types)?, GFP_KERNEL)?;
    let got = vectors.len() as u32;
    if profile.engine_vector.is_some_and(|vector| vector >= got) {
        profile.engine_vector = None;
    }
    Ok((vectors, profile.vectors.min(got)))
}

fn request_irqs<'bound>(
    vectors: &Vectors<'bound>,
    endpoint: &Arc<Endpoint>,
) -> Result<KVec<Pin<KBox<irq::Registration<'bound, Handler>>>>> {
    let mut irqs = KVec::with_capacity(vectors.len(), GFP_KERNEL)?;
    // SAFETY: The registration is boxed, so it does not move, and `Bound` drops the interrupts before it.
    let vectors: &'bound pci::IrqVectorRegistration<'bound> = unsafe { &*core::ptr::from_ref(&**vectors) };
    for index in 0..vectors.len() {
        let request: irq::IrqRequest<'bound> = vectors.index(index)?.into();
        // A vector that nobody uses stays masked.
        let Some(vector) = endpoint.vector(index) else {
            continue;
        };
        vector.set_irq(request.irq());
        let handler = Handler { endpoint: endpoint.clone(), index };
        // SAFETY: The box is dropped with `Bound`, never forgotten.
        let registration =
            unsafe { irq::Registration::new(request, irq::Flags::TRIGGER_NONE, c"pcieipc", Ok::<Handler, Error>(handler)) };
        irqs.push(KBox::pin_init(registration, GFP_KERNEL)?, GFP_KERNEL)?;
    }
    Ok(irqs)
}
