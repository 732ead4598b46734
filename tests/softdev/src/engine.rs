// SPDX-License-Identifier: MIT OR Apache-2.0
//! The DMA engine: one copy at a time, on a thread of its own.

use std::{
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
    },
    time::{Duration, Instant},
};

use crate::{
    bus::{Bus, Unreachable},
    fabric::Fabric,
    interrupts::Interrupts,
    memory::SharedMemory,
    registers::{
        BAR2_BYTES, DMA_MAX_BYTES, FLAG_ARBITRARY, FLAG_BELL, FLAG_DESTINATION_OWN, FLAG_INTERRUPT, FLAG_SOURCE_OWN, RESULT_BUSY,
        RESULT_DONE, RESULT_ERROR, RESULT_NONE,
    },
};

/// Bytes that are moved between two looks at what may have been taken away.
const CHUNK: usize = 64 << 10;
/// How far an engine with a speed may lag behind it and still catch up.
const LATE: Duration = Duration::from_millis(10);

/// A copy, as the registers described it when it was started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Descriptor {
    /// DMA_SRC
    pub source: u64,
    /// DMA_DST
    pub destination: u64,
    /// DMA_LEN
    pub bytes: u32,
    /// DMA_FLAGS
    pub flags: u32,
    /// DMA_VECTOR
    pub vector: u32,
    /// DMA_BELL
    pub bell: u64,
    /// DMA_BELL_VALUE
    pub bell_value: u32,
}

impl Descriptor {
    fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// DMA_ERROR
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Failure {
    /// No memory answers at an address.
    Unreachable = 1,
    /// An address is outside every valid slot of the ring table.
    OutsideRings = 2,
    /// DMA_LEN is 0 or too large.
    BadLength = 3,
    /// Bus Master Enable is clear.
    NoMaster = 4,
    /// DMA_STOP, reset, or death.
    Stopped = 5,
}

impl From<Unreachable> for Failure {
    fn from(_: Unreachable) -> Self {
        Self::Unreachable
    }
}

#[derive(Debug, Default)]
struct Shared {
    job: Option<Descriptor>,
    busy: bool,
    stop: bool,
    quit: bool,
    result: u32,
    error: u32,
}

/// Registers' side and thread's side of the engine.
#[derive(Debug, Default)]
pub struct Engine {
    shared: Mutex<Shared>,
    changed: Condvar,
    corrupt: AtomicU32,
    bytes_per_second: AtomicU64,
    stuck: AtomicBool,
    sticks_at_reset: AtomicBool,
    comes_loose_at_reset: AtomicBool,
    bytes: AtomicU64,
    errors: AtomicU64,
}

/// What the thread works with.
#[derive(Debug, Clone, Copy)]
pub struct Surroundings<'a> {
    /// The endpoint's view of the bus.
    pub bus: &'a RwLock<Bus>,
    /// The endpoint's own memory.
    pub memory: &'a SharedMemory,
    /// The other endpoints.
    pub fabric: &'a Fabric,
    /// Where the end of a copy is told.
    pub interrupts: &'a Interrupts,
    /// FLAG_ARBITRARY is allowed.
    pub arbitrary: bool,
}

impl Engine {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a copy; nothing happens while one runs.
    pub fn start(&self, descriptor: Descriptor) {
        let mut shared = self.lock();
        if self.stuck.load(Ordering::Relaxed) {
            shared.result = RESULT_BUSY;
        } else if !shared.busy && !shared.quit {
            *shared = Shared { job: Some(descriptor), busy: true, result: RESULT_BUSY, ..Shared::default() };
            self.changed.notify_all();
        }
    }

    /// Asks a running copy to end.
    pub fn stop(&self) {
        let mut shared = self.lock();
        shared.stop = shared.busy;
        self.changed.notify_all();
    }

    /// Ends a running copy and waits for that, a chunk at most.
    pub fn halt(&self) {
        self.stop();
        drop(self.idle());
    }

    /// As [`Engine::halt`], and forgets the result.
    pub fn reset(&self) {
        self.stop();
        let mut shared = self.idle();
        if self.comes_loose_at_reset.swap(false, Ordering::Relaxed) {
            self.stuck.store(false, Ordering::Relaxed);
        }
        self.stuck.fetch_or(self.sticks_at_reset.swap(false, Ordering::Relaxed), Ordering::Relaxed);
        shared.result = RESULT_NONE;
        shared.error = 0;
    }

