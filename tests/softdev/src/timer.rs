// SPDX-License-Identifier: MIT OR Apache-2.0
//! One thread that does things later.

use std::{
    cmp::Ordering,
    collections::BinaryHeap,
    io,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

type Action = Box<dyn FnOnce() + Send>;

struct Entry {
    at: Instant,
    sequence: u64,
    action: Action,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    // Reversed: the heap gives the earliest first, equals in the order in which they came.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

/// Handle to the thread; it ends when the last handle goes.
#[derive(Clone, Debug)]
pub struct Timer {
    sender: Sender<(Instant, Action)>,
}

impl Timer {
    /// Starts the thread.
    ///
    /// # Errors
    /// What the thread's start says.
    pub fn start() -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel::<(Instant, Action)>();
        thread::Builder::new().name("timer".into()).spawn(move || {
            let mut heap = BinaryHeap::new();
            let mut sequence = 0;
            loop {
                let now = Instant::now();
                while heap.peek().is_some_and(|entry: &Entry| entry.at <= now) {
                    if let Some(entry) = heap.pop() {
                        (entry.action)();
                    }
                }
                let idle = heap.peek().map_or(Duration::from_secs(3600), |entry| entry.at.saturating_duration_since(now));
                match receiver.recv_timeout(idle) {
                    Ok((at, action)) => {
                        sequence += 1;
                        heap.push(Entry { at, sequence, action });
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        })?;
        Ok(Self { sender })
    }

    /// Runs `action` on the timer's thread after `delay`; it must not block.
    pub fn after(&self, delay: Duration, action: impl FnOnce() + Send + 'static) {
        // The thread ends only when no handle is left, so this cannot fail while we hold one.
        let _ = self.sender.send((Instant::now() + delay, Box::new(action)));
    }
}
