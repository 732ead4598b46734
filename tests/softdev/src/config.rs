// SPDX-License-Identifier: MIT OR Apache-2.0
//! Configuration space: header, MSI-X, PCI Express, Power Management, AER, Device Serial Number.

use crate::registers::{BAR0_BYTES, BAR2_BYTES, BAR4_BYTES, CLASS, DEVICE, PBA_OFFSET, VECTORS, VENDOR};

/// Bytes of extended configuration space.
pub const CONFIG_BYTES: usize = 4096;

const COMMAND: usize = 0x04;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_MASTER: u16 = 1 << 2;
const STATUS: usize = 0x06;
const BAR0: usize = 0x10;
const BAR2: usize = 0x18;
const BAR4: usize = 0x20;
const MSIX: usize = 0x40;
const MSIX_ENABLE: u16 = 1 << 15;
const PCIE: usize = 0x60;
const DEVICE_CONTROL: usize = PCIE + 0x08;
const DEVICE_STATUS: usize = PCIE + 0x0a;
const TRANSACTIONS_PENDING: u8 = 1 << 5;
const LINK_STATUS: usize = PCIE + 0x12;
const PM: usize = 0xa0;
const AER: usize = 0x100;
const SERIAL_NUMBER: usize = 0x150;

/// Best link speed, as the code of Link Capabilities: 16 GT/s.
pub const LINK_SPEED: u8 = 4;
/// Best link width in lanes.
pub const LINK_WIDTH: u8 = 16;

/// What the function may do on the bus at present, as its configuration says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decode {
    /// Bus address of BAR 0, when it answers.
    pub bar0: Option<u64>,
    /// Bus address of BAR 2, when it answers.
    pub bar2: Option<u64>,
    /// BARs answer at all.
    pub memory: bool,
    /// The function may master the bus.
    pub master: bool,
    /// MSI-X is enabled, and may master the bus.
    pub interrupts: bool,
}

/// The 4096 bytes, with what software may change in them.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    value: Box<[u8; CONFIG_BYTES]>,
    writable: Box<[u8; CONFIG_BYTES]>,
    write_one_to_clear: Box<[u8; CONFIG_BYTES]>,
}

impl ConfigSpace {
    /// As after power-up.
    pub fn new(serial: u64) -> Self {
        let empty = || Box::new([0; CONFIG_BYTES]);
        let mut space = Self { value: empty(), writable: empty(), write_one_to_clear: empty() };
        space.header();
        space.msix();
        space.express();
        space.power_management();
        space.advanced_errors();
        space.put32(SERIAL_NUMBER, 0x0003 | 1 << 16);
        space.put32(SERIAL_NUMBER + 4, serial as u32);
        space.put32(SERIAL_NUMBER + 8, (serial >> 32) as u32);
        space.set_link(LINK_SPEED, LINK_WIDTH);
        space
    }

    fn header(&mut self) {
        self.put16(0x00, VENDOR);
        self.put16(0x02, DEVICE);
        self.allow16(COMMAND, COMMAND_MEMORY | COMMAND_MASTER | 1 << 6 | 1 << 8 | 1 << 10);
        self.put16(STATUS, 1 << 4);
        self.clear16(STATUS, 0xf900);
        self.put32(0x08, CLASS << 8 | 1);
        self.allow8(0x0c, 0xff);
        self.put32(BAR2, 0x0000_000c);
        self.allow32(BAR0, !(BAR0_BYTES as u32 - 1));
        self.allow32(BAR2, !(BAR2_BYTES as u32 - 1));
        self.allow32(BAR2 + 4, u32::MAX);
        self.allow32(BAR4, !(BAR4_BYTES as u32 - 1));
        self.put16(0x2c, VENDOR);
        self.put16(0x2e, DEVICE);
        self.value[0x34] = MSIX as u8;
        self.allow8(0x3c, 0xff);
    }

    fn msix(&mut self) {
        self.put16(MSIX, 0x11 | (PCIE as u16) << 8);
        self.put16(MSIX + 2, VECTORS as u16 - 1);
        self.allow16(MSIX + 2, MSIX_ENABLE | 1 << 14);
        self.put32(MSIX + 4, 4);
        self.put32(MSIX + 8, PBA_OFFSET as u32 | 4);
    }

    fn express(&mut self) {
        self.put16(PCIE, 0x10 | (PM as u16) << 8);
        self.put16(PCIE + 2, 2);
        // 256-byte payload, extended tags, role-based error reporting, function-level reset.
        self.put32(PCIE + 4, 1 | 1 << 5 | 1 << 15 | 1 << 28);
        self.put16(DEVICE_CONTROL, 2 << 12 | 1 << 4 | 1 << 11);
        self.allow16(DEVICE_CONTROL, 0x7fff);
        self.clear16(DEVICE_STATUS, 0x000f);
        self.put32(PCIE + 0x0c, u32::from(LINK_SPEED) | u32::from(LINK_WIDTH) << 4);
        self.allow16(PCIE + 0x10, 0x00cb);
        // Completion timeout can be disabled.
        self.put32(PCIE + 0x24, 1 << 4);
        self.allow16(PCIE + 0x28, 0x001f);
        self.put32(PCIE + 0x2c, 0x1e);
        self.put16(PCIE + 0x30, LINK_SPEED.into());
        self.allow16(PCIE + 0x30, 0x000f);
    }

