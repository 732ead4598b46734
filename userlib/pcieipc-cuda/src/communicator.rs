// SPDX-License-Identifier: MIT OR Apache-2.0
//! A group of ranks with a device each, and what they do together.

mod digests;
mod engine;
mod recorder;
mod setup;
#[cfg(test)]
mod tests;
mod verdict;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use pcieipc::{
    Error, Result,
    group::Group,
    reduce::{Kind, Op},
};

use digests::Digests;
use engine::Engine;
use recorder::Recorder;

use crate::{
    abi::{ARG_ALIGNED, ARG_EARLY, ARG_NOOP, Args, Layout, State},
    choice::{BLOCKS, Choice, Path, Setting, choose, choose_registered},
    control::{Shared, Words},
    driver::{Address, Device, Event, Function, Launch, Stream},
    kernels::KINDS,
    mailbox::{DeviceMailbox, Remote},
    registration::{self, Cache, Range, Registration},
    trace::Step,
    watchdog::Watchdog,
};

/// Which paths a communicator may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PathChoice {
    /// Peer memory for each pair where it is proved, host memory for the others.
    #[default]
    Auto,
    /// Peer memory for all, or an error.
    Peer,
    /// Host memory for all.
    Host,
    /// Peer memory between ranks that share a device, host memory between devices.
    Device,
}

/// How a communicator is made; the same on all ranks, but for `deadline`.
#[derive(Debug, Clone)]
pub struct Options {
    /// Paths.
    pub path: PathChoice,
    /// How long a kernel waits for peers.
    pub deadline: Duration,
    /// The element types that will be used; their kernels are compiled and loaded at the start.
    pub kinds: Vec<Kind>,
    /// How long each step of the start may take; compiling is one of them.
    pub setup: Duration,
    /// Kernel launches may overlap the end of the kernel before (devices of capability 9.0 and later).
    pub overlap: bool,
    /// Most blocks of a call, at least 1. A block takes a multiprocessor, so fewer leave more to other work; at most 16 are used where
    /// a pair has the host path, and 32 otherwise; and never more than fit a device at once with those of the other ranks on it.
    pub blocks: u32,
    /// Device memory for what copy engines of a peer bring, where two devices have NVLink between them; 0 leaves all to kernels, which is
    /// the default, because between processes engines were measured to be slower (docs/gpu-notes.md). A device
    /// gives at most a 256th of its memory.
    pub staging: u64,
    /// Every call is followed by another, short one, in which all ranks compare their results: a difference is `Corrupt`. It finds data that
    /// changed on the way to one rank, and not what is the same on all.
    pub checked: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            path: PathChoice::Auto,
            deadline: Duration::from_secs(30),
            kinds: KINDS.to_vec(),
            setup: Duration::from_secs(180),
            overlap: true,
            blocks: BLOCKS[1],
            staging: 0,
            checked: false,
        }
    }
}

/// A tensor on a device: where, and how many elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tensor {
    /// Address of the first element, aligned to the element's size.
    pub at: Address,
    /// Elements.
    pub count: u64,
}

/// One rank's part in an all-reduce of device memory.
///
/// Calls are enqueued on streams; those of different streams are ordered by events. One communicator runs one call at a time.
#[derive(Debug)]
pub struct Communicator {
    // Dropped in this order: nothing writes to peers after the watchdog has stopped and the work is done.
    watchdog: Option<Watchdog>,
    kernels: HashMap<(Kind, &'static str), Function>,
    remotes: Vec<Option<Remote>>,
    ranges: Vec<Range>,
    opened: Cache,
    registered: u32,
    device_mailbox: Option<DeviceMailbox>,
    _host_mailbox: Option<Shared>,
    words: Arc<Words>,
    state: Address,
    device: Arc<dyn Device>,
    group: Group,
    args: Args,
    paths: Vec<Option<Path>>,
    reasons: Vec<Option<String>>,
    slowest: Path,
    options: Options,
    order: Event,
    trace: Option<Recorder>,
    engine: Option<Engine>,
    digests: Option<Digests>,
    /// No other rank is on this device.
    alone: bool,
    /// How many calls in a row made room for the next one before they waited for the one before.
    early: u32,
    /// The call before was a copy engine's.
    behind_copy: bool,
    last: Option<(Stream, Option<u64>)>,
    captured: bool,
    failed: bool,
}

// SAFETY: handles of the driver may be used from any thread; `Args` holds addresses as numbers.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Makes a communicator of the ranks of a group, each with its device. All ranks call it.
    ///
    /// # Errors
    /// `Mismatch` when options differ; `Argument` when the peer path was asked for and is not there; `Timeout`, `PeerDied`,
    /// `Corrupt`; `System` when the driver or the compiler refuses.
    pub fn new(group: Group, device: Arc<dyn Device>, options: Options) -> Result<Self> {
        setup::make(group, device, options)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.args.rank as usize
    }

