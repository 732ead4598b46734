// SPDX-License-Identifier: MIT OR Apache-2.0
//! Host memory that all ranks and their devices share: a memory file, mapped and registered.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use nix::{
    sys::memfd::{MFdFlags, memfd_create},
    unistd::ftruncate,
};
use pcieipc::{
    Error, Result,
    sys::{Access, Mapping},
};

use crate::{
    abi::{Control, MAX_RANKS, Verdict},
    driver::{Address, Device},
};

fn system(call: &'static str, hint: &str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::System { call, hint: hint.to_owned(), source: source.into() }
}

/// A memory file that this process has mapped and a device can reach.
#[derive(Debug)]
pub struct Shared {
    file: OwnedFd,
    mapping: Mapping,
    device: Arc<dyn Device>,
    address: Address,
}

impl Shared {
    /// New memory, all zero.
    pub fn new(device: &Arc<dyn Device>, bytes: u64) -> Result<Self> {
        const HINT: &str = "free some memory: it counts as shared memory";
        let file = memfd_create("pcieipc-cuda", MFdFlags::MFD_CLOEXEC).map_err(|e| system("memfd_create", HINT)(e.into()))?;
        ftruncate(&file, bytes as i64).map_err(|e| system("ftruncate", HINT)(e.into()))?;
        Self::of(device, file, bytes)
    }

    /// What another rank made. The file must be as long as agreed.
    pub fn of(device: &Arc<dyn Device>, file: OwnedFd, bytes: u64) -> Result<Self> {
        let size = nix::sys::stat::fstat(&file).map_err(|e| system("fstat", "this should not happen")(e.into()))?.st_size;
        if u64::try_from(size) != Ok(bytes) {
            return Err(Error::Argument(format!("a memory file of {size} bytes instead of {bytes}")));
        }
        let mapping = Mapping::new(file.as_fd(), 0, bytes as usize, Access::ReadWrite)
            .map_err(system("mmap", "free some memory: it counts as shared memory"))?;
        // SAFETY: the mapping lives in the same structure, and `drop` unregisters first.
        let address = unsafe { device.register(mapping.start(), mapping.bytes()) }?;
        Ok(Self { file, mapping, device: device.clone(), address })
    }

    /// To pass to other ranks.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Where the device sees it.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Where this process sees it.
    pub fn start(&self) -> NonNull<u8> {
        self.mapping.start()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Fails only when the context is gone, and the registration with it.
        let _ = self.device.unregister(self.mapping.start());
    }
}

/// Bytes of the control memory: the words, then a text for each rank.
const TEXTS: usize = 2048;
const TEXT: usize = 128;
/// How much control memory there is.
pub const CONTROL_BYTES: u64 = 8192;

const ABORTED: u64 = 1;
const DIED: u64 = 2;

/// The words by which hosts and kernels tell each other that something ended.
#[derive(Debug)]
pub struct Words {
    memory: Shared,
}

/// What a rank's abort word says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// Nothing.
    Nothing,
    /// It called abort.
    Aborted(String),
    /// It saw that a rank had died.
    Died(usize),
}

impl Words {
    /// Over memory of [`CONTROL_BYTES`].
    pub fn new(memory: Shared) -> Self {
        Self { memory }
    }

    /// The memory.
    pub fn memory(&self) -> &Shared {
        &self.memory
    }

    fn control(&self) -> *mut Control {
        self.memory.start().as_ptr().cast()
    }

    fn abort_word(&self, rank: usize) -> &AtomicU64 {
        // SAFETY: inside the mapping for ranks below MAX_RANKS, aligned, and every access from this process is atomic.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.control()).abort[rank % MAX_RANKS]) }
    }

    /// How long kernels of `rank` wait.
    pub fn set_deadline(&self, rank: usize, deadline: std::time::Duration) {
        let nanoseconds = u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: as in `abort_word`.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.control()).deadline_ns[rank % MAX_RANKS]) }
            .store(nanoseconds, Ordering::Release);
    }

    /// Makes the kernels of all ranks give up, and says why.
    pub fn abort(&self, rank: usize, why: &str) {
        // What was told first stays, and its text with it: this rank's host is the only writer of both.
        if self.abort_word(rank).load(Ordering::Acquire) != 0 {
            return;
        }
        let mut end = why.len().min(TEXT - 1);
        while !why.is_char_boundary(end) {
            end -= 1;
        }
        // SAFETY: each rank writes its own text, inside the mapping, before the word that announces it.
        unsafe {
            let text = self.memory.start().as_ptr().add(TEXTS + TEXT * (rank % MAX_RANKS));
            text.copy_from_nonoverlapping(why.as_ptr(), end);
            text.add(end).write(0);
        }
        let _ = self.abort_word(rank).compare_exchange(0, ABORTED, Ordering::Release, Ordering::Relaxed);
    }

    /// Makes the kernels of all ranks give up because `peer` has died.
    pub fn died(&self, rank: usize, peer: usize) {
        let _ = self.abort_word(rank).compare_exchange(0, DIED | (peer as u64) << 8, Ordering::Release, Ordering::Relaxed);
    }

    /// What `rank` has told.
    pub fn told(&self, rank: usize) -> Told {
        let word = self.abort_word(rank).load(Ordering::Acquire);
        match word & 0xff {
            0 => Told::Nothing,
            DIED => Told::Died((word >> 8) as usize),
            _ => {
                // SAFETY: inside the mapping; copied before it is looked at.
                let text: [u8; TEXT] = unsafe {
                    self.memory.start().as_ptr().add(TEXTS + TEXT * (rank % MAX_RANKS)).cast::<[u8; TEXT]>().read_volatile()
                };
                let end = text.iter().position(|b| *b == 0).unwrap_or(TEXT);
                Told::Aborted(String::from_utf8_lossy(&text[..end]).into_owned())
            }
        }
    }

    /// The verdict of the kernels of `rank`, if they gave up.
    pub fn verdict(&self, rank: usize) -> Option<Verdict> {
        // SAFETY: inside the mapping; the kernel releases `written` after the rest and never writes again.
        unsafe {
            let verdict = &raw mut (*self.control()).verdict[rank % MAX_RANKS];
            let written = AtomicU32::from_ptr(&raw mut (*verdict).written).load(Ordering::Acquire);
            (written != 0).then(|| verdict.read_volatile())
        }
    }

    /// Writes a verdict as a kernel would.
    #[cfg(test)]
    pub fn pretend(&self, rank: usize, verdict: Verdict) {
        // SAFETY: inside the mapping; no kernel runs in tests.
        unsafe { (&raw mut (*self.control()).verdict[rank]).write_volatile(verdict) }
    }
}