    fn power_management(&mut self) {
        self.put16(PM, 0x01);
        self.put16(PM + 2, 3);
        // No soft reset: the context survives D3hot.
        self.put16(PM + 4, 1 << 3);
        self.allow16(PM + 4, 0x0003);
    }

    fn advanced_errors(&mut self) {
        self.put32(AER, 0x0001 | 2 << 16 | (SERIAL_NUMBER as u32) << 20);
        const UNCORRECTABLE: u32 = 0x007f_f030;
        const CORRECTABLE: u32 = 0x0000_f1c1;
        self.clear32(AER + 0x04, UNCORRECTABLE);
        self.allow32(AER + 0x08, UNCORRECTABLE);
        self.put32(AER + 0x0c, 0x0046_2030);
        self.allow32(AER + 0x0c, UNCORRECTABLE);
        self.clear32(AER + 0x10, CORRECTABLE);
        // Advisory non-fatal errors are masked by default.
        self.put32(AER + 0x14, 1 << 13);
        self.allow32(AER + 0x14, CORRECTABLE);
    }

    fn put16(&mut self, at: usize, value: u16) {
        self.value[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn put32(&mut self, at: usize, value: u32) {
        self.value[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn allow8(&mut self, at: usize, mask: u8) {
        self.writable[at] = mask;
    }

    fn allow16(&mut self, at: usize, mask: u16) {
        self.writable[at..at + 2].copy_from_slice(&mask.to_le_bytes());
    }

    fn allow32(&mut self, at: usize, mask: u32) {
        self.writable[at..at + 4].copy_from_slice(&mask.to_le_bytes());
    }

    fn clear16(&mut self, at: usize, mask: u16) {
        self.write_one_to_clear[at..at + 2].copy_from_slice(&mask.to_le_bytes());
    }

    fn clear32(&mut self, at: usize, mask: u32) {
        self.write_one_to_clear[at..at + 4].copy_from_slice(&mask.to_le_bytes());
    }

    fn get16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.value[at], self.value[at + 1]])
    }

    fn get32(&self, at: usize) -> u32 {
        u32::from(self.get16(at)) | u32::from(self.get16(at + 2)) << 16
    }

    /// Answers at the addresses of `other`. QEMU keeps the BARs of a function itself, also over a reset, so that nobody writes them again.
    pub fn keep_bars(&mut self, other: &Self) {
        self.value[BAR0..BAR4 + 8].copy_from_slice(&other.value[BAR0..BAR4 + 8]);
    }

    /// What Link Status shows.
    pub fn set_link(&mut self, speed: u8, width: u8) {
        self.put16(LINK_STATUS, u16::from(speed) | u16::from(width) << 4 | 1 << 12);
    }

    /// What Link Status shows: speed code and lanes.
    pub fn link(&self) -> (u8, u8) {
        let status = self.get16(LINK_STATUS);
        ((status & 0xf) as u8, (status >> 4 & 0x3f) as u8)
    }

    /// Device Status, Transactions Pending.
    pub fn set_transactions_pending(&mut self, pending: bool) {
        let status = &mut self.value[DEVICE_STATUS];
        *status = if pending { *status | TRANSACTIONS_PENDING } else { *status & !TRANSACTIONS_PENDING };
    }

    /// Reads; bytes outside give all-ones.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        for (at, byte) in (offset..).zip(into) {
            *byte = usize::try_from(at).ok().and_then(|at| self.value.get(at)).copied().unwrap_or(0xff);
        }
    }

    /// Writes; says whether the write asks for a function-level reset.
    #[must_use]
    pub fn write(&mut self, offset: u64, from: &[u8]) -> bool {
        let mut reset = false;
        for (at, &byte) in (offset..).zip(from) {
            let Some(at) = usize::try_from(at).ok().filter(|&at| at < CONFIG_BYTES) else { break };
            let mask = self.writable[at];
            self.value[at] = (self.value[at] & !mask | byte & mask) & !(byte & self.write_one_to_clear[at]);
            reset |= at == DEVICE_CONTROL + 1 && byte & 0x80 != 0;
        }
        reset
    }

    /// What this configuration lets the function do.
    pub fn decode(&self) -> Decode {
        let command = self.get16(COMMAND);
        let awake = self.get16(PM + 4) & 3 == 0;
        let memory = awake && command & COMMAND_MEMORY != 0;
        let master = awake && command & COMMAND_MASTER != 0;
        let assigned = |base: u64| (memory && base != 0).then_some(base);
        Decode {
            bar0: assigned(u64::from(self.get32(BAR0) & !0xf)),
            bar2: assigned(u64::from(self.get32(BAR2) & !0xf) | u64::from(self.get32(BAR2 + 4)) << 32),
            memory,
            master,
            interrupts: master && self.get16(MSIX + 2) & MSIX_ENABLE != 0,
        }
    }
}
