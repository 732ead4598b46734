// SPDX-License-Identifier: MIT OR Apache-2.0
//! One ioctl of the ABI.

use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

use crate::abi::*;

/// A structure of the ABI: plain integers, its own size first.
///
/// # Safety
/// `repr(C)`, without padding, any bits valid, and the first field a `u32` that holds its size.
pub unsafe trait Record: Default + Copy {
    /// Zeroes, with its size.
    fn new() -> Self {
        let mut record = Self::default();
        record.set_size(size_of::<Self>() as u32);
        record
    }

    /// Sets the first field.
    fn set_size(&mut self, size: u32);
}

macro_rules! records {
    ($($record:ident)*) => {$(
        // SAFETY: made by bindgen from uapi/pcieipc.h, whose layout `scripts/check-abi` proves to be free of padding.
        unsafe impl Record for $record {
            fn set_size(&mut self, size: u32) {
                self.size = size;
            }
        }
    )*};
}

records! {
    pcieipc_query pcieipc_enumerate pcieipc_endpoint_info pcieipc_distance pcieipc_attach pcieipc_recover
    pcieipc_session_state pcieipc_channel_create pcieipc_channel pcieipc_channel_fd pcieipc_copy pcieipc_vector_eventfd
    pcieipc_ring pcieipc_doorbell pcieipc_admin pcieipc_export_info pcieipc_export_eventfd
}

/// Numbers of the calls, as in `uapi/pcieipc.h`.
#[allow(missing_docs)]
pub mod number {
    pub const QUERY: u8 = 0x00;
    pub const ENUMERATE: u8 = 0x01;
    pub const ENDPOINT_INFO: u8 = 0x02;
    pub const DISTANCE: u8 = 0x03;
    pub const ATTACH: u8 = 0x04;
    pub const RECOVER: u8 = 0x05;
    pub const STATE: u8 = 0x06;
    pub const CHANNEL_CREATE: u8 = 0x10;
    pub const CHANNEL_DESTROY: u8 = 0x11;
    pub const CHANNEL_EXPORT: u8 = 0x12;
    pub const CHANNEL_IMPORT: u8 = 0x13;
    pub const CHANNEL_FREED: u8 = 0x14;
    pub const COPY: u8 = 0x15;
    pub const CHANNEL_DMABUF: u8 = 0x16;
    pub const VECTOR_EVENTFD: u8 = 0x20;
    pub const RING: u8 = 0x21;
    pub const DOORBELL_MAP: u8 = 0x22;
    pub const ADMIN: u8 = 0x30;
    pub const EXPORT_INFO: u8 = 0x40;
    pub const EXPORT_RING: u8 = 0x41;
    pub const EXPORT_EVENTFD: u8 = 0x42;
    pub const EXPORT_DOORBELL: u8 = 0x43;
}

/// The request that `_IO` makes of a call's number.
pub fn request(number: u8) -> u32 {
    PCIEIPC_IOC_MAGIC << 8 | u32::from(number)
}

/// A call with a structure.
///
/// # Errors
/// The kernel's errno.
pub fn call<T: Record>(fd: impl AsFd, number: u8, record: &mut T) -> Result<(), Errno> {
    // SAFETY: the kernel writes at most the size that the record claims, and that is at most its own.
    unsafe { raw(fd, request(number), std::ptr::from_mut(record).cast()) }
}

/// A call with any address.
///
/// # Safety
/// The kernel may write to the structure at `address` as much as its first four bytes say.
///
/// # Errors
/// The kernel's errno.
pub unsafe fn raw(fd: impl AsFd, request: u32, address: *mut libc::c_void) -> Result<(), Errno> {
    // SAFETY: by this function's contract.
    Errno::result(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::c_ulong::from(request), address) }).map(drop)
}
