// SPDX-License-Identifier: GPL-2.0

//! An exported descriptor: the writer's capability. It maps data and tail for writing, head and status for reading, rings,
//! waits for room and for the end, and does nothing else. Any process may use it.

use crate::{
    bell,
    call::{self, must_be_zero},
    channel::{Channel, Data},
    eventfd::EventFd,
    file::Operations,
    inline, mapping_inode,
    mmap::{self, Area},
    uapi::{self, state},
    window,
};
use kernel::{
    bindings,
    fs::{
        file::{flags, FileDescriptorReservation},
        File, LocalFile,
    },
    prelude::*,
    seq_file::SeqFile,
    seq_print,
    sync::{
        aref::ARef,
        atomic::{Atomic, Relaxed},
        poll::PollTable,
        Arc,
    },
};

/// The private data of an exported file.
pub(crate) struct Export {
    channel: Arc<Channel>,
    /// How often room had been given back when the writer last rang.
    seen: Atomic<u64>,
}

/// A descriptor that the process does not see yet; dropped without installing it, it never was.
pub(crate) struct Descriptor {
    reservation: FileDescriptorReservation,
    file: ARef<File>,
}

impl Descriptor {
    /// A file that nobody else knows, with its number.
    pub(crate) fn new(reservation: FileDescriptorReservation, file: ARef<File>) -> Self {
        Self { reservation, file }
    }

    /// Its number.
    pub(crate) fn number(&self) -> i32 {
        self.reservation.reserved_fd() as i32
    }

    /// Makes it visible.
    pub(crate) fn install(self) {
        self.reservation.fd_install(self.file);
    }
}

impl Export {
    /// The one descriptor of a channel.
    ///
    /// # Errors
    ///
    /// `EBUSY` when it is out already, `EMFILE` and `ENOMEM` as usual.
    pub(crate) fn descriptor(channel: Arc<Channel>) -> Result<Descriptor> {
        channel.take_export()?;
        let export = Self { seen: Atomic::new(channel.freed()), channel };
        // From here on dropping `export` gives the right to the descriptor back.
        let export = KBox::new(export, GFP_KERNEL_ACCOUNT)?;
        let reservation = FileDescriptorReservation::get_unused_fd_flags(flags::O_CLOEXEC)?;
        let private = KBox::into_raw(export);
        // SAFETY: The operations have an owner and take a boxed `Export` as private data.
        let file = unsafe {
            inline::anon_file(c"[pcieipc-channel]", &raw const OPERATIONS.0, private.cast(), flags::O_RDWR | flags::O_CLOEXEC)
        };
        let file = file.inspect_err(|_| {
            // SAFETY: The file was not made, so the box is still ours.
            drop(unsafe { KBox::from_raw(private) })
        })?;
        // SAFETY: The file is new and known to nobody else.
        unsafe { mapping_inode::adopt(file) };
        let file = core::ptr::NonNull::new(file.cast::<File>()).ok_or(EINVAL)?;
        Ok(Descriptor {
            reservation,
            // SAFETY: The reference that making the file returned passes to the `ARef`.
            file: unsafe { ARef::from_raw(file) },
        })
    }

    /// The channel of a descriptor that the caller has open.
    ///
    /// # Errors
    ///
    /// `EBADF` when it is not open, `EINVAL` when it is none of ours.
    pub(crate) fn channel_of(fd: i32) -> Result<Arc<Channel>> {
        let file = LocalFile::fget(u32::try_from(fd).map_err(|_| EBADF)?)?;
        // SAFETY: The file is open; a file with our operations has a boxed `Export` as its private data.
        unsafe {
            let raw = file.as_ptr();
            if !core::ptr::eq((*raw).f_op, &raw const OPERATIONS.0) {
                return Err(EINVAL);
            }
            let export = &*(*raw).private_data.cast::<Self>();
            Ok(export.channel.clone())
        }
    }

    fn info(&self, info: &mut uapi::pcieipc_export_info) -> Result {
        must_be_zero(&[u64::from(info.flags)])?;
        let channel = &self.channel;
        info.endpoint = channel.endpoint.id;
        info.vector = channel.vector;
        info.generation = channel.generation();
        info.data_bytes = channel.data.bytes();
        info.data_offset = match &channel.data {
            Data::Host(_) => Area::Data.offset(0),
            Data::Device(window) => window.offset(),
        };
        info.tail_offset = Area::Tail.offset(0);
        info.head_offset = Area::Head.offset(0);
        info.status_offset = Area::Status.offset(0);
        Ok(())
    }

    fn ioctl(&self, command: u32, arg: usize) -> Result {
        match command {
            uapi::pcieipc_call_PCIEIPC_CALL_EXPORT_INFO => call::run(arg, |info| self.info(info)),
            uapi::pcieipc_call_PCIEIPC_CALL_EXPORT_RING => call::order(arg, |ring: &uapi::pcieipc_ring| {
                must_be_zero(&[u64::from(ring.flags | ring.vector | ring.__reserved)])?;
                // Before the ring, so that room given back meanwhile is seen; kept only if it rang.
                let freed = self.channel.freed();
                self.channel.ring()?;
                self.seen.store(freed, Relaxed);
                Ok(())
            }),
            uapi::pcieipc_call_PCIEIPC_CALL_EXPORT_EVENTFD => {
                call::order(arg, |call: &uapi::pcieipc_export_eventfd| {
                    must_be_zero(&[u64::from(call.flags | call.__reserved)])?;
                    if call.fd < -1 {
                        return Err(EINVAL);
                    }
                    let eventfd = if call.fd >= 0 { Some(EventFd::from_fd(call.fd)?) } else { None };
                    drop(self.channel.set_writer(eventfd));
                    // The end may have come before the eventfd did.
                    if self.channel.check().is_err() {
                        self.channel.wake_writer();
                    }
                    Ok(())
                })
            }
            uapi::pcieipc_call_PCIEIPC_CALL_EXPORT_DOORBELL => call::run(arg, |call: &mut uapi::pcieipc_doorbell| {
                must_be_zero(&[u64::from(call.flags | call.vector)])?;
                self.channel.check()?;
                bell::describe(&self.channel.endpoint, self.channel.vector, call)
            }),
            _ => Err(ENOTTY),
        }
    }

