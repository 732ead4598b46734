// SPDX-License-Identifier: GPL-2.0

//! The endpoint's DMA engine: bounded copies between rings, driven by the kernel.
//!
//! The lock of the hardware is held only to start a piece, never while the engine runs, so unbind and error recovery do not
//! wait for a copy. Whoever takes a ring away stops the engine first.

use crate::{
    channel::Channel,
    clock::now_ms,
    endpoint::Endpoint,
    hardware::Hardware,
    limits,
    mapping::{Mapping, Segment},
    profile::Engine,
    uapi::state,
};
use kernel::{bindings, prelude::*, sync::atomic::Relaxed, time::msecs_to_jiffies, types::Opaque};

mod edu;
mod soft;

/// What an engine says of the order that it was given.
enum Outcome {
    Busy,
    Done,
    /// With the device's number for the reason.
    Failed(u32),
    /// Nothing: its registers read all-ones.
    Silent,
}

/// One order to an engine.
struct Order<'a> {
    from: &'a Mapping,
    to: &'a Mapping,
    source: Segment,
    target: Segment,
    bytes: u64,
    bell: Option<Bell<'a>>,
}

/// Who uses the engine; part of `Hardware`.
pub(crate) struct Use {
    busy: bool,
    /// Why the copy that runs may not go on.
    aborted: Option<Error>,
    /// The copy that runs rings another endpoint.
    rings: bool,
    keys: [u64; 2],
}

impl Use {
    /// Nobody.
    pub(crate) const fn new() -> Self {
        Self { busy: false, aborted: None, rings: false, keys: [0; 2] }
    }

    /// Whether a copy runs.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy
    }

    /// Whether a copy runs that uses this mapping.
    pub(crate) fn uses(&self, key: u64) -> bool {
        self.busy && self.keys.contains(&key)
    }

    /// Whether a copy runs that uses this mapping, and rings its reader at the end.
    pub(crate) fn rings(&self, key: u64) -> bool {
        self.rings && self.uses(key)
    }

    /// Tells the copy that runs that it may not go on. The first reason is the one that counts.
    pub(crate) fn abort(&mut self, why: Error) {
        self.aborted.get_or_insert(why);
    }
}

/// Completed by the engine's interrupt, and by a change of state.
#[pin_data]
pub(crate) struct Finished {
    #[pin]
    completion: Opaque<bindings::completion>,
}

// SAFETY: A completion may be used from any thread and from interrupts.
unsafe impl Send for Finished {}
// SAFETY: As above.
unsafe impl Sync for Finished {}

impl Finished {
    /// Not completed.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            completion <- Opaque::ffi_init(|slot: *mut bindings::completion| {
                // SAFETY: `slot` is valid for writes and pinned.
                unsafe { bindings::init_completion(slot) }
            }),
        })
    }

    /// Wakes one waiter, now or when it comes. May be called from a hard interrupt.
    pub(crate) fn complete(&self) {
        // SAFETY: Initialized in `new`.
        unsafe { bindings::complete(self.completion.get()) };
    }

    /// Forgets completions of the past.
    fn forget(&self) {
        // SAFETY: Initialized in `new`; this is what reinit_completion() does. A completion that is lost here is made up for by the
        // bound of `wait`.
        unsafe { (&raw mut (*self.completion.get()).done).write_volatile(0) };
    }

    /// Waits until completed, or for about `ms` milliseconds. False when the process is being killed.
    fn wait(&self, ms: u32) -> bool {
        // SAFETY: Initialized in `new`.
        unsafe { bindings::wait_for_completion_killable_timeout(self.completion.get(), msecs_to_jiffies(ms).max(1)) >= 0 }
    }
}

/// One side of a copy.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    /// Whose data area it is.
    pub(crate) channel: &'a Channel,
    /// Key of a mapping of the endpoint.
    pub(crate) key: u64,
    /// Bytes into it.
    pub(crate) offset: u64,
}

/// A doorbell that an engine rings.
#[derive(Clone, Copy)]
pub(crate) struct Bell<'a> {
    /// Bus address of the doorbell.
    pub(crate) address: u64,
    /// What the engine stores there.
    pub(crate) value: u32,
    /// Whose reader is rung.
    pub(crate) channel: &'a Channel,
}

impl Place<'_> {
    /// Whether the engine of `endpoint` may reach it: another endpoint's memory only while that one lives. Host memory is always there.
    fn check(&self, endpoint: &Endpoint) -> Result {
        if self.channel.is_device_memory() && self.channel.endpoint.id != endpoint.id {
            self.channel.check()?;
        }
        Ok(())
    }
}

