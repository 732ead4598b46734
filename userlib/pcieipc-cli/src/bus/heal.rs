// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sequence by which an operator brings a function back: look, wait, reset, remove, rescan, rebind, each followed by a test. It stops
//! at the first test that passes.

use std::{
    io, thread,
    time::{Duration, Instant},
};

use pcieipc::device::State;
use serde::Serialize;

use super::{DRIVER, Function, Sysfs, endpoint};

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It did what it was for.
    Done,
    /// There was nothing to do.
    Skipped,
    /// It did not.
    Failed,
    /// It would be done.
    Planned,
}

/// One step with its result.
#[derive(Debug, Clone, Serialize)]
pub struct Step {
    /// wait, reset, remove, rescan, rebind, verify.
    pub step: &'static str,
    /// How it ended.
    pub outcome: Outcome,
    /// What was done or would be, and what was seen.
    pub text: String,
    /// How long it took.
    pub seconds: f64,
}

/// What the sequence needs of the host.
pub trait Bench {
    /// Whether the bus has the function.
    fn exists(&self) -> bool;
    /// Whether it answers.
    fn answers(&self) -> bool;
    /// Its driver.
    fn driver(&self) -> Option<String>;
    /// Its state by the module, if the module drives it.
    fn state(&self) -> Option<State>;
    /// How it can be reset.
    fn reset_methods(&self) -> Vec<String>;
    /// Does it.
    fn reset(&self) -> io::Result<()>;
    /// Does it.
    fn remove(&self) -> io::Result<()>;
    /// Does it.
    fn rescan(&self) -> io::Result<()>;
    /// Does it.
    fn bind(&self, driver: &str) -> io::Result<()>;
    /// Tests it.
    fn verify(&self) -> Result<String, String>;
    /// What each action writes where, for whoever wants to know before.
    fn file(&self, action: &str) -> String;
}

/// The running host.
#[derive(Debug)]
pub struct Host {
    sysfs: Sysfs,
    function: Function,
}

impl Host {
    /// For one function.
    pub fn new(sysfs: Sysfs, function: Function) -> Self {
        Self { sysfs, function }
    }
}

impl Bench for Host {
    fn exists(&self) -> bool {
        self.function.exists()
    }
    fn answers(&self) -> bool {
        self.function.answers()
    }
    fn driver(&self) -> Option<String> {
        self.function.driver()
    }
    fn state(&self) -> Option<State> {
        endpoint::endpoint(&self.function).map(|info| info.state)
    }
    fn reset_methods(&self) -> Vec<String> {
        self.function.reset_methods()
    }
    fn reset(&self) -> io::Result<()> {
        self.function.reset()
    }
    fn remove(&self) -> io::Result<()> {
        self.function.remove()
    }
    fn rescan(&self) -> io::Result<()> {
        self.sysfs.rescan()
    }
    fn bind(&self, driver: &str) -> io::Result<()> {
        self.function.bind(driver)
    }
    fn verify(&self) -> Result<String, String> {
        endpoint::tested(&self.function)
    }
    fn file(&self, action: &str) -> String {
        match action {
            "rescan" => self.sysfs.rescan_file().display().to_string(),
            "rebind" => format!("{} and drivers_probe", self.function.file("driver_override").display()),
            other => self.function.file(other).display().to_string(),
        }
    }
}

/// How the sequence is run.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Only say what would be done.
    pub dry_run: bool,
    /// The longest that the kernel's own recovery, and the function's return, are waited for.
    pub patience: Duration,
}

struct Sequence<'a> {
    bench: &'a dyn Bench,
    options: Options,
    /// The driver that is to have it in the end.
    driver: String,
    steps: Vec<Step>,
    tell: &'a mut dyn FnMut(&Step),
}

/// Runs the sequence; `tell` hears of each step as it ends. Says whether the last test passed (in a dry run: the first).
pub fn heal(bench: &dyn Bench, options: Options, tell: &mut dyn FnMut(&Step)) -> (Vec<Step>, bool) {
    let driver = bench.driver().unwrap_or_else(|| DRIVER.into());
    let mut sequence = Sequence { bench, options, driver, steps: Vec::new(), tell };
    let healthy = if options.dry_run { sequence.plan() } else { sequence.run() };
    (sequence.steps, healthy)
}

