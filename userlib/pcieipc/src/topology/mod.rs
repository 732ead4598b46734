// SPDX-License-Identifier: MIT OR Apache-2.0
//! The PCIe tree of a host: what is there, how it is linked, and how far any two functions are from each other.
//!
//! [`Topology::read`] reads a [`Source`] afresh: the running host ([`Live`]), a snapshot ([`Archive`]), or what another tool
//! wrote down ([`import`]). It needs no vendor's tool and never fails: what can not be read is in [`Topology::notes`].
//!
//! ```no_run
//! use pcieipc::topology::{Live, Topology};
//!
//! let tree = Topology::read(&Live::default());
//! for index in tree.peers() {
//!     println!("{} {:?}", tree.functions[index].label(), tree.functions[index].link_now());
//! }
//! ```

mod address;
pub mod aer;
mod archive;
mod capability;
mod capture;
mod config;
mod facts;
mod follow;
mod function;
mod host;
pub mod import;
mod link;
mod nccl_xml;
mod path;
mod ranks;
mod read;
mod read_function;
mod redact;
mod source;
mod tree;
mod tree_watch;
pub mod uevent;

pub use address::{Address, BadAddress};
pub use archive::{Archive, ArchiveError, Entry};
pub use capability::{Acs, AerRegisters, Capabilities, Dpc, Express, PortType, Resizable, SlotPort, SrIov};
pub use capture::{CaptureOptions, capture};
pub use facts::{FACTS, Facts, KERNEL_LOG, ModuleAnswer, Node};
pub use follow::{Change, Follower};
pub use function::{Bar, Function, Identity, Kind, MigInstance, Reach};
pub use host::{Host, LogLine, ModuleState};
pub use link::{Aspm, LinkEnd, LinkState, Speed};
pub use nccl_xml::nccl_xml;
pub use path::{Distance, Path, Reason, ReasonCode};
pub use source::{Live, Origin, ReadAt, Source};
pub use tree::{Hop, Note, NumaNode, Root, Slot, Topology};
pub use tree_watch::TreeWatch;
