// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rings in sealed shared memory: no module, no hardware, any Linux.
//!
//! For each peer a rank makes one memory file that it alone writes: the tail page of the ring to the peer, the head page of
//! the ring from it, and the data of the ring to it. It maps the file, then seals it, so that nobody can map it writable
//! again, shrink it, grow it or punch holes into it, and passes it on. So a peer can neither write what is not its own nor take
//! pages away under a reader (SIGBUS).

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
};

use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
    unistd::ftruncate,
};

use super::Wire;
use crate::{
    error::{Error, Rank, Result},
    ring::{IndexPage, MIN_DATA_BYTES, Memory},
    sys::{Access, Bell, Mapping, ONE_WRITER, check_sealed, failed},
};

/// Where the data starts in a memory file; the tail page is at 0 and the head page at half of it. Fits every page size of a processor
/// without caring which it is, since one mapping covers all of the file.
const DATA_OFFSET: usize = 2 * size_of::<IndexPage>();
const HEAD_OFFSET: usize = size_of::<IndexPage>();

const SEALS: SealFlag = ONE_WRITER.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_SEAL);

/// The memory that one rank writes for one peer.
#[derive(Debug)]
pub struct Own {
    file: OwnedFd,
    mapping: Arc<Mapping>,
    data_bytes: usize,
}

impl Own {
    /// A ring of `data_bytes` towards a peer; all zero.
    ///
    /// # Errors
    /// `Argument` when `data_bytes` is no power of two or too small; `System` when there is no memory.
    pub fn new(data_bytes: usize) -> Result<Self> {
        check_size(data_bytes)?;
        let hint = "free some memory or make the rings smaller";
        let file = memfd_create("pcieipc-ring", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)
            .map_err(|e| failed("memfd_create", hint)(e.into()))?;
        let bytes = DATA_OFFSET + data_bytes;
        ftruncate(&file, bytes as i64).map_err(|e| failed("ftruncate", hint)(e.into()))?;
        // The peer, which reads the data, touches it first in `join`: so it lies on the peer's memory node.
        let mapping = Mapping::untouched(file.as_fd(), 0, bytes, Access::ReadWrite).map_err(failed("mmap", hint))?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(SEALS))
            .map_err(|e| failed("fcntl(F_ADD_SEALS)", "the library needs Linux 5.1 or later")(e.into()))?;
        Ok(Self { file, mapping: Arc::new(mapping), data_bytes })
    }

    /// What to pass to the peer.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Maps what the peer passed; checks that it can neither shrink nor be another size. Gives the ring towards the peer and
    /// the ring from it.
    ///
    /// # Errors
    /// `Corrupt` when the peer's file is not sealed or not as large as agreed; `System` when it can not be mapped.
    pub fn join(self, rank: Rank, peer: Rank, theirs: OwnedFd) -> Result<(Outward, Inward)> {
        let corrupt = |what: String| Error::Corrupt { rank, peer, what, endpoint: None };
        let bytes = DATA_OFFSET + self.data_bytes;
        check_sealed(theirs.as_fd(), "a memory file", bytes, ONE_WRITER).map_err(corrupt)?;
        let theirs = Mapping::new(theirs.as_fd(), 0, bytes, Access::Read)
            .map_err(failed("mmap", "free some memory or make the rings smaller"))?;
        let theirs = Arc::new(theirs);
        let outward = Outward { mine: self.mapping.clone(), theirs: theirs.clone(), data_bytes: self.data_bytes };
        Ok((outward, Inward { mine: self.mapping, theirs, data_bytes: self.data_bytes }))
    }
}

/// Whether rings of `data_bytes` are possible.
pub(crate) fn check_size(data_bytes: usize) -> Result<()> {
    if !data_bytes.is_power_of_two() || !(MIN_DATA_BYTES..=1 << 30).contains(&data_bytes) {
        return Err(Error::Argument(format!(
            "rings of {data_bytes} bytes: take a power of two from {MIN_DATA_BYTES} to {}",
            1usize << 30
        )));
    }
    Ok(())
}

/// The ring towards a peer.
#[derive(Debug)]
pub struct Outward {
    mine: Arc<Mapping>,
    theirs: Arc<Mapping>,
    data_bytes: usize,
}

/// The ring from a peer.
#[derive(Debug)]
pub struct Inward {
    mine: Arc<Mapping>,
    theirs: Arc<Mapping>,
    data_bytes: usize,
}

fn page(mapping: &Mapping, offset: usize) -> &IndexPage {
    // SAFETY: both files are at least DATA_OFFSET long and mapped while the mapping lives; offsets are multiples of 64; a page
    // is made of atomics, and one that is mapped read-only belongs to the other side, so this side only loads from it.
    unsafe { mapping.start().add(offset).cast::<IndexPage>().as_ref() }
}

fn data(mapping: &Mapping) -> NonNull<u8> {
    // SAFETY: the mapping is longer than DATA_OFFSET.
    unsafe { mapping.start().add(DATA_OFFSET) }
}

// SAFETY: the own file is mapped writable and is as long as promised; its tail page is written through this value only, since
// `Own::join` consumes itself and makes one. `theirs` is as long, checked in `join`, and sealed against shrinking.
unsafe impl Memory for Outward {
    fn data(&self) -> NonNull<u8> {
        data(&self.mine)
    }
    fn data_bytes(&self) -> usize {
        self.data_bytes
    }
    fn tail(&self) -> &IndexPage {
        page(&self.mine, 0)
    }
    fn head(&self) -> &IndexPage {
        page(&self.theirs, HEAD_OFFSET)
    }
}

