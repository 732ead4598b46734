// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory mapped from the module.

use std::{
    num::NonZeroUsize,
    os::fd::AsFd,
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use nix::{
    errno::Errno,
    sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap},
};

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// A shared mapping. The other side writes it at any time, so it is only read and written by value.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: all access is atomic or by copy.
unsafe impl Sync for Mapping {}

/// Read and write.
pub const READ_WRITE: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);

/// Far from where the kernel puts mappings of its own choice, and from programs.
const APART: NonZeroUsize = NonZeroUsize::new(1 << 44).unwrap();

impl Mapping {
    /// Maps shared.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn new(fd: impl AsFd, offset: u64, len: usize, protection: ProtFlags) -> Result<Self, Errno> {
        Self::with_flags(fd, offset, len, protection, MapFlags::MAP_SHARED)
    }

    /// Maps with these flags.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn with_flags(fd: impl AsFd, offset: u64, len: usize, protection: ProtFlags, flags: MapFlags) -> Result<Self, Errno> {
        let size = NonZeroUsize::new(len).ok_or(Errno::EINVAL)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe { mmap(None, size, protection, flags, fd, offset as libc::off_t) }?;
        Ok(Self { start: start.cast(), len })
    }

    /// Maps shared where nothing else of the process is, so that there are no page tables yet.
    ///
    /// # Errors
    /// The kernel's errno; `EEXIST` while another such mapping lives.
    pub fn apart(fd: impl AsFd, offset: u64, len: usize, protection: ProtFlags) -> Result<Self, Errno> {
        let size = NonZeroUsize::new(len).ok_or(Errno::EINVAL)?;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED_NOREPLACE;
        // SAFETY: the kernel maps there only if nothing else is.
        let start = unsafe { mmap(Some(APART), size, protection, flags, fd, offset as libc::off_t) }?;
        Ok(Self { start: start.cast(), len })
    }

    /// Memory of the process alone.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn anonymous(len: usize) -> Result<Self, Errno> {
        let size = NonZeroUsize::new(len).ok_or(Errno::EINVAL)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe { mmap_anonymous(None, size, READ_WRITE, MapFlags::MAP_PRIVATE) }?;
        Ok(Self { start: start.cast(), len })
    }

    /// Where it starts.
    pub fn address(&self) -> NonNull<libc::c_void> {
        self.start.cast()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: nothing is not mapped.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Changes what the process may do with it.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn protect(&self, protection: ProtFlags) -> Result<(), Errno> {
        // SAFETY: the range is this mapping, and nothing refers into it.
        unsafe { mprotect(self.start.cast(), self.len, protection) }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset % 8 == 0 && offset + 8 <= self.len);
        // SAFETY: aligned and inside, as just checked; the mapping lives as long as the reference.
        unsafe { self.start.add(offset).cast().as_ref() }
    }

    /// Loads with acquire.
    pub fn load(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Stores with release.
    pub fn store(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }

    /// Stores four bytes with release.
    pub fn store32(&self, offset: usize, value: u32) {
        assert!(offset % 4 == 0 && offset + 4 <= self.len);
        // SAFETY: aligned and inside, as just checked; the mapping lives as long as the reference.
        unsafe { self.start.add(offset).cast::<AtomicU32>().as_ref() }.store(value, Ordering::Release);
    }

    /// Stores words of a pattern all over.
    pub fn fill(&self, seed: u64) {
        for offset in (0..self.len).step_by(8) {
            self.store(offset, pattern(seed, offset));
        }
    }

    /// How many words differ from the pattern.
    pub fn differences(&self, seed: u64) -> usize {
        (0..self.len).step_by(8).filter(|&offset| self.load(offset) != pattern(seed, offset)).count()
    }
}

/// The word that [`Mapping::fill`] stores at an offset.
pub fn pattern(seed: u64, offset: usize) -> u64 {
    (offset as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.wrapping_mul(0xd134_2543_de82_ef95)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `new` with this length; nothing refers into it any more.
        let unmapped = unsafe { munmap(self.start.cast(), self.len) };
        assert_eq!(unmapped, Ok(()));
    }
}
