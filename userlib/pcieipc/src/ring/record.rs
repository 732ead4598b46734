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
const SHORT: u32 = 0x5049_5054;
const SKIP: u32 = 0x5049_5053;

/// Where the payload of a short record starts: in the header's own line, so that a tiny message is one line and arrives in one.
pub(super) const SHORT_AT: usize = 32;

/// In the position word: the record is complete once this is seen, whatever the tail says.
pub(super) const COMPLETE: u64 = 1;
/// In the position word: the next header's position word was cleared before, so that it can be believed.
pub(super) const NEXT_CLEARED: u64 = 2;

/// Where the payload of a record starts whose room was taken for `len` bytes.
pub(super) const fn payload_at(len: usize, shorts: bool) -> usize {
    if shorts && len <= LINE - SHORT_AT { SHORT_AT } else { RECORD_HEADER_BYTES }
}

/// What a header line says, already checked against the room there is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Entry {
    Record { header: RecordHeader, payload: usize, len: usize, span: u64 },
    Skip { span: u64 },
}

/// Bytes that a record takes in the ring whose payload of `len` bytes starts at `payload`.
pub(super) const fn span(payload: usize, len: usize) -> u64 {
    (payload + len).next_multiple_of(LINE) as u64
}

/// The words of a header line that carry something; the last one is the position.
pub(super) fn encode(index: u64, header: RecordHeader, payload: usize, len: usize) -> [u64; 4] {
    [
        u64::from(if payload == SHORT_AT { SHORT } else { RECORD }) | (len as u64) << 32,
        u64::from(header.epoch) | u64::from(header.step) << 32 | u64::from(header.shard) << 48,
        u64::from(header.call) | u64::from(header.crc) << 32,
        index,
    ]
}

/// As [`encode`], for the rest of the data area before the wrap.
pub(super) fn encode_skip(index: u64, span: u64) -> [u64; 4] {
    [u64::from(SKIP) | (span - RECORD_HEADER_BYTES as u64) << 32, 0, 0, index]
}

/// Stores the words of a header line but the position, which is stored last and tells that the record is there.
///
/// # Safety
/// `at` is 8-byte aligned and 24 bytes from it on may be written by this process.
pub(super) unsafe fn store(at: NonNull<u8>, words: [u64; 4]) {
    for (i, word) in words.into_iter().take(3).enumerate() {
        // SAFETY: inside the 24 bytes that the caller promises. Atomic, because a hostile reader may have it mapped writable.
        unsafe { AtomicU64::from_ptr(at.cast::<u64>().add(i).as_ptr()) }.store(word.to_le(), Ordering::Relaxed);
    }
}

/// Reads a header line once and checks it, whose position word was read already: `available` bytes are known to be there from `index` on,
/// `to_wrap` of the data area's `capacity` lie before its end.
///
/// # Safety
/// `at` is 8-byte aligned and 24 bytes from it on may be read.
pub(super) unsafe fn load(
    at: NonNull<u8>,
    position: u64,
    index: u64,
    available: u64,
    to_wrap: u64,
    capacity: u64,
) -> Result<Entry, Violation> {
    let words: [u64; 3] = std::array::from_fn(|i| {
        // SAFETY: inside the 24 bytes that the caller promises. Atomic loads never write, so a read-only mapping will do.
        u64::from_le(unsafe { AtomicU64::from_ptr(at.cast::<u64>().add(i).as_ptr()) }.load(Ordering::Relaxed))
    });
    let (kind, len) = (words[0] as u32, (words[0] >> 32) as usize);
    let room = available.min(to_wrap);
    if position & !(COMPLETE | NEXT_CLEARED) != index || !matches!(kind, RECORD | SHORT | SKIP) {
        return Err(Violation::NotARecord { index, kind, position });
    }
    let payload = if kind == SHORT { SHORT_AT } else { RECORD_HEADER_BYTES };
    // `len` comes from 32 bits, so this does not overflow 64.
    let span = span(payload, len);
    if span > room || kind == SHORT && span > LINE as u64 {
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
    Ok(Entry::Record { header, payload, len, span })
}
