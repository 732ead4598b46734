// SPDX-License-Identifier: GPL-2.0

//! What the module knows as a whole: the endpoints that are bound, those that were, and who listens to events.

use crate::{
    endpoint::{Endpoint, Identity},
    events::{Event, Queue},
    limits, trace,
    uapi::kind,
};
use kernel::{
    bindings, pci,
    prelude::*,
    sync::{
        aref::ARef,
        atomic::{Atomic, Relaxed},
        Arc,
    },
};

/// Past lives that are remembered, to tell a returned device from a new one.
const PAST: usize = 256;

/// An endpoint that is not bound any more.
struct Past {
    id: u32,
    identity: Identity,
    bridge: Option<ARef<pci::Device>>,
}

/// See the module's documentation.
pub(crate) struct Registry {
    endpoints: KVec<Arc<Endpoint>>,
    past: KVec<Past>,
    /// One for each session.
    queues: KVVec<Arc<Queue>>,
}

kernel::sync::global_lock! {
    // SAFETY: The module's `init` calls `init` before anything else of the module can run.
    unsafe(uninit) static REGISTRY: Mutex<Registry> = Registry {
        endpoints: KVec::new(),
        past: KVec::new(),
        queues: KVVec::new(),
    };
}

/// Ids are never used again.
static NEXT_ID: Atomic<u32> = Atomic::new(1);

/// Generations are module-wide, so that no two lives of anything share one.
static NEXT_GENERATION: Atomic<u64> = Atomic::new(1);

/// Prepares the registry.
///
/// # Safety
///
/// Called once, before any other function here.
pub(crate) unsafe fn init() {
    // SAFETY: By the requirements of this function.
    unsafe { REGISTRY.init() };
}

/// What the registry holds. A static is never dropped, so dropping this frees it: last of all, when no endpoint and no session
/// exists any more and none can be remembered.
pub(crate) struct Contents;

impl Drop for Contents {
    fn drop(&mut self) {
        let empty = Registry { endpoints: KVec::new(), past: KVec::new(), queues: KVVec::new() };
        let old = core::mem::replace(&mut *REGISTRY.lock(), empty);
        drop(old);
    }
}

/// A new endpoint id.
pub(crate) fn next_id() -> u32 {
    NEXT_ID.fetch_add(1, Relaxed)
}

/// A new generation.
pub(crate) fn next_generation() -> u64 {
    NEXT_GENERATION.fetch_add(1, Relaxed)
}

/// Adds an endpoint.
///
/// # Errors
///
/// `ENOSPC` over the limit of endpoints, `ENOMEM` without memory.
pub(crate) fn add(endpoint: &Arc<Endpoint>) -> Result {
    let mut registry = REGISTRY.lock();
    if registry.endpoints.len() >= limits::ENDPOINTS as usize {
        return Err(ENOSPC);
    }
    Ok(registry.endpoints.push(endpoint.clone(), GFP_KERNEL)?)
}

/// Tells that it was added; everything by which it is reached is there.
pub(crate) fn announce(endpoint: &Endpoint) {
    let before = REGISTRY.lock().predecessor(&endpoint.identity);
    publish(&Event {
        kind: kind::ADDED,
        endpoint: endpoint.id,
        generation: endpoint.status.generation(),
        detail: [endpoint.identity.serial, u64::from(before), 0, 0],
    });
}

/// Removes an endpoint; it is remembered as past.
pub(crate) fn remove(endpoint: &Endpoint) {
    let mut oldest = None;
    let mut gone = None;
    let mut registry = REGISTRY.lock();
    if let Some(index) = registry.endpoints.iter().position(|other| other.id == endpoint.id) {
        gone = registry.endpoints.remove(index).ok();
    }
    if registry.past.len() >= PAST {
        oldest = registry.past.remove(0).ok();
    }
    // Without memory the device will look new when it returns, no worse.
    let _ =
        registry.past.push(Past { id: endpoint.id, identity: endpoint.identity, bridge: endpoint.bridge.clone() }, GFP_KERNEL);
    drop(registry);
    // Outside of the lock: these may be the last references.
    drop((gone, oldest));
}

/// The endpoint with this id.
pub(crate) fn find(id: u32) -> Option<Arc<Endpoint>> {
    let registry = REGISTRY.lock();
    registry.endpoints.iter().find(|endpoint| endpoint.id == id).cloned()
}

/// The endpoint that a device is bound as.
pub(crate) fn find_device(pdev: *mut bindings::pci_dev) -> Option<Arc<Endpoint>> {
    let registry = REGISTRY.lock();
    registry.endpoints.iter().find(|endpoint| core::ptr::eq(endpoint.pci(), pdev)).cloned()
}

/// The bridge above a past endpoint, where a scan may find it again.
pub(crate) fn past_bridge(id: u32) -> Option<ARef<pci::Device>> {
    let registry = REGISTRY.lock();
    registry.past.iter().find(|past| past.id == id)?.bridge.clone()
}

