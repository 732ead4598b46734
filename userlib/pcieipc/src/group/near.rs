// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a group knows of the PCIe tree: which ranks are near each other, what their links carry, and that the tree has changed.
//!
//! Only rank 0's reading counts. It gives what it sees to all, so all plan and choose alike by construction. Each rank follows the tree for
//! itself all the same, to notice that plans no longer fit.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{Ground, Group, exchange::MAX_EXCHANGE_BYTES};
use crate::{
    error::{EndpointRef, Error, Rank, Result},
    plan::{Shares, Tree},
    topology::{Address, Change, LinkState, Live, Source, Topology, TreeWatch},
    transport::kmod::Mover,
    tune::{self, Calibration, Ways},
};

/// Without a word of the kernel the endpoints' links are looked at this often.
const INTERVAL: Duration = Duration::from_millis(500);

/// The host whose tree a group follows.
#[derive(Clone)]
pub struct Host(Arc<dyn Source>);

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Host").field(&self.0.origin()).finish()
    }
}

impl Host {
    /// Another host than this one: a saved one, or one of a test.
    ///
    /// ```
    /// use pcieipc::{group::Host, topology::{Archive, Origin}};
    ///
    /// let saved = Host::of(Archive::new(Origin::Snapshot));
    /// let this = Host::default();
    /// ```
    pub fn of(source: impl Source + 'static) -> Self {
        Self(Arc::new(source))
    }
}

impl Default for Host {
    fn default() -> Self {
        Self::of(Live::default())
    }
}

/// A group's view of the tree.
#[derive(Debug)]
pub(super) struct Near {
    watch: TreeWatch,
    host: Host,
    /// Endpoint of each rank of the first meeting.
    endpoints: Vec<Address>,
    planned_for: u64,
    /// The tree that the present plans were made for, to say what got worse since.
    planned_tree: Arc<Topology>,
}

/// What rank 0 tells: all that choices depend on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct View {
    /// The ranks that it is about, by their numbers of the first meeting; below they are counted anew.
    members: Vec<Rank>,
    /// Which ranks are near each other; none where nobody knows.
    tree: Option<String>,
    /// What links carry, where engines of the endpoints move records.
    ways: Option<Ways>,
    /// What was measured of this machine.
    calibration: Option<Calibration>,
}

impl View {
    fn read(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    /// For some of its ranks; what is not sound or not known of all of them counts as not known, on all ranks alike.
    fn among(&self, members: &[Rank]) -> (Option<Tree>, Option<Ways>, Option<Calibration>) {
        let ranks = self.members.len();
        let places: Option<Vec<Rank>> = members.iter().map(|m| self.members.iter().position(|o| o == m)).collect();
        let calibration = self.calibration.filter(Calibration::is_plausible);
        let Some(places) = places else { return (None, None, calibration) };
        let tree = self.tree.as_ref().and_then(|t| t.parse::<Tree>().ok()).filter(|t| t.covers(ranks));
        let ways = self.ways.as_ref().filter(|w| w.is_sound(ranks));
        (tree.map(|t| t.among(&places)), ways.map(|w| w.among(&places)), calibration)
    }
}

impl Group {
    /// From now on the group follows the PCIe tree; rank `i` of the first meeting uses `endpoints[i]`. Groups over `/dev/pcieipc` do so from
    /// their meeting on. Plans change only in [`Group::replan`], which all ranks call.
    ///
    /// ```
    /// # fn step(group: &mut pcieipc::group::Group, second: std::time::Duration) -> pcieipc::Result<()> {
    /// group.follow_tree(vec!["0000:03:00.0".parse().unwrap(), "0000:04:00.0".parse().unwrap()])?;
    /// println!("{:?}", group.replan(second)?); // ((0 1))
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Argument` for another number of endpoints than ranks; `System` when no thread can be started.
    pub fn follow_tree(&mut self, endpoints: Vec<Address>) -> Result<()> {
        self.follow_tree_of(Host::default(), endpoints)
    }

    /// Like [`Group::follow_tree`], for another host than this one.
    ///
    /// ```
    /// # fn step(group: &mut pcieipc::group::Group, second: std::time::Duration) -> pcieipc::Result<()> {
    /// use pcieipc::{group::Host, topology::{Archive, Live}};
    ///
    /// group.follow_tree_of(Host::of(Live::default()), vec!["0000:03:00.0".parse().unwrap()])?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Group::follow_tree`].
    pub fn follow_tree_of(&mut self, host: Host, endpoints: Vec<Address>) -> Result<()> {
        if endpoints.len() != self.options.ranks {
            return Err(Error::Argument(format!(
                "{} endpoints for {} ranks: give one for each rank of the meeting",
                endpoints.len(),
                self.options.ranks
            )));
        }
        let watch = TreeWatch::start(Box::new(host.0.clone()), endpoints.clone(), INTERVAL).map_err(|source| Error::System {
            call: "pthread_create",
            hint: "raise the limit of threads (ulimit -u)".into(),
            source: source.into(),
        })?;
        let planned_tree = watch.tree();
        // Zero: nothing is planned for this tree yet.
        self.near = Some(Near { watch, host, endpoints, planned_for: 0, planned_tree });
        Ok(())
    }

