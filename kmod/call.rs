// SPDX-License-Identifier: GPL-2.0

//! One call of the ABI: the structure comes in, a handler works on a copy, the structure goes out.
//!
//! No lock is held while user memory is touched: a page of it may be served by userfaultfd or FUSE and never arrive.

use crate::uapi::Record;
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    uaccess::{UserPtr, UserSlice},
};

/// A structure copied from the caller, and where it goes back to.
pub(crate) struct Call<T: Record> {
    address: UserPtr,
    user_size: usize,
    /// The copy; a handler reads its inputs and writes its outputs here.
    pub(crate) record: T,
}

impl<T: Record> Call<T> {
    /// Reads the structure at `arg`.
    ///
    /// # Errors
    ///
    /// `EFAULT` when it cannot be read, `EINVAL` when it is shorter and not its first version, `E2BIG` when it is longer than
    /// what is known here and the rest is not zero.
    pub(crate) fn read(arg: usize) -> Result<Self> {
        let address = UserPtr::from_addr(arg);
        let user_size: u32 = UserSlice::new(address, size_of::<u32>()).reader().read()?;
        let user_size = user_size as usize;
        if user_size < size_of::<T>() && user_size != T::FIRST {
            return Err(EINVAL);
        }
        if user_size > PAGE_SIZE {
            return Err(E2BIG);
        }
        let mut reader = UserSlice::new(address, user_size).reader();
        let mut record = T::default();
        {
            let bytes = bytes_mut(&mut record);
            let known = user_size.min(bytes.len());
            // What a shorter structure lacks stays zero.
            reader.read_slice(&mut bytes[..known])?;
            // The size was read twice; what was checked is what counts.
            bytes[..size_of::<u32>()].copy_from_slice(&(user_size as u32).to_ne_bytes());
        }
        let mut tail = [0u8; 64];
        while !reader.is_empty() {
            let part = reader.len().min(tail.len());
            reader.read_slice(&mut tail[..part])?;
            if tail[..part].iter().any(|byte| *byte != 0) {
                return Err(E2BIG);
            }
        }
        Ok(Self { address, user_size, record })
    }

    /// Writes the structure back, no more than the caller has.
    ///
    /// # Errors
    ///
    /// `EFAULT` when it cannot be written.
    pub(crate) fn write(&self) -> Result {
        let bytes = bytes(&self.record);
        let length = bytes.len().min(self.user_size);
        UserSlice::new(self.address, length).writer().write_slice(&bytes[..length])
    }
}

/// Reads a structure, lets `handler` work on it, writes it back.
///
/// # Errors
///
/// Those of [`Call::read`], [`Call::write`] and of the handler; after an error of the handler nothing is written.
pub(crate) fn run<T: Record>(arg: usize, handler: impl FnOnce(&mut T) -> Result) -> Result {
    let mut call = Call::<T>::read(arg)?;
    handler(&mut call.record)?;
    call.write()
}

/// Reads a structure and lets `handler` act on it. Nothing goes back, so that a call that has acted cannot fail afterwards.
///
/// # Errors
///
/// Those of [`Call::read`] and of the handler.
pub(crate) fn order<T: Record>(arg: usize, handler: impl FnOnce(&T) -> Result) -> Result {
    handler(&Call::<T>::read(arg)?.record)
}

/// Like [`run`], but `undo` takes back what the handler did when the caller cannot be told.
pub(crate) fn run_or_undo<T: Record>(arg: usize, handler: impl FnOnce(&mut T) -> Result, undo: impl FnOnce(&T)) -> Result {
    let mut call = Call::<T>::read(arg)?;
    handler(&mut call.record)?;
    call.write().inspect_err(|_| undo(&call.record))
}

/// Refuses reserved fields and flags that are not zero.
pub(crate) fn must_be_zero(fields: &[u64]) -> Result {
    if fields.iter().all(|field| *field == 0) {
        Ok(())
    } else {
        Err(EINVAL)
    }
}

fn bytes<T: Record>(record: &T) -> &[u8] {
    // SAFETY: A `Record` has no padding, so all its bytes are initialized; the slice borrows from `record`.
    unsafe { core::slice::from_raw_parts(core::ptr::from_ref(record).cast::<u8>(), size_of::<T>()) }
}

fn bytes_mut<T: Record>(record: &mut T) -> &mut [u8] {
    // SAFETY: As in `bytes`, and every bit pattern is a value of a `Record`; the slice borrows from `record` exclusively.
    unsafe { core::slice::from_raw_parts_mut(core::ptr::from_mut(record).cast::<u8>(), size_of::<T>()) }
}
