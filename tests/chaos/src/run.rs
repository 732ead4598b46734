// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conductor: brings the ranks together, has each fault played, and watches until all is as before, or says what is not.

use std::{
    collections::HashMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use guest::wait::until;
use pcieipc::device::State;

use crate::{
    crew::Crew,
    judge::{self, Outcome},
    machine::{self, Machine},
    now_ns,
    play::{self, Playing},
    record::{Record, Seen},
    schedule::{Fault, Kind},
    words::{Failure, Holdings, Order, Said, Setup},
};

/// How long a batch of rounds is to take.
const BATCH: Duration = Duration::from_millis(300);

/// How a run is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// How many ranks.
    pub ranks: usize,
    /// Multiplies every bound and deadline: for slow kernels and busy hosts.
    pub patience: u32,
    /// Whether endpoints move the records also where a fault does not need it.
    pub engine: bool,
    /// Where the ranks meet.
    pub directory: PathBuf,
    /// How long a rank may take to answer, apart from patience.
    pub bound: Duration,
}

/// What a run needs of one fault to the next.
#[derive(Debug)]
pub struct Conductor {
    options: Options,
    machine: Machine,
    crew: Crew,
    /// The present group; none when the ranks have to meet.
    setup: Option<Setup>,
    /// Where the present group met, and where those that return look for it.
    directory: PathBuf,
    epoch: u32,
    until: u32,
    batch: u32,
    answers: Vec<Option<Said>>,
    before: HashMap<Setup2, Held>,
    /// What the module held before the first group.
    idle: Option<(u64, u64)>,
    run_ns: u64,
    /// Rounds of the present group that each rank has compared.
    done: Vec<u32>,
    wrong: u64,
    compared: u64,
}

/// A [`Setup`] as a key.
type Setup2 = (bool, bool);

/// What each rank holds, and the module's pages and bytes where there is a module.
type Held = (Vec<Holdings>, Option<(u64, u64)>);

/// What kept a fault from being seen to its end.
#[derive(Debug)]
enum Trouble {
    /// Ranks did not answer in time.
    Hang(Vec<String>),
    /// Something else.
    Other(String),
}

type Result<T> = std::result::Result<T, Trouble>;

impl Conductor {
    /// Starts the ranks.
    ///
    /// # Errors
    /// No process can be started.
    pub fn new(options: Options, machine: Machine) -> std::io::Result<Self> {
        let mut crew = Crew::new(options.ranks);
        crew.fill()?;
        let (answers, done) = (vec![None; options.ranks], vec![0; options.ranks]);
        let idle = machine.held();
        Ok(Self {
            options,
            machine,
            crew,
            setup: None,
            directory: PathBuf::new(),
            epoch: 0,
            until: 0,
            batch: 8,
            answers,
            before: HashMap::new(),
            idle,
            run_ns: now_ns(),
            done,
            wrong: 0,
            compared: 0,
        })
    }

    fn bound(&self) -> Duration {
        self.options.bound * self.options.patience
    }

    fn deadline_ms(&self, kind: Kind) -> u64 {
        let ms = match kind {
            Kind::Stop => 1_500,
            Kind::MemoryPressure => 20_000,
            _ => 10_000,
        };
        ms * u64::from(self.options.patience)
    }

    fn everybody(&self) -> Vec<usize> {
        (0..self.options.ranks).collect()
    }

    /// Plays one fault.
    pub fn fault(&mut self, fault: Fault) -> Record {
        let setup =
            Setup { engine: self.options.engine || fault.kind == Kind::Corruption, checked: fault.kind == Kind::Corruption };
        let mut record = Record {
            fault: Some(fault),
            run_ns: self.run_ns,
            seen: vec![Seen::default(); self.options.ranks],
            ..Record::default()
        };
        (self.wrong, self.compared) = (0, 0);
        match self.through(fault, setup, &mut record) {
            Ok(()) => record.complaints.extend(judge::complaints(&record, setup.engine)),
            Err(trouble) => {
                match trouble {
                    Trouble::Hang(ranks) => record.hangs.extend(ranks),
                    Trouble::Other(why) => record.complaints.push(why),
                }
                if let Err(why) = self.start_over() {
                    record.complaints.push(why);
                }
            }
        }
        (record.wrong, record.compared) = (self.wrong, self.compared);
        record
    }

