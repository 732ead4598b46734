// SPDX-License-Identifier: GPL-2.0

//! Access to an endpoint's BARs that ends by itself at unbind.

use kernel::{io::Io, pci, prelude::*};

/// BARs of a function.
pub(crate) const BARS: usize = 6;

/// What is stored.
#[derive(Clone, Copy)]
pub(crate) enum Value {
    /// 4 bytes.
    Four(u32),
    /// 8 bytes.
    Eight(u64),
}

/// The mapped BARs of an endpoint. Every access is a single one, under RCU, and fails with `ENODEV` after unbind.
pub(crate) struct Registers {
    bars: [Option<pci::DevresBar>; BARS],
}

impl Registers {
    /// No BAR mapped.
    pub(crate) const fn new() -> Self {
        Self { bars: [const { None }; BARS] }
    }

    /// Maps a BAR, once.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a number that is no BAR, `EBUSY` when another driver has it, `ENOMEM` when it cannot be mapped.
    pub(crate) fn map(&mut self, pdev: &pci::Device<kernel::device::Bound>, bar: u32) -> Result {
        let place = self.bars.get_mut(bar as usize).ok_or(EINVAL)?;
        if place.is_none() {
            *place = Some(pdev.iomap_region(bar, c"pcieipc")?.into_devres()?);
        }
        Ok(())
    }

    fn bar(&self, bar: u32) -> Result<&pci::DevresBar> {
        self.bars.get(bar as usize).and_then(Option::as_ref).ok_or(ENODEV)
    }

    /// Reads 4 bytes.
    pub(crate) fn read32(&self, bar: u32, offset: usize) -> Result<u32> {
        self.bar(bar)?.try_access_with(|bar| bar.try_read32(offset)).ok_or(ENODEV)?
    }

    /// Writes 4 bytes.
    pub(crate) fn write32(&self, bar: u32, offset: usize, value: u32) -> Result {
        self.bar(bar)?.try_access_with(|bar| bar.try_write32(value, offset)).ok_or(ENODEV)?
    }

    /// Writes 4 bytes, or 8 at once, if `check` allows it. Both happen under one RCU read lock: once `check` fails and a grace
    /// period has passed, no such access is made.
    pub(crate) fn write_if(&self, bar: u32, offset: usize, value: Value, check: impl FnOnce() -> Result) -> Result {
        self.bar(bar)?
            .try_access_with(|bar| {
                check()?;
                match value {
                    Value::Four(value) => bar.try_write32(value, offset),
                    Value::Eight(value) => bar.try_write64(value, offset),
                }
            })
            .ok_or(ENODEV)?
    }

    /// Reads 4 bytes, on the same condition.
    pub(crate) fn read32_if(&self, bar: u32, offset: usize, check: impl FnOnce() -> Result) -> Result<u32> {
        self.bar(bar)?
            .try_access_with(|bar| {
                check()?;
                bar.try_read32(offset)
            })
            .ok_or(ENODEV)?
    }

    /// Writes 8 bytes at once.
    pub(crate) fn write64(&self, bar: u32, offset: usize, value: u64) -> Result {
        self.bar(bar)?.try_access_with(|bar| bar.try_write64(value, offset)).ok_or(ENODEV)?
    }
}