    /// How many ranks.
    pub fn ranks(&self) -> usize {
        self.args.ranks as usize
    }

    /// This rank's device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The group that it was made of.
    pub fn group(&mut self) -> &mut Group {
        &mut self.group
    }

    /// The path to each rank, and why it is not the peer path where it is not.
    pub fn paths(&self) -> impl Iterator<Item = (Option<Path>, Option<&str>)> {
        self.paths.iter().copied().zip(self.reasons.iter().map(Option::as_deref))
    }

    /// The slowest path of any pair, which decides the algorithm.
    pub fn path(&self) -> Path {
        self.slowest
    }

    /// What all calls have in common.
    pub fn setting(&self) -> Setting {
        let chunk = if self.engine.is_some() { self.args.layout.chunk } else { 0 };
        Setting { path: self.slowest, ranks: self.ranks(), chunk, blocks: self.options.blocks }
    }

    /// The kernel that a call would use.
    pub fn choice(&self, bytes: u64, op: Op, in_place: bool) -> Choice {
        choose(self.setting(), bytes, op, in_place)
    }

    /// Registers memory of every rank, so that long tensors in it are read by the others where they lie and are not staged. All ranks call
    /// it, each with as many bytes of its own; a tensor must then lie at the same place in the registered memory of all ranks, input and
    /// output each, or the call is a `Mismatch`. It takes memory of cuMemAlloc, and memory mapped piece by piece whose pieces can be exported as
    /// files (as of PyTorch's expandable segments), also several pieces. Other calls go on as before; so do graphs that were captured before.
    ///
    /// # Errors
    /// `Argument`, the same on all ranks, says which rank's memory can not be shared and why; `Mismatch` when lengths differ; `Timeout`,
    /// `PeerDied`, `Corrupt`. Nothing stays open then.
    ///
    /// # Safety
    /// The memory must not be given back before [`Communicator::deregister`] has returned or the communicator is dropped.
    pub unsafe fn register(&mut self, at: Address, bytes: u64) -> Result<Registration> {
        self.check()?;
        if self.slowest == Path::Host && self.ranks() > 1 {
            // All ranks know that.
            return Err(Error::Argument(
                "registered memory is read over peer memory, which some ranks have not; tensors are staged".into(),
            ));
        }
        let number = self.registered.wrapping_add(1);
        let made =
            registration::register(&mut self.group, &self.device, &mut self.opened, number, (at, bytes), self.options.setup)?;
        self.registered = number;
        self.ranges.push(made);
        Ok(Registration(number))
    }

    /// Ends a registration. All ranks call it; when it returns nobody has the memory open any more.
    ///
    /// # Errors
    /// `Argument` when a graph holds a call on it (drop the communicator instead) or it is not registered; `Timeout` when calls on it do not
    /// end; `PeerDied`.
    pub fn deregister(&mut self, registration: Registration) -> Result<()> {
        let Some(found) = self.ranges.iter().position(|r| r.number == registration.0) else {
            return Err(Error::Argument("this memory is not registered with this communicator".into()));
        };
        if self.ranges[found].captured {
            return Err(Error::Argument("a graph holds a call on this registered memory; drop the communicator first".into()));
        }
        if !self.is_done_in_time() {
            let (rank, waited) = (self.rank(), self.options.deadline);
            return Err(Error::Timeout { rank, peer: rank, what: "calls on registered memory", waited, endpoint: None });
        }
        self.ranges.swap_remove(found);
        self.group.exchange("closing registered memory", &[], &[], self.options.setup).map(drop)
    }

    /// The registered memory that input and output of a call lie in, and how.
    fn registered(&self, input: Address, output: Address, bytes: u64) -> Option<[usize; 2]> {
        let of = |at| self.ranges.iter().position(|range| range.holds(at, bytes));
        Some([of(input)?, of(output)?])
    }

    /// The steps of this rank's kernels since the last time, of a build that traces (`PCIEIPC_KERNEL_DEFINES=PCIEIPC_TRACE` when the
    /// communicator was made); otherwise none. No call may run.
    ///
    /// # Errors
    /// `System`; `Argument` when there were more steps than there is room for.
    pub fn steps(&mut self) -> Result<Option<Vec<Step>>> {
        self.trace.as_ref().map(|trace| trace.take(&*self.device)).transpose()
    }

