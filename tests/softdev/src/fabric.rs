// SPDX-License-Identifier: MIT OR Apache-2.0
//! The endpoints of one server, as they see each other on the bus.

use std::sync::{Arc, PoisonError, RwLock};

use crate::{
    config::Decode,
    interrupts::Interrupts,
    memory::SharedMemory,
    registers::{BAR0_BYTES, BAR2_BYTES, doorbell_at},
};

/// What of an endpoint its peers reach.
#[derive(Debug)]
pub struct Port {
    /// BAR 2.
    pub memory: Arc<SharedMemory>,
    /// Where its doorbells lead.
    pub interrupts: Arc<Interrupts>,
}

/// All endpoints by bus address.
///
/// An engine holds this lock during a chunk, inside its own bus; so an endpoint that is dead or has lost its BARs
/// receives no further byte once [`Fabric::set_decode`] has returned.
#[derive(Debug, Default)]
pub struct Fabric {
    decodes: RwLock<Vec<Decode>>,
    ports: Vec<Port>,
}

impl Fabric {
    /// Endpoints in the order of their numbers; none of them decodes any address yet.
    pub fn new(ports: Vec<Port>) -> Self {
        Self { decodes: RwLock::new(vec![Decode::default(); ports.len()]), ports }
    }

    /// The endpoint's configuration or power has changed.
    pub fn set_decode(&self, endpoint: usize, decode: Decode) {
        let mut decodes = self.decodes.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = decodes.get_mut(endpoint) {
            *slot = decode;
        }
    }

    fn with_memory<R>(&self, address: u64, access: impl FnOnce(&SharedMemory, u64) -> R) -> Option<R> {
        let decodes = self.decodes.read().unwrap_or_else(PoisonError::into_inner);
        decodes
            .iter()
            .zip(&self.ports)
            .find_map(|(decode, port)| {
                let into = address.checked_sub(decode.bar2?).filter(|&into| into < BAR2_BYTES)?;
                Some((port, into))
            })
            .map(|(port, into)| access(&port.memory, into))
    }

    /// Reads from the memory BAR at this address; how many bytes, at most to the BAR's end.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Option<usize> {
        self.with_memory(address, |memory, offset| {
            let bytes = into.len().min((BAR2_BYTES - offset) as usize);
            memory.read(offset, &mut into[..bytes]).then_some(bytes)
        })?
    }

    /// Writes to the memory BAR at this address; how many bytes, at most to the BAR's end.
    pub fn write(&self, address: u64, from: &[u8]) -> Option<usize> {
        self.with_memory(address, |memory, offset| {
            let bytes = from.len().min((BAR2_BYTES - offset) as usize);
            memory.write(offset, &from[..bytes]).then_some(bytes)
        })?
    }

    /// Endpoint and vector of the doorbell at this bus address.
    pub fn doorbell(&self, address: u64) -> Option<(usize, usize)> {
        let decodes = self.decodes.read().unwrap_or_else(PoisonError::into_inner);
        decodes.iter().enumerate().find_map(|(endpoint, decode)| {
            let offset = address.checked_sub(decode.bar0?).filter(|&offset| offset < BAR0_BYTES)?;
            Some((endpoint, doorbell_at(offset)?))
        })
    }

    /// Rings a doorbell. Called without any lock, because it ends in another endpoint's.
    pub fn ring(&self, endpoint: usize, vector: usize) {
        if let Some(port) = self.ports.get(endpoint) {
            port.interrupts.doorbell(vector);
        }
    }
}
