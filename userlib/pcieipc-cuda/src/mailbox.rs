// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that peers write and this rank reads: on the device where the peer reaches it, in host memory otherwise.

use std::{os::fd::OwnedFd, sync::Arc};

use pcieipc::{Error, Result};

use crate::{
    abi::Layout,
    control::Shared,
    driver::{Address, Device, Handle, Stream},
};

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
    /// New memory; whole lines are empty, all else is zero.
    pub fn new(device: &Arc<dyn Device>, layout: &Layout, ranks: usize, empty: [u32; 4]) -> Result<Self> {
        let bytes = layout.bytes();
        let mailbox = Self { device: device.clone(), base: device.alloc(bytes)?, bytes, quarantined: false };
        mailbox.clear(layout, ranks, empty)?;
        Ok(mailbox)
    }

    /// Makes it as new.
    pub fn clear(&self, layout: &Layout, ranks: usize, empty: [u32; 4]) -> Result<()> {
        self.device.fill(self.base, 0, self.bytes / 4, Stream(0))?;
        self.device.synchronize(Stream(0))?;
        let pattern: Vec<u8> = empty.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>().repeat(1 << 14);
        for part in (0..2).flat_map(|half| (0..ranks as u64).map(move |sender| half * layout.half + sender * layout.sender)) {
            for at in (0..layout.whole_bytes).step_by(pattern.len()) {
                let len = (layout.whole_bytes - at).min(pattern.len() as u64) as usize;
                self.device.write(self.base + part + layout.whole + at, &pattern[..len])?;
            }
        }
        Ok(())
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
        Ok(Self::Host(Shared::of(device, file, layout.bytes())?))
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