impl Sequence<'_> {
    fn add(&mut self, step: &'static str, outcome: Outcome, text: impl Into<String>, since: Instant) {
        let step = Step { step, outcome, text: text.into(), seconds: since.elapsed().as_secs_f64() };
        (self.tell)(&step);
        self.steps.push(step);
    }

    fn plan(&mut self) -> bool {
        let now = Instant::now();
        let healthy = self.verify();
        let when = "if the test before it fails: ";
        match self.bench.state() {
            Some(State::Recovering) => {
                let text = format!("wait up to {:?} for the kernel's recovery to end", self.options.patience);
                self.add("wait", Outcome::Planned, text, now);
            }
            _ => self.add("wait", Outcome::Skipped, "no recovery is under way", now),
        }
        match self.why_no_reset() {
            Some(why) => self.add("reset", Outcome::Skipped, why, now),
            None => {
                let methods = self.bench.reset_methods().join(", ");
                self.add("reset", Outcome::Planned, format!("{when}write 1 to {} ({methods})", self.bench.file("reset")), now);
            }
        }
        if self.bench.exists() {
            self.add("remove", Outcome::Planned, format!("{when}write 1 to {}", self.bench.file("remove")), now);
        } else {
            self.add("remove", Outcome::Skipped, "the bus does not have it", now);
        }
        self.add("rescan", Outcome::Planned, format!("{when}write 1 to {}", self.bench.file("rescan")), now);
        let rebind = format!("{when}if no driver takes it, write {} to {}", self.driver, self.bench.file("rebind"));
        self.add("rebind", Outcome::Planned, rebind, now);
        let verify = "after each: does it answer, has a driver it, does it interrupt and copy";
        self.add("verify", Outcome::Planned, verify, now);
        healthy
    }

    fn run(&mut self) -> bool {
        self.wait();
        if self.verify() {
            return true;
        }
        if self.reset() && self.verify() {
            return true;
        }
        self.remove();
        if !self.rescan() {
            return false;
        }
        self.rebind();
        self.verify()
    }

    fn wait(&mut self) {
        let begun = Instant::now();
        if self.bench.state() != Some(State::Recovering) {
            return self.add("wait", Outcome::Skipped, "no recovery is under way", begun);
        }
        let over = self.until(|bench| bench.state() != Some(State::Recovering));
        let state = self.bench.state().map_or_else(|| "not listed by the module".to_owned(), |state| state.to_string());
        match over {
            true => self.add("wait", Outcome::Done, format!("the kernel's recovery ended; it is {state}"), begun),
            false => self.add("wait", Outcome::Failed, format!("still {state} after {:?}", self.options.patience), begun),
        }
    }

    fn why_no_reset(&self) -> Option<&'static str> {
        if !self.bench.exists() {
            Some("the bus does not have it")
        } else if !self.bench.answers() {
            Some("it does not answer, so a reset would not reach it")
        } else if self.bench.reset_methods().is_empty() {
            Some("the kernel knows no way to reset it")
        } else {
            None
        }
    }

    fn reset(&mut self) -> bool {
        let begun = Instant::now();
        if let Some(why) = self.why_no_reset() {
            self.add("reset", Outcome::Skipped, why, begun);
            return false;
        }
        match self.bench.reset() {
            Ok(()) => {
                // The module tells of the new life a moment later.
                self.until(|bench| bench.state() != Some(State::Recovering));
                self.add("reset", Outcome::Done, "the kernel has reset it", begun);
                true
            }
            Err(error) => {
                self.add("reset", Outcome::Failed, error.to_string(), begun);
                false
            }
        }
    }

    fn remove(&mut self) {
        let begun = Instant::now();
        if !self.bench.exists() {
            return self.add("remove", Outcome::Skipped, "the bus does not have it", begun);
        }
        match self.bench.remove() {
            Ok(()) if self.until(|bench| !bench.exists()) => self.add("remove", Outcome::Done, "the bus has let go of it", begun),
            Ok(()) => self.add("remove", Outcome::Failed, "it is still there", begun),
            Err(error) => self.add("remove", Outcome::Failed, error.to_string(), begun),
        }
    }

    fn rescan(&mut self) -> bool {
        let begun = Instant::now();
        if let Err(error) = self.bench.rescan() {
            self.add("rescan", Outcome::Failed, error.to_string(), begun);
            return false;
        }
        if self.until(|bench| bench.exists()) {
            self.add("rescan", Outcome::Done, "the bus has found it", begun);
            return true;
        }
        let text = "the bus does not find it; switch its slot off and on, or look at the card";
        self.add("rescan", Outcome::Failed, text, begun);
        false
    }

    fn rebind(&mut self) {
        let begun = Instant::now();
        if let Some(driver) = self.bench.driver() {
            return self.add("rebind", Outcome::Skipped, format!("the driver {driver} has taken it"), begun);
        }
        let driver = self.driver.clone();
        match self.bench.bind(&driver) {
            Ok(()) if self.bench.driver().is_some() => {
                self.add("rebind", Outcome::Done, format!("the driver {driver} has it"), begun);
            }
            Ok(()) => {
                let text = format!("the driver {driver} did not take it; is it loaded? dmesg says why it refused");
                self.add("rebind", Outcome::Failed, text, begun);
            }
            Err(error) => self.add("rebind", Outcome::Failed, error.to_string(), begun),
        }
    }

    fn verify(&mut self) -> bool {
        let begun = Instant::now();
        match self.bench.verify() {
            Ok(text) => {
                self.add("verify", Outcome::Done, text, begun);
                true
            }
            Err(text) => {
                self.add("verify", Outcome::Failed, text, begun);
                false
            }
        }
    }

    fn until(&self, mut what: impl FnMut(&dyn Bench) -> bool) -> bool {
        let end = Instant::now() + self.options.patience;
        loop {
            if what(self.bench) {
                return true;
            }
            if Instant::now() >= end {
                return false;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    /// A function that works after this was done to it.
    struct Patient {
        cure: &'static str,
        there: Cell<bool>,
        answers: bool,
        driver: Cell<bool>,
        recovering: Cell<u32>,
        works: Cell<bool>,
        done: RefCell<Vec<String>>,
    }

    impl Patient {
        fn new(cure: &'static str) -> Self {
            Self {
                cure,
                there: Cell::new(true),
                answers: true,
                driver: Cell::new(true),
                recovering: Cell::new(0),
                works: Cell::new(false),
                done: RefCell::default(),
            }
        }
        fn did(&self, what: &str) -> io::Result<()> {
            self.done.borrow_mut().push(what.into());
            if what.starts_with(self.cure) {
                self.works.set(true);
            }
            Ok(())
        }
    }

    impl Bench for Patient {
        fn exists(&self) -> bool {
            self.there.get()
        }
        fn answers(&self) -> bool {
            self.answers
        }
        fn driver(&self) -> Option<String> {
            self.driver.get().then(|| "pcieipc".into())
        }
        fn state(&self) -> Option<State> {
            let left = self.recovering.get();
            self.recovering.set(left.saturating_sub(1));
            Some(if left > 0 { State::Recovering } else { State::Live })
        }
        fn reset_methods(&self) -> Vec<String> {
            vec!["flr".into()]
        }
        fn reset(&self) -> io::Result<()> {
            self.did("reset")
        }
        fn remove(&self) -> io::Result<()> {
            self.there.set(false);
            self.driver.set(false);
            self.did("remove")
        }
        fn rescan(&self) -> io::Result<()> {
            self.there.set(self.cure != "nothing");
            self.did("rescan")
        }
        fn bind(&self, driver: &str) -> io::Result<()> {
            self.driver.set(true);
            self.did(&format!("bind {driver}"))
        }
        fn verify(&self) -> Result<String, String> {
            if self.works.get() { Ok("works".into()) } else { Err("does not".into()) }
        }
        fn file(&self, action: &str) -> String {
            format!("/sys/{action}")
        }
    }

    fn healed(patient: &Patient, dry_run: bool) -> (Vec<(&'static str, Outcome)>, bool) {
        let mut told = 0;
        let options = Options { dry_run, patience: Duration::from_millis(50) };
        let (steps, healthy) = heal(patient, options, &mut |_| told += 1);
        assert_eq!(told, steps.len());
        (steps.iter().map(|step| (step.step, step.outcome)).collect(), healthy)
    }

    #[test]
    fn one_that_works_is_left_alone() {
        let patient = Patient::new("none");
        patient.works.set(true);
        assert_eq!(healed(&patient, false), (vec![("wait", Outcome::Skipped), ("verify", Outcome::Done)], true));
        assert!(patient.done.borrow().is_empty());
    }

    #[test]
    fn a_recovery_that_is_under_way_is_waited_for() {
        let patient = Patient::new("none");
        patient.works.set(true);
        patient.recovering.set(3);
        assert_eq!(healed(&patient, false), (vec![("wait", Outcome::Done), ("verify", Outcome::Done)], true));
    }

    #[test]
    fn the_mildest_remedy_that_helps_is_the_last_one() {
        let patient = Patient::new("reset");
        assert!(healed(&patient, false).1);
        assert_eq!(*patient.done.borrow(), ["reset"]);

        let patient = Patient::new("bind");
        let (steps, healthy) = healed(&patient, false);
        assert!(healthy);
        assert_eq!(*patient.done.borrow(), ["reset", "remove", "rescan", "bind pcieipc"]);
        assert_eq!(steps.last(), Some(&("verify", Outcome::Done)));
    }

    #[test]
    fn one_that_does_not_answer_is_not_reset() {
        let patient = Patient { answers: false, ..Patient::new("bind") };
        let (steps, _) = healed(&patient, false);
        assert!(steps.contains(&("reset", Outcome::Skipped)));
        assert_eq!(*patient.done.borrow(), ["remove", "rescan", "bind pcieipc"]);
    }

    #[test]
    fn one_that_does_not_come_back_is_not_healed() {
        let patient = Patient::new("nothing");
        let (steps, healthy) = healed(&patient, false);
        assert!(!healthy);
        assert_eq!(steps.last(), Some(&("rescan", Outcome::Failed)));
    }

    #[test]
    fn a_dry_run_names_every_step_and_does_none() {
        let patient = Patient::new("reset");
        let (steps, healthy) = healed(&patient, true);
        assert!(!healthy && patient.done.borrow().is_empty());
        let names: Vec<_> = steps.iter().map(|(step, _)| *step).collect();
        assert_eq!(names, ["verify", "wait", "reset", "remove", "rescan", "rebind", "verify"]);
    }
}
