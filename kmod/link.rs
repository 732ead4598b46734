// SPDX-License-Identifier: GPL-2.0

//! An endpoint's link: its speed and width now, and the best it could do.

use kernel::{
    bindings,
    sync::atomic::{Atomic, Relaxed},
};

/// The link of a device, as one number: the speed code in the low 8 bits, the lanes in the next 8.
pub(crate) struct Link {
    best: u32,
    last: Atomic<u32>,
}

impl Link {
    /// Samples the link of a device that is being probed.
    pub(crate) fn new(pdev: *mut bindings::pci_dev) -> Self {
        let mut capabilities = 0;
        // SAFETY: The device is valid; without a PCI Express capability the value is 0.
        let failed = unsafe { bindings::pcie_capability_read_dword(pdev, bindings::PCI_EXP_LNKCAP as i32, &mut capabilities) };
        let best = if failed == 0 { from_register(capabilities) } else { 0 };
        // SAFETY: The device is valid.
        let now = unsafe { sample(pdev) }.unwrap_or(0);
        Self { best, last: Atomic::new(now) }
    }

    /// The best of the device.
    pub(crate) fn best(&self) -> u32 {
        self.best
    }

    /// As last sampled.
    pub(crate) fn now(&self) -> u32 {
        self.last.load(Relaxed)
    }

    /// Remembers a sample; returns the one before if it differs.
    pub(crate) fn update(&self, sample: u32) -> Option<u32> {
        let before = self.last.xchg(sample, Relaxed);
        (before != sample).then_some(before)
    }
}

/// Reads the link's state; None when the device does not answer or has no link.
///
/// # Safety
///
/// `pdev` is valid.
pub(crate) unsafe fn sample(pdev: *mut bindings::pci_dev) -> Option<u32> {
    let mut status = 0;
    // SAFETY: By the requirements of this function.
    let failed = unsafe { bindings::pcie_capability_read_word(pdev, bindings::PCI_EXP_LNKSTA as i32, &mut status) };
    (failed == 0 && status != 0 && status != !0).then(|| from_register(u32::from(status)))
}

/// Both Link Status and Link Capabilities have the speed in bits 0 to 3 and the width in bits 4 to 9.
pub(crate) const fn from_register(register: u32) -> u32 {
    register & 0xf | (register >> 4 & 0x3f) << 8
}

/// The speed code, 1 for 2.5 GT/s.
pub(crate) const fn speed(link: u32) -> u8 {
    (link & 0xff) as u8
}

/// The lanes.
pub(crate) const fn width(link: u32) -> u8 {
    (link >> 8 & 0xff) as u8
}

#[kernel::macros::kunit_tests(pcieipc_link)]
mod tests {
    use super::*;

    #[test]
    fn speed_and_width_are_where_the_specification_has_them() {
        // 16 GT/s, sixteen lanes, and bits beside them that do not belong to the link.
        let link = from_register(0xf104);
        assert_eq!((speed(link), width(link)), (4, 16));
        assert_eq!((speed(from_register(0x0011)), width(from_register(0x0011))), (1, 1));
    }
}
