// SPDX-License-Identifier: MIT OR Apache-2.0
//! The seam to the CUDA driver. Everything above it runs without a GPU, over a fake of it.

#[cfg(test)]
pub(crate) mod fake;
mod library;
mod real;

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
};

use pcieipc::{Error, Result, reduce::Kind};

use crate::{abi::Args, kernels};
pub use library::present;
pub use real::Cuda;

/// An address in the memory of a device, or of host memory as a device sees it.
pub type Address = u64;

/// What the driver tells about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// The driver's number of it, in this process.
    pub ordinal: i32,
    /// Its name.
    pub name: String,
    /// As `0000:18:00.0`.
    pub pci: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of L2 cache.
    pub l2_bytes: u64,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Whether it is an instance of a partitioned device, which has no memory sharing between processes with others.
    pub mig: bool,
    /// Whether host memory can be registered.
    pub host_register: bool,
}

/// What the driver claims about a pair of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PeerClaim {
    /// The first can reach the second's memory.
    pub access: bool,
    /// With atomic operations: NVLink, not PCIe.
    pub native_atomics: bool,
    /// The driver's relative rating; lower is faster.
    pub rank: i32,
}

/// What the driver tells about an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressFacts {
    /// Of its allocation; never used again in this process, unlike addresses.
    pub buffer_id: u64,
    /// Where the allocation starts; of memory that was mapped piece by piece, the piece.
    pub base: Address,
    /// How long it is.
    pub bytes: u64,
    /// The device it lies on.
    pub device: i32,
    /// How another process can open it.
    pub sharing: Sharing,
}

/// How another process can open an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// By a handle of 64 bytes: what was allocated in one piece.
    Handle,
    /// By a file: what was created, and mapped piece by piece, with files asked for.
    File,
    /// Not at all, and why.
    No(&'static str),
}

/// A handle of 64 bytes by which another process opens an allocation.
pub type Handle = [u8; 64];

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name(pub usize);
    )*};
}
handles! {
    /// A loaded module.
    Module,
    /// A kernel.
    Function,
    /// A stream; 0 is the default one.
    Stream,
    /// An event.
    Event,
    /// A graph that can be launched.
    Graph,
}

/// How a kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Whether it may be made resident while the kernel before it runs (it waits for it by itself).
    pub overlap: bool,
}

/// The driver.
pub trait Driver: Send + Sync + std::fmt::Debug {
    /// All devices.
    ///
    /// # Errors
    /// `System`.
    fn devices(&self) -> Result<Vec<DeviceFacts>>;
    /// What is claimed about two devices.
    ///
    /// # Errors
    /// `System`.
    fn claim(&self, from: i32, to: i32) -> Result<PeerClaim>;
    /// One device, with its primary context.
    ///
    /// # Errors
    /// `System`.
    fn open(&self, ordinal: i32) -> Result<Arc<dyn Device>>;
}

