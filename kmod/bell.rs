// SPDX-License-Identifier: GPL-2.0

//! A doorbell page mapped to a user: rings without a system call, where profile and administrator allow it.
//!
//! When the device is in trouble, is reset or goes, the mapping turns into a page that nobody reads; a store to it is lost and
//! nobody is killed. It comes back only by mapping it again in the new generation. One that a writer mapped by a channel's
//! descriptor turns into such a page for good when the channel ends: the endpoint may have another user then.

use crate::{
    channel::Channel,
    endpoint::Endpoint,
    inline, limits, mapping_inode,
    memory::Pages,
    mmap::{VmOperations, DOORBELL},
    uapi,
};
use kernel::{
    bindings,
    mm::virt::{flags, VmaNew},
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    sync::Arc,
};

/// Bits of an offset below an endpoint's id: 256 pages.
const ENDPOINT_SHIFT: u32 = 20;
const _: () = assert!(crate::profile::BELL_BYTES <= 1 << ENDPOINT_SHIFT);

/// A mapped doorbell page, as its VMAs refer to it.
struct Bell {
    endpoint: Arc<Endpoint>,
    generation: u64,
    /// The channel whose descriptor it was mapped by; none when the endpoint's own session mapped it, which its VMAs keep open.
    channel: Option<Arc<Channel>>,
    /// Frame of the page in the BAR.
    frame: usize,
    /// What takes its place when the device may not be touched.
    dummy: Arc<Pages>,
}

/// Fills in how doorbell `vector` of `endpoint` is rung by a store.
///
/// # Errors
///
/// `EOPNOTSUPP` where doorbells have no page of their own, `EPERM` where the administrator does not allow it, `EINVAL` for a
/// vector that is not there.
pub(crate) fn describe(endpoint: &Endpoint, vector: u32, call: &mut uapi::pcieipc_doorbell) -> Result {
    let bell = &endpoint.profile.doorbell;
    if !bell.isolated {
        return Err(EOPNOTSUPP);
    }
    if !limits::doorbell_map() {
        return Err(EPERM);
    }
    let index = inline::checked_index(vector, endpoint.vectors.len())?;
    let offset = bell.offset_of(index);
    call.width = bell.width;
    call.map_offset = DOORBELL | u64::from(endpoint.id) << ENDPOINT_SHIFT | (offset - bell.offset) as u64 & !0xfff;
    call.page_offset = (offset & (PAGE_SIZE - 1)) as u64;
    call.value = u64::from(endpoint.bell_value(index));
    Ok(())
}

/// Whether a page offset is that of a doorbell page.
pub(crate) fn is_bell(page_offset: usize) -> bool {
    page_offset as u64 & DOORBELL >> PAGE_SHIFT != 0
}

/// Maps a doorbell page of `endpoint`, as long as it lives in `generation` and `channel`, by whose descriptor it is mapped, is open.
///
/// # Errors
///
/// As [`describe`]; `EINVAL` for another offset or size, a page without the doorbell of `channel`, a private or executable mapping; what the
/// endpoint's state says.
///
/// # Safety
///
/// `vma` is being set up by an `mmap` file operation.
pub(crate) unsafe fn map(
    vma: *mut bindings::vm_area_struct,
    endpoint: &Arc<Endpoint>,
    generation: u64,
    channel: Option<&Arc<Channel>>,
    page_offset: usize,
) -> Result {
    let bell = &endpoint.profile.doorbell;
    if !bell.isolated {
        return Err(EOPNOTSUPP);
    }
    if !limits::doorbell_map() {
        return Err(EPERM);
    }
    endpoint.status.check(generation)?;
    let first = (DOORBELL | u64::from(endpoint.id) << ENDPOINT_SHIFT) >> PAGE_SHIFT;
    let page = (page_offset as u64).checked_sub(first).ok_or(EINVAL)? as usize;
    let page_of = |vector: usize| (bell.offset_of(vector) - bell.offset) >> PAGE_SHIFT;
    let pages = match channel {
        // Who was given a channel may ring its reader, and whoever has a doorbell on the same page.
        Some(channel) => page_of(channel.vector as usize)..=page_of(channel.vector as usize),
        None => 0..=page_of(endpoint.vectors.len().saturating_sub(1)),
    };
    // SAFETY: By the requirements of this function.
    let new = unsafe { VmaNew::from_raw(vma) };
    let one_page = new.end() - new.start() == PAGE_SIZE;
    if !pages.contains(&page) || !one_page || new.flags() & flags::MAYSHARE == 0 || new.executable() {
        return Err(EINVAL);
    }
    new.try_clear_mayexec()?;
    let start = endpoint.doorbell_start as usize + bell.offset;
    let bell = Arc::new(
        Bell {
            endpoint: endpoint.clone(),
            generation,
            channel: channel.cloned(),
            frame: (start >> PAGE_SHIFT) + page,
            dummy: Pages::charged(1, -1)?,
        },
        GFP_KERNEL_ACCOUNT,
    )?;
    // SAFETY: The VMA is being set up. Nothing is inserted here: only the fault handler, under the gate, may do that, because a
    // zap does not find the VMA before `mmap` has returned. `close` gives the reference back.
    unsafe {
        inline::vma_noncached(vma);
        (*vma).vm_private_data = Arc::into_raw(bell).cast_mut().cast();
        (*vma).vm_ops = &raw const OPERATIONS.0;
    }
    Ok(())
}

