// SPDX-License-Identifier: MIT OR Apache-2.0
//! The driver as it is.

use std::{
    ffi::{CStr, CString, c_int, c_void},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::{NonNull, null, null_mut},
    sync::Arc,
};

use pcieipc::{Error, Result};

use super::{
    Address, AddressFacts, Device, DeviceFacts, Driver, Event, Function, Graph, Handle, Launch, Module, PeerClaim, Sharing,
    Stream,
    library::{Access, AllocationProperties, IpcHandle, LaunchAttribute, LaunchConfig, Location, Ptr, Status, Symbols, symbols},
    refused,
};
use crate::abi::Args;

const NOT_READY: Status = 600;
const PEER_ALREADY: Status = 704;
/// The kind of handle that is a file.
const FILE: c_int = 1;

/// NVIDIA's driver.
#[derive(Debug, Clone, Copy)]
pub struct Cuda {
    symbols: &'static Symbols,
}

#[derive(Debug)]
struct Context {
    symbols: &'static Symbols,
    facts: DeviceFacts,
    context: usize,
}

fn name(symbols: &Symbols, status: Status) -> String {
    let mut text = null();
    // SAFETY: writes a pointer to a constant string, or null.
    unsafe { (symbols.error_name)(status, &mut text) };
    if text.is_null() {
        return format!("error {status}");
    }
    // SAFETY: the driver's constant, ended by zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn hint(status: Status) -> &'static str {
    match status {
        2 => "the device's memory is full; free some or use smaller buffers",
        100 => "no CUDA device is visible; look at CUDA_VISIBLE_DEVICES and nvidia-smi",
        201 | 709 => "the context was destroyed; do not reset the device while a communicator lives",
        700 | 719 => "a kernel failed; run under compute-sanitizer, and start the process again",
        801 => "this allocation or device does not support that; use the host path",
        802 => "the driver's services are not ready; look at nvidia-smi and the fabric manager",
        _ => "look up the name in NVIDIA's driver documentation",
    }
}

impl Cuda {
    /// Loads and starts the driver.
    ///
    /// # Errors
    /// `System` when there is no driver, it is too old, or it can not start.
    pub fn start() -> Result<Self> {
        let symbols = symbols()?;
        let cuda = Self { symbols };
        // SAFETY: may be called at any time, also again.
        cuda.check("cuInit", unsafe { (symbols.init)(0) })?;
        Ok(cuda)
    }

    fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == 0 { Ok(()) } else { Err(refused(call, name(self.symbols, status), hint(status))) }
    }

    fn attribute(&self, attribute: c_int, device: c_int) -> Result<i32> {
        let mut value = 0;
        // SAFETY: writes one int.
        self.check("cuDeviceGetAttribute", unsafe { (self.symbols.device_attribute)(&mut value, attribute, device) })?;
        Ok(value)
    }

    fn facts(&self, ordinal: i32) -> Result<DeviceFacts> {
        let s = self.symbols;
        let (mut device, mut text, mut bytes) = (0, [0; 256], 0);
        // SAFETY: each call writes within the place that it is given with its length.
        unsafe {
            self.check("cuDeviceGet", (s.device_get)(&mut device, ordinal))?;
            self.check("cuDeviceGetName", (s.device_name)(text.as_mut_ptr(), 255, device))?;
        }
        let word = |text: &[std::ffi::c_char]| -> String {
            text.iter().take_while(|c| **c != 0).map(|c| char::from(*c as u8)).collect()
        };
        let name = word(&text);
        text.fill(0);
        // SAFETY: as above.
        unsafe {
            self.check("cuDeviceGetPCIBusId", (s.device_pci)(text.as_mut_ptr(), 255, device))?;
            self.check("cuDeviceTotalMem", (s.device_memory)(&mut bytes, device))?;
        }
        Ok(DeviceFacts {
            ordinal,
            mig: name.contains("MIG"),
            name,
            pci: word(&text).to_lowercase(),
            capability: (self.attribute(75, device)? as u32, self.attribute(76, device)? as u32),
            multiprocessors: self.attribute(16, device)? as u32,
            l2_bytes: self.attribute(38, device)? as u64,
            memory_bytes: bytes as u64,
            host_register: self.attribute(99, device)? != 0,
        })
    }
}

