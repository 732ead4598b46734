// SPDX-License-Identifier: GPL-2.0

//! The IOMMU in front of an endpoint, and what it allows.

use crate::{endpoint::Endpoint, inline, limits, uapi};
use kernel::{bindings, prelude::*};

/// What stands between an endpoint and memory.
#[derive(Clone, Copy)]
pub(crate) struct View {
    /// PCIEIPC_IOMMU_*
    pub(crate) kind: u32,
    /// Number of the group, -1 for none.
    pub(crate) group: i32,
}

impl View {
    /// Looks at a device.
    ///
    /// # Safety
    ///
    /// `device` is being probed or is bound.
    pub(crate) unsafe fn of(device: *mut bindings::device) -> Self {
        // SAFETY: By the requirements of this function; a bound device's domain stays.
        unsafe {
            let domain = bindings::iommu_get_domain_for_dev(device);
            let kind = if domain.is_null() {
                uapi::PCIEIPC_IOMMU_NONE
            } else if (*domain).type_ & bindings::__IOMMU_DOMAIN_PAGING != 0 {
                uapi::PCIEIPC_IOMMU_TRANSLATING
            } else {
                uapi::PCIEIPC_IOMMU_IDENTITY
            };
            let group = bindings::iommu_group_get(device);
            let number = if group.is_null() {
                -1
            } else {
                let number = bindings::iommu_group_id(group);
                bindings::iommu_group_put(group);
                number
            };
            Self { kind, group: number }
        }
    }

    /// Whether accesses outside of what was mapped fail.
    pub(crate) fn protects(&self) -> bool {
        self.kind == uapi::PCIEIPC_IOMMU_TRANSLATING
    }
}

/// Whether the caller may attach to an endpoint: one whose user can aim its DMA needs an IOMMU that translates, and the
/// administrator may lift that at the price of a taint, as for VFIO. Then what is returned says why, and whoever has attached calls [`taint`].
///
/// # Errors
///
/// `EPERM`, with the reason in the kernel log.
pub(crate) fn may_attach(endpoint: &Endpoint) -> Result<Option<&'static str>> {
    if !endpoint.profile.user_dma {
        return Ok(None);
    }
    let reason = if !endpoint.iommu.protects() {
        "no IOMMU translates its addresses"
    } else if let Some(reason) = isolation(endpoint) {
        reason
    } else {
        return Ok(None);
    };
    if !limits::unsafe_noiommu() {
        limits::say(|| dev_info!(endpoint.pdev, "refused: its user can aim its DMA, and {reason}\n"));
        return Err(EPERM);
    }
    // SAFETY: Asks about the calling task.
    if !unsafe { bindings::capable(bindings::CAP_SYS_RAWIO as i32) } {
        return Err(EPERM);
    }
    inline::check_lockdown()?;
    Ok(Some(reason))
}

/// Marks the kernel: somebody has an endpoint whose DMA nothing confines.
pub(crate) fn taint(endpoint: &Endpoint, reason: &str) {
    // SAFETY: Only marks the kernel.
    unsafe { bindings::add_taint(bindings::TAINT_USER, bindings::lockdep_ok_LOCKDEP_STILL_OK) };
    dev_warn!(endpoint.pdev, "used although its user can aim its DMA, and {reason}; the kernel is tainted\n");
}

/// Why the IOMMU would not isolate this endpoint from its neighbours.
///
/// The kernel puts a device into the group of the first port above it that lacks ACS redirect, so a device alone in its group
/// has redirect on its whole path.
fn isolation(endpoint: &Endpoint) -> Option<&'static str> {
    // The group stays with a device until it is removed, which unbinds it first, and that takes this lock.
    let hardware = endpoint.hardware.lock();
    if !hardware.is_bound() {
        return Some("it is not bound any more");
    }
    // SAFETY: The device is bound while the lock is held.
    unsafe {
        let group = bindings::iommu_group_get(endpoint.device());
        if group.is_null() {
            return Some("it has no IOMMU group");
        }
        let mut strangers = 0usize;
        bindings::iommu_group_for_each_dev(group, (&raw mut strangers).cast(), Some(count_device));
        bindings::iommu_group_put(group);
        if strangers > 1 {
            return Some("it shares its IOMMU group with another device");
        }
    }
    None
}

extern "C" fn count_device(_device: *mut bindings::device, count: *mut c_void) -> i32 {
    // SAFETY: `count` is the counter passed to `iommu_group_for_each_dev` in `isolation`.
    unsafe { *count.cast::<usize>() += 1 };
    0
}
