// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory whose pages come, or may be written, only when they are let go: whoever touches it, the kernel included, sleeps until then.

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
/// `_IOWR(0xAA, 0x06, struct uffdio_writeprotect)`
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
const UFFDIO_REGISTER_MODE_WP: u64 = 2;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1;

/// One page that is not there yet, or not to be written yet.
#[derive(Debug)]
pub struct StalledPage {
    fd: OwnedFd,
    memory: Mapping,
    protected: bool,
}

impl StalledPage {
    /// A page that stalls everybody.
    pub fn new() -> Self {
        let stalled = Self::prepared(false);
        stalled.register(UFFDIO_REGISTER_MODE_MISSING);
        stalled
    }

    /// A page with these bytes at its start that stalls whoever writes it and nobody who reads it.
    pub fn for_writers(bytes: &[u8]) -> Self {
        assert!(bytes.len() <= PAGE);
        let stalled = Self::prepared(true);
        // SAFETY: the page is ours, nothing refers to it, and the bytes fit.
        unsafe { stalled.address().cast::<u8>().copy_from(NonNull::from(bytes).cast(), bytes.len()) };
        stalled.register(UFFDIO_REGISTER_MODE_WP);
        stalled.order(UFFDIO_WRITEPROTECT, &mut [stalled.start(), PAGE as u64, UFFDIO_WRITEPROTECT_MODE_WP]);
        stalled
    }

    fn prepared(protected: bool) -> Self {
        // SAFETY: a plain system call that makes a descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        let fd = Errno::result(fd).unwrap_or_else(|error| panic!("userfaultfd: {error}"));
        // SAFETY: the kernel has just made this descriptor for us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let memory = Mapping::anonymous(PAGE).unwrap_or_else(|error| panic!("mmap: {error}"));
        let stalled = Self { fd, memory, protected };
        stalled.order(UFFDIO_API, &mut [0xaa, 0, 0]);
        stalled
    }

    fn start(&self) -> u64 {
        self.address().as_ptr() as u64
    }

    fn register(&self, mode: u64) {
        self.order(UFFDIO_REGISTER, &mut [self.start(), PAGE as u64, mode, 0]);
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

    /// Lets everybody go on; a page that was not there has these bytes at its start.
    pub fn release(&self, bytes: &[u8]) {
        if self.protected {
            return self.order(UFFDIO_WRITEPROTECT, &mut [self.start(), PAGE as u64, 0]);
        }
        let mut page = vec![0u8; PAGE];
        page[..bytes.len()].copy_from_slice(bytes);
        self.order(UFFDIO_COPY, &mut [self.start(), page.as_ptr() as u64, PAGE as u64, 0, 0]);
    }
}

impl Default for StalledPage {
    fn default() -> Self {
        Self::new()
    }
}
