// SPDX-License-Identifier: MIT OR Apache-2.0
//! What one rank of a benchmark does.

use std::{
    hint::black_box,
    io::Write,
    path::PathBuf,
    time::{Duration, Instant},
};

use half::{bf16, f16};
use nix::sys::resource::{UsageWho, getrusage};
use pcieipc::{
    Result,
    device::EndpointId,
    group::{Group, GroupOptions, Host, KmodOptions, Transport},
    plan::{Collective, Form},
    reduce::{In, Isa, Kind, Op, Out, fold},
    registered::Registered,
    sys,
    transport::kmod,
};
use serde::{Deserialize, Serialize};

use super::{
    Job, Memory, Over, Row, Timing,
    answers::{Answers, Number},
    trace,
};
use crate::{failure::Failure, ranks::Mover};

const REPEATS: usize = 5;
pub(super) const WAIT: Duration = Duration::from_secs(60);

/// A rank's place in a job.
#[derive(Debug, Serialize, Deserialize)]
pub struct Seat {
    /// Which rank.
    pub rank: usize,
    /// Where the ranks meet.
    pub meeting: PathBuf,
    /// What is measured.
    pub job: Job,
}

/// Does a rank's part of the job; rank 0 writes a row a line.
///
/// # Errors
/// Use for names that do not exist, otherwise Run.
pub fn take(seat: &Seat) -> std::result::Result<(), Failure> {
    let kind: Kind = seat.job.kind.parse().map_err(Failure::Use)?;
    match kind {
        Kind::F64 => measure::<f64>(seat),
        Kind::F32 => measure::<f32>(seat),
        Kind::F16 => measure::<f16>(seat),
        Kind::BF16 => measure::<bf16>(seat),
        Kind::I8 => measure::<i8>(seat),
        Kind::I16 => measure::<i16>(seat),
        Kind::I32 => measure::<i32>(seat),
        Kind::I64 => measure::<i64>(seat),
        Kind::U8 => measure::<u8>(seat),
        Kind::U16 => measure::<u16>(seat),
        Kind::U32 => measure::<u32>(seat),
        Kind::U64 => measure::<u64>(seat),
    }
}

fn measure<T: Number>(seat: &Seat) -> std::result::Result<(), Failure> {
    let job = &seat.job;
    let collective: Collective = job.collective.parse().map_err(Failure::Use)?;
    let op: Op = job.op.parse().map_err(Failure::Use)?;
    let mut options = GroupOptions::new(seat.rank, job.ranks, &seat.meeting);
    options.executor.algorithm = job.algorithm.as_deref().map(str::parse).transpose().map_err(Failure::Use)?;
    options.executor.calibration = job.calibration;
    options.executor.checked = job.checked;
    if let Over::Kmod { endpoints, mover } = &job.over {
        let mover = match mover {
            Mover::Processor => kmod::Mover::Processor,
            Mover::Engine => kmod::Mover::Engine,
        };
        let endpoint = endpoints.get(seat.rank).map(|&id| EndpointId(id));
        // The default algorithms are measured as they are, whatever was stored for this machine.
        let host = job.calibration.map(|_| Host::default());
        options.transport = Transport::Kmod(KmodOptions { endpoint, mover, host, ..KmodOptions::default() });
    }
    let group = Group::meet(options)?;
    let mut bench = Bench { group, collective, op, root: job.root, time: job.time, check: job.check };
    if let Some(calls) = job.trace {
        return trace::record::<T>(&mut bench, job, calls);
    }
    for &bytes in &job.sizes {
        let row = bench.row::<T>(bytes, job.memory, job.limit)?;
        if seat.rank == 0 {
            let line = serde_json::to_string(&row).map_err(|e| Failure::Run(e.to_string()))?;
            writeln!(std::io::stdout().lock(), "{line}").map_err(|e| Failure::Run(format!("the parent is gone: {e}")))?;
        }
    }
    Ok(())
}

