// SPDX-License-Identifier: GPL-2.0

//! Functions of the kernel that its Rust bindings do not carry: inline ones through `inline.c`, and exported ones whose
//! headers bindgen does not read.

use crate::dmabuf::Provider;
use core::{ffi::c_void, ptr::NonNull};
use kernel::{
    bindings,
    error::{from_err_ptr, to_result},
    page::PAGE_SIZE,
    prelude::*,
};

// The structures are only passed on by pointer; bindgen gives some of their empty members no size.
#[allow(improper_ctypes)]
unsafe extern "C" {
    fn pcieipc_inline_pci_domain_nr(bus: *mut bindings::pci_bus) -> i32;
    fn pcieipc_inline_pci_channel_offline(pdev: *mut bindings::pci_dev) -> bool;
    fn pcieipc_inline_pci_dev_is_disconnected(pdev: *mut bindings::pci_dev) -> bool;
    fn pcieipc_inline_pci_upstream_bridge(pdev: *mut bindings::pci_dev) -> *mut bindings::pci_dev;
    fn pcieipc_inline_is_memory_or_absent(pdev: *mut bindings::pci_dev, bar: i32) -> bool;
    fn pcieipc_inline_page_address(page: *mut bindings::page) -> *mut c_void;
    fn pcieipc_inline_page_to_pfn(page: *mut bindings::page) -> usize;
    fn pcieipc_inline_vma_noncached(vma: *mut bindings::vm_area_struct);
    fn pcieipc_inline_vma_writecombined(vma: *mut bindings::vm_area_struct);
    fn pcieipc_inline_lockdown_dev_mem() -> i32;
    fn pcieipc_inline_reserve_memtype_wc(start: u64, size: u64) -> i32;
    fn pcieipc_inline_free_memtype_wc(start: u64, size: u64);
    fn pcieipc_inline_ioremap_wc(start: u64, size: usize) -> *mut c_void;
    fn pcieipc_inline_iounmap(at: *mut c_void);
    fn pcieipc_inline_clear_io(at: *mut c_void, size: usize);
    fn pcieipc_inline_read_io(at: *mut c_void) -> u32;
    fn pcieipc_inline_p2pdma_distance(provider: *mut bindings::pci_dev, client: *mut bindings::device) -> i32;
    fn pcieipc_inline_peer_offset(pdev: *mut bindings::pci_dev, bar: i32, offset: *mut u64) -> i32;
    fn pcieipc_inline_peer_provider(pdev: *mut bindings::pci_dev, bar: i32) -> *mut c_void;
    fn pcieipc_inline_wmb();
    fn pcieipc_inline_ratelimit() -> bool;
    fn pcieipc_inline_get_current_user() -> *mut bindings::user_struct;
    fn pcieipc_inline_memlock_limit() -> usize;
    fn pcieipc_inline_array_index_nospec(index: u64, size: u64) -> u64;
    fn anon_inode_getfile(
        name: *const c_char,
        fops: *const bindings::file_operations,
        private: *mut c_void,
        flags: i32,
    ) -> *mut bindings::file;
    fn __fput_sync(file: *mut bindings::file);
    fn anon_inode_create_getfile(
        name: *const c_char,
        fops: *const bindings::file_operations,
        private: *mut c_void,
        flags: i32,
        context: *const bindings::inode,
    ) -> *mut bindings::file;
}

/// The domain number of a bus.
///
/// # Safety
///
/// `bus` is a valid bus.
pub(crate) unsafe fn pci_domain_nr(bus: *mut bindings::pci_bus) -> i32 {
    // SAFETY: By the requirements of this function.
    unsafe { pcieipc_inline_pci_domain_nr(bus) }
}

/// Whether error recovery, or removal, has cut the device off.
///
/// # Safety
///
/// `pdev` is a valid device.
pub(crate) unsafe fn pci_channel_offline(pdev: *mut bindings::pci_dev) -> bool {
    // SAFETY: By the requirements of this function.
    unsafe { pcieipc_inline_pci_channel_offline(pdev) }
}

/// Whether hot-plug, or a recovery that failed, has given the device up for good.
///
/// # Safety
///
/// `pdev` is a valid device.
pub(crate) unsafe fn pci_dev_is_disconnected(pdev: *mut bindings::pci_dev) -> bool {
    // SAFETY: By the requirements of this function.
    unsafe { pcieipc_inline_pci_dev_is_disconnected(pdev) }
}

/// The bridge above a function, for a virtual one that above its physical function; null below a host bridge.
///
/// # Safety
///
/// `pdev` is being probed: a virtual function that is removed refers to its physical one no more.
pub(crate) unsafe fn pci_upstream_bridge(pdev: *mut bindings::pci_dev) -> *mut bindings::pci_dev {
    // SAFETY: By the requirements of this function.
    unsafe { pcieipc_inline_pci_upstream_bridge(pdev) }
}

