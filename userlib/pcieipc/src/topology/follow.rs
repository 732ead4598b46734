// SPDX-License-Identifier: MIT OR Apache-2.0
//! Follows a tree while it changes, and counts the lives of its functions.

use std::{
    collections::{HashMap, HashSet},
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;

use super::{
    address::Address,
    aer::{Counters, Severity},
    function::Reach,
    link::LinkState,
    source::Source,
    tree::Topology,
    uevent::{Action, Received, UeventSocket},
};

/// After the first message of a burst, more are waited for this long: a hot-plug sends dozens.
const SETTLE: Duration = Duration::from_millis(20);
/// However long a burst lasts, the tree is read at the latest after this time.
const SETTLE_AT_MOST: Duration = Duration::from_millis(200);

/// Something that changed.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Change {
    /// A function that was never seen before.
    Appeared {
        /// Which one.
        address: Address,
        /// Its life.
        generation: u64,
        /// What it is.
        name: String,
    },
    /// A function left.
    Removed {
        /// Which one.
        address: Address,
        /// The life that ended.
        generation: u64,
        /// What it was.
        name: String,
    },
    /// A function is back at its address, in a new life; perhaps it is another card.
    Returned {
        /// Which one.
        address: Address,
        /// The new life.
        generation: u64,
        /// What it is.
        name: String,
    },
    /// A function answers all ones.
    FellOff {
        /// Which one.
        address: Address,
        /// Its life.
        generation: u64,
    },
    /// A function answers again, without having been removed.
    Answers {
        /// Which one.
        address: Address,
        /// Its life.
        generation: u64,
    },
    /// The link above a function changed.
    Link {
        /// The lower end.
        address: Address,
        /// Its life.
        generation: u64,
        /// Before; `None` when it was down or unknown.
        was: Option<LinkState>,
        /// Now.
        is: Option<LinkState>,
    },
    /// Errors were counted.
    Errors {
        /// By whom.
        address: Address,
        /// Its life.
        generation: u64,
        /// What was added since the last look.
        added: Counters,
        /// The worst severity among them.
        worst: Severity,
    },
    /// Another driver owns the function.
    Driver {
        /// Which one.
        address: Address,
        /// Its life.
        generation: u64,
        /// Before.
        was: Option<String>,
        /// Now.
        is: Option<String>,
    },
}

impl Change {
    /// The function that changed.
    pub fn address(&self) -> Address {
        match self {
            Self::Appeared { address, .. }
            | Self::Removed { address, .. }
            | Self::Returned { address, .. }
            | Self::FellOff { address, .. }
            | Self::Answers { address, .. }
            | Self::Link { address, .. }
            | Self::Errors { address, .. }
            | Self::Driver { address, .. } => *address,
        }
    }

    /// Whether plans that were made for the tree before may no longer fit.
    pub fn alters_tree(&self) -> bool {
        !matches!(self, Self::Errors { .. } | Self::Driver { .. })
    }
}

