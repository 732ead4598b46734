// SPDX-License-Identifier: MIT OR Apache-2.0
//! A group of ranks: how they meet, what they do together, and how those that are left go on.
//!
//! Ranks meet in a directory that only their user can enter, over Unix sockets: there is no network port. Each checks who is
//! at the other end, compares its configuration with everybody's, and passes memory and bells as descriptors. A peer's end is
//! seen by a descriptor of its process, not by silence.
//!
//! After an error, [`Group::agree`] tells all survivors the same, [`Group::shrink`] goes on with those that are left, and
//! [`Group::recover`] with all, when endpoints have come back and processes were replaced ([`Group::rejoin`]); [`Group::mend`]
//! does what the group's [`Policy`] says. `docs/faults.md` has the states, and what a rank that got `Ok` may conclude.
//!
//! ```no_run
//! use std::time::Duration;
//! use pcieipc::{group::{Group, GroupOptions}, reduce::Op};
//!
//! # fn main() -> pcieipc::Result<()> {
//! let mut group = Group::meet(GroupOptions::new(0, 4, "/run/user/1000/my-group"))?;
//! let mut gradients = vec![1.0f32; 1 << 20];
//! group.all_reduce(&mut gradients, Op::Sum, Duration::from_secs(10))?;
//! # Ok(())
//! # }
//! ```

mod agree;
mod buffers;
mod clock;
mod collectives;
mod council;
#[cfg(test)]
mod deaths;
mod directory;
mod engine;
mod exchange;
#[cfg(test)]
mod fault_tests;
mod ground;
mod join;
mod join_kmod;
#[cfg(test)]
mod kmod_tests;
mod links;
mod mesh;
mod message;
mod near;
#[cfg(test)]
mod near_tests;
mod options;
mod policy;
mod start;
mod survivors;
mod threads;

use std::time::{Duration, Instant};

use crate::{
    device::{Event, Session},
    error::{Error, Rank, Result},
    executor::{Executor, Trace, Volume},
    link::Links,
    plan::Shares,
    reduce::{Element, Kind, Op},
};

pub use agree::{Aborter, Agreement};
use clock::Clock;
use council::Council;
use directory::Directory;
use engine::{Calls, Engine};
use ground::Ground;
use join::Joined;
pub use join_kmod::KmodOptions;
pub use links::GroupLinks;
use mesh::{Mesh, Place};
pub use near::Host;
pub use options::{GroupOptions, Transport};
pub use policy::{Mended, Policy};
pub use threads::of_threads;

pub use crate::transport::{Counters, Degraded, kmod::Mover};

/// A place at which tests let a process die.
#[cfg(test)]
pub(crate) use deaths::step;
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn step() {}

/// One rank's membership in a group. Dropping it leaves the group in order; a process that ends without that counts as died.
#[derive(Debug)]
pub struct Group {
    engine: Engine,
    clock: Clock,
    /// Where ranks vote; dropped after the links, and says then that this rank has left.
    council: Council,
    aborter: Aborter,
    mesh: Mesh,
    /// Numbers of the meeting, by present rank.
    members: Vec<Rank>,
    turn: u32,
    /// Buffers registered so far.
    registered: u32,
    options: GroupOptions,
    /// The PCIe tree, once the group follows it.
    near: Option<near::Near>,
    /// What rank 0 told of the tree last.
    view: Option<near::View>,
    // After the engine, whose links stand on it.
    ground: Ground,
}

