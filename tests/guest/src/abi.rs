// SPDX-License-Identifier: MIT OR Apache-2.0
//! Made from uapi/pcieipc.h: bindgen uapi/pcieipc.h --allowlist-item "^(pcieipc|PCIEIPC).*" --no-layout-tests --with-derive-default
//! --no-doc-comments --no-prepend-enum-name --rust-target 1.82 -- -I/usr/include/x86_64-linux-gnu
#![allow(missing_docs, non_camel_case_types, clippy::all)]

pub const PCIEIPC_ABI_VERSION: u32 = 1;
pub const PCIEIPC_ABI_OLDEST: u32 = 1;
pub const PCIEIPC_NODE: &[u8; 13] = b"/dev/pcieipc\0";
pub const PCIEIPC_IOC_MAGIC: u32 = 233;
pub const PCIEIPC_CAP_COPY: u32 = 1;
pub const PCIEIPC_CAP_DOORBELL_MAP: u32 = 2;
pub const PCIEIPC_CAP_UNSAFE_NOIOMMU: u32 = 4;
pub const PCIEIPC_CAP_PROFILES: u32 = 8;
pub const PCIEIPC_CAP_ERROR_RECOVERY: u32 = 16;
pub const PCIEIPC_CAP_ADMIN: u32 = 32;
pub const PCIEIPC_CAP_DEVICE_MEMORY: u32 = 64;
pub const PCIEIPC_IOMMU_NONE: u32 = 0;
pub const PCIEIPC_IOMMU_IDENTITY: u32 = 1;
pub const PCIEIPC_IOMMU_TRANSLATING: u32 = 2;
pub const PCIEIPC_EP_ATTACHED: u32 = 1;
pub const PCIEIPC_EP_DMA_ENGINE: u32 = 2;
pub const PCIEIPC_EP_RING_REGISTERS: u32 = 4;
pub const PCIEIPC_EP_DOORBELL_PAGE: u32 = 8;
pub const PCIEIPC_EP_MEMORY: u32 = 16;
pub const PCIEIPC_EP_USER_DMA: u32 = 32;
pub const PCIEIPC_FAR_SAME_FUNCTION_CARD: u32 = 1;
pub const PCIEIPC_FAR_SAME_SWITCH: u32 = 2;
pub const PCIEIPC_FAR_HOST_BRIDGE: u32 = 4;
pub const PCIEIPC_FAR_ACS_REDIRECT: u32 = 8;
pub const PCIEIPC_FAR_SOCKETS: u32 = 16;
pub const PCIEIPC_FAR_IOMMU: u32 = 32;
pub const PCIEIPC_CHANNEL_DEVICE_MEMORY: u32 = 1;
pub const PCIEIPC_COPY_RING: u32 = 1;
pub const PCIEIPC_VECTOR_MASK: u32 = 1;
pub type __u8 = ::std::os::raw::c_uchar;
pub type __u16 = ::std::os::raw::c_ushort;
pub type __s32 = ::std::os::raw::c_int;
pub type __u32 = ::std::os::raw::c_uint;
pub type __u64 = ::std::os::raw::c_ulonglong;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_query {
    pub size: __u32,
    pub flags: __u32,
    pub user_version: __u32,
    pub user_oldest: __u32,
    pub version: __u32,
    pub oldest: __u32,
    pub caps: __u64,
    pub max_channel_bytes: __u64,
    pub max_session_bytes: __u64,
    pub max_total_bytes: __u64,
    pub max_channels: __u32,
    pub max_copy_bytes: __u32,
    pub max_endpoints: __u32,
    pub event_queue: __u32,
    pub doorbells_per_second: __u32,
    pub page_size: __u32,
    pub correctable_per_second: __u32,
    pub link_sample_ms: __u32,
    pub max_sessions: __u32,
    pub storm_interrupts: __u32,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_enumerate {
    pub size: __u32,
    pub flags: __u32,
    pub ids: __u64,
    pub count: __u32,
    pub __reserved: __u32,
}
pub const PCIEIPC_STATE_LIVE: pcieipc_state = 1;
pub const PCIEIPC_STATE_RECOVERING: pcieipc_state = 2;
pub const PCIEIPC_STATE_DEAD: pcieipc_state = 3;
pub const PCIEIPC_STATE_GONE: pcieipc_state = 4;
pub type pcieipc_state = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_status {
    pub word: __u64,
    pub interrupts: __u64,
    pub link: __u32,
    pub __reserved: __u32,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_endpoint_info {
    pub size: __u32,
    pub flags: __u32,
    pub endpoint: __u32,
    pub state: __u32,
    pub generation: __u64,
    pub serial: __u64,
    pub address: __u32,
    pub vendor: __u16,
    pub device: __u16,
    pub numa_node: __s32,
    pub iommu: __u32,
    pub iommu_group: __s32,
    pub ep_flags: __u32,
    pub vectors: __u32,
    pub link_speed: __u8,
    pub link_width: __u8,
    pub link_speed_max: __u8,
    pub link_width_max: __u8,
    pub memory_bytes: __u64,
    pub doorbells: __u64,
    pub interrupts: __u64,
    pub events_lost: __u64,
    pub dma_bytes: __u64,
    pub correctable: __u64,
    pub profile: [::std::os::raw::c_char; 32usize],
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_distance {
    pub size: __u32,
    pub flags: __u32,
    pub from: __u32,
    pub to: __u32,
    pub hops: __u32,
    pub reasons: __u32,
    pub p2p: __u32,
    pub __reserved: __u32,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_attach {
    pub size: __u32,
    pub flags: __u32,
    pub endpoint: __u32,
    pub vectors: __u32,
    pub generation: __u64,
    pub status_offset: __u64,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_recover {
    pub size: __u32,
    pub flags: __u32,
    pub generation: __u64,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_session_state {
    pub size: __u32,
    pub flags: __u32,
    pub endpoint: __u32,
    pub state: __u32,
    pub generation: __u64,
    pub attached_generation: __u64,
    pub locked_bytes: __u64,
    pub doorbells: __u64,
    pub events_lost: __u64,
    pub channels: __u32,
    pub events: __u32,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_channel_create {
    pub size: __u32,
    pub flags: __u32,
    pub data_bytes: __u64,
    pub vector: __u32,
    pub channel: __u32,
    pub data_offset: __u64,
    pub tail_offset: __u64,
    pub head_offset: __u64,
    pub segments: __u32,
    pub __reserved: __u32,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_channel {
    pub size: __u32,
    pub flags: __u32,
    pub channel: __u32,
    pub __reserved: __u32,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_channel_fd {
    pub size: __u32,
    pub flags: __u32,
    pub channel: __u32,
    pub fd: __s32,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_copy {
    pub size: __u32,
    pub flags: __u32,
    pub from: __u32,
    pub to: __u32,
    pub from_offset: __u64,
    pub to_offset: __u64,
    pub bytes: __u32,
    pub timeout_ms: __u32,
    pub __reserved: __u64,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_vector_eventfd {
    pub size: __u32,
    pub flags: __u32,
    pub vector: __u32,
    pub fd: __s32,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_ring {
    pub size: __u32,
    pub flags: __u32,
    pub vector: __u32,
    pub __reserved: __u32,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_doorbell {
    pub size: __u32,
    pub flags: __u32,
    pub vector: __u32,
    pub width: __u32,
    pub map_offset: __u64,
    pub page_offset: __u64,
    pub value: __u64,
}
pub const PCIEIPC_ADMIN_RESET: pcieipc_admin_action = 1;
pub const PCIEIPC_ADMIN_REMOVE: pcieipc_admin_action = 2;
pub const PCIEIPC_ADMIN_RESCAN: pcieipc_admin_action = 3;
pub type pcieipc_admin_action = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_admin {
    pub size: __u32,
    pub flags: __u32,
    pub action: __u32,
    pub endpoint: __u32,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_export_info {
    pub size: __u32,
    pub flags: __u32,
    pub endpoint: __u32,
    pub vector: __u32,
    pub generation: __u64,
    pub data_bytes: __u64,
    pub data_offset: __u64,
    pub tail_offset: __u64,
    pub head_offset: __u64,
    pub status_offset: __u64,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_export_eventfd {
    pub size: __u32,
    pub flags: __u32,
    pub fd: __s32,
    pub __reserved: __u32,
}
pub const PCIEIPC_EVENT_LOST: pcieipc_event_kind = 0;
pub const PCIEIPC_EVENT_STATE: pcieipc_event_kind = 1;
pub const PCIEIPC_EVENT_ERROR: pcieipc_event_kind = 2;
pub const PCIEIPC_EVENT_CORRECTABLE: pcieipc_event_kind = 3;
pub const PCIEIPC_EVENT_LINK: pcieipc_event_kind = 4;
pub const PCIEIPC_EVENT_ADDED: pcieipc_event_kind = 5;
pub const PCIEIPC_EVENT_ADMIN: pcieipc_event_kind = 6;
pub const PCIEIPC_EVENT_STORM: pcieipc_event_kind = 7;
pub type pcieipc_event_kind = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct pcieipc_event {
    pub sequence: __u64,
    pub generation: __u64,
    pub time_ns: __u64,
    pub kind: __u32,
    pub endpoint: __u32,
    pub detail: [__u64; 4usize],
}