/// Whether a BAR is memory and no I/O ports, or is not there.
///
/// # Safety
///
/// `pdev` is a valid device and `bar` the number of a BAR.
pub(crate) unsafe fn is_memory_or_absent(pdev: *mut bindings::pci_dev, bar: u32) -> bool {
    // SAFETY: By the requirements of this function.
    unsafe { pcieipc_inline_is_memory_or_absent(pdev, bar as i32) }
}

/// Where a page lies in the kernel's linear mapping.
///
/// # Safety
///
/// `page` is a valid page that is not in high memory.
pub(crate) unsafe fn page_address(page: *mut bindings::page) -> *mut c_void {
    // SAFETY: By the requirements of this function.
    unsafe { pcieipc_inline_page_address(page) }
}

/// The frame number of a page.
///
/// # Safety
///
/// `page` is a valid page.
pub(crate) unsafe fn page_to_pfn(page: *mut bindings::page) -> usize {
    // SAFETY: By the requirements of this function.
    unsafe { pcieipc_inline_page_to_pfn(page) }
}

/// Makes a new VMA one of uncached frames without struct pages, not inherited and not growing.
///
/// # Safety
///
/// `vma` is being set up by an `mmap` file operation and locked for writing.
pub(crate) unsafe fn vma_noncached(vma: *mut bindings::vm_area_struct) {
    // SAFETY: By the requirements of this function.
    unsafe { pcieipc_inline_vma_noncached(vma) }
}

/// Makes a new VMA one of write-combined frames without struct pages, not inherited and not growing.
///
/// # Safety
///
/// As [`vma_noncached`].
pub(crate) unsafe fn vma_writecombined(vma: *mut bindings::vm_area_struct) {
    // SAFETY: By the requirements of this function.
    unsafe { pcieipc_inline_vma_writecombined(vma) }
}

/// Refuses what would give access to all memory where lockdown forbids that.
///
/// # Errors
///
/// `EPERM`.
pub(crate) fn check_lockdown() -> Result {
    // SAFETY: Asks about the system as a whole.
    to_result(unsafe { pcieipc_inline_lockdown_dev_mem() })
}

/// Lets a range of a BAR be mapped write-combining; false when it cannot be.
///
/// # Safety
///
/// The range is a BAR of a device that is being probed; it is given back by [`free_memtype_wc`].
pub(crate) unsafe fn reserve_memtype_wc(start: u64, size: u64) -> bool {
    // SAFETY: By the requirements of this function.
    unsafe { pcieipc_inline_reserve_memtype_wc(start, size) == 0 }
}

/// Takes [`reserve_memtype_wc`] back.
///
/// # Safety
///
/// The range was reserved, and no mapping of it is left.
pub(crate) unsafe fn free_memtype_wc(start: u64, size: u64) {
    // SAFETY: By the requirements of this function.
    unsafe { pcieipc_inline_free_memtype_wc(start, size) }
}

/// A range of a BAR in the kernel's address space, write-combined.
pub(crate) struct IoRange {
    start: NonNull<u8>,
    size: usize,
}

impl IoRange {
    /// Maps `size` bytes, at least 4, from `start` on.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory.
    ///
    /// # Safety
    ///
    /// The range is part of a memory BAR.
    pub(crate) unsafe fn new(start: u64, size: usize) -> Result<Self> {
        // SAFETY: By the requirements of this function.
        let start = NonNull::new(unsafe { pcieipc_inline_ioremap_wc(start, size) }.cast()).ok_or(ENOMEM)?;
        Ok(Self { start, size })
    }

    /// Stores zeroes into `size` bytes from `offset` on, as far as they are in the range.
    ///
    /// # Safety
    ///
    /// The device may be touched.
    pub(crate) unsafe fn clear(&self, offset: usize, size: usize) {
        let offset = offset.min(self.size);
        // SAFETY: Inside of what is mapped; by the requirements of this function.
        unsafe { pcieipc_inline_clear_io(self.start.as_ptr().add(offset).cast(), size.min(self.size - offset)) }
    }

    /// Reads from it, so that what was stored before is in the device when this returns.
    ///
    /// # Safety
    ///
    /// The device may be touched.
    pub(crate) unsafe fn settle(&self) {
        wmb();
        // SAFETY: The range has 4 bytes at least; by the requirements of this function.
        unsafe { pcieipc_inline_read_io(self.start.as_ptr().cast()) };
    }
}

impl Drop for IoRange {
    fn drop(&mut self) {
        // SAFETY: Mapped in `new`.
        unsafe { pcieipc_inline_iounmap(self.start.as_ptr().cast()) };
    }
}

