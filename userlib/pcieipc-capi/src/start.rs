// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that return at once, and requests that stand for them.

use std::{ffi::c_void, mem::offset_of, ptr::NonNull, time::Duration};

use half::{bf16, f16};
use pcieipc::{
    executor::{Failed, Lent, Request},
    group::Group,
    reduce::{Element, Kind},
    Error,
};

use crate::{
    collectives::{check, for_kind, kind, op, total},
    group::{group, pcieipc_group},
    growing::{self, Growing},
    status::{answer, bad, pcieipc_status},
};

/// What ranks do together.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum pcieipc_collective {
    /// As pcieipc_all_reduce_into, or in place on `to` when `from` is NULL.
    AllReduce = 1,
    /// As pcieipc_reduce_scatter.
    ReduceScatter = 2,
    /// As pcieipc_all_gather.
    AllGather = 3,
    /// As pcieipc_reduce to the root `rank`.
    Reduce = 4,
    /// As pcieipc_broadcast of `to` from the root `rank`.
    Broadcast = 5,
    /// As pcieipc_all_to_all.
    AllToAll = 6,
    /// As pcieipc_send of `from` to `rank`.
    Send = 7,
    /// As pcieipc_receive to `to` from `rank`.
    Receive = 8,
    /// As pcieipc_barrier.
    Barrier = 9,
}

/// A call to start. Set everything to zero, then `size` to `sizeof(struct pcieipc_call)`, then what the collective needs: fields that later
/// versions add are found by `size`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct pcieipc_call {
    /// Bytes of this struct.
    pub size: usize,
    /// A pcieipc_collective.
    pub collective: u32,
    /// A pcieipc_type.
    pub element: u32,
    /// A pcieipc_op, where something is combined.
    pub operation: u32,
    /// The root, or the other rank of a message.
    pub rank: u32,
    /// What is read. It must not overlap `to`.
    pub from: *const c_void,
    /// What is stored to.
    pub to: *mut c_void,
    /// Elements, as in the function of the collective.
    pub count: usize,
    /// How long the whole call may take, from its start on, in milliseconds.
    pub timeout_ms: u32,
}

// SAFETY: it begins with its size, and zero is good for integers and pointers.
unsafe impl Growing for pcieipc_call {
    const NAME: &'static str = "call";
    const OLDEST: usize = offset_of!(Self, timeout_ms) + size_of::<u32>();
}

/// Longer than any call's own timeout.
const LONGEST: Duration = Duration::from_millis(1 << 33);

/// A call in flight, of whatever it was given.
trait InFlight: Send {
    fn is_done(&self) -> bool;
    fn test(&self, group: &mut Group) -> bool;
    fn wait_for(&self, group: &mut Group, at_most: Duration) -> bool;
    fn wait(self: Box<Self>, group: &mut Group) -> Result<(), Error>;
}

impl<B: Send> InFlight for Request<B> {
    fn is_done(&self) -> bool {
        Self::is_done(self)
    }
    fn test(&self, group: &mut Group) -> bool {
        Self::test(self, group)
    }
    fn wait_for(&self, group: &mut Group, at_most: Duration) -> bool {
        Self::wait_for(self, group, at_most)
    }
    fn wait(self: Box<Self>, group: &mut Group) -> Result<(), Error> {
        Self::wait(*self, group).map(drop).map_err(Error::from)
    }
}

/// A call in flight, or its answer.
enum State {
    InFlight(Box<dyn InFlight>),
    Over(Result<(), Error>),
}

/// A call that was started. It may outlive the group.
pub struct pcieipc_request {
    state: State,
}

impl pcieipc_request {
    fn is_done(&self) -> bool {
        match &self.state {
            State::InFlight(call) => call.is_done(),
            State::Over(_) => true,
        }
    }

    /// Waits for the answer. A call of another group goes on there.
    fn settle(&mut self, group: &mut Group) -> Result<(), Error> {
        if let State::InFlight(call) = &self.state {
            if !call.wait_for(group, LONGEST) {
                return Err(bad("the request is not of this group"));
            }
        }
        let nothing = State::Over(Err(bad("an earlier wait for this request did not return")));
        let answer = match std::mem::replace(&mut self.state, nothing) {
            State::InFlight(call) => call.wait(group),
            State::Over(answer) => answer,
        };
        self.state = State::Over(answer.clone());
        answer
    }
}

/// # Safety
/// `call` says where its buffers are; they are the library's until the call is over.
unsafe fn start<T: Element>(group: &mut Group, call: &pcieipc_call) -> Result<Box<dyn InFlight>, Error> {
    let lend = |at: *const c_void, count: usize| {
        check::<T>(at, count)?;
        let start = NonNull::new(at.cast_mut().cast::<T>()).filter(|_| count > 0).unwrap_or(NonNull::dangling());
        // SAFETY: as the caller promises; what is only read is lent as `from` and never stored to.
        Ok::<_, Error>(unsafe { Lent::new(start, count) })
    };
    fn boxed<B: Send + 'static>(request: Result<Request<B>, Failed<B>>) -> Result<Box<dyn InFlight>, Error> {
        Ok(Box::new(request?))
    }
    let (count, peer, timeout) = (call.count, call.rank as usize, Duration::from_millis(call.timeout_ms.into()));
    let (from, to) = (|count| lend(call.from, count), |count| lend(call.to.cast_const(), count));
    let all = total(count, group.ranks())?;
    match call.collective {
        1 if call.from.is_null() => boxed(group.start_all_reduce(to(count)?, op(call.operation)?, timeout)),
        1 => boxed(group.start_all_reduce_into((from(count)?, to(count)?), op(call.operation)?, timeout)),
        2 => boxed(group.start_reduce_scatter((from(all)?, to(count)?), op(call.operation)?, timeout)),
        3 => boxed(group.start_all_gather((from(count)?, to(all)?), timeout)),
        4 => {
            let there = if group.rank() == peer { count } else { 0 };
            boxed(group.start_reduce((from(count)?, to(there)?), op(call.operation)?, peer, timeout))
        }
        5 => boxed(group.start_broadcast(to(count)?, peer, timeout)),
        6 => boxed(group.start_all_to_all((from(all)?, to(all)?), timeout)),
        7 => boxed(group.start_send(from(count)?, peer, timeout)),
        8 => boxed(group.start_receive(to(count)?, peer, timeout)),
        9 => boxed(group.start_barrier(timeout)),
        other => Err(bad(format!("collective {other} does not exist"))),
    }
}

