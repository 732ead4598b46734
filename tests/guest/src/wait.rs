// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits, all with a bound.

use std::{
    env,
    os::fd::AsFd,
    sync::{
        LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// A bound as long as this machine needs: the rig multiplies all of them on a kernel that is slow. The functions here do so themselves.
pub fn patiently(limit: Duration) -> Duration {
    static PATIENCE: LazyLock<u32> = LazyLock::new(|| env::var("PATIENCE").ok().and_then(|text| text.parse().ok()).unwrap_or(1));
    limit * *PATIENCE
}

/// Tells threads that look at it to end when it is dropped, also by a broken promise: whoever started them waits for them.
#[derive(Debug)]
pub struct Over<'a>(pub &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// What polls ready within `limit`; nothing in time is empty.
pub fn polled(fd: impl AsFd, events: PollFlags, limit: Duration) -> PollFlags {
    let mut fds = [PollFd::new(fd.as_fd(), events)];
    let limit = PollTimeout::try_from(patiently(limit).as_millis()).unwrap_or(PollTimeout::MAX);
    let ready = poll(&mut fds, limit).unwrap_or_else(|error| panic!("poll: {error}"));
    if ready == 0 { PollFlags::empty() } else { fds[0].revents().unwrap_or(PollFlags::empty()) }
}

/// Whether something becomes true in time. Looks every millisecond.
pub fn until(limit: Duration, mut what: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + patiently(limit);
    loop {
        if what() {
            return true;
        }
        if Instant::now() > end {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
}
