// SPDX-License-Identifier: GPL-2.0

//! A node for each endpoint, `/dev/pcieipc<id>`, so that a container, a device cgroup or a udev rule can hand out one endpoint.
//! A session opened through it sees that endpoint only. Minor numbers are endpoint ids, so none is ever used for another device.

use crate::{endpoint::Endpoint, file::OPERATIONS};
use core::ptr::NonNull;
use kernel::{
    bindings,
    error::{from_err_ptr, to_result},
    prelude::*,
    sync::atomic::{Atomic, Relaxed},
};

/// Minor numbers of one major.
const MINORS: u32 = 1 << 20;

/// First device number of ours; 0 before `Nodes::new`.
static FIRST: Atomic<u32> = Atomic::new(0);

struct Class(bindings::class);

// SAFETY: The structure is constant; the driver core keeps what changes elsewhere.
unsafe impl Sync for Class {}

// `as_char_ptr` is not const; the driver core takes the bytes as they are.
#[allow(clippy::disallowed_methods)]
static CLASS: Class = Class(bindings::class { name: c"pcieipc".as_ptr().cast(), devnode: Some(devnode), ..pin_init::zeroed() });

/// What all endpoints' nodes share.
pub(crate) struct Nodes {
    first: u32,
    cdev: NonNull<bindings::cdev>,
}

// SAFETY: Made and dropped only, which any thread may do.
unsafe impl Send for Nodes {}
// SAFETY: There are no methods that take a reference.
unsafe impl Sync for Nodes {}

impl Nodes {
    /// Reserves device numbers and begins to serve them.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory, `EBUSY` without numbers.
    pub(crate) fn new() -> Result<Self> {
        let mut first = 0;
        // SAFETY: The name is a C string.
        to_result(unsafe { bindings::alloc_chrdev_region(&mut first, 0, MINORS, c"pcieipc".as_char_ptr()) })?;
        let made = Self::serve(first);
        if made.is_err() {
            // SAFETY: Reserved above.
            unsafe { bindings::unregister_chrdev_region(first, MINORS) };
        }
        made
    }

    fn serve(first: u32) -> Result<Self> {
        // SAFETY: The class is static.
        to_result(unsafe { bindings::class_register(&raw const CLASS.0) })?;
        // Before anybody can open a node that was kept from before: with another number it would be that of all endpoints.
        FIRST.store(first, Relaxed);
        // SAFETY: A new character device; it is given back below or in `drop`.
        let added = unsafe {
            NonNull::new(bindings::cdev_alloc()).ok_or(ENOMEM).and_then(|cdev| {
                (*cdev.as_ptr()).owner = OPERATIONS.0.owner;
                (*cdev.as_ptr()).ops = &raw const OPERATIONS.0;
                to_result(bindings::cdev_add(cdev.as_ptr(), first, MINORS))
                    .map(|()| cdev)
                    .inspect_err(|_| bindings::cdev_del(cdev.as_ptr()))
            })
        };
        match added {
            Ok(cdev) => Ok(Self { first, cdev }),
            Err(error) => {
                FIRST.store(0, Relaxed);
                // SAFETY: Registered above.
                unsafe { bindings::class_unregister(&raw const CLASS.0) };
                Err(error)
            }
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        FIRST.store(0, Relaxed);
        // SAFETY: All were made in `new`; no endpoint is left that has a node.
        unsafe {
            bindings::cdev_del(self.cdev.as_ptr());
            bindings::class_unregister(&raw const CLASS.0);
            bindings::unregister_chrdev_region(self.first, MINORS);
        }
    }
}

/// An endpoint's node, from probe to unbind.
pub(crate) struct EndpointNode(u32);

impl EndpointNode {
    /// Makes the node.
    ///
    /// # Errors
    ///
    /// `ENOSPC` when the numbers are used up, `ENOMEM` without memory.
    pub(crate) fn new(endpoint: &Endpoint) -> Result<Self> {
        let first = FIRST.load(Relaxed);
        if first == 0 || endpoint.id >= MINORS {
            return Err(ENOSPC);
        }
        let number = first + endpoint.id;
        // SAFETY: The device is being probed; the format takes one number.
        from_err_ptr(unsafe {
            bindings::device_create(
                &raw const CLASS.0,
                endpoint.device(),
                number,
                core::ptr::null_mut(),
                c"pcieipc%u".as_char_ptr(),
                endpoint.id,
            )
        })?;
        Ok(Self(number))
    }
}

impl Drop for EndpointNode {
    fn drop(&mut self) {
        // SAFETY: Made in `new`.
        unsafe { bindings::device_destroy(&raw const CLASS.0, self.0) };
    }
}

/// The endpoint that a device number stands for; None for the node of all.
pub(crate) fn endpoint_of(number: bindings::dev_t) -> Option<u32> {
    let first = FIRST.load(Relaxed);
    (first != 0 && number >= first && number - first < MINORS).then(|| number - first)
}

/// Nodes begin as restrictive as that of all endpoints; udev gives them to the group.
extern "C" fn devnode(_device: *const bindings::device, mode: *mut bindings::umode_t) -> *mut c_char {
    if !mode.is_null() {
        // SAFETY: The driver core passes a valid pointer or null.
        unsafe { *mode = 0o660 };
    }
    core::ptr::null_mut()
}
