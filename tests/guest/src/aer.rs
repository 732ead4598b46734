// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of a PCI function, as if its AER registers had them: the kernel's `aer_inject`.

use std::fs;

use nix::errno::Errno;

use crate::{session::SOON, wait};

/// Correctable: a TLP whose CRC was wrong.
pub const BAD_TLP: u32 = 0x40;
/// Uncorrectable and not fatal: an answer did not come.
pub const COMPLETION_TIMEOUT: u32 = 0x4000;
/// Uncorrectable and fatal: a TLP that makes no sense.
pub const MALFORMED_TLP: u32 = 0x4_0000;

/// Has the kernel find these errors, bits of the two status registers, in the function at `address`
/// (`struct pcieipc_endpoint_info.address`).
pub fn inject(address: u32, uncorrectable: u32, correctable: u32) {
    let mut request = vec![(address >> 8) as u8, (address >> 3 & 0x1f) as u8, (address & 7) as u8, 0];
    for word in [uncorrectable, correctable, 0, 1, 2, 3, address >> 16] {
        request.extend(word.to_ne_bytes());
    }
    // Busy until the kernel has looked at the one before.
    let injected = wait::until(SOON, || match fs::write("/dev/aer_inject", &request) {
        Ok(()) => true,
        Err(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) => false,
        Err(error) => panic!("/dev/aer_inject: {error}"),
    });
    assert!(injected, "/dev/aer_inject stays busy");
}
