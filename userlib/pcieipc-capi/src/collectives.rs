// SPDX-License-Identifier: MIT OR Apache-2.0
//! The collectives. All ranks make the same calls in the same order; `timeout_ms` bounds each.

use std::{ffi::c_void, time::Duration};

use half::{bf16, f16};
use pcieipc::{
    group::Group,
    reduce::{Element, Kind, Op},
    Error,
};

use crate::{
    group::{group, pcieipc_group},
    status::{answer, bad, pcieipc_status},
};

/// The type of an element.
#[repr(C)]
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum pcieipc_type {
    F64 = 0,
    F32 = 1,
    F16 = 2,
    Bf16 = 3,
    I8 = 4,
    I16 = 5,
    I32 = 6,
    I64 = 7,
    U8 = 8,
    U16 = 9,
    U32 = 10,
    U64 = 11,
}

/// How elements are combined.
#[repr(C)]
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum pcieipc_op {
    /// Integers wrap; 16-bit floats add in f32 and round once.
    Sum = 0,
    Prod = 1,
    /// NaN if any is NaN.
    Min = 2,
    /// NaN if any is NaN.
    Max = 3,
    /// The sum divided by the number of ranks.
    Average = 4,
}

pub(crate) fn kind(code: u32) -> Result<Kind, Error> {
    u8::try_from(code).ok().and_then(Kind::from_code).ok_or_else(|| bad(format!("element type {code} does not exist")))
}

pub(crate) fn op(code: u32) -> Result<Op, Error> {
    u8::try_from(code).ok().and_then(Op::from_code).ok_or_else(|| bad(format!("operation {code} does not exist")))
}

pub(crate) fn check<T>(at: *const c_void, count: usize) -> Result<(), Error> {
    if count > 0 && (at.is_null() || at.addr() % align_of::<T>() != 0) {
        return Err(bad(format!("a buffer at {at:?} is NULL or not aligned to {} bytes", align_of::<T>())));
    }
    if count.checked_mul(size_of::<T>()).is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return Err(bad(format!("{count} elements do not fit memory")));
    }
    Ok(())
}

/// # Safety
/// `at` is readable for `count` elements and not written during the lifetime.
unsafe fn input<'a, T: Element>(at: *const c_void, count: usize) -> Result<&'a [T], Error> {
    check::<T>(at, count)?;
    // SAFETY: checked, and the caller's promise; every bit pattern is a T.
    Ok(if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(at.cast(), count) } })
}

/// # Safety
/// `at` is readable and writable for `count` elements, and nobody else uses it during the lifetime.
unsafe fn output<'a, T: Element>(at: *mut c_void, count: usize) -> Result<&'a mut [T], Error> {
    check::<T>(at, count)?;
    // SAFETY: checked, and the caller's promise; every bit pattern is a T.
    Ok(if count == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(at.cast(), count) } })
}

/// Calls a function that is generic over the element for the kind that a code names.
macro_rules! for_kind {
    ($code:expr, $t:ident => $body:expr) => {
        match kind($code)? {
            Kind::F64 => {
                type $t = f64;
                $body
            }
            Kind::F32 => {
                type $t = f32;
                $body
            }
            Kind::F16 => {
                type $t = f16;
                $body
            }
            Kind::BF16 => {
                type $t = bf16;
                $body
            }
            Kind::I8 => {
                type $t = i8;
                $body
            }
            Kind::I16 => {
                type $t = i16;
                $body
            }
            Kind::I32 => {
                type $t = i32;
                $body
            }
            Kind::I64 => {
                type $t = i64;
                $body
            }
            Kind::U8 => {
                type $t = u8;
                $body
            }
            Kind::U16 => {
                type $t = u16;
                $body
            }
            Kind::U32 => {
                type $t = u32;
                $body
            }
            Kind::U64 => {
                type $t = u64;
                $body
            }
        }
    };
}
pub(crate) use for_kind;

fn call(of: *mut pcieipc_group, timeout_ms: u32, body: impl FnOnce(&mut Group, Duration) -> Result<(), Error>) -> pcieipc_status {
    // SAFETY: the C caller passes a group that it has not left, from one thread at a time.
    answer(|| body(unsafe { group(of)? }, Duration::from_millis(timeout_ms.into())))
}

pub(crate) fn total(count: usize, ranks: usize) -> Result<usize, Error> {
    count.checked_mul(ranks).ok_or_else(|| bad(format!("{count} elements for each of {ranks} ranks do not fit memory")))
}

/// Combines `count` elements of all ranks, in place. `element` is a pcieipc_type, `operation` a pcieipc_op. After an error the buffer may
/// be half overwritten.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_all_reduce(
    of: *mut pcieipc_group,
    buffer: *mut c_void,
    count: usize,
    element: u32,
    operation: u32,
    timeout_ms: u32,
) -> pcieipc_status {
    call(of, timeout_ms, |group, timeout| {
        // SAFETY: the C caller passes a buffer of `count` elements that nobody else uses during the call.
        for_kind!(element, T => group.all_reduce::<T>(unsafe { output(buffer, count)? }, op(operation)?, timeout))
    })
}

