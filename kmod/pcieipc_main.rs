// SPDX-License-Identifier: GPL-2.0

//! pcieipc: rings, doorbells and events between PCIe endpoints, for user space.
//!
//! A PCI driver that owns endpoints ([`endpoint`]), and a device node whose open files are sessions ([`session`]). A session
//! attaches to one endpoint and owns channels ([`channel`]), which own pages ([`memory`]); mappings and exported descriptors
//! ([`export`]) borrow them. Nothing touches an endpoint's device past unbind, and unbind waits for no user.
//!
//! # Lock order
//!
//! From the outside in; none is held across user memory, and none that unbind needs is held across a wait for a user.
//!
//! 1. the device lock, where the PCI core holds it: probe, unbind, error and reset callbacks; [`missing`] only tries to take it, and its
//!    bridge's
//! 2. `mmap_lock`, where the memory manager holds it: mmap and fault
//! 3. [`session::Session`]'s table
//! 4. [`channel::Channel`]'s importers
//! 5. [`endpoint::Endpoint`]'s hardware
//! 6. [`endpoint::Endpoint`]'s brake of correctable errors
//! 7. the registry ([`registry`])
//! 8. [`monitor::Monitor`]'s armed flag, [`endpoint::Endpoint`]'s bell gate, which faults take
//! 9. a [`window::Window`]'s dma-buf, and below it the buffer's reservation, under which other drivers' callbacks run; 4 to 8 are never
//!    held meanwhile, because those drivers take their time
//! 10. spin locks, taken with interrupts off: an event queue, a vector's target, a channel's writer

mod accounting;
mod admin;
mod bell;
mod bucket;
mod call;
mod channel;
mod clock;
mod distance;
mod dmabuf;
mod driver;
mod endpoint;
mod endpoint_node;
mod engine;
mod eventfd;
mod events;
mod export;
mod file;
mod hardware;
mod inline;
mod iommu;
mod limits;
mod link;
mod mapping;
mod mapping_inode;
mod memory;
mod missing;
mod mmap;
mod monitor;
mod msix;
mod node;
mod profile;
mod profile_config;
mod queue;
mod recovery;
mod registers;
mod registry;
mod session;
mod state;
mod status;
mod trace;
mod uapi;
mod vector;
mod window;

use kernel::prelude::*;

/// The loaded module; dropped in this order.
#[pin_data]
struct Pcieipc {
    _ready: file::Ready,
    #[pin]
    _node: node::Node,
    #[pin]
    _profiles: kernel::configfs::Subsystem<profile_config::Profiles>,
    #[pin]
    _state: state::StateFile,
    #[pin]
    _driver: kernel::driver::Registration<recovery::Adapter>,
    _nodes: endpoint_node::Nodes,
    _queue: queue::WorkQueue,
    _inode: mapping_inode::MappingInode,
    _registry: registry::Contents,
    _enabled: profile_config::Contents,
}

impl kernel::InPlaceModule for Pcieipc {
    fn init(module: &'static ThisModule) -> impl PinInit<Self, Error> {
        // SAFETY: This is the first thing that the module does, and `init` is called once.
        unsafe {
            registry::init();
            profile_config::init();
        }
        try_pin_init!(Self {
            _enabled: profile_config::Contents,
            _registry: registry::Contents,
            _inode: mapping_inode::MappingInode::new()?,
            _queue: queue::WorkQueue::new()?,
            _nodes: endpoint_node::Nodes::new()?,
            _driver <- kernel::driver::Registration::new(<Self as kernel::ModuleMetadata>::NAME, module),
            _profiles <- profile_config::Profiles::subsystem(),
            _state <- state::StateFile::new(),
            _node <- node::Node::new(),
            _ready: file::Ready::new(),
        })
    }
}

/// PCIEIPC_CAP_* of this module as it was loaded.
pub(crate) fn capabilities() -> u64 {
    let mut capabilities = uapi::PCIEIPC_CAP_COPY
        | uapi::PCIEIPC_CAP_ERROR_RECOVERY
        | uapi::PCIEIPC_CAP_ADMIN
        | uapi::PCIEIPC_CAP_PROFILES
        | uapi::PCIEIPC_CAP_DEVICE_MEMORY
        | uapi::PCIEIPC_CAP_DMABUF;
    if limits::doorbell_map() {
        capabilities |= uapi::PCIEIPC_CAP_DOORBELL_MAP;
    }
    if limits::unsafe_noiommu() {
        capabilities |= uapi::PCIEIPC_CAP_UNSAFE_NOIOMMU;
    }
    u64::from(capabilities)
}

module! {
    type: Pcieipc,
    name: "pcieipc",
    authors: ["The pcieipc authors"],
    description: "Rings, doorbells and events between PCIe endpoints",
    license: "GPL",
    params: {
        max_channel_bytes: u64 {
            default: 256 << 20,
            description: "largest data area of one channel",
        },
        max_session_bytes: u64 {
            default: 1 << 30,
            description: "largest sum of the data areas of one session",
        },
        max_total_bytes: u64 {
            default: 8 << 30,
            description: "largest sum of all channels",
        },
        max_channels: u32 {
            default: 256,
            description: "most channels of one session",
        },
        max_sessions: u32 {
            default: 1024,
            description: "most sessions of one user",
        },
        event_queue: u32 {
            default: 256,
            description: "events that a session's queue holds",
        },
        doorbells_per_second: u32 {
            default: 200_000,
            description: "ring calls of one session or descriptor a second, 0 for no limit",
        },
        correctable_per_second: u32 {
            default: 10,
            description: "most correctable-error events of one endpoint a second",
        },
        link_sample_ms: u32 {
            default: 200,
            description: "how often link and presence of an endpoint are looked at",
        },
        missing_ms: u32 {
            default: 2000,
            description: "how long an endpoint that does not answer may take to come back before it is gone",
        },
        storm_interrupts: u32 {
            default: 40_000,
            description: "interrupts of one vector in 0.1 s that mask it until the next look at the link, 0 for never; at 1 us each 40000 are 40 % of a processor",
        },
        doorbell_map: bool {
            default: false,
            description: "allow mapping of doorbell pages, which have no rate limit",
        },
        allow_unsafe_noiommu: bool {
            default: false,
            description: "allow endpoints whose user can aim their DMA without a translating IOMMU (taints the kernel)",
        },
    },
}
