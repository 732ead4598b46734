// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checked mode: every record proves that it is the one that was sent, on this link, for this step.

use crate::{
    error::{Error, Rank},
    link::RecordHeader,
};

/// CRC-32C over who sends to whom, all that the header says, and the payload. So a shard that is torn, misplaced, repeated in
/// another call or of another link does not match, even where its bytes are whole.
///
/// # Safety
/// `len` bytes from `payload` on may be read. Nobody changes them meanwhile, or the caller does not mind any checksum.
pub unsafe fn checksum(from: Rank, to: Rank, header: RecordHeader, payload: *const u8, len: usize) -> u32 {
    let mut about = [0u8; 32];
    let words = [
        from as u32 | (to as u32) << 16,
        header.epoch,
        u32::from(header.step) | u32::from(header.shard) << 16,
        header.call,
        len as u32,
    ];
    for (to, word) in about.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    let start = crc32c::crc32c(&about);
    if len == 0 {
        return start;
    }
    // SAFETY: as the caller promises; a record's payload is never null.
    crc32c::crc32c_append(start, unsafe { std::slice::from_raw_parts(payload, len) })
}

/// The answer for a record whose checksum does not match.
pub fn corrupt(rank: Rank, peer: Rank, header: RecordHeader, len: usize) -> Error {
    Error::Corrupt {
        rank,
        peer,
        what: format!(
            "record {} of shard {} in call {} ({len} bytes) does not match its checksum",
            header.step, header.shard, header.epoch
        ),
        endpoint: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(from: Rank, to: Rank, header: RecordHeader, payload: &[u8]) -> u32 {
        // SAFETY: a slice.
        unsafe { checksum(from, to, header, payload.as_ptr(), payload.len()) }
    }

    #[test]
    fn every_field_and_every_byte_counts() {
        let header = RecordHeader { epoch: 7, step: 3, shard: 2, call: 9, crc: 0 };
        let payload: Vec<u8> = (0..200).collect();
        let right = of(1, 2, header, &payload);
        assert_eq!(right, of(1, 2, RecordHeader { crc: 5, ..header }, &payload), "the field that holds it does not");
        for changed in [
            of(2, 1, header, &payload),
            of(1, 3, header, &payload),
            of(1, 2, RecordHeader { epoch: 8, ..header }, &payload),
            of(1, 2, RecordHeader { step: 4, ..header }, &payload),
            of(1, 2, RecordHeader { shard: 3, ..header }, &payload),
            of(1, 2, RecordHeader { call: 8, ..header }, &payload),
            of(1, 2, header, &payload[..199]),
        ] {
            assert_ne!(right, changed);
        }
        for at in 0..payload.len() {
            let mut torn = payload.clone();
            torn[at] ^= 1;
            assert_ne!(right, of(1, 2, header, &torn), "byte {at}");
        }
    }
}
