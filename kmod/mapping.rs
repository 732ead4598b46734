// SPDX-License-Identifier: GPL-2.0

//! Pages of a ring, mapped for one endpoint's DMA.

use crate::memory::Pages;
use kernel::{bindings, error::to_result, page::PAGE_SIZE, prelude::*, sync::Arc, types::Opaque};

/// Ring registers hold 32-bit lengths.
const LARGEST_PIECE: u64 = 1 << 31;

/// One contiguous piece as the device sees it.
#[derive(Clone, Copy)]
pub(crate) struct Segment {
    /// Bus address.
    pub(crate) address: u64,
    /// Bytes.
    pub(crate) bytes: u64,
}

/// Host memory of a mapping.
struct Host {
    table: KBox<Opaque<bindings::sg_table>>,
    /// Held until the device cannot reach them any more.
    pages: Arc<Pages>,
}

/// A DMA mapping of a ring's data. It is owned by the endpoint's `Hardware` and unmapped before the driver lets go of the device.
pub(crate) struct Mapping {
    /// Names the mapping within its endpoint; never used again.
    pub(crate) key: u64,
    /// What the endpoint is told about it: channel in the upper half, bit 31 for another endpoint's ring.
    pub(crate) tag: u32,
    /// Slots of the ring table that it has, one for each segment.
    pub(crate) slots: KVec<u32>,
    /// Its pieces.
    pub(crate) segments: KVec<Segment>,
    /// The segment is an offset into the endpoint's own memory and no bus address.
    pub(crate) own_memory: bool,
    /// The DMA API's part; none for device memory, which needs no translation.
    host: Option<Host>,
    mapped: bool,
}

// SAFETY: The table is owned and not tied to a thread.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps `pages` for `device`, both ways.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory, `EIO` when the device could reach the pages only through bounce buffers or not coherently.
    ///
    /// # Safety
    ///
    /// `device` is bound to this driver, and stays so until [`Mapping::unmap`].
    pub(crate) unsafe fn new(device: *mut bindings::device, key: u64, tag: u32, pages: &Arc<Pages>) -> Result<Self> {
        let table = KBox::new(Opaque::<bindings::sg_table>::zeroed(), GFP_KERNEL)?;
        // As `LARGEST_PIECE`; the kernel wants whole pages.
        const LARGEST: u32 = u32::MAX & !(PAGE_SIZE as u32 - 1);
        // SAFETY: The table is fresh; the array holds `len` valid pages and is only read.
        to_result(unsafe {
            bindings::sg_alloc_table_from_pages_segment(
                table.get(),
                pages.as_ptr(),
                pages.len() as u32,
                0,
                pages.len() * PAGE_SIZE,
                LARGEST,
                bindings::GFP_KERNEL,
            )
        })?;
        let host = Host { table, pages: pages.clone() };
        let mut mapping =
            Self { key, tag, slots: KVec::new(), segments: KVec::new(), own_memory: false, host: Some(host), mapped: false };
        let table = mapping.table();
        let mapped = to_result(
            // SAFETY: The device is bound by the requirements of this function; the table was filled above.
            unsafe { bindings::dma_map_sgtable(device, table, bindings::dma_data_direction::DMA_BIDIRECTIONAL, 0) },
        );
        if let Err(error) = mapped {
            mapping.free_table();
            return Err(error);
        }
        mapping.mapped = true;
        let collected = mapping.collect();
        // SAFETY: The device is valid.
        let direct = unsafe { is_coherent_and_direct(device) };
        if collected.is_err() || !direct {
            // SAFETY: The same device that it was mapped for.
            unsafe { mapping.unmap(device) };
            collected?;
            return Err(EIO);
        }
        Ok(mapping)
    }

    fn collect(&mut self) -> Result {
        // SAFETY: The table was mapped, so its first `nents` entries carry bus addresses.
        let (mut entry, count) = unsafe { ((*self.table()).sgl, (*self.table()).nents) };
        for _ in 0..count {
            // SAFETY: `entry` is one of the first `nents` entries.
            let segment =
                unsafe { Segment { address: bindings::sg_dma_address(entry), bytes: u64::from(bindings::sg_dma_len(entry)) } };
            self.segments.push(segment, GFP_KERNEL)?;
            // SAFETY: As above; after the last entry the result is not used.
            entry = unsafe { bindings::sg_next(entry) };
        }
        Ok(())
    }

    /// Takes the device's access away. With a lazy IOMMU it ends only after a flush, so the pages must not be freed before.
    ///
    /// # Safety
    ///
    /// `device` is the one that it was mapped for, still bound, and told to stop using the pages.
    pub(crate) unsafe fn unmap(&mut self, device: *mut bindings::device) {
        if core::mem::replace(&mut self.mapped, false) {
            // SAFETY: Mapped for this device with the same direction, and unmapped only here.
            unsafe { bindings::dma_unmap_sgtable(device, self.table(), bindings::dma_data_direction::DMA_BIDIRECTIONAL, 0) };
            self.free_table();
        }
    }

    /// A part of device memory, for the engine of its own endpoint or of another.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory.
    pub(crate) fn of_device(key: u64, tag: u32, segment: Segment, own_memory: bool) -> Result<Self> {
        let mut segments = KVec::new();
        let mut done = 0;
        while done < segment.bytes {
            let bytes = (segment.bytes - done).min(LARGEST_PIECE);
            segments.push(Segment { address: segment.address + done, bytes }, GFP_KERNEL)?;
            done += bytes;
        }
        Ok(Self { key, tag, slots: KVec::new(), segments, own_memory, host: None, mapped: false })
    }

    fn table(&self) -> *mut bindings::sg_table {
        self.host.as_ref().map_or(core::ptr::null_mut(), |host| host.table.get())
    }

    fn free_table(&mut self) {
        // SAFETY: The table was allocated by `sg_alloc_table_from_pages_segment` and is freed once; it is left empty.
        unsafe { bindings::sg_free_table(self.table()) };
    }

    /// The host memory that it is of; none for device memory.
    pub(crate) fn host_pages(&self) -> Option<&Pages> {
        self.host.as_ref().map(|host| &*host.pages)
    }

    /// The bus address of `offset`, and how many bytes follow it contiguously.
    pub(crate) fn locate(&self, offset: u64) -> Option<Segment> {
        let mut start = 0;
        for segment in self.segments.iter() {
            if offset < start + segment.bytes {
                let within = offset - start;
                return Some(Segment { address: segment.address + within, bytes: segment.bytes - within });
            }
            start += segment.bytes;
        }
        None
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.mapped {
            // Never reached: the endpoint unmaps all before it lets go. Leaking keeps the device from writing into pages
            // that belong to somebody else by then.
            pr_err!("a DMA mapping was dropped while mapped; its pages are leaked\n");
            core::mem::forget(self.host.take());
        }
    }
}

