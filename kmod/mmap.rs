// SPDX-License-Identifier: GPL-2.0

//! Mappings of ring memory and status pages into users, and the offsets at which they are found.
//!
//! A mapping holds its own reference to the pages, so it stays valid memory whatever happens to the file, the session, the
//! channel and the device. It is shared, never executable, not inherited and not growing.

use crate::memory::Pages;
use kernel::{
    bindings,
    error::to_result,
    mm::virt::{flags, VmaNew},
    page::PAGE_SHIFT,
    prelude::*,
    sync::Arc,
};

/// A part of a channel, or of a session.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Area {
    /// A channel's data.
    Data,
    /// The writer's page.
    Tail,
    /// The reader's page.
    Head,
    /// The endpoint's status page.
    Status,
}

/// Bits of an offset that lie within an area: 64 GiB.
const AREA_SHIFT: u32 = 36;
/// Bits of an offset below the channel's id.
const CHANNEL_SHIFT: u32 = 40;
/// Set in offsets of doorbell pages, so that these can be zapped without touching anything else.
pub(crate) const DOORBELL: u64 = 1 << 62;
/// Set in offsets of device memory, for the same reason.
pub(crate) const WINDOW: u64 = 1 << 61;

impl Area {
    fn from_code(code: u64) -> Option<Self> {
        Some(match code {
            0 => Self::Data,
            1 => Self::Tail,
            2 => Self::Head,
            3 => Self::Status,
            _ => return None,
        })
    }

    /// Where an area of channel `channel` (0 for what belongs to no channel, and for exported descriptors) is mapped.
    pub(crate) fn offset(self, channel: u32) -> u64 {
        u64::from(channel) << CHANNEL_SHIFT | (self as u64) << AREA_SHIFT
    }
}

/// What an offset means: channel, area, and the page within the area.
pub(crate) fn decode(page_offset: usize) -> Result<(u32, Area, usize)> {
    let page_offset = page_offset as u64;
    let area_pages = AREA_SHIFT - PAGE_SHIFT as u32;
    let channel = page_offset >> (CHANNEL_SHIFT - PAGE_SHIFT as u32);
    let area = Area::from_code(page_offset >> area_pages & 0xf).ok_or(EINVAL)?;
    let page = page_offset & ((1 << area_pages) - 1);
    Ok((u32::try_from(channel)?, area, page as usize))
}

/// Maps `pages`, from page `first` on, into a new VMA.
///
/// # Errors
///
/// `EINVAL` for a range beyond the pages, a private or executable mapping; `EACCES` for a writable mapping of what is
/// read-only; `ENOMEM` without memory.
///
/// # Safety
///
/// `vma` is being set up by an `mmap` file operation.
pub(crate) unsafe fn map(vma: *mut bindings::vm_area_struct, pages: &Arc<Pages>, first: usize, writable: bool) -> Result {
    // SAFETY: By the requirements of this function.
    let new = unsafe { VmaNew::from_raw(vma) };
    let mut count = (new.end() - new.start()) >> PAGE_SHIFT;
    let end = first.checked_add(count).ok_or(EINVAL)?;
    // VM_SHARED is cleared for a descriptor that is open read-only; VM_MAYSHARE says what was asked for.
    if end > pages.len() || new.flags() & flags::MAYSHARE == 0 || new.executable() {
        return Err(EINVAL);
    }
    if !writable {
        if new.writable() {
            return Err(EACCES);
        }
        new.try_clear_maywrite()?;
    }
    new.try_clear_mayexec()?;
    new.set_dontexpand();
    new.set_dontcopy();
    new.set_dontdump();
    new.set_mixedmap();
    // SAFETY: The VMA is being set up and covers `count` pages; the array has that many valid pages from `first` on.
    to_result(unsafe { bindings::vm_insert_pages(vma, new.start(), pages.as_ptr().add(first), &mut count) })?;
    // SAFETY: The VMA is being set up. `close` gives the reference back.
    unsafe {
        (*vma).vm_private_data = Arc::into_raw(pages.clone()).cast_mut().cast();
        (*vma).vm_ops = &raw const OPERATIONS.0;
    }
    Ok(())
}

/// Operations of a kind of VMA.
pub(crate) struct VmOperations(pub(crate) bindings::vm_operations_struct);

// SAFETY: The structure is constant.
unsafe impl Sync for VmOperations {}

// No page_mkwrite or pfn_mkwrite: with them the kernel refuses long-term pins.
static OPERATIONS: VmOperations = VmOperations(bindings::vm_operations_struct {
    open: Some(open),
    close: Some(close),
    fault: Some(fault),
    ..pin_init::zeroed()
});

/// A part of a mapping became a VMA of its own.
extern "C" fn open(vma: *mut bindings::vm_area_struct) {
    // SAFETY: `map` stored a reference in each VMA with these operations, and the new one is a copy of such a VMA.
    let pages = unsafe { Arc::from_raw((*vma).vm_private_data.cast::<Pages>()) };
    core::mem::forget(pages.clone());
    core::mem::forget(pages);
}

extern "C" fn close(vma: *mut bindings::vm_area_struct) {
    // SAFETY: Gives back the reference that `map` or `open` stored.
    drop(unsafe { Arc::from_raw((*vma).vm_private_data.cast::<Pages>()) });
}

/// Fills in what MADV_DONTNEED or a zap emptied.
extern "C" fn fault(vmf: *mut bindings::vm_fault) -> bindings::vm_fault_t {
    // SAFETY: The VMA is locked and has these operations, so its private data is a reference to pages.
    let (vma, pages, page_offset, address) = unsafe {
        let fault = &(*vmf).__bindgen_anon_1;
        let pages = &*(*fault.vma).vm_private_data.cast::<Pages>();
        (fault.vma, pages, fault.pgoff, fault.address)
    };
    let Some(page) = decode(page_offset).ok().and_then(|(_, _, index)| pages.page(index)) else {
        return bindings::vm_fault_reason_VM_FAULT_SIGBUS;
    };
    // SAFETY: The page is valid and the address lies in the VMA, which is VM_MIXEDMAP.
    let inserted = unsafe { bindings::vm_insert_page(vma, address, page.as_ptr()) };
    if inserted == 0 || inserted == EBUSY.to_errno() {
        bindings::vm_fault_reason_VM_FAULT_NOPAGE
    } else if inserted == ENOMEM.to_errno() {
        bindings::vm_fault_reason_VM_FAULT_OOM
    } else {
        bindings::vm_fault_reason_VM_FAULT_SIGBUS
    }
}

#[kunit_tests(pcieipc_mmap)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_means_what_it_was_made_from() {
        for channel in [0, 1, 77, (1 << 20) - 1] {
            for area in [Area::Data, Area::Tail, Area::Head, Area::Status] {
                let offset = area.offset(channel) as usize >> PAGE_SHIFT;
                for page in [0, 5, (1 << 24) - 1] {
                    assert!(decode(offset + page).is_ok_and(|meaning| meaning == (channel, area, page)));
                }
            }
        }
    }

    #[test]
    fn what_is_no_area_is_refused() {
        assert!(decode(4 << (AREA_SHIFT - PAGE_SHIFT as u32)).is_err());
        assert!(decode(usize::MAX).is_err());
    }
}
