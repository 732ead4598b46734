// SPDX-License-Identifier: MIT OR Apache-2.0
//! Results as the kernel's tests print them.

use std::{fmt::Display, panic::UnwindSafe, process::ExitCode};

/// The promises of one program, checked one after the other.
#[derive(Debug)]
pub struct Ktap {
    plan: usize,
    done: usize,
    failed: usize,
}

impl Ktap {
    /// Says how many promises there are.
    pub fn plan(plan: usize) -> Self {
        println!("TAP version 13\n1..{plan}");
        Self { plan, done: 0, failed: 0 }
    }

    /// Checks one promise: `check` panics when it is not kept. What it gives is printed beside the result.
    pub fn promise<N: Display>(&mut self, name: &str, check: impl FnOnce() -> N + UnwindSafe) {
        self.done += 1;
        match std::panic::catch_unwind(check) {
            Ok(note) => println!("# {note}\nok {} {name}", self.done),
            Err(_) => {
                self.failed += 1;
                println!("not ok {} {name}", self.done);
            }
        }
    }

    /// The program's exit code.
    pub fn end(self) -> ExitCode {
        if self.failed == 0 && self.done == self.plan { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
