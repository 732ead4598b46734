// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc reduce`: add up the gradient files of all ranks, one process a rank.

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tempfile::NamedTempFile;

use crate::{
    failure::Failure,
    group::{Group, GroupArguments},
    ranks::{Crew, Report},
    supervisor::{Interruption, Supervisor, meeting_directory},
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
        let output = self.claim_output(&group)?;
        eprintln!("transport: {} ({})", group.choice.name, group.choice.why);

        let meeting = meeting_directory()?;
        let mut jobs = group.jobs(meeting.path(), self.check);
        if let Some(first) = jobs.first_mut() {
            first.output = Some(output.path().into());
        }
        let crew = Crew::start(&jobs).map_err(|error| Failure::Run(format!("starting the ranks: {error}")))?;

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
            keep(output, &self.output)?;
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

    /// A temporary file beside the output, so that the output appears whole or not at all.
    fn claim_output(&self, group: &Group) -> Result<NamedTempFile, Failure> {
        let bad = |what: String| Failure::Use(format!("{}: {what}", self.output.display()));
        if self.output.is_dir() {
            return Err(bad("is a directory; name a file".into()));
        }
        if let Ok(output) = fs::canonicalize(&self.output) {
            let input = (0..group.ranks())
                .map(|rank| self.group.input.path(rank))
                .find(|path| fs::canonicalize(path).is_ok_and(|path| path == output));
            if let Some(input) = input {
                return Err(bad(format!("is the input {}; the sum must not overwrite a gradient", input.display())));
            }
        }
        let directory = match self.output.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let make = || -> io::Result<NamedTempFile> {
            let mut file = tempfile::Builder::new()
                .prefix(".pcieipc-")
                .suffix(".partial")
                // As File::create would: the umask takes away what it should.
                .permissions(fs::Permissions::from_mode(0o666))
                .tempfile_in(directory)?;
            if let Some(first) = group.files.first() {
                file.write_all(first.head())?;
                file.as_file().set_len((first.head().len() + group.bytes()) as u64)?;
            }
            Ok(file)
        };
        make().map_err(|error| bad(format!("can not be written in {}: {error}", directory.display())))
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
