// SPDX-License-Identifier: GPL-2.0

//! The device node. `kernel::miscdevice` has no poll and no mapping of its own, so the structure is registered here.

use crate::file::OPERATIONS;
use kernel::{bindings, error::to_result, prelude::*, types::Opaque};

/// The registered node `/dev/pcieipc`. The udev rule gives it to the group `pcieipc`.
#[pin_data(PinnedDrop)]
pub(crate) struct Node {
    #[pin]
    misc: Opaque<bindings::miscdevice>,
}

// SAFETY: Registration and deregistration are the only uses; both may happen on any thread.
unsafe impl Send for Node {}
// SAFETY: There are no methods.
unsafe impl Sync for Node {}

impl Node {
    /// Makes the node.
    pub(crate) fn new() -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            misc <- Opaque::try_ffi_init(|slot: *mut bindings::miscdevice| {
                // SAFETY: `slot` is valid for writes and pinned until `drop` deregisters it; name and operations are static.
                unsafe {
                    slot.write(pin_init::zeroed());
                    (*slot).minor = bindings::MISC_DYNAMIC_MINOR as i32;
                    (*slot).name = c"pcieipc".as_char_ptr();
                    (*slot).fops = &raw const OPERATIONS.0;
                    (*slot).mode = 0o660;
                    to_result(bindings::misc_register(slot))
                }
            }),
        })
    }
}

#[pinned_drop]
impl PinnedDrop for Node {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: Registered in `new`.
        unsafe { bindings::misc_deregister(self.misc.get()) };
    }
}
