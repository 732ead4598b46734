// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a group knows of the PCIe tree: which ranks are near each other, and that the tree has changed.

use std::time::{Duration, Instant};

use super::Group;
use crate::{
    error::{Error, Result},
    plan::Tree,
    topology::{Address, Change, Live, Source, TreeWatch},
};

/// A tree of sixteen ranks is shorter as text, however it is nested.
const LONGEST: usize = 1024;
/// Without a word of the kernel the tree is looked at this often.
const INTERVAL: Duration = Duration::from_millis(500);

/// A group's view of the tree.
#[derive(Debug)]
pub(super) struct Near {
    watch: TreeWatch,
    /// Endpoint of each rank of the first meeting.
    endpoints: Vec<Address>,
    planned_for: u64,
}

impl Near {
    /// Says that the present plans were not made for any tree.
    pub(super) fn forget(&mut self) {
        self.planned_for = 0;
    }
}

impl Group {
    /// From now on the group follows the PCIe tree; rank `i` of the first meeting uses `endpoints[i]`. Plans change only in
    /// [`Group::replan`], which all ranks call.
    ///
    /// # Errors
    /// `Argument` for another number of endpoints than ranks; `System` when no thread can be started.
    pub fn follow_tree(&mut self, endpoints: Vec<Address>) -> Result<()> {
        self.follow_tree_of(Box::new(Live::default()), endpoints)
    }

    /// Like [`Group::follow_tree`], for another source than this host.
    ///
    /// # Errors
    /// As for [`Group::follow_tree`].
    pub fn follow_tree_of(&mut self, source: Box<dyn Source>, endpoints: Vec<Address>) -> Result<()> {
        if endpoints.len() != self.options.ranks {
            return Err(Error::Argument(format!(
                "{} endpoints for {} ranks: give one for each rank of the meeting",
                endpoints.len(),
                self.options.ranks
            )));
        }
        let watch = TreeWatch::start(source, endpoints.clone(), INTERVAL).map_err(|source| Error::System {
            call: "pthread_create",
            hint: "raise the limit of threads (ulimit -u)".into(),
            source: source.into(),
        })?;
        // Zero: nothing is planned for this tree yet.
        self.near = Some(Near { watch, endpoints, planned_for: 0 });
        Ok(())
    }

    /// Whether the tree is not the one that the present plans were made for. A look at one word of memory.
    pub fn tree_changed(&self) -> bool {
        self.near.as_ref().is_some_and(|near| near.watch.version() != near.planned_for)
    }

    /// What happened to the tree since the last call: cards that left or returned, links that changed, errors.
    pub fn tree_changes(&mut self) -> Vec<Change> {
        self.near.as_ref().map(|near| near.watch.take().0).unwrap_or_default()
    }

    /// Makes plans for the tree as rank 0 sees it now. All ranks call it, at the same point between collectives; those that do not follow
    /// the tree themselves learn it from rank 0. Gives the tree, or `None` (and plans for ranks that are all alike) when rank 0
    /// follows none or misses an endpoint of the present group.
    ///
    /// # Errors
    /// As for [`Group::all_reduce`].
    pub fn replan(&mut self, timeout: Duration) -> Result<Option<Tree>> {
        let version = self.near.as_ref().map(|near| near.watch.version());
        let mut text = vec![0u8; LONGEST];
        if self.rank() == 0 {
            if let Some(tree) = self.tree_now() {
                let bytes = tree.to_string().into_bytes();
                if bytes.len() < LONGEST {
                    text[..bytes.len()].copy_from_slice(&bytes);
                }
            }
        }
        self.run(|calls| calls.broadcast(&mut text, 0, Instant::now() + timeout))?;
        let length = text.iter().position(|b| *b == 0).unwrap_or(LONGEST);
        // All ranks read the same bytes, so they all take the same tree or none.
        let tree =
            std::str::from_utf8(&text[..length]).ok().and_then(|t| t.parse::<Tree>().ok()).filter(|t| t.covers(self.ranks()));
        self.run(|calls| calls.set_tree(tree.clone()))?;
        if let (Some(near), Some(version)) = (&mut self.near, version) {
            near.planned_for = version;
        }
        Ok(tree)
    }

    fn tree_now(&self) -> Option<Tree> {
        let near = self.near.as_ref()?;
        let endpoints: Option<Vec<Address>> = self.members.iter().map(|m| near.endpoints.get(*m).copied()).collect();
        near.watch.tree().rank_tree(&endpoints?)
    }
}
