// SPDX-License-Identifier: MIT OR Apache-2.0
//! The server behind QEMU's `ivshmem-doorbell` devices: it tells each device its number, gives it the memory that all share, and
//! the eventfds by which each rings each (QEMU's docs/specs/ivshmem-spec.rst; Debian does not package its server).

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

use crate::error::at;
use crate::{Error, Result};

/// Interrupt vectors of each device.
pub const VECTORS: usize = 8;
/// Bytes that all devices share.
const BYTES: u64 = 4 << 20;
const VERSION: i64 = 0;
const MEMORY: i64 = -1;

/// The name of the socket in the folder of sockets.
pub const SOCKET: &str = "ivshmem.sock";

struct Peer {
    number: i64,
    stream: UnixStream,
    vectors: Vec<EventFd>,
}

/// Serves until it is dropped.
#[derive(Debug)]
pub struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens in the folder of sockets.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot.
    pub fn start(sockets: &Path) -> Result<Server> {
        let path = sockets.join(SOCKET);
        let listener = UnixListener::bind(&path).map_err(at(&path))?;
        listener.set_nonblocking(true).map_err(at(&path))?;
        let memory = memfd_create(c"ivshmem", MFdFlags::MFD_CLOEXEC).map_err(|error| system(&path, error))?;
        let memory = File::from(memory);
        memory.set_len(BYTES).map_err(at(&path))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            let mut peers = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        if let Err(error) = join(&mut peers, stream, &memory) {
                            eprintln!("ivshmem: a device could not be told of the others: {error}");
                        }
                    }
                    Err(_) => thread::sleep(Duration::from_millis(20)),
                }
            }
        });
        Ok(Server { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It has nothing to tell any more.
            let _ = thread.join();
        }
    }
}

fn system(path: &Path, error: nix::Error) -> Error {
    Error::File { path: PathBuf::from(path), source: error.into() }
}

/// Tells the new device of itself and of all others, and all others of it.
fn join(peers: &mut Vec<Peer>, stream: UnixStream, memory: &File) -> nix::Result<()> {
    let vectors: nix::Result<Vec<EventFd>> =
        (0..VECTORS).map(|_| EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)).collect();
    let new = Peer { number: peers.len() as i64, stream, vectors: vectors? };
    send(&new.stream, VERSION, None)?;
    send(&new.stream, new.number, None)?;
    send(&new.stream, MEMORY, Some(memory.as_raw_fd()))?;
    for peer in peers.iter() {
        introduce(peer, &new.stream)?;
        introduce(&new, &peer.stream)?;
    }
    introduce(&new, &new.stream)?;
    peers.push(new);
    Ok(())
}

fn introduce(peer: &Peer, to: &UnixStream) -> nix::Result<()> {
    peer.vectors.iter().try_for_each(|vector| send(to, peer.number, Some(vector.as_fd().as_raw_fd())))
}

fn send(stream: &UnixStream, number: i64, descriptor: Option<RawFd>) -> nix::Result<()> {
    let bytes = number.to_le_bytes();
    let descriptors: Vec<RawFd> = descriptor.into_iter().collect();
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let control = if descriptors.is_empty() { &rights[..0] } else { &rights[..] };
    sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(&bytes)], control, MsgFlags::MSG_NOSIGNAL, None).map(drop)
}
