// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups: meeting, leaving, agreeing, shrinking, recovering.

use std::{
    ffi::{c_char, CStr},
    mem::offset_of,
    time::Duration,
};

use pcieipc::{
    device::EndpointId,
    group::{Group, GroupOptions, KmodOptions, Transport},
    plan::Algorithm,
    Error,
};

use crate::{
    growing::{self, Growing},
    status::{answer, bad, pcieipc_status},
};

/// How the ranks of a group reach each other.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum pcieipc_transport {
    /// Shared memory: no module, no hardware.
    Shm = 0,
    /// Channels of /dev/pcieipc, one endpoint a rank.
    Kmod = 1,
}

/// What a rank brings to a meeting. Set everything to zero, then `size` to `sizeof(struct pcieipc_options)`, then what you need:
/// fields that later versions add are found by `size`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct pcieipc_options {
    /// Bytes of this struct.
    pub size: usize,
    /// The directory in which the ranks meet; made with mode 0700 if it is not there. Required.
    pub directory: *const c_char,
    /// This rank, from 0.
    pub rank: u32,
    /// How many ranks there are, 1 to 16.
    pub ranks: u32,
    /// A pcieipc_transport.
    pub transport: u32,
    /// With PCIEIPC_TRANSPORT_KMOD: the module's id of this rank's endpoint plus 1, or 0 for the rank-th free one.
    pub endpoint: u32,
    /// Data area of each ring in bytes, a power of two; 0 for the default.
    pub ring_bytes: usize,
    /// How long the meeting may take, in milliseconds; 0 for the default of 30 s.
    pub meeting_timeout_ms: u32,
    /// 0 for the default choice, otherwise a number of the library's algorithms: 1 one-shot, 2 two-shot, 3 star, 4 ring,
    /// 5 recursive doubling, 6 hierarchical.
    pub algorithm: u32,
    /// Not 0: a thread of the group goes on with started calls while the caller computes.
    pub helper_thread: u32,
    /// Not 0: choose algorithms by what was measured of this machine, at first use (about two seconds); the same on all ranks.
    pub tuned: u32,
    /// Not 0: a checksum in every record, compared on the bytes that are combined; the same on all ranks.
    pub checked: u32,
    /// With PCIEIPC_TRANSPORT_KMOD, not 0: a link that trains down is PCIEIPC_STATUS_LINK_DEGRADED instead of a slower call.
    pub degraded_link_is_error: u32,
}

/// What all ranks that are left learn alike. Ranks are those of the meeting, one bit each. Set everything to zero, then `size` to
/// `sizeof(struct pcieipc_agreement)`: fields that later versions add are found by `size`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct pcieipc_agreement {
    /// Bytes of this struct.
    pub size: usize,
    /// Not 0: every one of them said so.
    pub ok: u32,
    /// Members that can not go on: died, left, did not answer in time, or have an endpoint that is not live.
    pub failed: u32,
    /// Ranks that are not in the group now and ask to be taken back.
    pub returned: u32,
    /// Always 0.
    pub reserved: u32,
}

// SAFETY: it begins with its size, and zero is good for integers and pointers.
unsafe impl Growing for pcieipc_options {
    const NAME: &'static str = "options";
    const OLDEST: usize = offset_of!(Self, degraded_link_is_error) + size_of::<u32>();
}

// SAFETY: as above.
unsafe impl Growing for pcieipc_agreement {
    const NAME: &'static str = "out";
    const OLDEST: usize = offset_of!(Self, reserved) + size_of::<u32>();
}

/// One rank's membership in a group. Not for use by two threads at once.
pub struct pcieipc_group {
    pub(crate) inner: Group,
}

/// The group behind a pointer from C.
pub(crate) unsafe fn group<'a>(group: *mut pcieipc_group) -> Result<&'a mut Group, Error> {
    // SAFETY: the C caller passes what pcieipc_group_meet gave and has not left yet, from one thread at a time.
    unsafe { group.as_mut() }.map(|g| &mut g.inner).ok_or_else(|| bad("the group is NULL"))
}

fn options(given: &pcieipc_options) -> Result<GroupOptions, Error> {
    if given.directory.is_null() {
        return Err(bad("options.directory is NULL: name a private directory in which the ranks meet"));
    }
    // SAFETY: not NULL, and the C caller promises a string.
    let directory = unsafe { CStr::from_ptr(given.directory) };
    let directory = directory.to_str().map_err(|_| bad("options.directory is not UTF-8"))?;
    let mut options = GroupOptions::new(given.rank as usize, given.ranks as usize, directory);
    options.transport = match given.transport {
        0 => Transport::Shm,
        1 => Transport::Kmod(KmodOptions {
            endpoint: given.endpoint.checked_sub(1).map(EndpointId),
            degraded_link_is_error: given.degraded_link_is_error != 0,
            ..KmodOptions::default()
        }),
        other => return Err(bad(format!("transport {other} does not exist"))),
    };
    if given.ring_bytes != 0 {
        options.ring_bytes = given.ring_bytes;
    }
    if given.meeting_timeout_ms != 0 {
        options.meeting_timeout = Duration::from_millis(given.meeting_timeout_ms.into());
    }
    options.executor.algorithm = match given.algorithm {
        0 => None,
        number => {
            let found = Algorithm::ALL.into_iter().find(|a| *a as u32 == number && *a != Algorithm::Direct);
            Some(found.ok_or_else(|| bad(format!("algorithm {number} does not exist")))?)
        }
    };
    options.helper_thread = given.helper_thread != 0;
    options.executor.checked = given.checked != 0;
    Ok(if given.tuned != 0 { options.tuned(&[]) } else { options })
}