/// Whether the DMA API maps pages for `device` directly: no bounce buffers so far, no cache maintenance needed.
///
/// # Safety
///
/// `device` is valid.
unsafe fn is_coherent_and_direct(device: *mut bindings::device) -> bool {
    // SAFETY: The device is valid; `flags` is a bitmap of one word.
    let flags = unsafe { (&raw const (*device).flags).cast::<usize>().read_volatile() };
    flags & (1 << bindings::struct_device_flags_DEV_FLAG_DMA_SKIP_SYNC) != 0
}

/// Makes the IOMMU forget what was unmapped, so that no access in flight lands in pages that are freed next.
///
/// # Safety
///
/// `device` is bound to this driver.
pub(crate) unsafe fn flush_iommu(device: *mut bindings::device) {
    // SAFETY: The device is bound, so its domain stays; the operations of a domain are constant.
    unsafe {
        let domain = bindings::iommu_get_domain_for_dev(device);
        if domain.is_null() || (*domain).ops.is_null() {
            return;
        }
        if let Some(flush) = (*(*domain).ops).flush_iotlb_all {
            flush(domain);
        }
    }
}

#[kunit_tests(pcieipc_mapping)]
mod tests {
    use super::*;

    fn pieces(lengths: &[u64]) -> Result<Mapping> {
        let mut mapping = Mapping::of_device(1, 0, Segment { address: 0, bytes: 0 }, false)?;
        for (index, bytes) in lengths.iter().enumerate() {
            // Each piece has an address of its own that does not follow the one before.
            mapping.segments.push(Segment { address: (index as u64 + 1) << 32, bytes: *bytes }, GFP_KERNEL)?;
        }
        Ok(mapping)
    }

    #[test]
    fn an_offset_is_found_in_its_piece_with_what_is_left_of_it() -> Result {
        let mapping = pieces(&[4096, 8192, 4096])?;
        for (offset, piece, within, left) in
            [(0, 1, 0, 4096), (4095, 1, 4095, 1), (4096, 2, 0, 8192), (12287, 2, 8191, 1), (12288, 3, 0, 4096)]
        {
            let found = mapping.locate(offset);
            assert!(found.is_some_and(|found| found.address == (piece << 32) + within && found.bytes == left));
        }
        Ok(())
    }

    #[test]
    fn device_memory_is_in_pieces_whose_length_a_ring_register_holds() -> Result {
        for (bytes, pieces) in [(4096, 1), (1 << 31, 1), (1 << 32, 2), (8 << 30, 4)] {
            let mapping = Mapping::of_device(1, 0, Segment { address: 1 << 40, bytes }, false)?;
            assert_eq!(mapping.segments.len(), pieces);
            let mut end = 1 << 40;
            for segment in mapping.segments.iter() {
                assert!(segment.address == end && u32::try_from(segment.bytes).is_ok());
                end += segment.bytes;
            }
            assert_eq!(end, (1 << 40) + bytes);
        }
        Ok(())
    }

    #[test]
    fn beyond_the_last_piece_there_is_nothing() -> Result {
        let mapping = pieces(&[4096])?;
        assert!(mapping.locate(4096).is_none() && mapping.locate(u64::MAX).is_none());
        assert!(pieces(&[])?.locate(0).is_none());
        Ok(())
    }
}
