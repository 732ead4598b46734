// SPDX-License-Identifier: MIT OR Apache-2.0
//! What one endpoint reaches as a bus master.
//!
//! The engine holds the bus for reading during each chunk of a copy; whoever takes something away (an unmapped range, a
//! ring slot, Bus Master Enable, power) holds it for writing. So once the taking away has returned, no byte lands any more.

use std::{collections::BTreeMap, sync::Arc};

use crate::{fabric::Fabric, memory::SharedMemory, ring_table::RingTable};

/// A range of bus addresses behind which guest memory lies.
#[derive(Clone, Debug)]
pub struct Window {
    /// Bytes.
    pub bytes: u64,
    /// The file that holds it, mapped.
    pub memory: Arc<SharedMemory>,
    /// Where the window starts in `memory`.
    pub offset: u64,
    /// The endpoint may read it.
    pub readable: bool,
    /// The endpoint may write it.
    pub writable: bool,
}

/// No memory that this endpoint may access answers at the address.
#[derive(Debug, PartialEq, Eq)]
pub struct Unreachable;

/// The endpoint's view of the bus.
#[derive(Debug, Default)]
pub struct Bus {
    windows: BTreeMap<u64, Window>,
    /// Which addresses the engine may use.
    pub rings: RingTable,
    /// Bus Master Enable.
    pub master: bool,
    /// False while the endpoint plays dead.
    pub powered: bool,
}

impl Bus {
    /// Adds a window; whatever was mapped there before is replaced.
    pub fn map(&mut self, address: u64, window: Window) {
        self.unmap(address, window.bytes);
        if window.bytes > 0 {
            self.windows.insert(address, window);
        }
    }

    /// Takes a range away. A window that reaches out of the range keeps the rest.
    pub fn unmap(&mut self, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        let hit: Vec<u64> = self
            .windows
            .range(..end)
            .rev()
            .take_while(|(start, window)| **start + window.bytes > address)
            .map(|(start, _)| *start)
            .collect();
        for start in hit {
            let Some(window) = self.windows.remove(&start) else { continue };
            if start < address {
                self.windows.insert(start, Window { bytes: address - start, ..window.clone() });
            }
            if start + window.bytes > end {
                let kept = Window { bytes: start + window.bytes - end, offset: window.offset + (end - start), ..window };
                self.windows.insert(end, kept);
            }
        }
    }

    /// Takes all windows away.
    pub fn unmap_all(&mut self) {
        self.windows.clear();
    }

    /// Windows and bytes mapped.
    pub fn mapped(&self) -> (usize, u64) {
        (self.windows.len(), self.windows.values().map(|window| window.bytes).sum())
    }

    fn window(&self, address: u64) -> Option<(&Window, u64)> {
        let (start, window) = self.windows.range(..=address).next_back()?;
        let into = address - start;
        (into < window.bytes).then_some((window, into))
    }

    /// Reads host memory or another endpoint's memory.
    ///
    /// # Errors
    /// [`Unreachable`]; some bytes may have been read.
    pub fn read(&self, fabric: &Fabric, mut address: u64, mut into: &mut [u8]) -> Result<(), Unreachable> {
        while !into.is_empty() {
            let done = match self.window(address) {
                Some((window, offset)) if window.readable => {
                    let (now, _) = into.split_at_mut(chunk(into.len(), window.bytes - offset));
                    window.memory.read(window.offset + offset, now).then_some(now.len())
                }
                Some(_) => None,
                None => fabric.read(address, into),
            };
            let done = done.filter(|&done| done > 0).ok_or(Unreachable)?;
            into = &mut into[done..];
            address = address.checked_add(done as u64).ok_or(Unreachable)?;
        }
        Ok(())
    }

