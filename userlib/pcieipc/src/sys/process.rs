// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether another process lives, and waiting for it and for a bell at once.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::{
        Once,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags},
    sched::{CpuSet, sched_getaffinity},
    sys::{
        signal::SigSet,
        socket::{getsockopt, sockopt},
        time::TimeSpec,
    },
    unistd::Pid,
};

/// A process other than ours, by a descriptor that stands for it alone, even after its number is used again.
#[derive(Debug)]
pub struct Life(OwnedFd);

impl Life {
    /// The process at the other end of a Unix socket.
    ///
    /// # Errors
    /// As getsockopt(2) and pidfd_open(2).
    pub fn of_peer(socket: BorrowedFd<'_>) -> io::Result<Self> {
        // Linux 6.5 and later give the process that connected; before that its number has to do.
        if let Ok(fd) = getsockopt(&socket, sockopt::PeerPidfd) {
            return Ok(Self(fd));
        }
        Self::of(getsockopt(&socket, sockopt::PeerCredentials)?.pid())
    }

    fn of(pid: i32) -> io::Result<Self> {
        // SAFETY: takes two integers and returns a new descriptor or -1.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let fd = Errno::result(fd)?;
        // SAFETY: just returned, owned by nobody else; descriptors fit into an int.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
    }

    /// The processors that it may use; nothing where that can not be known, as of a process in a container of its own.
    pub fn processors(&self) -> Option<CpuSet> {
        let known = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd())).ok()?;
        let pid: i32 = known.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()?;
        // 0 stands for a process of another namespace, -1 for one that has ended.
        (pid > 0).then(|| sched_getaffinity(Pid::from_raw(pid)).ok())?
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        matches!(wait_readable(&[self.0.as_fd()], Duration::ZERO), Ok(ready) if ready != 0)
    }
}

impl AsFd for Life {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The process that made something. A child that `fork` makes has a copy of it, with neither the threads nor all of the memory behind it, and is
/// not the rank that its peers know: what it does with the copy must reach nobody.
#[derive(Debug, Clone, Copy)]
pub struct Home(u32);

/// One more in each child.
static FORKS: AtomicU32 = AtomicU32::new(0);

impl Home {
    /// This process.
    pub fn here() -> Self {
        static COUNTED: Once = Once::new();
        COUNTED.call_once(|| {
            // SAFETY: the function only adds to an atomic, which a child may do at any time. Without memory for it, forks go uncounted.
            unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this process is the one. A load.
    pub fn is_here(self) -> bool {
        FORKS.load(Ordering::Relaxed) == self.0
    }
}

extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Waits until one of up to 64 descriptors is readable or has ended, or until the time is over. The answer has a bit set
/// for each that is; none after a signal.
///
/// # Errors
/// As ppoll(2).
pub fn wait_readable(fds: &[BorrowedFd<'_>], time: Duration) -> io::Result<u64> {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    super::count::made_one();
    match nix::poll::ppoll(&mut polled, Some(TimeSpec::from_duration(time)), None::<SigSet>) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(error) => return Err(error.into()),
    }
    let ready = polled.iter().enumerate().filter(|(_, p)| p.revents().is_some_and(|r| !r.is_empty()));
    Ok(ready.fold(0, |bits, (i, _)| bits | 1 << i))
}

#[cfg(test)]
mod tests {
    use nix::sched::sched_setaffinity;

    use super::*;

    #[test]
    fn the_processors_of_another_process_are_known_while_it_lives() {
        let own = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let last = (0..CpuSet::count()).rev().find(|cpu| own.is_set(*cpu).unwrap()).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let life = Life::of(child.id() as i32).unwrap();
        let all = life.processors();
        let mut one = CpuSet::new();
        one.set(last).unwrap();
        sched_setaffinity(Pid::from_raw(child.id() as i32), &one).unwrap();
        let pinned = life.processors();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((all, pinned, life.processors()), (Some(own), Some(one), None));
    }
}
