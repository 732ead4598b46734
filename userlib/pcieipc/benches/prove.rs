// SPDX-License-Identifier: MIT OR Apache-2.0
//! What it costs to prove a plan before it is first used: the plans of all ranks are made and run on symbols, as an executor does it once for each
//! collective, algorithm, type and count.

use std::{hint::black_box, time::Instant};

use pcieipc::plan::{self, Algorithm, Collective, Plan, Shape, Tree};

const REPEATS: usize = 5;
const CHUNK: usize = (128 << 10) / 4;

fn main() {
    for (ranks, tree) in [(2, Tree::flat(2)), (8, Tree::groups(&[4, 4])), (16, Tree::groups(&[4, 4, 4, 4]))] {
        for algorithm in [Algorithm::OneShot, Algorithm::TwoShot, Algorithm::Hierarchical] {
            // No longer ones are proved: all further windows repeat the first ones.
            for count in [64, 4 * ranks * CHUNK - 1] {
                let shape = Shape { align: 16, ..Shape::new(ranks, count, CHUNK) };
                let mut times: Vec<f64> = (0..REPEATS).map(|_| proved(algorithm, shape, &tree)).collect();
                times.sort_by(f64::total_cmp);
                println!("{ranks:>3} ranks, {algorithm}, {count} elements: {:.3} ms", times[REPEATS / 2]);
            }
        }
    }
}

/// Milliseconds until the plans are known to be right.
fn proved(algorithm: Algorithm, shape: Shape, tree: &Tree) -> f64 {
    let begun = Instant::now();
    let build = |rank| plan::build(Collective::AllReduce, algorithm, shape, rank, tree);
    let plans: Vec<Plan> = (0..shape.ranks).map_while(build).collect();
    black_box(plan::check(&plans).expect("plans that are built are right"));
    begun.elapsed().as_secs_f64() * 1e3
}
