// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-reduce of CUDA memory, enqueued on streams.

use std::{
    ffi::{c_char, c_void, CStr},
    mem::offset_of,
    sync::OnceLock,
    time::Duration,
};

use ::pcieipc_cuda::{
    driver::{Cuda, Driver, Stream},
    kernels::KINDS,
    Communicator, Options, PathChoice, Tensor,
};
use pcieipc::{
    group::{Group, GroupOptions},
    reduce::Kind,
    Error,
};

use crate::{
    collectives::{kind, op},
    growing::{self, Growing},
    status::{answer, bad, pcieipc_status},
};

/// Which paths calls on CUDA memory may take.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum pcieipc_cuda_path {
    /// Peer memory for each pair of devices where it is proved to work, host memory for the others.
    Auto = 0,
    /// Peer memory for all, or an error.
    Peer = 1,
    /// Host memory for all.
    Host = 2,
    /// Peer memory between ranks that share a device, host memory between devices.
    Device = 3,
}

/// What a rank brings to a communicator of CUDA devices; the same on all ranks but for `rank`, `device` and the times. Set everything to zero,
/// then `size` to `sizeof(struct pcieipc_cuda_options)`, then what you need: fields that later versions add are found by `size`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct pcieipc_cuda_options {
    /// Bytes of this struct.
    pub size: usize,
    /// The directory in which the ranks meet, not that of another group; made with mode 0700 if it is not there. Required.
    pub directory: *const c_char,
    /// This rank, from 0.
    pub rank: u32,
    /// How many ranks there are, 1 to 16.
    pub ranks: u32,
    /// The driver's number of this rank's device, in this process. Its primary context is used. Ranks may share a device.
    pub device: u32,
    /// A pcieipc_cuda_path.
    pub path: u32,
    /// How long a call waits for the others on the device, in milliseconds; 0 for the default of 30 s.
    pub deadline_ms: u32,
    /// How long the meeting and each step of the start may take, in milliseconds; 0 for the default of 180 s. Compiling is one of them.
    pub setup_timeout_ms: u32,
    /// The types whose kernels are loaded at the start, one bit for each pcieipc_type; 0 for all. Others are loaded at their first call.
    pub types: u32,
    /// Most blocks of a call; 0 for the default.
    pub blocks: u32,
    /// Not 0: after each call all ranks compare their results; a difference is PCIEIPC_STATUS_CORRUPT.
    pub checked: u32,
    /// Always 0.
    pub reserved: u32,
}

// SAFETY: it begins with its size, and zero is good for integers and pointers.
unsafe impl Growing for pcieipc_cuda_options {
    const NAME: &'static str = "options";
    const OLDEST: usize = offset_of!(Self, reserved) + size_of::<u32>();
}

/// One rank's part in all-reduces of CUDA memory. Not for use by two threads at once.
pub struct pcieipc_cuda {
    inner: Communicator,
}

/// # Safety
/// NULL, or what pcieipc_cuda_make gave and was not freed, used by one thread at a time.
unsafe fn communicator<'a>(of: *mut pcieipc_cuda) -> Result<&'a mut Communicator, Error> {
    // SAFETY: the caller's promise.
    unsafe { of.as_mut() }.map(|c| &mut c.inner).ok_or_else(|| bad("the communicator is NULL"))
}

/// The driver, started once a process.
fn driver() -> Result<&'static Cuda, Error> {
    static DRIVER: OnceLock<Cuda> = OnceLock::new();
    if let Some(driver) = DRIVER.get() {
        return Ok(driver);
    }
    let started = Cuda::start()?;
    Ok(DRIVER.get_or_init(|| started))
}

