// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether a peer's memory file keeps its pages under a reader.

use std::os::fd::BorrowedFd;

use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::{
        stat::fstat,
        statfs::{HUGETLBFS_MAGIC, fstatfs},
    },
};

/// What a file must be sealed against that its owner alone writes. Who may still map it writable may also punch holes into it, and so may the
/// owner itself; after the second seal nobody can, while the owner's own mapping stays writable.
pub(crate) const ONE_WRITER: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_FUTURE_WRITE);

/// Whether `file`, a `name` in an error, is `bytes` long, has those seals, and has pages that the kernel makes when they are missed: of huge
/// pages there may be none, and who then looks at a hole is ended by SIGBUS.
///
/// # Errors
/// What is wrong, in words.
pub(crate) fn check_sealed(file: BorrowedFd<'_>, name: &str, bytes: usize, least: SealFlag) -> Result<(), String> {
    let seals = fcntl(file, FcntlArg::F_GET_SEALS).map_err(|e| format!("{name} without seals ({e})"))?;
    let missing = least.difference(SealFlag::from_bits_retain(seals));
    if missing.contains(SealFlag::F_SEAL_SHRINK) {
        return Err(format!("{name} that may shrink"));
    }
    if !missing.is_empty() {
        return Err(format!("{name} that others may write or punch holes into"));
    }
    let system = fstatfs(file).map_err(|e| format!("{name} that tells nothing of itself ({e})"))?;
    if system.filesystem_type() == HUGETLBFS_MAGIC {
        return Err(format!("{name} of huge pages"));
    }
    let size = fstat(file).map_err(|e| format!("{name} that tells nothing of itself ({e})"))?.st_size;
    if u64::try_from(size) != Ok(bytes as u64) {
        return Err(format!("{name} of {size} bytes instead of {bytes}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use nix::{
        errno::Errno,
        fcntl::{FallocateFlags, fallocate},
        sys::memfd::{MFdFlags, memfd_create},
        unistd::ftruncate,
    };

    use super::*;
    use crate::sys::{Access, Mapping};

    const BYTES: usize = 2 << 20;

    fn file(flags: MFdFlags, seals: SealFlag) -> OwnedFd {
        let file = memfd_create("test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING | flags).unwrap();
        ftruncate(&file, BYTES as i64).unwrap();
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
        file
    }

    fn check(file: &OwnedFd) -> Result<(), String> {
        check_sealed(file.as_fd(), "a file", BYTES, ONE_WRITER)
    }

    #[test]
    fn nobody_can_take_pages_from_a_file_that_is_accepted_and_its_owner_still_writes_it() {
        let own = memfd_create("test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&own, BYTES as i64).unwrap();
        let writer = Mapping::new(own.as_fd(), 0, BYTES, Access::ReadWrite).unwrap();
        let punch = || {
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            fallocate(&own, flags, 0, BYTES as i64)
        };
        let write = |value: u8| {
            // SAFETY: the mapping is longer than a byte, and nobody else uses it now.
            unsafe { writer.start().write_volatile(value) }
        };
        // SAFETY: as above.
        let read = |mapping: &Mapping| unsafe { mapping.start().read_volatile() };

        // The attack: what was there is gone under the reader.
        fcntl(&own, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
        let reader = Mapping::new(own.as_fd(), 0, BYTES, Access::Read).unwrap();
        write(7);
        assert_eq!(read(&reader), 7);
        punch().unwrap();
        assert_eq!(read(&reader), 0);
        assert_eq!(check(&own).unwrap_err(), "a file that others may write or punch holes into");

        fcntl(&own, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_FUTURE_WRITE)).unwrap();
        check(&own).unwrap();
        write(9);
        assert_eq!(punch(), Err(Errno::EPERM));
        assert_eq!(read(&reader), 9);
        assert!(Mapping::new(own.as_fd(), 0, BYTES, Access::ReadWrite).is_err());
    }

    #[test]
    fn files_of_other_sizes_with_fewer_seals_or_of_huge_pages_are_refused() {
        let none = MFdFlags::empty();
        check(&file(none, ONE_WRITER)).unwrap();
        check(&file(none, ONE_WRITER | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL)).unwrap();
        let refused = |file: OwnedFd| check(&file).unwrap_err();
        assert_eq!(refused(file(none, SealFlag::F_SEAL_FUTURE_WRITE)), "a file that may shrink");
        let longer = file(none, SealFlag::F_SEAL_FUTURE_WRITE);
        ftruncate(&longer, BYTES as i64 + 1).unwrap();
        fcntl(&longer, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
        assert_eq!(refused(longer), format!("a file of {} bytes instead of {BYTES}", BYTES + 1));
        assert!(refused(std::fs::File::open("/proc/self/exe").unwrap().into()).starts_with("a file without seals"));
        // Takes a kernel that has huge pages, but none of them, since nothing is touched.
        if std::path::Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB").exists() {
            assert_eq!(refused(file(MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB, ONE_WRITER)), "a file of huge pages");
        }
    }
}