    fn poll(&self) -> u32 {
        let mut events = 0;
        if self.channel.freed() != self.seen.load(Relaxed) {
            events |= bindings::POLLOUT | bindings::POLLWRNORM;
        }
        let endpoint_state = self.channel.endpoint.status.state();
        if self.channel.is_closed() || matches!(endpoint_state, state::DEAD | state::GONE) {
            events |= bindings::POLLHUP | bindings::POLLERR;
        } else if self.channel.check().is_err() {
            events |= bindings::POLLPRI;
        }
        events
    }

    /// # Safety
    ///
    /// As [`mmap::map`].
    unsafe fn mmap(&self, vma: *mut bindings::vm_area_struct, page_offset: usize) -> Result {
        let channel = &self.channel;
        if bell::is_bell(page_offset) {
            channel.check()?;
            // SAFETY: By the requirements of this function.
            return unsafe { bell::map(vma, &channel.endpoint, channel.generation(), Some(channel), page_offset) };
        }
        if window::is_window(page_offset) {
            return match &channel.data {
                // SAFETY: By the requirements of this function.
                Data::Device(window) => unsafe { window.map(vma, true) },
                Data::Host(_) => Err(EINVAL),
            };
        }
        let (id, area, first) = mmap::decode(page_offset)?;
        if id != 0 {
            return Err(EINVAL);
        }
        let (pages, writable) = match area {
            // SAFETY: By the requirements of this function.
            Area::Data => return unsafe { channel.data.map(vma, first, true) },
            Area::Tail => (&channel.tail, true),
            Area::Head => (&channel.head, false),
            Area::Status => (channel.endpoint.status.pages(), false),
        };
        // SAFETY: By the requirements of this function.
        unsafe { mmap::map(vma, pages, first, writable) }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.channel.drop_export();
    }
}

static OPERATIONS: Operations = Operations(bindings::file_operations {
    owner: kernel::module::this_module::<crate::LocalModule>().as_ptr(),
    release: Some(release),
    unlocked_ioctl: Some(ioctl),
    compat_ioctl: bindings::compat_ptr_ioctl,
    mmap: Some(mmap_file),
    poll: Some(poll),
    show_fdinfo: Some(show_fdinfo),
    ..pin_init::zeroed()
});

/// # Safety
///
/// `file` has our operations.
unsafe fn export<'a>(file: *mut bindings::file) -> &'a Export {
    // SAFETY: The private data is a box that `release` alone frees, after all other operations.
    unsafe { &*(*file).private_data.cast::<Export>() }
}

extern "C" fn show_fdinfo(seq: *mut bindings::seq_file, file: *mut bindings::file) {
    // SAFETY: The file is ours and open; the sequence file is the caller's own.
    let (export, seq) = unsafe { (export(file), SeqFile::from_raw(seq)) };
    let channel = &export.channel;
    seq_print!(seq, "pcieipc-abi:\t{}\n", uapi::PCIEIPC_ABI_VERSION);
    channel.endpoint.show_fdinfo(seq);
    seq_print!(seq, "pcieipc-attached-generation:\t{}\n", channel.generation());
    seq_print!(seq, "pcieipc-channel:\t{}{}\n", channel.id, if channel.is_closed() { " (closed)" } else { "" });
    seq_print!(seq, "pcieipc-vector:\t{}\n", channel.vector);
    seq_print!(seq, "pcieipc-channel-data:\t{} KiB\n", channel.data.bytes() >> 10);
}

extern "C" fn release(_inode: *mut bindings::inode, file: *mut bindings::file) -> i32 {
    // SAFETY: Called once for each file, when nobody uses it any more.
    drop(unsafe { KBox::from_raw((*file).private_data.cast::<Export>()) });
    0
}

extern "C" fn ioctl(file: *mut bindings::file, command: u32, arg: usize) -> isize {
    // SAFETY: The file is ours and open.
    match unsafe { export(file) }.ioctl(command, arg) {
        Ok(()) => 0,
        Err(error) => error.to_errno() as isize,
    }
}

extern "C" fn mmap_file(file: *mut bindings::file, vma: *mut bindings::vm_area_struct) -> i32 {
    // SAFETY: The file is ours and open; the VMA is being set up.
    let mapped = unsafe { export(file).mmap(vma, (*vma).vm_pgoff) };
    mapped.map_or_else(Error::to_errno, |()| 0)
}

extern "C" fn poll(file: *mut bindings::file, table: *mut bindings::poll_table_struct) -> bindings::__poll_t {
    // SAFETY: The file is ours and open; the table is valid or null during the call.
    let (export, table, file) = unsafe { (export(file), PollTable::from_raw(table), File::from_raw_file(file)) };
    export.channel.register(&table, file);
    export.poll()
}