/// # Safety
/// Both are NULL or valid.
unsafe fn enter(
    given: *const pcieipc_options,
    out: *mut *mut pcieipc_group,
    how: impl FnOnce(GroupOptions) -> Result<Group, Error>,
) -> pcieipc_status {
    answer(|| {
        // SAFETY: the caller's promise.
        let Some(out) = (unsafe { out.as_mut() }) else { return Err(bad("out is NULL")) };
        *out = std::ptr::null_mut();
        // SAFETY: the caller's promise, for as many bytes as it says.
        let inner = how(options(&unsafe { growing::read(given)? })?)?;
        *out = Box::into_raw(Box::new(pcieipc_group { inner }));
        Ok(())
    })
}

/// Meets the other ranks; stores the group behind `out`.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_group_meet(given: *const pcieipc_options, out: *mut *mut pcieipc_group) -> pcieipc_status {
    // SAFETY: the C caller passes NULL or valid pointers.
    unsafe { enter(given, out, Group::meet) }
}

/// Takes the place of a rank whose process has ended, in a group that has met already; the others must call pcieipc_group_recover meanwhile.
/// The options are those of the rank; its meeting timeout bounds the wait.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_group_rejoin(given: *const pcieipc_options, out: *mut *mut pcieipc_group) -> pcieipc_status {
    // SAFETY: the C caller passes NULL or valid pointers.
    unsafe { enter(given, out, Group::rejoin) }
}

/// Leaves the group in order and frees it; NULL is allowed.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_group_leave(group: *mut pcieipc_group) {
    if !group.is_null() {
        // SAFETY: the C caller passes what pcieipc_group_meet gave, once.
        let group = unsafe { Box::from_raw(group) };
        answer(|| {
            drop(group);
            Ok(())
        });
    }
}

/// This rank in the group as it is now.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_group_rank(of: *mut pcieipc_group, out: *mut u32) -> pcieipc_status {
    // SAFETY: as promised to `group`; `out` is NULL or valid.
    answer(|| unsafe { store(out, group(of)?.rank() as u32) })
}

/// How many ranks the group has now.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_group_ranks(of: *mut pcieipc_group, out: *mut u32) -> pcieipc_status {
    // SAFETY: as promised to `group`; `out` is NULL or valid.
    answer(|| unsafe { store(out, group(of)?.ranks() as u32) })
}

/// Stores the numbers that the present ranks had when they met, in order, to `out`, which has room for `room` of them.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_group_members(of: *mut pcieipc_group, out: *mut u32, room: usize) -> pcieipc_status {
    answer(|| {
        // SAFETY: as promised to `group`.
        let group = unsafe { group(of)? };
        if out.is_null() || room < group.ranks() {
            return Err(bad(format!("room for {room} members of {}", group.ranks())));
        }
        for (i, &member) in group.members().iter().enumerate() {
            // SAFETY: the C caller promises room for `room` numbers, and i is less.
            unsafe { out.add(i).write(member as u32) };
        }
        Ok(())
    })
}

/// Goes on without the ranks that are lost; all that are left call it.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_group_shrink(of: *mut pcieipc_group, timeout_ms: u32) -> pcieipc_status {
    // SAFETY: as promised to `group`.
    answer(|| unsafe { group(of)? }.shrink(Duration::from_millis(timeout_ms.into())))
}

/// Says to all ranks whether this one's last call was good (`ok` not 0), and stores to `out` what all that are left learn alike; all of
/// them call it at the same point. The group stays as it is.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_group_agree(
    of: *mut pcieipc_group,
    ok: u32,
    timeout_ms: u32,
    out: *mut pcieipc_agreement,
) -> pcieipc_status {
    answer(|| {
        // Before all agree: what is wrong with `out` is told first.
        // SAFETY: the C caller passes NULL or a valid pointer.
        let mut all = unsafe { growing::read(out.cast_const())? };
        // SAFETY: as promised to `group`.
        let agreed = unsafe { group(of)? }.agree(ok != 0, Duration::from_millis(timeout_ms.into()))?;
        let bits = |ranks: &[usize]| ranks.iter().fold(0, |bits, rank| bits | 1u32 << rank);
        (all.ok, all.failed, all.returned, all.reserved) = (agreed.ok.into(), bits(&agreed.failed), bits(&agreed.returned), 0);
        // SAFETY: as above.
        unsafe { growing::write(out, &all) }
    })
}

/// Waits until all ranks that met are there again (endpoints that recovered or were put back, processes that were replaced, ranks that had been
/// left out), and goes on with all of them; all that are left call it. When not all come in time, all get an error, and may call it
/// again or shrink.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_group_recover(of: *mut pcieipc_group, timeout_ms: u32) -> pcieipc_status {
    // SAFETY: as promised to `group`.
    answer(|| unsafe { group(of)? }.recover(Duration::from_millis(timeout_ms.into())))
}

/// Makes the calls of all ranks fail with PCIEIPC_STATUS_ABORTED and this reason.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_group_abort(of: *mut pcieipc_group, why: *const c_char) -> pcieipc_status {
    answer(|| {
        // SAFETY: NULL is caught; otherwise the C caller promises a string.
        let why = if why.is_null() { "no reason given".into() } else { unsafe { CStr::from_ptr(why) }.to_string_lossy() };
        // SAFETY: as promised to `group`.
        unsafe { group(of)? }.abort(&why);
        Ok(())
    })
}

/// # Safety
/// `out` is NULL or valid.
unsafe fn store(out: *mut u32, value: u32) -> Result<(), Error> {
    // SAFETY: the caller's promise.
    unsafe { out.as_mut() }.map(|out| *out = value).ok_or_else(|| bad("out is NULL"))
}