impl Endpoint {
    /// Makes all mapped doorbells of the endpoint fault again, to see what they may be.
    pub(crate) fn zap_bells(&self) {
        if self.profile.doorbell.isolated && limits::doorbell_map() {
            // A fault that saw the old state has inserted its page before the gate opens here, so the zap finds it.
            drop(self.bell_gate.lock());
            let offset = DOORBELL | u64::from(self.id) << ENDPOINT_SHIFT;
            mapping_inode::zap(offset, 1 << ENDPOINT_SHIFT);
        }
    }
}

impl Bell {
    /// Whether a store may reach the device.
    fn may_ring(&self) -> bool {
        self.endpoint.status.check(self.generation).is_ok() && self.channel.as_ref().is_none_or(|channel| !channel.is_closed())
    }
}

static OPERATIONS: VmOperations = VmOperations(bindings::vm_operations_struct {
    open: Some(open),
    close: Some(close),
    fault: Some(fault),
    ..pin_init::zeroed()
});

extern "C" fn open(vma: *mut bindings::vm_area_struct) {
    // SAFETY: `map` stored a reference in each VMA with these operations, and the new one is a copy of such a VMA.
    let bell = unsafe { Arc::from_raw((*vma).vm_private_data.cast::<Bell>()) };
    core::mem::forget(bell.clone());
    core::mem::forget(bell);
}

extern "C" fn close(vma: *mut bindings::vm_area_struct) {
    // SAFETY: Gives back the reference that `map` or `open` stored; the VMA's entries are gone, so the dummy may go.
    drop(unsafe { Arc::from_raw((*vma).vm_private_data.cast::<Bell>()) });
}

extern "C" fn fault(vmf: *mut bindings::vm_fault) -> bindings::vm_fault_t {
    // SAFETY: The VMA is locked and has these operations, so its private data is a `Bell`.
    let (vma, bell, address) = unsafe {
        let fault = &(*vmf).__bindgen_anon_1;
        (fault.vma, &*(*fault.vma).vm_private_data.cast::<Bell>(), fault.address)
    };
    // Not under the gate, which error recovery and unbind wait for: a cgroup at its limit may take its time.
    // SAFETY: The VMA and the address of this fault.
    if !unsafe { inline::prepare_page_table(vma, address) } {
        return bindings::vm_fault_reason_VM_FAULT_OOM;
    }
    let gate = bell.endpoint.bell_gate.lock();
    let frame = if bell.may_ring() {
        bell.frame
    } else {
        match bell.dummy.page(0) {
            // SAFETY: A page that the bell holds.
            Some(page) => unsafe { inline::page_to_pfn(page.as_ptr()) },
            None => return bindings::vm_fault_reason_VM_FAULT_SIGBUS,
        }
    };
    // SAFETY: The address lies in the VMA, which is VM_PFNMAP; the frame is the device's while the gate is held, or the dummy's.
    let result = unsafe { bindings::vmf_insert_pfn(vma, address, frame) };
    drop(gate);
    result
}