fn make(given: &pcieipc_cuda_options) -> Result<Communicator, Error> {
    if given.directory.is_null() {
        return Err(bad("options.directory is NULL: name a private directory in which the ranks meet"));
    }
    // SAFETY: not NULL, and the C caller promises a string.
    let directory = unsafe { CStr::from_ptr(given.directory) };
    let directory = directory.to_str().map_err(|_| bad("options.directory is not UTF-8"))?;
    let mut options = Options {
        path: match given.path {
            0 => PathChoice::Auto,
            1 => PathChoice::Peer,
            2 => PathChoice::Host,
            3 => PathChoice::Device,
            other => return Err(bad(format!("path {other} does not exist"))),
        },
        checked: given.checked != 0,
        ..Options::default()
    };
    if given.deadline_ms != 0 {
        options.deadline = Duration::from_millis(given.deadline_ms.into());
    }
    if given.setup_timeout_ms != 0 {
        options.setup = Duration::from_millis(given.setup_timeout_ms.into());
    }
    if given.blocks != 0 {
        options.blocks = given.blocks;
    }
    if given.types != 0 {
        let named = |of: &Kind| given.types >> (*of as u32) & 1 != 0;
        if given.types >> KINDS.len() != 0 {
            return Err(bad(format!("types {:#x} has bits of types that do not exist", given.types)));
        }
        options.kinds = KINDS.into_iter().filter(named).collect();
    }
    let number = i32::try_from(given.device).map_err(|_| bad(format!("device {} does not exist", given.device)))?;
    let device = driver()?.open(number)?;
    let mut group = GroupOptions::new(given.rank as usize, given.ranks as usize, directory);
    group.meeting_timeout = options.setup;
    Communicator::new(Group::meet(group)?, device, options)
}

/// Meets the other ranks, finds and proves the paths between their devices, and stores the communicator behind `out`. Without a driver or a device
/// it is PCIEIPC_STATUS_SYSTEM.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_cuda_make(given: *const pcieipc_cuda_options, out: *mut *mut pcieipc_cuda) -> pcieipc_status {
    answer(|| {
        // SAFETY: NULL or valid, as the C caller promises.
        let Some(out) = (unsafe { out.as_mut() }) else { return Err(bad("out is NULL")) };
        *out = std::ptr::null_mut();
        // SAFETY: NULL or valid for as many bytes as it says, as the C caller promises.
        let inner = make(&unsafe { growing::read(given)? })?;
        *out = Box::into_raw(Box::new(pcieipc_cuda { inner }));
        Ok(())
    })
}

/// Enqueues on `stream` (a CUstream of the device) the combination of all ranks' `from` into `to`, which may be the same but not overlap it
/// otherwise, and returns. Both are memory of this rank's device, valid until the stream has run the call, and in every replay of a graph that
/// it is captured in. The stream must live until a call on another one was enqueued, or the communicator is freed. An error is what an earlier
/// call came to; what became of this one, pcieipc_cuda_check and later calls say. The first call of a type that was not named at the start loads
/// its kernels and waits for the calls before; it can not be captured.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_cuda_all_reduce(
    of: *mut pcieipc_cuda,
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: u32,
    operation: u32,
    stream: *mut c_void,
) -> pcieipc_status {
    answer(|| {
        // SAFETY: as promised to `communicator`.
        let communicator = unsafe { communicator(of)? };
        let (kind, op, stream) = (kind(element)?, op(operation)?, Stream(stream.addr()));
        if count > 0 && (from.is_null() || to.is_null()) {
            return Err(bad("a buffer is NULL"));
        }
        communicator.prepare(kind, stream)?;
        let tensor = |at: usize| Tensor { at: at as u64, count: count as u64 };
        // SAFETY: the C caller's promise.
        unsafe { communicator.all_reduce(tensor(from.addr()), tensor(to.addr()), kind, op, stream) }
    })
}

/// What the calls that have run came to: the first failure, if there was one. It does not wait; synchronize the stream first to know about all.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_cuda_check(of: *mut pcieipc_cuda) -> pcieipc_status {
    // SAFETY: as promised to `communicator`.
    answer(|| unsafe { communicator(of)? }.check())
}

