// SPDX-License-Identifier: GPL-2.0

//! The operations of the device node: the one place that sees user pointers of a session's calls.

use crate::{
    admin,
    call::{self, must_be_zero, Call},
    distance, endpoint_node, export, mapping_inode, registry,
    session::{self, Session},
    uapi,
};
use kernel::{
    bindings,
    fs::{file::flags::O_NONBLOCK, File},
    iov::IovIterDest,
    prelude::*,
    seq_file::SeqFile,
    sync::{
        atomic::{Acquire, Atomic, Release},
        poll::PollTable,
        Arc, ArcBorrow,
    },
    uaccess::{UserPtr, UserSlice},
};

/// Operations of a kind of file.
pub(crate) struct Operations(pub(crate) bindings::file_operations);

// SAFETY: The structure is constant.
unsafe impl Sync for Operations {}

/// Of the node.
pub(crate) static OPERATIONS: Operations = Operations(bindings::file_operations {
    owner: kernel::module::this_module::<crate::LocalModule>().as_ptr(),
    open: Some(open),
    release: Some(release),
    unlocked_ioctl: Some(ioctl),
    // All structures are the same for 32-bit programs.
    compat_ioctl: bindings::compat_ptr_ioctl,
    mmap: Some(mmap),
    poll: Some(poll),
    read_iter: Some(read_iter),
    show_fdinfo: Some(show_fdinfo),
    ..pin_init::zeroed()
});

/// 1 while files may be opened.
static READY: Atomic<u32> = Atomic::new(0);

/// All of the module is there, and stays until nobody has a file of it open. Before, loading may still fail, and then the kernel takes the
/// module away from under whatever is open: endpoints' nodes are there as soon as their devices are bound.
pub(crate) struct Ready(());

impl Ready {
    /// The last part of the module that is made.
    pub(crate) fn new() -> Self {
        READY.store(1, Release);
        Self(())
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        READY.store(0, Release);
    }
}

/// A read that must not wait: RWF_NOWAIT, which the bindings do not carry.
const IOCB_NOWAIT: i32 = 0x8;

/// # Safety
///
/// `file` has our operations and was opened.
unsafe fn session<'a>(file: *mut bindings::file) -> ArcBorrow<'a, Session> {
    // SAFETY: `open` stored a reference that `release` alone takes back, after all other operations.
    unsafe { ArcBorrow::from_raw((*file).private_data.cast::<Session>()) }
}

fn errno(result: Result) -> i32 {
    result.map_or_else(Error::to_errno, |()| 0)
}

extern "C" fn open(inode: *mut bindings::inode, file: *mut bindings::file) -> i32 {
    if READY.load(Acquire) == 0 {
        return ENODEV.to_errno();
    }
    // SAFETY: The inode is that of the node being opened.
    let only = endpoint_node::endpoint_of(unsafe { (*inode).i_rdev });
    errno(Session::new(only).map(|session| {
        // SAFETY: The file is being opened.
        unsafe {
            mapping_inode::adopt(file);
            (*file).private_data = Arc::into_raw(session).cast_mut().cast();
        }
    }))
}

extern "C" fn release(_inode: *mut bindings::inode, file: *mut bindings::file) -> i32 {
    // SAFETY: Takes back the reference that `open` stored; nobody uses the file any more.
    let session = unsafe { Arc::from_raw((*file).private_data.cast::<Session>()) };
    session.close();
    0
}

extern "C" fn ioctl(file: *mut bindings::file, command: u32, arg: usize) -> isize {
    // SAFETY: The file is ours and open.
    let session = unsafe { session(file) };
    errno(session.check_caller().and_then(|()| dispatch(&session, command, arg))) as isize
}

extern "C" fn mmap(file: *mut bindings::file, vma: *mut bindings::vm_area_struct) -> i32 {
    // SAFETY: The file is ours and open; the VMA is being set up.
    let (session, page_offset) = unsafe { (session(file), (*vma).vm_pgoff) };
    let result = session.check_caller();
    // SAFETY: As above.
    errno(result.and_then(|()| unsafe { session.mmap(vma, page_offset) }))
}

