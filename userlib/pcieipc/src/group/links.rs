// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a group does with its links, whatever these are made of.

use crate::{
    device::Event,
    error::Rank,
    link::Links,
    sys::Bell,
    transport::{Counters, Degraded, RankLinks, Wire},
};

/// What a group can do with its links beyond [`Links`].
pub trait GroupLinks: Links + Send + std::fmt::Debug {
    /// What happened until now.
    fn counters(&self) -> Counters;
    /// Makes the calls of all peers fail with this reason.
    fn abort(&mut self, why: &str);
    /// Ranks that can not go on.
    fn lost(&self) -> Vec<Rank>;
    /// Ranks whose endpoint is not live in the generation that the group met with.
    fn not_live(&self) -> Vec<Rank>;
    /// Whether this rank's own endpoint does not do what it is told, though its status says that it lives.
    fn is_idle(&self) -> bool;
    /// What the link of each rank carries, where links limit the collectives.
    fn rates(&self) -> Option<Vec<f64>>;
    /// Links that are slower or narrower than when these were made.
    fn degraded(&self) -> Vec<Degraded>;
    /// Says to the peers that this rank leaves in order.
    fn leave(&mut self);
    /// What the kernel said since the last call.
    fn events(&mut self) -> Vec<Event>;
    /// What wakes this rank from its sleep on these links, for another thread; nothing when it can not be had.
    fn waker(&self) -> Option<Bell>;
}

impl<W: Wire> GroupLinks for RankLinks<W> {
    fn counters(&self) -> Counters {
        Self::counters(self)
    }
    fn abort(&mut self, why: &str) {
        Self::abort(self, why);
    }
    fn lost(&self) -> Vec<Rank> {
        Self::lost(self)
    }
    fn not_live(&self) -> Vec<Rank> {
        Self::not_live(self)
    }
    fn is_idle(&self) -> bool {
        self.wire().is_idle()
    }
    fn rates(&self) -> Option<Vec<f64>> {
        self.wire().rates()
    }
    fn degraded(&self) -> Vec<Degraded> {
        self.wire().degraded()
    }
    fn leave(&mut self) {
        Self::leave(self);
    }
    fn events(&mut self) -> Vec<Event> {
        self.wire_mut().events()
    }
    fn waker(&self) -> Option<Bell> {
        Self::waker(self)
    }
}
