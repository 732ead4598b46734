// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of users that the other ranks read where it lies: how it is offered, opened once, and closed before anyone frees it.
//!
//! Registration is collective, in three steps: every rank offers its memory or says why it can not; everyone opens what the others offered;
//! all hear of all. Either all have a registration then, or all have the same error and nothing is open.

use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Weak},
    time::Duration,
};

use pcieipc::{Error, Result, group::Group};

use crate::{
    abi::MAX_RANKS,
    driver::{Address, Device, Handle, Sharing},
};

/// Memory that all ranks have registered together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Registration(pub(crate) u32);

/// Most allocations that registered memory may span: each has a file, which every other rank has open for a moment.
const MAX_PIECES: usize = 512;
/// Files that one message carries.
const FILES: usize = 8;
const HANDLE: u8 = 1;
const PIECES: u8 = 2;

/// Another rank's allocations as this process has them open; dropping it closes them.
#[derive(Debug)]
pub struct Opened {
    device: Arc<dyn Device>,
    base: Address,
    /// Of memory that was mapped piece by piece, as files; otherwise empty.
    pieces: Vec<u64>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        // Fails only when the context is gone.
        let _ = if self.pieces.is_empty() { self.device.release(self.base) } else { self.device.unmap(self.base, &self.pieces) };
    }
}

/// What is open, by rank, the number of the first allocation there, which is never used again, and how far it goes: the same memory is
/// opened once, however many tensors in it are registered.
#[derive(Debug, Default)]
pub struct Cache(HashMap<(usize, u64, u64), Weak<Opened>>);

/// What a rank says of its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Offer {
    process: u32,
    at: Address,
    bytes: u64,
    /// Of its first allocation.
    buffer_id: u64,
    /// From the start of the first allocation to the registered memory, and to the end of the last allocation.
    offset: u64,
    span: u64,
    /// How many files follow; none for a handle.
    pieces: u16,
    way: std::result::Result<Handle, String>,
    by_files: bool,
}

impl Offer {
    fn to_bytes(&self) -> Vec<u8> {
        let mut all = Vec::new();
        all.extend(self.process.to_le_bytes());
        [self.at, self.bytes, self.buffer_id, self.offset, self.span].iter().for_each(|n| all.extend(n.to_le_bytes()));
        all.extend(self.pieces.to_le_bytes());
        match &self.way {
            Ok(handle) => {
                all.push(if self.by_files { PIECES } else { HANDLE });
                all.extend(handle);
            }
            Err(why) => {
                all.push(0);
                all.extend(why.bytes().take(1024));
            }
        }
        all
    }
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let (way, rest) = (*bytes.get(46)?, bytes.get(47..)?);
        Some(Self {
            process: u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?),
            at: number(4)?,
            bytes: number(12)?,
            buffer_id: number(20)?,
            offset: number(28)?,
            span: number(36)?,
            pieces: u16::from_le_bytes(bytes.get(44..46)?.try_into().ok()?),
            way: match way {
                HANDLE | PIECES => Ok(rest.try_into().ok()?),
                _ => Err(String::from_utf8_lossy(rest).into_owned()),
            },
            by_files: way == PIECES,
        })
    }
    /// Whether the numbers fit each other: they come from another process.
    fn is_sound(&self) -> bool {
        let inside = self.offset.checked_add(self.bytes).is_some_and(|end| end <= self.span);
        let files = usize::from(self.pieces);
        self.way.is_err() || inside && (self.by_files == (files > 0)) && files <= MAX_PIECES
    }
}

/// The allocations under a range, as files.
struct Files(Vec<(OwnedFd, u64)>);

/// What an error says, without the kind of error, which the one that all ranks get names.
fn reason(error: Error) -> String {
    match error {
        Error::Argument(why) => why,
        other => other.to_string(),
    }
}

/// Looks at memory of this rank, and makes what others need to open it.
fn offer(device: &dyn Device, at: Address, bytes: u64) -> (Offer, Files) {
    let mut offer = Offer {
        process: device.process(),
        at,
        bytes,
        buffer_id: 0,
        offset: 0,
        span: 0,
        pieces: 0,
        way: Err(String::new()),
        by_files: false,
    };
    let mut files = Files(Vec::new());
    offer.way = describe(device, &mut offer, &mut files).map_err(reason);
    if offer.way.is_err() {
        files.0.clear();
    }
    (offer, files)
}