// SAFETY: as for Outward, with the head page of the own file.
unsafe impl Memory for Inward {
    fn data(&self) -> NonNull<u8> {
        data(&self.theirs)
    }
    fn data_bytes(&self) -> usize {
        self.data_bytes
    }
    fn tail(&self) -> &IndexPage {
        page(&self.theirs, 0)
    }
    fn head(&self) -> &IndexPage {
        page(&self.mine, HEAD_OFFSET)
    }
}

/// The bells of all peers.
#[derive(Debug)]
pub struct Shm {
    bells: Vec<Option<Bell>>,
}

impl Shm {
    /// One bell a rank, none at the own place.
    pub fn new(bells: Vec<Option<Bell>>) -> Self {
        Self { bells }
    }

    fn ring(&self, peer: Rank) -> Result<()> {
        match self.bells.get(peer).and_then(Option::as_ref) {
            Some(bell) => bell.ring().map_err(failed("write to an eventfd", "this should not happen")),
            None => Err(Error::Argument(format!("rank {peer} has no bell"))),
        }
    }
}

impl Wire for Shm {
    type Tx = Outward;
    type Rx = Inward;

    fn ring_reader(&mut self, peer: Rank) -> Result<()> {
        self.ring(peer)
    }
    fn ring_writer(&mut self, peer: Rank) -> Result<()> {
        self.ring(peer)
    }
    fn status(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use nix::{
        fcntl::{FallocateFlags, fallocate},
        sys::stat::fstat,
    };

    use super::*;

    fn pair() -> ((Outward, Inward), (Outward, Inward)) {
        let (a, b) = (Own::new(MIN_DATA_BYTES).unwrap(), Own::new(MIN_DATA_BYTES).unwrap());
        let (to_b, to_a) = (a.file().try_clone_to_owned().unwrap(), b.file().try_clone_to_owned().unwrap());
        (a.join(0, 1, to_a).unwrap(), b.join(1, 0, to_b).unwrap())
    }

    #[test]
    fn a_record_crosses_between_two_mappings() {
        use crate::ring::{Reader, Writer};
        let ((out, _), (_, inward)) = pair();
        let (mut writer, mut reader) = (Writer::new(out), Reader::new(inward));
        let mut payload = writer.try_reserve(5).unwrap().unwrap();
        // SAFETY: five bytes are reserved.
        unsafe { payload.as_mut_ptr().copy_from_nonoverlapping(b"hello".as_ptr(), 5) };
        assert!(!writer.commit(Default::default(), 5));
        let (_, payload) = reader.try_receive().unwrap().unwrap();
        // SAFETY: nobody writes it now.
        assert_eq!(unsafe { std::slice::from_raw_parts(payload.as_ptr(), payload.len()) }, b"hello");
    }

    #[test]
    fn a_ring_is_placed_by_the_rank_that_reads_it() {
        let own = Own::new(64 << 10).unwrap();
        let file = own.file().try_clone_to_owned().unwrap();
        let present = || fstat(&file).unwrap().st_blocks;
        assert_eq!(present(), 0, "the writer touched it");
        let theirs = Own::new(64 << 10).unwrap();
        let _reader = theirs.join(1, 0, own.file().try_clone_to_owned().unwrap()).unwrap();
        assert!(present() * 512 >= 64 << 10, "the reader did not");
    }

    #[test]
    fn what_was_passed_can_not_be_mapped_writable_or_shrunk() {
        let own = Own::new(MIN_DATA_BYTES).unwrap();
        let passed = own.file().try_clone_to_owned().unwrap();
        assert!(Mapping::new(passed.as_fd(), 0, 4096, Access::ReadWrite).is_err());
        assert!(ftruncate(&passed, 0).is_err());
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        assert!(fallocate(own.file(), punch, 0, 4096).is_err());
        assert!(nix::unistd::write(&passed, b"x").is_err());
    }

    #[test]
    fn a_file_that_may_shrink_or_lose_pages_or_has_another_size_is_refused() {
        let theirs = memfd_create("test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&theirs, (DATA_OFFSET + MIN_DATA_BYTES) as i64).unwrap();
        let join = || Own::new(MIN_DATA_BYTES).unwrap().join(0, 1, theirs.try_clone().unwrap());
        let error = join().unwrap_err();
        assert!(matches!(&error, Error::Corrupt { peer: 1, what, .. } if what.contains("shrink")), "{error}");
        fcntl(&theirs, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
        let error = join().unwrap_err();
        assert!(matches!(&error, Error::Corrupt { peer: 1, what, .. } if what.contains("holes")), "{error}");

        let theirs = Own::new(2 * MIN_DATA_BYTES).unwrap();
        let error = Own::new(MIN_DATA_BYTES).unwrap().join(0, 1, theirs.file().try_clone_to_owned().unwrap()).unwrap_err();
        assert!(matches!(&error, Error::Corrupt { what, .. } if what.contains("bytes instead of")), "{error}");

        let theirs = std::fs::File::open("/proc/self/exe").unwrap();
        let error = Own::new(MIN_DATA_BYTES).unwrap().join(0, 1, theirs.into()).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }

    #[test]
    fn sizes_that_are_no_ring_are_refused() {
        for bytes in [0, 1, 4096, MIN_DATA_BYTES + 1, 1 << 31] {
            assert!(matches!(Own::new(bytes), Err(Error::Argument(_))), "{bytes}");
        }
    }
}
