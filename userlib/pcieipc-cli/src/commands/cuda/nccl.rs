// SPDX-License-Identifier: MIT OR Apache-2.0
//! NCCL, loaded at run time, as the peer to compare with; as the environment configures it.

use std::{
    ffi::{c_char, c_int, c_void},
    ptr::null_mut,
    sync::Arc,
    time::Duration,
};

use libloading::Library;
use pcieipc::{Error, Result, group::Group, reduce::Kind};
use pcieipc_cuda::driver::{Address, Device, Stream};

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct Id {
    bytes: [c_char; 128],
}
type Comm = *mut c_void;

/// One rank's communicator.
pub struct Nccl {
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> c_int,
    device: Arc<dyn Device>,
    comm: Comm,
    _library: Library,
}

fn refused(call: &'static str, answer: impl Into<String>) -> Error {
    Error::System {
        call,
        hint: "set PCIEIPC_NCCL to the file of libnccl.so.2; NCCL_DEBUG=INFO says more".into(),
        source: std::io::Error::other(answer.into()).into(),
    }
}

fn answered(call: &'static str, status: c_int) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(refused(call, format!("error {status}"))) }
}

impl Nccl {
    pub fn new(group: &mut Group, device: Arc<dyn Device>) -> Result<Self> {
        let file = std::env::var("PCIEIPC_NCCL").unwrap_or_else(|_| "libnccl.so.2".into());
        // SAFETY: NCCL may be loaded at any time; the types below are those of its header.
        unsafe {
            let library = Library::new(&file).map_err(|e| refused("loading NCCL", e.to_string()))?;
            let missing = |e: libloading::Error| refused("loading NCCL", e.to_string());
            let unique: unsafe extern "C" fn(*mut Id) -> c_int = *library.get(b"ncclGetUniqueId\0").map_err(missing)?;
            let init: unsafe extern "C" fn(*mut Comm, c_int, Id, c_int) -> c_int =
                *library.get(b"ncclCommInitRank\0").map_err(missing)?;
            let all_reduce = *library.get(b"ncclAllReduce\0").map_err(missing)?;
            // Makes the device's context current on this thread, in which NCCL works.
            device.synchronize(Stream(0))?;
            let mut id = Id { bytes: [0; 128] };
            if group.rank() == 0 {
                answered("ncclGetUniqueId", unique(&mut id))?;
            }
            let bytes: Vec<u8> = id.bytes.iter().map(|c| *c as u8).collect();
            let given = group.exchange("NCCL's id", &bytes, &[], Duration::from_secs(30))?;
            if group.rank() != 0 {
                for (to, from) in id.bytes.iter_mut().zip(&given[0].0) {
                    *to = *from as c_char;
                }
            }
            let mut comm = null_mut();
            answered("ncclCommInitRank", init(&mut comm, group.ranks() as c_int, id, group.rank() as c_int))?;
            Ok(Self { all_reduce, device, comm, _library: library })
        }
    }

    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// # Safety
    /// Both addresses must be memory of the device for `count` elements until the stream has run the call.
    pub unsafe fn all_reduce(&self, input: Address, output: Address, count: u64, kind: Kind, stream: Stream) -> Result<()> {
        let kind = match kind {
            Kind::I8 => 0,
            Kind::U8 => 1,
            Kind::I32 => 2,
            Kind::U32 => 3,
            Kind::I64 => 4,
            Kind::U64 => 5,
            Kind::F16 => 6,
            Kind::F32 => 7,
            Kind::F64 => 8,
            Kind::BF16 => 9,
            Kind::I16 | Kind::U16 => return Err(Error::Argument("NCCL has no 16-bit integers".into())),
        };
        // SAFETY: the caller's promise; 0 is the sum.
        answered("ncclAllReduce", unsafe {
            (self.all_reduce)(
                input as *const c_void,
                output as *mut c_void,
                count as usize,
                kind,
                0,
                self.comm,
                stream.0 as *mut c_void,
            )
        })
    }
}
