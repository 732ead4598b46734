// SPDX-License-Identifier: GPL-2.0

//! How far two endpoints are from each other on the PCIe tree, and what makes it so.

use crate::{
    endpoint::{pci_raw, Endpoint},
    inline, limits, uapi,
};
use core::ptr;
use kernel::{bindings, prelude::*};

/// Most ports above a device that are looked at.
const DEPTH: usize = 32;

/// The ports above a device, the lowest first.
struct Path {
    ports: [*mut bindings::pci_dev; DEPTH],
    count: usize,
}

impl Path {
    /// Each port holds its bus and each bus its bridge, so the ports stay valid as long as the endpoint, which holds the first.
    fn above(endpoint: &Endpoint) -> Self {
        let mut path = Self { ports: [ptr::null_mut(); DEPTH], count: 0 };
        let mut port = endpoint.bridge.as_ref().map_or(ptr::null_mut(), |bridge| pci_raw(bridge));
        for place in path.ports.iter_mut() {
            if port.is_null() {
                break;
            }
            *place = port;
            path.count += 1;
            // SAFETY: As above. A port is no virtual function, so its bus has the bridge above it.
            port = unsafe { (*(*port).bus).self_ };
        }
        path
    }

    /// The lowest first.
    fn ports(&self) -> &[*mut bindings::pci_dev] {
        self.ports.get(..self.count).unwrap_or_default()
    }

    fn position(&self, port: *mut bindings::pci_dev) -> Option<usize> {
        self.ports().iter().position(|other| ptr::eq(*other, port))
    }

    /// Whether one of the lowest `count` ports sends peer traffic up to the root.
    ///
    /// # Safety
    ///
    /// The device below is valid.
    unsafe fn redirects(&self, count: usize) -> bool {
        // SAFETY: By the requirements of this function.
        self.ports().iter().take(count).any(|port| unsafe { redirects(*port) })
    }
}

/// # Safety
///
/// `port` is valid.
unsafe fn redirects(port: *mut bindings::pci_dev) -> bool {
    const REDIRECT: u32 = bindings::PCI_ACS_RR | bindings::PCI_ACS_CR | bindings::PCI_ACS_EC;
    let mut control = 0;
    // SAFETY: By the requirements of this function.
    unsafe {
        let capability = i32::from((*port).acs_cap);
        capability != 0
            && bindings::pci_read_config_word(port, capability + bindings::PCI_ACS_CTRL as i32, &mut control) == 0
            && control != !0
            && u32::from(control) & REDIRECT != 0
    }
}

/// Whether `from`'s engine reaches `to`'s BARs below a common switch, by bus addresses.
///
/// # Errors
///
/// `EOPNOTSUPP`, with the reason in the kernel log.
pub(crate) fn check_direct(from: &Endpoint, to: &Endpoint) -> Result {
    let mut far = uapi::pcieipc_distance::default();
    measure(from, to, &mut far);
    let reason = if far.reasons & uapi::PCIEIPC_FAR_HOST_BRIDGE != 0 {
        "the host bridge is between them"
    } else if far.reasons & uapi::PCIEIPC_FAR_ACS_REDIRECT != 0 {
        "ACS redirects peer traffic to the root"
    } else if far.p2p == 0 {
        "the kernel allows no peer traffic between them"
    } else {
        return Ok(());
    };
    limits::say(|| dev_info!(from.pdev, "does not reach {} directly: {reason}\n", to.address()));
    Err(EOPNOTSUPP)
}

/// DISTANCE.
pub(crate) fn measure(from: &Endpoint, to: &Endpoint, call: &mut uapi::pcieipc_distance) {
    if from.id == to.id {
        call.p2p = 1;
        return;
    }
    let (up, down) = (Path::above(from), Path::above(to));
    let meeting = up.ports().iter().enumerate().find_map(|(hops, port)| Some((hops, down.position(*port)?)));
    let mut reasons = 0;
    let (rise, fall) = meeting.unwrap_or((up.count, down.count));
    // Ports up to where the paths meet decide, that one included: it is the only port between two functions of a card, and the
    // kernel's own answer, `p2p`, counts it too.
    // SAFETY: The endpoints hold their ports.
    let redirected = unsafe { up.redirects(rise + 1) || down.redirects(fall) };
    if from.identity.address >> 3 == to.identity.address >> 3 {
        reasons |= uapi::PCIEIPC_FAR_SAME_FUNCTION_CARD;
    }
    if redirected {
        reasons |= uapi::PCIEIPC_FAR_ACS_REDIRECT;
    }
    let through_root = meeting.is_none() || redirected;
    if meeting.is_none() {
        reasons |= uapi::PCIEIPC_FAR_HOST_BRIDGE;
    } else if !redirected {
        reasons |= uapi::PCIEIPC_FAR_SAME_SWITCH;
    }
    let nodes = (from.identity.numa_node, to.identity.numa_node);
    if nodes.0 >= 0 && nodes.1 >= 0 && nodes.0 != nodes.1 {
        reasons |= uapi::PCIEIPC_FAR_SOCKETS;
    }
    if through_root && (from.iommu.protects() || to.iommu.protects()) {
        reasons |= uapi::PCIEIPC_FAR_IOMMU;
    }
    call.hops = if redirected { (up.count + down.count + 2) as u32 } else { (rise + fall + 2) as u32 };
    call.reasons = reasons;
    // The kernel remembers the answer with the device that is reached, for as long as that is bound: unbind has to wait.
    let hardware = to.hardware.lock();
    // SAFETY: The endpoints hold references to their devices; `to` is bound while its hardware is locked.
    let allowed = hardware.is_bound() && unsafe { inline::p2pdma_distance(to.pci(), from.device()) } >= 0;
    drop(hardware);
    call.p2p = u32::from(allowed);
}
