// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices in memory, to test everything above the driver without one. Kernels that prove paths are carried out; those of
//! collectives do nothing.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{Read, Seek, Write},
    os::fd::{BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard},
};

use pcieipc::{Error, Result, reduce::Kind};

use super::{
    Address, AddressFacts, Device, DeviceFacts, Event, Function, Graph, Handle, Launch, Module, PeerClaim, Sharing, Stream,
    refused,
};
use crate::abi::Args;

/// The memory of all devices.
#[derive(Debug, Default)]
pub struct World {
    memory: Mutex<BTreeMap<Address, (i32, Vec<u8>)>>,
    /// How often memory of others is open, by its address: here every process sees it at the same one.
    open: Mutex<BTreeMap<Address, u32>>,
    /// What each device was last told to run.
    launched: Mutex<HashMap<i32, Args>>,
    /// Lengths of the pieces of memory that was mapped piece by piece, and memory of pools.
    pieces: Mutex<HashMap<Address, Vec<u64>>>,
    pooled: Mutex<Vec<Address>>,
}

impl World {
    /// How often memory of others is open now.
    pub fn open(&self) -> u32 {
        self.open.lock().unwrap().values().sum()
    }
    /// What a device was last told to run.
    pub fn last(&self, ordinal: i32) -> Args {
        self.launched.lock().unwrap()[&ordinal]
    }
    fn count(&self, at: Address) {
        *self.open.lock().unwrap().entry(at).or_default() += 1;
    }
    fn discount(&self, at: Address) -> Result<()> {
        match self.open.lock().unwrap().get_mut(&at) {
            Some(count) if *count > 0 => *count -= 1,
            _ => return Err(refused("fake close", "it was not open", "")),
        }
        Ok(())
    }
}

/// The stream that a graph is captured from.
pub const CAPTURED: Stream = Stream(9);

/// One device of a world.
#[derive(Debug)]
pub struct Fake {
    world: Arc<World>,
    facts: DeviceFacts,
    claim: PeerClaim,
    /// Its stores to other devices are lost, whatever is claimed.
    deaf: bool,
    process: u32,
    /// It opens nothing of others.
    closed: bool,
}

const NAMES: [&str; 3] = ["probe_store", "probe_check", "other"];
/// More than this is a mailbox.
const SMALL: usize = 1 << 20;

impl Fake {
    pub fn new(world: &Arc<World>, ordinal: i32, claim: PeerClaim) -> Self {
        let facts = DeviceFacts {
            ordinal,
            name: "a device in memory".into(),
            pci: format!("0000:0{ordinal}:00.0"),
            capability: (9, 0),
            multiprocessors: 132,
            l2_bytes: 1 << 20,
            memory_bytes: 1 << 30,
            mig: false,
            host_register: true,
        };
        Self { world: world.clone(), facts, claim, deaf: false, process: std::process::id(), closed: false }
    }
    pub fn deaf(self) -> Self {
        Self { deaf: true, ..self }
    }
    /// As if its rank were a process of its own.
    pub fn apart(self) -> Self {
        Self { process: 1 << 30 | self.facts.ordinal as u32, ..self }
    }
    pub fn closed(self) -> Self {
        Self { closed: true, ..self }
    }
    pub fn partitioned(mut self) -> Self {
        self.facts.mig = true;
        self
    }

    fn memory(&self) -> MutexGuard<'_, BTreeMap<Address, (i32, Vec<u8>)>> {
        self.world.memory.lock().unwrap()
    }
    fn within<R>(&self, at: Address, bytes: usize, run: impl FnOnce(i32, &mut [u8]) -> R) -> Result<R> {
        let mut memory = self.memory();
        let (base, (device, all)) =
            memory.range_mut(..=at).next_back().ok_or_else(|| refused("fake access", "no such memory", ""))?;
        let from = (at - base) as usize;
        let part = all.get_mut(from..from + bytes).ok_or_else(|| refused("fake access", "past the end", ""))?;
        Ok(run(*device, part))
    }
    fn put(&self, to: Address, from: &[u8]) -> Result<()> {
        self.within(to, from.len(), |device, part| {
            if !(self.deaf && device != self.facts.ordinal) {
                part.copy_from_slice(from);
            }
        })
    }
    fn get(&self, from: Address, bytes: usize) -> Result<Vec<u8>> {
        self.within(from, bytes, |_, part| part.to_vec())
    }
}

