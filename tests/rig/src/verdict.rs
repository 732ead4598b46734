// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a run in a virtual machine came to.

use std::fmt;
use std::ops::AddAssign;
use std::path::PathBuf;
use std::time::Duration;

use crate::results::{Outcome, Results};

/// How many tests passed, failed and were skipped; shown as the line that closes every test run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Kept promises.
    pub passed: usize,
    /// Broken ones.
    pub failed: usize,
    /// Those that could not be tried here.
    pub skipped: usize,
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Count) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The test's name.
    pub name: String,
    /// What the guest's program printed of tests.
    pub results: Results,
    /// The command's exit code; none if the guest never told it.
    pub code: Option<i32>,
    /// Whether the machine was stopped because it took too long.
    pub timed_out: bool,
    /// Lines of the kernel's log that a healthy kernel never says.
    pub alarms: Vec<String>,
    /// What was not as it must be when the machine was off.
    pub after: Vec<String>,
    /// How long the machine ran.
    pub took: Duration,
    /// Where its logs are.
    pub folder: PathBuf,
}

impl Verdict {
    /// Leaves `verdict.json` beside the logs, for whoever sums up several runs: what the kernel said, and what else was wrong.
    pub fn keep(&self) {
        let verdict = serde_json::json!({
            "alarms": self.alarms, "complaints": self.defects(), "seconds": self.took.as_secs_f64(), "code": self.code,
        });
        // What cannot be kept is missed by who looks for it.
        let _ = std::fs::write(self.folder.join("verdict.json"), verdict.to_string());
    }

    /// Why the run as a whole failed, apart from the results of its tests.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        let mut complaints = self.defects();
        if let Some(first) = self.alarms.first() {
            complaints.push(format!("the kernel complained, {} lines, first: {first}", self.alarms.len()));
        }
        complaints
    }

    /// What was wrong with the run itself.
    fn defects(&self) -> Vec<String> {
        let mut complaints = self.results.defects.clone();
        complaints.extend(self.after.iter().cloned());
        match self.code {
            _ if self.timed_out => complaints.push(format!("stopped after {} s: it took too long", self.took.as_secs())),
            None => complaints.push("the machine ended before its command did".into()),
            Some(0) => {}
            // A test program that reports a failure also exits with one.
            Some(_) if self.results.tests.iter().any(|(_, outcome)| *outcome == Outcome::Failed) => {}
            Some(code) => complaints.push(format!("the command ended with exit code {code}")),
        }
        complaints
    }

    /// The tests counted; a run whose program reports no single tests counts as one.
    #[must_use]
    pub fn count(&self) -> Count {
        let mut count = Count::default();
        for (_, outcome) in &self.results.tests {
            match outcome {
                Outcome::Passed => count.passed += 1,
                Outcome::Failed => count.failed += 1,
                Outcome::Skipped => count.skipped += 1,
            }
        }
        if !self.complaints().is_empty() {
            count.failed += 1;
        } else if self.results.tests.is_empty() {
            count.passed += 1;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(output: &str, code: Option<i32>, alarms: &[&str]) -> Verdict {
        Verdict {
            name: "name".into(),
            results: crate::results::read(output),
            code,
            timed_out: false,
            alarms: alarms.iter().map(|&line| line.to_owned()).collect(),
            after: Vec::new(),
            took: Duration::ZERO,
            folder: PathBuf::new(),
        }
    }

    #[test]
    fn a_kernel_alarm_fails_a_run_whose_tests_all_passed() {
        let count = verdict("ok 1 a\n", Some(0), &["BUG: x"]).count();
        assert_eq!(count, Count { passed: 1, failed: 1, skipped: 0 });
    }

    #[test]
    fn a_machine_that_dies_before_its_command_ends_has_failed() {
        assert_eq!(verdict("ok 1 a\n", None, &[]).count().failed, 1);
    }

    #[test]
    fn a_failed_test_is_counted_once() {
        assert_eq!(verdict("not ok 1 a\n", Some(1), &[]).count(), Count { passed: 0, failed: 1, skipped: 0 });
    }

    #[test]
    fn a_command_without_reported_tests_is_one_test() {
        assert_eq!(verdict("hello\n", Some(0), &[]).count().passed, 1);
        assert_eq!(verdict("hello\n", Some(3), &[]).count().failed, 1);
    }
}
