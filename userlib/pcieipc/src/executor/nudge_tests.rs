// SPDX-License-Identifier: MIT OR Apache-2.0
//! Nobody sleeps for want of a record that was sent, while its sender works.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicPtr, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use super::{run::WORK, *};
use crate::{
    link::{RecordHeader, Shared, SharedMut, Want},
    loopback,
    reduce::Op,
};

/// Writes down in which order a rank's links are asked for what, and what its buffer begins with when they are to wake sleepers.
struct Noted {
    links: loopback::Loopback,
    log: Arc<Mutex<String>>,
    buffer: Arc<AtomicPtr<f32>>,
}

impl Noted {
    fn note(&self, what: &str) {
        self.log.lock().unwrap().push_str(what);
    }
}

// SAFETY: everything is the loopback's.
unsafe impl Links for Noted {
    fn rank(&self) -> Rank {
        self.links.rank()
    }
    fn ranks(&self) -> usize {
        self.links.ranks()
    }
    fn max_record(&self) -> usize {
        self.links.max_record()
    }
    fn depth(&self, len: usize) -> usize {
        self.links.depth(len)
    }
    fn reserve(&mut self, to: Rank, len: usize, deadline: Instant) -> Result<SharedMut<'_>> {
        self.links.reserve(to, len, deadline)
    }
    fn try_reserve(&mut self, to: Rank, len: usize) -> Result<Option<SharedMut<'_>>> {
        self.links.try_reserve(to, len)
    }
    fn commit(&mut self, to: Rank, header: RecordHeader, len: usize) -> Result<()> {
        self.note("commit ");
        self.links.commit(to, header, len)
    }
    fn receive(&mut self, from: Rank, deadline: Instant) -> Result<(RecordHeader, Shared<'_>)> {
        self.links.receive(from, deadline)
    }
    fn try_receive(&mut self, from: Rank) -> Result<Option<(RecordHeader, Shared<'_>)>> {
        self.links.try_receive(from)
    }
    fn release(&mut self, from: Rank) -> Result<()> {
        self.note("release ");
        self.links.release(from)
    }
    fn nudge(&mut self) -> Result<()> {
        // SAFETY: the buffer of the call that is being made, by this thread.
        let first = unsafe { self.buffer.load(Relaxed).read() };
        self.note(&format!("nudge({first}) "));
        self.links.nudge()
    }
    fn wait_for(&mut self, wants: &[Want], deadline: Instant) -> Result<()> {
        self.links.wait_for(wants, deadline)
    }
    fn confirm(&mut self) -> Result<()> {
        self.links.confirm()
    }
}

/// The log of rank 0 of two, in an all-reduce of two windows of so many bytes of registered memory.
fn log_of_windows(bytes: usize) -> String {
    let count = 2 * 2 * bytes / 4;
    let options = Options { algorithm: Some(Algorithm::Direct), direct_chunk: bytes, ..Options::default() };
    let buffers = crate::registered::in_one_process::<f32>(2, count).unwrap();
    let log = Arc::new(Mutex::new(String::new()));
    std::thread::scope(|scope| {
        for (links, mut buffer) in loopback::group(2, 8, 4096).into_iter().zip(buffers) {
            let (options, log) = (options.clone(), if links.rank() == 0 { log.clone() } else { Arc::default() });
            scope.spawn(move || {
                let place = Arc::new(AtomicPtr::new(buffer.as_mut_ptr()));
                let mut executor = Executor::new(Noted { links, log, buffer: place }, options).unwrap();
                buffer.fill(1.5);
                executor.all_reduce_registered(&mut buffer, Op::Sum, Instant::now() + Duration::from_secs(20)).unwrap();
                assert!(buffer.iter().all(|x| *x == 3.0));
            });
        }
    });
    Arc::into_inner(log).unwrap().into_inner().unwrap()
}

#[test]
fn who_sleeps_is_woken_before_long_work_and_not_behind_it() {
    let meet = "commit release ";
    // Before the first chunk is combined the buffer still holds what it held; each chunk is told, then the other rank's is copied.
    let windows = "nudge(1.5) commit nudge(3) release nudge(3) commit nudge(3) release ";
    assert_eq!(log_of_windows(WORK), format!("{meet}{windows}{meet}"));
}

#[test]
fn before_short_work_nobody_is_looked_after() {
    assert!(!log_of_windows(WORK / 2).contains("nudge"));
}

#[test]
fn a_caller_that_computes_between_its_looks_leaves_nobody_asleep() {
    let mut first = 0.5f32;
    let (log, buffer) = (Arc::<Mutex<String>>::default(), Arc::new(AtomicPtr::new(&raw mut first)));
    let mut ranks = loopback::group(2, 8, 4096)
        .into_iter()
        .map(|links| Executor::new(Noted { links, log: log.clone(), buffer: buffer.clone() }, Options::default()).unwrap());
    let (mut zero, mut one) = (ranks.next().unwrap(), ranks.next().unwrap());
    let by = Instant::now() + Duration::from_secs(20);
    let request = zero.start_all_reduce(vec![1.0f32; 8], Op::Sum, by).unwrap();
    assert_eq!(*log.lock().unwrap(), "commit nudge(0.5) ");
    one.all_reduce(&mut [2.0f32; 8], Op::Sum, by).unwrap();
    assert_eq!(zero.wait(request).unwrap(), [3.0; 8]);
}
