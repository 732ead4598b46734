// SPDX-License-Identifier: MIT OR Apache-2.0
//! The driver's library, loaded when it is first asked for: one binary serves hosts with and without CUDA.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    sync::OnceLock,
};

use libloading::Library;
use pcieipc::Result;

use super::refused;

pub type Status = c_int;
pub type Ptr = *mut c_void;

/// `CUlaunchAttribute` of the driver's header: an id, padding to 8, and a union of 64 bytes.
#[repr(C)]
pub struct LaunchAttribute {
    pub id: c_uint,
    pub pad: [u8; 4],
    pub value: [u64; 8],
}

/// `CUlaunchConfig` of the driver's header.
#[repr(C)]
pub struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared: c_uint,
    pub stream: Ptr,
    pub attributes: *const LaunchAttribute,
    pub count: c_uint,
}

/// `CUipcMemHandle`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct IpcHandle {
    pub bytes: [u8; 64],
}

/// `CUmemLocation` of the driver's header.
#[repr(C)]
pub struct Location {
    /// 1: a device.
    pub kind: c_int,
    pub id: c_int,
}

/// `CUmemAllocationProp` of the driver's header.
#[repr(C)]
pub struct AllocationProperties {
    /// 1: memory that stays where it is.
    pub kind: c_int,
    pub handles: c_int,
    pub location: Location,
    pub windows: Ptr,
    pub flags: [u8; 8],
}

/// `CUmemAccessDesc` of the driver's header.
#[repr(C)]
pub struct Access {
    pub location: Location,
    /// 1: to read, 3: to read and write.
    pub flags: c_int,
}

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// The entry points that are used, by the driver's names.
        #[derive(Debug)]
        pub struct Symbols {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> Status,)*
            _library: Library,
        }
        impl Symbols {
            fn load(library: Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the types are those of the driver's header for these symbols, which the driver never changes: a changed
                // function gets a new name.
                unsafe { Ok(Self { $($field: *library.get(concat!($symbol, "\0").as_bytes())?,)* _library: library }) }
            }
        }
    };
}

functions! {
    init = "cuInit"(c_uint);
    error_name = "cuGetErrorName"(Status, *mut *const c_char);
    device_count = "cuDeviceGetCount"(*mut c_int);
    device_get = "cuDeviceGet"(*mut c_int, c_int);
    device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
    device_memory = "cuDeviceTotalMem_v2"(*mut usize, c_int);
    device_pci = "cuDeviceGetPCIBusId"(*mut c_char, c_int, c_int);
    can_access = "cuDeviceCanAccessPeer"(*mut c_int, c_int, c_int);
    p2p_attribute = "cuDeviceGetP2PAttribute"(*mut c_int, c_int, c_int, c_int);
    retain = "cuDevicePrimaryCtxRetain"(*mut Ptr, c_int);
    set_current = "cuCtxSetCurrent"(Ptr);
    enable_peer = "cuCtxEnablePeerAccess"(Ptr, c_uint);
    alloc = "cuMemAlloc_v2"(*mut u64, usize);
    free = "cuMemFree_v2"(u64);
    to_device = "cuMemcpyHtoD_v2"(u64, *const c_void, usize);
    from_device = "cuMemcpyDtoH_v2"(*mut c_void, u64, usize);
    copy = "cuMemcpyAsync"(u64, u64, usize, Ptr);
    fill = "cuMemsetD32Async"(u64, c_uint, usize, Ptr);
    export = "cuIpcGetMemHandle"(*mut IpcHandle, u64);
    import = "cuIpcOpenMemHandle_v2"(*mut u64, IpcHandle, c_uint);
    release = "cuIpcCloseMemHandle"(u64);
    granularity = "cuMemGetAllocationGranularity"(*mut usize, *const AllocationProperties, c_uint);
    create = "cuMemCreate"(*mut u64, usize, *const AllocationProperties, u64);
    release_piece = "cuMemRelease"(u64);
    reserve = "cuMemAddressReserve"(*mut u64, usize, usize, u64, u64);
    unreserve = "cuMemAddressFree"(u64, usize);
    map = "cuMemMap"(u64, usize, usize, u64, u64);
    unmap = "cuMemUnmap"(u64, usize);
    set_access = "cuMemSetAccess"(u64, usize, *const Access, usize);
    retain_piece = "cuMemRetainAllocationHandle"(*mut u64, Ptr);
    export_piece = "cuMemExportToShareableHandle"(*mut c_void, u64, c_int, u64);
    import_piece = "cuMemImportFromShareableHandle"(*mut u64, Ptr, c_int);
    alloc_pooled = "cuMemAllocAsync"(*mut u64, usize, Ptr);
    register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
    registered = "cuMemHostGetDevicePointer_v2"(*mut u64, *mut c_void, c_uint);
    unregister = "cuMemHostUnregister"(*mut c_void);
    load = "cuModuleLoadData"(*mut Ptr, *const c_void);
    function = "cuModuleGetFunction"(*mut Ptr, Ptr, *const c_char);
    launch = "cuLaunchKernelEx"(*const LaunchConfig, Ptr, *mut *mut c_void, *mut *mut c_void);
    pointer = "cuPointerGetAttribute"(*mut c_void, c_int, u64);
    range = "cuMemGetAddressRange_v2"(*mut u64, *mut usize, u64);
    stream = "cuStreamCreate"(*mut Ptr, c_uint);
    priorities = "cuCtxGetStreamPriorityRange"(*mut c_int, *mut c_int);
    lane = "cuStreamCreateWithPriority"(*mut Ptr, c_uint, c_int);
    query = "cuStreamQuery"(Ptr);
    synchronize = "cuStreamSynchronize"(Ptr);
    event = "cuEventCreate"(*mut Ptr, c_uint);
    record = "cuEventRecord"(Ptr, Ptr);
    wait = "cuStreamWaitEvent"(Ptr, Ptr, c_uint);
    between = "cuEventElapsedTime"(*mut f32, Ptr, Ptr);
    begin_capture = "cuStreamBeginCapture_v2"(Ptr, c_int);
    end_capture = "cuStreamEndCapture"(Ptr, *mut Ptr);
    capture = "cuStreamGetCaptureInfo_v2"(Ptr, *mut c_int, *mut u64, *mut Ptr, *mut *const Ptr, *mut usize);
    instantiate = "cuGraphInstantiateWithFlags"(*mut Ptr, Ptr, u64);
    replay = "cuGraphLaunch"(Ptr, Ptr);
    destroy_graph = "cuGraphDestroy"(Ptr);
    destroy_exec = "cuGraphExecDestroy"(Ptr);
}

fn opened() -> &'static std::result::Result<Symbols, String> {
    static LIBRARY: OnceLock<std::result::Result<Symbols, String>> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // SAFETY: the driver's library may be loaded at any time; its initializers do nothing but set up the library.
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(|e| e.to_string())?;
        Symbols::load(library).map_err(|e| format!("{e} (a driver for CUDA 12.0 or later is needed)"))
    })
}

/// The entry points.
///
/// # Errors
/// `System`: no driver, or one that is too old.
pub fn symbols() -> Result<&'static Symbols> {
    opened().as_ref().map_err(|e| refused("loading libcuda.so.1", e.clone(), "install NVIDIA's driver, or use another transport"))
}

/// Whether a driver is installed; says why not.
///
/// # Errors
/// The loader's words.
pub fn present() -> std::result::Result<(), String> {
    opened().as_ref().map(drop).map_err(Clone::clone)
}
