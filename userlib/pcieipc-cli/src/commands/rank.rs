// SPDX-License-Identifier: MIT OR Apache-2.0
//! The hidden command that is one rank: a [`Job`] on standard input, [`Report`]s on standard output.

use std::{
    fs::{File, OpenOptions},
    hash::{DefaultHasher, Hasher},
    io::{self, Write},
    os::unix::fs::FileExt,
    time::{Duration, Instant},
};

use crate::{
    failure::{Failure, with_remedy},
    gradients::{BadFile, GradientFile, Judgement, Tensor, judge},
    member::Member,
    ranks::{Job, Lost, Rehearsal, Report, TensorDone, now_ns},
};

/// What the parent calls it by.
pub const NAME: &str = "rank";

/// One rank of a group; started by the other commands
#[derive(Debug, clap::Args)]
pub struct Rank {}

/// Why a rank stops.
#[derive(Debug, thiserror::Error)]
enum Stop {
    #[error(transparent)]
    Library(#[from] pcieipc::Error),
    #[error(transparent)]
    File(#[from] BadFile),
    #[error("writing the sum: {}", with_remedy(.0))]
    Output(io::Error),
    #[error("nobody was lost within {0:?}")]
    NothingLost(Duration),
    /// The parent does not listen any more; nobody is left to tell.
    #[error("the parent is gone: {0}")]
    Parent(io::Error),
}

impl Rank {
    pub fn run(self) -> Result<(), Failure> {
        // A rank never outlives its parent.
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)
            .map_err(|error| Failure::Run(format!("prctl(PR_SET_PDEATHSIG): {error}")))?;
        let job: Job = serde_json::from_reader(io::stdin().lock())
            .map_err(|error| Failure::Use(format!("no job on standard input ({error}); this command is for pcieipc itself")))?;
        if nix::unistd::getppid().as_raw() as u32 != job.parent {
            // It was gone before the kernel had been asked to watch it.
            return Err(Failure::Run("the process that this rank reports to is gone".into()));
        }
        let mut seat = None;
        match work(&job, &mut seat) {
            Ok(()) => Ok(()),
            Err(stop) => {
                let (kind, bad_use) = match &stop {
                    Stop::Library(error) => (name_of(error), matches!(error, pcieipc::Error::Argument(_))),
                    Stop::File(bad) => ("BadFile".into(), bad.is_the_files_fault()),
                    Stop::Output(_) => ("Output".into(), false),
                    Stop::NothingLost(_) => ("NothingLost".into(), false),
                    Stop::Parent(_) => ("Parent".into(), false),
                };
                // The parent tells the user; when it can not hear, nobody does.
                if tell(&Report::Failed { kind, text: stop.to_string(), bad_use }).is_ok() && seat.is_some() {
                    // A seat that is left now could be what a slower rank takes for the reason. The parent ends this process
                    // when all ranks have spoken.
                    std::thread::sleep(job.timeout);
                }
                std::process::exit(1);
            }
        }
    }
}

/// The name of an error's variant.
fn name_of(error: &pcieipc::Error) -> String {
    format!("{error:?}").chars().take_while(char::is_ascii_alphanumeric).collect()
}

fn tell(report: &Report) -> Result<(), Stop> {
    let mut line = serde_json::to_vec(report).map_err(|error| Stop::Parent(error.into()))?;
    line.push(b'\n');
    let mut stdout = io::stdout().lock();
    stdout.write_all(&line).and_then(|()| stdout.flush()).map_err(Stop::Parent)
}

fn work(job: &Job, seat: &mut Option<Member>) -> Result<(), Stop> {
    let start_ns = now_ns();
    let files = job.inputs.iter().map(|path| GradientFile::open(path)).collect::<Result<Vec<_>, _>>()?;
    let member = seat.insert(Member::meet(job)?);
    tell(&Report::Met { start_ns, at_ns: now_ns() })?;

    let output = match &job.output {
        Some(path) => Some(OpenOptions::new().write(true).open(path).map_err(Stop::Output)?),
        None => None,
    };
    let everyone: Vec<usize> = (0..job.inputs.len()).collect();
    reduce_all(job, &files, member, &everyone, output.as_ref())?;
    if let Some(rehearsal) = job.rehearsal {
        rehearse(job, &files, member, rehearsal)?;
    }
    let counters = member.counters();
    // Leaving in order: what is not dropped counts as died.
    *seat = None;
    tell(&Report::Done { counters })
}

/// Reduces every tensor of the job among `members` (their numbers at the start), one call a tensor and one after the other; what
/// came out is looked at and written afterwards, so that no rank waits for another's reading and comparing.
fn reduce_all(
    job: &Job,
    files: &[GradientFile],
    member: &mut Member,
    members: &[usize],
    output: Option<&File>,
) -> Result<(), Stop> {
    let mine = own(job, files)?;
    let tensors = job.tensors.iter().map(|(name, number)| Ok((find(mine, name)?, *number))).collect::<Result<Vec<_>, Stop>>()?;
    let mut progress = Progress::default();
    let mut buffers = Vec::with_capacity(tensors.len());
    for (tensor, _) in &tensors {
        buffers.push(mine.read(tensor)?);
        progress.step()?;
    }
    let mut calls = Vec::with_capacity(tensors.len());
    for ((_, number), buffer) in tensors.iter().zip(&mut buffers) {
        let before = member.counters();
        let start_ns = now_ns();
        member.all_reduce(buffer, *number, job.timeout)?;
        let end_ns = now_ns();
        calls.push((start_ns, end_ns, member.counters().since(before)));
        progress.step()?;
    }
    let shrunk = members.len() < files.len();
    for (index, (((tensor, number), buffer), (start_ns, end_ns, counters))) in tensors.iter().zip(&buffers).zip(calls).enumerate()
    {
        let judgement = if job.check { Some(check(files, members, &tensor.name, *number, buffer)?) } else { None };
        if let Some(output) = output {
            output.write_all_at(buffer, tensor.at).map_err(Stop::Output)?;
        }
        let mut digest = DefaultHasher::new();
        digest.write(buffer);
        let digest = digest.finish();
        tell(&Report::Tensor(TensorDone { index, shrunk, start_ns, end_ns, counters, judgement, digest }))?;
    }
    Ok(())
}

/// Says now and then how far this rank is: often enough for a parent that waits, seldom enough to cost nothing.
#[derive(Default)]
struct Progress {
    steps: usize,
    told: Option<Instant>,
}

impl Progress {
    fn step(&mut self) -> Result<(), Stop> {
        self.steps += 1;
        let now = Instant::now();
        if self.told.is_none_or(|told| now - told >= Duration::from_millis(100)) {
            self.told = Some(now);
            tell(&Report::Progress { steps: self.steps })?;
        }
        Ok(())
    }
}

fn check(
    files: &[GradientFile],
    members: &[usize],
    name: &str,
    number: crate::gradients::Number,
    sum: &[u8],
) -> Result<Judgement, Stop> {
    let inputs = members
        .iter()
        .filter_map(|&rank| files.get(rank))
        .map(|file| Ok(file.read(find(file, name)?)?))
        .collect::<Result<Vec<_>, Stop>>()?;
    Ok(judge(number, &inputs, sum))
}

fn own<'a>(job: &Job, files: &'a [GradientFile]) -> Result<&'a GradientFile, Stop> {
    files.get(job.rank).ok_or_else(|| pcieipc::Error::Argument(format!("rank {} has no input file", job.rank)).into())
}