/// One device. All calls are made in its primary context, from any thread.
pub trait Device: Send + Sync + std::fmt::Debug {
    /// What it is.
    fn facts(&self) -> &DeviceFacts;
    /// The process whose addresses these are.
    fn process(&self) -> u32 {
        std::process::id()
    }
    /// What is claimed about reaching the device at a PCI address from this one.
    ///
    /// # Errors
    /// `System`; `Argument` when that device is not visible to this process.
    fn claim(&self, pci: &str) -> Result<PeerClaim>;
    /// The kernels of a type, or those that prove paths: compiled if need be, and loaded.
    ///
    /// # Errors
    /// `System`.
    fn kernels(&self, kind: Option<Kind>) -> Result<Module> {
        let capability = self.facts().capability;
        self.load(&match kind {
            Some(kind) => kernels::image(kind, capability)?,
            None => kernels::probe_image(capability)?,
        })
    }
    /// Memory, not initialized, aligned to 256 bytes.
    ///
    /// # Errors
    /// `System`.
    fn alloc(&self, bytes: u64) -> Result<Address>;
    /// Gives memory back.
    ///
    /// # Errors
    /// `System`.
    fn free(&self, at: Address) -> Result<()>;
    /// Copies to the device and waits.
    ///
    /// # Errors
    /// `System`.
    fn write(&self, to: Address, from: &[u8]) -> Result<()>;
    /// Copies from the device and waits.
    ///
    /// # Errors
    /// `System`.
    fn read(&self, to: &mut [u8], from: Address) -> Result<()>;
    /// Sets 32-bit words, on the stream.
    ///
    /// # Errors
    /// `System`.
    fn fill(&self, at: Address, word: u32, words: u64, stream: Stream) -> Result<()>;
    /// Copies on the stream, between any addresses that this device reaches.
    ///
    /// # Errors
    /// `System`.
    fn copy(&self, to: Address, from: Address, bytes: u64, stream: Stream) -> Result<()>;
    /// A handle of an allocation, for another process.
    ///
    /// # Errors
    /// `System`.
    fn export(&self, base: Address) -> Result<Handle>;
    /// Opens another process's allocation.
    ///
    /// # Errors
    /// `System`.
    fn import(&self, handle: &Handle) -> Result<Address>;
    /// Closes what was opened.
    ///
    /// # Errors
    /// `System`.
    fn release(&self, at: Address) -> Result<()>;
    /// A file of the piece of memory that is mapped at an address, for another process.
    ///
    /// # Errors
    /// `System`.
    fn export_file(&self, at: Address) -> Result<OwnedFd>;
    /// Maps pieces of another process, each as long as told, one behind the other, to be read.
    ///
    /// # Errors
    /// `System`.
    fn map(&self, pieces: &[(BorrowedFd<'_>, u64)]) -> Result<Address>;
    /// Memory in pieces of at least so many bytes each, which can be exported as files; gives their lengths, too.
    ///
    /// # Errors
    /// `System`.
    fn alloc_pieces(&self, pieces: usize, bytes: u64) -> Result<(Address, Vec<u64>)>;
    /// Ends a mapping of pieces; memory of this process is given back.
    ///
    /// # Errors
    /// `System`.
    fn unmap(&self, at: Address, pieces: &[u64]) -> Result<()>;
    /// Memory of the device's stream-ordered pool, which [`Device::free`] gives back.
    ///
    /// # Errors
    /// `System`.
    fn alloc_pooled(&self, bytes: u64) -> Result<Address>;
    /// Lets kernels of this device reach the memory of another one of this process.
    ///
    /// # Errors
    /// `System`.
    fn reach(&self, other: i32) -> Result<()>;
    /// Makes host memory reachable by kernels; gives its address there.
    ///
    /// # Errors
    /// `System`.
    ///
    /// # Safety
    /// The memory must stay mapped until [`Device::unregister`].
    unsafe fn register(&self, at: NonNull<u8>, bytes: usize) -> Result<Address>;
    /// Ends that.
    ///
    /// # Errors
    /// `System`.
    fn unregister(&self, at: NonNull<u8>) -> Result<()>;
    /// Loads machine code.
    ///
    /// # Errors
    /// `System`.
    fn load(&self, image: &[u8]) -> Result<Module>;
    /// Finds a kernel and loads it now.
    ///
    /// # Errors
    /// `System`.
    fn function(&self, module: Module, name: &str) -> Result<Function>;
    /// Launches a kernel of ours.
    ///
    /// # Errors
    /// `System`.
    ///
    /// # Safety
    /// The function takes one `Args`, and every address in it is valid for as long as the kernel runs.
    unsafe fn launch(&self, function: Function, launch: Launch, args: &Args, stream: Stream) -> Result<()>;
    /// What is known about an address.
    ///
    /// # Errors
    /// `System`: not an address of the driver.
    fn about(&self, at: Address) -> Result<AddressFacts>;

    /// A stream that does not wait for the default one.
    ///
    /// # Errors
    /// `System`.
    fn stream(&self) -> Result<Stream>;
    /// A stream of the highest priority, for copies and the kernels that gate them.
    ///
    /// # Errors
    /// `System`.
    fn lane(&self) -> Result<Stream>;
    /// Whether all work of the stream is done.
    ///
    /// # Errors
    /// `System`.
    fn is_done(&self, stream: Stream) -> Result<bool>;
    /// Waits for the stream, without a bound: our kernels have one, others may not.
    ///
    /// # Errors
    /// `System`.
    fn synchronize(&self, stream: Stream) -> Result<()>;
    /// An event; `timed` ones can be subtracted.
    ///
    /// # Errors
    /// `System`.
    fn event(&self, timed: bool) -> Result<Event>;
    /// Records an event.
    ///
    /// # Errors
    /// `System`.
    fn record(&self, event: Event, stream: Stream) -> Result<()>;
    /// Makes a stream wait for an event.
    ///
    /// # Errors
    /// `System`.
    fn wait(&self, stream: Stream, event: Event) -> Result<()>;
    /// Microseconds between two events that have passed.
    ///
    /// # Errors
    /// `System`.
    fn between(&self, first: Event, second: Event) -> Result<f64>;
    /// The number of the capture that the stream is in.
    ///
    /// # Errors
    /// `System`.
    fn capture(&self, stream: Stream) -> Result<Option<u64>>;
    /// Starts a capture.
    ///
    /// # Errors
    /// `System`.
    fn begin_capture(&self, stream: Stream) -> Result<()>;
    /// Ends it and makes a graph that can be launched.
    ///
    /// # Errors
    /// `System`.
    fn end_capture(&self, stream: Stream) -> Result<Graph>;
    /// Launches a graph.
    ///
    /// # Errors
    /// `System`.
    fn replay(&self, graph: Graph, stream: Stream) -> Result<()>;
    /// Destroys a graph.
    ///
    /// # Errors
    /// `System`.
    fn forget(&self, graph: Graph) -> Result<()>;
}

/// A failed call of the driver as the library's error.
pub(crate) fn refused(call: &'static str, answer: impl Into<String>, hint: impl Into<String>) -> Error {
    Error::System { call, hint: hint.into(), source: std::io::Error::other(answer.into()).into() }
}
