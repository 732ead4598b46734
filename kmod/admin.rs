// SPDX-License-Identifier: GPL-2.0

//! What an administrator may ask for: reset, remove, rescan. A worker does it, because it takes the device lock, which may be
//! held for a minute by others, and because removing a device ends the session that asked.

use crate::{
    endpoint::{pci_raw, Endpoint},
    events::Event,
    queue, registry, uapi,
};
use kernel::{
    bindings,
    error::to_result,
    new_work, pci,
    prelude::*,
    sync::{
        aref::ARef,
        atomic::{Atomic, Full, Relaxed, Release},
        Arc,
    },
    workqueue::{Work, WorkItem},
};

const RESET: u32 = uapi::pcieipc_admin_action_PCIEIPC_ADMIN_RESET;
const REMOVE: u32 = uapi::pcieipc_admin_action_PCIEIPC_ADMIN_REMOVE;
const RESCAN: u32 = uapi::pcieipc_admin_action_PCIEIPC_ADMIN_RESCAN;

/// 1 while an action is queued or runs.
static BUSY: Atomic<u32> = Atomic::new(0);

/// One action.
#[pin_data]
struct Action {
    action: u32,
    endpoint: u32,
    generation: u64,
    /// The function, or for a scan the bridge above it.
    pdev: ARef<pci::Device>,
    #[pin]
    work: Work<Action>,
}

kernel::impl_has_work! {
    impl HasWork<Self> for Action { self.work }
}

impl WorkItem for Action {
    type Pointer = Arc<Action>;

    fn run(this: Arc<Action>) {
        let result = this.act();
        BUSY.store(0, Release);
        registry::publish(&Event {
            kind: uapi::kind::ADMIN,
            endpoint: this.endpoint,
            generation: this.generation,
            detail: [
                u64::from(this.action),
                result.map_or_else(|error| u64::from(error.to_errno().unsigned_abs()), |()| 0),
                0,
                0,
            ],
        });
    }
}

impl Action {
    fn act(&self) -> Result {
        let pdev = pci_raw(&self.pdev);
        // SAFETY: `pdev` holds a reference. No lock of ours is held.
        unsafe {
            match self.action {
                RESET => to_result(bindings::pci_reset_function(pdev)),
                REMOVE => {
                    bindings::pci_stop_and_remove_bus_device_locked(pdev);
                    Ok(())
                }
                _ => {
                    bindings::pci_lock_rescan_remove();
                    // A bridge that was removed itself has lost its bus.
                    let bus = (*pdev).subordinate;
                    if !bus.is_null() {
                        bindings::pci_rescan_bus(bus);
                    }
                    bindings::pci_unlock_rescan_remove();
                    if bus.is_null() {
                        Err(ENODEV)
                    } else {
                        Ok(())
                    }
                }
            }
        }
    }
}

/// ADMIN: queues an action.
///
/// # Errors
///
/// `EPERM` without CAP_SYS_ADMIN, `EINVAL` for an unknown action, `ENOENT` for an unknown endpoint, `EOPNOTSUPP` for a scan without
/// a bridge, `EBUSY` when one is queued already.
pub(crate) fn request(call: &uapi::pcieipc_admin) -> Result {
    // SAFETY: Asks about the calling task.
    if !unsafe { bindings::capable(bindings::CAP_SYS_ADMIN as i32) } {
        return Err(EPERM);
    }
    let endpoint = registry::find(call.endpoint);
    let pdev = match call.action {
        RESET | REMOVE => endpoint.as_deref().ok_or(ENOENT)?.pdev.clone(),
        RESCAN => bridge(endpoint.as_deref(), call.endpoint)?,
        _ => return Err(EINVAL),
    };
    if BUSY.cmpxchg(0, 1, Full).is_err() {
        return Err(EBUSY);
    }
    let generation = endpoint.map_or(0, |endpoint| endpoint.status.generation());
    let action = Arc::pin_init(
        pin_init!(Action {
            action: call.action,
            endpoint: call.endpoint,
            generation,
            pdev,
            work <- new_work!("pcieipc_admin"),
        }),
        GFP_KERNEL,
    );
    let queued = action.and_then(|action| {
        let queue = queue::get().ok_or(ENODEV)?;
        queue.enqueue(action).map_err(|_| EBUSY)
    });
    queued.inspect_err(|_| BUSY.store(0, Relaxed))
}

fn bridge(endpoint: Option<&Endpoint>, id: u32) -> Result<ARef<pci::Device>> {
    match endpoint {
        Some(endpoint) => endpoint.bridge.clone().ok_or(EOPNOTSUPP),
        None => registry::past_bridge(id).ok_or(ENOENT),
    }
}
