// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ABI of `/dev/pcieipc` as `uapi/pcieipc.h` says it. Made by `scripts/bindgen-user.sh`; `make lint` says when it differs.

#[allow(missing_docs, non_camel_case_types, non_upper_case_globals, dead_code, clippy::all)]
#[rustfmt::skip]
mod bindings;

pub use bindings::*;

/// A structure whose first field is its size, as the caller compiled it.
pub trait Record: Default {
    /// All zero, but for the size.
    fn sized() -> Self;
}

macro_rules! records {
    ($($name:ident)*) => { $(
        const _: () = assert!(core::mem::offset_of!($name, size) == 0);
        impl Record for $name {
            fn sized() -> Self {
                Self { size: size_of::<Self>() as u32, ..Default::default() }
            }
        }
    )* };
}

records! {
    pcieipc_query pcieipc_enumerate pcieipc_endpoint_info pcieipc_distance pcieipc_attach pcieipc_recover
    pcieipc_session_state pcieipc_channel_create pcieipc_channel pcieipc_channel_fd pcieipc_copy pcieipc_vector_eventfd
    pcieipc_ring pcieipc_doorbell pcieipc_admin pcieipc_export_info pcieipc_export_eventfd
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// The numbers are written here once more by hand: a change of the ABI has to be meant.
    #[test]
    fn structures_have_the_sizes_and_offsets_of_abi_version_1() {
        assert_eq!((PCIEIPC_ABI_VERSION, PCIEIPC_ABI_OLDEST), (1, 1));
        let sizes = [
            size_of::<pcieipc_query>(),
            size_of::<pcieipc_enumerate>(),
            size_of::<pcieipc_status>(),
            size_of::<pcieipc_endpoint_info>(),
            size_of::<pcieipc_distance>(),
            size_of::<pcieipc_attach>(),
            size_of::<pcieipc_recover>(),
            size_of::<pcieipc_session_state>(),
            size_of::<pcieipc_channel_create>(),
            size_of::<pcieipc_channel>(),
            size_of::<pcieipc_channel_fd>(),
            size_of::<pcieipc_copy>(),
            size_of::<pcieipc_vector_eventfd>(),
            size_of::<pcieipc_ring>(),
            size_of::<pcieipc_doorbell>(),
            size_of::<pcieipc_admin>(),
            size_of::<pcieipc_export_info>(),
            size_of::<pcieipc_export_eventfd>(),
            size_of::<pcieipc_event>(),
        ];
        assert_eq!(sizes, [96, 24, 24, 144, 32, 32, 16, 64, 56, 16, 16, 48, 16, 16, 40, 16, 64, 16, 64]);
        assert_eq!(offset_of!(pcieipc_query, caps), 24);
        assert_eq!(offset_of!(pcieipc_query, link_sample_ms), 84);
        assert_eq!(offset_of!(pcieipc_status, word), 0);
        assert_eq!(offset_of!(pcieipc_endpoint_info, generation), 16);
        assert_eq!(offset_of!(pcieipc_endpoint_info, profile), 112);
        assert_eq!(offset_of!(pcieipc_channel_create, head_offset), 40);
        assert_eq!(offset_of!(pcieipc_copy, bytes), 32);
        assert_eq!(offset_of!(pcieipc_export_info, status_offset), 56);
        assert_eq!(offset_of!(pcieipc_event, detail), 32);
        // The first version ended there.
        assert_eq!(offset_of!(pcieipc_query, max_sessions), 88);
        assert_eq!(pcieipc_query::sized().size, 96);
    }

    #[test]
    fn calls_have_the_numbers_that_the_ioctl_macros_give() {
        let number = |nr| libc::_IO(PCIEIPC_IOC_MAGIC, nr) as u32;
        assert_eq!(pcieipc_call_PCIEIPC_CALL_QUERY, number(0x00));
        assert_eq!(pcieipc_call_PCIEIPC_CALL_CHANNEL_CREATE, number(0x10));
        assert_eq!(pcieipc_call_PCIEIPC_CALL_COPY, number(0x15));
        assert_eq!(pcieipc_call_PCIEIPC_CALL_CHANNEL_DMABUF, number(0x16));
        assert_eq!(pcieipc_call_PCIEIPC_CALL_VECTOR_EVENTFD, number(0x20));
        assert_eq!(pcieipc_call_PCIEIPC_CALL_ADMIN, number(0x30));
        assert_eq!(pcieipc_call_PCIEIPC_CALL_EXPORT_DOORBELL, number(0x43));
    }
}
