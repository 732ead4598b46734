// SPDX-License-Identifier: GPL-2.0

//! Where a device's interrupt table is: nothing that a profile describes may overlap it, or its user could write it.

use crate::profile::{Engine, Profile, ENGINE_BAR, ENGINE_BYTES};
use core::ops::Range;
use kernel::{bindings, page::PAGE_SIZE, prelude::*};

/// The MSI-X table and the pending bits of a device.
#[derive(Clone, Copy, Default)]
pub(crate) struct Layout {
    parts: [(u32, u64, u64); 2],
}

impl Layout {
    /// Reads it from the configuration space; empty for a device without MSI-X.
    ///
    /// # Safety
    ///
    /// `pdev` is valid.
    pub(crate) unsafe fn of(pdev: *mut bindings::pci_dev) -> Self {
        let (mut control, mut table, mut pending) = (0, 0, 0);
        // SAFETY: By the requirements of this function.
        unsafe {
            let capability = i32::from((*pdev).msix_cap);
            if capability == 0 {
                return Self::default();
            }
            bindings::pci_read_config_word(pdev, capability + bindings::PCI_MSIX_FLAGS as i32, &mut control);
            bindings::pci_read_config_dword(pdev, capability + bindings::PCI_MSIX_TABLE as i32, &mut table);
            bindings::pci_read_config_dword(pdev, capability + bindings::PCI_MSIX_PBA as i32, &mut pending);
        }
        let vectors = u64::from(u32::from(control) & bindings::PCI_MSIX_FLAGS_QSIZE) + 1;
        let part = |register: u32, bytes| (register & bindings::PCI_MSIX_TABLE_BIR, u64::from(register & !7), bytes);
        Self { parts: [part(table, vectors * 16), part(pending, vectors.div_ceil(64) * 8)] }
    }

    /// Whether bytes of a BAR, or for mapped pages whole pages, are part of it.
    fn overlaps(&self, bar: u32, range: &Range<u64>) -> bool {
        self.parts.iter().any(|(part_bar, start, bytes)| *part_bar == bar && *start < range.end && range.start < start + bytes)
    }

    /// Refuses a profile that overlaps the table or the pending bits.
    ///
    /// # Errors
    ///
    /// `EINVAL`.
    pub(crate) fn check(&self, profile: &Profile) -> Result {
        let bell = &profile.doorbell;
        let last = bell.offset_of(profile.vectors.saturating_sub(1) as usize) as u64 + u64::from(bell.width);
        let bells =
            if bell.isolated { bell.offset as u64..last.next_multiple_of(PAGE_SIZE as u64) } else { bell.offset as u64..last };
        let mut bad = self.overlaps(bell.bar, &bells);
        if let Some(rings) = &profile.rings {
            let start = rings.offset as u64;
            bad |= self.overlaps(rings.bar, &(start..start + rings.stride as u64 * u64::from(rings.slots)));
        }
        if let Some(acknowledge) = &profile.acknowledge {
            for offset in [acknowledge.status, acknowledge.clear] {
                bad |= self.overlaps(acknowledge.bar, &(offset as u64..offset as u64 + 4));
            }
        }
        if profile.engine != Engine::None {
            bad |= self.overlaps(ENGINE_BAR, &(0..ENGINE_BYTES as u64));
        }
        // All of it is for users.
        if let Some(bar) = profile.memory_bar {
            bad |= self.overlaps(bar, &(0..u64::MAX));
        }
        if bad {
            Err(EINVAL)
        } else {
            Ok(())
        }
    }
}

#[kunit_tests(pcieipc_msix)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { parts: [(4, 0, 128), (4, 0x800, 8)] };

    #[test]
    fn any_byte_in_common_overlaps() {
        assert!(LAYOUT.overlaps(4, &(127..128)) && LAYOUT.overlaps(4, &(0x807..0x900)));
        assert!(!LAYOUT.overlaps(4, &(128..0x800)) && !LAYOUT.overlaps(4, &(0x808..0x900)));
        assert!(!LAYOUT.overlaps(0, &(0..4096)));
    }

    #[test]
    fn a_doorbell_page_counts_whole() {
        let mut profile = Profile::SOFT;
        assert!(LAYOUT.check(&profile).is_ok());
        profile.doorbell.bar = 4;
        profile.doorbell.offset = 0x900;
        profile.doorbell.isolated = false;
        assert!(LAYOUT.check(&profile).is_ok());
        profile.doorbell.offset = 0;
        profile.doorbell.isolated = true;
        assert!(LAYOUT.check(&profile).is_err());
    }

    #[test]
    fn the_registers_of_an_engine_are_not_where_the_table_is() {
        let table = |start| Layout { parts: [(0, start, 128), (4, 0x800, 8)] };
        assert!(table(0x200).check(&Profile::SOFT).is_err() && table(0xfff).check(&Profile::SOFT).is_err());
        // The page behind them is free in this profile: the ring table begins there.
        let mut profile = Profile::SOFT;
        profile.rings = None;
        assert!(table(0x1000).check(&profile).is_ok());
        profile.engine = Engine::None;
        assert!(table(0x200).check(&profile).is_ok());
    }

    #[test]
    fn memory_for_users_is_no_bar_with_the_table() {
        let mut profile = Profile::SOFT;
        profile.memory_bar = Some(4);
        assert!(LAYOUT.check(&profile).is_err());
        assert!(Layout::default().check(&profile).is_ok());
    }
}
