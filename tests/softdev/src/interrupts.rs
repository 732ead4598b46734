// SPDX-License-Identifier: MIT OR Apache-2.0
//! Doorbells, the faults they meet, and the MSI-X messages they end in.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::Duration,
};

use crate::{registers::VECTORS, timer::Timer};

/// What happens to a doorbell instead of one interrupt at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoorbellFault {
    /// No interrupt.
    Drop,
    /// One interrupt, later.
    Delay(Duration),
    /// So many interrupts.
    Repeat(u32),
}

/// Too many faults wait already.
#[derive(Debug, thiserror::Error)]
#[error("{MAX_FAULTS} doorbell faults of this endpoint wait already; ring its doorbells or revive it")]
pub struct FaultQueueFull;

const MAX_FAULTS: usize = 64;

#[derive(Debug, Default)]
struct Inner {
    vectors: [Option<File>; VECTORS],
    /// MSI-X is enabled and the function may master the bus.
    enabled: bool,
    powered: bool,
    silent: bool,
    life: u32,
    faults: VecDeque<(DoorbellFault, u32)>,
    doorbells: u64,
    messages: u64,
}

impl Inner {
    fn raise(&mut self, vector: usize) {
        if !self.enabled || !self.powered || self.silent {
            return;
        }
        if let Some(Some(eventfd)) = self.vectors.get_mut(vector) {
            if eventfd.write_all(&1u64.to_ne_bytes()).is_ok() {
                self.messages += 1;
            }
        }
    }

    fn next_fault(&mut self) -> Option<DoorbellFault> {
        let (fault, left) = self.faults.front_mut()?;
        let fault = *fault;
        *left -= 1;
        if *left == 0 {
            self.faults.pop_front();
        }
        Some(fault)
    }
}

/// The interrupt side of one endpoint. Peers ring here too.
#[derive(Debug)]
pub struct Interrupts {
    inner: Mutex<Inner>,
    timer: Timer,
    this: Weak<Self>,
}

impl Interrupts {
    /// Without power, without eventfds.
    pub fn new(timer: Timer) -> Arc<Self> {
        Arc::new_cyclic(|this| Self { inner: Mutex::default(), timer, this: this.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A store to a doorbell.
    pub fn doorbell(&self, vector: usize) {
        let mut inner = self.lock();
        if !inner.powered || vector >= VECTORS {
            return;
        }
        inner.doorbells += 1;
        if inner.silent {
            return;
        }
        match inner.next_fault() {
            None => inner.raise(vector),
            Some(DoorbellFault::Drop) => {}
            Some(DoorbellFault::Repeat(times)) => (0..times).for_each(|_| inner.raise(vector)),
            Some(DoorbellFault::Delay(delay)) => {
                let (this, life) = (self.this.clone(), inner.life);
                self.timer.after(delay, move || {
                    if let Some(this) = this.upgrade() {
                        let mut inner = this.lock();
                        if inner.life == life {
                            inner.raise(vector);
                        }
                    }
                });
            }
        }
    }

    /// An MSI-X message that no doorbell asked for.
    pub fn raise(&self, vector: usize) {
        self.lock().raise(vector);
    }

    /// Raises a vector `count` times, each time this long after the last or a little longer; until then, or until this life ends.
    ///
    /// # Errors
    /// No thread could be made.
    pub fn flood(&self, vector: usize, count: u32, pause: Duration) -> io::Result<()> {
        let (this, life) = (self.this.clone(), self.lock().life);
        let flood = move || {
            for _ in 0..count {
                let Some(this) = this.upgrade() else { return };
                let mut inner = this.lock();
                if inner.life != life || !inner.powered {
                    return;
                }
                inner.raise(vector);
                drop(inner);
                // At once, several messages of an eventfd would be one.
                thread::sleep(pause);
            }
        };
        thread::Builder::new().name("flood".into()).spawn(flood).map(drop)
    }

    /// Where a vector's messages go.
    pub fn set_vector(&self, vector: usize, eventfd: Option<File>) {
        if let Some(slot) = self.lock().vectors.get_mut(vector) {
            *slot = eventfd;
        }
    }

    /// Whether messages are sent at all.
    pub fn set_enabled(&self, enabled: bool) {
        self.lock().enabled = enabled;
    }

    /// Interrupts of an earlier life that were delayed are lost.
    pub fn set_power(&self, powered: bool, life: u32) {
        let mut inner = self.lock();
        inner.powered = powered;
        inner.life = life;
    }

    /// No doorbell raises anything.
    pub fn set_silent(&self, silent: bool) {
        self.lock().silent = silent;
    }

    /// The next `count` doorbells meet `fault`, after those that earlier calls asked for.
    ///
    /// # Errors
    /// [`FaultQueueFull`]
    pub fn add_fault(&self, fault: DoorbellFault, count: u32) -> Result<(), FaultQueueFull> {
        let mut inner = self.lock();
        if inner.faults.len() >= MAX_FAULTS {
            return Err(FaultQueueFull);
        }
        if count > 0 {
            inner.faults.push_back((fault, count));
        }
        Ok(())
    }

    /// Forgets all faults that wait.
    pub fn clear_faults(&self) {
        self.lock().faults.clear();
    }

    /// Doorbells that still meet a fault.
    pub fn faults_waiting(&self) -> u64 {
        self.lock().faults.iter().map(|(_, left)| u64::from(*left)).sum()
    }

    /// Doorbells seen and messages sent since the server started.
    pub fn counts(&self) -> (u64, u64) {
        let inner = self.lock();
        (inner.doorbells, inner.messages)
    }
}
