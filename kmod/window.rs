// SPDX-License-Identifier: GPL-2.0

//! A channel's data area in an endpoint's own memory, so that another endpoint's engine writes it directly.
//!
//! It has no struct pages and does not outlive the device: at reset, error, removal and the channel's end every mapping turns into
//! a page that nobody reads, and the status page, which is in host memory, tells. Stores are write-combining. A range is cleared when it is
//! taken: what a former user left in it is nobody else's business, and a device that is gone could not be cleared at the end.

use crate::{
    dmabuf::DmaBuf,
    endpoint::Endpoint,
    inline, mapping_inode,
    memory::Pages,
    mmap::{VmOperations, WINDOW},
};
use kernel::{
    bindings,
    mm::virt::{flags, VmaNew},
    new_mutex,
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc, Mutex,
    },
};

/// Bits of an offset below an endpoint's id: 1 TiB of memory.
const ENDPOINT_SHIFT: u32 = 40;

/// Bytes that are cleared at a time, with the gate held: microseconds.
const CLEARED: usize = 64 << 10;

/// A range of an endpoint's memory; gives it back when dropped.
#[pin_data(PinnedDrop)]
pub(crate) struct Window {
    /// Whose memory it is.
    pub(crate) endpoint: Arc<Endpoint>,
    /// Bytes into the memory BAR.
    pub(crate) start: u64,
    /// Bytes.
    pub(crate) bytes: u64,
    /// The generation in which it may be reached; 0 when its channel has ended.
    generation: Atomic<u64>,
    /// What takes its place otherwise.
    dummy: Arc<Pages>,
    /// By which other drivers reach it.
    #[pin]
    pub(crate) dmabuf: Mutex<Option<DmaBuf>>,
}

impl Window {
    /// Takes `bytes`, a power of two, of an endpoint's memory.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` without memory, `ENOSPC` when it is used up, `ENOMEM` without host memory, what the endpoint's state says.
    pub(crate) fn new(endpoint: &Arc<Endpoint>, generation: u64, bytes: u64) -> Result<Arc<Self>> {
        let dummy = Pages::charged(1, -1)?;
        let start = endpoint.take_memory(bytes)?;
        let window = pin_init!(Self {
            endpoint: endpoint.clone(),
            start,
            bytes,
            generation: Atomic::new(generation),
            dummy,
            dmabuf <- new_mutex!(None, "pcieipc_dmabuf"),
        });
        let window = Arc::pin_init(window, GFP_KERNEL_ACCOUNT).inspect_err(|_| endpoint.give_memory(start))?;
        if !endpoint.profile.memory_shared {
            window.clear()?;
        }
        Ok(window)
    }

    /// Stores zeroes into all of it, before anybody can map it.
    fn clear(&self) -> Result {
        // SAFETY: A range of the memory BAR, which the endpoint checked when it gave it.
        let range = unsafe { inline::IoRange::new(self.endpoint.memory_start + self.start, self.bytes as usize) }?;
        for offset in (0..self.bytes as usize).step_by(CLEARED) {
            // As a fault does: whoever changes the state waits for the gate, and then no such store is made any more.
            let gate = self.endpoint.bell_gate.lock();
            self.check()?;
            // SAFETY: It lives, and while the gate is held it may be touched.
            unsafe { range.clear(offset, CLEARED) };
            drop(gate);
        }
        let gate = self.endpoint.bell_gate.lock();
        self.check()?;
        // SAFETY: As above. What another endpoint's engine writes next is not overtaken by these stores.
        unsafe { range.settle() };
        drop(gate);
        Ok(())
    }

    fn check(&self) -> Result {
        self.endpoint.status.check(self.generation.load(Acquire))
    }

    /// Where it is mapped.
    pub(crate) fn offset(&self) -> u64 {
        base(self.endpoint.id) | self.start
    }

    /// From now on it is reached in this generation; 0 for never.
    pub(crate) fn set_generation(&self, generation: u64) {
        self.generation.store(generation, Release);
        // A fault that saw the old generation has inserted its page before the gate opens here, so the zap finds it.
        drop(self.endpoint.bell_gate.lock());
        mapping_inode::zap(self.offset(), self.bytes);
    }

    /// Whether its generation is the endpoint's, which lives.
    pub(crate) fn may_be_reached(&self) -> bool {
        self.check().is_ok()
    }

    /// Other drivers may map it, or have let go of it when this returns.
    pub(crate) fn tell_importers(&self) {
        if let Some(buffer) = &*self.dmabuf.lock() {
            buffer.allow(self.may_be_reached());
        }
    }

