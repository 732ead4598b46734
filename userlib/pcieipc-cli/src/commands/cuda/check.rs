// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc cuda check`: results against the processor's, bit for bit, and every way to fail.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use pcieipc::{
    Error,
    reduce::{Kind, Op},
};
use pcieipc_cuda::{
    Communicator, Tensor,
    choice::{Choice, candidates, choose_registered},
    driver::{Address, Stream},
    trace,
};

use super::{
    crew::Crew,
    numbers::{Words, fill, reduced},
    order::{Answer, Order, Trial},
    side::kind,
    team::{Making, Team},
    worker::Ground,
};
use crate::failure::Failure;

/// Compare all-reduce of device memory with the processor's, bit for bit, and try every way to fail
#[derive(clap::Args)]
pub struct Check {
    /// How many ranks; several share a device when there are more ranks than devices
    #[arg(long, default_value_t = 2)]
    pub ranks: usize,
    /// peer, host, auto, or device (peer memory between ranks of one device, host memory between devices)
    #[arg(long, default_value = "auto", value_parser = ["peer", "host", "auto", "device"])]
    pub path: String,
    #[command(flatten)]
    pub making: Making,
    /// Less of everything
    #[arg(long)]
    pub quick: bool,
    /// A few values of a few types, and no failures: for slow tools, and for ranks that take turns on a device
    #[arg(long)]
    pub brief: bool,
    /// Include tensors of 2 GiB
    #[arg(long)]
    pub huge: bool,
    /// Only the ways to fail
    #[arg(long, conflicts_with_all = ["brief", "huge"])]
    pub failures: bool,
}

/// What the trials need.
pub struct Trials {
    ground: Ground,
    streams: Vec<Stream>,
}

const POISON: u32 = 0x7fc1_7fc1;

impl Trials {
    pub fn new(ground: Ground) -> Self {
        Self { ground, streams: Vec::new() }
    }

    fn stream(&mut self, which: usize) -> Result<Stream, Failure> {
        while self.streams.len() <= which {
            self.streams.push(self.ground.device.stream()?);
        }
        Ok(self.streams[which])
    }

    pub fn run(&mut self, c: &mut Box<Communicator>, trial: Trial) -> Result<Answer, Failure> {
        match trial {
            Trial::Lengths { bytes, kind: name, op, shift } => self.lengths(c, bytes, kind(&name)?, self::op(&op)?, shift),
            Trial::Many { calls, bytes, kind: name } => self.many(c, calls, bytes, kind(&name)?),
            Trial::Graphs { bytes } => self.graphs(c, bytes),
            Trial::Registered { bytes, kind: name, memory, in_place } => {
                self.registered(c, bytes, kind(&name)?, &memory, in_place)
            }
            Trial::Elsewhere => self.elsewhere(c),
            Trial::Spoiled => {
                let stream = self.stream(0)?;
                let memory = self.ground.device.alloc(1 << 16)?;
                let tensor = Tensor { at: memory, count: 5000 };
                // SAFETY: the memory lives until the end of this function, after the wait.
                let called = unsafe { c.all_reduce(tensor, tensor, Kind::F32, Op::Sum, stream) };
                let told = called.and_then(|()| c.wait(stream));
                self.ground.device.free(memory)?;
                told_as(told, Duration::ZERO)
            }
            Trial::Steps { bytes, kind: name, op: op_name, in_place, candidate, registered, file } => {
                let what = Traced { bytes, kind: kind(&name)?, op: op(&op_name)?, in_place, candidate, registered };
                self.steps(c, &what, &file)
            }
            Trial::One { bytes, kind: name, in_place } => self.one(c, bytes, kind(&name)?, in_place),
            Trial::Die { rank, bytes } => self.fails(c, bytes, Duration::ZERO, |c, me| {
                if me == rank {
                    // As a crash would: nothing is told, no memory is given back in order.
                    // SAFETY: ends this process; signal 9 can not be handled.
                    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
                }
                let _ = c;
                true
            }),
            Trial::Absent { rank, deadline, bytes } => {
                let before = self.ground.options.deadline;
                c.set_deadline(Duration::from_millis(deadline));
                self.fails(c, bytes, before, |_, me| me != rank)
            }
            Trial::Abort { rank } => self.fails(c, 4 << 20, Duration::ZERO, |c, me| {
                if me == rank {
                    // The last of the calls before is over everywhere.
                    std::thread::sleep(Duration::from_millis(100));
                    c.abort("asked to, by the check");
                }
                me != rank
            }),
            Trial::Differ => {
                let stream = self.stream(0)?;
                let memory = self.ground.device.alloc(1 << 20)?;
                let tensor = Tensor { at: memory, count: 1000 + c.rank() as u64 };
                // SAFETY: the memory lives until the end of this function, after the wait.
                let called = unsafe { c.all_reduce(tensor, tensor, Kind::F32, Op::Sum, stream) };
                let told = called.and_then(|()| c.wait(stream));
                self.ground.device.free(memory)?;
                told_as(told, Duration::ZERO)
            }
            Trial::AtOnce => self.at_once(c),
            Trial::Rebuild => {
                let group = self.ground.meet("again")?;
                **c = Communicator::new(group, self.ground.device.clone(), self.ground.options.clone())?;
                self.one(c, 100_000, Kind::F32, false)
            }
        }
    }