/// Starts a call and returns at once; stores a request behind `out`. The buffers are the library's until the request is done. Calls run in the
/// order in which they were started, several at once; all ranks start the same ones in the same order, and blocking calls queue behind them.
/// They go on in pcieipc_request_test and _wait, in pcieipc_group_progress, in blocking calls, and in the group's own thread with
/// options.helper_thread. When one fails, all in flight end with the same error.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_start(
    of: *mut pcieipc_group,
    call: *const pcieipc_call,
    out: *mut *mut pcieipc_request,
) -> pcieipc_status {
    answer(|| {
        // SAFETY: NULL or valid, as the C caller promises.
        let Some(out) = (unsafe { out.as_mut() }) else { return Err(bad("out is NULL")) };
        *out = std::ptr::null_mut();
        // SAFETY: as above, for as many bytes as it says.
        let call = unsafe { growing::read(call)? };
        // SAFETY: the C caller passes a group that it has not left, from one thread at a time.
        let group = unsafe { group(of)? };
        // A barrier has no elements.
        let element = if call.collective == pcieipc_collective::Barrier as u32 { 0 } else { call.element };
        // SAFETY: the C caller leaves the buffers to the library until the request is done.
        let request = for_kind!(element, T => unsafe { start::<T>(group, &call)? });
        *out = Box::into_raw(Box::new(pcieipc_request { state: State::InFlight(request) }));
        Ok(())
    })
}

/// Whether the request's call is over, well or not; true for NULL. May be asked by any thread at any time before the request is freed, but not
/// during pcieipc_request_wait or _test on it; makes no progress by itself.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_request_is_done(request: *const pcieipc_request) -> bool {
    // SAFETY: NULL or a request that was not freed, as the C caller promises.
    unsafe { request.as_ref() }.is_none_or(pcieipc_request::is_done)
}

/// Goes on with the calls in flight without waiting, and stores behind `done` whether this one is over. When it is, the status is the call's.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_request_test(
    of: *mut pcieipc_group,
    request: *mut pcieipc_request,
    done: *mut bool,
) -> pcieipc_status {
    answer(|| {
        // SAFETY: NULL or valid, as the C caller promises; group and request from one thread at a time.
        let (group, request, done) = unsafe { (group(of)?, request.as_mut(), done.as_mut()) };
        let (Some(request), Some(done)) = (request, done) else { return Err(bad("request or done is NULL")) };
        *done = match &request.state {
            State::InFlight(call) => call.test(group),
            State::Over(_) => true,
        };
        if *done {
            request.settle(group)
        } else {
            Ok(())
        }
    })
}

/// Waits until the call is over, for `at_most_ms` milliseconds at most, or with 0 until the call's own timeout. The status is the call's;
/// PCIEIPC_STATUS_TIMEOUT with pcieipc_request_is_done false says that `at_most_ms` was over first: the call goes on. A request that is done
/// gives the same answer again.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_request_wait(
    of: *mut pcieipc_group,
    request: *mut pcieipc_request,
    at_most_ms: u32,
) -> pcieipc_status {
    answer(|| {
        // SAFETY: NULL or valid, as the C caller promises; group and request from one thread at a time.
        let (group, request) = unsafe { (group(of)?, request.as_mut()) };
        let Some(request) = request else { return Err(bad("request is NULL")) };
        if let (State::InFlight(call), 1..) = (&request.state, at_most_ms) {
            let at_most = Duration::from_millis(at_most_ms.into());
            if !call.wait_for(group, at_most) {
                let rank = group.rank();
                return Err(Error::Timeout {
                    rank,
                    peer: rank,
                    what: "waiting for a call in flight",
                    waited: at_most,
                    endpoint: None,
                });
            }
        }
        request.settle(group)
    })
}

/// Goes on with the calls in flight without waiting; stores how many are left behind `in_flight`, which may be NULL.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_group_progress(of: *mut pcieipc_group, in_flight: *mut usize) -> pcieipc_status {
    answer(|| {
        // SAFETY: the C caller passes a group that it has not left, from one thread at a time; `in_flight` is NULL or valid.
        let (group, in_flight) = unsafe { (group(of)?, in_flight.as_mut()) };
        let left = group.progress()?;
        if let Some(in_flight) = in_flight {
            *in_flight = left;
        }
        Ok(())
    })
}

/// Frees the request; NULL is allowed. A call that is not over goes on and keeps its buffers until it is; its answer is not heard.
#[no_mangle]
pub unsafe extern "C" fn pcieipc_request_free(request: *mut pcieipc_request) {
    if !request.is_null() {
        // SAFETY: the C caller passes what pcieipc_start gave, once.
        drop(unsafe { Box::from_raw(request) });
    }
}