    fn through(&mut self, fault: Fault, setup: Setup, record: &mut Record) -> Result<()> {
        if self.setup != Some(setup) {
            self.meet(setup, record)?;
            self.work(&self.everybody(), self.deadline_ms(Kind::Kill), record)?;
            // What the first group of its make holds is what all later ones may hold.
            self.leaks(setup, record)?;
            record.met_ns = None;
        }
        self.machine.left_and_returned(fault.victim);
        let deadline_ms = self.deadline_ms(fault.kind);
        let everybody = self.everybody();
        if fault.in_flight {
            self.order_work(&everybody, deadline_ms);
            self.under_way()?;
        }
        record.at_ns = now_ns();
        let mut playing = match play::begin(fault, &self.machine, &mut self.crew) {
            Ok(playing) => playing,
            Err(why) => return Err(Trouble::Other(format!("could not be played: {why}"))),
        };
        if !fault.in_flight {
            self.order_work(&everybody, deadline_ms);
        }
        match judge::outcome(fault.kind, setup.engine) {
            Outcome::Unnoticed => self.unnoticed(fault, setup, &mut playing, record)?,
            Outcome::Told(_) => self.told(fault, setup, &mut playing, record, true)?,
            Outcome::Perhaps(_) => self.told(fault, setup, &mut playing, record, false)?,
            Outcome::Bereft(_) => self.bereft(fault, setup, &mut playing, record)?,
        }
        drop(playing);
        self.leaks(setup, record)
    }

    /// A fault that nobody may notice: rounds while it lasts, and after it.
    fn unnoticed(&mut self, fault: Fault, setup: Setup, playing: &mut Playing, record: &mut Record) -> Result<()> {
        let everybody = self.everybody();
        let deadline_ms = self.deadline_ms(fault.kind);
        if fault.kind == Kind::ShortStop {
            std::thread::sleep(play::short_stop(&fault));
            self.end(playing)?;
        }
        self.settle(&everybody)?;
        self.see(&everybody, deadline_ms, record);
        record.in_flight = self.met_a_call(record);
        if record.seen.iter().any(|seen| seen.failure.is_some()) {
            // The judge says what is wrong with it; the machine has to be right for the next fault all the same.
            if fault.kind != Kind::ShortStop {
                self.end(playing)?;
            }
            self.restore_all()?;
            self.meet(setup, record)?;
        } else if fault.kind == Kind::Silence {
            self.order_recovery(setup, record);
            self.end(playing)?;
            self.restore_all()?;
            (record.hit_ns, record.live_ns) = self.machine.left_and_returned(fault.victim);
            self.together(setup, record)?;
        } else if fault.kind != Kind::ShortStop {
            self.end(playing)?;
        }
        record.back_ns = Some(self.work(&everybody, deadline_ms, record)?);
        Ok(())
    }

    /// A fault that everybody is told of, or (when nobody must be) that may also pass.
    fn told(&mut self, fault: Fault, setup: Setup, playing: &mut Playing, record: &mut Record, must: bool) -> Result<()> {
        let everybody = self.everybody();
        let deadline_ms = self.deadline_ms(fault.kind);
        self.until_told(&everybody, deadline_ms, must, record)?;
        record.in_flight = self.met_a_call(record);
        let recovers = must || record.seen.iter().any(|seen| seen.failure.is_some());
        if recovers {
            self.agree(&everybody, record)?;
            // As a program does: at once, and then the endpoint comes back or not.
            self.order_recovery(setup, record);
        }
        self.end(playing)?;
        self.restore_all()?;
        (record.hit_ns, record.live_ns) = self.machine.left_and_returned(fault.victim);
        if recovers {
            self.together(setup, record)?;
        }
        record.back_ns = Some(self.work(&everybody, self.deadline_ms(Kind::Kill), record)?);
        Ok(())
    }