    /// All lengths that make the algorithms change, and odd ones; with tensors that start `shift` elements off alignment.
    fn lengths(&mut self, c: &mut Communicator, bytes: u64, kind: Kind, op: Op, shift: u64) -> Result<Answer, Failure> {
        let size = kind.size() as u64;
        let most = (bytes / size).max(1);
        let mut counts: Vec<u64> = (0..=40).collect();
        let mut next = 41u64;
        while next < most {
            counts.push(next);
            next = next + next / 2 + 3;
        }
        counts.extend((8..).map(|k| (1u64 << k) / size).take_while(|n| *n < most).flat_map(|n| [n.saturating_sub(1), n, n + 1]));
        counts.push(most);
        let mut answer = Answer::default();
        for (round, count) in counts.into_iter().enumerate() {
            let in_place = round % 3 == 0;
            let wrong = self.compare(c, kind, op, count, shift, in_place, round as u64)?;
            answer.compared = Some(answer.compared.unwrap_or(0) + count);
            if wrong > 0 && answer.text.is_empty() {
                answer.text = format!("{} {} of {count} elements, {shift} off: {wrong} wrong", kind.name(), op.name());
            }
            answer.wrong += wrong;
        }
        Ok(answer)
    }

    /// One call; counts the wrong elements, and those past the tensor's end that were touched.
    #[expect(clippy::too_many_arguments, reason = "the dimensions of a trial")]
    fn compare(
        &mut self,
        c: &mut Communicator,
        kind: Kind,
        op: Op,
        count: u64,
        shift: u64,
        in_place: bool,
        seed: u64,
    ) -> Result<u64, Failure> {
        let (device, stream) = (self.ground.device.clone(), self.stream(0)?);
        let size = kind.size() as u64;
        let bytes = (count * size) as usize;
        let room = (count + shift) * size + 64;
        let (input, output) = (device.alloc(room)?, device.alloc(room)?);
        let sources: Vec<Vec<u8>> = (0..c.ranks() as u64).map(|r| fill(kind, count as usize, seed * 100 + r + 1)).collect();
        device.fill(output, POISON, room / 4, Stream(0))?;
        device.fill(input, POISON, room / 4, Stream(0))?;
        device.synchronize(Stream(0))?;
        let from = input + shift * size;
        let to = if in_place { from } else { output + shift * size };
        device.write(from, &sources[c.rank()])?;
        // SAFETY: both buffers live until the end of this function, after the wait.
        unsafe { c.all_reduce(Tensor { at: from, count }, Tensor { at: to, count }, kind, op, stream) }?;
        c.wait(stream)?;
        let mut got = vec![0u8; bytes + 32];
        device.read(&mut got, to)?;
        device.free(input)?;
        device.free(output)?;
        let right = reduced(kind, op, &sources);
        let wrong = got[..bytes].chunks(kind.size()).zip(right.chunks(kind.size())).filter(|(a, b)| a != b).count();
        let poison: Vec<u8> = (0..32).map(|i| POISON.to_le_bytes()[(bytes + shift as usize * kind.size() + i) % 4]).collect();
        Ok(wrong as u64 + u64::from(got[bytes..] != poison))
    }