fn find<'a>(file: &'a GradientFile, name: &str) -> Result<&'a Tensor, Stop> {
    file.find(name).ok_or_else(|| pcieipc::Error::Argument(format!("tensor {name:?} has vanished from a file")).into())
}

/// Reduces all gradients as one message, over and over, until a rank is lost; then shrinks and reduces the tensors again.
fn rehearse(job: &Job, files: &[GradientFile], member: &mut Member, rehearsal: Rehearsal) -> Result<(), Stop> {
    let mine = own(job, files)?;
    let Some((_, number)) = job.tensors.first().cloned() else { return Ok(()) };
    let mut message = Vec::new();
    for (name, _) in job.tensors.iter().filter(|(_, other)| *other == number) {
        message.extend(mine.read(find(mine, name)?)?);
    }
    let give_up = Instant::now() + rehearsal.patience;
    let mut rounds = 0;
    let mut buffer = message.clone();
    loop {
        buffer.copy_from_slice(&message);
        let start_ns = now_ns();
        match member.all_reduce(&mut buffer, number, job.timeout) {
            Ok(()) => {
                rounds += 1;
                tell(&Report::Round { number: rounds, start_ns, end_ns: now_ns() })?;
                if Instant::now() >= give_up {
                    return Err(Stop::NothingLost(rehearsal.patience));
                }
            }
            Err(error) => {
                tell(&Report::Lost(Lost { kind: name_of(&error), text: error.to_string(), start_ns, at_ns: now_ns() }))?;
                break;
            }
        }
    }
    if job.rank == rehearsal.victim {
        return Ok(());
    }
    let start_ns = now_ns();
    let members = member.shrink(job.timeout)?;
    tell(&Report::Shrunk { start_ns, at_ns: now_ns(), members: members.clone() })?;
    reduce_all(job, files, member, &members, None)
}
