// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's own messages about devices that come, go and change (kobject uevents over netlink).

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use nix::sys::socket::{
    AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recvfrom, setsockopt, socket, sockopt::RcvBuf,
};

use super::address::Address;

/// What happened to a PCI function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// It appeared.
    Add,
    /// It went.
    Remove,
    /// A driver took it or let it go, or something else about it changed.
    Change,
}

/// One message about a PCI function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Uevent {
    /// What happened.
    pub action: Action,
    /// To whom.
    pub address: Address,
}

/// What the socket gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// A message about a PCI function.
    Pci(Uevent),
    /// A message about something else.
    Other,
    /// The kernel dropped messages: anything may have happened.
    Lost,
    /// Nothing more is there.
    Empty,
}

/// A socket that hears the kernel's messages. It needs no rights; in a network namespace other than the host's it stays silent.
#[derive(Debug)]
pub struct UeventSocket {
    socket: OwnedFd,
}

/// The kernel's own multicast group; group 2 carries what udev sends on.
const KERNEL: u32 = 1;
/// A message is at most the 2 KiB of its environment and its heading.
const LONGEST: usize = 8192;

impl UeventSocket {
    /// Opens the socket and listens.
    ///
    /// # Errors
    /// Those of `socket` and `bind`: EPROTONOSUPPORT where the sandbox has no netlink.
    pub fn open() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Netlink, SockType::Datagram, flags, SockProtocol::NetlinkKObjectUEvent)?;
        // A rescan of a large tree sends thousands at once. A smaller buffer than asked for is fine: losses are noticed.
        let _ = setsockopt(&socket, RcvBuf, &(1 << 20));
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, KERNEL))?;
        Ok(Self { socket })
    }

    /// Takes the next message, without waiting.
    ///
    /// # Errors
    /// Those of `recvfrom`, but not those that mean "nothing there" or "some were lost".
    pub fn receive(&self) -> io::Result<Received> {
        let mut message = [0u8; LONGEST];
        match recvfrom::<NetlinkAddr>(self.socket.as_raw_fd(), &mut message) {
            // Only the kernel has port 0; any process of our user could write to this socket.
            Ok((length, Some(from))) if from.pid() == 0 => Ok(parse(&message[..length]).map_or(Received::Other, Received::Pci)),
            Ok(_) => Ok(Received::Other),
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => Ok(Received::Empty),
            Err(nix::Error::ENOBUFS) => Ok(Received::Lost),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for UeventSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Reads a message: `add@/devices/…`, then `KEY=value`, each closed by a zero byte. `None` for what is not about a PCI function.
pub fn parse(message: &[u8]) -> Option<Uevent> {
    let mut action = None;
    let mut pci = false;
    let mut address = None;
    for field in message.split(|b| *b == 0) {
        let Some((key, value)) = std::str::from_utf8(field).ok().and_then(|f| f.split_once('=')) else { continue };
        match key {
            "ACTION" => {
                action = Some(match value {
                    "add" => Action::Add,
                    "remove" => Action::Remove,
                    _ => Action::Change,
                });
            }
            "SUBSYSTEM" => pci = value == "pci",
            "PCI_SLOT_NAME" => address = value.parse().ok(),
            _ => {}
        }
    }
    if pci { Some(Uevent { action: action?, address: address? }) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_about_pci_functions_are_understood_and_others_left_alone() {
        let message =
            b"remove@/devices/pci0000:00/0000:00:02.0\0ACTION=remove\0SUBSYSTEM=pci\0PCI_SLOT_NAME=0000:00:02.0\0SEQNUM=7\0";
        assert_eq!(parse(message), Some(Uevent { action: Action::Remove, address: "0000:00:02.0".parse().unwrap() }));
        assert_eq!(parse(b"add@/x\0ACTION=add\0SUBSYSTEM=net\0PCI_SLOT_NAME=0000:00:02.0\0"), None);
        assert_eq!(parse(b"\xff\xfe\0=\0ACTION=add"), None);
    }
}
