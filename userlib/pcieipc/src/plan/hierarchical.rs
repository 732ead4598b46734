// SPDX-License-Identifier: MIT OR Apache-2.0
//! Collectives over a tree: each shard crosses every boundary of the tree once up and once down.
//!
//! For each shard every part of the tree has a leader. It combines what the leaders of its parts hold and passes the result
//! to the leader of the part above; the topmost has the sum, and it comes down the same way. The leaders differ from shard
//! to shard, so that in each part the ranks share the work as in a two-shot, whatever the parts' sizes are.

use super::{Algorithm, Collective, Plan, Shape, Source, Step, Target, Tree};
use crate::error::Rank;

/// Which halves of the way a shard goes.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    UpAndDown,
    Up,
    Down,
}

pub(super) fn all_reduce(shape: Shape, rank: Rank, tree: &Tree) -> Plan {
    build(Collective::AllReduce, shape, rank, tree, Way::UpAndDown)
}

pub(super) fn reduce(shape: Shape, rank: Rank, tree: &Tree) -> Plan {
    let plan = build(Collective::Reduce, shape, rank, tree, Way::Up);
    Plan { output: if rank == shape.root { plan.output } else { 0 }, ..plan }
}

pub(super) fn broadcast(shape: Shape, rank: Rank, tree: &Tree) -> Plan {
    let plan = build(Collective::Broadcast, shape, rank, tree, Way::Down);
    Plan { input: if rank == shape.root { plan.input } else { 0 }, ..plan }
}

/// A shard on its way, as the functions below see it.
struct Walk<'a> {
    rank: Rank,
    shard: usize,
    start: usize,
    len: usize,
    /// With a root, it leads every part that holds it.
    root: Option<Rank>,
    way: Way,
    /// Phases of the way up.
    height: usize,
    phases: &'a mut [Vec<Step>],
    scratch: &'a mut usize,
}

fn build(collective: Collective, shape: Shape, rank: Rank, tree: &Tree, way: Way) -> Plan {
    if shape.count == 0 {
        return Plan::meet(collective, Algorithm::Hierarchical, shape, rank);
    }
    let trunk = Tree::Part(vec![tree.clone()]);
    // A lone rank still has a part around it, whose leader takes the step that makes an output of the input.
    let tree = if matches!(tree, Tree::Leaf(_)) { &trunk } else { tree };
    let (height, root) = (tree.height(), (way != Way::UpAndDown).then_some(shape.root));
    let shards = if root.is_some() { 1 } else { balanced(tree, shape.ranks) };
    let mut phases = vec![vec![]; 2 * height + 1];
    let (mut scratch, mut busiest) = (0, vec![0; shape.ranks * shape.ranks]);
    for shard in 0..shards {
        let range = shape.shard(shards, shard);
        if range.is_empty() {
            continue;
        }
        let (start, len) = (range.start, range.len());
        let mut walk = Walk { rank, shard, start, len, root, way, height, phases: &mut phases, scratch: &mut scratch };
        walk.count(tree, shape.ranks, &mut busiest);
        if way == Way::Down {
            walk.down_from_top(tree);
        } else {
            walk.up(tree, None, 0);
        }
        if way != Way::Up {
            walk.down(tree, 0);
        }
    }
    // Up and down, one window being filled while the other is read.
    let depth = 4 * busiest.into_iter().max().unwrap_or(0) + 2;
    let plan = Plan::new(collective, Algorithm::Hierarchical, shape, rank, depth, phases);
    Plan { scratch, ..plan }
}

/// A number of shards that every part's size divides, if it is not too large: then leaders share the work evenly.
fn balanced(tree: &Tree, ranks: usize) -> usize {
    fn gcd(a: usize, b: usize) -> usize {
        if b == 0 { a } else { gcd(b, a % b) }
    }
    fn multiple(tree: &Tree, of: usize) -> usize {
        match tree {
            Tree::Leaf(_) => of,
            Tree::Part(parts) => {
                let size = tree.ranks().len();
                parts.iter().fold(of / gcd(of, size) * size, |of, part| multiple(part, of))
            }
        }
    }
    Some(multiple(tree, 1)).filter(|&m| m <= 2 * ranks).unwrap_or(ranks)
}

