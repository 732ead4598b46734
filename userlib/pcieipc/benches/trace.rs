// SPDX-License-Identifier: MIT OR Apache-2.0
//! What recording costs: nanoseconds of a call of one step, recorded and not. `scripts/bench-trace` compares them with a build that has no
//! recording in it (`--cfg pcieipc_without="trace"`).

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use pcieipc::{
    executor::{Executor, Options},
    loopback,
    reduce::Op,
};

const CALLS: u32 = 50_000;
const BATCHES: usize = 21;

fn main() {
    let mut alone = Executor::new(loopback::group(1, 4, 4096).remove(0), Options::default()).expect("one rank");
    let off = call(&mut alone);
    alone.start_trace(1000);
    let on = call(&mut alone);
    println!("{{ \"off_ns\": {off:.2}, \"on_ns\": {on:.2} }}");
}

/// Nanoseconds of a call: the fastest of some batches, which is what other work on the machine disturbs least.
fn call(alone: &mut Executor<loopback::Loopback>) -> f64 {
    let (input, mut output) = ([1.0f32; 16], [0.0; 16]);
    let late = Instant::now() + Duration::from_secs(3600);
    let batch = |_| {
        let begun = Instant::now();
        for _ in 0..CALLS {
            alone.all_reduce_into(black_box(&input), black_box(&mut output), Op::Sum, late).expect("nobody else takes part");
        }
        begun.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
    };
    (0..BATCHES).map(batch).fold(f64::INFINITY, f64::min)
}
