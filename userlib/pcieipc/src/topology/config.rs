// SPDX-License-Identifier: MIT OR Apache-2.0
//! Configuration space: header and capability lists.
//!
//! Only the registers that are decoded are read: some devices misbehave when the rest is touched, and a read takes about a
//! microsecond on real hardware.

use super::source::ReadAt;

/// Without the right to read more, the kernel gives the header alone.
const HEADER: usize = 64;
/// A list of capabilities longer than this has a cycle: the shortest entries would fill the space.
const MOST_CAPABILITIES: usize = 48;
const MOST_EXTENDED: usize = 960;

/// Bytes of configuration space, as far as they could be read.
pub struct Config<'a> {
    space: &'a dyn ReadAt,
    header: [u8; HEADER],
    capabilities: Vec<(u8, u16)>,
    extended: Vec<(u16, u16)>,
    restricted: bool,
    broken_list: bool,
}

/// Why there is nothing to decode.
#[derive(Debug, thiserror::Error)]
pub enum NoConfig {
    /// Ids and class are ones: no device answers at this address.
    #[error("ids and class read as ones: nothing answers at this address")]
    AllOnes,
    /// Fewer than the 64 bytes that everybody may read.
    #[error("only {0} of the header's 64 bytes could be read")]
    Short(usize),
    /// The system refused.
    #[error(transparent)]
    Refused(#[from] std::io::Error),
}

impl<'a> Config<'a> {
    /// Reads header and capability lists.
    ///
    /// # Errors
    /// All-ones, a short header, or the system's error.
    pub fn read(space: &'a dyn ReadAt) -> Result<Self, NoConfig> {
        let mut header = [0; HEADER];
        let length = space.read_at(&mut header, 0)?;
        // A device that is gone answers ones. Its ids alone do not tell: those of a living virtual function read as ones, too, but its
        // class does not; and a virtual machine monitor may still fill in some bytes of a device that is gone.
        let ones = |range: std::ops::Range<usize>| header.get(range).is_some_and(|bytes| bytes.iter().all(|b| *b == 0xff));
        if length >= 12 && ones(0..4) && ones(8..12) {
            return Err(NoConfig::AllOnes);
        }
        if length < HEADER {
            return Err(NoConfig::Short(length));
        }
        let mut config =
            Self { space, header, capabilities: Vec::new(), extended: Vec::new(), restricted: false, broken_list: false };
        config.walk_capabilities();
        config.walk_extended();
        Ok(config)
    }

    /// Whether the caller may see the header only (the kernel shows the rest to CAP_SYS_ADMIN).
    pub fn restricted(&self) -> bool {
        self.restricted
    }

    /// Whether a capability list has a cycle or leads outside.
    pub fn broken_list(&self) -> bool {
        self.broken_list
    }

    fn walk_capabilities(&mut self) {
        // Status bit 4: there is a list.
        if self.header16(0x06) & 0x10 == 0 {
            return;
        }
        let pointer = if self.header_type() == 2 { 0x14 } else { 0x34 };
        let mut next = u16::from(self.header[pointer]) & 0xfc;
        while next != 0 {
            if next < 0x40 || self.capabilities.len() == MOST_CAPABILITIES || self.capabilities.iter().any(|c| c.1 == next) {
                self.broken_list = true;
                return;
            }
            let Some(entry) = self.u16(next) else {
                self.restricted = true;
                return;
            };
            let [id, link] = entry.to_le_bytes();
            if id == 0xff {
                self.broken_list = true;
                return;
            }
            self.capabilities.push((id, next));
            next = u16::from(link) & 0xfc;
        }
    }

    fn walk_extended(&mut self) {
        // Only PCI Express functions have the extended space.
        if self.restricted || self.capability(0x10).is_none() {
            return;
        }
        let mut next = 0x100;
        while next != 0 {
            if next < 0x100 || self.extended.len() == MOST_EXTENDED || self.extended.iter().any(|c| c.1 == next) {
                self.broken_list = true;
                return;
            }
            let Some(entry) = self.u32(next) else { return };
            if entry == 0 || entry == u32::MAX {
                return;
            }
            self.extended.push(((entry & 0xffff) as u16, next));
            next = (entry >> 20) as u16 & 0xffc;
        }
    }

    /// Where the capability with this id starts.
    pub fn capability(&self, id: u8) -> Option<u16> {
        self.capabilities.iter().find(|c| c.0 == id).map(|c| c.1)
    }

    /// Where the extended capability with this id starts.
    pub fn extended(&self, id: u16) -> Option<u16> {
        self.extended.iter().find(|c| c.0 == id).map(|c| c.1)
    }

    /// A byte of the header; `offset` is below 64.
    pub fn header8(&self, offset: usize) -> u8 {
        self.header[offset]
    }

    /// A little-endian word of the header; `offset` is below 63.
    pub fn header16(&self, offset: usize) -> u16 {
        u16::from_le_bytes([self.header[offset], self.header[offset + 1]])
    }

    /// A little-endian double word of the header; `offset` is below 61.
    pub fn header32(&self, offset: usize) -> u32 {
        u32::from(self.header16(offset)) | u32::from(self.header16(offset + 2)) << 16
    }

    /// 0 for endpoints, 1 for bridges, 2 for CardBus.
    pub fn header_type(&self) -> u8 {
        self.header[0x0e] & 0x7f
    }

    /// A word anywhere.
    pub fn u16(&self, offset: u16) -> Option<u16> {
        let mut bytes = [0; 2];
        self.fill(&mut bytes, offset)?;
        Some(u16::from_le_bytes(bytes))
    }

    /// A double word anywhere.
    pub fn u32(&self, offset: u16) -> Option<u32> {
        let mut bytes = [0; 4];
        self.fill(&mut bytes, offset)?;
        Some(u32::from_le_bytes(bytes))
    }

    /// Fills `bytes` from `offset`; `None` when not all of it can be read.
    pub fn fill(&self, bytes: &mut [u8], offset: u16) -> Option<()> {
        let length = self.space.read_at(bytes, u64::from(offset)).ok()?;
        (length == bytes.len()).then_some(())
    }
}

/// Little-endian registers of one capability, read in one go.
pub struct Registers<const N: usize>([u8; N]);

impl<const N: usize> Registers<N> {
    /// Reads `N` bytes from `offset`; what lies past the end of the space reads as zero.
    pub fn read(config: &Config<'_>, offset: u16) -> Option<Self> {
        let mut bytes = [0; N];
        let length = config.space.read_at(&mut bytes, u64::from(offset)).ok()?;
        (length >= 4).then_some(Self(bytes))
    }

    /// The word at `at`, which is below `N - 1`.
    pub fn u16(&self, at: usize) -> u32 {
        u32::from(u16::from_le_bytes([self.0[at], self.0[at + 1]]))
    }

    /// The double word at `at`, which is below `N - 3`.
    pub fn u32(&self, at: usize) -> u32 {
        self.u16(at) | self.u16(at + 2) << 16
    }
}