/// The collective from one buffer to another.
pub(super) fn two<T: Number>(
    group: &mut Group,
    collective: Collective,
    op: Op,
    root: usize,
    input: &[T],
    output: &mut [T],
) -> Result<()> {
    match collective {
        Collective::AllReduce => group.all_reduce_into(input, output, op, WAIT),
        Collective::ReduceScatter => group.reduce_scatter(input, output, op, WAIT),
        Collective::AllGather => group.all_gather(input, output, WAIT),
        Collective::AllToAll => group.all_to_all(input, output, WAIT),
        Collective::Reduce => group.reduce(input, output, op, root, WAIT),
        _ => {
            if group.rank() == root {
                output.copy_from_slice(input);
            }
            group.broadcast(output, root, WAIT)
        }
    }
}

/// The collective where registered buffers lie; only a reduce-scatter has another output.
pub(super) fn straight<T: Number>(
    group: &mut Group,
    collective: Collective,
    op: Op,
    root: usize,
    buffer: &mut Registered<T>,
    output: &mut [T],
) -> Result<()> {
    match collective {
        Collective::ReduceScatter => group.reduce_scatter_registered(buffer, output, op, WAIT),
        Collective::AllGather => group.all_gather_registered(buffer, WAIT),
        Collective::Broadcast => group.broadcast_registered(buffer, root, WAIT),
        _ => group.all_reduce_registered(buffer, op, WAIT),
    }
}

pub(super) struct Bench {
    pub(super) group: Group,
    pub(super) collective: Collective,
    pub(super) op: Op,
    pub(super) root: usize,
    time: Duration,
    check: bool,
}

impl Bench {
    fn row<T: Number>(&mut self, bytes: usize, memory: Memory, limit: bool) -> Result<Row> {
        let (count, block) = self.counts::<T>(bytes);
        let mut row = Row { bytes: count * size_of::<T>(), count, out_of_place: None, in_place: None, limit: None };
        if memory == Memory::Registered {
            self.registered::<T>(&mut row, block)?;
            if limit {
                row.limit = Some(self.limit::<T>(count)?);
            }
            return Ok(row);
        }
        let (input, mut output) = self.buffers::<T>(count, block);
        let (collective, op, root) = (self.collective, self.op, self.root);
        let forget = |output: &mut Vec<T>| output.fill(T::default());
        let two = |group: &mut Group, output: &mut Vec<T>| two(group, collective, op, root, &input, output);
        row.out_of_place = Some(self.time(&mut output, &forget, two)?);
        let mut buffer = output;
        row.in_place = match collective {
            Collective::AllReduce => {
                Some(self.time(&mut buffer, &|b: &mut Vec<T>| b.copy_from_slice(&input), |group, b: &mut Vec<T>| {
                    group.all_reduce(b, op, WAIT)
                })?)
            }
            Collective::Broadcast => {
                Some(self.time(&mut buffer, &|b: &mut Vec<T>| b.copy_from_slice(&input), |group, b: &mut Vec<T>| {
                    group.broadcast(b, root, WAIT)
                })?)
            }
            _ => None,
        };
        Ok(row)
    }

    /// Elements of the larger buffer and of a block. As in nccl-tests: the size is that of the larger buffer, cut to whole blocks.
    pub(super) fn counts<T: Number>(&self, bytes: usize) -> (usize, usize) {
        let blocks = match self.collective {
            Collective::ReduceScatter | Collective::AllGather | Collective::AllToAll => self.group.ranks(),
            _ => 1,
        };
        let block = bytes / size_of::<T>() / blocks;
        (block * blocks, block)
    }

    fn answers(&self) -> Answers {
        let (ranks, rank) = (self.group.ranks(), self.group.rank());
        Answers { collective: self.collective, op: self.op, root: self.root, ranks, rank }
    }

    /// This rank's input and room for its output.
    pub(super) fn buffers<T: Number>(&self, count: usize, block: usize) -> (Vec<T>, Vec<T>) {
        let (ins, outs) = match self.collective {
            Collective::ReduceScatter => (count, block),
            Collective::AllGather => (block, count),
            _ => (count, count),
        };
        (self.answers().inputs(ins), vec![T::default(); outs])
    }

