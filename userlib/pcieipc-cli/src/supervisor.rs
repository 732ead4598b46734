// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hears all ranks of a run, bounded, and turns what went wrong into one failure.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    failure::Failure,
    group::Group,
    ranks::{Counters, Crew, Ending, Heard, Report},
};

/// What a rank gets beyond its own bound to report the error that the bound produced.
const GRACE: Duration = Duration::from_secs(5);
/// When one rank could not even meet, the others get so long to say why they could not, before they would only miss it.
const COMPANY: Duration = Duration::from_millis(500);
/// How often a signal is looked for.
const TICK: Duration = Duration::from_millis(100);

/// Lets a write past the limit of file sizes (`ulimit -f`) fail as a write, which can be told, instead of ending the process.
pub fn survive_file_size_limit() {
    // When it can not be caught, the signal does what it always did.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false)));
}

/// Whether the user wants the command to end. Made before anything that must be cleaned up.
#[derive(Debug, Clone)]
pub struct Interruption(Arc<AtomicBool>);

impl Interruption {
    /// Notes SIGINT and SIGTERM from now on, instead of dying of them.
    ///
    /// # Errors
    /// Run when signals can not be caught.
    pub fn catch() -> Result<Self, Failure> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&flag))
                .map_err(|error| Failure::Run(format!("signal handler: {error}")))?;
        }
        Ok(Self(flag))
    }

    /// Whether it has.
    pub fn came(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// What one rank has come to.
#[derive(Debug, Clone, Default)]
struct Fate {
    met: bool,
    done: bool,
    failed: Option<(String, bool)>,
    ended: Option<Ending>,
}

impl Fate {
    fn is_known(&self) -> bool {
        self.done || self.failed.is_some() || self.ended.is_some()
    }
}

/// The ranks of one run, watched.
#[derive(Debug)]
pub struct Supervisor {
    crew: Crew,
    fates: Vec<Fate>,
    bound: Duration,
    /// Set when a rank failed before the group met.
    hopeless: Option<Instant>,
    interruption: Interruption,
    /// What each rank's transport counted during the whole job.
    pub counters: Vec<Counters>,
}

impl Supervisor {
    /// Watches the ranks of a group.
    pub fn new(crew: Crew, group: &Group, interruption: Interruption) -> Self {
        let ranks = group.ranks();
        let bound = group.timeout() + GRACE;
        Self {
            crew,
            fates: vec![Fate::default(); ranks],
            bound,
            hopeless: None,
            interruption,
            counters: vec![Counters::default(); ranks],
        }
    }

    /// The next report of any rank; ends of processes are noted on the way. `None` when all have ended.
    ///
    /// # Errors
    /// Run when a signal came, a rank died before all had met, or nobody said anything within the bound; the ranks are ended.
    pub fn next(&mut self) -> Result<Option<(usize, Report)>, Failure> {
        let deadline = Instant::now() + self.bound;
        while self.crew.running() > 0 {
            if self.interruption.came() {
                return Err(self.give_up("interrupted".into()));
            }
            if self.fates.iter().all(Fate::is_known) {
                // Failed ranks keep their seats until everybody has said why.
                self.crew.kill_all();
            }
            if self.hopeless.is_some_and(|at| Instant::now() >= at) {
                self.crew.kill_all();
                let (lines, bad_use) = self.told();
                return Err(failure(&lines, bad_use));
            }
            match self.crew.hear((Instant::now() + TICK).min(deadline)) {
                None if Instant::now() >= deadline => {
                    return Err(self.give_up(format!("no rank has said anything for {:?}", self.bound)));
                }
                None => {}
                Some((rank, Heard::Report(report))) => {
                    self.note(rank, &report);
                    return Ok(Some((rank, report)));
                }
                Some((rank, Heard::Garbled(line))) => {
                    return Err(self.give_up(format!("rank {rank} wrote {line:?}, which is no report")));
                }
                Some((rank, Heard::Ended(ending))) => {
                    let Some(fate) = self.fates.get_mut(rank) else { continue };
                    fate.ended = Some(ending);
                    if fate.failed.is_none() && !fate.done && !self.fates.iter().any(|fate| fate.met) {
                        return Err(self.give_up(format!("rank {rank} died before the group had met ({ending})")));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Hears all ranks to their end; `told` gets what they say.
    ///
    /// # Errors
    /// As for [`Supervisor::next`], and Run or Use when any rank failed or died.
    pub fn until_done(&mut self, mut told: impl FnMut(usize, Report)) -> Result<(), Failure> {
        while let Some((rank, report)) = self.next()? {
            told(rank, report);
        }
        self.verdict(None)
    }

    /// The ranks' failures as one; the `excused` rank was taken away on purpose.
    ///
    /// # Errors
    /// Run or Use when any other rank failed or died.
    pub fn verdict(&self, excused: Option<usize>) -> Result<(), Failure> {
        let mut lines = Vec::new();
        let mut bad_use = true;
        for (rank, fate) in self.fates.iter().enumerate().filter(|(rank, _)| Some(*rank) != excused) {
            match fate {
                Fate { failed: Some((text, bad)), .. } => {
                    lines.push(format!("rank {rank}: {text}"));
                    bad_use &= bad;
                }
                Fate { done: true, .. } => {}
                Fate { ended, .. } => {
                    let how = ended.map_or_else(|| "still running".into(), |ending| ending.to_string());
                    lines.push(format!("rank {rank}: died ({how})"));
                    bad_use = false;
                }
            }
        }
        if lines.is_empty() { Ok(()) } else { Err(failure(&lines, bad_use)) }
    }

    /// What the ranks that failed said, and whether all of it was about bad use.
    fn told(&self) -> (Vec<String>, bool) {
        let failed = self.fates.iter().enumerate().filter_map(|(rank, fate)| fate.failed.as_ref().map(|failed| (rank, failed)));
        let bad_use = failed.clone().all(|(_, (_, bad_use))| *bad_use);
        (failed.map(|(rank, (text, _))| format!("rank {rank}: {text}")).collect(), bad_use)
    }

    /// Ends one rank as a crash would.
    pub fn kill(&mut self, rank: usize) {
        self.crew.kill(rank);
    }

    fn note(&mut self, rank: usize, report: &Report) {
        let Some(fate) = self.fates.get_mut(rank) else { return };
        match report {
            Report::Met { .. } => fate.met = true,
            Report::Failed { text, bad_use, .. } => {
                fate.failed = Some((text.clone(), *bad_use));
                if !self.fates.iter().any(|fate| fate.met) {
                    self.hopeless.get_or_insert_with(|| Instant::now() + COMPANY);
                }
            }
            Report::Done { counters } => {
                fate.done = true;
                if let Some(slot) = self.counters.get_mut(rank) {
                    *slot = *counters;
                }
            }
            _ => {}
        }
    }

    /// Ends all ranks; adds what they had said to `why`.
    fn give_up(&mut self, why: String) -> Failure {
        self.crew.kill_all();
        let mut lines = vec![format!("{why}; the other ranks were ended")];
        lines.extend(self.told().0);
        Failure::Run(lines.join("\n"))
    }
}

fn failure(lines: &[String], bad_use: bool) -> Failure {
    let text = lines.join("\n");
    if bad_use { Failure::Use(text) } else { Failure::Run(text) }
}
