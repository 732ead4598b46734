// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is done to the group, on the hardware's side.

use std::{fs, io, path::PathBuf};

/// The way in which a rank is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Its endpoint leaves the bus, as at a surprise removal that the kernel has noticed.
    RemoveEndpoint {
        /// PCI address.
        address: String,
    },
    /// Its process dies.
    KillProcess,
}

impl Fault {
    /// For people.
    pub fn name(&self) -> &'static str {
        match self {
            Fault::RemoveEndpoint { .. } => "endpoint removed",
            Fault::KillProcess => "process killed",
        }
    }

    /// The file whose writing removes the endpoint.
    fn switch(&self) -> Option<PathBuf> {
        match self {
            Fault::RemoveEndpoint { address } => Some(PathBuf::from("/sys/bus/pci/devices").join(address).join("remove")),
            Fault::KillProcess => None,
        }
    }

    /// Whether this process may do it; asked before anything starts.
    ///
    /// # Errors
    /// When the switch can not be written.
    pub fn permitted(&self) -> io::Result<()> {
        match self.switch() {
            Some(switch) => fs::OpenOptions::new().write(true).open(switch).map(drop),
            None => Ok(()),
        }
    }

    /// Removes the endpoint; returns when the kernel has done it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remove(&self) -> io::Result<()> {
        self.switch().map_or(Ok(()), |switch| fs::write(switch, "1"))
    }
}