    /// Fills in what takes registered buffers: in place, but for a reduce-scatter, whose output is its own.
    fn registered<T: Number>(&mut self, row: &mut Row, block: usize) -> Result<()> {
        let (collective, op, root) = (self.collective, self.op, self.root);
        let mut buffer = self.group.register::<T>(row.count, WAIT)?;
        if collective == Collective::ReduceScatter {
            buffer.copy_from_slice(&self.answers().inputs(row.count));
            let mut output = vec![T::default(); block];
            let call = |group: &mut Group, output: &mut Vec<T>| straight(group, collective, op, root, &mut buffer, output);
            row.out_of_place = Some(self.time(&mut output, &|o: &mut Vec<T>| o.fill(T::default()), call)?);
            return Ok(());
        }
        let (at, input) = match collective {
            Collective::AllGather => (self.group.rank() * block, self.answers().inputs(block)),
            _ => (0, self.answers().inputs(row.count)),
        };
        let prepare = |b: &mut Registered<T>| b[at..][..input.len()].copy_from_slice(&input);
        let call = |group: &mut Group, b: &mut Registered<T>| straight(group, collective, op, root, b, &mut []);
        row.in_place = Some(self.time(&mut buffer, &prepare, call)?);
        Ok(())
    }

    /// Checks one call, times many, and checks one more: each of the two on what `prepare` makes of the buffer, which is what goes in or,
    /// where that lies elsewhere, nothing of an answer; so no call passes for what an earlier one left.
    fn time<T: Number, B: std::ops::Deref<Target = [T]>>(
        &mut self,
        buffer: &mut B,
        prepare: &dyn Fn(&mut B),
        mut call: impl FnMut(&mut Group, &mut B) -> Result<()>,
    ) -> Result<Timing> {
        let answers = self.answers();
        prepare(buffer);
        self.group.barrier(WAIT)?;
        call(&mut self.group, buffer)?;
        let mut wrong = if self.check { answers.wrong(buffer) } else { 0 };
        let begun = Instant::now();
        for _ in 0..3 {
            call(&mut self.group, buffer)?;
        }
        let once = self.slowest(begun.elapsed().as_secs_f64() / 3.0)?;
        let calls = ((self.time.as_secs_f64() / once) as usize).clamp(3, 20_000);
        let (mut times, before) = (Vec::with_capacity(REPEATS), self.costs());
        for _ in 0..REPEATS {
            self.group.barrier(WAIT)?;
            let begun = Instant::now();
            for _ in 0..calls {
                call(&mut self.group, buffer)?;
            }
            times.push(self.slowest(begun.elapsed().as_secs_f64() / calls as f64)?);
        }
        let after = self.costs();
        times.sort_by(f64::total_cmp);
        // A few more calls, traced, say where the time goes; the clock is looked at too often for the times above.
        let traced = calls.div_ceil(10).min(50);
        self.group.start_trace(1);
        for _ in 0..traced {
            call(&mut self.group, buffer)?;
        }
        let totals = self.group.stop_trace().map(|t| t.totals()).unwrap_or_default();
        if self.check {
            prepare(buffer);
            self.group.barrier(WAIT)?;
            call(&mut self.group, buffer)?;
            wrong += answers.wrong(buffer);
        }
        let phases = [totals.waiting, totals.combining, totals.publishing].map(|ns| ns as f64 / 1e9 / traced as f64);
        let each = (REPEATS * calls) as f64;
        let counted = after.into_iter().zip(before).map(|(a, b)| (a - b) / each);
        let mut sums: Vec<f64> = std::iter::once(wrong as f64).chain(counted).chain(phases).collect();
        self.group.all_reduce(&mut sums, Op::Sum, WAIT)?;
        let n = self.group.ranks() as f64;
        let result = (buffer.len() * size_of::<T>()).max(1) as f64;
        Ok(Timing {
            seconds: times[REPEATS / 2],
            wrong: sums[0] as u64,
            stored: sums[1] / n / result,
            syscalls: sums[2] / n,
            switches: sums[3] / n,
            waiting: sums[4] / n,
            combining: sums[5] / n,
            publishing: sums[6] / n,
        })
    }