    fn one(&mut self, c: &mut Communicator, bytes: u64, kind: Kind, in_place: bool) -> Result<Answer, Failure> {
        let count = bytes / kind.size() as u64;
        let wrong = self.compare(c, kind, Op::Sum, count, 0, in_place, 77)?;
        Ok(Answer { compared: Some(count), wrong, ..Answer::default() })
    }

    /// Calls back to back: each with its own input of fresh pairing and its own poisoned output.
    fn many(&mut self, c: &mut Communicator, calls: u32, bytes: u64, kind: Kind) -> Result<Answer, Failure> {
        const POOL: usize = 50;
        let (device, stream) = (self.ground.device.clone(), self.stream(0)?);
        let count = (bytes / kind.size() as u64) as usize;
        let bytes = count * kind.size();
        let apart = bytes.next_multiple_of(256) as u64;
        let room = apart * POOL as u64;
        let (input, output) = (device.alloc(room)?, device.alloc(room)?);
        let ranks = c.ranks();
        let (mut answer, mut delays) = (Answer::default(), Words(c.rank() as u64));
        for batch in 0..(calls as usize).div_ceil(POOL) {
            let data = |rank: usize, slot: usize| fill(kind, count, (batch * POOL + slot) as u64 * 16 + rank as u64);
            let mut all = vec![0u8; room as usize];
            for slot in 0..POOL {
                let at = slot * apart as usize;
                all[at..at + bytes].copy_from_slice(&data(c.rank(), slot));
            }
            device.write(input, &all)?;
            device.fill(output, POISON, room / 4, Stream(0))?;
            device.synchronize(Stream(0))?;
            for slot in 0..POOL {
                let tensor = |base| Tensor { at: base + slot as u64 * apart, count: count as u64 };
                if delays.next() % 16 == 0 {
                    std::thread::sleep(Duration::from_micros(delays.next() % 300));
                }
                // SAFETY: both buffers live until the end of this function, after the wait.
                unsafe { c.all_reduce(tensor(input), tensor(output), kind, Op::Sum, stream) }?;
            }
            c.wait(stream)?;
            device.read(&mut all, output)?;
            for slot in 0..POOL {
                let right = reduced(kind, Op::Sum, &(0..ranks).map(|r| data(r, slot)).collect::<Vec<_>>());
                let at = slot * apart as usize;
                answer.wrong += u64::from(all[at..at + bytes] != right);
            }
            answer.compared = Some(answer.compared.unwrap_or(0) + POOL as u64);
        }
        device.free(input)?;
        device.free(output)?;
        Ok(answer)
    }

    /// A graph that spans two streams, replayed with new data, with calls on other streams between.
    fn graphs(&mut self, c: &mut Communicator, bytes: u64) -> Result<Answer, Failure> {
        let device = self.ground.device.clone();
        let (first, second) = (self.stream(0)?, self.stream(1)?);
        let count = bytes / 4;
        let (input, middle, output) = (device.alloc(bytes)?, device.alloc(bytes)?, device.alloc(bytes)?);
        let tensor = |at| Tensor { at, count };
        let fork = device.event(false)?;
        device.begin_capture(first)?;
        // SAFETY: the buffers live until the graph is destroyed at the end of this function.
        unsafe {
            c.all_reduce(tensor(input), tensor(middle), Kind::I32, Op::Sum, first)?;
            device.record(fork, first)?;
            device.wait(second, fork)?;
            c.all_reduce(tensor(middle), tensor(output), Kind::I32, Op::Max, second)?;
            device.record(fork, second)?;
            device.wait(first, fork)?;
            c.all_reduce(tensor(output), tensor(output), Kind::I32, Op::Sum, first)?;
        }
        let graph = device.end_capture(first)?;
        let mut answer = Answer::default();
        for round in 0..20u64 {
            let sources: Vec<Vec<u8>> = (0..c.ranks() as u64).map(|r| fill(Kind::I32, count as usize, round * 64 + r)).collect();
            device.write(input, &sources[c.rank()])?;
            device.replay(graph, first)?;
            device.replay(graph, first)?;
            c.wait(first)?;
            if round % 4 == 0 {
                answer.wrong += self.compare(c, Kind::F32, Op::Sum, 5000, 1, true, round)?;
            }
            let sum = reduced(Kind::I32, Op::Sum, &sources);
            let right = reduced(Kind::I32, Op::Sum, &vec![sum; c.ranks()]);
            let mut got = vec![0u8; bytes as usize];
            device.read(&mut got, output)?;
            answer.wrong += u64::from(got != right);
            answer.compared = Some(answer.compared.unwrap_or(0) + 1);
        }
        device.forget(graph)?;
        for at in [input, middle, output] {
            device.free(at)?;
        }
        Ok(answer)
    }