impl Group {
    /// Meets the other ranks.
    ///
    /// ```
    /// use std::{thread, time::Duration};
    /// use pcieipc::{group::{Group, GroupOptions}, reduce::Op};
    ///
    /// let directory = std::env::temp_dir().join(format!("meet-{}", std::process::id()));
    /// // Threads for the sake of the example; usually each rank is a process.
    /// let ranks = [0, 1].map(|rank| {
    ///     let options = GroupOptions::new(rank, 2, &directory);
    ///     thread::spawn(move || Group::meet(options)?.barrier(Duration::from_secs(60)))
    /// });
    /// for rank in ranks {
    ///     rank.join().unwrap()?;
    /// }
    /// # std::fs::remove_dir_all(&directory).unwrap();
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument`; `Meeting` when a rank does not come or leaves again; `Mismatch` when ranks want different things; `System`.
    pub fn meet(options: GroupOptions) -> Result<Self> {
        let (rank, ranks) = options.checked()?;
        let deadline = Instant::now() + options.meeting_timeout;
        let directory = Directory::open(&options.directory)?;
        let ground = options.transport.ground(rank, ranks, false)?;
        let configuration = options.agreed();
        let mesh = Mesh::meet(Place { directory: &directory, configuration: &configuration }, rank, ranks, deadline)?;
        let members: Vec<Rank> = (0..ranks).collect();
        match join::join(&mesh, &members, 0, ground.join(rank, ranks, options.ring_bytes), deadline)? {
            Joined::Links(links) => {
                let mut group = Self::of(options, ground, mesh, links, members, 0)?;
                group.learn_tree(deadline)?;
                Ok(group)
            }
            Joined::Again { why, .. } => Err(why),
        }
    }

    /// Takes the place of a rank of a group that has met already: a process that is started in place of one that ended. The others must
    /// call [`Group::recover`] meanwhile ([`Group::agree`] tells them that somebody waits). The options are those of the rank; its
    /// `meeting_timeout` bounds the wait.
    ///
    /// ```
    /// use pcieipc::group::{Group, GroupOptions};
    ///
    /// // Of a group that has met already and waits in `recover`, nobody is here.
    /// let mut options = GroupOptions::new(1, 2, std::env::temp_dir().join(format!("rejoin-{}", std::process::id())));
    /// options.meeting_timeout = std::time::Duration::from_millis(10);
    /// # let directory = options.directory.clone();
    /// assert!(Group::rejoin(options).is_err());
    /// # let _ = std::fs::remove_dir_all(directory);
    /// ```
    ///
    /// # Errors
    /// As for [`Group::meet`]; `Meeting` when the others do not take this rank back.
    pub fn rejoin(options: GroupOptions) -> Result<Self> {
        let (rank, ranks) = options.checked()?;
        let deadline = Instant::now() + options.meeting_timeout;
        let mut ground = options.transport.ground_by(rank, ranks, deadline)?;
        let returned = survivors::return_to(&options, &mut ground, deadline)?;
        let mut group = Self::of(options, ground, returned.mesh, returned.links, returned.members, returned.turn)?;
        group.learn_tree(deadline)?;
        Ok(group)
    }

    fn of(options: GroupOptions, ground: Ground, mesh: Mesh, links: join::Links, members: Vec<Rank>, turn: u32) -> Result<Self> {
        let mut executor = options.executor.clone();
        executor.tree = executor.tree.map(|tree| tree.among(&members));
        let engine = Engine::new(Executor::new(links.links, executor)?, options.helper_thread)?;
        let council = Council::new(links.board.clone(), mesh.rank, &members);
        let aborter = Aborter::new(links.board, mesh.rank);
        Ok(Self {
            engine,
            clock: Clock::new(),
            council,
            aborter,
            mesh,
            members,
            turn,
            registered: 0,
            options,
            near: None,
            view: None,
            ground,
        })
    }

    /// This rank, in the present group.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     assert!(group.rank() < group.ranks());
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn rank(&self) -> Rank {
        self.members.iter().position(|&member| member == self.mesh.rank).unwrap_or_default()
    }