    /// Bytes stored, system calls and context switches so far, as counted where they are made and by the kernel.
    fn costs(&mut self) -> [f64; 3] {
        let switches = getrusage(UsageWho::RUSAGE_SELF)
            .map_or(0, |usage| usage.voluntary_context_switches() + usage.involuntary_context_switches());
        [self.group.volume().stored as f64, sys::calls() as f64, switches as f64]
    }

    fn slowest(&mut self, seconds: f64) -> Result<f64> {
        let mut all = [seconds];
        self.group.all_reduce(&mut all, Op::Max, WAIT)?;
        Ok(all[0])
    }

    /// The loads and stores that a rank's zero-copy all-reduce needs, on private memory and without waiting for anybody.
    fn limit<T: Number>(&mut self, count: usize) -> Result<f64> {
        let n = self.group.ranks();
        let shard = count / n;
        let isa = Isa::detect();
        let mut own = vec![T::of(1); count];
        let others: Vec<Vec<T>> = (1..n).map(|_| vec![T::of(1); shard.max(count - shard)]).collect();
        let mut times = Vec::new();
        for _ in 0..REPEATS {
            self.group.barrier(WAIT)?;
            let begun = Instant::now();
            let start = own.as_mut_ptr().cast::<u8>();
            let mut ins = vec![In { ptr: start.cast_const(), form: Form::Element }];
            ins.extend(others.iter().map(|o| In { ptr: o.as_ptr().cast(), form: Form::Element }));
            let out = |ptr| [Out { stream: true, ..Out::new(ptr, Form::Element) }];
            // SAFETY: all buffers hold at least a shard, the shard's target is its first source, and the rest of `own` is
            // as long as what is copied to it.
            unsafe {
                fold(isa, T::KIND, self.op, &ins, &out(start), shard, None);
                if let Some(other) = others.first() {
                    let from = [In { ptr: other.as_ptr().cast(), form: Form::Element }];
                    fold(isa, T::KIND, self.op, &from, &out(start.add(shard * size_of::<T>())), count - shard, None);
                }
            }
            black_box(&own);
            times.push(self.slowest(begun.elapsed().as_secs_f64())?);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[REPEATS / 2])
    }
}

#[cfg(test)]
mod tests {
    use pcieipc::group::of_threads;

    use super::*;

    /// The wrong elements of a rank that calls `call`, from one buffer to another.
    fn wrong(call: impl Fn(usize, &mut Group, &[f32], &mut Vec<f32>) -> Result<()> + Sync) -> Vec<u64> {
        of_threads(2, |group| {
            let time = Duration::from_micros(1);
            let mut bench = Bench { group, collective: Collective::AllReduce, op: Op::Sum, root: 0, time, check: true };
            let (input, mut output) = bench.buffers::<f32>(100, 100);
            let mut number = 0;
            let call = |group: &mut Group, output: &mut Vec<f32>| {
                number += 1;
                call(number, group, &input, output)
            };
            bench.time(&mut output, &|o: &mut Vec<f32>| o.fill(0.0), call).unwrap().wrong
        })
        .unwrap()
    }

    #[test]
    fn calls_that_do_nothing_any_more_are_wrong_and_so_are_those_that_begin_with_nothing() {
        let sum = |group: &mut Group, input: &[f32], output: &mut Vec<f32>| group.all_reduce_into(input, output, Op::Sum, WAIT);
        assert_eq!(wrong(|_, group, input, output| sum(group, input, output)), [0, 0]);
        // All but what both ranks' inputs leave zero, on two ranks.
        let stopped = wrong(|number, group, input, output| if number == 1 { sum(group, input, output) } else { Ok(()) });
        assert!(stopped.iter().all(|w| (180..=200).contains(w)), "{stopped:?}");
        let late = wrong(|number, group, input, output| if number > 1 { sum(group, input, output) } else { Ok(()) });
        assert_eq!(late, stopped);
    }
}