extern "C" fn poll(file: *mut bindings::file, table: *mut bindings::poll_table_struct) -> bindings::__poll_t {
    // SAFETY: The file is ours and open; the table is valid or null during the call.
    let (session, table, file) = unsafe { (session(file), PollTable::from_raw(table), File::from_raw_file(file)) };
    session.queue.register(&table, file);
    let mut events = 0;
    if session.queue.waiting() > 0 {
        events |= bindings::POLLIN | bindings::POLLRDNORM;
    }
    if session.is_over() {
        events |= bindings::POLLHUP;
    }
    events
}

extern "C" fn read_iter(iocb: *mut bindings::kiocb, to: *mut bindings::iov_iter) -> isize {
    // SAFETY: Both are valid during the call; the file is ours and open.
    let (session, flags, iocb_flags, to) = unsafe {
        let file = (*iocb).ki_filp;
        (session(file), (*file).f_flags, (*iocb).ki_flags, IovIterDest::from_raw(to))
    };
    let nonblocking = flags & O_NONBLOCK != 0 || iocb_flags & IOCB_NOWAIT != 0;
    let result = session.check_caller().and_then(|()| session.queue.read(to, nonblocking, || session.is_end_told()));
    match result {
        Ok(bytes) => bytes as isize,
        Err(error) => error.to_errno() as isize,
    }
}

extern "C" fn show_fdinfo(seq: *mut bindings::seq_file, file: *mut bindings::file) {
    // SAFETY: The file is ours and open; the sequence file is the caller's own.
    let (session, seq) = unsafe { (session(file), SeqFile::from_raw(seq)) };
    session.show(seq);
}

fn dispatch(session: &Session, command: u32, arg: usize) -> Result {
    match command {
        uapi::pcieipc_call_PCIEIPC_CALL_QUERY => query(arg),
        uapi::pcieipc_call_PCIEIPC_CALL_ENUMERATE => enumerate(session, arg),
        uapi::pcieipc_call_PCIEIPC_CALL_ENDPOINT_INFO => call::run(arg, |info: &mut uapi::pcieipc_endpoint_info| {
            must_be_zero(&[u64::from(info.flags)])?;
            session.find_endpoint(info.endpoint)?.describe(info);
            Ok(())
        }),
        uapi::pcieipc_call_PCIEIPC_CALL_ATTACH => attach(session, arg),
        uapi::pcieipc_call_PCIEIPC_CALL_RECOVER => call::run(arg, |recover: &mut uapi::pcieipc_recover| {
            must_be_zero(&[u64::from(recover.flags)])?;
            session.recover(recover)
        }),
        uapi::pcieipc_call_PCIEIPC_CALL_STATE => call::run(arg, |state: &mut uapi::pcieipc_session_state| {
            must_be_zero(&[u64::from(state.flags)])?;
            session.describe(state)
        }),
        uapi::pcieipc_call_PCIEIPC_CALL_CHANNEL_CREATE => call::run_or_undo(
            arg,
            |create: &mut uapi::pcieipc_channel_create| {
                must_be_zero(&[u64::from(create.__reserved)])?;
                session.create(create)
            },
            |create| {
                let _ = session.destroy(create.channel);
            },
        ),
        uapi::pcieipc_call_PCIEIPC_CALL_CHANNEL_DESTROY => call::order(arg, |channel: &uapi::pcieipc_channel| {
            must_be_zero(&[u64::from(channel.flags | channel.__reserved)])?;
            session.destroy(channel.channel)
        }),
        uapi::pcieipc_call_PCIEIPC_CALL_CHANNEL_EXPORT => descriptor(arg, |id| session.export(id)),
        uapi::pcieipc_call_PCIEIPC_CALL_CHANNEL_DMABUF => descriptor(arg, |id| session.share(id)),
        uapi::pcieipc_call_PCIEIPC_CALL_CHANNEL_IMPORT => call::run_or_undo(
            arg,
            |import: &mut uapi::pcieipc_channel_fd| {
                must_be_zero(&[u64::from(import.flags)])?;
                session.import(import)
            },
            |import| {
                let _ = session.destroy(import.channel);
            },
        ),
        uapi::pcieipc_call_PCIEIPC_CALL_CHANNEL_FREED => call::order(arg, |channel: &uapi::pcieipc_channel| {
            must_be_zero(&[u64::from(channel.flags | channel.__reserved)])?;
            session.freed(channel.channel)
        }),
        uapi::pcieipc_call_PCIEIPC_CALL_COPY => call::order(arg, |copy: &uapi::pcieipc_copy| {
            must_be_zero(&[copy.__reserved])?;
            session.copy(copy)
        }),
        uapi::pcieipc_call_PCIEIPC_CALL_VECTOR_EVENTFD => call::order(arg, |vector| session.set_eventfd(vector)),
        uapi::pcieipc_call_PCIEIPC_CALL_RING => call::order(arg, |ring: &uapi::pcieipc_ring| {
            must_be_zero(&[u64::from(ring.flags | ring.__reserved)])?;
            session.ring(ring.vector)
        }),
        uapi::pcieipc_call_PCIEIPC_CALL_DISTANCE => call::run(arg, |distance: &mut uapi::pcieipc_distance| {
            must_be_zero(&[u64::from(distance.flags | distance.__reserved)])?;
            let from = session.find_endpoint(distance.from)?;
            let to = session.find_endpoint(distance.to)?;
            distance::measure(&from, &to, distance);
            Ok(())
        }),
        uapi::pcieipc_call_PCIEIPC_CALL_DOORBELL_MAP => call::run(arg, |bell: &mut uapi::pcieipc_doorbell| {
            must_be_zero(&[u64::from(bell.flags)])?;
            session.bell(bell)
        }),
        uapi::pcieipc_call_PCIEIPC_CALL_ADMIN => call::order(arg, |request: &uapi::pcieipc_admin| {
            must_be_zero(&[u64::from(request.flags)])?;
            session.check_unrestricted()?;
            admin::request(request)
        }),
        _ => Err(ENOTTY),
    }
}

