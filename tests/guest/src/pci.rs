// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an administrator does to a PCI function by sysfs.

use std::{fs, io, os::unix::fs::FileExt, path::PathBuf};

/// A function by its address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function(String);

impl Function {
    /// From `struct pcieipc_endpoint_info.address`.
    pub fn at(address: u32) -> Self {
        let (domain, bus, device, function) = (address >> 16, address >> 8 & 0xff, address >> 3 & 0x1f, address & 7);
        Self(format!("{domain:04x}:{bus:02x}:{device:02x}.{function}"))
    }

    /// From its address as sysfs writes it.
    pub fn named(address: &str) -> Self {
        Self(address.to_owned())
    }

    /// All soft endpoints that the bus has.
    pub fn soft_endpoints() -> Vec<Self> {
        Self::with_device("0x7069")
    }

    /// All functions with this device id.
    pub fn with_device(id: &str) -> Vec<Self> {
        let entries = fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
        let functions = entries.map(|entry| Self(entry.file_name().to_string_lossy().into_owned()));
        functions.filter(|function| fs::read_to_string(function.device("device")).is_ok_and(|found| found.trim() == id)).collect()
    }

    /// Gives it to our driver although its ids are in no table.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn bind_by_override(&self) -> io::Result<()> {
        fs::write(self.device("driver_override"), "pcieipc")?;
        fs::write("/sys/bus/pci/drivers_probe", &self.0)
    }

    /// What of its IOMMU group sysfs shows and takes: `identity` or `DMA`, while no driver has it.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn set_iommu(&self, kind: &str) -> io::Result<()> {
        fs::write(self.device("iommu_group/type"), kind)
    }

    /// As sysfs writes it.
    pub fn address(&self) -> &str {
        &self.0
    }

    /// The port above it, as [`Function::at`] takes it.
    ///
    /// # Errors
    /// There is none, or what sysfs says.
    pub fn port(&self) -> io::Result<u32> {
        let path = fs::canonicalize(self.device(""))?;
        let name = path.parent().and_then(|port| port.file_name()?.to_str()).unwrap_or_default();
        let numbers: Option<Vec<u32>> = name.split([':', '.']).map(|part| u32::from_str_radix(part, 16).ok()).collect();
        match numbers.as_deref() {
            Some([domain, bus, device, function]) => Ok(domain << 16 | bus << 8 | device << 3 | function),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn device(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/sys/bus/pci/devices/{}/{file}", self.0))
    }

    /// Whether the bus has it.
    pub fn exists(&self) -> bool {
        self.device("vendor").exists()
    }

    /// Whether a driver has it.
    pub fn bound(&self) -> bool {
        self.device("driver").exists()
    }

    /// Takes it from the driver.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn unbind(&self) -> io::Result<()> {
        fs::write("/sys/bus/pci/drivers/pcieipc/unbind", &self.0)
    }

    /// Gives it to the driver.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn bind(&self) -> io::Result<()> {
        fs::write("/sys/bus/pci/drivers/pcieipc/bind", &self.0)
    }

    /// Takes it from the bus.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn remove(&self) -> io::Result<()> {
        fs::write(self.device("remove"), "1")
    }

    /// Resets the function.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn reset(&self) -> io::Result<()> {
        fs::write(self.device("reset"), "1")
    }

    /// Looks for functions that came back.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn rescan() -> io::Result<()> {
        fs::write("/sys/bus/pci/rescan", "1")
    }

    /// First and last address of each BAR, 0 and 0 for one that it has not.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn resources(&self) -> io::Result<Vec<(u64, u64)>> {
        let text = fs::read_to_string(self.device("resource"))?;
        let number = |word: Option<&str>| word.and_then(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
        let range = |line: &str| {
            let mut words = line.split_whitespace();
            number(words.next()).zip(number(words.next())).ok_or_else(|| io::ErrorKind::InvalidData.into())
        };
        text.lines().take(6).map(range).collect()
    }

    /// Command register.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn command(&self) -> io::Result<u16> {
        let bytes = fs::read(self.device("config"))?;
        bytes.get(4..6).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]])).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Takes the card out of the slot of this port without a word to anybody, as a hand does.
    ///
    /// # Errors
    /// It has no slot, or what sysfs says.
    pub fn pull(&self) -> io::Result<()> {
        const SLOT_CONTROL: u8 = 0x18;
        // With power and its indicator off QEMU takes the card out.
        const OFF: u16 = 0x700;
        const INTERRUPT: u16 = 0x20;
        let bytes = fs::read(self.device("config"))?;
        let byte = |at: u8| bytes.get(usize::from(at)).copied().unwrap_or(0);
        let mut capability = byte(0x34);
        for _ in 0..48 {
            match byte(capability) {
                _ if capability == 0 => break,
                0x10 => {
                    let place = capability + SLOT_CONTROL;
                    let before = u16::from_le_bytes([byte(place), byte(place + 1)]);
                    let config = fs::OpenOptions::new().write(true).open(self.device("config"))?;
                    config.write_all_at(&((before | OFF) & !INTERRUPT).to_le_bytes(), place.into())?;
                    // Only now the kernel hears of it: the slot has its power, and the card is not there. Else it would believe that it was
                    // itself who switched it off.
                    return config.write_all_at(&before.to_le_bytes(), place.into());
                }
                _ => capability = byte(capability + 1),
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }

    /// Changes the command register.
    ///
    /// # Errors
    /// What sysfs says.
    pub fn set_command(&self, command: u16) -> io::Result<()> {
        let config = fs::OpenOptions::new().write(true).open(self.device("config"))?;
        config.write_all_at(&command.to_le_bytes(), 4)
    }
}