    /// How many ranks the present group has.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     assert_eq!(group.ranks(), 2);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn ranks(&self) -> usize {
        self.members.len()
    }

    /// The numbers that the present ranks had when they met, in order.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     assert_eq!(group.members(), [0, 1]); // until one is lost
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn members(&self) -> &[Rank] {
        &self.members
    }

    /// How the ranks reach each other.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     assert_eq!(group.transport().name(), "shm");
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn transport(&self) -> &Transport {
        &self.options.transport
    }

    /// The session with this rank's endpoint, where the transport has one.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     assert!(group.session().is_none(), "there are no endpoints over shared memory");
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn session(&self) -> Option<&Session> {
        match &self.ground {
            Ground::Shm => None,
            Ground::Kmod(_, taken) => Some(&taken.session),
        }
    }

    /// What happened on this rank's links since the group met or shrank.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     group.barrier(second).unwrap();
    ///     assert!(group.counters().records > 0);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn counters(&mut self) -> Counters {
        let counters = self.engine.get().links().counters();
        self.engine.leave();
        counters
    }

    /// Bytes that this rank's processor loaded and stored for the group's collectives since the group met or shrank.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     group.all_reduce(&mut [1.0f32; 100], Op::Sum, second).unwrap();
    ///     assert!(group.volume().stored >= 400);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn volume(&mut self) -> Volume {
        let volume = self.engine.get().volume();
        self.engine.leave();
        volume
    }

    /// Records every step of this rank from now on; the latest `most` are kept ([`Executor::start_trace`]).
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     group.start_trace(1000);
    ///     group.barrier(second).unwrap();
    ///     assert!(group.stop_trace().unwrap().totals().steps > 0);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn start_trace(&mut self, most: usize) {
        self.engine.get().start_trace(most);
        self.engine.leave();
    }

    /// Ends the recording and gives it; nothing when there was none.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     assert!(group.stop_trace().is_none(), "nothing was recorded");
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn stop_trace(&mut self) -> Option<Trace> {
        let trace = self.engine.get().stop_trace();
        self.engine.leave();
        trace
    }

    /// Endpoints whose link is slower or narrower than when the group's present links were made, of all ranks. A look at memory. With
    /// `KmodOptions::degraded_link_is_error` such a link fails the calls instead.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     for link in group.degraded_links() {
    ///         eprintln!("rank {}: {} was {}", link.rank, link.now, link.before);
    ///     }
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn degraded_links(&mut self) -> Vec<Degraded> {
        let degraded = self.engine.get().links().degraded();
        self.engine.leave();
        degraded
    }

    /// What the module said since the last call: endpoints that came, went, recovered, links that changed, errors. Sleeping ranks
    /// wake for it; over shared memory there is none. Older ones than the latest 1024 are dropped, as are those of the group's lives before.
    ///
    /// ```
    /// use pcieipc::group;
    ///
    /// group::of_threads(2, |mut group| assert!(group.events().is_empty()))?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn events(&mut self) -> Vec<Event> {
        let events = self.engine.get().links().events();
        self.engine.leave();
        events
    }

    /// The shards that ranks own in all-reduces in two shots. They follow the links of the endpoints: see [`Group::rebalance`].
    ///
    /// ```
    /// use pcieipc::group;
    ///
    /// // Over shared memory no link limits the ranks.
    /// group::of_threads(2, |mut group| assert!(group.shares().are_equal()))?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn shares(&mut self) -> Shares {
        let shares = self.engine.get().shares();
        self.engine.leave();
        shares
    }

    /// The links, for executors of other kinds.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     use pcieipc::link::Links;
    ///     assert!(group.links().max_record() >= 4096);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn links(&mut self) -> &mut dyn GroupLinks {
        self.engine.get().links().as_mut()
    }

    /// Combines the buffers of all ranks, element by element; every rank gets the result in place of its own. All ranks call
    /// it with the same length, type and operation.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let mut gradient = [group.rank() as f32, 1.5];
    ///     group.all_reduce(&mut gradient, Op::Average, second).unwrap();
    ///     assert_eq!(gradient, [0.5, 1.5]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Timeout`, `PeerDied`, `EndpointRecovering`, `EndpointGone`, `Aborted`, `Mismatch`, `Corrupt`. The buffer may then be half
    /// overwritten, and the group can only [`Group::shrink`].
    pub fn all_reduce<T: Element>(&mut self, buffer: &mut [T], op: Op, timeout: Duration) -> Result<()> {
        let by = self.clock.after(timeout);
        self.run(|calls| calls.all_reduce(buffer, op, by))
    }

    /// Like [`Group::all_reduce`], but leaves the input as it is, also on an error.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let (input, mut output) = ([1.0f32, 2.0], [0.0; 2]);
    ///     group.all_reduce_into(&input, &mut output, Op::Sum, second).unwrap();
    ///     assert_eq!((input, output), ([1.0, 2.0], [2.0, 4.0]));
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when the lengths differ.
    pub fn all_reduce_into<T: Element>(&mut self, input: &[T], output: &mut [T], op: Op, timeout: Duration) -> Result<()> {
        let by = self.clock.after(timeout);
        self.run(|calls| calls.all_reduce_into(input, output, op, by))
    }

    /// Like [`Group::all_reduce`] for a buffer whose type is known only at run time; it need not be aligned.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::{Kind, Op}};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     let mut bytes = 3u16.to_ne_bytes();
    ///     group.all_reduce_bytes(&mut bytes, Kind::U16, Op::Prod, second).unwrap();
    ///     assert_eq!(u16::from_ne_bytes(bytes), 9);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`]; `Argument` when the length is not a multiple of the element's size.
    pub fn all_reduce_bytes(&mut self, buffer: &mut [u8], kind: Kind, op: Op, timeout: Duration) -> Result<()> {
        let by = self.clock.after(timeout);
        self.run(|calls| calls.all_reduce_bytes(buffer, kind, op, by))
    }

    /// Makes the calls of all ranks fail with `Aborted` and this reason (cut after 191 bytes).
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     group.abort("as an example");
    ///     assert!(group.barrier(second).is_err());
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn abort(&mut self, why: &str) {
        self.engine.get().links().abort(why);
        self.engine.leave();
    }

    /// Goes on without the ranks that are lost: died, left, aborted for good, or with an endpoint that is not live. All that are
    /// left call it; they agree on who that is, and get new numbers in the old order and new links.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     if group.rank() == 1 {
    ///         return; // lost
    ///     }
    ///     while group.barrier(second).is_ok() {}
    ///     group.shrink(second).unwrap();
    ///     assert_eq!(group.members(), [0]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `EndpointGone` or `EndpointRecovering` when this rank's own endpoint is not live; `Meeting` when the others went on
    /// without this rank, or no agreement was reached in time; `Mismatch` when another rank recovers instead.
    pub fn shrink(&mut self, timeout: Duration) -> Result<()> {
        self.council.at_home()?;
        survivors::shrink(self, Instant::now() + timeout).map_err(|error| self.naming(error))
    }

    /// Waits until all ranks that met are there again, and goes on with new links and memory, in a new epoch: an endpoint that was
    /// in error recovery, was reset, or was removed and put back; a process that was replaced (which calls [`Group::rejoin`]); a
    /// rank that the others had left out (which calls this too). All that are left call it. In an endpoint's new life the library
    /// attaches anew and makes its channels again; what the program made of [`Group::session`] it makes again itself.
    ///
    /// When not all come in time, all get an error, and may call this again or [`Group::shrink`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     group.abort("as an example");
    ///     group.recover(second).unwrap();
    ///     assert_eq!(group.members(), [0, 1]);
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `EndpointGone` or `EndpointRecovering` when this rank's own endpoint did not come back; `Meeting` when another rank did not;
    /// `Mismatch` when another rank shrinks instead; `System`, and as for the module's calls.
    pub fn recover(&mut self, timeout: Duration) -> Result<()> {
        self.council.at_home()?;
        survivors::recover(self, Instant::now() + timeout).map_err(|error| self.naming(error))
    }

    /// Whether the others went on without this rank. It can only [`Group::recover`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     assert!(!group.is_excluded());
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    pub fn is_excluded(&self) -> bool {
        self.council.is_excluded()
    }

    /// A failed call ends the group for all: peers that wait for this rank learn why, instead of waiting for their deadline.
    fn run<R>(&mut self, call: impl FnOnce(&mut Calls) -> Result<R>) -> Result<R> {
        self.council.at_home()?;
        let calls = self.engine.get();
        let result = call(calls).map_err(|error| {
            let links = calls.links();
            let error = error.naming(|rank| links.endpoint(rank));
            links.abort(&error.to_string());
            error
        });
        self.engine.leave();
        result
    }

    /// Names the endpoint of the rank that an error of the meeting is about; ranks are counted as when the group first met there.
    fn naming(&mut self, error: Error) -> Error {
        let members = self.members.clone();
        let links = self.engine.get().links();
        let error = error.naming(|rank| links.endpoint(members.iter().position(|member| *member == rank)?));
        self.engine.leave();
        error
    }
}
