// SPDX-License-Identifier: MIT OR Apache-2.0
//! Results in what a test program printed: KTAP lines, TAP lines, and lines of Rust's own test runner.

use std::sync::LazyLock;

use regex::Regex;

/// How one test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It kept its promise.
    Passed,
    /// It did not.
    Failed,
    /// It could not run here.
    Skipped,
}

/// What was printed of tests.
#[derive(Clone, Debug, Default)]
pub struct Results {
    /// Each test with its outcome, in order.
    pub tests: Vec<(String, Outcome)>,
    /// What was promised and not kept by the report itself, such as a plan of four with three results.
    pub defects: Vec<String>,
}

static TAP: LazyLock<Regex> = LazyLock::new(|| constant(r"^(\s*)(not ok|ok)\s+(\d+)\s*(?:-\s*)?(.*)$"));
static PLAN: LazyLock<Regex> = LazyLock::new(|| constant(r"^(\s*)1\.\.(\d+)\s*(?:#.*)?$"));
static LIBTEST: LazyLock<Regex> = LazyLock::new(|| constant(r"^test (.+?)(?: - should panic)? \.\.\. (ok|FAILED|ignored.*)$"));
static LIBTEST_PLAN: LazyLock<Regex> = LazyLock::new(|| constant(r"^running (\d+) tests?$"));

fn constant(pattern: &str) -> Regex {
    Regex::new(pattern).unwrap_or_else(|error| unreachable!("the pattern is a constant: {error}"))
}

/// One level of nested KTAP: the results announced at this indentation, and those seen.
struct Level {
    indent: usize,
    planned: Option<usize>,
    seen: usize,
}

/// Reads the results in `output`. A KTAP result that sums up indented results above it is not counted itself.
#[must_use]
pub fn read(output: &str) -> Results {
    let mut results = Results::default();
    let mut levels: Vec<Level> = Vec::new();
    let mut libtest_planned = 0;
    let mut libtest_seen = 0;
    for line in output.lines().map(|line| line.trim_end_matches('\r')) {
        if let Some(found) = PLAN.captures(line) {
            let planned = found[2].parse().ok();
            let level = level_at(&mut levels, found[1].len(), &mut results.defects);
            level.planned = Some(level.planned.unwrap_or(0) + planned.unwrap_or(0));
        } else if let Some(found) = TAP.captures(line) {
            let indent = found[1].len();
            let has_children = levels.last().is_some_and(|level| level.indent > indent && level.seen > 0);
            let level = level_at(&mut levels, indent, &mut results.defects);
            level.seen += 1;
            if !has_children {
                let (name, directive) = found[4].split_once('#').unwrap_or((&found[4], ""));
                let skipped = directive.trim_start().to_ascii_uppercase().starts_with("SKIP");
                let outcome = match &found[2] {
                    "ok" if skipped => Outcome::Skipped,
                    "ok" => Outcome::Passed,
                    _ => Outcome::Failed,
                };
                results.tests.push((name.trim().to_owned(), outcome));
            }
        } else if let Some(found) = LIBTEST_PLAN.captures(line) {
            libtest_planned += found[1].parse::<usize>().unwrap_or(0);
        } else if let Some(found) = LIBTEST.captures(line) {
            libtest_seen += 1;
            let outcome = match &found[2] {
                "ok" => Outcome::Passed,
                "FAILED" => Outcome::Failed,
                _ => Outcome::Skipped,
            };
            results.tests.push((found[1].to_owned(), outcome));
        } else if line.trim_start().starts_with("Bail out!") {
            results.defects.push(line.trim().to_owned());
        }
    }
    while let Some(level) = levels.pop() {
        close(&level, &mut results.defects);
    }
    if libtest_seen < libtest_planned {
        results.defects.push(format!("{libtest_planned} tests were announced, {libtest_seen} reported"));
    }
    results
}

/// The level with this indentation; deeper ones end here.
fn level_at<'a>(levels: &'a mut Vec<Level>, indent: usize, defects: &mut Vec<String>) -> &'a mut Level {
    while levels.last().is_some_and(|level| level.indent > indent) {
        if let Some(level) = levels.pop() {
            close(&level, defects);
        }
    }
    if levels.last().is_none_or(|level| level.indent < indent) {
        levels.push(Level { indent, planned: None, seen: 0 });
    }
    let last = levels.len() - 1;
    &mut levels[last]
}

fn close(level: &Level, defects: &mut Vec<String>) {
    if let Some(planned) = level.planned {
        if planned != level.seen {
            defects.push(format!("a plan of {planned} tests, {} results", level.seen));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Outcome::{Failed, Passed, Skipped};

    fn outcomes(output: &str) -> Vec<Outcome> {
        let results = read(output);
        assert_eq!(results.defects, [""; 0]);
        results.tests.into_iter().map(|(_, outcome)| outcome).collect()
    }

    #[test]
    fn ktap_lines_are_read() {
        let output = "KTAP version 1\n1..3\nok 1 first\nnot ok 2 - second\r\nok 3 third # SKIP no device\n";
        assert_eq!(outcomes(output), [Passed, Failed, Skipped]);
        assert_eq!(read(output).tests[1].0, "second");
    }

    #[test]
    fn a_sum_over_subtests_is_not_counted_itself() {
        let output = "KTAP version 1\n1..2\n    KTAP version 1\n    1..2\n    ok 1 a\n    ok 2 b\nok 1 both\nok 2 alone\n";
        assert_eq!(outcomes(output), [Passed, Passed, Passed]);
    }

    #[test]
    fn two_reports_after_each_other_are_one_plan() {
        assert_eq!(outcomes("1..1\nok 1 a\n1..2\nok 1 b\nok 2 c\n"), [Passed; 3]);
    }

    #[test]
    fn a_missing_result_is_a_defect() {
        assert_eq!(read("1..3\nok 1 a\nok 2 b\n").defects.len(), 1);
        assert_eq!(read("running 2 tests\ntest a ... ok\n").defects.len(), 1);
    }

    #[test]
    fn rust_test_lines_are_read() {
        let output =
            "running 3 tests\ntest a::b ... ok\ntest c ... FAILED\ntest d ... ignored, needs a device\n\ntest result: x\n";
        assert_eq!(outcomes(output), [Passed, Failed, Skipped]);
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(text in "(?s).{0,400}") {
            let _ = read(&text);
        }
    }
}
