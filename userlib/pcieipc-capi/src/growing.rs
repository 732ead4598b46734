// SPDX-License-Identifier: MIT OR Apache-2.0
//! Structs that begin with their size, so that later versions can add fields at their end.

use std::mem::MaybeUninit;

use pcieipc::Error;

use crate::status::bad;

/// No version's struct is longer.
const LONGEST: usize = 4096;

/// A struct that later versions add fields to.
///
/// # Safety
/// It begins with its size in bytes, a `usize`, and zero in all other bytes is good.
pub(crate) unsafe trait Growing: Copy {
    /// As errors call it.
    const NAME: &'static str;
    /// How many bytes its first version had. Never changes.
    const OLDEST: usize;
}

/// How many bytes the caller's struct has.
///
/// # Safety
/// `at` is valid for reads of its first field.
unsafe fn size<T: Growing>(at: *const T) -> Result<usize, Error> {
    // SAFETY: the caller's promise.
    let size = unsafe { at.cast::<usize>().read() };
    if !(T::OLDEST..=LONGEST).contains(&size) {
        return Err(bad(format!("{}.size is {size}: set it to the size of the struct, at least {}", T::NAME, T::OLDEST)));
    }
    Ok(size)
}

/// What the caller gives. Fields that its version had not are zero; what its version has beyond this one's must be.
///
/// # Safety
/// `at` is NULL or valid for reads of as many bytes as its first field says.
pub(crate) unsafe fn read<T: Growing>(at: *const T) -> Result<T, Error> {
    if at.is_null() {
        return Err(bad(format!("{} is NULL", T::NAME)));
    }
    // SAFETY: the caller's promise.
    let size = unsafe { size(at)? };
    let (mut value, known) = (MaybeUninit::<T>::zeroed(), size.min(size_of::<T>()));
    // SAFETY: so many bytes are there, and fit.
    unsafe { value.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(at.cast(), known) };
    for beyond in known..size {
        // SAFETY: below the size that the caller promises.
        if unsafe { at.cast::<u8>().add(beyond).read() } != 0 {
            return Err(bad(format!("{} has a field at byte {beyond} that this library does not know; it is too old", T::NAME)));
        }
    }
    // SAFETY: all of it is zero or the caller's, as the trait promises good.
    Ok(unsafe { value.assume_init() })
}

/// Stores to the caller's struct what it has room for. Its size stays, and so does what is beyond this version's.
///
/// # Safety
/// `to` is NULL or valid for writes of as many bytes as its first field says.
pub(crate) unsafe fn write<T: Growing>(to: *mut T, value: &T) -> Result<(), Error> {
    if to.is_null() {
        return Err(bad(format!("{} is NULL", T::NAME)));
    }
    // SAFETY: the caller's promise.
    let known = unsafe { size(to.cast_const())? }.min(size_of::<T>());
    let head = size_of::<usize>();
    // SAFETY: behind the first field so many bytes are there in both, as `OLDEST` is no less.
    unsafe {
        let from = std::ptr::from_ref(value).cast::<u8>().add(head);
        to.cast::<u8>().add(head).copy_from_nonoverlapping(from, known - head);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Old {
        size: usize,
        a: u64,
    }
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct New {
        size: usize,
        a: u64,
        b: u64,
    }
    // SAFETY: integers.
    unsafe impl Growing for Old {
        const NAME: &'static str = "old";
        const OLDEST: usize = size_of::<Old>();
    }
    // SAFETY: integers.
    unsafe impl Growing for New {
        const NAME: &'static str = "new";
        const OLDEST: usize = size_of::<Old>();
    }

    #[test]
    fn a_program_of_an_older_version_goes_on_working_and_nothing_is_touched_beyond_its_struct() {
        let old = [Old { size: size_of::<Old>(), a: 7 }, Old { size: 99, a: 99 }];
        // SAFETY: its own size is all that is read.
        let read = unsafe { read(old.as_ptr().cast::<New>()) }.unwrap();
        assert_eq!(read, New { size: size_of::<Old>(), a: 7, b: 0 });
        let mut out = [Old { size: size_of::<Old>(), a: 0 }, Old { size: 99, a: 99 }];
        // SAFETY: the same for what is written.
        unsafe { write(out.as_mut_ptr().cast(), &New { size: 1, a: 5, b: 6 }) }.unwrap();
        assert_eq!(out, [Old { size: size_of::<Old>(), a: 5 }, Old { size: 99, a: 99 }]);
    }

    #[test]
    fn a_program_of_a_newer_version_works_if_it_asks_for_nothing_new() {
        let mut new = New { size: size_of::<New>(), a: 7, b: 0 };
        // SAFETY: all of it is there.
        let read = |new: &New| unsafe { read(std::ptr::from_ref(new).cast::<Old>()) };
        assert_eq!(read(&new).unwrap(), Old { size: size_of::<New>(), a: 7 });
        new.b = 1 << 40;
        assert!(matches!(read(&new), Err(Error::Argument(why)) if why.contains("does not know")));
        // SAFETY: as above.
        unsafe { write(std::ptr::from_mut(&mut new).cast(), &Old { size: 1, a: 5 }) }.unwrap();
        assert_eq!(new, New { size: size_of::<New>(), a: 5, b: 1 << 40 });
    }

    #[test]
    fn sizes_that_no_version_has_are_refused() {
        for size in [0, 1, size_of::<Old>() - 1, LONGEST + 1, usize::MAX] {
            let mut new = New { size, a: 1, b: 2 };
            // SAFETY: nothing but the size is read.
            unsafe {
                assert!(read(&new).is_err() && write(&mut new, &New { size: 0, a: 3, b: 4 }).is_err(), "{size}");
            }
            assert_eq!(new, New { size, a: 1, b: 2 });
        }
        // SAFETY: NULL is caught.
        unsafe {
            assert!(read::<New>(std::ptr::null()).is_err() && write(std::ptr::null_mut(), &New { size: 0, a: 0, b: 0 }).is_err())
        };
    }
}
