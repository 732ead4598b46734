// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C interface of pcieipc: `libpcieipc.so` and `pcieipc.h`.
//!
//! Every function returns a [`pcieipc_status`] and stores what it makes behind a pointer. No function unwinds into C: a bug
//! that would is reported as [`pcieipc_status::Internal`]. After an error, [`pcieipc_last_error`] has its text, for the
//! calling thread.
#![allow(non_camel_case_types, clippy::missing_safety_doc)]

mod buffer;
mod collectives;
mod cuda;
mod group;
mod growing;
mod start;
mod status;

pub use buffer::*;
pub use collectives::*;
pub use cuda::*;
pub use group::*;
pub use start::*;
pub use status::*;

/// What programs that were linked before rely on, as `examples/processes.h` says it of the header: a version that adds a field makes a struct
/// longer, and moves nothing.
#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::offset_of;
    macro_rules! at {
        ($of:ty: $($field:ident $offset:literal)*) => { $( assert!(offset_of!($of, $field) == $offset); )* };
    }
    at!(pcieipc_options: size 0 directory 8 rank 16 ranks 20 transport 24 endpoint 28 ring_bytes 32 meeting_timeout_ms 40 algorithm 44);
    at!(pcieipc_options: helper_thread 48 tuned 52 checked 56 degraded_link_is_error 60);
    at!(pcieipc_cuda_options: size 0 directory 8 rank 16 ranks 20 device 24 path 28 deadline_ms 32 setup_timeout_ms 36 types 40 blocks 44);
    at!(pcieipc_cuda_options: checked 48 reserved 52);
    at!(pcieipc_agreement: size 0 ok 8 failed 12 returned 16 reserved 20);
    at!(pcieipc_error: size 0 status 8 rank 12 endpoint 16 generation 24);
    at!(pcieipc_call: size 0 collective 8 element 12 operation 16 rank 20 from 24 to 32 count 40 timeout_ms 48);
    assert!(pcieipc_status::Internal as u32 == 13 && pcieipc_type::U64 as u32 == 11 && pcieipc_op::Average as u32 == 4);
    assert!(pcieipc_collective::Barrier as u32 == 9 && pcieipc_transport::Kmod as u32 == 1);
};
