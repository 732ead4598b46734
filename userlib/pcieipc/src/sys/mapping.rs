// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that another process or a device can change.

use std::{io, mem::ManuallyDrop, os::fd::BorrowedFd, ptr::NonNull};

use memmap2::{MmapOptions, MmapRaw};

use super::Home;

/// What this process does with a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Loads only; a store would end the process.
    Read,
    /// Loads and stores.
    ReadWrite,
}

/// A shared mapping of a file descriptor. It hands out a pointer, never a slice.
#[derive(Debug)]
pub struct Mapping {
    raw: ManuallyDrop<MmapRaw>,
    start: NonNull<u8>,
    home: Home,
}

// SAFETY: the pointer is that of `raw`, which is Send; what is behind it is only reached through raw pointers and atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above, `raw` is Sync.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` of the descriptor from `offset` on, a multiple of the page size, and makes the pages present.
    ///
    /// # Errors
    /// As mmap(2).
    pub fn new(fd: BorrowedFd<'_>, offset: u64, bytes: usize, access: Access) -> io::Result<Self> {
        Self::with(MmapOptions::new().populate(), fd, offset, bytes, access)
    }

    /// Like [`Mapping::new`], but leaves the pages to whoever touches them first: a file's page lies on the memory node of the processor that
    /// touched it first, in whatever mapping.
    ///
    /// # Errors
    /// As mmap(2).
    pub fn untouched(fd: BorrowedFd<'_>, offset: u64, bytes: usize, access: Access) -> io::Result<Self> {
        Self::with(&mut MmapOptions::new(), fd, offset, bytes, access)
    }

    fn with(options: &mut MmapOptions, fd: BorrowedFd<'_>, offset: u64, bytes: usize, access: Access) -> io::Result<Self> {
        use std::os::fd::AsRawFd;
        options.offset(offset).len(bytes);
        let raw = match access {
            Access::Read => options.map_raw_read_only(fd.as_raw_fd())?,
            Access::ReadWrite => options.map_raw(fd.as_raw_fd())?,
        };
        let start = NonNull::new(raw.as_mut_ptr()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { raw: ManuallyDrop::new(raw), start, home: Home::here() })
    }

    /// Where it starts.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> usize {
        self.raw.len()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A forked child may not have inherited it, and have something else there by now.
        if self.home.is_here() {
            // SAFETY: dropped here and nowhere else, and not used after that.
            unsafe { ManuallyDrop::drop(&mut self.raw) };
        }
    }
}