impl Walk<'_> {
    fn leader(&self, tree: &Tree) -> Rank {
        let ranks = tree.ranks();
        self.root.filter(|root| ranks.contains(root)).unwrap_or_else(|| ranks[self.shard % ranks.len()])
    }

    /// Adds up how many shards go from a leader to the leader above.
    fn count(&self, tree: &Tree, ranks: usize, pairs: &mut [usize]) {
        let Tree::Part(parts) = tree else { return };
        for part in parts {
            pairs[self.leader(part) * ranks + self.leader(tree)] += 1;
            self.count(part, ranks, pairs);
        }
    }

    /// The steps by which `tree`'s contribution reaches its leader and, if there is one, the leader `above`: a part at depth
    /// `d` combines in phase `height - d`, so a record always waits for exactly one phase and links stay in order.
    /// Returns where the leader holds it, if this rank is the leader and also the one above.
    fn up(&mut self, tree: &Tree, above: Option<Rank>, depth: usize) -> Option<Source> {
        let leader = self.leader(tree);
        let here = leader == self.rank;
        let phase = self.height - depth;
        let Tree::Part(parts) = tree else {
            let own = Source::Input(self.start);
            return match above {
                Some(above) if here && above != leader => {
                    self.phases[phase].push(Step::copy(self.shard, self.len, own, vec![Target::partial(above)]));
                    None
                }
                _ => here.then_some(own),
            };
        };
        let mut sources = Vec::new();
        for part in parts {
            let held = self.up(part, Some(leader), depth + 1);
            let from = self.leader(part);
            if here {
                sources.push(if from == leader { held.unwrap_or(Source::Input(self.start)) } else { Source::partial(from) });
            }
        }
        if !here {
            return None;
        }
        match above {
            None => {
                let mut targets = vec![Target::Output(self.start)];
                if self.way == Way::UpAndDown {
                    targets.extend(self.below(tree));
                }
                self.phases[phase].push(Step::finish(self.shard, self.len, sources, targets));
                None
            }
            Some(above) if above != leader => {
                self.phases[phase].push(Step::combine(self.shard, self.len, sources, vec![Target::partial(above)]));
                None
            }
            Some(_) => {
                let place = *self.scratch;
                *self.scratch += 1;
                self.phases[phase].push(Step::combine(self.shard, self.len, sources, vec![Target::Scratch(place)]));
                Some(Source::Scratch(place))
            }
        }
    }

    /// Those to whom the leader of `tree` sends a result.
    fn below(&self, tree: &Tree) -> Vec<Target> {
        let Tree::Part(parts) = tree else { return vec![] };
        let leader = self.leader(tree);
        parts.iter().map(|part| self.leader(part)).filter(|&to| to != leader).map(Target::element).collect()
    }

    /// The root's own step of a broadcast.
    fn down_from_top(&mut self, tree: &Tree) {
        if self.leader(tree) == self.rank {
            let mut targets = vec![Target::Output(self.start)];
            targets.extend(self.below(tree));
            self.phases[self.height].push(Step::copy(self.shard, self.len, Source::Input(self.start), targets));
        }
    }

    /// The steps by which a result comes down from the leader of `tree` to all others in it, one phase a level.
    fn down(&mut self, tree: &Tree, depth: usize) {
        let Tree::Part(parts) = tree else { return };
        for part in parts {
            let (from, to) = (self.leader(tree), self.leader(part));
            let further = self.below(part);
            if to == self.rank && (to != from || !further.is_empty()) {
                let (source, mut targets) = if to == from {
                    (Source::Output(self.start), vec![])
                } else {
                    (Source::element(from), vec![Target::Output(self.start)])
                };
                targets.extend(further);
                self.phases[self.height + depth + 1].push(Step::copy(self.shard, self.len, source, targets));
            }
            self.down(part, depth + 1);
        }
    }
}
