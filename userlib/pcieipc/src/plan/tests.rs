// SPDX-License-Identifier: MIT OR Apache-2.0

use std::collections::BTreeMap;

use super::*;

fn all_pairs() -> impl Iterator<Item = (Collective, Algorithm)> {
    Collective::ALL.into_iter().flat_map(|c| Algorithm::ALL.into_iter().map(move |a| (c, a)))
}

fn plans(collective: Collective, algorithm: Algorithm, shape: Shape, tree: &Tree) -> Option<Vec<Plan>> {
    (0..shape.ranks).map(|rank| build(collective, algorithm, shape, rank, tree)).collect()
}

fn trees(n: usize) -> Vec<Tree> {
    let mut trees = vec![Tree::flat(n)];
    if n >= 3 {
        trees.push(Tree::groups(&[n - 1, 1]));
    }
    if n >= 4 {
        trees.push(Tree::groups(&[1, n / 2, n - 1 - n / 2]));
        let quarter = n / 4;
        let left = Tree::groups(&[quarter, n / 2 - quarter]).to_string();
        let right: Vec<String> = (n / 2..n).map(|r| r.to_string()).collect();
        trees.push(format!("({left} ({}))", right.join(" ")).parse().unwrap());
        // As deep as it gets: each rank hangs below the one before.
        let deep = (0..n - 1).rev().fold((n - 1).to_string(), |inner, r| format!("({r} {inner})"));
        trees.push(deep.parse().unwrap());
        // Ranks dealt out to two parts in turn, as hosts number their cards.
        let part = |from: usize| (from..n).step_by(2).map(|r| r.to_string()).collect::<Vec<_>>().join(" ");
        trees.push(format!("(({}) ({}))", part(1), part(0)).parse().unwrap());
    }
    trees
}

#[test]
fn every_algorithm_is_right_for_every_group_size_and_count() {
    let mut checked = BTreeMap::new();
    for (collective, algorithm) in all_pairs() {
        for n in 1..=16 {
            let trees = if algorithm == Algorithm::Hierarchical { trees(n) } else { vec![Tree::flat(n)] };
            for tree in &trees {
                for (chunk, align) in [(4, 1), (16, 4)].into_iter().take(if tree == &Tree::flat(n) { 2 } else { 1 }) {
                    for count in [0, 1, n - 1, n + 1, 37, chunk * n * 4 + 7] {
                        let (root, peer) = (count % n, (count / 2) % n);
                        let shape = Shape { count, align, root, peer, ..Shape::new(n, count, chunk) };
                        let Some(plans) = plans(collective, algorithm, shape, tree) else { continue };
                        let proof =
                            check(&plans).unwrap_or_else(|flaw| panic!("{collective} {algorithm} {shape:?} {tree}: {flaw}"));
                        assert!(proof.depth <= plans[0].depth);
                        assert!(proof.rank_order || !algorithm.adds_in_rank_order(), "{collective} {algorithm} {shape:?}");
                        *checked.entry((collective.name(), algorithm.name())).or_insert(0) += 1;
                    }
                }
            }
        }
    }
    // Six counts for 16 sizes; trees are 1, 1, 2 and then 6, the flat one with two chunks, as all others have it.
    let of = |algorithm: &str| if algorithm == "hierarchical" { 6 * (2 + 2 + 3 + 13 * 7) } else { 6 * 16 * 2 };
    assert_eq!(checked.len(), 25);
    for ((collective, algorithm), checked) in checked {
        assert_eq!(checked, of(algorithm), "{collective} {algorithm}");
    }
}

/// What the simulator looks ahead to, beyond what executors serve.
#[test]
fn every_algorithm_is_right_for_groups_of_more_than_sixteen() {
    for n in [17, 33, 64] {
        let mut checked = 0;
        for (collective, algorithm) in all_pairs() {
            let tree = if algorithm == Algorithm::Hierarchical { Tree::groups(&[n - 9, 8, 1]) } else { Tree::flat(n) };
            let shape = Shape { root: n - 1, peer: n / 2, ..Shape::new(n, n + 1, 4) };
            let Some(plans) = plans(collective, algorithm, shape, &tree) else { continue };
            let proof = check(&plans).unwrap_or_else(|flaw| panic!("{collective} {algorithm} {shape:?} {tree}: {flaw}"));
            assert!(
                proof.depth <= plans[0].depth && (proof.rank_order || !algorithm.adds_in_rank_order()),
                "{collective} {algorithm}"
            );
            checked += 1;
        }
        assert_eq!(checked, 25, "{n} ranks");
    }
}