/// The kernel's distance for peer traffic; negative when it allows none.
///
/// # Safety
///
/// Both devices are valid, and `provider` stays bound to this driver until this returns: the kernel writes to what ends with the binding.
pub(crate) unsafe fn p2pdma_distance(provider: *mut bindings::pci_dev, client: *mut bindings::device) -> i32 {
    // SAFETY: By the requirements of this function.
    unsafe { pcieipc_inline_p2pdma_distance(provider, client) }
}

/// What is added to an address in a BAR to give the address that a peer below the same switch uses.
///
/// # Errors
///
/// `ENOMEM` without memory.
///
/// # Safety
///
/// `pdev` is being probed.
pub(crate) unsafe fn peer_offset(pdev: *mut bindings::pci_dev, bar: u32) -> Result<u64> {
    let mut offset = 0;
    // SAFETY: By the requirements of this function; what this sets up ends with the binding.
    to_result(unsafe { pcieipc_inline_peer_offset(pdev, bar as i32, &mut offset) })?;
    Ok(offset)
}

/// What lets other drivers map a BAR.
///
/// # Safety
///
/// `pdev` is being probed, and [`peer_offset`] has succeeded.
pub(crate) unsafe fn peer_provider(pdev: *mut bindings::pci_dev, bar: u32) -> Provider {
    // SAFETY: By the requirements of this function; it ends with the binding.
    Provider::new(unsafe { pcieipc_inline_peer_provider(pdev, bar as i32) })
}

/// Makes this processor's stores so far, write-combined ones too, reach the bus before its later ones.
pub(crate) fn wmb() {
    // SAFETY: A barrier.
    unsafe { pcieipc_inline_wmb() }
}

/// Makes the page table for one page of a VMA, so that inserting a frame there allocates nothing; false without memory.
///
/// # Safety
///
/// `vma` is the VMA of a fault that is being handled, and `address` lies in it.
pub(crate) unsafe fn prepare_page_table(vma: *mut bindings::vm_area_struct, address: usize) -> bool {
    // SAFETY: By the requirements of this function. Without a function for its entries this only makes the table.
    unsafe { bindings::apply_to_page_range((*vma).vm_mm, address, PAGE_SIZE, None, core::ptr::null_mut()) == 0 }
}

/// Whether one more of the messages that users cause may be printed now.
pub(crate) fn ratelimit() -> bool {
    // SAFETY: The state is static, and locked where it is changed.
    unsafe { pcieipc_inline_ratelimit() }
}

/// The user of the calling process, with a reference to be given back with `free_uid`.
pub(crate) fn current_user() -> *mut bindings::user_struct {
    // SAFETY: The credentials of the calling task are always valid for itself.
    unsafe { pcieipc_inline_get_current_user() }
}

/// RLIMIT_MEMLOCK of the calling process, in bytes.
pub(crate) fn memlock_limit() -> usize {
    // SAFETY: Reads a limit of the calling task.
    unsafe { pcieipc_inline_memlock_limit() }
}

/// Checks an index that a user chose, and keeps the processor from speculating past the check.
///
/// # Errors
///
/// `EINVAL` when it is not below `size`.
pub(crate) fn checked_index(index: u32, size: usize) -> Result<usize> {
    if index as usize >= size {
        return Err(EINVAL);
    }
    // SAFETY: Pure arithmetic.
    Ok(unsafe { pcieipc_inline_array_index_nospec(u64::from(index), size as u64) } as usize)
}

/// A new file on the kernel's one anonymous inode.
///
/// # Safety
///
/// `fops` has an owner, and its operations accept `private` as the file's private data.
pub(crate) unsafe fn anon_file(
    name: &'static CStr,
    fops: *const bindings::file_operations,
    private: *mut c_void,
    flags: u32,
) -> Result<*mut bindings::file> {
    // SAFETY: By the requirements of this function; `name` is a C string.
    from_err_ptr(unsafe { anon_inode_getfile(name.as_char_ptr(), fops, private, flags as i32) })
}

/// A new file on an anonymous inode of its own.
///
/// # Safety
///
/// As [`anon_file`].
pub(crate) unsafe fn anon_file_with_inode(
    name: &'static CStr,
    fops: *const bindings::file_operations,
    flags: u32,
) -> Result<*mut bindings::file> {
    // SAFETY: By the requirements of this function; `name` is a C string; no context inode is given.
    from_err_ptr(unsafe {
        anon_inode_create_getfile(name.as_char_ptr(), fops, core::ptr::null_mut(), flags as i32, core::ptr::null())
    })
}

/// Gives a file back at once. The usual way is when the thread returns to user space, which is too late for a file whose operations are of
/// a module that fails to load: they are freed before.
///
/// # Safety
///
/// This is the file's only reference.
pub(crate) unsafe fn fput_now(file: *mut bindings::file) {
    // SAFETY: By the requirements of this function; callers may sleep, as in all of the module's process context.
    unsafe { __fput_sync(file) };
}
