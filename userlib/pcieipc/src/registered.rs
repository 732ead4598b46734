// SPDX-License-Identifier: MIT OR Apache-2.0
//! Buffers that all ranks of a group can read where they lie.
//!
//! A registered buffer is used like a slice. Its pages are a sealed memory file, which the owner alone can write: peers get
//! a descriptor that can be mapped for reading only, and nobody, its owner included, can shrink it or punch holes into it under a
//! reader. So an all-reduce needs no copy through rings, and a hostile peer still can not change what the owner holds.

use std::{
    marker::PhantomData,
    ops::{Deref, DerefMut},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
    unistd::ftruncate,
};

use crate::{
    error::{Error, Rank, Result},
    executor::MAX_RANKS,
    reduce::Element,
    sys::{Access, Mapping, ONE_WRITER, check_sealed, failed},
};

const HINT: &str = "free some memory or register less; registered buffers are shared memory and count against the memory limit";

/// The owner's half of a buffer, before the peers' halves have come.
#[derive(Debug)]
pub(crate) struct Offer {
    file: OwnedFd,
    mapping: Mapping,
}

/// A buffer that this rank writes and all ranks of the group can read; made by `Group::register`, used like a slice.
#[derive(Debug)]
pub struct Registered<T> {
    own: Mapping,
    peers: Vec<Option<Mapping>>,
    places: Arc<Places>,
    count: usize,
    number: u32,
    turn: u32,
    life: PhantomData<T>,
}

/// Where each rank's buffer lies in this process; null where there is none.
#[derive(Debug)]
pub(crate) struct Places(pub [*const u8; MAX_RANKS]);

// SAFETY: they are addresses; whoever reads there makes sure that it may.
unsafe impl Send for Places {}
// SAFETY: as above.
unsafe impl Sync for Places {}

impl Offer {
    /// Memory for `bytes`, all zero; at least one page.
    pub fn new(bytes: usize) -> Result<Self> {
        let file = memfd_create("pcieipc-buffer", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)
            .map_err(|e| failed("memfd_create", HINT)(e.into()))?;
        let bytes = bytes.max(1);
        ftruncate(&file, bytes as i64).map_err(|e| failed("ftruncate", HINT)(e.into()))?;
        let mapping = Mapping::new(file.as_fd(), 0, bytes, Access::ReadWrite).map_err(failed("mmap", HINT))?;
        let seals = ONE_WRITER | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))
            .map_err(|e| failed("fcntl(F_ADD_SEALS)", "the library needs Linux 5.1 or later")(e.into()))?;
        Ok(Self { file, mapping })
    }

    /// What to pass to all peers.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// With what all peers passed (nothing at the own place): the buffer. `number` counts the group's buffers, `turn` its
    /// lives.
    pub fn join<T: Element>(
        self,
        rank: Rank,
        files: Vec<Option<OwnedFd>>,
        count: usize,
        number: u32,
        turn: u32,
    ) -> Result<Registered<T>> {
        let bytes = self.mapping.bytes();
        let map = |(peer, file): (Rank, Option<OwnedFd>)| {
            let Some(file) = file else { return Ok(None) };
            let corrupt = |what: String| Error::Corrupt { rank, peer, what, endpoint: None };
            check_sealed(file.as_fd(), "a buffer", bytes, ONE_WRITER).map_err(corrupt)?;
            Mapping::new(file.as_fd(), 0, bytes, Access::Read).map(Some).map_err(failed("mmap", HINT))
        };
        let peers = files.into_iter().enumerate().map(map).collect::<Result<Vec<_>>>()?;
        let mut places = Places([std::ptr::null(); MAX_RANKS]);
        for (peer, (place, mapping)) in places.0.iter_mut().zip(&peers).enumerate() {
            let mapping = if peer == rank { Some(&self.mapping) } else { mapping.as_ref() };
            *place = mapping.map_or(std::ptr::null(), |m| m.start().as_ptr().cast_const());
        }
        Ok(Registered { own: self.mapping, peers, places: Arc::new(places), count, number, turn, life: PhantomData })
    }
}