    /// Memory of a kind, with room for two tensors, at the end of which the other ranks must not look.
    fn memory(&self, bytes: u64, memory: &str) -> Result<(Address, Vec<u64>), Failure> {
        let device = &self.ground.device;
        match memory {
            "plain" => Ok((device.alloc(bytes)?, Vec::new())),
            "pool" => Ok((device.alloc_pooled(bytes)?, Vec::new())),
            "pieces" => Ok(device.alloc_pieces(11, bytes.div_ceil(11))?),
            other => Err(Failure::Use(format!("there is no memory {other}"))),
        }
    }

    /// Calls on registered memory, eager and as replays; then a graph that was captured before it was registered; then without it.
    fn registered(
        &mut self,
        c: &mut Communicator,
        bytes: u64,
        kind: Kind,
        memory: &str,
        in_place: bool,
    ) -> Result<Answer, Failure> {
        let (device, stream) = (self.ground.device.clone(), self.stream(0)?);
        let (count, room) = (bytes / kind.size() as u64, bytes.next_multiple_of(256));
        let mut answer = Answer::default();
        let (base, pieces) = self.memory(2 * room + 8192, memory)?;
        // Neither begins where its allocation begins.
        let (input, output) = (base + 4096 + 48, if in_place { base + 4096 + 48 } else { base + 4096 + 48 + room });
        let tensor = |at| Tensor { at, count };
        // SAFETY: the memory is given back at the end of this function, when it is no longer registered.
        let made = match unsafe { c.register(base + 4096, 2 * room + 64) } {
            Ok(made) => made,
            Err(error) => {
                device.free(base)?;
                return Ok(Answer { text: error.to_string(), ..answer });
            }
        };
        if choose_registered(c.setting(), bytes, Op::Sum).is_none() {
            return Err(Failure::Use(format!("{bytes} bytes are too short to be read where they lie")));
        }
        let mut check =
            |c: &mut Communicator, seed: u64, op: Op, call: &mut dyn FnMut(&mut Communicator) -> pcieipc::Result<()>| {
                let sources: Vec<Vec<u8>> =
                    (0..c.ranks() as u64).map(|r| fill(kind, count as usize, seed * 100 + r + 1)).collect();
                device.fill(base + 4096, POISON, (2 * room + 64) / 4, Stream(0))?;
                device.synchronize(Stream(0))?;
                device.write(input, &sources[c.rank()])?;
                call(c)?;
                c.wait(stream)?;
                let mut got = vec![0u8; bytes as usize];
                device.read(&mut got, output)?;
                let right = reduced(kind, op, &sources);
                answer.wrong += got.chunks(kind.size()).zip(right.chunks(kind.size())).filter(|(a, b)| a != b).count() as u64;
                answer.compared = Some(answer.compared.unwrap_or(0) + count);
                Ok::<(), Failure>(())
            };
        for (seed, op) in Op::ALL.into_iter().enumerate().flat_map(|(i, op)| [(i as u64, op), (i as u64 + 10, op)]) {
            // SAFETY: as above; every call is waited for.
            check(c, seed, op, &mut |c| unsafe { c.all_reduce(tensor(input), tensor(output), kind, op, stream) })?;
        }
        c.deregister(made)?;
        // Captured now, it is staged for good.
        device.begin_capture(stream)?;
        // SAFETY: as above; the graphs are destroyed before the memory is given back.
        let captured = unsafe { c.all_reduce(tensor(input), tensor(output), kind, Op::Sum, stream) };
        let staged = device.end_capture(stream)?;
        captured?;
        // SAFETY: as above.
        let made = unsafe { c.register(base + 4096, 2 * room + 64) }?;
        for seed in 20..23 {
            check(c, seed, Op::Sum, &mut |_| device.replay(staged, stream))?;
        }
        device.forget(staged)?;
        c.deregister(made)?;
        // SAFETY: as above.
        check(c, 30, Op::Sum, &mut |c| unsafe { c.all_reduce(tensor(input), tensor(output), kind, Op::Sum, stream) })?;
        // Last, since registered memory that a graph reads stays registered as long as the communicator: it is never given back here.
        // SAFETY: as said.
        let made = unsafe { c.register(base + 4096, 2 * room + 64) }?;
        device.begin_capture(stream)?;
        // SAFETY: as said.
        let captured = unsafe { c.all_reduce(tensor(input), tensor(output), kind, Op::Sum, stream) };
        let direct = device.end_capture(stream)?;
        captured?;
        for seed in 40..43 {
            check(c, seed, Op::Sum, &mut |_| device.replay(direct, stream))?;
        }
        if c.deregister(made).is_ok() {
            answer.wrong += 1;
            answer.text = "memory that a graph reads was no longer registered".into();
        }
        let _ = pieces;
        Ok(answer)
    }

