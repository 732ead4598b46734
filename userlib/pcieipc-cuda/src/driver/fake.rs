// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices in memory, to test everything above the driver without one. Kernels that prove paths are carried out; those of
//! collectives do nothing.

use std::{
    collections::{BTreeMap, HashMap},
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard},
};

use pcieipc::{Error, Result, reduce::Kind};

use super::{
    Address, AddressFacts, Device, DeviceFacts, Event, Function, Graph, Handle, Launch, Module, PeerClaim, Stream, refused,
};
use crate::abi::Args;

/// The memory of all devices.
#[derive(Debug, Default)]
pub struct World {
    memory: Mutex<BTreeMap<Address, (i32, Vec<u8>)>>,
    /// What each device was last told to run.
    launched: Mutex<HashMap<i32, Args>>,
}

impl World {
    /// What a device was last told to run.
    pub fn last(&self, ordinal: i32) -> Args {
        self.launched.lock().unwrap()[&ordinal]
    }
}

/// One device of a world.
#[derive(Debug)]
pub struct Fake {
    world: Arc<World>,
    facts: DeviceFacts,
    claim: PeerClaim,
    /// Its stores to other devices are lost, whatever is claimed.
    deaf: bool,
}

const NAMES: [&str; 3] = ["probe_store", "probe_check", "other"];

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
        Self { world: world.clone(), facts, claim, deaf: false }
    }
    pub fn deaf(self) -> Self {
        Self { deaf: true, ..self }
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
    fn export(&self, _: Address) -> Result<Handle> {
        Ok([0; 64])
    }
    fn import(&self, _: &Handle) -> Result<Address> {
        Err(Error::Argument("ranks of one process open nothing".into()))
    }
    fn release(&self, _: Address) -> Result<()> {
        Ok(())
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
        Ok(AddressFacts { buffer_id: at, base: at, bytes: 0, device: self.facts.ordinal, exportable: true })
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
    fn capture(&self, _: Stream) -> Result<Option<u64>> {
        Ok(None)
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