    /// The registers describe another copy, which has not been started; nothing happens while one runs.
    pub fn forget_result(&self) {
        let mut shared = self.lock();
        if !shared.busy {
            shared.result = RESULT_NONE;
            shared.error = 0;
        }
    }

    fn idle(&self) -> MutexGuard<'_, Shared> {
        self.changed.wait_while(self.lock(), |shared| shared.busy).unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the thread end.
    pub fn quit(&self) {
        let mut shared = self.lock();
        shared.quit = true;
        shared.stop = shared.busy;
        self.changed.notify_all();
    }

    /// A copy runs, or it says so.
    pub fn busy(&self) -> bool {
        self.lock().busy || self.stuck.load(Ordering::Relaxed)
    }

    /// DMA_RESULT and DMA_ERROR.
    pub fn result(&self) -> (u32, u32) {
        let shared = self.lock();
        (shared.result, shared.error)
    }

    /// Bytes moved and copies that failed since the server started.
    pub fn counts(&self) -> (u64, u64) {
        (self.bytes.load(Ordering::Relaxed), self.errors.load(Ordering::Relaxed))
    }

    /// The next `count` copies flip one bit, in addition to those asked for before.
    pub fn corrupt(&self, count: u32) {
        let _ = self.corrupt.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_add(count)));
    }

    /// Speed limit, 0 for none.
    pub fn set_speed(&self, bytes_per_second: u64) {
        self.bytes_per_second.store(bytes_per_second, Ordering::Relaxed);
    }

    /// From now on, or from its next reset on, it says that it is busy, whatever it is told, and does nothing; with `until_reset`
    /// only until it is reset.
    pub fn stick(&self, at_reset: bool, until_reset: bool) {
        self.comes_loose_at_reset.store(until_reset, Ordering::Relaxed);
        let from = if at_reset { &self.sticks_at_reset } else { &self.stuck };
        from.store(true, Ordering::Relaxed);
    }

    /// Forgets corruption, speed limit and that it is stuck.
    pub fn clear_faults(&self) {
        self.corrupt.store(0, Ordering::Relaxed);
        self.stuck.store(false, Ordering::Relaxed);
        self.sticks_at_reset.store(false, Ordering::Relaxed);
        self.comes_loose_at_reset.store(false, Ordering::Relaxed);
        self.set_speed(0);
    }

    /// The thread: works until [`Engine::quit`].
    pub fn run(&self, around: &Surroundings<'_>) {
        loop {
            let job = {
                let mut shared = self.lock();
                loop {
                    if let Some(job) = shared.job.take() {
                        break job;
                    }
                    if shared.quit {
                        return;
                    }
                    shared = self.changed.wait(shared).unwrap_or_else(PoisonError::into_inner);
                }
            };
            let outcome = self.copy(&job, around);
            let mut shared = self.lock();
            shared.busy = false;
            shared.stop = false;
            (shared.result, shared.error) = match outcome {
                Ok(()) => (RESULT_DONE, 0),
                Err(failure) => (RESULT_ERROR, failure as u32),
            };
            if outcome.is_err() {
                self.errors.fetch_add(1, Ordering::Relaxed);
            }
            self.changed.notify_all();
            drop(shared);
            if job.has(FLAG_INTERRUPT) && outcome != Err(Failure::Stopped) {
                around.interrupts.raise(job.vector as usize);
            }
        }
    }

    fn copy(&self, job: &Descriptor, around: &Surroundings<'_>) -> Result<(), Failure> {
        if job.bytes == 0 || job.bytes > DMA_MAX_BYTES {
            return Err(Failure::BadLength);
        }
        let bytes = u64::from(job.bytes);
        for (flag, offset) in [(FLAG_SOURCE_OWN, job.source), (FLAG_DESTINATION_OWN, job.destination)] {
            if job.has(flag) && offset.checked_add(bytes).is_none_or(|end| end > BAR2_BYTES) {
                return Err(Failure::Unreachable);
            }
        }
        let flip = self
            .corrupt
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .is_ok()
            .then_some(job.bytes as usize / 2);
        let mut buffer = vec![0; CHUNK.min(job.bytes as usize)];
        let mut done = 0;
        let mut due = Instant::now();
        while done < job.bytes as usize {
            let speed = self.bytes_per_second.load(Ordering::Relaxed);
            let part = match speed {
                0 => CHUNK,
                // A chunk of about 2 ms.
                _ => usize::try_from(speed / 500).unwrap_or(CHUNK).clamp(1, CHUNK),
            };
            let chunk = &mut buffer[..part.min(job.bytes as usize - done)];
            let nanoseconds = 1_000_000_000u64.saturating_mul(chunk.len() as u64).checked_div(speed).unwrap_or(0);
            // What the machine was late by is made up for; an order whose speed was changed on the way does not hurry.
            due = due.max(Instant::now().checked_sub(LATE).unwrap_or(due)) + Duration::from_nanos(nanoseconds);
            self.pause_until(due)?;
            move_chunk(job, done, chunk, flip, around)?;
            done += chunk.len();
            self.bytes.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        }
        // Pairs with the acquire of whoever learns of the end by the result, the bell or the vector.
        fence(Ordering::SeqCst);
        if job.has(FLAG_BELL) {
            ring_bell(job, around)?;
        }
        Ok(())
    }

    fn pause_until(&self, due: Instant) -> Result<(), Failure> {
        let mut shared = self.lock();
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if shared.stop {
                return Err(Failure::Stopped);
            }
            if left.is_zero() {
                return Ok(());
            }
            shared = self.changed.wait_timeout(shared, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Checks that the endpoint may use this whole range of bus addresses now.
fn check(bus: &Bus, job: &Descriptor, arbitrary: bool, address: u64, bytes: u64) -> Result<(), Failure> {
    if !bus.powered {
        return Err(Failure::Stopped);
    }
    if !bus.master {
        return Err(Failure::NoMaster);
    }
    let everywhere = arbitrary && job.has(FLAG_ARBITRARY);
    if !everywhere && !bus.rings.covers(address, bytes) {
        return Err(Failure::OutsideRings);
    }
    Ok(())
}

fn move_chunk(
    job: &Descriptor,
    done: usize,
    chunk: &mut [u8],
    flip: Option<usize>,
    around: &Surroundings<'_>,
) -> Result<(), Failure> {
    let bus = around.bus.read().unwrap_or_else(PoisonError::into_inner);
    if !bus.powered {
        return Err(Failure::Stopped);
    }
    let (whole, into) = (u64::from(job.bytes), done as u64);
    if !job.has(FLAG_SOURCE_OWN) {
        check(&bus, job, around.arbitrary, job.source, whole)?;
    }
    if !job.has(FLAG_DESTINATION_OWN) {
        check(&bus, job, around.arbitrary, job.destination, whole)?;
    }
    if job.has(FLAG_SOURCE_OWN) {
        around.memory.read(job.source + into, chunk).then_some(()).ok_or(Failure::Unreachable)?;
    } else {
        bus.read(around.fabric, job.source.checked_add(into).ok_or(Failure::Unreachable)?, chunk)?;
    }
    if let Some(byte) = flip.and_then(|at| at.checked_sub(done)).and_then(|at| chunk.get_mut(at)) {
        *byte ^= 0x10;
    }
    if job.has(FLAG_DESTINATION_OWN) {
        around.memory.write(job.destination + into, chunk).then_some(()).ok_or(Failure::Unreachable)
    } else {
        Ok(bus.write(around.fabric, job.destination.checked_add(into).ok_or(Failure::Unreachable)?, chunk)?)
    }
}

fn ring_bell(job: &Descriptor, around: &Surroundings<'_>) -> Result<(), Failure> {
    let (endpoint, vector) = {
        let bus = around.bus.read().unwrap_or_else(PoisonError::into_inner);
        match around.fabric.doorbell(job.bell) {
            Some(_) if !bus.powered => return Err(Failure::Stopped),
            Some(_) if !bus.master => return Err(Failure::NoMaster),
            Some(bell) => bell,
            None => {
                check(&bus, job, around.arbitrary, job.bell, 4)?;
                return Ok(bus.write(around.fabric, job.bell, &job.bell_value.to_le_bytes())?);
            }
        }
    };
    around.fabric.ring(endpoint, vector);
    Ok(())
}
