// SPDX-License-Identifier: GPL-2.0

//! The ABI, as bindgen reads it from `uapi/pcieipc.h`.

/// What bindgen wrote; its layout assertions are checked at compile time.
#[allow(
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    unreachable_pub,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
mod view {
    include!(env!("PCIEIPC_UAPI_VIEW"));
}

pub(crate) use view::*;

/// A structure that crosses the ABI: its first field is its size, it has no padding, and every bit pattern is a value.
///
/// # Safety
///
/// Implementors hold integers only and have no padding, so that they can be read and written as bytes.
pub(crate) unsafe trait Record: Copy + Default {
    /// Bytes of its first version: a caller may know no more.
    const FIRST: usize;
}

#[allow(dead_code)] // used in constants only
const fn field_size<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! records {
    ($($name:ident $(from $first:literal)? { $($field:ident),+ $(,)? })+) => {$(
        const _: () = assert!(0 $(+ field_size(|record: &$name| &record.$field))+ == size_of::<$name>());
        const _: () = assert!(core::mem::offset_of!($name, size) == 0);
        // SAFETY: All fields are integers or arrays of them; the assertion above adds up their sizes, so there is no padding.
        unsafe impl Record for $name {
            const FIRST: usize = [$($first,)? size_of::<$name>()][0];
        }
    )+};
}

records! {
    pcieipc_query from 88 {
        size, flags, user_version, user_oldest, version, oldest, caps, max_channel_bytes, max_session_bytes,
        max_total_bytes, max_channels, max_copy_bytes, max_endpoints, event_queue, doorbells_per_second, page_size,
        correctable_per_second, link_sample_ms, max_sessions, storm_interrupts,
    }
    pcieipc_enumerate { size, flags, ids, count, __reserved }
    pcieipc_endpoint_info {
        size, flags, endpoint, state, generation, serial, address, vendor, device, numa_node, iommu, iommu_group,
        ep_flags, vectors, link_speed, link_width, link_speed_max, link_width_max, memory_bytes, doorbells, interrupts,
        events_lost, dma_bytes, correctable, profile,
    }
    pcieipc_distance { size, flags, from, to, hops, reasons, p2p, __reserved }
    pcieipc_attach { size, flags, endpoint, vectors, generation, status_offset }
    pcieipc_recover { size, flags, generation }
    pcieipc_session_state {
        size, flags, endpoint, state, generation, attached_generation, locked_bytes, doorbells, events_lost, channels,
        events,
    }
    pcieipc_channel_create {
        size, flags, data_bytes, vector, channel, data_offset, tail_offset, head_offset, segments, __reserved,
    }
    pcieipc_channel { size, flags, channel, __reserved }
    pcieipc_channel_fd { size, flags, channel, fd }
    pcieipc_copy { size, flags, from, to, from_offset, to_offset, bytes, timeout_ms, __reserved }
    pcieipc_vector_eventfd { size, flags, vector, fd }
    pcieipc_ring { size, flags, vector, __reserved }
    pcieipc_doorbell { size, flags, vector, width, map_offset, page_offset, value }
    pcieipc_admin { size, flags, action, endpoint }
    pcieipc_export_info {
        size, flags, endpoint, vector, generation, data_bytes, data_offset, tail_offset, head_offset, status_offset,
    }
    pcieipc_export_eventfd { size, flags, fd, __reserved }
}

/// Builds a status word.
pub(crate) const fn status_word(state: u32, generation: u64) -> u64 {
    generation << 8 | state as u64
}

/// The state in a status word.
pub(crate) const fn status_state(word: u64) -> u32 {
    (word & 0xff) as u32
}

/// The generation in a status word.
pub(crate) const fn status_generation(word: u64) -> u64 {
    word >> 8
}

/// A state of an endpoint, as numbered in the ABI.
pub(crate) mod state {
    use super::*;

    pub(crate) const LIVE: u32 = pcieipc_state_PCIEIPC_STATE_LIVE;
    pub(crate) const RECOVERING: u32 = pcieipc_state_PCIEIPC_STATE_RECOVERING;
    pub(crate) const DEAD: u32 = pcieipc_state_PCIEIPC_STATE_DEAD;
    pub(crate) const GONE: u32 = pcieipc_state_PCIEIPC_STATE_GONE;

    /// A state's name.
    pub(crate) const fn name(state: u32) -> &'static str {
        match state {
            LIVE => "live",
            RECOVERING => "recovering",
            DEAD => "dead",
            GONE => "gone",
            _ => "unknown",
        }
    }
}

/// A kind of event, as numbered in the ABI.
pub(crate) mod kind {
    use super::*;

    pub(crate) const LOST: u32 = pcieipc_event_kind_PCIEIPC_EVENT_LOST;
    pub(crate) const STATE: u32 = pcieipc_event_kind_PCIEIPC_EVENT_STATE;
    pub(crate) const ERROR: u32 = pcieipc_event_kind_PCIEIPC_EVENT_ERROR;
    pub(crate) const CORRECTABLE: u32 = pcieipc_event_kind_PCIEIPC_EVENT_CORRECTABLE;
    pub(crate) const LINK: u32 = pcieipc_event_kind_PCIEIPC_EVENT_LINK;
    pub(crate) const ADDED: u32 = pcieipc_event_kind_PCIEIPC_EVENT_ADDED;
    pub(crate) const ADMIN: u32 = pcieipc_event_kind_PCIEIPC_EVENT_ADMIN;
    pub(crate) const STORM: u32 = pcieipc_event_kind_PCIEIPC_EVENT_STORM;
}

#[kernel::macros::kunit_tests(pcieipc_uapi)]
mod tests {
    use super::*;

    #[test]
    fn a_status_word_holds_state_and_generation_apart() {
        for generation in [0, 1, 0xff, 1 << 32, (1 << 56) - 1] {
            for state in [state::LIVE, state::RECOVERING, state::DEAD, state::GONE] {
                let word = status_word(state, generation);
                assert_eq!((status_state(word), status_generation(word)), (state, generation));
            }
        }
    }

    #[test]
    fn each_state_has_a_name_and_what_is_none_too() {
        assert_eq!(state::name(state::LIVE), "live");
        assert_eq!(state::name(state::GONE), "gone");
        assert_eq!(state::name(0), "unknown");
    }
}
