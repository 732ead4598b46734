// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc reduce`: add up the gradient files of all ranks, one process a rank.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tempfile::NamedTempFile;

use crate::{
    failure::{Failure, remedy, with_remedy},
    group::{Group, GroupArguments},
    ranks::{Crew, Report},
    scratch::Scratch,
    supervisor::{Interruption, Supervisor},
    tally::{self, Tally},
};

/// Add up the gradients of all ranks, one process a rank, and write the sum
#[derive(Debug, clap::Args)]
pub struct Reduce {
    #[command(flatten)]
    group: GroupArguments,
    /// Where the sum goes: a safetensors file with the names, types and shapes of the inputs
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Compare every element on every rank with an independent float64 sum; a wrong one fails the run
    #[arg(long)]
    check: bool,
    /// One JSON object on standard output instead of the table
    #[arg(long)]
    pub json: bool,
}

impl Reduce {
    pub fn run(self) -> Result<(), Failure> {
        let group = self.group.prepare()?;
        let interruption = Interruption::catch()?;
        let place = self.place(&group)?;
        let mut scratch = Scratch::new()?;
        let output = self.claim(&place, &group, &mut scratch)?;
        eprintln!("transport: {} ({})", group.choice.name, group.choice.why);

        let mut jobs = group.jobs(scratch.path(), self.check);
        if let Some(first) = jobs.first_mut() {
            first.output = Some(output.path().into());
        }
        let crew = Crew::start(&jobs).map_err(|error| Failure::Run(format!("starting the ranks: {}", with_remedy(&error))))?;

        let tensors = group.files.first().map_or(&[][..], |file| file.tensors());
        let mut tally = Tally::new(tensors);
        let bar = progress(3 * group.ranks() * tensors.len(), self.json);
        let mut supervisor = Supervisor::new(crew, &group, interruption);
        let mut steps = vec![0; group.ranks()];
        let ended = supervisor.until_done(|rank, report| {
            match report {
                Report::Progress { steps: now } => {
                    if let Some(steps) = steps.get_mut(rank) {
                        *steps = now;
                    }
                }
                Report::Tensor(done) => tally.add(done),
                _ => {}
            }
            // Reading, reducing, and looking at what came out are one step each.
            bar.set_position((steps.iter().sum::<usize>().max(2 * tally.reports()) + tally.reports()) as u64);
        });
        bar.finish_and_clear();
        ended?;

        let rows = tally.rows();
        let total = tally::total(&rows);
        let seconds = tally.seconds();
        let refused = match total.wrong {
            Some(wrong) if wrong > 0 => Some(format!("{wrong} wrong elements, {} not written", self.output.display())),
            _ if !total.same_bits => Some(format!("the ranks hold different bits, {} not written", self.output.display())),
            _ => None,
        };
        if refused.is_none() {
            keep(output, &place)?;
        }
        if self.json {
            let told = serde_json::json!({
                "ok": refused.is_none(), "error": refused, "output": self.output, "ranks": group.ranks(), "transport": group.choice.name,
                "why": group.choice.why, "seconds": seconds, "total": total, "tensors": rows,
            });
            println!("{told}");
        } else {
            println!("{}", tally::table(&rows, &total, seconds));
        }
        match refused {
            None => Ok(()),
            Some(why) if self.json => Err(Failure::Told(why)),
            Some(why) => Err(Failure::Run(why)),
        }
    }

    /// Where the sum belongs: a link is followed, and what is there already must be a file that may be replaced.
    fn place(&self, group: &Group) -> Result<PathBuf, Failure> {
        let bad = |what: String| Failure::Use(format!("{}: {what}", self.output.display()));
        let Ok(about) = fs::symlink_metadata(&self.output) else {
            // Nothing, or nothing that can be seen; making the file beside it tells which.
            return Ok(self.output.clone());
        };
        let place = if about.is_symlink() {
            fs::canonicalize(&self.output).map_err(|error| bad(format!("is a link that leads nowhere ({error}); name a file")))?
        } else {
            self.output.clone()
        };
        let about = fs::metadata(&place).map_err(|error| bad(error.to_string()))?;
        if about.is_dir() {
            return Err(bad("is a directory; name a file".into()));
        }
        if !about.is_file() {
            return Err(bad("is neither a file nor free: a device, pipe or socket is not replaced by a sum; name a file".into()));
        }
        if let Ok(output) = fs::canonicalize(&place) {
            let input = (0..group.ranks())
                .map(|rank| self.group.input.path(rank))
                .find(|path| fs::canonicalize(path).is_ok_and(|path| path == output));
            if let Some(input) = input {
                return Err(bad(format!("is the input {}; the sum must not overwrite a gradient", input.display())));
            }
        }
        Ok(place)
    }

    /// A temporary file beside the output, so that the output appears whole or not at all.
    fn claim(&self, place: &Path, group: &Group, scratch: &mut Scratch) -> Result<NamedTempFile, Failure> {
        let mut make = || -> io::Result<NamedTempFile> {
            let mut file = scratch.beside(place)?;
            if let Some(first) = group.files.first() {
                file.write_all(first.head())?;
                file.as_file().set_len((first.head().len() + group.bytes()) as u64)?;
            }
            Ok(file)
        };
        make().map_err(|error| {
            let text = format!("{}: can not be written: {}", self.output.display(), with_remedy(&error));
            if remedy(&error).is_some() { Failure::Run(text) } else { Failure::Use(text) }
        })
    }
}

fn keep(file: NamedTempFile, output: &Path) -> Result<(), Failure> {
    let kept = file.as_file().sync_all().and_then(|()| file.persist(output).map_err(|error| error.error));
    kept.map(drop).map_err(|error| Failure::Run(format!("{}: {error}", output.display())))
}

fn progress(steps: usize, json: bool) -> ProgressBar {
    let target = if json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let style =
        ProgressStyle::with_template("{bar:40} {percent:>3} % {elapsed}").unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(steps as u64), target).with_style(style)
}
