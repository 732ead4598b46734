// SPDX-License-Identifier: MIT OR Apache-2.0
//! A group whose ranks are threads of one process.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use super::{Group, GroupOptions};
use crate::error::{Error, Result};

/// Runs `body` once a rank, each in a thread of its own with its end of a new group over shared memory, and gives the answers in rank order:
/// for examples, tests, and the first try of an idea.
///
/// ```
/// use std::time::Duration;
/// use pcieipc::{group, reduce::Op};
///
/// let sums = group::of_threads(3, |mut group| {
///     let mut gradient = vec![group.rank() as f32; 1000];
///     group.all_reduce(&mut gradient, Op::Sum, Duration::from_secs(10)).unwrap();
///     gradient[999]
/// })?;
/// assert_eq!(sums, [3.0, 3.0, 3.0]);
/// # Ok::<(), pcieipc::Error>(())
/// ```
///
/// # Errors
/// As for [`Group::meet`]; `System` when there is no room for their directory.
///
/// # Panics
/// When `body` does.
pub fn of_threads<R: Send>(ranks: usize, body: impl Fn(Group) -> R + Sync) -> Result<Vec<R>> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("pcieipc-threads-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let directory = std::env::temp_dir().join(name);
    let run = |rank: usize| {
        let options = GroupOptions { meeting_timeout: Duration::from_secs(60), ..GroupOptions::new(rank, ranks, &directory) };
        Group::meet(options).map(&body)
    };
    let answers = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (1..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        let first = (ranks > 0).then(|| run(0));
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<R>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        first.into_iter().chain(threads.into_iter().map(join)).collect::<Result<Vec<R>>>()
    });
    match std::fs::remove_dir_all(&directory) {
        Err(error) if answers.is_ok() && ranks > 0 => {
            Err(Error::System { call: "rmdir", hint: format!("remove {} yourself", directory.display()), source: error.into() })
        }
        _ => answers,
    }
}