impl<T: Element> Registered<T> {
    /// Which of the group's buffers it is: all ranks register in the same order.
    ///
    /// ```
    /// pcieipc::group::of_threads(2, |mut group| {
    ///     let minute = std::time::Duration::from_secs(60);
    ///     let (first, second) = (group.register::<u8>(10, minute).unwrap(), group.register::<u8>(10, minute).unwrap());
    ///     assert_eq!((first.number(), second.number()), (0, 1));
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The life of the group that it belongs to.
    pub(crate) fn turn(&self) -> u32 {
        self.turn
    }

    /// How many ranks share it.
    pub(crate) fn ranks(&self) -> usize {
        self.peers.len()
    }

    /// Where each rank's buffer lies in this process.
    pub(crate) fn places(&self) -> &Arc<Places> {
        &self.places
    }
}

impl<T: Element> Deref for Registered<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: the mapping is page-aligned and holds `count` elements, every bit pattern of which is a T. The file was
        // sealed against further writable mappings, so only this value's owner writes it.
        unsafe { std::slice::from_raw_parts(self.own.start().as_ptr().cast(), self.count) }
    }
}

impl<T: Element> DerefMut for Registered<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; peers only read, and only during a collective, which borrows the buffer exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.own.start().as_ptr().cast(), self.count) }
    }
}

/// The same buffer for all ranks of a group that lives in one process: for tests and examples.
///
/// ```
/// let mut buffers = pcieipc::registered::in_one_process::<f32>(2, 1000)?;
/// buffers[0].fill(1.0);
/// assert_eq!(buffers[1].len(), 1000);
/// # Ok::<(), pcieipc::Error>(())
/// ```
///
/// # Errors
/// `System` when there is no memory.
pub fn in_one_process<T: Element>(ranks: usize, count: usize) -> Result<Vec<Registered<T>>> {
    let offers = (0..ranks).map(|_| Offer::new(count * size_of::<T>())).collect::<Result<Vec<_>>>()?;
    let copy = |offer: &Offer| offer.file().try_clone_to_owned().map_err(failed("dup", "raise the limit of open files"));
    let files = (0..ranks)
        .map(|rank| offers.iter().enumerate().map(|(r, o)| if r == rank { Ok(None) } else { copy(o).map(Some) }).collect())
        .collect::<Result<Vec<Vec<_>>>>()?;
    offers.into_iter().zip(files).enumerate().map(|(rank, (offer, files))| offer.join(rank, files, count, 0, 0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_rank_writes_the_others_see_and_can_not_change() {
        let mut buffers = in_one_process::<u32>(2, 5000).unwrap();
        buffers[0][4999] = 7;
        let there = buffers[1].places().0[0].cast::<u32>();
        // SAFETY: 5000 elements are mapped there, and nobody writes now.
        assert_eq!(unsafe { there.add(4999).read() }, 7);
        assert_eq!(buffers[1].len(), 5000);
        let offer = Offer::new(64).unwrap();
        assert!(Mapping::new(offer.file(), 0, 64, Access::ReadWrite).is_err());
    }

    #[test]
    fn a_peers_buffer_that_may_shrink_or_lose_pages_or_is_shorter_is_refused() {
        let short = Offer::new(4096).unwrap().file().try_clone_to_owned().unwrap();
        let error = Offer::new(8192).unwrap().join::<u8>(0, vec![None, Some(short)], 8192, 0, 0).unwrap_err();
        assert!(matches!(error, Error::Corrupt { peer: 1, .. }), "{error}");
        let loose = memfd_create("test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&loose, 8192).unwrap();
        let join = || {
            let theirs = loose.try_clone().unwrap();
            Offer::new(8192).unwrap().join::<u8>(0, vec![None, Some(theirs)], 8192, 0, 0)
        };
        let error = join().unwrap_err();
        assert!(matches!(&error, Error::Corrupt { what, .. } if what.contains("shrink")), "{error}");
        fcntl(&loose, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
        let error = join().unwrap_err();
        assert!(matches!(&error, Error::Corrupt { peer: 1, what, .. } if what.contains("holes")), "{error}");
        fcntl(&loose, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_FUTURE_WRITE)).unwrap();
        join().unwrap();
    }
}
