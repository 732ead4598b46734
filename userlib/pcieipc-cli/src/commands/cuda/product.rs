// SPDX-License-Identifier: MIT OR Apache-2.0
//! A matrix product on a device by cuBLAS, loaded at run time: what an all-reduce has to share a device with.

use std::{
    ffi::{c_int, c_void},
    ptr::null_mut,
    sync::Arc,
};

use libloading::Library;
use pcieipc::{Error, Result, reduce::Kind};
use pcieipc_cuda::driver::{Address, Device, Event, Stream};

type Handle = *mut c_void;
type Gemm = unsafe extern "C" fn(
    Handle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// Rows and columns of all three matrices.
pub const SIDE: u64 = 8192;
const BF16: c_int = 14;
const COMPUTE_F32: c_int = 68;

/// Products of two random bf16 matrices, on a stream of their own.
pub struct Product {
    gemm: Gemm,
    handle: Handle,
    device: Arc<dyn Device>,
    matrices: [Address; 3],
    pub stream: Stream,
    events: [Event; 2],
    _library: Library,
}

fn refused(answer: impl Into<String>) -> Error {
    Error::System {
        call: "cuBLAS",
        hint: "set PCIEIPC_CUBLAS to the file of libcublas.so".into(),
        source: std::io::Error::other(answer.into()).into(),
    }
}

fn answered(call: &str, status: c_int) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(refused(format!("{call}: error {status}"))) }
}

impl Product {
    pub fn new(device: &Arc<dyn Device>) -> Result<Self> {
        let file = std::env::var("PCIEIPC_CUBLAS").unwrap_or_else(|_| "libcublas.so.13".into());
        let stream = device.stream()?;
        let bytes = SIDE * SIDE * 2;
        let matrices = [device.alloc(bytes)?, device.alloc(bytes)?, device.alloc(bytes)?];
        let block = super::numbers::fill(Kind::BF16, 2 << 20, 5);
        for matrix in &matrices[..2] {
            for at in (0..bytes).step_by(block.len()) {
                device.write(matrix + at, &block[..block.len().min((bytes - at) as usize)])?;
            }
        }
        // SAFETY: cuBLAS may be loaded at any time; the types are those of its header. The device's context is current on this
        // thread since the writes above.
        unsafe {
            let library = Library::new(&file).map_err(|e| refused(e.to_string()))?;
            let missing = |e: libloading::Error| refused(e.to_string());
            let create: unsafe extern "C" fn(*mut Handle) -> c_int = *library.get(b"cublasCreate_v2\0").map_err(missing)?;
            let set_stream: unsafe extern "C" fn(Handle, *mut c_void) -> c_int =
                *library.get(b"cublasSetStream_v2\0").map_err(missing)?;
            let gemm: Gemm = *library.get(b"cublasGemmEx\0").map_err(missing)?;
            let mut handle = null_mut();
            answered("cublasCreate", create(&mut handle))?;
            answered("cublasSetStream", set_stream(handle, stream.0 as *mut c_void))?;
            let events = [device.event(true)?, device.event(true)?];
            Ok(Self { gemm, handle, device: device.clone(), matrices, stream, events, _library: library })
        }
    }

    /// Enqueues so many products, between two events.
    pub fn enqueue(&self, count: u32) -> Result<()> {
        let (one, zero, side) = (1f32, 0f32, SIDE as c_int);
        self.device.record(self.events[0], self.stream)?;
        for _ in 0..count {
            let [a, b, c] = self.matrices.map(|m| m as *mut c_void);
            // SAFETY: three matrices of this size, which live as long as the process; the factors are read before the call returns.
            answered("cublasGemmEx", unsafe {
                (self.gemm)(
                    self.handle,
                    0,
                    0,
                    side,
                    side,
                    side,
                    (&raw const one).cast(),
                    a,
                    BF16,
                    side,
                    b,
                    BF16,
                    side,
                    (&raw const zero).cast(),
                    c,
                    BF16,
                    side,
                    COMPUTE_F32,
                    -1,
                )
            })?;
        }
        self.device.record(self.events[1], self.stream)
    }

    /// Waits, and tells how long all that was enqueued took, in microseconds.
    pub fn took(&self) -> Result<f64> {
        self.device.synchronize(self.stream)?;
        self.device.between(self.events[0], self.events[1])
    }
}
