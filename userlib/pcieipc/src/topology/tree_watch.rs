// SPDX-License-Identifier: MIT OR Apache-2.0
//! Follows the tree in a thread of its own, for those who have no time to wait: a look at one word tells whether anything changed.

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::{
    address::Address,
    follow::{Change, Follower},
    source::Source,
    tree::Topology,
};

/// Changes that are kept for [`TreeWatch::take`]; older ones are dropped, and counted.
const KEPT: usize = 1024;
/// How soon the thread notices that it shall end.
const TICK: Duration = Duration::from_millis(100);
/// Where a look takes long, such as in a machine that is translated, it may take one part in so many of the thread's time.
const SELDOM: u32 = 10;

/// A follower that runs beside its owner. Dropping it ends the thread.
#[derive(Debug)]
pub struct TreeWatch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    version: AtomicU64,
    stop: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    tree: Arc<Topology>,
    changes: Vec<Change>,
    dropped: u64,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // The state is whole after every statement, so a panic of another holder leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TreeWatch {
    /// Starts to follow. `endpoints` are the functions that matter: changes of them and of what is above them grow the version, others are
    /// only kept. With none, everything matters. `interval` is the time between two looks without a word of the kernel, at most.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(source: Box<dyn Source>, endpoints: Vec<Address>, interval: Duration) -> io::Result<Self> {
        let mut follower = Follower::new(source);
        let tree = Arc::new(follower.tree().clone());
        let shared = Arc::new(Shared {
            version: AtomicU64::new(1),
            stop: AtomicBool::new(false),
            state: Mutex::new(State { tree, changes: Vec::new(), dropped: 0 }),
        });
        let ours = shared.clone();
        let thread = std::thread::Builder::new().name("pcieipc-tree".into()).spawn(move || {
            let (mut looked, mut took) = (Instant::now(), Duration::ZERO);
            while !ours.stop.load(Ordering::Relaxed) {
                let heard = follower.hear(interval.min(TICK)).unwrap_or_else(|_| {
                    // An error of the socket leaves the regular looks, and must not make this thread spin.
                    std::thread::sleep(interval.min(TICK));
                    false
                });
                if !heard && looked.elapsed() < interval.max(took * SELDOM) {
                    continue;
                }
                looked = Instant::now();
                // Links and registers change without a word of the kernel; those of others than the endpoints do not matter.
                let changes = if endpoints.is_empty() { follower.look() } else { follower.look_at(&endpoints) };
                took = looked.elapsed();
                if !changes.is_empty() {
                    take_in(&ours, &follower, &endpoints, changes);
                }
            }
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Grows whenever something changed that plans for these endpoints depend on. No system call, no lock.
    pub fn version(&self) -> u64 {
        self.shared.version.load(Ordering::Acquire)
    }

    /// The tree at the last look.
    pub fn tree(&self) -> Arc<Topology> {
        self.shared.state().tree.clone()
    }

    /// What changed since the last call, oldest first, and how many changes were dropped because nobody asked for too long.
    pub fn take(&self) -> (Vec<Change>, u64) {
        let mut state = self.shared.state();
        (std::mem::take(&mut state.changes), std::mem::take(&mut state.dropped))
    }
}

impl Drop for TreeWatch {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It ends within a tick and the time of one look.
            let _ = thread.join();
        }
    }
}

fn take_in(shared: &Shared, follower: &Follower, endpoints: &[Address], changes: Vec<Change>) {
    let tree = Arc::new(follower.tree().clone());
    let mut state = shared.state();
    // What was above a card that left is known from the tree before.
    let matters = |address: Address| {
        endpoints.is_empty()
            || [&state.tree, &tree].into_iter().any(|t| {
                endpoints.iter().any(|e| {
                    *e == address || t.position(*e).is_some_and(|i| t.ancestors(i).any(|a| t.functions[a].address == address))
                })
            })
    };
    let alters = changes.iter().any(|c| c.alters_tree() && matters(c.address()));
    state.tree = tree;
    state.changes.extend(changes);
    if state.changes.len() > KEPT {
        let excess = state.changes.len() - KEPT;
        state.changes.drain(..excess);
        state.dropped += excess as u64;
    }
    drop(state);
    if alters {
        // Pairs with the load in `version`: who sees the new number finds the new tree.
        shared.version.fetch_add(1, Ordering::Release);
    }
}