    /// Each rank calls at another place of its registered memory.
    fn elsewhere(&mut self, c: &mut Communicator) -> Result<Answer, Failure> {
        let stream = self.stream(0)?;
        let bytes = 40u64 << 20;
        let memory = self.ground.device.alloc(bytes + (1 << 20))?;
        // SAFETY: the memory is not given back.
        let told = unsafe {
            c.register(memory, bytes + (1 << 20))?;
            let tensor = Tensor { at: memory + 256 * c.rank() as u64, count: bytes / 4 };
            c.all_reduce(tensor, tensor, Kind::F32, Op::Sum, stream)
        };
        told_as(told.and_then(|()| c.wait(stream)), Duration::ZERO)
    }

    /// One call whose steps are compared with its plan; all of them go to a file, for the comparison between ranks.
    fn steps(&mut self, c: &mut Communicator, what: &Traced, file: &std::path::Path) -> Result<Answer, Failure> {
        let (device, stream) = (self.ground.device.clone(), self.stream(0)?);
        let room = what.bytes.next_multiple_of(256).max(256);
        let memory = device.alloc(2 * room)?;
        let (input, output) = (memory, if what.in_place { memory } else { memory + room });
        // SAFETY: the memory is given back at the end of this function, when it is no longer registered and the call is over.
        let made = if what.registered { Some(unsafe { c.register(memory, 2 * room) }?) } else { None };
        let choice = match what.candidate {
            Some(candidate) => {
                let all = candidates(c.setting(), what.bytes);
                all[candidate % all.len()]
            }
            // As for a long tensor, of which there are more steps than can be recorded, with short tiles.
            None if what.registered => choose_registered(c.setting(), 64 << 20, what.op)
                .map(|long| Choice { tile: 4096, ..long })
                .ok_or_else(|| Failure::Use("registered memory is read over peer memory only".into()))?,
            None => c.choice(what.bytes, what.op, what.in_place),
        };
        c.steps()?;
        // SAFETY: as above.
        unsafe { c.launch(input, output, what.bytes, what.kind, what.op, &choice, stream) }?;
        c.wait(stream)?;
        let steps = c.steps()?.ok_or_else(|| Failure::Use("these kernels do not trace".into()))?;
        if let Some(made) = made {
            c.deregister(made)?;
        }
        device.free(memory)?;
        let call = trace::Call { choice: &choice, ranks: c.ranks(), bytes: what.bytes, in_place: what.in_place };
        let compared = trace::compare(call, c.rank(), &steps);
        let text = serde_json::to_vec(
            &steps.iter().map(|s| (s.verb, s.peer, s.epoch, s.bytes, s.at, s.place, s.time)).collect::<Vec<_>>(),
        );
        let text = text.map_err(|e| Failure::Run(e.to_string()))?;
        std::fs::write(file.with_extension(c.rank().to_string()), text).map_err(|e| Failure::Run(e.to_string()))?;
        let wrong = u64::from(compared.is_err());
        let text =
            format!("{choice}, {} bytes: {}", what.bytes, compared.err().unwrap_or_else(|| format!("{} steps", steps.len())));
        Ok(Answer { compared: Some(steps.len() as u64), wrong, text, ..Answer::default() })
    }

