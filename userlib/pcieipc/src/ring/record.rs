// SPDX-License-Identifier: MIT OR Apache-2.0
//! A record as it lies in the data area: one line of header, then the payload, then padding to the next line.

use std::{
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{LINE, Violation};
use crate::link::RecordHeader;

/// Bytes of a record before its payload.
pub const RECORD_HEADER_BYTES: usize = LINE;

const RECORD: u32 = 0x5049_5043;
const SKIP: u32 = 0x5049_5053;

/// What a header line says, already checked against the room there is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Entry {
    Record { header: RecordHeader, len: usize, span: u64 },
    Skip { span: u64 },
}

/// Bytes that a record with a payload of `len` takes in the ring.
pub(super) const fn span(len: usize) -> u64 {
    (RECORD_HEADER_BYTES + len.next_multiple_of(LINE)) as u64
}

/// The words of a header line that carry something; the rest of the line is reserved.
pub(super) fn encode(index: u64, header: RecordHeader, len: usize) -> [u64; 4] {
    [
        u64::from(RECORD) | (len as u64) << 32,
        u64::from(header.epoch) | u64::from(header.step) << 32 | u64::from(header.shard) << 48,
        u64::from(header.call) | u64::from(header.crc) << 32,
        index,
    ]
}

/// As [`encode`], for the rest of the data area before the wrap.
pub(super) fn encode_skip(index: u64, span: u64) -> [u64; 4] {
    [u64::from(SKIP) | (span - RECORD_HEADER_BYTES as u64) << 32, 0, 0, index]
}

/// Stores a header line.
///
/// # Safety
/// `at` is 8-byte aligned and 32 bytes from it on may be written by this process.
pub(super) unsafe fn store(at: NonNull<u8>, words: [u64; 4]) {
    for (i, word) in words.into_iter().enumerate() {
        // SAFETY: inside the 32 bytes that the caller promises. Atomic, because a hostile reader may have it mapped writable.
        unsafe { AtomicU64::from_ptr(at.cast::<u64>().add(i).as_ptr()) }.store(word.to_le(), Ordering::Relaxed);
    }
}

/// Reads a header line once and checks it: `available` bytes are published from `index` on, `to_wrap` of the data area's
/// `capacity` lie before its end.
///
/// # Safety
/// `at` is 8-byte aligned and 32 bytes from it on may be read.
pub(super) unsafe fn load(at: NonNull<u8>, index: u64, available: u64, to_wrap: u64, capacity: u64) -> Result<Entry, Violation> {
    let words: [u64; 4] = std::array::from_fn(|i| {
        // SAFETY: inside the 32 bytes that the caller promises. Atomic loads never write, so a read-only mapping will do.
        u64::from_le(unsafe { AtomicU64::from_ptr(at.cast::<u64>().add(i).as_ptr()) }.load(Ordering::Relaxed))
    });
    let (kind, len, position) = (words[0] as u32, (words[0] >> 32) as usize, words[3]);
    let room = available.min(to_wrap);
    if position != index || !matches!(kind, RECORD | SKIP) {
        return Err(Violation::NotARecord { index, kind, position });
    }
    // `len` comes from 32 bits, so this does not overflow 64.
    let span = span(len);
    if span > room {
        return Err(Violation::RecordTooLong { index, len, room });
    }
    if kind == SKIP {
        return if span == to_wrap && span < capacity {
            Ok(Entry::Skip { span })
        } else {
            Err(Violation::BadSkip { index, len })
        };
    }
    let header = RecordHeader {
        epoch: words[1] as u32,
        step: (words[1] >> 32) as u16,
        shard: (words[1] >> 48) as u16,
        call: words[2] as u32,
        crc: (words[2] >> 32) as u32,
    };
    Ok(Entry::Record { header, len, span })
}