/// All endpoints.
///
/// # Errors
///
/// `ENOMEM` without memory.
pub(crate) fn endpoints() -> Result<KVec<Arc<Endpoint>>> {
    let registry = REGISTRY.lock();
    let mut endpoints = KVec::with_capacity(registry.endpoints.len(), GFP_KERNEL)?;
    for endpoint in registry.endpoints.iter() {
        endpoints.push(endpoint.clone(), GFP_KERNEL)?;
    }
    Ok(endpoints)
}

/// The ids of all endpoints.
///
/// # Errors
///
/// `ENOMEM` without memory.
pub(crate) fn ids() -> Result<KVec<u32>> {
    let registry = REGISTRY.lock();
    let mut ids = KVec::with_capacity(registry.endpoints.len(), GFP_KERNEL)?;
    for endpoint in registry.endpoints.iter() {
        ids.push(endpoint.id, GFP_KERNEL)?;
    }
    Ok(ids)
}

/// Adds a listener.
///
/// # Errors
///
/// `ENOSPC` over the limit of sessions, because an event goes to each of them in turn; `ENOMEM` without memory.
pub(crate) fn listen(queue: &Arc<Queue>) -> Result {
    let limit = limits::sessions() as usize;
    let mut registry = REGISTRY.lock();
    let of_user = registry.queues.iter().filter(|other| other.user == queue.user).count();
    if of_user < limit && registry.queues.len() < limits::SESSIONS {
        return Ok(registry.queues.push(queue.clone(), GFP_KERNEL)?);
    }
    drop(registry);
    limits::say(|| pr_info!("refused a session: over max_sessions={limit} of one user, or {} of all\n", limits::SESSIONS));
    Err(ENOSPC)
}

/// Removes a listener.
pub(crate) fn stop_listening(queue: &Arc<Queue>) {
    let mut registry = REGISTRY.lock();
    let found = registry.queues.iter().position(|other| Arc::ptr_eq(other, queue));
    let gone = found.and_then(|index| registry.queues.remove(index).ok());
    drop(registry);
    drop(gone);
}

/// Delivers an event to every session that is to see it. Returns how many lost it.
pub(crate) fn publish(event: &Event) -> u64 {
    trace::event(event.endpoint, event.kind, event.generation, &event.detail);
    let registry = REGISTRY.lock();
    let lost = registry.queues.iter().filter(|queue| !queue.deliver(event)).count();
    lost as u64
}

impl Registry {
    /// The id under which a device was known before: same serial number, or else same slot. All functions of a card have its number, so
    /// the function's own counts too.
    fn predecessor(&self, identity: &Identity) -> u32 {
        let function = |identity: &Identity| identity.address & 0xff;
        let same_serial = |past: &&Past| {
            identity.serial != 0 && past.identity.serial == identity.serial && function(&past.identity) == function(identity)
        };
        let same_slot = |past: &&Past| {
            past.identity.address == identity.address
                && past.identity.vendor == identity.vendor
                && past.identity.device == identity.device
                && (past.identity.serial == 0 || identity.serial == 0)
        };
        let found = self.past.iter().rev().find(same_serial);
        found.or_else(|| self.past.iter().rev().find(same_slot)).map_or(0, |past| past.id)
    }
}

#[kunit_tests(pcieipc_registry)]
mod tests {
    use super::*;

    fn identity(address: u32, serial: u64) -> Identity {
        Identity { address, vendor: 0x1234, device: 0x7069, serial, numa_node: -1 }
    }

    fn registry(past: &[(u32, Identity)]) -> Result<Registry> {
        let mut registry = Registry { endpoints: KVec::new(), past: KVec::new(), queues: KVVec::new() };
        for (id, identity) in past {
            registry.past.push(Past { id: *id, identity: *identity, bridge: None }, GFP_KERNEL)?;
        }
        Ok(registry)
    }

    #[test]
    fn a_serial_number_tells_a_returned_device_wherever_it_is() -> Result {
        let past = registry(&[(1, identity(0x100, 7)), (2, identity(0x200, 8))])?;
        assert_eq!(past.predecessor(&identity(0x300, 7)), 1);
        // The slot of one and the serial number of the other: the number decides.
        assert_eq!(past.predecessor(&identity(0x100, 8)), 2);
        assert_eq!(past.predecessor(&identity(0x100, 9)), 0);
        Ok(())
    }

    #[test]
    fn functions_of_one_card_are_told_apart() -> Result {
        let past = registry(&[(1, identity(0x100, 7)), (2, identity(0x101, 7))])?;
        assert_eq!(past.predecessor(&identity(0x300, 7)), 1);
        assert_eq!(past.predecessor(&identity(0x301, 7)), 2);
        assert_eq!(past.predecessor(&identity(0x302, 7)), 0);
        Ok(())
    }

    #[test]
    fn without_a_serial_number_the_slot_and_the_ids_decide() -> Result {
        let past = registry(&[(1, identity(0x100, 0)), (2, identity(0x100, 0))])?;
        // The last life there.
        assert_eq!(past.predecessor(&identity(0x100, 0)), 2);
        assert_eq!(past.predecessor(&identity(0x200, 0)), 0);
        assert_eq!(past.predecessor(&Identity { device: 1, ..identity(0x100, 0) }), 0);
        Ok(())
    }
}