impl Driver for Cuda {
    fn devices(&self) -> Result<Vec<DeviceFacts>> {
        let mut count = 0;
        // SAFETY: writes one int.
        let status = unsafe { (self.symbols.device_count)(&mut count) };
        if status == 100 {
            return Ok(Vec::new());
        }
        self.check("cuDeviceGetCount", status)?;
        (0..count).map(|ordinal| self.facts(ordinal)).collect()
    }

    fn claim(&self, from: i32, to: i32) -> Result<PeerClaim> {
        let (mut access, mut atomics, mut rank) = (0, 0, 0);
        // SAFETY: each writes one int.
        unsafe {
            self.check("cuDeviceCanAccessPeer", (self.symbols.can_access)(&mut access, from, to))?;
            if access != 0 {
                self.check("cuDeviceGetP2PAttribute", (self.symbols.p2p_attribute)(&mut rank, 1, from, to))?;
                self.check("cuDeviceGetP2PAttribute", (self.symbols.p2p_attribute)(&mut atomics, 3, from, to))?;
            }
        }
        Ok(PeerClaim { access: access != 0, native_atomics: atomics != 0, rank })
    }

    fn open(&self, ordinal: i32) -> Result<Arc<dyn Device>> {
        let facts = self.facts(ordinal)?;
        let mut context = null_mut();
        // SAFETY: writes one pointer; the primary context is kept until the process ends.
        self.check("cuDevicePrimaryCtxRetain", unsafe { (self.symbols.retain)(&mut context, ordinal) })?;
        Ok(Arc::new(Context { symbols: self.symbols, facts, context: context as usize }))
    }
}

impl Context {
    /// Makes the context current for this thread and checks the call's answer.
    fn call(&self, call: &'static str, run: impl FnOnce(&Symbols) -> Status) -> Result<()> {
        // SAFETY: the context is retained for good.
        let mut status = unsafe { (self.symbols.set_current)(self.context as Ptr) };
        if status == 0 {
            status = run(self.symbols);
        }
        if status == 0 { Ok(()) } else { Err(refused(call, name(self.symbols, status), hint(status))) }
    }

    fn location(&self) -> Location {
        Location { kind: 1, id: self.facts.ordinal }
    }

    /// Maps pieces one behind the other, from what `piece` gives a handle for; ends what it began when it fails.
    fn map_pieces(&self, sizes: &[u64], write: bool, mut piece: impl FnMut(&Symbols, usize) -> (Status, u64)) -> Result<Address> {
        let total: u64 = sizes.iter().sum();
        let mut base = 0;
        // SAFETY: writes one address.
        self.call("cuMemAddressReserve", |s| unsafe { (s.reserve)(&mut base, total as usize, 0, 0, 0) })?;
        let mut done = 0;
        let mapped = sizes.iter().enumerate().try_for_each(|(i, bytes)| {
            self.call("cuMemMap", |s| {
                let (status, handle) = piece(s, i);
                if status != 0 {
                    return status;
                }
                // SAFETY: within the reserved range; a mapping holds its memory, so the handle is not needed behind it.
                unsafe {
                    let status = (s.map)(base + done, *bytes as usize, 0, handle, 0);
                    (s.release_piece)(handle);
                    status
                }
            })?;
            done += bytes;
            Ok(())
        });
        let access = Access { location: self.location(), flags: if write { 3 } else { 1 } };
        let allowed = mapped.and_then(|()| {
            // SAFETY: reads one description; the range is mapped.
            self.call("cuMemSetAccess", |s| unsafe { (s.set_access)(base, total as usize, &access, 1) })
        });
        match allowed {
            Ok(()) => Ok(base),
            Err(error) => {
                let mut at = base;
                for bytes in sizes {
                    if at == base + done {
                        break;
                    }
                    // SAFETY: mapped above, and nobody knows of it.
                    let _ = self.call("cuMemUnmap", |s| unsafe { (s.unmap)(at, *bytes as usize) });
                    at += bytes;
                }
                // SAFETY: reserved above; nothing is mapped in it.
                let _ = self.call("cuMemAddressFree", |s| unsafe { (s.unreserve)(base, total as usize) });
                Err(error)
            }
        }
    }
}