    /// Calls until something fails; tells what, and after how long.
    fn fails(
        &mut self,
        c: &mut Box<Communicator>,
        bytes: u64,
        reset: Duration,
        join: impl Fn(&mut Communicator, usize) -> bool,
    ) -> Result<Answer, Failure> {
        let stream = self.stream(0)?;
        let memory = self.ground.device.alloc(bytes)?;
        let tensor = Tensor { at: memory, count: bytes / 4 };
        let call = |c: &mut Communicator| {
            // SAFETY: the memory lives until the end of this function, after the wait; or as long as the process, after a failure.
            unsafe { c.all_reduce(tensor, tensor, Kind::F32, Op::Sum, stream) }.and_then(|()| c.wait(stream))
        };
        for _ in 0..20 {
            call(c)?;
        }
        let begun = Instant::now();
        let me = c.rank();
        let told = if join(c, me) {
            (0..1000).try_for_each(|_| call(c))
        } else {
            // Late: by then the others have given up. What they sent before may complete one call, but no more.
            std::thread::sleep(Duration::from_millis(1500));
            (0..2).try_for_each(|_| call(c))
        };
        let took = begun.elapsed();
        if reset > Duration::ZERO {
            c.set_deadline(reset);
        }
        // Work queued behind a failed call still runs.
        let after = self.ground.device.fill(memory, 7, 4, stream).and_then(|()| self.ground.device.synchronize(stream));
        let mut answer = told_as(told, took)?;
        if let Err(error) = after {
            answer.wrong += 1;
            answer.text += &format!("; work behind it failed: {error}");
        }
        Ok(answer)
    }

    /// Two raw launches that nothing orders.
    fn at_once(&mut self, c: &mut Communicator) -> Result<Answer, Failure> {
        let device = self.ground.device.clone();
        let streams = [self.stream(0)?, self.stream(1)?];
        let memory = device.alloc(1 << 20)?;
        let tensor = Tensor { at: memory, count: 4096 };
        let mut graphs = Vec::new();
        for stream in streams {
            device.begin_capture(stream)?;
            // SAFETY: the memory is not given back.
            unsafe { c.all_reduce(tensor, tensor, Kind::F32, Op::Sum, stream) }?;
            graphs.push(device.end_capture(stream)?);
        }
        // Replays on two streams that the user did not order; the second rank comes late, so that both surely wait at once.
        if c.rank() > 0 {
            std::thread::sleep(Duration::from_millis(200));
        }
        for (graph, stream) in graphs.iter().zip(streams) {
            device.replay(*graph, stream)?;
        }
        let told = streams.into_iter().try_for_each(|s| c.wait(s));
        told_as(told, Duration::ZERO)
    }
}

/// A call to trace.
struct Traced {
    bytes: u64,
    kind: Kind,
    op: Op,
    in_place: bool,
    candidate: Option<usize>,
    registered: bool,
}

fn op(name: &str) -> Result<Op, Failure> {
    Op::ALL.into_iter().find(|o| o.name() == name).ok_or_else(|| Failure::Use(format!("no operation {name}")))
}

fn told_as(told: Result<(), Error>, took: Duration) -> Result<Answer, Failure> {
    let text = match told {
        Ok(()) => "no error".to_owned(),
        Err(error) => format!("{} after {took:.1?}: {error}", error_name(&error)),
    };
    Ok(Answer { text, ..Answer::default() })
}

fn error_name(error: &Error) -> &'static str {
    match error {
        Error::Timeout { .. } => "Timeout",
        Error::PeerDied { .. } => "PeerDied",
        Error::Mismatch { .. } => "Mismatch",
        Error::Aborted { .. } => "Aborted",
        Error::Argument(_) => "Argument",
        Error::Corrupt { .. } => "Corrupt",
        Error::System { .. } => "System",
        _ => "other",
    }
}

