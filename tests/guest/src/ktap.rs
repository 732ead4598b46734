// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs promises one after the other, each with a time limit, and reports in KTAP.

use std::{
    env, panic,
    process::ExitCode,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use crate::wait;

/// A promise and what proves it: it panics if the promise is broken.
pub type Promise = (&'static str, fn());

/// A failed recovery takes the kernel a minute, and nothing takes longer; a promise that does hangs.
const LIMIT: Duration = Duration::from_secs(150);

/// Proves all promises, and repairs after one that was broken. A hang ends the program, because the thread that hangs cannot be ended.
pub fn prove(promises: &[Promise], repair: fn()) -> ExitCode {
    println!("KTAP version 1\n1..{}", promises.len());
    let mut broken = false;
    for (number, (name, proof)) in (1..).zip(promises) {
        let (sender, receiver) = mpsc::channel();
        let begin = Instant::now();
        let proof = *proof;
        let running = thread::spawn(move || {
            let outcome = panic::catch_unwind(proof);
            // Nobody listens after the limit.
            let _ = sender.send(outcome.is_ok());
        });
        match receiver.recv_timeout(wait::patiently(LIMIT)) {
            Ok(true) => println!("ok {number} {name}\n# {} ms", begin.elapsed().as_millis()),
            Ok(false) => {
                broken = true;
                println!("not ok {number} {name}");
                if panic::catch_unwind(repair).is_err() {
                    println!("Bail out! the machine cannot be repaired after {name}");
                    return ExitCode::FAILURE;
                }
            }
            Err(_) => {
                println!("not ok {number} {name}\nBail out! {name} hangs");
                return ExitCode::FAILURE;
            }
        }
        let _ = running.join();
    }
    if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Proves the promises whose name contains the program's first argument, or what `ONLY` says, or all.
pub fn main(promises: &[Promise], repair: fn()) -> ExitCode {
    let wanted = env::args().nth(1).or_else(|| env::var("ONLY").ok());
    let chosen: Vec<Promise> = promises
        .iter()
        .filter(|(name, _)| wanted.as_ref().is_none_or(|wanted| name.contains(wanted.as_str())))
        .copied()
        .collect();
    prove(&chosen, repair)
}

/// A table of promises from functions: the name of each is the promise.
#[macro_export]
macro_rules! promises {
    ($($promise:ident),* $(,)?) => {
        &[$((stringify!($promise), $promise as fn())),*]
    };
}
