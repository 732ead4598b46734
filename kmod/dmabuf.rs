// SPDX-License-Identifier: GPL-2.0

//! A channel's data area in an endpoint's memory, as a dma-buf: drivers of other devices map it for their own DMA, where peer traffic may
//! pass. They let go of it whenever the area may not be reached, and may map it again when it may.

use crate::{export::Descriptor, window::Window};
use core::{ffi::c_void, ptr::NonNull};
use kernel::{
    bindings,
    error::from_err_ptr,
    fs::{
        file::{flags, FileDescriptorReservation},
        File,
    },
    prelude::*,
    sync::{aref::ARef, Arc},
};

// The structures are only passed on by pointer; bindgen gives some of their empty members no size.
#[allow(improper_ctypes)]
unsafe extern "C" {
    fn pcieipc_dmabuf_new(
        pdev: *mut bindings::pci_dev,
        provider: *mut c_void,
        start: u64,
        bytes: usize,
        owner: *mut c_void,
    ) -> *mut c_void;
    fn pcieipc_dmabuf_file(range: *mut c_void) -> *mut bindings::file;
    fn pcieipc_dmabuf_allow(range: *mut c_void, allowed: bool);
}

/// What lets other drivers reach an endpoint's memory; it ends with the binding. None where the kernel or the BAR has no peer traffic.
#[derive(Clone, Copy)]
pub(crate) struct Provider(Option<NonNull<c_void>>);

// SAFETY: It is only passed on, and dereferenced by the kernel while the device is bound.
unsafe impl Send for Provider {}
// SAFETY: As above.
unsafe impl Sync for Provider {}

impl Provider {
    /// From what `pcim_p2pdma_provider` gave.
    pub(crate) fn new(provider: *mut c_void) -> Self {
        Self(NonNull::new(provider))
    }
}

/// The dma-buf of a window, while it exists.
pub(crate) struct DmaBuf(NonNull<c_void>);

// SAFETY: The C side is synchronized by the buffer's reservation.
unsafe impl Send for DmaBuf {}

impl DmaBuf {
    /// Lets importers map it, or takes it from them; in the latter case nobody reaches the memory by it when this returns.
    pub(crate) fn allow(&self, allowed: bool) {
        // SAFETY: The window forgets `self` in `pcieipc_dmabuf_released`, under the lock that is held here.
        unsafe { pcieipc_dmabuf_allow(self.0.as_ptr(), allowed) }
    }
}

/// The one dma-buf of a window, as a descriptor that the process does not see yet.
///
/// # Errors
///
/// `EBUSY` when it is out already, `EOPNOTSUPP` where there is no peer traffic, `EMFILE` and `ENOMEM` as usual.
pub(crate) fn descriptor(window: &Arc<Window>) -> Result<Descriptor> {
    let provider = window.endpoint.provider.0.ok_or(EOPNOTSUPP)?;
    let reservation = FileDescriptorReservation::get_unused_fd_flags(flags::O_CLOEXEC)?;
    let mut place = window.dmabuf.lock();
    if place.is_some() {
        return Err(EBUSY);
    }
    let owner = Arc::into_raw(window.clone()).cast_mut().cast::<c_void>();
    let start = window.endpoint.memory_start + window.start;
    // SAFETY: The endpoint, and with it the device, lives as long as the owner. The provider is used only while it is allowed, which ends,
    // under the same lock, before the binding does.
    let range = from_err_ptr(unsafe {
        pcieipc_dmabuf_new(window.endpoint.pci(), provider.as_ptr(), start, window.bytes as usize, owner)
    })
    .inspect_err(|_| {
        // SAFETY: It was not made, so the reference is still ours.
        drop(unsafe { Arc::from_raw(owner.cast_const().cast::<Window>()) })
    })?;
    let range = NonNull::new(range).ok_or(ENOMEM)?;
    let buffer = DmaBuf(range);
    // The endpoint changes its state before it asks for this lock, so either the change is seen here, or it is told to this buffer.
    buffer.allow(window.may_be_reached());
    *place = Some(buffer);
    drop(place);
    // SAFETY: The buffer exists as long as its file, whose first reference is ours.
    let file = unsafe { pcieipc_dmabuf_file(range.as_ptr()) };
    let file = NonNull::new(file.cast::<File>()).ok_or(EINVAL)?;
    // SAFETY: That reference passes to the `ARef`.
    Ok(Descriptor::new(reservation, unsafe { ARef::from_raw(file) }))
}

/// The last reference to a dma-buf is gone.
///
/// # Safety
///
/// `owner` is what was passed to `pcieipc_dmabuf_new`; called once.
#[no_mangle]
unsafe extern "C" fn pcieipc_dmabuf_released(owner: *mut c_void) {
    // SAFETY: By the requirements of this function it is a reference to a window.
    let window = unsafe { Arc::from_raw(owner.cast_const().cast::<Window>()) };
    *window.dmabuf.lock() = None;
}