    /// Whether the tree is not the one that the present plans were made for. A look at one word of memory.
    ///
    /// ```
    /// # fn step(group: &mut pcieipc::group::Group, second: std::time::Duration) -> pcieipc::Result<()> {
    /// // All ranks must come to the same answer before they plan anew together.
    /// let mut changed = [u8::from(group.tree_changed())];
    /// group.all_reduce(&mut changed, pcieipc::reduce::Op::Max, second)?;
    /// if changed != [0] {
    ///     group.replan(second)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn tree_changed(&self) -> bool {
        self.near.as_ref().is_some_and(|near| near.watch.version() != near.planned_for)
    }

    /// What happened to the tree since the last call: cards that left or returned, links that changed, errors.
    ///
    /// ```
    /// # fn step(group: &mut pcieipc::group::Group, second: std::time::Duration) -> pcieipc::Result<()> {
    /// for change in group.tree_changes() {
    ///     eprintln!("{change:?}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn tree_changes(&mut self) -> Vec<Change> {
        self.near.as_ref().map(|near| near.watch.take().0).unwrap_or_default()
    }

    /// Links on the way to the endpoints of the present ranks that are slower or narrower than when the present plans were made, each as
    /// `LinkDegraded`. They are warnings: calls go on, and [`Group::replan`] plans for the links as they are.
    ///
    /// ```
    /// # fn step(group: &mut pcieipc::group::Group, second: std::time::Duration) -> pcieipc::Result<()> {
    /// for warning in group.degraded_ways() {
    ///     eprintln!("{warning}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn degraded_ways(&self) -> Vec<Error> {
        let Some(near) = self.near.as_ref().filter(|_| self.tree_changed()) else { return Vec::new() };
        let (before, now) = (&near.planned_tree, near.watch.tree());
        let mut found = Vec::new();
        for (peer, member) in self.members.iter().enumerate() {
            let Some(address) = near.endpoints.get(*member) else { continue };
            let (Some(old), Some(new)) = (before.position(*address), now.position(*address)) else { continue };
            for hop in before.hops(old) {
                let lower = before.functions[hop.card].address;
                let state = |tree: &Topology| tree.hop(tree.position(lower)?)?.now;
                if let (Some(was), Some(is)) = (hop.now, state(&now)) {
                    if is.below(was) && now.hops(new).iter().any(|h| now.functions[h.card].address == lower) {
                        found.push(self.degraded(peer, lower, was, is));
                    }
                }
            }
        }
        found
    }

    fn degraded(&self, peer: Rank, lower: Address, was: LinkState, is: LinkState) -> Error {
        // Only the own endpoint's number is known here; the text names the link.
        let own = self.session().filter(|_| peer == self.rank());
        let endpoint =
            own.map_or(EndpointRef { id: 0, generation: 0 }, |s| EndpointRef { id: s.endpoint().0, generation: s.generation() });
        Error::LinkDegraded { peer, endpoint, before: was.to_string(), now: format!("{is} above {lower}") }
    }

    /// Makes plans for the tree as rank 0 sees it now. All ranks call it, at the same point between collectives; those that do not follow
    /// the tree themselves learn it from rank 0. Gives the tree, or `None` (and plans for ranks that are all alike) when rank 0
    /// follows none or misses an endpoint of the present group.
    ///
    /// ```
    /// # fn step(group: &mut pcieipc::group::Group, second: std::time::Duration) -> pcieipc::Result<()> {
    /// if let Some(tree) = group.replan(second)? {
    ///     println!("planned for {tree}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`].
    pub fn replan(&mut self, timeout: Duration) -> Result<Option<Tree>> {
        let seen = self.near.as_ref().map(|near| (near.watch.version(), near.watch.tree()));
        let mut text = vec![0u8; MAX_EXCHANGE_BYTES];
        if self.rank() == 0 {
            let bytes = self.view_now();
            text[..bytes.len()].copy_from_slice(&bytes);
        }
        self.run(|calls| calls.broadcast(&mut text, 0, Instant::now() + timeout))?;
        let length = text.iter().position(|b| *b == 0).unwrap_or(text.len());
        self.take_view(&text[..length], seen)
    }

    /// Plans anew if rank 0 has seen the tree change since the present plans were made, and says whether it had. All ranks call it, at the same
    /// point between collectives: each sees a change at a moment of its own, so what one rank's [`Group::tree_changed`] says must not
    /// decide whether it calls [`Group::replan`]. Where nothing changed it costs a broadcast of one byte.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use pcieipc::{group::Group, reduce::Op};
    /// # fn train(group: &mut Group, gradients: &mut [f32]) -> pcieipc::Result<()> {
    /// let second = Duration::from_secs(1);
    /// for step in 0..10_000 {
    ///     if step % 100 == 0 {
    ///         group.replan_if_changed(second)?;
    ///     }
    ///     group.all_reduce(gradients, Op::Sum, second)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`].
    pub fn replan_if_changed(&mut self, timeout: Duration) -> Result<bool> {
        let deadline = Instant::now() + timeout;
        let mut changed = [u8::from(self.tree_changed())];
        self.run(|calls| calls.broadcast(&mut changed, 0, deadline))?;
        if changed == [0] {
            return Ok(false);
        }
        self.replan(deadline.saturating_duration_since(Instant::now()))?;
        Ok(true)
    }

    /// At the meeting over the module: the ranks tell each other where their endpoints are, and plan for the tree that rank 0 sees.
    pub(super) fn learn_tree(&mut self, deadline: Instant) -> Result<()> {
        let Ground::Kmod(options, _) = &self.ground else { return Ok(()) };
        // What was asked for goes before what is found. All ranks agreed on it when they met.
        if self.options.executor.tree.is_some() {
            return Ok(());
        }
        let Some(host) = options.host.clone() else { return Ok(()) };
        let left = || deadline.saturating_duration_since(Instant::now());
        let own = self.session().and_then(|s| s.info().ok()).map(|info| info.address).unwrap_or_default();
        let mut given = self.exchange("where the endpoints are", own.as_bytes(), &[], left())?;
        let rank = self.rank();
        given[rank].0 = own.into_bytes();
        let address = |bytes: &[u8]| std::str::from_utf8(bytes).ok()?.parse::<Address>().ok();
        let endpoints: Option<Vec<Address>> = given.iter().map(|(bytes, _)| address(bytes)).collect();
        let known = endpoints.is_some();
        if let Some(endpoints) = endpoints {
            // Reading a tree takes long, and all wait for it: who follows these endpoints already goes on with that.
            let whole = |near: &Near| near.watch.tree().rank_tree(&endpoints).is_some();
            let follows = self.near.as_ref().is_some_and(|near| near.endpoints == endpoints && (rank != 0 || whole(near)));
            if !follows {
                // A rank without a thread to spare learns of changes from the others, when they plan anew.
                let _ = self.follow_tree_of(host, endpoints);
            }
        }
        let seen = self.near.as_ref().map(|near| (near.watch.version(), near.watch.tree()));
        let view = if rank == 0 && known { self.view_now() } else { Vec::new() };
        let mut given = self.exchange("the tree", &view, &[], left())?;
        given[rank].0 = view;
        self.take_view(&given[0].0, seen).map(drop)
    }

    /// After the group has shrunk: what was learnt of those that are left. All ranks hold the same.
    pub(super) fn keep_view(&mut self) -> Result<()> {
        let Some(view) = self.view.clone() else { return Ok(()) };
        let (tree, ways, calibration) = view.among(&self.members);
        let tree = tree.or_else(|| self.options.executor.tree.as_ref().map(|t| t.among(&self.members)));
        self.run(|calls| calls.learn(tree, ways, calibration))
    }

    /// What this rank sees, as text; nothing where it follows no tree or misses an endpoint of the present group.
    fn view_now(&self) -> Vec<u8> {
        let Some(near) = &self.near else { return Vec::new() };
        let endpoints: Option<Vec<Address>> = self.members.iter().map(|m| near.endpoints.get(*m).copied()).collect();
        let Some(endpoints) = endpoints else { return Vec::new() };
        let topology = near.watch.tree();
        let Some(tree) = topology.rank_tree(&endpoints) else { return Vec::new() };
        let engines = matches!(&self.ground, Ground::Kmod(options, _) if options.mover == Mover::Engine);
        let mut view = View {
            members: self.members.clone(),
            tree: Some(tree.to_string()),
            ways: topology.ways(&endpoints).filter(|_| engines),
            calibration: None,
        };
        // Measured with these endpoints named, or just on this machine.
        let source = near.host.0.as_ref();
        view.calibration =
            tune::stored(&tune::key_in(source, &topology, &endpoints)).or_else(|| tune::stored(&tune::key(source, &[])));
        // A link that got worse makes another machine's key; what was measured of processors and memory still holds.
        view.calibration = view.calibration.or(self.view.as_ref().and_then(|v| v.calibration));
        let bytes = serde_json::to_vec(&view).unwrap_or_default();
        if bytes.len() < MAX_EXCHANGE_BYTES { bytes } else { Vec::new() }
    }

    /// Plans for what rank 0 told; all ranks read the same bytes, so they all take the same or nothing.
    fn take_view(&mut self, bytes: &[u8], seen: Option<(u64, Arc<Topology>)>) -> Result<Option<Tree>> {
        let view = View::read(bytes).unwrap_or_default();
        let (tree, ways, calibration) = view.among(&self.members);
        self.run(|calls| calls.learn(tree.clone(), ways, calibration))?;
        self.view = Some(view);
        if let (Some(near), Some((version, topology))) = (&mut self.near, seen) {
            (near.planned_for, near.planned_tree) = (version, topology);
        }
        Ok(tree)
    }

    /// Gives each rank at once a shard of all-reduces that fits its link, as rank 0 sees the links now: after one trained down, or up
    /// again. Without it the group does so by itself, within 128 all-reduces. All ranks call it, at the same point between collectives.
    /// Changes nothing where links do not limit the collectives: over shared memory, and where processors move the records. The
    /// sums keep their bits.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pcieipc::{group, reduce::Op};
    ///
    /// group::of_threads(2, |mut group| {
    ///     let second = Duration::from_secs(60);
    ///     // Over shared memory no link limits the ranks.
    ///     assert!(group.rebalance(second).unwrap().are_equal());
    /// })?;
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Group::all_reduce`].
    pub fn rebalance(&mut self, timeout: Duration) -> Result<Shares> {
        let (first, ranks) = (self.rank() == 0, self.ranks());
        let shares = self.run(|calls| {
            // At the next look of its own the group must not go back.
            calls.tell_next_look();
            let rates = calls.links().rates().filter(|_| first);
            let mut bytes = rates.map_or(Shares::default(), |r| Shares::for_rates(&r)).to_bytes();
            calls.broadcast(&mut bytes, 0, Instant::now() + timeout)?;
            let shares = Shares::from_bytes(bytes, ranks);
            calls.set_shares(shares);
            Ok(shares)
        })?;
        Ok(shares)
    }
}