/// The structure is filled in even when the versions exclude each other, so that the caller can say what it met.
fn query(arg: usize) -> Result {
    let mut call = Call::<uapi::pcieipc_query>::read(arg)?;
    let record = &mut call.record;
    must_be_zero(&[u64::from(record.flags)])?;
    session::query(record);
    let fits = record.user_oldest <= record.version && record.user_version >= record.oldest;
    call.write()?;
    if fits {
        Ok(())
    } else {
        Err(EPROTO)
    }
}

fn enumerate(session: &Session, arg: usize) -> Result {
    let mut call = Call::<uapi::pcieipc_enumerate>::read(arg)?;
    let record = &mut call.record;
    must_be_zero(&[u64::from(record.flags | record.__reserved)])?;
    let mut ids = registry::ids()?;
    ids.retain(|id| session.may_see(*id));
    let fitting = ids.len().min(record.count as usize);
    let address = usize::try_from(record.ids)?;
    let mut writer = UserSlice::new(UserPtr::from_addr(address), fitting * size_of::<u32>()).writer();
    for id in ids.iter().take(fitting) {
        writer.write(id)?;
    }
    record.count = ids.len() as u32;
    call.write()
}

/// The session is attached only after the caller could be told, because nothing detaches it again.
fn attach(session: &Session, arg: usize) -> Result {
    let mut call = Call::<uapi::pcieipc_attach>::read(arg)?;
    must_be_zero(&[u64::from(call.record.flags)])?;
    let claim = session.claim(&mut call.record)?;
    call.write()?;
    claim.settle()
}

/// The descriptor becomes visible only after the caller was told its number.
fn descriptor(arg: usize, make: impl FnOnce(u32) -> Result<export::Descriptor>) -> Result {
    let mut call = Call::<uapi::pcieipc_channel_fd>::read(arg)?;
    must_be_zero(&[u64::from(call.record.flags)])?;
    let descriptor = make(call.record.channel)?;
    call.record.fd = descriptor.number();
    call.write()?;
    descriptor.install();
    Ok(())
}
