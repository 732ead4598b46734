// SPDX-License-Identifier: MIT OR Apache-2.0
//! The address of a PCI function.

use std::{fmt, str::FromStr};

/// Domain, bus, device and function. Domains have 32 bits: volume-management and hypervisor bridges use numbers past 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// PCI segment.
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number, 0 to 31.
    pub device: u8,
    /// Function number, 0 to 7.
    pub function: u8,
}

impl Address {
    /// The root bus name that sysfs gives to this domain and bus, such as `pci0000:00`.
    pub fn root_name(domain: u32, bus: u8) -> String {
        format!("pci{domain:04x}:{bus:02x}")
    }

    /// Whether both are functions of one card, that is of one device number on one bus.
    pub fn same_device(self, other: Self) -> bool {
        (self.domain, self.bus, self.device) == (other.domain, other.bus, other.device)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// A text that is no PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no PCI address; write it like 0000:41:00.0")]
pub struct BadAddress(pub String);

impl FromStr for Address {
    type Err = BadAddress;

    /// Reads `0000:41:00.0`, `41:00.0` (domain 0) and domains of up to eight digits.
    fn from_str(text: &str) -> Result<Self, BadAddress> {
        parse(text.trim()).ok_or_else(|| BadAddress(text.chars().take(64).collect()))
    }
}

fn parse(text: &str) -> Option<Address> {
    let (rest, function) = text.rsplit_once('.')?;
    let mut fields = rest.rsplit(':');
    let device = hex(fields.next()?, 2)?;
    let bus = hex(fields.next()?, 2)?;
    let domain = match fields.next() {
        Some(domain) => hex(domain, 8)?,
        None => 0,
    };
    if fields.next().is_some() || device > 31 {
        return None;
    }
    let function = hex(function, 1).filter(|f| *f < 8)?;
    Some(Address {
        domain,
        bus: u8::try_from(bus).ok()?,
        device: u8::try_from(device).ok()?,
        function: u8::try_from(function).ok()?,
    })
}

fn hex(text: &str, digits: usize) -> Option<u32> {
    if text.is_empty() || text.len() > digits || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u32::from_str_radix(text, 16).ok()
}

impl serde::Serialize for Address {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_a_round_trip_also_with_32_bit_domains() {
        for text in ["0000:00:00.0", "0000:41:1f.7", "10000:e1:00.0", "ffffffff:ff:1f.7"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("41:00.0".parse::<Address>().unwrap().to_string(), "0000:41:00.0");
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in [
            "",
            ".",
            ":",
            "0000:00:20.0",
            "0000:00:00.8",
            "0000:00:00",
            "1:2:3:4.0",
            "+1:00:00.0",
            "123456789:00:00.0",
            "0:é0:0.0",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
