// SPDX-License-Identifier: MIT OR Apache-2.0
//! What NVIDIA's management library says of a device's NVLinks, where it is installed.

use std::{
    ffi::{CString, c_char, c_int, c_uint, c_void},
    ptr::null_mut,
};

use libloading::Library;

/// Most links that a device has (`NVML_NVLINK_MAX_LINKS`).
const MOST_LINKS: c_uint = 18;

/// The library, started.
pub struct Nvml {
    by_address: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int,
    link_state: unsafe extern "C" fn(*mut c_void, c_uint, *mut c_uint) -> c_int,
    _library: Library,
}

impl Nvml {
    /// None where there is no such library, or it can not start.
    pub fn start() -> Option<Self> {
        // SAFETY: the library may be loaded and started at any time; the types are those of its header for these symbols.
        unsafe {
            let library = Library::new("libnvidia-ml.so.1").ok()?;
            let init: unsafe extern "C" fn() -> c_int = *library.get(b"nvmlInit_v2\0").ok()?;
            let by_address = *library.get(b"nvmlDeviceGetHandleByPciBusId_v2\0").ok()?;
            let link_state = *library.get(b"nvmlDeviceGetNvLinkState\0").ok()?;
            (init() == 0).then_some(Self { by_address, link_state, _library: library })
        }
    }

    /// How many NVLinks of the device at a PCI address are up; none where the library does not know the device.
    pub fn links_up(&self, pci: &str) -> Option<u32> {
        let address = CString::new(pci).ok()?;
        let mut device = null_mut();
        // SAFETY: reads a string that ends with zero and writes one pointer.
        if unsafe { (self.by_address)(address.as_ptr(), &mut device) } != 0 {
            return None;
        }
        let is_up = |link: &c_uint| {
            let mut up = 0;
            // SAFETY: writes one int; a link that the device has not is refused.
            unsafe { (self.link_state)(device, *link, &mut up) == 0 && up == 1 }
        };
        Some((0..MOST_LINKS).filter(is_up).count() as u32)
    }
}