    /// A fault that takes a rank away: the others go on, and then all are brought together again.
    fn bereft(&mut self, fault: Fault, setup: Setup, playing: &mut Playing, record: &mut Record) -> Result<()> {
        let victim = fault.victim;
        let survivors: Vec<usize> = self.everybody().into_iter().filter(|rank| *rank != victim).collect();
        let deadline_ms = self.deadline_ms(fault.kind);
        self.until_told(&survivors, deadline_ms, true, record)?;
        record.in_flight = self.met_a_call(record);
        // One that still runs takes part.
        let asked = if fault.kind == Kind::FailedRecovery { self.everybody() } else { survivors.clone() };
        if asked.contains(&victim) {
            self.settle(&[victim])?;
            self.see(&[victim], deadline_ms, record);
        }
        self.agree(&asked, record)?;
        record.shrink_ns = Some(now_ns());
        self.epoch += 1;
        self.until = 0;
        let timeout_ms = 6_000 * u64::from(self.options.patience);
        for &rank in &asked {
            self.ask(rank, &Order::Shrink { timeout_ms, epoch: self.epoch });
        }
        self.settle(&asked)?;
        if let Some(Said::Shrunk { .. }) = &self.answers[victim] {
            record.complaints.push(format!("rank {victim} shrank, though its endpoint was in recovery"));
        }
        let mut all = true;
        for &rank in &survivors {
            match &self.answers[rank] {
                Some(Said::Shrunk { members, .. }) => record.seen[rank].members = Some(members.clone()),
                Some(Said::Refused(failure)) => {
                    record.seen[rank].refused = Some(failure.clone());
                    all = false;
                }
                _ => all = false,
            }
        }
        let gone_by = Instant::now() + Duration::from_secs(120) * self.options.patience;
        if all {
            record.shrunk_ns = Some(self.work(&survivors, deadline_ms, record)?);
        }
        if fault.kind == Kind::FailedRecovery {
            // The kernel needs a minute to give up; the survivors work meanwhile.
            while !lost_now(&self.machine, victim) && Instant::now() < gone_by {
                if all {
                    self.work(&survivors, deadline_ms, record)?;
                    std::thread::sleep(Duration::from_millis(200));
                } else {
                    std::thread::sleep(Duration::from_millis(500));
                }
            }
            if !lost_now(&self.machine, victim) {
                record.complaints.push("the kernel did not give the endpoint up".into());
            }
        }
        match fault.kind {
            Kind::Kill => {
                record.seen[victim].ended = true;
                self.crew.remove(victim);
                self.end(playing)?;
                self.order_recovery(setup, record);
            }
            Kind::Stop => {
                // It runs again, and must find out by itself that it is not in the group any more.
                self.end(playing)?;
                // Whatever it still writes, the others work.
                self.work(&survivors, deadline_ms, record)?;
                self.settle(&[victim])?;
                self.see(&[victim], deadline_ms, record);
                self.order_recovery(setup, record);
            }
            _ => {
                self.order_recovery(setup, record);
                self.end(playing)?;
            }
        }
        self.restore_all()?;
        (record.hit_ns, record.live_ns) = self.machine.left_and_returned(victim);
        self.together(setup, record)?;
        record.back_ns = Some(self.work(&self.everybody(), self.deadline_ms(Kind::Kill), record)?);
        Ok(())
    }

    /// Has the ranks say to each other what they saw, and takes down what each then takes for the truth.
    fn agree(&mut self, ranks: &[usize], record: &mut Record) -> Result<()> {
        let timeout_ms = 4_000 * u64::from(self.options.patience);
        for &rank in ranks {
            self.ask(rank, &Order::Agree { ok: record.seen[rank].failure.is_none(), timeout_ms });
        }
        self.settle(ranks)?;
        for &rank in ranks {
            match &self.answers[rank] {
                Some(Said::Agreed { ok, failed }) => record.seen[rank].agreed = Some((*ok, failed.clone())),
                Some(Said::Refused(failure)) => {
                    record.complaints.push(format!("rank {rank} could not agree: {}: {}", failure.kind, failure.text));
                }
                other => record.complaints.push(format!("rank {rank} said {other:?} instead of agreeing")),
            }
        }
        Ok(())
    }