impl Check {
    pub fn run(self) -> Result<ExitCode, Failure> {
        let begun = Instant::now();
        let (mut passed, mut failed) = (0u32, 0u32);
        let mut judge = |name: String, good: bool, text: String| {
            println!(
                "{} {name}{}",
                if good { "ok  " } else { "FAIL" },
                if text.is_empty() { String::new() } else { format!(": {text}") }
            );
            if good { passed += 1 } else { failed += 1 }
        };
        let place = tempfile::tempdir().map_err(|e| Failure::Run(format!("can not make a directory: {e}")))?;
        let all: Vec<&str> = Kind::ALL.iter().map(|k| k.name()).collect();
        let start = |which: &str, kinds: &str| {
            let directory = place.path().join(which);
            std::fs::create_dir_all(&directory).map_err(|e| Failure::Run(e.to_string()))?;
            let (ranks, path, making) = (self.ranks, self.path.as_str(), self.making);
            Crew::start(Team { side: "ours", ranks, path, kinds, largest: 1 << 20, making }.workers(&directory)?)
        };
        let right = |answers: &[Answer]| {
            let good = answers.iter().all(|a| a.error.is_none() && a.wrong == 0 && a.compared.is_some_and(|c| c > 0));
            let text = answers.iter().find_map(|a| a.error.clone().or((a.wrong > 0).then(|| a.text.clone()))).unwrap_or_default();
            (good, text)
        };
        if !self.failures {
            let mut crew = start("values", &all.join(","))?;
            let wait = Duration::from_secs(240);
            let mut value = |crew: &mut Crew, trial: Trial| {
                let name = serde_json::to_string(&trial).unwrap_or_default();
                let (good, text) = right(&crew.ask(&Order::Check(trial), wait));
                judge(name, good, text);
            };
            let few = [Kind::BF16, Kind::F32, Kind::U8];
            let kinds = if self.brief { &few[..] } else { &Kind::ALL[..] };
            let ops = if self.brief { &Op::ALL[..1] } else { &Op::ALL[..] };
            for &kind in kinds {
                for &op in ops {
                    let bytes = match (kind, op) {
                        _ if self.brief => 200 << 10,
                        (Kind::BF16, Op::Sum) if !self.quick => 64 << 20,
                        (_, Op::Sum) => 4 << 20,
                        _ => 300 << 10,
                    };
                    let shift = if op == Op::Max { 1 } else { 0 };
                    value(&mut crew, Trial::Lengths { bytes, kind: kind.name().into(), op: op.name().into(), shift });
                }
            }
            for (kind, shift) in [("bf16", 1), ("bf16", 3), ("f32", 1), ("u8", 5), ("f64", 1)] {
                if self.brief {
                    continue;
                }
                value(&mut crew, Trial::Lengths { bytes: 12 << 20, kind: kind.into(), op: "sum".into(), shift });
            }
            let calls = match (self.brief, self.quick) {
                (true, _) => 500,
                (_, true) => 1000,
                _ => 10_000,
            };
            for (bytes, kind) in [(4096, "bf16"), (65536, "f32"), (600_000, "bf16"), (1 << 20, "i32")] {
                value(&mut crew, Trial::Many { calls: if bytes > 65536 { calls / 10 } else { calls }, bytes, kind: kind.into() });
            }
            // Two ranks: longer than any but streams and copy engines take. Where engines do, more than a staging of 64 MiB holds, with a last
            // chunk in which most blocks have no tile. More ranks: long enough for two shots.
            let long = match (self.brief, self.making.staging > 0) {
                (true, _) if self.ranks > 2 => vec![(12 << 20) + 6, 6 << 20],
                (true, _) => vec![],
                (false, true) => vec![(200 << 20) + 6, (96 << 20) + 48, (64 << 20) + 16, (128 << 20) + (1 << 16), 40 << 20],
                (false, false) => vec![(200 << 20) + 6, 40 << 20],
            };
            if self.brief && self.ranks > 2 {
                for (kind, op, shift) in [("bf16", "sum", 3), ("f32", "sum", 0), ("u8", "avg", 5), ("f32", "max", 0)] {
                    value(&mut crew, Trial::Lengths { bytes: 6 << 20, kind: kind.into(), op: op.into(), shift });
                }
            }
            for bytes in [4096, 1 << 20].into_iter().chain(long.last().copied()) {
                value(&mut crew, Trial::Graphs { bytes });
            }
            for (bytes, in_place) in long.iter().flat_map(|bytes| [(*bytes, false), (*bytes, true)]) {
                value(&mut crew, Trial::One { bytes, kind: "bf16".into(), in_place });
            }
            if self.path == "peer" {
                // Just longer than lines serve, with a last line that is not whole.
                let bytes = if self.ranks > 2 { (1 << 20) + 6 } else { (34 << 20) + 6 };
                for (memory, kind, in_place) in
                    [("plain", "bf16", false), ("plain", "bf16", true), ("pieces", "bf16", false), ("pieces", "u8", true)]
                {
                    let trial = Trial::Registered { bytes, kind: kind.into(), memory: memory.into(), in_place };
                    value(&mut crew, trial);
                }
            }
            if self.huge {
                value(&mut crew, Trial::One { bytes: 2 << 30, kind: "bf16".into(), in_place: false });
            }
            if self.path == "peer" {
                let trial = Trial::Registered { bytes: 4096, kind: "bf16".into(), memory: "pool".into(), in_place: false };
                let answers = crew.ask(&Order::Check(trial), wait);
                let refused = |a: &Answer| a.error.is_none() && a.compared.is_none() && a.text.contains("stream-ordered pool");
                let told = answers.iter().map(|a| a.error.as_deref().unwrap_or(&a.text)).collect::<Vec<_>>().join(" | ");
                judge("memory of a pool is refused with the reason".into(), answers.iter().all(refused), told);
            }
            crew.quit();
        }
        if self.making.checked {
            // One rank's kernels store a wrong word: all must be told.
            let directory = place.path().join("spoiled");
            std::fs::create_dir_all(&directory).map_err(|e| Failure::Run(e.to_string()))?;
            let (ranks, path, making) = (self.ranks, self.path.as_str(), self.making);
            let team = Team { side: "ours", ranks, path, kinds: "f32", largest: 1 << 20, making };
            let mut commands = team.workers(&directory)?;
            for command in &mut commands {
                command.env("PCIEIPC_KERNEL_DEFINES", "PCIEIPC_SPOIL");
            }
            let answers = Crew::start(commands)?.ask(&Order::Check(Trial::Spoiled), Duration::from_secs(120));
            let texts: Vec<&str> = answers.iter().map(|a| a.error.as_deref().unwrap_or(&a.text)).collect();
            let good = answers.iter().all(|a| a.error.is_none() && a.text.starts_with("Corrupt"));
            judge("a result that is another on one rank".into(), good, texts.join(" | "));
        }
        if self.brief {
            println!("{passed} passed, {failed} failed in {:.1?} ({} ranks, path {})", begun.elapsed(), self.ranks, self.path);
            return Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        let peer = self.path == "peer";
        let last = self.ranks - 1;
        let (short, long) = (4 << 20, 48 << 20);
        let elsewhere =
            peer.then_some(("calls at different places of registered memory", Trial::Elsewhere, &["Mismatch", "Aborted"][..]));
        let expected: [(&str, Trial, &[&str]); 7] = [
            ("a killed peer", Trial::Die { rank: last, bytes: short }, &["PeerDied"]),
            ("a killed peer of long calls", Trial::Die { rank: last, bytes: long }, &["PeerDied"]),
            ("an absent peer", Trial::Absent { rank: last, deadline: 500, bytes: short }, &["Timeout", "Aborted"]),
            ("an absent peer of long calls", Trial::Absent { rank: last, deadline: 500, bytes: long }, &["Timeout", "Aborted"]),
            ("an abort", Trial::Abort { rank: last }, &["Aborted"]),
            ("different lengths", Trial::Differ, &["Mismatch"]),
            ("two calls at once", Trial::AtOnce, &["Argument", "Aborted"]),
        ];
        for (name, trial, errors) in expected.into_iter().chain(elsewhere) {
            let mut crew = start(&name.replace(' ', "-"), "f32,i32")?;
            let dies = matches!(trial, Trial::Die { .. });
            let answers = crew.ask(&Order::Check(trial), Duration::from_secs(60));
            let alive = if dies { &answers[..last] } else { &answers[..] };
            let good = !alive.is_empty()
                && alive.iter().all(|a| a.wrong == 0 && a.error.is_none() && errors.iter().any(|e| a.text.starts_with(e)));
            let texts: Vec<&str> = alive.iter().map(|a| a.error.as_deref().unwrap_or(&a.text)).collect();
            judge(name.to_owned(), good, texts.join(" | "));
            if !dies {
                let (good, text) = right(&crew.ask(&Order::Check(Trial::Rebuild), Duration::from_secs(60)));
                judge(format!("a new communicator in the same processes after {name}"), good, text);
            }
        }
        println!("{passed} passed, {failed} failed in {:.1?} ({} ranks, path {})", begun.elapsed(), self.ranks, self.path);
        Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