    /// Writes host memory or another endpoint's memory.
    ///
    /// # Errors
    /// [`Unreachable`]; some bytes may have been written.
    pub fn write(&self, fabric: &Fabric, mut address: u64, mut from: &[u8]) -> Result<(), Unreachable> {
        while !from.is_empty() {
            let done = match self.window(address) {
                Some((window, offset)) if window.writable => {
                    let now = &from[..chunk(from.len(), window.bytes - offset)];
                    window.memory.write(window.offset + offset, now).then_some(now.len())
                }
                Some(_) => None,
                None => fabric.write(address, from),
            };
            let done = done.filter(|&done| done > 0).ok_or(Unreachable)?;
            from = &from[done..];
            address = address.checked_add(done as u64).ok_or(Unreachable)?;
        }
        Ok(())
    }
}

fn chunk(wanted: usize, available: u64) -> usize {
    usize::try_from(available).map_or(wanted, |available| wanted.min(available))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    const PAGE: u64 = 4096;

    fn memory(pages: u64) -> Arc<SharedMemory> {
        let file = std::fs::File::from(memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(pages * PAGE).unwrap();
        Arc::new(SharedMemory::map(file.as_fd(), (pages * PAGE) as usize).unwrap())
    }

    fn window(memory: &Arc<SharedMemory>, offset: u64, bytes: u64) -> Window {
        Window { bytes, memory: memory.clone(), offset, readable: true, writable: true }
    }

    #[test]
    fn a_copy_crosses_windows_that_are_scattered_in_memory() {
        let (memory, fabric, mut bus) = (memory(4), Fabric::default(), Bus::default());
        bus.map(0x10000, window(&memory, 2 * PAGE, PAGE));
        bus.map(0x11000, window(&memory, 0, PAGE));
        let sent: Vec<u8> = (0..200).collect();
        bus.write(&fabric, 0x11000 - 100, &sent).unwrap();
        let mut halves = [0; 100];
        assert!(memory.read(3 * PAGE - 100, &mut halves));
        assert_eq!(halves, sent[..100]);
        assert!(memory.read(0, &mut halves));
        assert_eq!(halves, sent[100..]);
        let mut back = vec![0; 200];
        bus.read(&fabric, 0x11000 - 100, &mut back).unwrap();
        assert_eq!(back, sent);
        assert_eq!(bus.write(&fabric, 0x12000 - 1, &[0, 0]), Err(Unreachable));
    }

    #[test]
    fn unmapping_a_part_leaves_the_rest_where_it_was() {
        let (memory, fabric, mut bus) = (memory(4), Fabric::default(), Bus::default());
        bus.map(0x10000, window(&memory, 0, 4 * PAGE));
        bus.unmap(0x11000, PAGE);
        assert_eq!(bus.mapped(), (2, 3 * PAGE));
        bus.write(&fabric, 0x12000, &[7]).unwrap();
        let mut byte = [0];
        assert!(memory.read(2 * PAGE, &mut byte));
        assert_eq!(byte, [7]);
        assert_eq!(bus.write(&fabric, 0x11000, &[7]), Err(Unreachable));
        bus.unmap(0, u64::MAX);
        assert_eq!(bus.mapped(), (0, 0));
    }

    #[test]
    fn a_new_map_replaces_what_it_overlaps() {
        let (memory, fabric, mut bus) = (memory(4), Fabric::default(), Bus::default());
        bus.map(0x10000, window(&memory, 0, 2 * PAGE));
        bus.map(0x11000, window(&memory, 3 * PAGE, PAGE));
        bus.write(&fabric, 0x11000, &[9]).unwrap();
        let mut byte = [0];
        assert!(memory.read(3 * PAGE, &mut byte));
        assert_eq!((byte, bus.mapped()), ([9], (2, 2 * PAGE)));
    }

    #[test]
    fn a_window_that_may_only_be_read_is_not_written() {
        let (memory, fabric, mut bus) = (memory(1), Fabric::default(), Bus::default());
        bus.map(0x10000, Window { writable: false, ..window(&memory, 0, PAGE) });
        assert_eq!(bus.write(&fabric, 0x10000, &[1]), Err(Unreachable));
        assert_eq!(bus.read(&fabric, 0x10000, &mut [0]), Ok(()));
    }
}