    /// How long the kernels of this rank wait, from now on; also those in graphs that were captured before.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.options.deadline = deadline;
        self.words.set_deadline(self.rank(), deadline);
    }

    /// Makes sure that a type can be reduced on a stream: where it is not among the types that the communicator was made with, its kernels are
    /// compiled and loaded now. That waits for this rank's calls, and for its default stream. All ranks do it at the same point between
    /// their calls, which they do when each does it before the first call of a type.
    ///
    /// # Errors
    /// What an earlier call came to; `Argument` while the stream is captured; `Timeout` when this rank's calls do not end; `System`.
    pub fn prepare(&mut self, kind: Kind, stream: Stream) -> Result<()> {
        if self.options.kinds.contains(&kind) {
            return Ok(());
        }
        self.check()?;
        if self.device.capture(stream)?.is_some() {
            return Err(Error::Argument(format!(
                "{} is used for the first time while a graph is captured; make one call with it before",
                kind.name()
            )));
        }
        if !self.is_done_in_time() {
            let (rank, waited) = (self.rank(), self.options.deadline);
            return Err(Error::Timeout { rank, peer: rank, what: "calls before a new type", waited, endpoint: None });
        }
        setup::load(&*self.device, kind, &mut self.kernels)?;
        self.warm_up_kind(kind)?;
        self.device.synchronize(Stream(0))?;
        self.options.kinds.push(kind);
        Ok(())
    }

    /// Enqueues an all-reduce of `input` into `output`, which may be the same tensor but not overlap it otherwise. All ranks call
    /// it with the same count, type and operation. It returns at once; [`Communicator::check`] tells what became of it.
    ///
    /// # Errors
    /// What an earlier call came to; `Argument`; `System`.
    ///
    /// # Safety
    /// Both tensors must be memory of this rank's device (or that it reaches), valid until the stream has run the call, also in
    /// every replay of a graph that it is captured in.
    pub unsafe fn all_reduce(&mut self, input: Tensor, output: Tensor, kind: Kind, op: Op, stream: Stream) -> Result<()> {
        self.check()?;
        if input.count != output.count {
            return Err(Error::Argument(format!("{} elements in, {} out", input.count, output.count)));
        }
        let bytes =
            input.count.checked_mul(kind.size() as u64).ok_or_else(|| Error::Argument("more bytes than memory has".into()))?;
        if (input.at | output.at) % kind.size() as u64 != 0 {
            return Err(Error::Argument(format!("a tensor of {} that is not aligned to its elements", kind.name())));
        }
        let registered = self.registered(input.at, output.at, bytes).and_then(|_| choose_registered(self.setting(), bytes, op));
        let choice = registered.unwrap_or_else(|| self.choice(bytes, op, input.at == output.at));
        // SAFETY: the caller's promise.
        unsafe {
            self.launch(input.at, output.at, bytes, kind, op, &choice, stream)?;
            if bytes > 0 { self.compare_results(output.at, bytes, stream) } else { Ok(()) }
        }
    }

    /// Enqueues the comparison of a result with those of the others, where that was asked for.
    ///
    /// # Safety
    /// As for [`Communicator::all_reduce`].
    unsafe fn compare_results(&mut self, result: Address, bytes: u64, stream: Stream) -> Result<()> {
        let Some(digests) = &self.digests else { return Ok(()) };
        let (own, all, numbers) = (digests.own, digests.all, digests.bytes());
        // SAFETY: the caller's promise.
        unsafe { digests.make(&*self.device, &self.args, result, bytes, stream) }?;
        let choice = self.choice(numbers, Op::Sum, false);
        // SAFETY: the numbers live as long as the communicator, and longer where a graph holds a call.
        unsafe { self.launch(own, all, numbers, Kind::U64, Op::Sum, &choice, stream) }?;
        match &self.digests {
            // SAFETY: as above.
            Some(digests) => unsafe { digests.compare(&*self.device, &self.args, stream) },
            None => Ok(()),
        }
    }

    /// Like [`Communicator::all_reduce`] with a kernel chosen by the caller: all ranks must choose the same.
    ///
    /// # Errors
    /// As for [`Communicator::all_reduce`].
    ///
    /// # Safety
    /// As for [`Communicator::all_reduce`].
    #[expect(clippy::too_many_arguments, reason = "one call of the hot path, with everything that a launch needs")]
    pub unsafe fn launch(
        &mut self,
        input: Address,
        output: Address,
        bytes: u64,
        kind: Kind,
        op: Op,
        choice: &Choice,
        stream: Stream,
    ) -> Result<()> {
        let function = *self.kernels.get(&(kind, choice.kernel)).ok_or_else(|| {
            Error::Argument(format!("{} is not among the communicator's types; name it in the options", kind.name()))
        })?;
        let capture = self.device.capture(stream)?;
        self.put_in_order(stream, capture)?;
        let mut args = self.args;
        args.input = input;
        args.output = output;
        args.bytes = bytes;
        args.op = op_code(op);
        args.push_warps = choice.push_warps;
        args.piece = choice.tile.max(choice.linger);
        args.prefix = choice.prefix.min(bytes & !15);
        args.flags = if (input | output) % 16 == 0 { ARG_ALIGNED } else { 0 };
        let ranges = if choice.by_reading() {
            let found = self.registered(input, output, bytes);
            Some(found.ok_or_else(|| Error::Argument("a kernel that reads registered memory, and a tensor that is not".into()))?)
        } else {
            None
        };
        // Where in which registered memory: the others read at the same places of theirs.
        let mut places = [0; 4];
        if let Some([first, second]) = ranges {
            let (first, second) = (&self.ranges[first], &self.ranges[second]);
            (args.input_of, args.output_of) = (first.table, second.table);
            places = [first.number.into(), input - first.at, second.number.into(), output - second.at];
        }
        args.header = header(self.args.layout, kind, op, bytes, choice, places);
        // A kernel behind a copy has nothing to overlap with.
        let behind_copy = std::mem::replace(&mut self.behind_copy, choice.by_engine());
        let overlap = self.options.overlap && !behind_copy;
        let launch = Launch { blocks: choice.blocks, threads: choice.threads + 32, overlap };
        let gains = self.slowest == Path::Host && choice.blocks == 1;
        let early = overlap && self.alone && gains && self.early < MOST_EARLY;
        self.early = if early { self.early + 1 } else { 0 };
        if early {
            args.flags |= ARG_EARLY;
        }
        // SAFETY: the caller vouches for the tensors; all else belongs to this communicator, whose drop waits for its kernels and
        // leaves captured ones a dead state.
        unsafe {
            match &mut self.engine {
                Some(engine) if choice.by_engine() => engine.launch(&*self.device, function, launch, &args, stream, capture)?,
                None if choice.by_engine() => {
                    return Err(Error::Argument("this communicator has no staging for copy engines".into()));
                }
                _ => self.device.launch(function, launch, &args, stream)?,
            }
        }
        self.captured |= capture.is_some();
        for range in ranges.into_iter().flatten() {
            self.ranges[range].captured |= capture.is_some();
        }
        self.last = Some((stream, capture));
        Ok(())
    }

    /// A call on another stream waits for the calls before it. A capture is ordered within itself only: what it is replayed
    /// after is the replaying stream's matter.
    fn put_in_order(&mut self, stream: Stream, capture: Option<u64>) -> Result<()> {
        match self.last {
            Some((last, before)) if last != stream && before == capture => {
                self.device.record(self.order, last)?;
                self.device.wait(stream, self.order)
            }
            _ => Ok(()),
        }
    }

    /// Tells what the calls that have run came to: the first failure, if there was one.
    ///
    /// # Errors
    /// `Timeout`, `PeerDied`, `Mismatch`, `Aborted`, `Argument` (two calls ran at once). The outputs of failed calls are
    /// unspecified, and the communicator can only be dropped and made anew.
    pub fn check(&mut self) -> Result<()> {
        match verdict::of(&self.words, self.rank(), self.ranks()) {
            None => Ok(()),
            Some(error) => {
                self.failed = true;
                Err(error)
            }
        }
    }

    /// Waits until the stream has run everything, then checks. Our kernels end by themselves, so this is bounded as long as
    /// the stream holds nothing else that is not.
    ///
    /// # Errors
    /// As for [`Communicator::check`]; `System`.
    pub fn wait(&mut self, stream: Stream) -> Result<()> {
        self.device.synchronize(stream)?;
        self.check()
    }

    /// Makes the calls of all ranks that run, and all later ones, fail with `Aborted` and this reason.
    pub fn abort(&mut self, why: &str) {
        self.failed = true;
        self.words.abort(self.rank(), why);
    }

    /// Runs the kernels of a type once, doing nothing, so that all are loaded.
    fn warm_up_kind(&self, kind: Kind) -> Result<()> {
        for (_, function) in self.kernels.iter().filter(|((of, _), _)| *of == kind) {
            let args = Args { flags: ARG_NOOP, ..self.args };
            // SAFETY: with this flag a kernel touches nothing.
            unsafe { self.device.launch(*function, Launch { blocks: 1, threads: 96, overlap: false }, &args, Stream(0)) }?;
        }
        Ok(())
    }

    /// Runs every kernel once.
    fn warm_up(&self) -> Result<()> {
        for kind in &self.options.kinds {
            self.warm_up_kind(*kind)?;
        }
        if let Some(engine) = &self.engine {
            engine.warm_up(&*self.device, &self.args)?;
        }
        if let Some(digests) = &self.digests {
            digests.warm_up(&*self.device, &self.args)?;
        }
        self.device.synchronize(Stream(0))
    }

    /// Waits for the calls that were enqueued, as long as their deadlines allow. Whether they are done.
    fn drain(&self) -> bool {
        match self.last {
            Some((_, None)) => self.is_done_in_time(),
            _ => !self.captured,
        }
    }

    /// The same of the last call that is in no graph.
    fn is_done_in_time(&self) -> bool {
        let Some((stream, None)) = self.last else { return true };
        let until = Instant::now() + self.options.deadline.min(Duration::from_secs(60)) + Duration::from_secs(1);
        while Instant::now() < until {
            match self.device.is_done(stream) {
                Ok(true) => return true,
                Ok(false) => std::thread::sleep(Duration::from_micros(100)),
                Err(_) => return false,
            }
        }
        false
    }
}

