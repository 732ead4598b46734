// SPDX-License-Identifier: GPL-2.0

//! The endpoint's DMA engine: bounded copies between rings, driven by the kernel.
//!
//! The lock of the hardware is held only to start a piece, never while the engine runs, so unbind and error recovery do not
//! wait for a copy. Whoever takes a ring away stops the engine first.

use crate::{channel::Channel, endpoint::Endpoint, hardware::Hardware, limits, profile::Engine, uapi::state};
use kernel::{
    bindings,
    prelude::*,
    sync::atomic::Relaxed,
    time::{delay::fsleep, msecs_to_jiffies, Delta},
    types::Opaque,
};

/// Registers of the soft endpoint's engine, in BAR 0.
mod soft {
    pub(super) const BAR: u32 = 0;
    pub(super) const STATUS: usize = 0x00c;
    pub(super) const STATUS_BUSY: u32 = 1 << 1;
    pub(super) const CONTROL: usize = 0x010;
    pub(super) const CONTROL_ENGINE: u32 = 1 << 0;
    pub(super) const CONTROL_RESET: u32 = 1 << 1;
    pub(super) const SRC: usize = 0x100;
    pub(super) const DST: usize = 0x108;
    pub(super) const LEN: usize = 0x110;
    pub(super) const LEN_MAX: u64 = 0x40_0000;
    pub(super) const FLAGS: usize = 0x114;
    pub(super) const FLAGS_SRC_OWN: u32 = 1 << 0;
    pub(super) const FLAGS_DST_OWN: u32 = 1 << 1;
    pub(super) const FLAGS_RAISE: u32 = 1 << 2;
    pub(super) const FLAGS_BELL: u32 = 1 << 3;
    pub(super) const VECTOR: usize = 0x118;
    pub(super) const START: usize = 0x11c;
    pub(super) const RESULT: usize = 0x120;
    pub(super) const RESULT_DONE: u32 = 2;
    pub(super) const RESULT_ERROR: u32 = 3;
    pub(super) const ERROR: usize = 0x124;
    pub(super) const BELL: usize = 0x128;
    pub(super) const BELL_VALUE: usize = 0x130;
    pub(super) const STOP: usize = 0x134;
}

/// How long a stopped engine may take before it is reset.
const STOP_MS: i64 = 20;

/// Who uses the engine; part of `Hardware`.
pub(crate) struct Use {
    busy: bool,
    /// The ring of the copy that runs was taken away.
    aborted: bool,
    /// The copy that runs rings another endpoint.
    rings: bool,
    keys: [u64; 2],
}