/// Reads the tree again whenever the kernel says that something changed, and at the latest after the time that the caller chose.
///
/// There is no cache: each look reads everything. What is kept between looks is the last tree, to compare with, and the
/// generations. A generation is a number that no other life of any function had in this follower.
pub struct Follower {
    source: Box<dyn Source>,
    socket: Option<UeventSocket>,
    tree: Topology,
    generations: HashMap<Address, u64>,
    /// Addresses that were seen at any time, with the last generation.
    known: HashMap<Address, u64>,
    last: u64,
    version: u64,
    /// Functions that a message said to be gone since the last look, even if they are back by now.
    removed: HashSet<Address>,
    /// Messages were taken that no look has answered yet.
    pending: bool,
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower")
            .field("functions", &self.tree.functions.len())
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Follower {
    /// Starts with the tree as it is now. Without the kernel's messages (a sandbox, a saved host) it still sees every change that
    /// lasts until the next look.
    pub fn new(source: Box<dyn Source>) -> Self {
        // The socket first, so that what changes while we read is heard.
        let socket = (source.origin() == super::source::Origin::Live).then(UeventSocket::open).and_then(Result::ok);
        let tree = Topology::read(source.as_ref());
        let mut follower = Self {
            source,
            socket,
            generations: HashMap::new(),
            known: HashMap::new(),
            last: 0,
            version: 1,
            removed: HashSet::new(),
            pending: false,
            tree: tree.clone(),
        };
        for function in &tree.functions {
            follower.begin_life(function.address);
        }
        follower
    }

    /// The tree at the last look.
    pub fn tree(&self) -> &Topology {
        &self.tree
    }

    /// Whether the kernel's messages are heard.
    pub fn hears_kernel(&self) -> bool {
        self.socket.is_some()
    }

    /// The generation of a function that is there.
    pub fn generation(&self, address: Address) -> Option<u64> {
        self.generations.get(&address).copied()
    }

    /// Grows whenever the tree changed in a way that plans depend on.
    pub fn version(&self) -> u64 {
        self.version
    }

    fn begin_life(&mut self, address: Address) -> u64 {
        self.last += 1;
        self.generations.insert(address, self.last);
        self.known.insert(address, self.last);
        self.last
    }

    /// Waits until the kernel says something about PCI, or `at_most` is over; then looks and gives what changed.
    ///
    /// # Errors
    /// Those of `poll` and `recvfrom`; the follower can be used on.
    pub fn wait(&mut self, at_most: Duration) -> io::Result<Vec<Change>> {
        self.hear(at_most)?;
        Ok(self.look())
    }

    /// Waits for the kernel's word, and then until it has nothing more to say for the moment. Whether it said something about PCI since the
    /// last look.
    ///
    /// # Errors
    /// Those of `poll` and `recvfrom`.
    pub fn hear(&mut self, at_most: Duration) -> io::Result<bool> {
        if self.socket.is_none() {
            std::thread::sleep(at_most);
            return Ok(self.pending);
        }
        let deadline = Instant::now() + at_most;
        let mut heard = self.drain()? || self.pending;
        while !heard {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.readable(left)? {
                break;
            }
            heard = self.drain()?;
        }
        self.pending = heard;
        let settled = Instant::now() + SETTLE_AT_MOST;
        while heard && Instant::now() < settled && self.readable(SETTLE)? {
            self.drain()?;
        }
        Ok(heard)
    }

    /// Whether the kernel has said something about PCI since the last look; does not wait.
    ///
    /// # Errors
    /// Those of `recvfrom`.
    pub fn heard(&mut self) -> io::Result<bool> {
        if self.drain()? {
            self.pending = true;
        }
        Ok(self.pending)
    }

    fn readable(&self, at_most: Duration) -> io::Result<bool> {
        let Some(socket) = &self.socket else { return Ok(false) };
        let mut set = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        let limit = PollTimeout::try_from(at_most.max(Duration::from_millis(1))).unwrap_or(PollTimeout::MAX);
        match poll(&mut set, limit) {
            Ok(count) => Ok(count > 0),
            Err(nix::Error::EINTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes all messages that are there; whether any was about PCI, or some were lost.
    fn drain(&mut self) -> io::Result<bool> {
        let mut heard = false;
        let Some(socket) = &self.socket else { return Ok(false) };
        // A bound, because other devices may send without end.
        for _ in 0..10_000 {
            match socket.receive()? {
                Received::Empty => break,
                Received::Other => {}
                Received::Lost => heard = true,
                Received::Pci(event) => {
                    heard = true;
                    if event.action == Action::Remove {
                        self.removed.insert(event.address);
                    }
                }
            }
        }
        Ok(heard)
    }

    /// Reads the tree now and gives what changed since the last look.
    pub fn look(&mut self) -> Vec<Change> {
        let now = Topology::read(self.source.as_ref());
        self.compare(now)
    }

    /// Reads only some functions and what is above them, and gives what changed about these: a small part of the work of a whole look. The
    /// whole tree is read when one of them came, went or moved, or when the kernel said something.
    pub fn look_at(&mut self, addresses: &[Address]) -> Vec<Change> {
        let fresh = if self.pending { None } else { self.tree.reread(self.source.as_ref(), addresses) };
        let Some(fresh) = fresh else { return self.look() };
        if fresh.iter().all(|(index, function)| self.tree.functions.get(*index) == Some(function)) {
            return Vec::new();
        }
        let mut now = self.tree.clone();
        for (index, function) in fresh {
            now.functions[index] = function;
        }
        self.compare(now)
    }

    fn compare(&mut self, now: Topology) -> Vec<Change> {
        self.pending = false;
        let removed = std::mem::take(&mut self.removed);
        let before = std::mem::replace(&mut self.tree, now.clone());
        let mut changes = Vec::new();
        for function in &before.functions {
            let address = function.address;
            let generation = self.generation(address).unwrap_or(0);
            let reborn = now.find(address).is_some_and(|f| {
                removed.contains(&address)
                    || f.life != function.life
                    || f.identity.vendor != function.identity.vendor
                    || f.identity.device != function.identity.device
            });
            if now.position(address).is_none() || reborn {
                self.generations.remove(&address);
                changes.push(Change::Removed { address, generation, name: function.label() });
            }
        }
        for (index, function) in now.functions.iter().enumerate() {
            let address = function.address;
            let Some(generation) = self.generation(address) else {
                let name = function.label();
                let returned = self.known.contains_key(&address);
                let generation = self.begin_life(address);
                changes.push(if returned {
                    Change::Returned { address, generation, name }
                } else {
                    Change::Appeared { address, generation, name }
                });
                continue;
            };
            let Some((old_index, old)) = before.position(address).and_then(|i| Some((i, before.functions.get(i)?))) else {
                continue;
            };
            match (old.reach == Reach::AllOnes, function.reach == Reach::AllOnes) {
                (false, true) => changes.push(Change::FellOff { address, generation }),
                (true, false) => changes.push(Change::Answers { address, generation }),
                _ => {}
            }
            // A card that sleeps says nothing about its link; that is no change.
            let awake = [old.reach, function.reach].iter().all(|r| !matches!(r, Reach::Asleep | Reach::AllOnes));
            let (was, is) = (before.hop(old_index).and_then(|h| h.now), now.hop(index).and_then(|h| h.now));
            if awake && was != is {
                changes.push(Change::Link { address, generation, was, is });
            }
            if let (Some(old), Some(new)) = (&old.aer, &function.aer) {
                let added = new.since(old);
                let worst =
                    [Severity::Fatal, Severity::NonFatal, Severity::Correctable].into_iter().find(|s| added.total(*s) > 0);
                if let Some(worst) = worst {
                    changes.push(Change::Errors { address, generation, added, worst });
                }
            }
            if old.driver != function.driver {
                changes.push(Change::Driver { address, generation, was: old.driver.clone(), is: function.driver.clone() });
            }
        }
        if changes.iter().any(Change::alters_tree) {
            self.version += 1;
        }
        changes
    }
}
