// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parent's side: starts the ranks, hears them, and ends them all when it goes.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Seek, Write},
    os::unix::process::ExitStatusExt,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    time::{Duration, Instant},
};

use super::{Job, Report};

/// How a rank's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// With this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// It closed its output and did not end; the parent ended it.
    Killed,
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ending::Code(code) => write!(f, "exit code {code}"),
            Ending::Signal(signal) => match nix::sys::signal::Signal::try_from(*signal) {
                Ok(name) => write!(f, "killed by {name}"),
                Err(_) => write!(f, "killed by signal {signal}"),
            },
            Ending::Killed => write!(f, "it hung and was killed"),
        }
    }
}

/// Something from a rank.
#[derive(Debug)]
pub enum Heard {
    /// A line.
    Report(Report),
    /// The process has ended, and nothing more comes from it.
    Ended(Ending),
    /// A line that is no report.
    Garbled(String),
}

/// The rank processes of one run. Dropping it ends those that still live.
#[derive(Debug)]
pub struct Crew {
    children: Vec<Child>,
    heard: mpsc::Receiver<(usize, Option<Heard>)>,
    running: usize,
}

impl Crew {
    /// Starts one process for each job, this same binary.
    ///
    /// # Errors
    /// When a process can not be started; those already started are ended.
    pub fn start(jobs: &[Job]) -> io::Result<Self> {
        let program = std::env::current_exe()?;
        let (tell, heard) = mpsc::channel();
        let mut crew = Crew { children: Vec::with_capacity(jobs.len()), heard, running: 0 };
        for (rank, job) in jobs.iter().enumerate() {
            let mut child =
                Command::new(&program).arg(crate::commands::rank::NAME).stdin(on_a_file(job)?).stdout(Stdio::piped()).spawn()?;
            let stdout = child.stdout.take();
            crew.children.push(child);
            crew.running += 1;
            if let Some(stdout) = stdout {
                let tell = tell.clone();
                std::thread::Builder::new().spawn(move || {
                    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                        let heard = serde_json::from_str(&line).map_or_else(|_| Heard::Garbled(line), Heard::Report);
                        if tell.send((rank, Some(heard))).is_err() {
                            return;
                        }
                    }
                    let _ = tell.send((rank, None));
                })?;
            }
        }
        Ok(crew)
    }

    /// How many processes have not ended yet.
    pub fn running(&self) -> usize {
        self.running
    }

    /// The next thing that any rank says; `None` when `deadline` has passed.
    pub fn hear(&mut self, deadline: Instant) -> Option<(usize, Heard)> {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.heard.recv_timeout(left) {
            Ok((rank, Some(heard))) => Some((rank, heard)),
            Ok((rank, None)) => {
                self.running -= 1;
                let ending = self.children.get_mut(rank).map_or(Ending::Killed, |child| end(child, Duration::from_secs(2)));
                Some((rank, Heard::Ended(ending)))
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => None,
        }
    }

    /// Ends one rank without a warning, as a crash would.
    pub fn kill(&mut self, rank: usize) {
        if let Some(child) = self.children.get_mut(rank) {
            let _ = child.kill();
        }
    }

    /// Ends all ranks.
    pub fn kill_all(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.kill_all();
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}

/// The job as standard input. A file, because writing to a pipe would wait for a rank that does not read.
fn on_a_file(job: &Job) -> io::Result<File> {
    let mut file = tempfile::tempfile_in(&job.meeting)?;
    file.write_all(&serde_json::to_vec(job)?)?;
    file.rewind()?;
    Ok(file)
}

/// Waits for a process that has closed its output; kills it when it does not end.
fn end(child: &mut Child, patience: Duration) -> Ending {
    let deadline = Instant::now() + patience;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return of(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
            Ok(None) | Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                return Ending::Killed;
            }
        }
    }
}

fn of(status: ExitStatus) -> Ending {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ending::Code(code),
        (None, Some(signal)) => Ending::Signal(signal),
        (None, None) => Ending::Killed,
    }
}