impl Use {
    /// Nobody.
    pub(crate) const fn new() -> Self {
        Self { busy: false, aborted: false, rings: false, keys: [0; 2] }
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

    /// Tells the copy that runs that its ring is gone.
    pub(crate) fn abort(&mut self) {
        self.aborted = true;
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

    /// Waits until completed, or for about `ms` milliseconds.
    fn wait(&self, ms: u32) {
        // SAFETY: Initialized in `new`.
        unsafe { bindings::wait_for_completion_timeout(self.completion.get(), msecs_to_jiffies(ms).max(1)) };
    }
}

/// One side of a copy.
#[derive(Clone, Copy)]
pub(crate) struct Place {
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

/// A bounded copy.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    /// Source.
    pub(crate) from: Place,
    /// Destination.
    pub(crate) to: Place,
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
/// `ETIMEDOUT`, `EREMOTEIO` when the engine reports an error, and what the endpoint's state says.
pub(crate) fn copy(endpoint: &Endpoint, request: &Request<'_>) -> Result {
    if endpoint.profile.engine != Engine::Soft {
        return Err(EOPNOTSUPP);
    }
    {
        let mut hardware = endpoint.hardware.lock();
        endpoint.status.check(request.generation)?;
        if hardware.engine.busy {
            return Err(EBUSY);
        }
        hardware.engine =
            Use { busy: true, aborted: false, rings: request.bell.is_some(), keys: [request.from.key, request.to.key] };
    }
    let result = copy_pieces(endpoint, request);
    endpoint.hardware.lock().engine = Use::new();
    result
}

fn copy_pieces(endpoint: &Endpoint, request: &Request<'_>) -> Result {
    let deadline = now_ms() + u64::from(request.timeout_ms);
    let mut done = 0;
    while done < request.bytes {
        let bytes = start_piece(endpoint, request, done)?;
        wait_piece(endpoint, request, deadline)?;
        done += bytes;
        endpoint.counters.dma_bytes.add(bytes, Relaxed);
    }
    Ok(())
}

/// Starts the largest contiguous piece after the first `done` bytes; returns its length.
fn start_piece(endpoint: &Endpoint, request: &Request<'_>, done: u64) -> Result<u64> {
    let hardware = endpoint.hardware.lock();
    check(endpoint, &hardware, request)?;
    let source = hardware.mapping(request.from.key).ok_or(ENOENT)?;
    let target = hardware.mapping(request.to.key).ok_or(ENOENT)?;
    let from = source.locate(request.from.offset + done).ok_or(EINVAL)?;
    let to = target.locate(request.to.offset + done).ok_or(EINVAL)?;
    let bytes = (request.bytes - done).min(from.bytes).min(to.bytes).min(soft::LEN_MAX);
    let registers = &endpoint.registers;
    registers.write64(soft::BAR, soft::SRC, from.address)?;
    registers.write64(soft::BAR, soft::DST, to.address)?;
    registers.write32(soft::BAR, soft::LEN, bytes as u32)?;
    let mut flags = 0;
    if source.own_memory {
        flags |= soft::FLAGS_SRC_OWN;
    }
    if target.own_memory {
        flags |= soft::FLAGS_DST_OWN;
    }
    if let Some(vector) = endpoint.profile.engine_vector {
        registers.write32(soft::BAR, soft::VECTOR, vector)?;
        flags |= soft::FLAGS_RAISE;
    }
    if let Some(bell) = request.bell.filter(|_| done + bytes == request.bytes) {
        // The reader's endpoint says that it is gone before it stops the engines that ring it, under this lock. So either it is
        // seen here, or the copy that starts here is stopped.
        bell.channel.check()?;
        registers.write64(soft::BAR, soft::BELL, bell.address)?;
        registers.write32(soft::BAR, soft::BELL_VALUE, bell.value)?;
        flags |= soft::FLAGS_BELL;
    }
    registers.write32(soft::BAR, soft::FLAGS, flags)?;
    endpoint.finished.forget();
    registers.write32(soft::BAR, soft::START, 1)?;
    Ok(bytes)
}

fn check(endpoint: &Endpoint, hardware: &Hardware, request: &Request<'_>) -> Result {
    endpoint.status.check(request.generation)?;
    if hardware.engine.aborted {
        return Err(ENOENT);
    }
    Ok(())
}

fn wait_piece(endpoint: &Endpoint, request: &Request<'_>, deadline: u64) -> Result {
    loop {
        // The interrupt is a hint that makes it quick; the register is what counts, and an interrupt may be lost.
        endpoint.finished.wait(4);
        {
            let hardware = endpoint.hardware.lock();
            check(endpoint, &hardware, request)?;
        }
        match endpoint.registers.read32(soft::BAR, soft::RESULT)? {
            soft::RESULT_DONE => return Ok(()),
            soft::RESULT_ERROR => {
                let why = endpoint.registers.read32(soft::BAR, soft::ERROR)?;
                limits::say(|| dev_info!(endpoint.pdev, "the engine reports error {why}\n"));
                return Err(EREMOTEIO);
            }
            u32::MAX => {
                let mut hardware = endpoint.hardware.lock();
                endpoint.is_present(&mut hardware);
                check(endpoint, &hardware, request)?;
            }
            _ => {}
        }
        if now_ms() > deadline {
            let hardware = endpoint.hardware.lock();
            check(endpoint, &hardware, request)?;
            stop(endpoint);
            // A reset forgets the ring table.
            reset(endpoint, &hardware)?;
            return Err(ETIMEDOUT);
        }
    }
}

/// Stops the engine and waits, some milliseconds at most, until it does not touch memory any more. An engine that does not
/// stop loses the bus; then the result is false, and [`reset`] gives the bus back when its rings are safe.
pub(crate) fn stop(endpoint: &Endpoint) -> bool {
    if endpoint.profile.engine != Engine::Soft || endpoint.registers.write32(soft::BAR, soft::STOP, 1).is_err() {
        return true;
    }
    for _ in 0..STOP_MS {
        match endpoint.registers.read32(soft::BAR, soft::STATUS) {
            Ok(status) if status & soft::STATUS_BUSY != 0 => fsleep(Delta::from_millis(1)),
            _ => return true,
        }
    }
    if endpoint.status.state() == state::LIVE {
        dev_warn!(endpoint.pdev, "the engine does not stop; taken off the bus\n");
    }
    endpoint.silence();
    false
}

/// Resets ring table and engine, and tells the endpoint its rings again.
///
/// # Errors
///
/// `ENODEV` after unbind.
pub(crate) fn reset(endpoint: &Endpoint, hardware: &Hardware) -> Result {
    restart(endpoint)?;
    endpoint.unsilence();
    endpoint.program_all(hardware)
}

/// Makes the engine forget its orders and the ring table, and lets it take new ones. The read at the end makes sure that it
/// has, because the caller gives it the bus next.
///
/// # Errors
///
/// `ENODEV` after unbind.
pub(crate) fn restart(endpoint: &Endpoint) -> Result {
    if endpoint.profile.engine == Engine::Soft {
        endpoint.registers.write32(soft::BAR, soft::CONTROL, soft::CONTROL_RESET)?;
        endpoint.registers.read32(soft::BAR, soft::STATUS)?;
        endpoint.registers.write32(soft::BAR, soft::CONTROL, soft::CONTROL_ENGINE)?;
    }
    Ok(())
}

fn now_ms() -> u64 {
    // SAFETY: Reads the monotonic clock.
    unsafe { bindings::ktime_get() as u64 / 1_000_000 }
}
