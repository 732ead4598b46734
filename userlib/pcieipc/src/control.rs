// SPDX-License-Identifier: MIT OR Apache-2.0
//! Defences that a test build can do without, to prove that the tests would notice.

/// What protects a group, and what it would be without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Defence {
    /// A wait ends at its deadline.
    BoundedWait,
    /// In checked mode a record whose checksum does not match is refused.
    Checksum,
    /// An endpoint's new life is told from the one that the group met with.
    GenerationCheck,
    /// A group's new life has memory that nobody who was left out can write.
    Quarantine,
}

impl Defence {
    #[cfg_attr(not(feature = "controls"), expect(dead_code, reason = "only builds for controls lack defences"))]
    const fn name(self) -> &'static str {
        match self {
            Self::BoundedWait => "bounded_wait",
            Self::Checksum => "crc",
            Self::GenerationCheck => "generation_check",
            Self::Quarantine => "quarantine",
        }
    }
}

/// Whether this process is to do without: never, except in a build with the feature `controls`, where the environment's
/// `PCIEIPC_WITHOUT` names one defence.
#[cfg(not(feature = "controls"))]
pub const fn is_without(_defence: Defence) -> bool {
    false
}

/// As above.
#[cfg(feature = "controls")]
pub fn is_without(defence: Defence) -> bool {
    use std::sync::OnceLock;
    static WITHOUT: OnceLock<Option<String>> = OnceLock::new();
    WITHOUT.get_or_init(|| std::env::var("PCIEIPC_WITHOUT").ok()).as_deref() == Some(defence.name())
}