fn describe(device: &dyn Device, offer: &mut Offer, files: &mut Files) -> Result<Handle> {
    let refuse = |why: String| Err(Error::Argument(why));
    let (at, bytes) = (offer.at, offer.bytes);
    let Some(end) = at.checked_add(bytes).filter(|_| bytes > 0) else {
        return refuse(format!("{bytes} bytes at {at:#x} are no memory"));
    };
    if at % 16 != 0 {
        return refuse(format!("registered memory must be aligned to 16 bytes, and {at:#x} is not"));
    }
    let first = device.about(at)?;
    if first.device != device.facts().ordinal {
        return refuse(format!("the memory lies on device {} and not on device {}", first.device, device.facts().ordinal));
    }
    (offer.buffer_id, offer.offset) = (first.buffer_id, at - first.base);
    match first.sharing {
        Sharing::No(why) => refuse(why.to_owned()),
        Sharing::Handle => {
            offer.span = first.bytes;
            if first.base + first.bytes < end {
                return refuse(format!("{bytes} bytes at {at:#x} go past the end of their allocation"));
            }
            device.export(first.base)
        }
        Sharing::File => {
            offer.by_files = true;
            let mut next = first;
            loop {
                if next.sharing != Sharing::File || next.bytes == 0 {
                    return refuse(format!("a part of the memory, at {:#x}, can not be exported as a file", next.base));
                }
                if files.0.len() == MAX_PIECES {
                    return refuse(format!("the memory spans more than {MAX_PIECES} allocations; register it in parts"));
                }
                files.0.push((device.export_file(next.base)?, next.bytes));
                let reached = next.base + next.bytes;
                if reached >= end {
                    offer.span = reached - first.base;
                    break;
                }
                next = device.about(reached)?;
                if next.base != reached {
                    return refuse(format!("the memory has a hole at {reached:#x}"));
                }
            }
            offer.pieces = files.0.len() as u16;
            Ok([0; 64])
        }
    }
}

/// Passes every rank's files to every other, some in each message. All ranks send as many messages as the longest list needs.
fn pass(group: &mut Group, own: &Files, offers: &[Offer], wait: Duration) -> Result<Vec<Files>> {
    let rank = group.rank();
    let messages = offers.iter().map(|o| usize::from(o.pieces)).max().unwrap_or(0).div_ceil(FILES);
    let mut all: Vec<Files> = offers.iter().map(|_| Files(Vec::new())).collect();
    for message in 0..messages {
        let part: Vec<&(OwnedFd, u64)> = own.0.iter().skip(message * FILES).take(FILES).collect();
        let sizes: Vec<u8> = part.iter().flat_map(|(_, bytes)| bytes.to_le_bytes()).collect();
        let files: Vec<_> = part.iter().map(|(file, _)| file.as_fd()).collect();
        for (peer, (sizes, files)) in group.exchange("files of registered memory", &sizes, &files, wait)?.into_iter().enumerate()
        {
            let expected = usize::from(offers[peer].pieces).saturating_sub(message * FILES).min(FILES);
            if peer == rank {
                continue;
            }
            if files.len() != expected || sizes.len() != expected * 8 {
                return Err(Error::Corrupt { rank, peer, what: "the files of its registered memory".into(), endpoint: None });
            }
            let sizes = sizes.chunks(8).map(|b| b.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte)));
            all[peer].0.extend(files.into_iter().zip(sizes));
        }
    }
    Ok(all)
}

impl Cache {
    /// Opens what a rank offered, or takes what is open already; gives where its memory begins.
    fn open(
        &mut self,
        device: &Arc<dyn Device>,
        peer: usize,
        offer: &Offer,
        files: Files,
    ) -> Result<(Address, Option<Arc<Opened>>)> {
        if offer.process == device.process() {
            return Ok((offer.at, None));
        }
        let handle = offer.way.as_ref().map_err(|why| Error::Argument(why.clone()))?;
        self.0.retain(|_, opened| opened.strong_count() > 0);
        let key = (peer, offer.buffer_id, offer.span);
        if let Some(opened) = self.0.get(&key).and_then(Weak::upgrade) {
            return Ok((opened.base + offer.offset, Some(opened)));
        }
        let sizes: Vec<u64> = files.0.iter().map(|(_, bytes)| *bytes).collect();
        let base = if offer.by_files {
            if sizes.iter().try_fold(0u64, |sum, bytes| sum.checked_add(*bytes)) != Some(offer.span) {
                return Err(Error::Argument("the files of its memory are not as long as it said".into()));
            }
            let files: Vec<_> = files.0.iter().map(|(file, bytes)| (file.as_fd(), *bytes)).collect();
            device.map(&files)?
        } else {
            device.import(handle)?
        };
        let opened = Arc::new(Opened { device: device.clone(), base, pieces: sizes });
        self.0.insert(key, Arc::downgrade(&opened));
        Ok((base + offer.offset, Some(opened)))
    }
}

/// Registered memory, as one rank has it.
#[derive(Debug)]
pub struct Range {
    pub number: u32,
    pub at: Address,
    pub bytes: u64,
    /// Where each rank's begins, in device memory, for kernels.
    pub table: Address,
    device: Arc<dyn Device>,
    /// A graph holds a call on it: it stays open as long as the communicator lives, and the table for good.
    pub captured: bool,
    opened: Vec<Arc<Opened>>,
}

impl Range {
    /// Whether a tensor lies in it.
    pub fn holds(&self, at: Address, bytes: u64) -> bool {
        at >= self.at && at.checked_add(bytes).is_some_and(|end| end <= self.at + self.bytes)
    }

    /// Leaves everything open, for kernels that may still run.
    pub fn abandon(mut self) {
        self.opened.drain(..).for_each(std::mem::forget);
        self.captured = true;
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if !self.captured {
            let _ = self.device.free(self.table);
        }
    }
}

