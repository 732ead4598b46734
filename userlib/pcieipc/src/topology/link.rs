// SPDX-License-Identifier: MIT OR Apache-2.0
//! Speed and width of a link, and what they can carry.

use std::fmt;

use serde::Serialize;

/// Transfer rate of each lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Speed(u8);

impl Speed {
    /// 2.5 GT/s, the lowest there is.
    pub const GEN1: Self = Self(1);

    /// From the code that link registers hold: 1 is 2.5 GT/s, 6 is 64 GT/s.
    pub fn from_code(code: u32) -> Option<Self> {
        u8::try_from(code).ok().filter(|c| (1..=6).contains(c)).map(Self)
    }

    /// From sysfs's text, such as `16.0 GT/s PCIe`, and from older kernels' `8 GT/s`.
    pub fn from_text(text: &str) -> Option<Self> {
        let number = text.split_whitespace().next()?;
        let code = match number {
            "2.5" => 1,
            "5" | "5.0" => 2,
            "8" | "8.0" => 3,
            "16" | "16.0" => 4,
            "32" | "32.0" => 5,
            "64" | "64.0" => 6,
            _ => return None,
        };
        Some(Self(code))
    }

    /// The generation of the standard that brought this rate.
    pub fn generation(self) -> u8 {
        self.0
    }

    /// Gigatransfers per second and lane.
    pub fn gigatransfers(self) -> f64 {
        match self.0 {
            1 => 2.5,
            2 => 5.0,
            3 => 8.0,
            4 => 16.0,
            5 => 32.0,
            _ => 64.0,
        }
    }

    /// Share of the transfers that are data: 8b/10b, then 128b/130b, then flits of 256 bytes that hold 242.
    fn encoding(self) -> f64 {
        match self.0 {
            1 | 2 => 0.8,
            3..=5 => 128.0 / 130.0,
            _ => 242.0 / 256.0,
        }
    }
}

impl fmt::Display for Speed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 1 { f.write_str("2.5 GT/s") } else { write!(f, "{:.0} GT/s", self.gigatransfers()) }
    }
}

impl Serialize for Speed {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.gigatransfers())
    }
}

/// A link's speed and width. A link that is down has no state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct LinkState {
    /// Rate of each lane, GT/s in JSON.
    pub speed: Speed,
    /// Number of lanes.
    pub width: u8,
}

impl LinkState {
    /// From the 4-bit speed and 6-bit width fields that link registers share. Zeros and reserved values are no state.
    pub fn from_fields(speed: u32, width: u32) -> Option<Self> {
        let width = u8::try_from(width).ok().filter(|w| matches!(w, 1 | 2 | 4 | 8 | 12 | 16 | 32))?;
        Some(Self { speed: Speed::from_code(speed)?, width })
    }

    /// Data bytes per second in one direction after line coding, before packet headers; in GB/s (10⁹).
    pub fn raw_gbps(self) -> f64 {
        self.speed.gigatransfers() * self.speed.encoding() * f64::from(self.width) / 8.0
    }

    /// Payload bytes per second in one direction with packets of `payload` bytes, in GB/s. Each packet costs a header of 16
    /// bytes, a sequence number, a checksum and framing: 12 bytes with 8b/10b links, 8 with later ones; acknowledgements and flow-control
    /// packets take about 5 % more.
    pub fn payload_gbps(self, payload: u32) -> f64 {
        let overhead = if self.speed.generation() <= 2 { 28.0 } else { 24.0 };
        let payload = f64::from(payload.max(1));
        self.raw_gbps() * 0.95 * payload / (payload + overhead)
    }

    /// The slower speed and the narrower width of two ends.
    pub fn common(self, other: Self) -> Self {
        Self { speed: self.speed.min(other.speed), width: self.width.min(other.width) }
    }

    /// Whether this state is slower or narrower than `best`.
    pub fn below(self, best: Self) -> bool {
        self.speed < best.speed || self.width < best.width
    }
}

impl fmt::Display for LinkState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x{}", self.speed, self.width)
    }
}

/// What one end of a link says about it.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LinkEnd {
    /// As trained now; `None` where the link is down or not readable.
    pub now: Option<LinkState>,
    /// The best that this end can do; the other end may do less.
    pub best: Option<LinkState>,
    /// Highest speed that software lets this end train to.
    pub target: Option<Speed>,
    /// ASPM states that the end supports.
    pub aspm_supported: Aspm,
    /// ASPM states that are switched on.
    pub aspm_enabled: Aspm,
    /// The link is training at this moment.
    pub training: bool,
    /// The data link layer is up, where the end can report it.
    pub active: Option<bool>,
    /// A port saw a retraining that software asked for, or a change of speed or width to mend an unreliable link, since software last
    /// cleared the bit (LBMS). Which of the two is not told.
    pub bandwidth_managed: bool,
    /// A port saw hardware change speed or width for other reasons than an unreliable link, such as saving power (LABS).
    pub bandwidth_autonomous: bool,
    /// Hardware may not change the width by itself.
    pub width_change_disabled: bool,
    /// The link was switched off by software.
    pub disabled: bool,
    /// Bandwidth as another tool reported it, where speed and width are unknown; GB/s.
    pub reported_gbps: Option<f64>,
    /// Lanes that reported errors (8 GT/s and more), one bit a lane.
    pub lane_errors: u32,
}

/// Link power states: a set of L0s, L1 and the L1 substates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Aspm {
    /// L0s, one direction sleeps.
    pub l0s: bool,
    /// L1, both directions sleep.
    pub l1: bool,
    /// L1.1 or L1.2 as well.
    pub l1_substates: bool,
}

impl Aspm {
    /// From the two-bit field of link registers.
    pub fn from_bits(bits: u32) -> Self {
        Self { l0s: bits & 1 != 0, l1: bits & 2 != 0, l1_substates: false }
    }

    /// Whether any state is in the set.
    pub fn any(self) -> bool {
        self.l0s || self.l1
    }
}

impl fmt::Display for Aspm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.l0s, self.l1) {
            (false, false) => f.write_str("off"),
            (true, false) => f.write_str("L0s"),
            (false, true) if self.l1_substates => f.write_str("L1 and substates"),
            (false, true) => f.write_str("L1"),
            (true, true) => f.write_str("L0s L1"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gen5_x16_link_carries_63_gigabytes_a_second() {
        let link = LinkState::from_fields(5, 16).unwrap();
        assert!((link.raw_gbps() - 63.0).abs() < 0.1);
        assert!(link.payload_gbps(256) < link.raw_gbps());
        assert_eq!(link.to_string(), "32 GT/s x16");
    }

    #[test]
    fn all_ones_and_zeros_are_no_link() {
        assert_eq!(LinkState::from_fields(0xf, 0x3f), None);
        assert_eq!(LinkState::from_fields(0, 0), None);
        assert_eq!(Speed::from_text("Unknown"), None);
    }
}
