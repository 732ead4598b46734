// SPDX-License-Identifier: MIT OR Apache-2.0
//! A thread that sees peers die, and tells all kernels. It makes no call of the driver, so it breaks no capture.

use std::{
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use pcieipc::sys::{Life, wait_readable};

use crate::control::Words;

const TURN: Duration = Duration::from_millis(50);

/// Ends when it is dropped.
#[derive(Debug)]
pub struct Watchdog {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches the processes of the peers of `rank`.
    pub fn start(words: Arc<Words>, rank: usize, lives: Vec<Option<Arc<Life>>>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name("pcieipc-watchdog".into()).spawn(move || {
            let peers: Vec<(usize, Arc<Life>)> = lives.into_iter().enumerate().filter_map(|(p, l)| Some((p, l?))).collect();
            let files: Vec<_> = peers.iter().map(|(_, life)| life.as_fd()).collect();
            while !stopped.load(Ordering::Acquire) {
                if files.is_empty() {
                    std::thread::park_timeout(TURN);
                    continue;
                }
                match wait_readable(&files, TURN) {
                    Ok(0) => {}
                    Ok(ready) => {
                        let first = peers.iter().enumerate().find(|(i, _)| ready & (1 << i) != 0);
                        if let Some((_, (peer, _))) = first {
                            words.died(rank, *peer);
                        }
                        return;
                    }
                    Err(_) => std::thread::sleep(TURN),
                }
            }
        });
        Self { stop, thread: thread.ok() }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}
