// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits, all with a bound.

use std::{
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// What polls ready within `limit`; nothing in time is empty.
pub fn polled(fd: impl AsFd, events: PollFlags, limit: Duration) -> PollFlags {
    let mut fds = [PollFd::new(fd.as_fd(), events)];
    let limit = PollTimeout::try_from(limit.as_millis()).unwrap_or(PollTimeout::MAX);
    let ready = poll(&mut fds, limit).unwrap_or_else(|error| panic!("poll: {error}"));
    if ready == 0 { PollFlags::empty() } else { fds[0].revents().unwrap_or(PollFlags::empty()) }
}

/// Whether something becomes true in time. Looks every millisecond.
pub fn until(limit: Duration, mut what: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
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