#[test]
fn a_two_shot_all_reduce_is_right_whatever_the_ranks_own() {
    for n in 3..=16 {
        for slow in [0, n / 2, n - 1] {
            for rate in [0.1, 0.5, 0.9] {
                let rates: Vec<f64> = (0..n).map(|r| if r == slow { rate } else { 1.0 }).collect();
                for count in [1, n - 1, 37, 16 * n * 4 + 7] {
                    let shape = Shape { align: 4, shares: Shares::for_rates(&rates), ..Shape::new(n, count, 16) };
                    let plans = plans(Collective::AllReduce, Algorithm::TwoShot, shape, &Tree::flat(n)).unwrap();
                    let proof = check(&plans).unwrap_or_else(|flaw| panic!("{shape:?}: {flaw}"));
                    assert!(proof.rank_order && proof.depth <= plans[0].depth, "{shape:?}");
                }
            }
        }
    }
}

#[test]
fn any_two_calls_in_a_row_are_right() {
    // Two calls as one program, on the same buffers: a rank may be in the second while another is in the first.
    let calls: Vec<(Collective, Algorithm)> = all_pairs().collect();
    for n in [2, 3, 5] {
        let tree = Tree::groups(&[n - 1, 1]);
        for &(first, a) in &calls {
            for &(second, b) in &calls {
                let shape = Shape::new(n, 6 * n, 2);
                let (Some(one), Some(two)) = (plans(first, a, shape, &tree), plans(second, b, shape, &tree)) else { continue };
                let proof = check::check_in_a_row(&[one, two]);
                assert!(proof.is_ok(), "{first} {a} then {second} {b}, {n} ranks: {proof:?}");
            }
        }
    }
}

#[test]
fn two_shot_and_ring_carry_the_least_and_spread_it_evenly() {
    for n in 2..=16 {
        let count = n * n * 8;
        let carried = |algorithm| {
            let plans = plans(Collective::AllReduce, algorithm, Shape::new(n, count, 8), &Tree::flat(n)).unwrap();
            check(&plans).unwrap().carried
        };
        for algorithm in [Algorithm::TwoShot, Algorithm::Ring, Algorithm::Hierarchical] {
            let carried = carried(algorithm);
            for rank in 0..n {
                let sent: usize = carried[rank * n..(rank + 1) * n].iter().sum();
                assert_eq!(sent, 2 * (n - 1) * count / n, "{algorithm} rank {rank} of {n}");
            }
        }
        assert!(carried(Algorithm::Direct).iter().all(|&c| c == 0));
    }
}

#[test]
fn hierarchical_crosses_each_boundary_once_up_and_once_down() {
    let tree = Tree::groups(&[4, 4]);
    let plans = plans(Collective::AllReduce, Algorithm::Hierarchical, Shape::new(8, 800, 10), &tree).unwrap();
    let carried = check(&plans).unwrap().carried;
    let across: usize =
        (0..4).flat_map(|a| (4..8).map(move |b| (a, b))).map(|(a, b)| carried[a * 8 + b] + carried[b * 8 + a]).sum();
    // Half of the shards are combined on each side: their partial sums come over, their results go back.
    assert_eq!(across, 2 * 800);
}

#[test]
fn windows_cover_the_longest_shard_and_every_step_keeps_its_order() {
    let plan = build(Collective::AllReduce, Algorithm::TwoShot, Shape::new(2, 100, 16), 0, &Tree::flat(2)).unwrap();
    assert_eq!((plan.windows(), plan.ticks()), (4, 6));
    let moved: usize = plan.program().filter(|m| m.phase == 0).map(|m| m.len).sum();
    assert_eq!(moved, 50);
    let order: Vec<(usize, usize)> = plan.program().map(|m| (m.window, m.phase)).take(4).collect();
    assert_eq!(order, [(0, 0), (0, 1), (1, 0), (0, 2)]);
}