/// A bounded copy.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    /// Source.
    pub(crate) from: Place<'a>,
    /// Destination.
    pub(crate) to: Place<'a>,
    /// How many bytes.
    pub(crate) bytes: u64,
    /// Bound of the whole copy.
    pub(crate) timeout_ms: u32,
    /// The session's generation.
    pub(crate) generation: u64,
    /// What the engine rings after the last piece.
    pub(crate) bell: Option<Bell<'a>>,
}

/// Copies with the endpoint's engine. Returns when the engine has finished or is stopped.
///
/// # Errors
///
/// `EOPNOTSUPP` without an engine, `EBUSY` when it copies already, `ENOENT` when a ring is not there (any more),
/// `ETIMEDOUT`, `EREMOTEIO` when the engine reports an error, `EINTR` when the process is killed, and what the endpoint's
/// state says.
pub(crate) fn copy(endpoint: &Endpoint, request: &Request<'_>) -> Result {
    if endpoint.profile.engine == Engine::None {
        return Err(EOPNOTSUPP);
    }
    {
        let mut hardware = endpoint.hardware.lock();
        endpoint.status.check(request.generation)?;
        if hardware.engine.busy {
            return Err(EBUSY);
        }
        hardware.engine =
            Use { busy: true, aborted: None, rings: request.bell.is_some(), keys: [request.from.key, request.to.key] };
    }
    let result = copy_pieces(endpoint, request);
    endpoint.hardware.lock().engine = Use::new();
    result
}

fn copy_pieces(endpoint: &Endpoint, request: &Request<'_>) -> Result {
    let deadline = now_ms() + u64::from(request.timeout_ms);
    let steps = match endpoint.profile.engine {
        Engine::Edu => edu::STEPS,
        Engine::Soft | Engine::None => 1,
    };
    let mut done = 0;
    while done < request.bytes {
        // Pieces whose interrupts are lost take a moment each, so the time is looked at before each, too.
        if done > 0 && now_ms() > deadline {
            return Err(ETIMEDOUT);
        }
        let mut bytes = 0;
        for step in 0..steps {
            bytes = start_piece(endpoint, request, done, step)?;
            wait_piece(endpoint, request, deadline)?;
        }
        done += bytes;
        endpoint.counters.dma_bytes.add(bytes, Relaxed);
    }
    Ok(())
}

/// Starts the largest contiguous piece after the first `done` bytes; returns its length.
fn start_piece(endpoint: &Endpoint, request: &Request<'_>, done: u64, step: u32) -> Result<u64> {
    let hardware = endpoint.hardware.lock();
    check(endpoint, &hardware, request)?;
    let from = hardware.mapping(request.from.key).ok_or(ENOENT)?;
    let to = hardware.mapping(request.to.key).ok_or(ENOENT)?;
    let source = from.locate(request.from.offset + done).ok_or(EINVAL)?;
    let target = to.locate(request.to.offset + done).ok_or(EINVAL)?;
    let largest = match endpoint.profile.engine {
        Engine::Edu => edu::LARGEST,
        Engine::Soft | Engine::None => soft::LARGEST,
    };
    let bytes = (request.bytes - done).min(source.bytes).min(target.bytes).min(largest);
    let bell = request.bell.filter(|_| done + bytes == request.bytes);
    // Another endpoint says that it does not live before it stops the engines that reach it, under this lock. So either it is seen
    // here, or the copy that starts here is stopped.
    request.from.check(endpoint)?;
    request.to.check(endpoint)?;
    if let Some(bell) = &bell {
        bell.channel.check()?;
    }
    endpoint.finished.forget();
    let order = Order { from, to, source, target, bytes, bell };
    match endpoint.profile.engine {
        Engine::Edu => edu::start(endpoint, &order, step)?,
        Engine::Soft | Engine::None => soft::start(endpoint, &order)?,
    }
    Ok(bytes)
}

fn check(endpoint: &Endpoint, hardware: &Hardware, request: &Request<'_>) -> Result {
    endpoint.status.check(request.generation)?;
    hardware.engine.aborted.map_or(Ok(()), Err)
}

