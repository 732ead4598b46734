// SPDX-License-Identifier: GPL-2.0

//! The module's limits, from its parameters, and a brake on its messages.

use crate::module_parameters as parameters;

/// Largest number of endpoints at a time.
pub(crate) const ENDPOINTS: u32 = 256;

/// Most sessions of all users.
pub(crate) const SESSIONS: usize = 16384;

/// Largest copy by an endpoint's engine in one call.
pub(crate) const COPY_BYTES: u32 = 64 << 20;

/// Longest time that a copy may ask for.
pub(crate) const COPY_MS: u32 = 10_000;

/// Largest data area of one channel; the offsets at which it is mapped leave room for no more than 64 GiB.
pub(crate) fn channel_bytes() -> u64 {
    parameters::max_channel_bytes.value().min(1 << 35)
}

/// Largest sum of the data areas of one session.
pub(crate) fn session_bytes() -> u64 {
    parameters::max_session_bytes.value()
}

/// Largest sum of all areas of all channels.
pub(crate) fn total_bytes() -> u64 {
    parameters::max_total_bytes.value()
}

/// Most channels of one session.
pub(crate) fn channels() -> u32 {
    parameters::max_channels.value().min(4096)
}

/// Most sessions of one user.
pub(crate) fn sessions() -> u32 {
    parameters::max_sessions.value().clamp(1, SESSIONS as u32)
}

/// Events that a session's queue holds.
pub(crate) fn event_queue() -> usize {
    parameters::event_queue.value().clamp(16, 65536) as usize
}

/// Ring calls that one session may make in a second; 0 for no limit.
pub(crate) fn doorbells_per_second() -> u32 {
    parameters::doorbells_per_second.value()
}

/// Most correctable-error events of one endpoint in a second.
pub(crate) fn correctable_per_second() -> u32 {
    parameters::correctable_per_second.value().clamp(1, 1000)
}

/// How often an endpoint's link is sampled and its presence checked.
pub(crate) fn link_sample_ms() -> u32 {
    parameters::link_sample_ms.value().clamp(10, 60_000)
}

/// How long an endpoint that does not answer may take to come back before it is gone.
pub(crate) fn missing_ms() -> u32 {
    parameters::missing_ms.value().min(60_000)
}

/// Interrupts of one vector in a tenth of a second that count as a storm; 0 for none.
pub(crate) fn storm_interrupts() -> u32 {
    parameters::storm_interrupts.value()
}

/// Whether doorbell pages may be mapped: a mapped doorbell has no rate limit.
pub(crate) fn doorbell_map() -> bool {
    parameters::doorbell_map.value()
}

/// Whether endpoints whose user can aim their DMA may be used without a translating IOMMU.
pub(crate) fn unsafe_noiommu() -> bool {
    parameters::allow_unsafe_noiommu.value()
}

/// Calls `message` unless too many messages were printed lately: users can cause these at will.
pub(crate) fn say(message: impl FnOnce()) {
    if crate::inline::ratelimit() {
        message();
    }
}