/// Like pcieipc_all_reduce, from `from` to `to`, which must not overlap; `from` stays as it is.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_all_reduce_into(
    of: *mut pcieipc_group,
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: u32,
    operation: u32,
    timeout_ms: u32,
) -> pcieipc_status {
    call(of, timeout_ms, |group, timeout| {
        // SAFETY: the C caller passes two buffers of `count` elements that nobody else changes during the call.
        for_kind!(element, T => group.all_reduce_into::<T>(unsafe { input(from, count)? }, unsafe { output(to, count)? }, op(operation)?, timeout))
    })
}

/// `from` holds `count` elements for each rank, `to` gets this rank's `count` of the combination.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_reduce_scatter(
    of: *mut pcieipc_group,
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: u32,
    operation: u32,
    timeout_ms: u32,
) -> pcieipc_status {
    call(of, timeout_ms, |group, timeout| {
        let all = total(count, group.ranks())?;
        // SAFETY: the C caller passes buffers of that many elements that nobody else changes during the call.
        for_kind!(element, T => group.reduce_scatter::<T>(unsafe { input(from, all)? }, unsafe { output(to, count)? }, op(operation)?, timeout))
    })
}

/// `from` holds `count` elements, `to` gets those of all ranks, in rank order.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_all_gather(
    of: *mut pcieipc_group,
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: u32,
    timeout_ms: u32,
) -> pcieipc_status {
    call(of, timeout_ms, |group, timeout| {
        let all = total(count, group.ranks())?;
        // SAFETY: the C caller passes buffers of that many elements that nobody else changes during the call.
        for_kind!(element, T => group.all_gather::<T>(unsafe { input(from, count)? }, unsafe { output(to, all)? }, timeout))
    })
}

/// `count` elements for each rank on both sides: block p of `from` goes to rank p, which finds it as the block of this rank.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_all_to_all(
    of: *mut pcieipc_group,
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: u32,
    timeout_ms: u32,
) -> pcieipc_status {
    call(of, timeout_ms, |group, timeout| {
        let all = total(count, group.ranks())?;
        // SAFETY: the C caller passes buffers of that many elements that nobody else changes during the call.
        for_kind!(element, T => group.all_to_all::<T>(unsafe { input(from, all)? }, unsafe { output(to, all)? }, timeout))
    })
}

/// The root's `to` gets the combination of all ranks' `from`; elsewhere `to` may be NULL.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_reduce(
    of: *mut pcieipc_group,
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: u32,
    operation: u32,
    root: u32,
    timeout_ms: u32,
) -> pcieipc_status {
    call(of, timeout_ms, |group, timeout| {
        let (root, here) = (root as usize, group.rank() == root as usize);
        let there = if here { count } else { 0 };
        // SAFETY: the C caller passes buffers of that many elements that nobody else changes during the call.
        for_kind!(element, T => group.reduce::<T>(unsafe { input(from, count)? }, unsafe { output(to, there)? }, op(operation)?, root, timeout))
    })
}

/// Every rank's buffer gets what the root's holds.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_broadcast(
    of: *mut pcieipc_group,
    buffer: *mut c_void,
    count: usize,
    element: u32,
    root: u32,
    timeout_ms: u32,
) -> pcieipc_status {
    call(of, timeout_ms, |group, timeout| {
        // SAFETY: the C caller passes a buffer of `count` elements that nobody else uses during the call.
        for_kind!(element, T => group.broadcast::<T>(unsafe { output(buffer, count)? }, root as usize, timeout))
    })
}

/// Sends `count` elements to one rank, which must call pcieipc_receive.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_send(
    of: *mut pcieipc_group,
    from: *const c_void,
    count: usize,
    element: u32,
    to: u32,
    timeout_ms: u32,
) -> pcieipc_status {
    call(of, timeout_ms, |group, timeout| {
        // SAFETY: the C caller passes a buffer of `count` elements that nobody changes during the call.
        for_kind!(element, T => group.send::<T>(unsafe { input(from, count)? }, to as usize, timeout))
    })
}

/// Receives `count` elements from one rank, which must call pcieipc_send.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_receive(
    of: *mut pcieipc_group,
    to: *mut c_void,
    count: usize,
    element: u32,
    from: u32,
    timeout_ms: u32,
) -> pcieipc_status {
    call(of, timeout_ms, |group, timeout| {
        // SAFETY: the C caller passes a buffer of `count` elements that nobody else uses during the call.
        for_kind!(element, T => group.receive::<T>(unsafe { output(to, count)? }, from as usize, timeout))
    })
}

/// Waits until all ranks have called it.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_barrier(of: *mut pcieipc_group, timeout_ms: u32) -> pcieipc_status {
    call(of, timeout_ms, |group, timeout| group.barrier(timeout))
}