// SAFETY (all blocks below): out-pointers point to locals of the type that the header names; handles were made by this driver
// and are not used after their end, which their makers in this crate uphold.
impl Device for Context {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }
    fn claim(&self, pci: &str) -> Result<PeerClaim> {
        let driver = Cuda { symbols: self.symbols };
        let there = driver.devices()?.into_iter().find(|d| d.pci == pci);
        let there = there.ok_or_else(|| Error::Argument(format!("device {pci} is not visible to this process")))?;
        driver.claim(self.facts.ordinal, there.ordinal)
    }
    fn alloc(&self, bytes: u64) -> Result<Address> {
        let mut at = 0;
        // SAFETY: see above the block.
        self.call("cuMemAlloc", |s| unsafe { (s.alloc)(&mut at, bytes as usize) })?;
        Ok(at)
    }
    fn free(&self, at: Address) -> Result<()> {
        // SAFETY: see above the block.
        self.call("cuMemFree", |s| unsafe { (s.free)(at) })
    }
    fn write(&self, to: Address, from: &[u8]) -> Result<()> {
        // The copy returns when pageable memory is staged, before all of it is on the device.
        // SAFETY: see above the block.
        self.call("cuMemcpyHtoD", |s| unsafe {
            match (s.to_device)(to, from.as_ptr().cast(), from.len()) {
                0 => (s.synchronize)(null_mut()),
                status => status,
            }
        })
    }
    fn read(&self, to: &mut [u8], from: Address) -> Result<()> {
        // SAFETY: see above the block.
        self.call("cuMemcpyDtoH", |s| unsafe { (s.from_device)(to.as_mut_ptr().cast(), from, to.len()) })
    }
    fn fill(&self, at: Address, word: u32, words: u64, stream: Stream) -> Result<()> {
        // SAFETY: see above the block.
        self.call("cuMemsetD32Async", |s| unsafe { (s.fill)(at, word, words as usize, stream.0 as Ptr) })
    }
    fn copy(&self, to: Address, from: Address, bytes: u64, stream: Stream) -> Result<()> {
        // SAFETY: see above the block.
        self.call("cuMemcpyAsync", |s| unsafe { (s.copy)(to, from, bytes as usize, stream.0 as Ptr) })
    }
    fn export(&self, base: Address) -> Result<Handle> {
        let mut handle = IpcHandle { bytes: [0; 64] };
        // SAFETY: see above the block.
        self.call("cuIpcGetMemHandle", |s| unsafe { (s.export)(&mut handle, base) })?;
        Ok(handle.bytes)
    }
    fn import(&self, handle: &Handle) -> Result<Address> {
        let mut at = 0;
        // 1: peer access is enabled when it is needed.
        // SAFETY: see above the block.
        self.call("cuIpcOpenMemHandle", |s| unsafe { (s.import)(&mut at, IpcHandle { bytes: *handle }, 1) })?;
        Ok(at)
    }
    fn release(&self, at: Address) -> Result<()> {
        // SAFETY: see above the block.
        self.call("cuIpcCloseMemHandle", |s| unsafe { (s.release)(at) })
    }
    fn export_file(&self, at: Address) -> Result<OwnedFd> {
        let (mut handle, mut file) = (0, -1);
        // SAFETY: see above the block.
        self.call("cuMemRetainAllocationHandle", |s| unsafe { (s.retain_piece)(&mut handle, at as Ptr) })?;
        self.call("cuMemExportToShareableHandle", |s| {
            // SAFETY: see above the block; a file's number is an int.
            unsafe {
                let status = (s.export_piece)((&raw mut file).cast(), handle, FILE, 0);
                (s.release_piece)(handle);
                status
            }
        })?;
        // SAFETY: the driver made the file for us.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }
    fn map(&self, pieces: &[(BorrowedFd<'_>, u64)]) -> Result<Address> {
        let sizes: Vec<u64> = pieces.iter().map(|(_, bytes)| *bytes).collect();
        self.map_pieces(&sizes, false, |s, i| {
            let mut handle = 0;
            let file = pieces.get(i).map_or(-1, |(file, _)| file.as_raw_fd());
            // SAFETY: see above the block; the driver takes the number of the file in the place of a pointer.
            (unsafe { (s.import_piece)(&mut handle, file as isize as Ptr, FILE) }, handle)
        })
    }
    fn alloc_pieces(&self, pieces: usize, bytes: u64) -> Result<(Address, Vec<u64>)> {
        let properties =
            AllocationProperties { kind: 1, handles: FILE, location: self.location(), windows: null_mut(), flags: [0; 8] };
        let mut least = 0;
        // SAFETY: see above the block.
        self.call("cuMemGetAllocationGranularity", |s| unsafe { (s.granularity)(&mut least, &properties, 0) })?;
        let each = bytes.max(1).next_multiple_of(least.max(1) as u64);
        let sizes = vec![each; pieces];
        let base = self.map_pieces(&sizes, true, |s, _| {
            let mut handle = 0;
            // SAFETY: see above the block.
            (unsafe { (s.create)(&mut handle, each as usize, &properties, 0) }, handle)
        })?;
        Ok((base, sizes))
    }
    fn unmap(&self, at: Address, pieces: &[u64]) -> Result<()> {
        let mut next = at;
        for bytes in pieces {
            // SAFETY: see above the block.
            self.call("cuMemUnmap", |s| unsafe { (s.unmap)(next, *bytes as usize) })?;
            next += bytes;
        }
        // SAFETY: see above the block.
        self.call("cuMemAddressFree", |s| unsafe { (s.unreserve)(at, (next - at) as usize) })
    }
    fn alloc_pooled(&self, bytes: u64) -> Result<Address> {
        let mut at = 0;
        // SAFETY: see above the block.
        self.call("cuMemAllocAsync", |s| unsafe {
            match (s.alloc_pooled)(&mut at, bytes as usize, null_mut()) {
                0 => (s.synchronize)(null_mut()),
                status => status,
            }
        })?;
        Ok(at)
    }
    fn reach(&self, other: i32) -> Result<()> {
        let mut context = null_mut();
        self.call("cuCtxEnablePeerAccess", |s| {
            // SAFETY: see above the block.
            let status = unsafe { (s.retain)(&mut context, other) };
            if status != 0 {
                return status;
            }
            // SAFETY: see above the block.
            match unsafe { (s.enable_peer)(context, 0) } {
                PEER_ALREADY => 0,
                status => status,
            }
        })
    }
    unsafe fn register(&self, at: NonNull<u8>, bytes: usize) -> Result<Address> {
        let mut seen = 0;
        // 3: portable and mapped.
        // SAFETY: see above the block; the caller keeps the memory mapped.
        self.call("cuMemHostRegister", |s| unsafe { (s.register)(at.as_ptr().cast(), bytes, 3) })?;
        // SAFETY: see above the block.
        self.call("cuMemHostGetDevicePointer", |s| unsafe { (s.registered)(&mut seen, at.as_ptr().cast(), 0) })?;
        Ok(seen)
    }
    fn unregister(&self, at: NonNull<u8>) -> Result<()> {
        // SAFETY: see above the block.
        self.call("cuMemHostUnregister", |s| unsafe { (s.unregister)(at.as_ptr().cast()) })
    }
    fn load(&self, image: &[u8]) -> Result<Module> {
        let mut module = null_mut();
        // SAFETY: see above the block; the image carries its own length.
        self.call("cuModuleLoadData", |s| unsafe { (s.load)(&mut module, image.as_ptr().cast()) })?;
        Ok(Module(module as usize))
    }
    fn function(&self, module: Module, name: &str) -> Result<Function> {
        let name = CString::new(name).map_err(|_| Error::Argument("a kernel's name with a zero in it".into()))?;
        let mut function = null_mut();
        // SAFETY: see above the block.
        self.call("cuModuleGetFunction", |s| unsafe { (s.function)(&mut function, module.0 as Ptr, name.as_ptr()) })?;
        Ok(Function(function as usize))
    }
    unsafe fn launch(&self, function: Function, launch: Launch, args: &Args, stream: Stream) -> Result<()> {
        // 6: the kernel may start before the one before it is done, since it waits for it by itself.
        let overlap = LaunchAttribute { id: 6, pad: [0; 4], value: [1, 0, 0, 0, 0, 0, 0, 0] };
        let config = LaunchConfig {
            grid: [launch.blocks, 1, 1],
            block: [launch.threads, 1, 1],
            shared: 0,
            stream: stream.0 as Ptr,
            attributes: &overlap,
            count: u32::from(launch.overlap && self.facts.capability >= (9, 0)),
        };
        let mut parameters: [*mut c_void; 1] = [std::ptr::from_ref(args).cast_mut().cast()];
        // SAFETY: see above the block; the caller vouches for the arguments, which the driver copies.
        self.call("cuLaunchKernelEx", |s| unsafe { (s.launch)(&config, function.0 as Ptr, parameters.as_mut_ptr(), null_mut()) })
    }
    fn about(&self, at: Address) -> Result<AddressFacts> {
        let (mut buffer_id, mut device, mut legacy, mut handles, mut pool) = (0u64, 0i32, 0i32, 0u64, 0u64);
        let (mut base, mut bytes) = (0u64, 0usize);
        self.call("cuPointerGetAttribute", |s| {
            // SAFETY: see above the block; attributes 7, 9, 10, 14 and 17 are a u64, an int, an int, a mask and a pointer.
            unsafe {
                [
                    (s.pointer)((&raw mut buffer_id).cast(), 7, at),
                    (s.pointer)((&raw mut device).cast(), 9, at),
                    (s.pointer)((&raw mut legacy).cast(), 10, at),
                    (s.pointer)((&raw mut handles).cast(), 14, at),
                    (s.pointer)((&raw mut pool).cast(), 17, at),
                    (s.range)(&mut base, &mut bytes, at),
                ]
            }
            .into_iter()
            .find(|status| *status != 0)
            .unwrap_or(0)
        })?;
        let sharing = match (legacy != 0, pool != 0, handles & FILE as u64 != 0) {
            (true, ..) => Sharing::Handle,
            (_, true, _) => Sharing::No(
                "it comes from a stream-ordered pool (cuMemAllocAsync), whose memory is not exported; allocate it with cuMemAlloc or \
                 as pieces that can be exported as files",
            ),
            (.., true) => {
                // The range of such memory may be all that was reserved: what counts is the piece that is mapped here.
                self.call("cuPointerGetAttribute", |s| {
                    // SAFETY: see above the block; attributes 19 and 18 are an address and a size.
                    unsafe {
                        match (s.pointer)((&raw mut base).cast(), 19, at) {
                            0 => (s.pointer)((&raw mut bytes).cast(), 18, at),
                            status => status,
                        }
                    }
                })?;
                Sharing::File
            }
            _ => Sharing::No(
                "its allocation asked for no handle that another process can open; create it with files asked for \
                 (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)",
            ),
        };
        Ok(AddressFacts { buffer_id, base, bytes: bytes as u64, device, sharing })
    }
    fn stream(&self) -> Result<Stream> {
        let mut stream = null_mut();
        // SAFETY: see above the block.
        self.call("cuStreamCreate", |s| unsafe { (s.stream)(&mut stream, 1) })?;
        Ok(Stream(stream as usize))
    }
    fn lane(&self) -> Result<Stream> {
        let (mut least, mut greatest, mut stream) = (0, 0, null_mut());
        // SAFETY: see above the block.
        self.call("cuCtxGetStreamPriorityRange", |s| unsafe { (s.priorities)(&mut least, &mut greatest) })?;
        // SAFETY: see above the block.
        self.call("cuStreamCreateWithPriority", |s| unsafe { (s.lane)(&mut stream, 1, greatest) })?;
        Ok(Stream(stream as usize))
    }
    fn is_done(&self, stream: Stream) -> Result<bool> {
        let mut done = false;
        self.call("cuStreamQuery", |s| {
            // SAFETY: see above the block.
            match unsafe { (s.query)(stream.0 as Ptr) } {
                NOT_READY => 0,
                status => {
                    done = status == 0;
                    status
                }
            }
        })?;
        Ok(done)
    }
    fn synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: see above the block.
        self.call("cuStreamSynchronize", |s| unsafe { (s.synchronize)(stream.0 as Ptr) })
    }
    fn event(&self, timed: bool) -> Result<Event> {
        let mut event = null_mut();
        // SAFETY: see above the block.
        self.call("cuEventCreate", |s| unsafe { (s.event)(&mut event, if timed { 0 } else { 2 }) })?;
        Ok(Event(event as usize))
    }
    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: see above the block.
        self.call("cuEventRecord", |s| unsafe { (s.record)(event.0 as Ptr, stream.0 as Ptr) })
    }
    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: see above the block.
        self.call("cuStreamWaitEvent", |s| unsafe { (s.wait)(stream.0 as Ptr, event.0 as Ptr, 0) })
    }
    fn between(&self, first: Event, second: Event) -> Result<f64> {
        let mut milliseconds = 0f32;
        // SAFETY: see above the block.
        self.call("cuEventElapsedTime", |s| unsafe { (s.between)(&mut milliseconds, first.0 as Ptr, second.0 as Ptr) })?;
        Ok(f64::from(milliseconds) * 1e3)
    }
    fn capture(&self, stream: Stream) -> Result<Option<u64>> {
        let (mut status, mut id) = (0, 0);
        // SAFETY: see above the block; what is not asked for may be null.
        self.call("cuStreamGetCaptureInfo", |s| unsafe {
            (s.capture)(stream.0 as Ptr, &mut status, &mut id, null_mut(), null_mut(), null_mut())
        })?;
        Ok((status == 1).then_some(id))
    }
    fn begin_capture(&self, stream: Stream) -> Result<()> {
        // 1: calls of other threads do not break the capture.
        // SAFETY: see above the block.
        self.call("cuStreamBeginCapture", |s| unsafe { (s.begin_capture)(stream.0 as Ptr, 1) })
    }
    fn end_capture(&self, stream: Stream) -> Result<Graph> {
        let (mut graph, mut exec) = (null_mut(), null_mut());
        // SAFETY: see above the block.
        self.call("cuStreamEndCapture", |s| unsafe { (s.end_capture)(stream.0 as Ptr, &mut graph) })?;
        // SAFETY: see above the block; the template is not needed once there is an executable graph.
        self.call("cuGraphInstantiate", |s| unsafe {
            let status = (s.instantiate)(&mut exec, graph, 0);
            (s.destroy_graph)(graph);
            status
        })?;
        Ok(Graph(exec as usize))
    }
    fn replay(&self, graph: Graph, stream: Stream) -> Result<()> {
        // SAFETY: see above the block.
        self.call("cuGraphLaunch", |s| unsafe { (s.replay)(graph.0 as Ptr, stream.0 as Ptr) })
    }
    fn forget(&self, graph: Graph) -> Result<()> {
        // SAFETY: see above the block.
        self.call("cuGraphExecDestroy", |s| unsafe { (s.destroy_exec)(graph.0 as Ptr) })
    }
}