    /// Has the ranks work until each has an error; with `must` unset, for one batch only.
    fn until_told(&mut self, ranks: &[usize], deadline_ms: u64, must: bool, record: &mut Record) -> Result<()> {
        let by = Instant::now() + self.bound();
        loop {
            self.settle(ranks)?;
            self.see(ranks, deadline_ms, record);
            let told = |rank: &usize| record.seen[*rank].failure.is_some() || record.seen[*rank].ended;
            let rest: Vec<usize> = ranks.iter().copied().filter(|rank| !told(rank)).collect();
            let some = rest.len() < ranks.len();
            if rest.is_empty() || (!must && !some) || Instant::now() > by {
                return Ok(());
            }
            self.order_work(&rest, deadline_ms);
        }
    }

    /// Takes down what the ranks have answered.
    fn see(&mut self, ranks: &[usize], deadline_ms: u64, record: &mut Record) {
        for &rank in ranks {
            let seen = &mut record.seen[rank];
            match &self.answers[rank] {
                Some(Said::Failed(failure)) if seen.failure.is_none() => {
                    let stopped = record.fault.is_some_and(|fault| fault.kind == Kind::Stop && fault.victim == rank);
                    // A process that does not run is late for everything.
                    if !stopped {
                        record.overruns_ns.extend(overrun(failure.at_ns - failure.started_ns, failure));
                    }
                    seen.failure = Some(failure.clone());
                }
                Some(Said::Held { longest_ns, .. }) => {
                    seen.held = true;
                    let deadline_ns = deadline_ms * 1_000_000;
                    record.overruns_ns.extend(longest_ns.checked_sub(deadline_ns).filter(|over| *over > 0));
                }
                Some(Said::Ended) => seen.ended = true,
                _ => {}
            }
        }
    }

    /// Whether the fault met a call of every rank.
    fn met_a_call(&self, record: &Record) -> bool {
        let fault = record.fault.as_ref();
        fault.is_some_and(|fault| fault.in_flight)
            && (0..self.options.ranks).all(|rank| match &self.answers[rank] {
                Some(Said::Failed(failure)) => failure.at_ns >= record.at_ns,
                Some(Said::Held { at_ns, .. }) => *at_ns >= record.at_ns,
                // Killed or stopped in it.
                _ => true,
            })
    }

    fn ask(&mut self, rank: usize, order: &Order) {
        self.answers[rank] = None;
        self.crew.order(rank, order);
    }

    fn order_work(&mut self, ranks: &[usize], deadline_ms: u64) {
        self.until += self.batch;
        for &rank in ranks {
            self.ask(rank, &Order::Run { until: self.until, deadline_ms });
        }
    }

    /// Waits until some rank is in the middle of the rounds that were ordered.
    fn under_way(&mut self) -> Result<()> {
        let by = Instant::now() + self.bound();
        loop {
            match self.crew.hear(by) {
                None => return Err(Trouble::Hang(self.silent(&self.everybody()))),
                Some((rank, said)) => {
                    let begun = !matches!(said, Said::Wrong { .. });
                    self.note(rank, said);
                    if begun {
                        return Ok(());
                    }
                }
            }
        }
    }

    fn note(&mut self, rank: usize, said: Said) {
        let done = match &said {
            Said::Held { done, .. } => Some(*done),
            Said::Failed(failure) => Some(failure.round),
            Said::Met { .. } | Said::Shrunk { .. } => {
                self.done[rank] = 0;
                None
            }
            _ => None,
        };
        if let Some(done) = done {
            self.compared += u64::from(done.saturating_sub(self.done[rank]));
            self.done[rank] = done;
        }
        match said {
            Said::Rounds { .. } => {}
            Said::Wrong { round, elements, first } => {
                println!("# rank {rank}: {elements} wrong elements in round {round}, the first at {first}");
                self.wrong += 1;
            }
            // An end after an answer takes nothing back.
            Said::Ended if self.answers[rank].is_some() => {}
            other => self.answers[rank] = Some(other),
        }
    }