    /// Its address for another endpoint's engine.
    pub(crate) fn bus_address(&self) -> u64 {
        self.endpoint.memory_start.wrapping_add(self.start).wrapping_add(self.endpoint.memory_bus_offset)
    }

    /// Maps it, or a part.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a range that is not its, a private or executable mapping; `EACCES` for a writable mapping of what is read-only.
    ///
    /// # Safety
    ///
    /// `vma` is being set up by an `mmap` file operation.
    pub(crate) unsafe fn map(self: &Arc<Self>, vma: *mut bindings::vm_area_struct, writable: bool) -> Result {
        // SAFETY: By the requirements of this function.
        let (new, page_offset) = unsafe { (VmaNew::from_raw(vma), (*vma).vm_pgoff) };
        let first = ((page_offset as u64) << PAGE_SHIFT).checked_sub(self.offset()).ok_or(EINVAL)?;
        let end = first.checked_add((new.end() - new.start()) as u64).ok_or(EINVAL)?;
        if end > self.bytes || new.flags() & flags::MAYSHARE == 0 || new.executable() {
            return Err(EINVAL);
        }
        if !writable {
            if new.writable() {
                return Err(EACCES);
            }
            new.try_clear_maywrite()?;
        }
        new.try_clear_mayexec()?;
        // SAFETY: The VMA is being set up; pages are inserted by the fault handler only, see `bell`. `close` gives the reference back.
        unsafe {
            inline::vma_writecombined(vma);
            (*vma).vm_private_data = Arc::into_raw(self.clone()).cast_mut().cast();
            (*vma).vm_ops = &raw const OPERATIONS.0;
        }
        Ok(())
    }

    fn frame(&self, page_offset: usize) -> Option<usize> {
        let offset = ((page_offset as u64) << PAGE_SHIFT).checked_sub(self.offset())?;
        if offset >= self.bytes {
            return None;
        }
        if self.may_be_reached() {
            return Some(((self.endpoint.memory_start + self.start + offset) >> PAGE_SHIFT) as usize);
        }
        let dummy = self.dummy.page(0)?;
        // SAFETY: A page that the window holds.
        Some(unsafe { inline::page_to_pfn(dummy.as_ptr()) })
    }
}

#[pinned_drop]
impl PinnedDrop for Window {
    fn drop(self: Pin<&mut Self>) {
        self.endpoint.give_memory(self.start);
    }
}

impl Endpoint {
    /// Makes all mappings of the endpoint's memory fault again, to see what they may be.
    pub(crate) fn zap_windows(&self) {
        if self.memory_bytes > 0 {
            drop(self.bell_gate.lock());
            mapping_inode::zap(base(self.id), 1 << ENDPOINT_SHIFT);
        }
    }
}

fn base(endpoint: u32) -> u64 {
    WINDOW | u64::from(endpoint) << ENDPOINT_SHIFT
}

/// Whether a page offset is that of a window.
pub(crate) fn is_window(page_offset: usize) -> bool {
    page_offset as u64 & WINDOW >> PAGE_SHIFT != 0
}

/// The range of memory that a mapping of `bytes` at a page offset would begin in.
pub(crate) fn start_of(page_offset: usize) -> u64 {
    ((page_offset as u64) << PAGE_SHIFT) & ((1 << ENDPOINT_SHIFT) - 1)
}

static OPERATIONS: VmOperations = VmOperations(bindings::vm_operations_struct {
    open: Some(open),
    close: Some(close),
    fault: Some(fault),
    ..pin_init::zeroed()
});

extern "C" fn open(vma: *mut bindings::vm_area_struct) {
    // SAFETY: `map` stored a reference in each VMA with these operations, and the new one is a copy of such a VMA.
    let window = unsafe { Arc::from_raw((*vma).vm_private_data.cast::<Window>()) };
    core::mem::forget(window.clone());
    core::mem::forget(window);
}

extern "C" fn close(vma: *mut bindings::vm_area_struct) {
    // SAFETY: Gives back the reference that `map` or `open` stored; the VMA's entries are gone, so memory and dummy may go.
    drop(unsafe { Arc::from_raw((*vma).vm_private_data.cast::<Window>()) });
}

