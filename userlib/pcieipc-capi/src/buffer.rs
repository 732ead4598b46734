// SPDX-License-Identifier: MIT OR Apache-2.0
//! Registered buffers: memory that one rank writes and all ranks read where it lies.

use std::{ffi::c_void, time::Duration};

use half::{bf16, f16};
use pcieipc::{
    group::Group,
    reduce::{Kind, Op},
    registered::Registered,
    Error,
};

use crate::{
    collectives::{for_kind, kind, op},
    group::{group, pcieipc_group},
    status::{answer, bad, pcieipc_status},
};

/// A buffer of any element type.
trait Buffer {
    fn data(&mut self) -> *mut c_void;
    fn all_reduce(&mut self, group: &mut Group, op: Op, timeout: Duration) -> Result<(), Error>;
}

impl<T: pcieipc::reduce::Element> Buffer for Registered<T> {
    fn data(&mut self) -> *mut c_void {
        self.as_mut_ptr().cast()
    }
    fn all_reduce(&mut self, group: &mut Group, op: Op, timeout: Duration) -> Result<(), Error> {
        group.all_reduce_registered(self, op, timeout)
    }
}

/// A registered buffer. It may outlive the group, but can then no more be reduced.
pub struct pcieipc_buffer {
    inner: Box<dyn Buffer>,
}

/// Makes a buffer of `count` elements, all zero, that the other ranks can read where it lies; all ranks call it in the same order with the
/// same arguments. Stores it behind `out`. `element` is a pcieipc_type.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_buffer_register(
    of: *mut pcieipc_group,
    count: usize,
    element: u32,
    timeout_ms: u32,
    out: *mut *mut pcieipc_buffer,
) -> pcieipc_status {
    answer(|| {
        // SAFETY: NULL or valid, as the C caller promises.
        let out = unsafe { out.as_mut() }.ok_or_else(|| bad("out is NULL"))?;
        *out = std::ptr::null_mut();
        // SAFETY: the C caller passes a group that it has not left, from one thread at a time.
        let group = unsafe { group(of)? };
        let timeout = Duration::from_millis(timeout_ms.into());
        let inner: Box<dyn Buffer> = for_kind!(element, T => Box::new(group.register::<T>(count, timeout)?));
        *out = Box::into_raw(Box::new(pcieipc_buffer { inner }));
        Ok(())
    })
}

/// Where its elements lie; NULL for a NULL buffer. They are this process's to read and write between collectives.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_buffer_data(buffer: *mut pcieipc_buffer) -> *mut c_void {
    // SAFETY: NULL or a buffer that was not freed, as the C caller promises.
    unsafe { buffer.as_mut() }.map_or(std::ptr::null_mut(), |b| b.inner.data())
}

/// Like pcieipc_all_reduce on the whole buffer, without a copy through rings.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_buffer_all_reduce(
    of: *mut pcieipc_group,
    buffer: *mut pcieipc_buffer,
    operation: u32,
    timeout_ms: u32,
) -> pcieipc_status {
    answer(|| {
        // SAFETY: the C caller passes a group and a buffer that it still holds, from one thread at a time.
        let (group, buffer) = unsafe { (group(of)?, buffer.as_mut().ok_or_else(|| bad("the buffer is NULL"))?) };
        buffer.inner.all_reduce(group, op(operation)?, Duration::from_millis(timeout_ms.into()))
    })
}

/// Frees the buffer; NULL is allowed. The peers' views of its memory stay valid until they free theirs.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_buffer_free(buffer: *mut pcieipc_buffer) {
    if !buffer.is_null() {
        // SAFETY: the C caller passes what pcieipc_buffer_register gave, once.
        drop(unsafe { Box::from_raw(buffer) });
    }
}
