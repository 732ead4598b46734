// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that the guest, QEMU and this process write at the same time.

use std::{
    fs::File,
    io,
    num::NonZeroUsize,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::MetadataExt,
    },
    ptr::NonNull,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// A shared mapping of a file. Never lent out as a slice, because others write it at any time.
#[derive(Debug)]
pub struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and lives until drop.
unsafe impl Send for SharedMemory {}
// SAFETY: all access goes through `read` and `write`, which copy; a race with another writer gives mixed bytes, as on a bus.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps the first `len` bytes of a file.
    ///
    /// # Errors
    /// `InvalidInput` for an empty file; what mmap says otherwise.
    pub fn map(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let size = NonZeroUsize::new(len).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "empty memory file"))?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe { mmap(None, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED, fd, 0) }?;
        Ok(Self { start: start.cast(), len })
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: an empty file is not mapped.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn at(&self, offset: u64, len: usize) -> Option<NonNull<u8>> {
        let offset = usize::try_from(offset).ok()?;
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: offset <= self.len, so the result lies in the mapping or one past its end.
        Some(unsafe { self.start.add(offset) })
    }

    /// Copies out; false, and nothing done, when the range is not inside.
    #[must_use]
    pub fn read(&self, offset: u64, into: &mut [u8]) -> bool {
        let Some(from) = self.at(offset, into.len()) else { return false };
        match <[u8; 4]>::try_from(&*into) {
            Ok(_) if from.cast::<AtomicU32>().is_aligned() => {
                // SAFETY: aligned, four bytes inside the mapping, which lives as long as self.
                let word = unsafe { from.cast::<AtomicU32>().as_ref() }.load(Ordering::Acquire);
                into.copy_from_slice(&word.to_ne_bytes());
            }
            // SAFETY: `at` proved that the source is inside the mapping; the destination is ours alone, so they do not overlap.
            _ => unsafe { from.as_ptr().copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) },
        }
        true
    }

    /// Copies in, 4 and 8 aligned bytes as one store; false, and nothing done, when the range is not inside.
    #[must_use]
    pub fn write(&self, offset: u64, from: &[u8]) -> bool {
        let Some(to) = self.at(offset, from.len()) else { return false };
        if let (Ok(bytes), true) = (<[u8; 4]>::try_from(from), to.cast::<AtomicU32>().is_aligned()) {
            // SAFETY: aligned, four bytes inside the mapping, which lives as long as self.
            unsafe { to.cast::<AtomicU32>().as_ref() }.store(u32::from_ne_bytes(bytes), Ordering::Release);
        } else if let (Ok(bytes), true) = (<[u8; 8]>::try_from(from), to.cast::<AtomicU64>().is_aligned()) {
            // SAFETY: aligned, eight bytes inside the mapping, which lives as long as self.
            unsafe { to.cast::<AtomicU64>().as_ref() }.store(u64::from_ne_bytes(bytes), Ordering::Release);
        } else {
            // SAFETY: `at` proved that the destination is inside the mapping; the source is ours alone, so they do not overlap.
            unsafe { to.as_ptr().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        }
        true
    }

    /// Sets every byte.
    pub fn fill(&self, byte: u8) {
        // SAFETY: exactly the mapping.
        unsafe { self.start.as_ptr().write_bytes(byte, self.len) };
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length, and nobody holds a reference into it any more.
        let unmapped = unsafe { munmap(self.start.cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Every file of guest memory is mapped once and whole, however many ranges of it are mapped for DMA: behind an IOMMU
/// those are single pages, and more of them than a process may have mappings.
#[derive(Debug, Default)]
pub struct GuestFiles {
    mapped: Mutex<Vec<(u64, u64, Weak<SharedMemory>)>>,
}

impl GuestFiles {
    /// The whole file, mapped; `needed` bytes of it at least.
    ///
    /// # Errors
    /// `InvalidInput` when the file is shorter than `needed`; what fstat or mmap say otherwise.
    pub fn map(&self, file: &File, needed: u64) -> io::Result<Arc<SharedMemory>> {
        let metadata = file.metadata()?;
        let too_short =
            || io::Error::new(io::ErrorKind::InvalidInput, format!("a map of {needed} bytes of a file of {}", metadata.len()));
        let key = (metadata.dev(), metadata.ino());
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        mapped.retain(|(_, _, memory)| memory.strong_count() > 0);
        let known = mapped.iter().filter(|(dev, ino, _)| (*dev, *ino) == key).find_map(|(_, _, memory)| memory.upgrade());
        if let Some(memory) = known.filter(|memory| memory.len() as u64 >= needed) {
            return Ok(memory);
        }
        if metadata.len() < needed {
            return Err(too_short());
        }
        let memory = Arc::new(SharedMemory::map(file.as_fd(), usize::try_from(metadata.len()).map_err(|_| too_short())?)?);
        mapped.push((key.0, key.1, Arc::downgrade(&memory)));
        Ok(memory)
    }
}