extern "C" fn fault(vmf: *mut bindings::vm_fault) -> bindings::vm_fault_t {
    // SAFETY: The VMA is locked and has these operations, so its private data is a `Window`.
    let (vma, window, page_offset, address) = unsafe {
        let fault = &(*vmf).__bindgen_anon_1;
        (fault.vma, &*(*fault.vma).vm_private_data.cast::<Window>(), fault.pgoff, fault.address)
    };
    // Not under the gate, which error recovery and unbind wait for: a cgroup at its limit may take its time.
    // SAFETY: The VMA and the address of this fault.
    if !unsafe { inline::prepare_page_table(vma, address) } {
        return bindings::vm_fault_reason_VM_FAULT_OOM;
    }
    let gate = window.endpoint.bell_gate.lock();
    let Some(frame) = window.frame(page_offset) else {
        return bindings::vm_fault_reason_VM_FAULT_SIGBUS;
    };
    // SAFETY: The address lies in the VMA, which is VM_PFNMAP; the frame is the device's while the gate is held, or the dummy's.
    let result = unsafe { bindings::vmf_insert_pfn(vma, address, frame) };
    drop(gate);
    result
}

/// Memory of an endpoint that channels have taken, start and bytes, the lowest first; part of `Hardware`. There may be as many ranges as pages.
pub(crate) struct Taken(KVVec<(u64, u64)>);

impl Taken {
    /// None.
    pub(crate) const fn new() -> Self {
        Self(KVVec::new())
    }

    /// Takes the lowest free range of `bytes`, a power of two and its own alignment.
    ///
    /// # Errors
    ///
    /// `ENOSPC` when no range is free, `ENOMEM` without host memory.
    pub(crate) fn take(&mut self, size: u64, bytes: u64) -> Result<u64> {
        if bytes < PAGE_SIZE as u64 || !bytes.is_power_of_two() {
            return Err(EINVAL);
        }
        let mut start = 0u64;
        let mut place = self.0.len();
        // Once through the list: the caller holds a lock that error recovery waits for.
        for (index, (other, length)) in self.0.iter().enumerate() {
            if start.checked_add(bytes).is_some_and(|end| end <= *other) {
                place = index;
                break;
            }
            start = start.max(other + length).checked_next_multiple_of(bytes).ok_or(ENOSPC)?;
        }
        if start.checked_add(bytes).is_none_or(|end| end > size) {
            return Err(ENOSPC);
        }
        self.0.reserve(1, GFP_KERNEL)?;
        self.0.insert_within_capacity(place, (start, bytes)).map_err(|_| ENOMEM)?;
        Ok(start)
    }

    /// Gives a range back.
    pub(crate) fn give(&mut self, start: u64) {
        if let Ok(index) = self.0.binary_search_by_key(&start, |(other, _)| *other) {
            let _ = self.0.remove(index);
        }
    }
}

#[kunit_tests(pcieipc_window)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_aligned_and_apart_and_come_back() -> Result {
        let mut taken = Taken::new();
        assert_eq!(taken.take(1 << 20, 4096)?, 0);
        assert_eq!(taken.take(1 << 20, 1 << 16)?, 1 << 16);
        assert_eq!(taken.take(1 << 20, 4096)?, 4096);
        assert!(taken.take(1 << 20, 1 << 20).is_err());
        taken.give(0);
        assert_eq!(taken.take(1 << 20, 4096)?, 0);
        assert!(taken.take(1 << 20, 12288).is_err() && taken.take(1 << 20, 1 << 63).is_err());
        Ok(())
    }

    #[test]
    fn a_hole_is_taken_again_before_what_lies_above_it() -> Result {
        let mut taken = Taken::new();
        for page in 0..8 {
            assert_eq!(taken.take(8 << 12, 1 << 12)?, page << 12);
        }
        assert!(taken.take(8 << 12, 1 << 12).is_err());
        for page in [2, 3, 5] {
            taken.give(page << 12);
        }
        // A range of two pages begins at an even one.
        assert_eq!(taken.take(8 << 12, 2 << 12)?, 2 << 12);
        assert!(taken.take(8 << 12, 2 << 12).is_err());
        assert_eq!(taken.take(8 << 12, 1 << 12)?, 5 << 12);
        assert!(taken.take(8 << 12, 1 << 12).is_err());
        Ok(())
    }

    /// 4096 times through the list are a moment; through the list for each candidate they would be 10¹⁰ steps.
    #[test]
    fn memory_that_is_taken_page_by_page_is_still_taken_at_once() -> Result {
        let mut taken = Taken::new();
        for page in 0..4096 {
            assert_eq!(taken.take(1 << 30, 1 << 12)?, page << 12);
        }
        Ok(())
    }
}