/// Stores to `out`, which has room for `room` of them, how each rank is reached: 0 this rank itself, 1 host memory, 2 peer memory over PCIe,
/// 3 peer memory within a device or over NVLink.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_cuda_paths(of: *mut pcieipc_cuda, out: *mut u32, room: usize) -> pcieipc_status {
    answer(|| {
        // SAFETY: as promised to `communicator`.
        let communicator = unsafe { communicator(of)? };
        if out.is_null() || room < communicator.ranks() {
            return Err(bad(format!("room for {room} paths of {}", communicator.ranks())));
        }
        for (i, (path, _)) in communicator.paths().enumerate() {
            // SAFETY: the C caller promises room for `room` numbers, and i is less.
            unsafe { out.add(i).write(path.map_or(0, |p| p as u32 + 1)) };
        }
        Ok(())
    })
}

/// Makes the calls of all ranks that run, and all later ones, fail with PCIEIPC_STATUS_ABORTED and this reason.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_cuda_abort(of: *mut pcieipc_cuda, why: *const c_char) -> pcieipc_status {
    answer(|| {
        // SAFETY: NULL is caught; otherwise the C caller promises a string.
        let why = if why.is_null() { "no reason given".into() } else { unsafe { CStr::from_ptr(why) }.to_string_lossy() };
        // SAFETY: as promised to `communicator`.
        unsafe { communicator(of)? }.abort(&why);
        Ok(())
    })
}

/// Waits for this rank's calls as long as their deadlines allow, leaves the others and frees the communicator; NULL is allowed.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_cuda_free(of: *mut pcieipc_cuda) {
    if !of.is_null() {
        // SAFETY: the C caller passes what pcieipc_cuda_make gave, once.
        let of = unsafe { Box::from_raw(of) };
        answer(|| {
            drop(of);
            Ok(())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::pcieipc_last_error;

    fn last() -> String {
        // SAFETY: never NULL and ends with a zero byte, which is what is promised.
        unsafe { CStr::from_ptr(pcieipc_last_error()) }.to_str().unwrap().to_owned()
    }

    fn options(directory: &CStr) -> pcieipc_cuda_options {
        pcieipc_cuda_options {
            size: size_of::<pcieipc_cuda_options>(),
            directory: directory.as_ptr(),
            rank: 0,
            ranks: 1,
            device: 0,
            path: 0,
            deadline_ms: 0,
            setup_timeout_ms: 0,
            types: 0,
            blocks: 0,
            checked: 0,
            reserved: 0,
        }
    }

    #[test]
    fn what_can_not_be_served_is_an_argument_before_anything_waits() {
        // Not a literal for C: cbindgen of Debian 12 does not read them.
        let nowhere = std::ffi::CString::new("/nowhere").unwrap();
        let base = options(&nowhere);
        let wrong: [(pcieipc_cuda_options, &str); 4] = [
            (pcieipc_cuda_options { directory: std::ptr::null(), ..base }, "directory is NULL"),
            (pcieipc_cuda_options { path: 9, ..base }, "path 9"),
            (pcieipc_cuda_options { types: 1 << 12, ..base }, "types 0x1000"),
            (pcieipc_cuda_options { device: u32::MAX, ..base }, "device 4294967295"),
        ];
        for (given, text) in wrong {
            let mut out = std::ptr::dangling_mut();
            // SAFETY: both are valid.
            let status = unsafe { pcieipc_cuda_make(&given, &mut out) };
            assert_eq!((status, out.is_null()), (pcieipc_status::Argument, true));
            assert!(last().contains(text), "{}", last());
        }
    }

    #[test]
    fn no_communicator_is_an_argument() {
        let (none, at) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: NULL is allowed everywhere.
        let answers = unsafe {
            [
                pcieipc_cuda_make(std::ptr::null(), std::ptr::null_mut()),
                pcieipc_cuda_all_reduce(none, at, at, 1, 1, 0, at),
                pcieipc_cuda_check(none),
                pcieipc_cuda_paths(none, std::ptr::null_mut(), 0),
                pcieipc_cuda_abort(none, std::ptr::null()),
            ]
        };
        assert_eq!(answers, [pcieipc_status::Argument; 5]);
        // SAFETY: as above.
        unsafe { pcieipc_cuda_free(none) };
    }
}
