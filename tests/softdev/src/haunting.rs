// SPDX-License-Identifier: MIT OR Apache-2.0
//! An endpoint that has lost its mind: it writes, without pause, into every ring that it was ever told of, whatever its ring
//! table, CONTROL and Bus Master Enable say by now. Only what the IOMMU took away stops it.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::{bus::Bus, fabric::Fabric};

/// Between two rounds over all rings, so that others get the bus, too.
const PAUSE: Duration = Duration::from_micros(50);
const PAGE: u64 = 4096;
/// Rings that are remembered; the oldest is forgotten first.
const REMEMBERED: usize = 1024;

#[derive(Debug, Default)]
struct Shared {
    on: bool,
    rings: Vec<(u64, u64)>,
}

/// Whether it does, where, and what came of it.
#[derive(Debug, Default)]
pub struct Haunting {
    shared: Mutex<Shared>,
    changed: Condvar,
    landed: AtomicU64,
    refused: AtomicU64,
}

impl Haunting {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins, with the rings of the table as it is now, or ends and forgets all.
    pub fn set(&self, on: bool, bus: &RwLock<Bus>) {
        let rings = if on { bus.read().unwrap_or_else(PoisonError::into_inner).rings.all() } else { Vec::new() };
        *self.lock() = Shared { on, rings };
        self.changed.notify_all();
    }

    /// The endpoint was told of these rings.
    pub fn remember(&self, rings: impl FnOnce() -> Vec<(u64, u64)>) {
        let mut shared = self.lock();
        if !shared.on {
            return;
        }
        for ring in rings() {
            if !shared.rings.contains(&ring) {
                if shared.rings.len() >= REMEMBERED {
                    shared.rings.remove(0);
                }
                shared.rings.push(ring);
            }
        }
    }

    /// Stores that landed, and those that found no memory, since the server started.
    pub fn counts(&self) -> (u64, u64) {
        (self.landed.load(Ordering::Relaxed), self.refused.load(Ordering::Relaxed))
    }

    /// The thread. Does not return.
    pub fn run(&self, bus: &RwLock<Bus>, fabric: &Arc<Fabric>) {
        for round in 1u64.. {
            let rings = {
                let shared = self.changed.wait_while(self.lock(), |shared| !shared.on);
                shared.unwrap_or_else(PoisonError::into_inner).rings.clone()
            };
            for (address, bytes) in rings {
                for offset in (0..bytes).step_by(PAGE as usize) {
                    // One page at a time, so that whoever takes memory away waits for no more than that.
                    let bus = bus.read().unwrap_or_else(PoisonError::into_inner);
                    let landed = bus.write(fabric, address + offset, &round.to_le_bytes()).is_ok();
                    drop(bus);
                    let count = if landed { &self.landed } else { &self.refused };
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
            std::thread::sleep(PAUSE);
        }
    }
}
