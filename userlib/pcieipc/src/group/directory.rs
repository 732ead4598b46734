// SPDX-License-Identifier: MIT OR Apache-2.0
//! The private directory in which ranks find each other.

use std::{
    fs::{self, DirBuilder, File},
    io::ErrorKind,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use nix::{
    fcntl::{Flock, FlockArg},
    sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket},
    unistd::geteuid,
};

use crate::{
    error::{Error, Rank, Result},
    sys::failed,
};

/// A directory that only this user can enter.
#[derive(Debug, Clone)]
pub struct Directory(PathBuf);

/// A rank's place in the directory: its listening socket, while it meets.
#[derive(Debug)]
pub struct Place {
    pub socket: OwnedFd,
    path: PathBuf,
    // Held while the socket has its name; the kernel lets go of it when the process ends.
    _lock: Flock<File>,
}

impl Directory {
    /// Makes the directory (0700) if it is not there, and checks that nobody else can enter it.
    pub fn open(path: &Path) -> Result<Self> {
        let hint = || format!("give a directory that you can write to, instead of {}", path.display());
        match DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed("mkdir", hint())(error)),
        }
        let found = fs::symlink_metadata(path).map_err(failed("lstat", hint()))?;
        let refuse =
            |why: &str| Err(Error::Meeting(format!("{} {why}; give a directory of your own with mode 0700", path.display())));
        if !found.is_dir() {
            return refuse("is not a directory");
        }
        if found.uid() != geteuid().as_raw() {
            return refuse("belongs to another user");
        }
        if found.mode() & 0o077 != 0 {
            return refuse("is open to other users");
        }
        Ok(Self(path.to_owned()))
    }

    fn address(&self, rank: Rank) -> Result<(PathBuf, UnixAddr)> {
        let path = self.0.join(format!("rank-{rank}"));
        let address = UnixAddr::new(&path).map_err(|_| {
            Error::Argument(format!("{} is too long for a Unix socket; take a shorter directory", path.display()))
        })?;
        Ok((path, address))
    }

    /// Takes the place of `rank`. The socket gets its name only when it listens already.
    pub fn take(&self, rank: Rank, ranks: usize) -> Result<Place> {
        let (path, address) = self.address(rank)?;
        let lock_path = path.with_extension("lock");
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&lock_path)
            .map_err(failed("open", format!("look at {}", lock_path.display())))?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|_| {
            Error::Meeting(format!(
                "another process already meets as rank {rank} in {}; give each rank its own number",
                self.0.display()
            ))
        })?;
        // A socket that an ended process left behind.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed("unlink", "look at the directory")(error)),
            _ => {}
        }
        let hint = || format!("look at {}", self.0.display());
        let socket = new_socket()?;
        bind(socket.as_raw_fd(), &address).map_err(|e| failed("bind", hint())(e.into()))?;
        let backlog = Backlog::new(ranks as i32).unwrap_or(Backlog::MAXCONN);
        listen(&socket, backlog).map_err(|e| failed("listen", hint())(e.into()))?;
        Ok(Place { socket, path, _lock: lock })
    }

    /// A connection to `rank`; `None` while it is not there.
    pub fn call(&self, rank: Rank) -> Result<Option<OwnedFd>> {
        let (_, address) = self.address(rank)?;
        let socket = new_socket()?;
        use nix::errno::Errno;
        match connect(socket.as_raw_fd(), &address) {
            Ok(()) => Ok(Some(socket)),
            Err(Errno::ENOENT | Errno::ECONNREFUSED | Errno::EAGAIN | Errno::EINTR) => Ok(None),
            Err(error) => Err(failed("connect", format!("look at {}", self.0.display()))(error.into())),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Still locked, so it is ours.
        let _ = fs::remove_file(&self.path);
    }
}

fn new_socket() -> Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
        .map_err(|e| failed("socket", "raise the limit of open files")(e.into()))
}