    /// Waits until all these ranks have answered.
    fn settle(&mut self, ranks: &[usize]) -> Result<()> {
        let by = Instant::now() + self.bound();
        while ranks.iter().any(|rank| self.answers[*rank].is_none()) {
            match self.crew.hear(by) {
                Some((rank, said)) => self.note(rank, said),
                None => return Err(Trouble::Hang(self.silent(ranks))),
            }
        }
        Ok(())
    }

    fn silent(&self, ranks: &[usize]) -> Vec<String> {
        let silent = ranks.iter().filter(|rank| self.answers[**rank].is_none());
        silent
            .map(|rank| format!("rank {rank} did not answer for {:?}: {}", self.bound(), self.crew.whereabouts(*rank)))
            .collect()
    }

    /// A batch of rounds in which nothing may go wrong; gives when the last rank had compared its first sum.
    fn work(&mut self, ranks: &[usize], deadline_ms: u64, record: &mut Record) -> Result<u64> {
        let from = self.until;
        self.order_work(ranks, deadline_ms);
        self.settle(ranks)?;
        let mut first = 0;
        for &rank in ranks {
            match &self.answers[rank] {
                Some(Said::Held { first_ns, at_ns, longest_ns, .. }) => {
                    first = first.max(*first_ns);
                    record.overruns_ns.extend(longest_ns.checked_sub(deadline_ms * 1_000_000).filter(|over| *over > 0));
                    let each = at_ns.saturating_sub(*first_ns) / u64::from((self.until - from).saturating_sub(1).max(1));
                    self.batch = (BATCH.as_nanos() as u64 / each.max(1)).clamp(6, 400) as u32;
                }
                Some(Said::Failed(failure)) => {
                    return Err(Trouble::Other(format!(
                        "rank {rank} failed when nothing was wrong any more: {}: {}",
                        failure.kind, failure.text
                    )));
                }
                other => return Err(Trouble::Other(format!("rank {rank} said {other:?} instead of working"))),
            }
        }
        Ok(first)
    }

    /// All ranks leave what group they have, and meet.
    fn meet(&mut self, setup: Setup, record: &mut Record) -> Result<()> {
        self.fill()?;
        self.setup = None;
        self.epoch += 1;
        self.until = 0;
        let before = std::mem::replace(&mut self.directory, self.options.directory.join(self.epoch.to_string()));
        for rank in self.everybody() {
            let order = Order::Meet {
                directory: self.directory.display().to_string(),
                ranks: self.options.ranks,
                serial: self.serial(rank),
                setup,
                timeout_ms: self.gathering_ms(),
                epoch: self.epoch,
            };
            self.ask(rank, &order);
        }
        self.together(setup, record)?;
        let _ = std::fs::remove_dir_all(before);
        Ok(())
    }

    fn serial(&self, rank: usize) -> Option<u64> {
        self.machine.endpoints.get(rank).map(|endpoint| endpoint.serial)
    }

    fn gathering_ms(&self) -> u64 {
        45_000 * u64::from(self.options.patience)
    }

    /// All ranks wait for all ranks; a new process takes each empty place.
    fn order_recovery(&mut self, setup: Setup, record: &mut Record) {
        record.meet_ns = Some(now_ns());
        self.epoch += 1;
        self.until = 0;
        let (epoch, timeout_ms) = (self.epoch, self.gathering_ms());
        let present = self.crew.present();
        if let Err(error) = self.crew.fill() {
            record.complaints.push(format!("no process for a rank: {error}"));
        }
        for rank in self.everybody() {
            let order = if present.contains(&rank) {
                Order::Recover { timeout_ms, epoch }
            } else {
                Order::Rejoin {
                    directory: self.directory.display().to_string(),
                    ranks: self.options.ranks,
                    serial: self.serial(rank),
                    setup,
                    timeout_ms,
                    epoch,
                }
            };
            self.ask(rank, &order);
        }
    }

