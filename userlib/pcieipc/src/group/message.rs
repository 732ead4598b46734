// SPDX-License-Identifier: MIT OR Apache-2.0
//! What ranks say to each other when they meet: one JSON object in a packet, with descriptors beside it.

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    time::Instant,
};

use nix::{
    cmsg_space,
    errno::Errno,
    sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recv, recvmsg, sendmsg},
};
use serde::{Deserialize, Serialize};

use super::step;
use crate::{error::Rank, sys::wait_readable};

/// The longest packet that is accepted.
const MAX_BYTES: usize = 16 << 10;
/// Most descriptors in a packet.
const MAX_FDS: usize = 8;

/// One packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Message {
    /// Who comes, and what it wants; the first packet in each direction. `returning`: to a group that has met already.
    Hello { protocol: u32, rank: Rank, ranks: usize, returning: bool, configuration: Vec<(String, String)> },
    /// To one that returns: the ranks that make links in this turn, in the numbers of the first meeting.
    Members { turn: u32, members: Vec<Rank> },
    /// To one that returned: all have their links, and the group goes on.
    Committed { turn: u32 },
    /// The sender's part of the links to the receiver; descriptors come with it.
    Offer { turn: u32 },
    /// The sender has all its links.
    Ready { turn: u32 },
    /// A buffer that the receiver may read; its descriptor comes with it.
    Buffer { turn: u32, number: u32, bytes: usize },
    /// Something that the sender exchanges with all others; its descriptors come with it.
    Exchange { turn: u32, number: u32, what: String, bytes: Vec<u8> },
    /// The sender could not make its links.
    Failed { turn: u32, why: String },
}

/// Why nothing came.
#[derive(Debug, thiserror::Error)]
pub enum Silence {
    /// The deadline passed.
    #[error("it did not answer in time")]
    Late,
    /// The other end is closed.
    #[error("it left")]
    Closed,
    /// What came is not of this protocol.
    #[error("it sent something that is not understood: {0}")]
    Nonsense(String),
    /// What came has descriptors, and this process can open no more.
    #[error("what it sent can not be taken: {0}; raise the limit of open files (ulimit -n)")]
    Full(std::io::Error),
}

/// Sends one packet. The packets of a meeting are few and short, so a full socket means that the peer does not read.
pub fn send(socket: BorrowedFd<'_>, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), Silence> {
    let bytes = serde_json::to_vec(message).map_err(|e| Silence::Nonsense(e.to_string()))?;
    let raw: Vec<RawFd> = fds.iter().map(|f| f.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[][..] } else { &rights[..] };
    loop {
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        step();
        match sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&bytes)], control, flags, None) {
            Ok(_) => {
                step();
                return Ok(());
            }
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => return Err(Silence::Late),
            Err(_) => return Err(Silence::Closed),
        }
    }
}

/// Waits for one packet until the deadline, or until the process at the other end has ended.
pub fn receive(
    socket: BorrowedFd<'_>,
    life: Option<BorrowedFd<'_>>,
    deadline: Instant,
) -> Result<(Message, Vec<OwnedFd>), Silence> {
    let fds: Vec<BorrowedFd<'_>> = std::iter::once(socket).chain(life).collect();
    loop {
        // First whether it lives, then whether it has sent something: so nothing that it sent is lost.
        let left = deadline.saturating_duration_since(Instant::now());
        let ready = wait_readable(&fds, left).map_err(|_| Silence::Closed)?;
        if let Some(packet) = try_receive(socket)? {
            return Ok(packet);
        }
        if ready & 2 != 0 {
            return Err(Silence::Closed);
        }
        if left.is_zero() {
            return Err(Silence::Late);
        }
    }
}

/// The next packet without its descriptors; it stays.
pub fn peek(socket: BorrowedFd<'_>) -> Result<Option<Message>, Silence> {
    let mut bytes = vec![0; MAX_BYTES];
    match recv(socket.as_raw_fd(), &mut bytes, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT) {
        Ok(0) => Err(Silence::Closed),
        Ok(len) => serde_json::from_slice(&bytes[..len]).map(Some).map_err(|e| Silence::Nonsense(e.to_string())),
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
        Err(_) => Err(Silence::Closed),
    }
}

/// One packet, if there is one.
fn try_receive(socket: BorrowedFd<'_>) -> Result<Option<(Message, Vec<OwnedFd>)>, Silence> {
    let mut bytes = vec![0; MAX_BYTES];
    let mut control = cmsg_space!([RawFd; MAX_FDS]);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let packet = match recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut control), flags) {
        Ok(packet) => packet,
        Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
        Err(_) => return Err(Silence::Closed),
    };
    let mut fds = Vec::new();
    // The kernel cuts descriptors off that it has no numbers left for, as it does those that are too many.
    let cut_off = |_| match socket.try_clone_to_owned() {
        Ok(_) => Silence::Nonsense("too many descriptors".into()),
        Err(error) => Silence::Full(error),
    };
    for part in packet.cmsgs().map_err(cut_off)? {
        if let ControlMessageOwned::ScmRights(raw) = part {
            // SAFETY: the kernel has just made these descriptors for us; nobody else knows them.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    let (len, cut) = (packet.bytes, packet.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC));
    if len == 0 {
        return Err(Silence::Closed);
    }
    if cut {
        return Err(Silence::Nonsense("a packet that is too long".into()));
    }
    let message = serde_json::from_slice(&bytes[..len]).map_err(|e| Silence::Nonsense(e.to_string()))?;
    Ok(Some((message, fds)))
}
