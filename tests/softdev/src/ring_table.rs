// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ring table: which bus addresses the engine may touch.

use crate::registers::{RING_SLOT_BYTES, RING_SLOTS};

/// One slot, as the registers hold it.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    words: [u32; 4],
    valid: bool,
}

impl Slot {
    fn address(&self) -> u64 {
        u64::from(self.words[0]) | u64::from(self.words[1]) << 32
    }

    fn bytes(&self) -> u64 {
        self.words[2].into()
    }
}

/// All slots.
#[derive(Debug)]
pub struct RingTable {
    slots: [Slot; RING_SLOTS],
}

impl Default for RingTable {
    fn default() -> Self {
        Self { slots: [Slot::default(); RING_SLOTS] }
    }
}

impl RingTable {
    /// The 32-bit word at a byte offset into the table; 0 where nothing is.
    pub fn word(&self, offset: u64) -> u32 {
        let Some((slot, word)) = place(offset) else { return 0 };
        let slot = &self.slots[slot];
        match word {
            0..4 => slot.words[word],
            4 => slot.valid.into(),
            _ => 0,
        }
    }

    /// Stores a 32-bit word. While a slot is valid, only its validity can change, so no half-written address is ever used.
    pub fn set_word(&mut self, offset: u64, value: u32) {
        let Some((slot, word)) = place(offset) else { return };
        let slot = &mut self.slots[slot];
        match word {
            0..4 if !slot.valid => slot.words[word] = value,
            4 => slot.valid = value & 1 != 0,
            _ => {}
        }
    }

    /// Whether `bytes` at a bus address lie in one valid slot.
    pub fn covers(&self, address: u64, bytes: u64) -> bool {
        self.slots.iter().filter(|slot| slot.valid).any(|slot| {
            address.checked_sub(slot.address()).and_then(|into| into.checked_add(bytes)).is_some_and(|end| end <= slot.bytes())
        })
    }

    /// Bus address and bytes of a valid slot.
    pub fn slot(&self, index: usize) -> Option<(u64, u64)> {
        self.slots.get(index).filter(|slot| slot.valid).map(|slot| (slot.address(), slot.bytes()))
    }

    /// Bus address and bytes of all valid slots.
    pub fn all(&self) -> Vec<(u64, u64)> {
        (0..RING_SLOTS).filter_map(|index| self.slot(index)).collect()
    }

    /// How many slots are valid.
    pub fn valid(&self) -> usize {
        self.slots.iter().filter(|slot| slot.valid).count()
    }
}

fn place(offset: u64) -> Option<(usize, usize)> {
    let slot = usize::try_from(offset / RING_SLOT_BYTES).ok().filter(|&slot| slot < RING_SLOTS)?;
    Some((slot, usize::try_from(offset % RING_SLOT_BYTES / 4).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> RingTable {
        let mut table = RingTable::default();
        for (word, value) in [(0, 0x1000), (1, 1), (2, 0x200), (3, 7 << 16), (4, 1)] {
            table.set_word(3 * RING_SLOT_BYTES + 4 * word, value);
        }
        table
    }

    #[test]
    fn only_ranges_inside_one_valid_slot_are_covered() {
        let mut table = table();
        assert_eq!(table.slot(3), Some((0x1_0000_1000, 0x200)));
        assert!(table.covers(0x1_0000_1000, 0x200));
        assert!(table.covers(0x1_0000_11ff, 1));
        for (address, bytes) in
            [(0x1_0000_0fff, 2), (0x1_0000_1000, 0x201), (0x1_0000_1200, 1), (0, u64::MAX), (u64::MAX, u64::MAX)]
        {
            assert!(!table.covers(address, bytes), "{address:#x}+{bytes:#x}");
        }
        table.set_word(3 * RING_SLOT_BYTES + 16, 0);
        assert!(!table.covers(0x1_0000_1000, 1));
    }

    #[test]
    fn a_valid_slot_cannot_be_changed_under_the_engine() {
        let mut table = table();
        table.set_word(3 * RING_SLOT_BYTES, 0xdead_0000);
        assert_eq!(table.word(3 * RING_SLOT_BYTES), 0x1000);
    }

    #[test]
    fn undefined_words_read_zero_and_ignore_writes() {
        let mut table = table();
        for offset in [20, 28, RING_SLOTS as u64 * RING_SLOT_BYTES, u64::MAX - 3] {
            table.set_word(offset, u32::MAX);
            assert_eq!(table.word(offset), 0);
        }
    }
}