    /// Waits until all ranks are in one group.
    fn together(&mut self, setup: Setup, record: &mut Record) -> Result<()> {
        self.setup = None;
        self.settle(&self.everybody())?;
        for rank in self.everybody() {
            match &self.answers[rank] {
                Some(Said::Met { at_ns }) => record.met_ns = record.met_ns.max(Some(*at_ns)),
                Some(Said::Refused(failure)) => {
                    return Err(Trouble::Other(format!("rank {rank} could not come back: {}: {}", failure.kind, failure.text)));
                }
                other => return Err(Trouble::Other(format!("rank {rank} said {other:?} instead of coming back"))),
            }
        }
        record.notes.push(format!("group {}", self.epoch));
        self.setup = Some(setup);
        Ok(())
    }

    fn fill(&mut self) -> Result<()> {
        self.crew.fill().map_err(|error| Trouble::Other(format!("no process for a rank: {error}")))
    }

    fn end(&mut self, playing: &mut Playing) -> Result<()> {
        playing.end(&self.machine, &mut self.crew).map_err(|why| Trouble::Other(format!("could not be ended: {why}")))
    }

    fn restore_all(&mut self) -> Result<()> {
        for rank in 0..self.machine.endpoints.len() {
            self.machine.restore(rank).map_err(Trouble::Other)?;
        }
        Ok(())
    }

    /// What is held now, against what was held when such a group had first met.
    fn leaks(&mut self, setup: Setup, record: &mut Record) -> Result<()> {
        let by = Instant::now() + Duration::from_secs(5) * self.options.patience;
        loop {
            for rank in self.everybody() {
                self.ask(rank, &Order::Count);
            }
            self.settle(&self.everybody())?;
            let counted = |answer: &Option<Said>| match answer {
                Some(Said::Counted(holdings)) => holdings.clone(),
                _ => Holdings::default(),
            };
            let now: Vec<Holdings> = self.answers.iter().map(counted).collect();
            let held = self.machine.held();
            let (then, held_then) =
                self.before.entry((setup.engine, setup.checked)).or_insert_with(|| (now.clone(), held)).clone();
            let mut leaks = Vec::new();
            for (rank, (then, now)) in then.iter().zip(&now).enumerate() {
                leaks.extend(now.beside(then).map(|what| format!("rank {rank} holds {what}")));
            }
            if held != held_then {
                leaks.push(format!("the module holds {held:?} (pages, bytes of channels), was {held_then:?}"));
            }
            if leaks.is_empty() || Instant::now() > by {
                record.leaks = leaks;
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// After trouble: other processes, and endpoints that are right.
    fn start_over(&mut self) -> machine::Result<()> {
        for rank in self.everybody() {
            println!("# rank {rank}: {}", self.crew.whereabouts(rank));
            self.crew.remove(rank);
        }
        self.setup = None;
        self.answers = vec![None; self.options.ranks];
        self.crew.fill().map_err(|error| error.to_string())?;
        (0..self.machine.endpoints.len()).try_for_each(|rank| self.machine.restore(rank))
    }

    /// Everybody leaves; gives what the module still holds then.
    pub fn finish(mut self) -> Vec<String> {
        for rank in self.everybody() {
            println!("# rank {rank}, user and system time of its threads: {}", self.crew.times(rank));
            self.crew.remove(rank);
        }
        let idle = self.idle;
        if !until(Duration::from_secs(10) * self.options.patience, || self.machine.held() == idle) {
            return vec![format!(
                "after all ranks have ended the module holds {:?} (pages, bytes of channels), before them {idle:?}",
                self.machine.held()
            )];
        }
        Vec::new()
    }
}

fn lost_now(machine: &Machine, rank: usize) -> bool {
    machine.state(rank).is_none_or(|(state, ..)| state != State::Recovering)
}

fn overrun(took_ns: u64, failure: &Failure) -> Option<u64> {
    took_ns.checked_sub(failure.deadline_ms * 1_000_000).filter(|over| *over > 0)
}
