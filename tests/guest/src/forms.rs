// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every call of the ABI as bytes, and memory that ends where a structure does.

use nix::sys::mman::ProtFlags;

use crate::{
    abi::*,
    call::{Record, number},
    mapping::{Mapping, PAGE},
};

/// A call as bytes, with what its answer is when nothing is wrong with its form.
pub struct Form {
    /// Its name in `uapi/pcieipc.h`.
    pub name: &'static str,
    /// Its number.
    pub number: u8,
    /// Whether it is a call on an exported descriptor.
    pub export: bool,
    /// The structure.
    pub bytes: Vec<u8>,
    /// Offsets of fields that must be zero.
    pub reserved: Vec<usize>,
}

fn form<T: Record>(name: &'static str, number: u8, record: T, reserved: &[usize]) -> Form {
    // SAFETY: plain integers without padding, as `Record` demands.
    let bytes = unsafe { std::slice::from_raw_parts((&raw const record).cast::<u8>(), size_of::<T>()) }.to_vec();
    Form { name, number, export: (0x40..=0x43).contains(&number), bytes, reserved: reserved.to_vec() }
}

/// Every call of the ABI, such that doing it twice has the same answer.
pub fn forms(endpoint: u32, channel: u32) -> Vec<Form> {
    use std::mem::offset_of;
    let mut admin =
        form("ADMIN", number::ADMIN, pcieipc_admin { action: PCIEIPC_ADMIN_RESET, endpoint: u32::MAX, ..Record::new() }, &[]);
    admin.reserved.clear();
    vec![
        form("QUERY", number::QUERY, pcieipc_query { user_version: 1, user_oldest: 1, ..Record::new() }, &[]),
        form("ENUMERATE", number::ENUMERATE, pcieipc_enumerate::new(), &[offset_of!(pcieipc_enumerate, __reserved)]),
        form("ENDPOINT_INFO", number::ENDPOINT_INFO, pcieipc_endpoint_info { endpoint, ..Record::new() }, &[]),
        form(
            "DISTANCE",
            number::DISTANCE,
            pcieipc_distance { from: endpoint, to: endpoint, ..Record::new() },
            &[offset_of!(pcieipc_distance, __reserved)],
        ),
        form("ATTACH", number::ATTACH, pcieipc_attach { endpoint, ..Record::new() }, &[]),
        form("RECOVER", number::RECOVER, pcieipc_recover::new(), &[]),
        form("STATE", number::STATE, pcieipc_session_state::new(), &[]),
        form(
            "CHANNEL_CREATE",
            number::CHANNEL_CREATE,
            pcieipc_channel_create { data_bytes: PAGE as u64, ..Record::new() },
            &[offset_of!(pcieipc_channel_create, __reserved)],
        ),
        form(
            "CHANNEL_DESTROY",
            number::CHANNEL_DESTROY,
            pcieipc_channel { channel: u32::MAX, ..Record::new() },
            &[offset_of!(pcieipc_channel, __reserved)],
        ),
        form("CHANNEL_EXPORT", number::CHANNEL_EXPORT, pcieipc_channel_fd { channel: u32::MAX, ..Record::new() }, &[]),
        form("CHANNEL_IMPORT", number::CHANNEL_IMPORT, pcieipc_channel_fd { fd: -1, ..Record::new() }, &[]),
        form(
            "CHANNEL_FREED",
            number::CHANNEL_FREED,
            pcieipc_channel { channel, ..Record::new() },
            &[offset_of!(pcieipc_channel, __reserved)],
        ),
        form(
            "COPY",
            number::COPY,
            pcieipc_copy { from: channel, to: u32::MAX, bytes: 8, timeout_ms: 1000, ..Record::new() },
            &[offset_of!(pcieipc_copy, __reserved)],
        ),
        form("CHANNEL_DMABUF", number::CHANNEL_DMABUF, pcieipc_channel_fd { channel: u32::MAX, ..Record::new() }, &[]),
        form("VECTOR_EVENTFD", number::VECTOR_EVENTFD, pcieipc_vector_eventfd { fd: -1, ..Record::new() }, &[]),
        form("RING", number::RING, pcieipc_ring::new(), &[offset_of!(pcieipc_ring, __reserved)]),
        form("DOORBELL_MAP", number::DOORBELL_MAP, pcieipc_doorbell::new(), &[]),
        admin,
        form("EXPORT_INFO", number::EXPORT_INFO, pcieipc_export_info::new(), &[]),
        form("EXPORT_RING", number::EXPORT_RING, pcieipc_ring::new(), &[offset_of!(pcieipc_ring, __reserved)]),
        form(
            "EXPORT_EVENTFD",
            number::EXPORT_EVENTFD,
            pcieipc_export_eventfd { fd: -1, ..Record::new() },
            &[offset_of!(pcieipc_export_eventfd, __reserved)],
        ),
        form("EXPORT_DOORBELL", number::EXPORT_DOORBELL, pcieipc_doorbell::new(), &[]),
    ]
}

/// Two pages of which the second is not there.
#[derive(Debug)]
pub struct Fence(Mapping);

impl Fence {
    /// Fresh pages.
    pub fn new() -> Self {
        let memory = Mapping::anonymous(2 * PAGE).unwrap_or_else(|error| panic!("{error}"));
        // SAFETY: the second page is ours and nothing refers to it.
        unsafe { nix::sys::mman::mprotect(memory.address().byte_add(PAGE), PAGE, ProtFlags::PROT_NONE) }
            .unwrap_or_else(|error| panic!("{error}"));
        Self(memory)
    }

    /// The bytes, ending at the end of the first page.
    pub fn end(&self, bytes: &[u8]) -> *mut libc::c_void {
        assert!(bytes.len() <= PAGE);
        // SAFETY: inside the first page, which is ours.
        unsafe {
            let start = self.0.address().cast::<u8>().as_ptr().add(PAGE - bytes.len());
            start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            start.cast()
        }
    }
}

impl Default for Fence {
    fn default() -> Self {
        Self::new()
    }
}