fn wait_piece(endpoint: &Endpoint, request: &Request<'_>, deadline: u64) -> Result {
    loop {
        // The interrupt is a hint that makes it quick; the register is what counts, and an interrupt may be lost.
        let killed = !endpoint.finished.wait(4);
        // A reset that begins waits for the lock, so the registers are not touched in it.
        let mut hardware = endpoint.hardware.lock();
        check(endpoint, &hardware, request)?;
        match outcome(endpoint)? {
            Outcome::Done if killed => return Err(EINTR),
            Outcome::Done => return Ok(()),
            Outcome::Failed(why) => {
                limits::say(|| dev_info!(endpoint.pdev, "the engine reports error {why}\n"));
                return Err(EREMOTEIO);
            }
            Outcome::Silent => {
                drop(hardware);
                let Some(present) = endpoint.present() else {
                    // The next look finds what became of it.
                    continue;
                };
                hardware = present;
                check(endpoint, &hardware, request)?;
            }
            Outcome::Busy => {}
        }
        if killed || now_ms() > deadline {
            stop(endpoint);
            // A reset forgets the ring table.
            reset(endpoint, &mut hardware)?;
            return Err(if killed { EINTR } else { ETIMEDOUT });
        }
    }
}

fn outcome(endpoint: &Endpoint) -> Result<Outcome> {
    match endpoint.profile.engine {
        Engine::Edu => edu::outcome(endpoint),
        Engine::Soft | Engine::None => soft::outcome(endpoint),
    }
}

/// Stops the engine and waits, for as long as its kind takes at most, until it does not touch memory any more. An engine that
/// does not stop loses the bus; then the result is false, and [`reset`] gives the bus back when its rings are safe.
pub(crate) fn stop(endpoint: &Endpoint) -> bool {
    let stopped = match endpoint.profile.engine {
        Engine::None => true,
        Engine::Soft => soft::stop(endpoint),
        Engine::Edu => edu::stop(endpoint),
    };
    if !stopped {
        if endpoint.status.state() == state::LIVE {
            limits::say(|| dev_warn!(endpoint.pdev, "the engine does not stop; taken off the bus\n"));
        }
        endpoint.silence();
    }
    stopped
}

/// Resets ring table and engine, and tells the endpoint its rings again. It gets the bus only when it has forgotten its order and what it
/// began on the bus has ended.
///
/// # Errors
///
/// `ENODEV` otherwise: the endpoint is DEAD then, if it was not worse, and stays off the bus. `EIO` when it does not answer: then it is missing.
pub(crate) fn reset(endpoint: &Endpoint, hardware: &mut Hardware) -> Result {
    let forgot = restart(endpoint).is_ok();
    if forgot && endpoint.is_quiet() {
        endpoint.unsilence();
        return endpoint.program_all(hardware);
    }
    if !endpoint.answers() {
        // Our callers hold locks, so the monitor keeps others off it.
        endpoint.miss(hardware);
        hardware.reached = true;
        return Err(EIO);
    }
    let why = if forgot { "what it began on the bus does not end" } else { "the engine holds on to an order" };
    dev_warn!(endpoint.pdev, "{why}; remove and rescan the device\n");
    // It may have stopped when it was told to, so that it has the bus.
    if !forgot {
        endpoint.silence();
    }
    let generation = endpoint.status.generation();
    endpoint.change(hardware, state::DEAD, generation);
    Err(ENODEV)
}

/// Makes the engine forget its orders and the ring table, and lets it take new ones. When this has returned it has, because the
/// caller gives it the bus next.
///
/// # Errors
///
/// `ENODEV` after unbind, `EIO` when it does not forget.
pub(crate) fn restart(endpoint: &Endpoint) -> Result {
    match endpoint.profile.engine {
        Engine::None => Ok(()),
        Engine::Soft => soft::restart(endpoint),
        Engine::Edu => edu::restart(endpoint),
    }
}

#[kunit_tests(pcieipc_engine)]
mod tests {
    use super::*;

    #[test]
    fn only_a_running_copy_uses_its_mappings() {
        let idle = Use::new();
        assert!(!idle.is_busy() && !idle.uses(0) && !idle.rings(0));
        let copying = Use { busy: true, aborted: None, rings: false, keys: [3, 5] };
        assert!(copying.uses(3) && copying.uses(5) && !copying.uses(4) && !copying.rings(3));
        let ringing = Use { rings: true, ..copying };
        assert!(ringing.rings(5) && !ringing.rings(4));
    }

    #[test]
    fn a_copy_whose_ring_went_is_aborted_until_the_next() {
        let mut usage = Use { busy: true, aborted: None, rings: false, keys: [3, 5] };
        usage.abort(EIO);
        usage.abort(ENOENT);
        assert!(usage.aborted == Some(EIO) && usage.is_busy());
        usage = Use::new();
        assert!(usage.aborted.is_none());
    }
}
