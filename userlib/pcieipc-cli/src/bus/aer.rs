// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors that the kernel finds in a function's AER registers, by the kernel's own injector.

use std::{
    fs, io,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use pcieipc::topology::Address;

use super::{Function, Sysfs};

/// How bad an error is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Bad TLP: the hardware has repaired it.
    Correctable,
    /// Completion timeout: a transaction is lost, the link is good.
    NonFatal,
    /// Malformed TLP: the link is reset.
    Fatal,
}

impl Severity {
    /// Uncorrectable and correctable status bits.
    fn bits(self) -> (u32, u32) {
        match self {
            Severity::Correctable => (0, 1 << 6),
            Severity::NonFatal => (1 << 14, 0),
            Severity::Fatal => (1 << 18, 0),
        }
    }

    /// The file in which the kernel counts them.
    pub fn counter(self) -> &'static str {
        match self {
            Severity::Correctable => "aer_dev_correctable",
            Severity::NonFatal => "aer_dev_nonfatal",
            Severity::Fatal => "aer_dev_fatal",
        }
    }
}

/// `/dev/aer_inject`.
#[derive(Debug)]
pub struct Injector(PathBuf);

impl Injector {
    /// Of a host.
    pub fn of(sysfs: &Sysfs) -> Self {
        Self(sysfs.path("dev/aer_inject"))
    }

    /// Its node.
    pub fn node(&self) -> &PathBuf {
        &self.0
    }

    /// Whether it is there, and this process may write to it.
    pub fn permitted(&self) -> io::Result<()> {
        fs::OpenOptions::new().write(true).open(&self.0).map(drop)
    }

    /// Puts one error into the function's registers and raises the port's interrupt. While the kernel still looks at the one before, it
    /// is tried again, for `limit` at most.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn inject(&self, function: &Function, severity: Severity, limit: Duration) -> io::Result<()> {
        let request = request(function.address, severity);
        let end = Instant::now() + limit;
        loop {
            match fs::OpenOptions::new().write(true).open(&self.0).and_then(|mut node| io::Write::write_all(&mut node, &request))
            {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < end => {
                    thread::sleep(Duration::from_millis(1));
                }
                other => return other,
            }
        }
    }
}

/// The kernel's `struct aer_error_inj`.
fn request(address: Address, severity: Severity) -> Vec<u8> {
    let (uncorrectable, correctable) = severity.bits();
    let mut bytes = vec![address.bus, address.device, address.function, 0];
    for word in [uncorrectable, correctable, 0, 0, 0, 0, address.domain] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::{
        super::function::fake::{at, host},
        *,
    };

    #[test]
    fn the_injector_gets_the_kernels_structure() {
        let (_folder, sysfs) = host();
        let injector = Injector::of(&sysfs);
        injector.permitted().unwrap();
        injector.inject(&at(&sysfs, "0000:01:00.0"), Severity::Fatal, Duration::ZERO).unwrap();
        let bytes = fs::read(injector.node()).unwrap();
        assert_eq!(bytes.len(), 32);
        assert_eq!(bytes[..4], [1, 0, 0, 0]);
        assert_eq!(bytes[4..12], [0, 0, 4, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn each_severity_is_another_bit_and_another_counter() {
        let word = |severity: Severity| request("0002:41:1f.7".parse().unwrap(), severity);
        assert_eq!(word(Severity::Correctable)[4..12], [0, 0, 0, 0, 0x40, 0, 0, 0]);
        assert_eq!(word(Severity::NonFatal)[4..12], [0, 0x40, 0, 0, 0, 0, 0, 0]);
        assert_eq!(word(Severity::Fatal)[..4], [0x41, 0x1f, 7, 0]);
        assert_eq!(word(Severity::Fatal)[28..], [2, 0, 0, 0]);
    }
}
