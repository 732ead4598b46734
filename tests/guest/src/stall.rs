// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory whose pages come only when they are let go: whoever touches it, the kernel included, sleeps until then.

use std::{
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr::NonNull,
    time::Duration,
};

use nix::{errno::Errno, poll::PollFlags};

use crate::{
    mapping::{Mapping, PAGE},
    wait,
};

/// `_IOWR(0xAA, 0x3F, struct uffdio_api)`
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
/// `_IOWR(0xAA, 0x00, struct uffdio_register)`
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
/// `_IOWR(0xAA, 0x03, struct uffdio_copy)`
const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;

/// One page that is not there yet.
#[derive(Debug)]
pub struct StalledPage {
    fd: OwnedFd,
    memory: Mapping,
}

impl StalledPage {
    /// A page that stalls everybody.
    pub fn new() -> Self {
        // SAFETY: a plain system call that makes a descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        let fd = Errno::result(fd).unwrap_or_else(|error| panic!("userfaultfd: {error}"));
        // SAFETY: the kernel has just made this descriptor for us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let memory = Mapping::anonymous(PAGE).unwrap_or_else(|error| panic!("mmap: {error}"));
        let stalled = Self { fd, memory };
        stalled.order(UFFDIO_API, &mut [0xaa, 0, 0]);
        let address = stalled.address().as_ptr() as u64;
        // UFFDIO_REGISTER_MODE_MISSING
        stalled.order(UFFDIO_REGISTER, &mut [address, PAGE as u64, 1, 0]);
        stalled
    }

    fn order(&self, request: libc::c_ulong, words: &mut [u64]) {
        // SAFETY: the words are the structure that the request's number names the size of.
        let done = unsafe { libc::ioctl(self.fd.as_raw_fd(), request, words.as_mut_ptr()) };
        Errno::result(done).unwrap_or_else(|error| panic!("userfaultfd {request:#x}: {error}"));
    }

    /// Where it is.
    pub fn address(&self) -> NonNull<libc::c_void> {
        self.memory.address()
    }

    /// Waits until somebody sleeps on it.
    pub fn touched(&self, limit: Duration) -> bool {
        wait::polled(&self.fd, PollFlags::POLLIN, limit).contains(PollFlags::POLLIN)
    }

    /// Lets everybody go on, with these bytes at the page's start.
    pub fn release(&self, bytes: &[u8]) {
        let mut page = vec![0u8; PAGE];
        page[..bytes.len()].copy_from_slice(bytes);
        self.order(UFFDIO_COPY, &mut [self.address().as_ptr() as u64, page.as_ptr() as u64, PAGE as u64, 0, 0]);
    }
}

impl Default for StalledPage {
    fn default() -> Self {
        Self::new()
    }
}
