// SPDX-License-Identifier: GPL-2.0

//! One anonymous inode whose address space all our mappings belong to.
//!
//! It must not be that of a device node: a node can lie on any file system, and long-term pins of its pages would then fail
//! or keep that file system busy. One address space for all also lets a doorbell be zapped wherever it is mapped.

use crate::{file::Operations, inline};
use core::ptr::NonNull;
use kernel::{
    bindings,
    prelude::*,
    sync::atomic::{Atomic, Relaxed},
};

/// Address of the inode, 0 before `MappingInode::new`.
static INODE: Atomic<usize> = Atomic::new(0);

/// Keeps the inode.
pub(crate) struct MappingInode(NonNull<bindings::inode>);

// SAFETY: The inode is reference-counted; this only holds and drops the reference.
unsafe impl Send for MappingInode {}
// SAFETY: As above.
unsafe impl Sync for MappingInode {}

static OPERATIONS: Operations = Operations(bindings::file_operations {
    owner: kernel::module::this_module::<crate::LocalModule>().as_ptr(),
    ..pin_init::zeroed()
});

impl MappingInode {
    /// Makes the inode.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory.
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: The operations have an owner and use no private data. The file is only a way to get its inode, of which
        // a reference is taken before the file is given back, and nobody else knows it.
        let inode = unsafe {
            let file = inline::anon_file_with_inode(c"[pcieipc]", &raw const OPERATIONS.0, kernel::fs::file::flags::O_RDWR)?;
            let inode = (*file).f_inode;
            bindings::ihold(inode);
            inline::fput_now(file);
            inode
        };
        let inode = NonNull::new(inode).ok_or(EINVAL)?;
        INODE.store(inode.as_ptr() as usize, Relaxed);
        Ok(Self(inode))
    }
}

impl Drop for MappingInode {
    fn drop(&mut self) {
        INODE.store(0, Relaxed);
        // SAFETY: Gives back the reference that `new` took. No file of ours is open any more: each pins the module.
        unsafe { bindings::iput(self.0.as_ptr()) };
    }
}

fn mapping() -> Option<NonNull<bindings::address_space>> {
    let inode = NonNull::new(INODE.load(Relaxed) as *mut bindings::inode)?;
    // SAFETY: The inode lives as long as the module.
    NonNull::new(unsafe { (*inode.as_ptr()).i_mapping })
}

/// Lets a file's mappings belong to the common address space.
///
/// # Safety
///
/// `file` is being opened, or not yet known to user space.
pub(crate) unsafe fn adopt(file: *mut bindings::file) {
    if let Some(mapping) = mapping() {
        // SAFETY: By the requirements of this function nobody else uses the file yet.
        unsafe { (*file).f_mapping = mapping.as_ptr() };
    }
}

/// Empties all mappings of a range of offsets, wherever they are; they fault again when they are touched.
pub(crate) fn zap(offset: u64, bytes: u64) {
    if let Some(mapping) = mapping() {
        // SAFETY: The address space lives as long as the module; the range holds no private pages.
        unsafe { bindings::unmap_mapping_range(mapping.as_ptr(), offset as i64, bytes as i64, 1) };
    }
}
