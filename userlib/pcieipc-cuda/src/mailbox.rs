// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that peers write and this rank reads: on the device where the peer reaches it, in host memory otherwise.

use std::{os::fd::OwnedFd, sync::Arc};

use pcieipc::{Error, Result};

use crate::{
    abi::Layout,
    control::Shared,
    driver::{Address, Device, Handle, Stream},
};

/// What empty lines hold.
fn pattern(empty: [u32; 4], lines: usize) -> Vec<u8> {
    empty.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>().repeat(lines)
}

/// A rank's mailbox in host memory; lines are empty, all else is zero.
pub fn host_mailbox(device: &Arc<dyn Device>, layout: &Layout, ranks: usize, empty: [u32; 4]) -> Result<Shared> {
    let shared = Shared::new(device, layout.host_bytes())?;
    for (at, bytes) in layout.empties(ranks, false) {
        let lines = pattern(empty, bytes as usize / 16);
        // SAFETY: inside the memory, which nobody else knows yet.
        unsafe { shared.start().as_ptr().add(at as usize).copy_from_nonoverlapping(lines.as_ptr(), lines.len()) };
    }
    Ok(shared)
}

/// This rank's mailbox on its device.
#[derive(Debug)]
pub struct DeviceMailbox {
    device: Arc<dyn Device>,
    base: Address,
    bytes: u64,
    /// Whether peers may still write: then it must never be given to anybody else while they live.
    quarantined: bool,
}

impl DeviceMailbox {
    /// New memory; lines are empty, all else is zero.
    pub fn new(device: &Arc<dyn Device>, layout: &Layout, ranks: usize, empty: [u32; 4]) -> Result<Self> {
        let bytes = layout.device_bytes(ranks);
        let mailbox = Self { device: device.clone(), base: device.alloc(bytes)?, bytes, quarantined: false };
        mailbox.clear(layout, ranks, empty)?;
        Ok(mailbox)
    }

    /// Makes it as new.
    pub fn clear(&self, layout: &Layout, ranks: usize, empty: [u32; 4]) -> Result<()> {
        self.device.fill(self.base, 0, self.bytes / 4, Stream(0))?;
        self.device.synchronize(Stream(0))?;
        let pattern = pattern(empty, 1 << 12);
        for (at, bytes) in layout.empties(ranks, true) {
            // Written once, then copied twice as far each time.
            let mut done = bytes.min(pattern.len() as u64);
            self.device.write(self.base + at, &pattern[..done as usize])?;
            while done < bytes {
                let more = done.min(bytes - done);
                self.device.copy(self.base + at + done, self.base + at, more, Stream(0))?;
                done += more;
            }
        }
        self.device.synchronize(Stream(0))
    }

    /// Where it is.
    pub fn base(&self) -> Address {
        self.base
    }

    /// For another process.
    pub fn export(&self) -> Result<Handle> {
        self.device.export(self.base)
    }

    /// Peers may write it as long as they live: keep it.
    pub fn quarantine(&mut self) {
        self.quarantined = true;
    }
}

impl Drop for DeviceMailbox {
    fn drop(&mut self) {
        if !self.quarantined {
            // Fails only when the context is gone, and the memory with it.
            let _ = self.device.free(self.base);
        }
    }
}

/// Another rank's mailbox as this rank writes it.
#[derive(Debug)]
pub enum Remote {
    /// On a device, opened by handle.
    Imported(Arc<dyn Device>, Address),
    /// On a device of this process.
    Direct(Address),
    /// In host memory.
    Host(Shared),
}

impl Remote {
    /// Opens what another process exported.
    pub fn import(device: &Arc<dyn Device>, handle: &Handle) -> Result<Self> {
        Ok(Self::Imported(device.clone(), device.import(handle)?))
    }

    /// Maps what another rank passed.
    pub fn host(device: &Arc<dyn Device>, mut files: Vec<OwnedFd>, layout: &Layout) -> Result<Self> {
        let file = files.pop().ok_or_else(|| Error::Meeting("a rank passed no memory for its mailbox".into()))?;
        Ok(Self::Host(Shared::of(device, file, layout.host_bytes())?))
    }

    /// Where this rank's device sees it.
    pub fn address(&self) -> Address {
        match self {
            Self::Imported(_, address) | Self::Direct(address) => *address,
            Self::Host(shared) => shared.address(),
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if let Self::Imported(device, address) = self {
            // Fails only when the context is gone.
            let _ = device.release(*address);
        }
    }
}