/// Most calls in a row whose kernels let the next one become resident before they wait themselves: short ones through host memory gain from
/// that, and each takes a multiprocessor meanwhile.
const MOST_EARLY: u32 = 7;

/// As the kernels number operations.
fn op_code(op: Op) -> u32 {
    match op {
        Op::Sum => 0,
        Op::Average => 1,
        Op::Prod => 2,
        Op::Min => 3,
        Op::Max => 4,
    }
}

/// What ranks must agree on in a call: type and operation, length, and the plan.
fn header(layout: Layout, kind: Kind, op: Op, bytes: u64, choice: &Choice, places: [u64; 4]) -> [u32; 4] {
    let (name, form) = choice.plan();
    let [a, b, c, d] = places;
    let numbers = [form[0], form[1], form[2], layout.half, layout.lines, layout.slots, layout.chunk, a, b, c, d];
    // FNV-1a: told apart, not protected from malice.
    let plan = name
        .bytes()
        .chain(numbers.iter().flat_map(|n: &u64| n.to_le_bytes()))
        .fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    [kind as u32 | op_code(op) << 8, bytes as u32, (bytes >> 32) as u32, plan]
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let drained = self.drain();
        // Whoever can not go on tells the others.
        if self.failed {
            self.words.abort(self.rank(), "the communicator was dropped after an error");
        }
        // Replays of a copy engine's graph write to the peer whatever became of the communicator: its memory must stay.
        let copies = self.engine.as_ref().is_some_and(Engine::is_captured);
        let leave =
            |group: &mut Group| group.exchange("leaving the communicator", &[u8::from(copies)], &[], Duration::from_secs(5));
        let told = if drained && !self.failed { leave(&mut self.group).ok() } else { None };
        let met = told.is_some();
        let copied_to = told.is_none_or(|told| told.iter().any(|(bytes, _)| bytes.first() == Some(&1)));
        // Replays of what was captured find a dead state and do nothing.
        let mut dead = [0u8; size_of::<State>()];
        dead[4..8].copy_from_slice(&crate::abi::CODE_ABORTED.to_le_bytes());
        let _ = self.device.write(self.state, &dead);
        self.watchdog = None;
        if copies || !drained {
            self.remotes.drain(..).for_each(std::mem::forget);
        }
        if !drained {
            self.ranges.drain(..).for_each(Range::abandon);
        }
        self.remotes.clear();
        self.ranges.clear();
        // Nobody frees what another has open.
        let closed = met && self.group.exchange("closing the mailboxes", &[], &[], Duration::from_secs(5)).is_ok();
        if !closed || copied_to {
            if let Some(mailbox) = &mut self.device_mailbox {
                mailbox.quarantine();
            }
        }
        if !self.captured && drained {
            let _ = self.device.free(self.state);
            if let Some(digests) = self.digests.take() {
                digests.free(&*self.device);
            }
        }
    }
}
