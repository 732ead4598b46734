// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which algorithm a call uses: a pure function of what all ranks know, so that they agree without talking.

use super::{Executor, Options};
use crate::{
    error::Result,
    link::Links,
    plan::{Algorithm, Collective, Tree},
    tune::{Calibration, Choice, Tuner, Ways},
};

impl<L: Links> Executor<L> {
    pub(super) fn choose(&mut self, collective: Collective, bytes: usize, registered: bool) -> Choice {
        let small = bytes <= self.options.one_shot_up_to;
        let default = Choice { algorithm: usual(collective, small, registered), chunk: self.options.chunk };
        if let Some(asked) = self.options.algorithm.filter(|a| exists(collective, *a, registered)) {
            return Choice { algorithm: asked, ..default };
        }
        // What goes straight between registered buffers is not measured.
        let calibration = self.options.calibration.or(self.learnt).filter(|_| default.algorithm != Algorithm::Direct);
        let tuner = calibration.map(|c| Tuner::new(self.tree.clone(), self.links.ranks(), c).over(self.ways.clone()));
        let Some(tuner) = tuner else { return default };
        let class = tuner.class(bytes);
        if let Some((_, choice)) = self.choices.iter().find(|(k, _)| *k == (collective, class)) {
            return *choice;
        }
        // By the class alone, so that the same call has the same answer whatever was called before it.
        let choice = tuner.choice(collective, class, self.options.usual(collective, class));
        self.choices.push(((collective, class), choice));
        choice
    }
}

impl<L: Links> Executor<L> {
    /// Plans and chooses from now on for ranks that are near each other as the tree says, for links that carry what `ways` says where endpoints'
    /// engines move records, and by a calibration, unless one was given in the options. All ranks call it with the same between two collectives.
    ///
    /// ```
    /// # use pcieipc::{executor::{Executor, Options}, loopback, reduce::Op};
    /// # let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    /// # let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default())?;
    /// use pcieipc::plan::Tree;
    /// alone.learn(Some(Tree::flat(1)), None, None)?;
    /// assert!(alone.learn(Some(Tree::flat(2)), None, None).is_err());
    /// # Ok::<(), pcieipc::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Argument` for a tree of other ranks.
    pub fn learn(&mut self, tree: Option<Tree>, ways: Option<Ways>, calibration: Option<Calibration>) -> Result<()> {
        self.set_tree(tree)?;
        if (&self.ways, self.learnt) != (&ways, calibration) {
            (self.ways, self.learnt) = (ways, calibration);
            self.choices.clear();
            self.last_short = None;
        }
        Ok(())
    }
}

impl Options {
    /// What a collective of `bytes` takes among ordinary buffers when nothing was measured and no algorithm is given.
    ///
    /// ```
    /// use pcieipc::{executor::Options, plan::{Algorithm, Collective}};
    ///
    /// let options = Options::default();
    /// assert_eq!(options.usual(Collective::AllReduce, 1024).algorithm, Algorithm::OneShot);
    /// assert_eq!(options.usual(Collective::AllReduce, 1 << 20).algorithm, Algorithm::TwoShot);
    /// ```
    pub fn usual(&self, collective: Collective, bytes: usize) -> Choice {
        Choice { algorithm: usual(collective, bytes <= self.one_shot_up_to, false), chunk: self.chunk }
    }
}

/// Without a calibration.
fn usual(collective: Collective, small: bool, registered: bool) -> Algorithm {
    use {Algorithm as A, Collective as C};
    match (collective, small, registered) {
        (C::AllReduce, true, _) => A::OneShot,
        (C::AllReduce, false, true) | (C::ReduceScatter | C::AllGather | C::Broadcast, _, true) => A::Direct,
        (C::ReduceScatter | C::AllGather | C::AllToAll, ..) | (C::AllReduce, false, false) => A::TwoShot,
        (C::Reduce | C::Broadcast, true, _) => A::Star,
        (C::Reduce | C::Broadcast, false, _) => A::TwoShot,
        (C::SendReceive | C::Barrier, ..) => A::OneShot,
    }
}

/// Whether the collective has the algorithm, given the buffers.
fn exists(collective: Collective, algorithm: Algorithm, registered: bool) -> bool {
    use crate::plan::{Shape, build};
    (registered || algorithm != Algorithm::Direct)
        && build(collective, algorithm, Shape::new(1, 0, 1), 0, &Tree::flat(1)).is_some()
}