fn pattern(seed: u32, i: u32) -> u32 {
    let mut h = i.wrapping_mul(2_654_435_761).wrapping_add(seed);
    h ^= h >> 15;
    h = h.wrapping_mul(2_246_822_519);
    h ^ (h >> 13)
}

impl Device for Fake {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }
    fn process(&self) -> u32 {
        self.process
    }
    fn claim(&self, _pci: &str) -> Result<PeerClaim> {
        Ok(self.claim)
    }
    fn kernels(&self, _kind: Option<Kind>) -> Result<Module> {
        Ok(Module(1))
    }
    fn alloc(&self, bytes: u64) -> Result<Address> {
        let mut memory = self.memory();
        let at = memory.iter().next_back().map_or(1 << 40, |(base, (_, all))| (base + all.len() as u64 + 4096) & !255);
        memory.insert(at, (self.facts.ordinal, vec![0xa5; bytes as usize]));
        Ok(at)
    }
    fn free(&self, at: Address) -> Result<()> {
        let open = self.world.open.lock().unwrap().get(&at).copied().unwrap_or(0);
        assert_eq!(open, 0, "memory at {at:#x} is freed and another process has it open");
        self.memory().remove(&at).map(drop).ok_or_else(|| refused("fake free", "no such memory", ""))
    }
    fn write(&self, to: Address, from: &[u8]) -> Result<()> {
        self.put(to, from)
    }
    fn read(&self, to: &mut [u8], from: Address) -> Result<()> {
        to.copy_from_slice(&self.get(from, to.len())?);
        Ok(())
    }
    fn fill(&self, at: Address, word: u32, words: u64, _: Stream) -> Result<()> {
        self.put(at, &word.to_le_bytes().repeat(words as usize))
    }
    fn copy(&self, to: Address, from: Address, bytes: u64, _: Stream) -> Result<()> {
        self.put(to, &self.get(from, bytes as usize)?)
    }
    fn export(&self, base: Address) -> Result<Handle> {
        let mut handle = [0; 64];
        handle[..8].copy_from_slice(&base.to_le_bytes());
        Ok(handle)
    }
    fn import(&self, handle: &Handle) -> Result<Address> {
        if self.process == std::process::id() {
            return Err(Error::Argument("ranks of one process open nothing".into()));
        }
        let base = handle[..8].iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte));
        // Mailboxes are opened in any case.
        if self.closed && self.world.memory.lock().unwrap().get(&base).is_some_and(|(_, all)| all.len() < SMALL) {
            return Err(refused("fake import", "it opens nothing", ""));
        }
        self.world.count(base);
        Ok(base)
    }
    fn release(&self, at: Address) -> Result<()> {
        self.world.discount(at)
    }
    fn export_file(&self, at: Address) -> Result<OwnedFd> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&at.to_le_bytes()).unwrap();
        Ok(file.into())
    }
    fn map(&self, pieces: &[(BorrowedFd<'_>, u64)]) -> Result<Address> {
        let start = |file: &BorrowedFd<'_>| {
            let mut file = File::from(file.try_clone_to_owned().unwrap());
            let mut at = [0; 8];
            file.rewind().unwrap();
            file.read_exact(&mut at).unwrap();
            u64::from_le_bytes(at)
        };
        let first = pieces.first().map_or(0, |(file, _)| start(file));
        let mut next = first;
        for (file, bytes) in pieces {
            assert_eq!(start(file), next, "pieces in their order");
            next += bytes;
        }
        self.world.count(first);
        Ok(first)
    }
    fn alloc_pieces(&self, pieces: usize, bytes: u64) -> Result<(Address, Vec<u64>)> {
        let sizes = vec![bytes.next_multiple_of(4096); pieces];
        let at = self.alloc(sizes.iter().sum())?;
        self.world.pieces.lock().unwrap().insert(at, sizes.clone());
        Ok((at, sizes))
    }
    fn unmap(&self, at: Address, _: &[u64]) -> Result<()> {
        let own = self.memory().get(&at).is_some_and(|(device, _)| *device == self.facts.ordinal);
        if own { self.free(at) } else { self.world.discount(at) }
    }
    fn alloc_pooled(&self, bytes: u64) -> Result<Address> {
        let at = self.alloc(bytes)?;
        self.world.pooled.lock().unwrap().push(at);
        Ok(at)
    }
    fn reach(&self, _: i32) -> Result<()> {
        Ok(())
    }
    unsafe fn register(&self, at: NonNull<u8>, _: usize) -> Result<Address> {
        Ok(at.as_ptr() as Address)
    }
    fn unregister(&self, _: NonNull<u8>) -> Result<()> {
        Ok(())
    }
    fn load(&self, _: &[u8]) -> Result<Module> {
        Ok(Module(1))
    }
    fn function(&self, _: Module, name: &str) -> Result<Function> {
        Ok(Function(NAMES.iter().position(|n| *n == name).unwrap_or(2)))
    }
    unsafe fn launch(&self, function: Function, _: Launch, args: &Args, _: Stream) -> Result<()> {
        self.world.launched.lock().unwrap().insert(self.facts.ordinal, *args);
        let name = NAMES[function.0];
        let words = (args.bytes / 4) as u32;
        match name {
            "probe_store" => {
                let bytes: Vec<u8> = (0..words).flat_map(|i| pattern(args.header[0], i).to_le_bytes()).collect();
                self.put(args.output, &bytes)
            }
            "probe_check" => {
                let got = self.get(args.input, args.bytes as usize)?;
                let wrong = got.chunks(4).zip(0..).filter(|(w, i)| *w != pattern(args.header[0], *i).to_le_bytes()).count();
                let count = self.get(args.output, 4)?;
                let before = u32::from_le_bytes([count[0], count[1], count[2], count[3]]);
                self.put(args.output, &(before + wrong as u32).to_le_bytes())
            }
            _ => Ok(()),
        }
    }
    fn about(&self, at: Address) -> Result<AddressFacts> {
        let memory = self.memory();
        let (base, (device, all)) = memory.range(..=at).next_back().ok_or_else(|| refused("fake about", "no such memory", ""))?;
        let facts = |base: Address, bytes: u64, sharing| AddressFacts { buffer_id: base, base, bytes, device: *device, sharing };
        if self.world.pooled.lock().unwrap().contains(base) {
            return Ok(facts(*base, all.len() as u64, Sharing::No("it comes from a stream-ordered pool")));
        }
        if let Some(sizes) = self.world.pieces.lock().unwrap().get(base) {
            let mut start = *base;
            for bytes in sizes {
                if at < start + bytes {
                    return Ok(facts(start, *bytes, Sharing::File));
                }
                start += bytes;
            }
        }
        if at >= base + all.len() as u64 {
            return Err(refused("fake about", "past the end", ""));
        }
        Ok(facts(*base, all.len() as u64, Sharing::Handle))
    }
    fn stream(&self) -> Result<Stream> {
        Ok(Stream(1))
    }
    fn lane(&self) -> Result<Stream> {
        Ok(Stream(2))
    }
    fn is_done(&self, _: Stream) -> Result<bool> {
        Ok(true)
    }
    fn synchronize(&self, _: Stream) -> Result<()> {
        Ok(())
    }
    fn event(&self, _: bool) -> Result<Event> {
        Ok(Event(1))
    }
    fn record(&self, _: Event, _: Stream) -> Result<()> {
        Ok(())
    }
    fn wait(&self, _: Stream, _: Event) -> Result<()> {
        Ok(())
    }
    fn between(&self, _: Event, _: Event) -> Result<f64> {
        Ok(0.0)
    }
    fn capture(&self, stream: Stream) -> Result<Option<u64>> {
        Ok((stream == CAPTURED).then_some(1))
    }
    fn begin_capture(&self, _: Stream) -> Result<()> {
        Ok(())
    }
    fn end_capture(&self, _: Stream) -> Result<Graph> {
        Ok(Graph(1))
    }
    fn replay(&self, _: Graph, _: Stream) -> Result<()> {
        Ok(())
    }
    fn forget(&self, _: Graph) -> Result<()> {
        Ok(())
    }
}
