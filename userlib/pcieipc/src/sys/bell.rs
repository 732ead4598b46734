// SPDX-License-Identifier: MIT OR Apache-2.0
//! An eventfd that wakes one rank.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::eventfd::{EfdFlags, EventFd},
    unistd,
};

/// A counter in the kernel that a sleeping rank waits for and that peers, or interrupts, add to.
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// A silent bell; not inherited by children that execute another program.
    ///
    /// ```
    /// let bell = pcieipc::device::Bell::new()?;
    /// assert_eq!(bell.drain(), 0);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// As eventfd(2).
    pub fn new() -> io::Result<Self> {
        let fd = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self(fd.into()))
    }

    /// A bell that another process made. What it really is does not matter: it is only written, without blocking.
    ///
    /// ```
    /// use std::os::fd::AsFd;
    /// use pcieipc::device::Bell;
    ///
    /// let bell = Bell::new()?;
    /// // What came through a socket from another process.
    /// let theirs = Bell::from_peer(bell.as_fd().try_clone_to_owned()?);
    /// theirs.ring()?;
    /// assert_eq!(bell.drain(), 1);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn from_peer(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// The same bell once more, for another thread that rings it.
    ///
    /// ```
    /// let bell = pcieipc::device::Bell::new()?;
    /// let other = bell.try_clone()?;
    /// std::thread::spawn(move || other.ring()).join().unwrap()?;
    /// assert_eq!(bell.drain(), 1);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// As dup(2).
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Wakes whoever waits for the bell, now or next.
    ///
    /// ```
    /// let bell = pcieipc::device::Bell::new()?;
    /// bell.ring()?;
    /// assert_eq!(bell.drain(), 1);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// As write(2), except that a full counter counts as rung.
    pub fn ring(&self) -> io::Result<()> {
        super::count::made_one();
        match unistd::write(&self.0, &1u64.to_ne_bytes()) {
            Ok(_) | Err(Errno::EAGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Forgets all rings until now; says how many there were.
    ///
    /// ```
    /// let bell = pcieipc::device::Bell::new()?;
    /// bell.ring()?;
    /// bell.ring()?;
    /// assert_eq!((bell.drain(), bell.drain()), (2, 0));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn drain(&self) -> u64 {
        let mut count = [0; 8];
        super::count::made_one();
        match unistd::read(&self.0, &mut count) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