/// Registers memory of all ranks. All ranks call it, each with as many bytes of its own.
pub fn register(
    group: &mut Group,
    device: &Arc<dyn Device>,
    cache: &mut Cache,
    number: u32,
    (at, bytes): (Address, u64),
    wait: Duration,
) -> Result<Range> {
    let rank = group.rank();
    let (own, files) = offer(&**device, at, bytes);
    let given = group.exchange("memory to register", &own.to_bytes(), &[], wait)?;
    let mut offers = Vec::new();
    for (peer, (bytes, _)) in given.into_iter().enumerate() {
        let offer = if peer == rank { Some(own.clone()) } else { Offer::from_bytes(&bytes) };
        let corrupt = || Error::Corrupt { rank, peer, what: "what it says of its memory".into(), endpoint: None };
        offers.push(offer.filter(Offer::is_sound).ok_or_else(corrupt)?);
    }
    // All see the same offers, so all leave here or none does.
    if let Some((of, why)) = offers.iter().enumerate().find_map(|(of, o)| Some((of, o.way.as_ref().err()?))) {
        return Err(Error::Argument(format!("rank {of}'s memory can not be registered: {why}")));
    }
    if let Some(peer) = (0..offers.len()).find(|p| offers[*p].bytes != bytes) {
        let (ours, theirs) = (bytes.to_string(), offers[peer].bytes.to_string());
        return Err(Error::Mismatch { rank, peer, what: "the bytes to register", ours, theirs, endpoint: None });
    }
    let mut files = pass(group, &files, &offers, wait)?;
    let (mut starts, mut opened) = ([0; MAX_RANKS], Vec::new());
    let mut told = Ok(());
    for (peer, (offer, files)) in offers.iter().zip(files.drain(..)).enumerate() {
        if peer == rank {
            starts[peer] = at;
            continue;
        }
        match cache.open(device, peer, offer, files) {
            Ok((start, open)) => {
                starts[peer] = start;
                opened.extend(open);
            }
            Err(error) => {
                told = Err(format!("rank {rank} can not open rank {peer}'s memory: {}", reason(error)));
                break;
            }
        }
    }
    let table = match &told {
        Ok(()) => {
            let bytes: Vec<u8> = starts.iter().flat_map(|start| start.to_le_bytes()).collect();
            let made = device.alloc(bytes.len() as u64).and_then(|table| device.write(table, &bytes).map(|()| table));
            made.map_err(|e| format!("rank {rank}: {e}"))
        }
        Err(why) => Err(why.clone()),
    };
    let mut words: Vec<u8> = table.as_ref().err().map_or_else(Vec::new, |why| why.bytes().take(1024).collect());
    let outcomes = group.exchange("registered memory", &words, &[], wait)?;
    for (bytes, _) in outcomes {
        if words.is_empty() {
            words = bytes;
        }
    }
    match table {
        Ok(table) if words.is_empty() => Ok(Range { number, at, bytes, table, device: device.clone(), captured: false, opened }),
        table => {
            if let Ok(table) = table {
                device.free(table)?;
            }
            drop(opened);
            // Nobody frees what another has open.
            group.exchange("closing what was opened", &[], &[], wait)?;
            Err(Error::Argument(format!("memory can not be registered: {}", String::from_utf8_lossy(&words))))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_comes_through_a_message_as_it_was_and_half_of_one_does_not() {
        let offer = Offer {
            process: 7,
            at: 1 << 40,
            bytes: 100,
            buffer_id: 9,
            offset: 64,
            span: 1 << 21,
            pieces: 0,
            way: Ok([3; 64]),
            by_files: false,
        };
        let refused = Offer { way: Err("it is on the moon".into()), ..offer.clone() };
        let files = Offer { pieces: 1, by_files: true, ..offer.clone() };
        for offer in [&offer, &refused, &files] {
            let bytes = offer.to_bytes();
            assert_eq!(Offer::from_bytes(&bytes).as_ref(), Some(offer));
            assert!(offer.is_sound());
            for short in 0..47 {
                assert_eq!(Offer::from_bytes(&bytes[..short]), None);
            }
        }
        assert_eq!(Offer::from_bytes(&offer.to_bytes()[..60]), None, "half a handle");
    }

    #[test]
    fn an_offer_whose_numbers_do_not_fit_is_not_sound() {
        let good = Offer {
            process: 7,
            at: 0,
            bytes: 100,
            buffer_id: 9,
            offset: 64,
            span: 164,
            pieces: 0,
            way: Ok([0; 64]),
            by_files: false,
        };
        let change = |change: &dyn Fn(&mut Offer)| {
            let mut offer = good.clone();
            change(&mut offer);
            offer.is_sound()
        };
        assert!(change(&|_| ()));
        assert!(!change(&|o| o.bytes = 101), "past the end");
        assert!(!change(&|o| o.offset = u64::MAX), "an overflow");
        assert!(!change(&|o| o.pieces = 1), "files of a handle");
        assert!(!change(&|o| o.by_files = true), "files of which there are none");
        assert!(!change(&|o| (o.by_files, o.pieces) = (true, u16::MAX)), "too many files");
    }
}
