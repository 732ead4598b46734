// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs tests in virtual machines and says what they came to. Run it through `scripts/in-env`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use rig::accelerator::Accelerator;
use rig::kernel::Kernel;
use rig::results::Outcome;
use rig::spec::Spec;
use rig::verdict::{Count, Verdict};
use rig::vm::{self, Place};
use rig::{Error, Result};

/// Boots the stock kernel with soft endpoints, runs tests in it, and judges.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    work: Work,
    /// The checkout
    #[arg(long, global = true, default_value = ".")]
    checkout: PathBuf,
    /// Where cargo put the programs for the guest, relative to the checkout
    #[arg(long, global = true, default_value = "target/cargo/release")]
    programs: PathBuf,
    /// Boot the kernel with all checks instead of the stock one
    #[arg(long, global = true)]
    debug_kernel: bool,
    /// Multiply all time limits
    #[arg(long, global = true, default_value_t = 1)]
    patience: u32,
    /// A variable of the guest's command's environment, NAME=VALUE
    #[arg(long = "env", global = true, value_name = "NAME=VALUE", value_parser = variable)]
    environment: Vec<(String, String)>,
    /// Seconds until a machine is stopped, instead of what its test says
    #[arg(long, global = true)]
    timeout: Option<u64>,
    /// Print what the command in the guest says as it comes; twice: what the kernel says too
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

#[derive(Subcommand)]
enum Work {
    /// Run tests: TOML files, or folders of them
    Test {
        #[arg(required = true)]
        tests: Vec<PathBuf>,
        /// Only tests whose name contains this
        #[arg(long)]
        only: Option<String>,
        /// Start no machine after so many seconds: those that are left are skipped
        #[arg(long, value_name = "SECONDS")]
        within: Option<u64>,
    },
    /// Say whether machines run by KVM or by translation here
    Accelerator,
}

/// A name of letters, and a value that a shell takes as it is in single quotes.
fn variable(text: &str) -> std::result::Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value))
            if !name.is_empty() && name.chars().all(|c| c.is_ascii_alphabetic() || c == '_') && !value.contains('\'') =>
        {
            Ok((name.to_owned(), value.to_owned()))
        }
        _ => Err("a variable is NAME=VALUE, its name letters, its value without single quotes".into()),
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match work(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("rig: {error}");
            ExitCode::from(2)
        }
    }
}

fn work(arguments: &Arguments) -> Result<bool> {
    let at_checkout = |source| Error::File { path: arguments.checkout.clone(), source };
    let checkout = arguments.checkout.canonicalize().map_err(at_checkout)?;
    let kernel = Kernel::find(&checkout, arguments.debug_kernel)?;
    let accelerator = Accelerator::choose(&kernel)?;
    match &arguments.work {
        Work::Accelerator => {
            println!("{}", accelerator.name());
            Ok(true)
        }
        Work::Test { tests, only, within } => {
            let programs = checkout.join(&arguments.programs);
            let (patience, verbose) = (arguments.patience, arguments.verbose);
            let environment = arguments.environment.clone();
            let place = Place { checkout, programs, kernel, accelerator, patience, verbose, environment };
            let mut specs = read(tests, only.as_deref())?;
            for spec in &mut specs {
                spec.guest.timeout = arguments.timeout.unwrap_or(spec.guest.timeout);
            }
            let end = within.map(|seconds| Instant::now() + Duration::from_secs(seconds));
            Ok(run_all(&specs, &place, end))
        }
    }
}

fn read(tests: &[PathBuf], only: Option<&str>) -> Result<Vec<Spec>> {
    let mut files = Vec::new();
    for path in tests {
        if path.is_dir() {
            let entries = std::fs::read_dir(path).map_err(|source| Error::File { path: path.clone(), source })?;
            files.extend(entries.flatten().map(|entry| entry.path()).filter(|path| is_toml(path)));
        } else {
            files.push(path.clone());
        }
    }
    files.sort();
    let mut specs = files.iter().map(|path| Spec::read(path)).collect::<Result<Vec<_>>>()?;
    specs.retain(|spec| only.is_none_or(|only| spec.name.contains(only)));
    Ok(specs)
}

fn is_toml(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "toml")
}

fn run_all(specs: &[Spec], place: &Place, end: Option<Instant>) -> bool {
    let mut count = Count::default();
    for spec in specs {
        if end.is_some_and(|end| Instant::now() > end) {
            count += Count { skipped: 1, ..Count::default() };
            println!("vm {}: skipped: no time is left for it", spec.name);
            continue;
        }
        eprintln!("vm {} ...", spec.name);
        match vm::run(spec, place) {
            Ok(verdict) => {
                count += verdict.count();
                verdict.keep();
                report(&verdict, place);
            }
            Err(error) => {
                count += Count { failed: 1, ..Count::default() };
                println!("vm {}: could not be run: {error}", spec.name);
            }
        }
    }
    println!("{count}");
    count.failed == 0
}

fn report(verdict: &Verdict, place: &Place) {
    let name = &verdict.name;
    for (test, outcome) in &verdict.results.tests {
        let outcome = match outcome {
            Outcome::Passed => "ok",
            Outcome::Failed => "FAILED",
            Outcome::Skipped => "skipped",
        };
        println!("vm {name}: {test} ... {outcome}");
    }
    let complaints = verdict.complaints();
    for complaint in &complaints {
        println!("vm {name}: FAILED: {complaint}");
    }
    let took = verdict.took.as_secs_f64();
    println!("vm {name}: {} in {took:.1} s ({})", verdict.count(), place.accelerator.name());
    if verdict.count().failed > 0 {
        println!("vm {name}: its logs are in {}; what failed, and the command's last words:", verdict.folder.display());
        let output = std::fs::read(verdict.folder.join("output.log")).unwrap_or_default();
        for line in words(&String::from_utf8_lossy(&output)) {
            println!("vm {name} | {line}");
        }
    }
}

/// How much of a failed command's output the report repeats: where only the report is kept, this is all there is to judge by.
const LAST_WORDS: usize = 25;
/// How much of what a test said after it failed, and of how many tests.
const WORDS_OF_A_TEST: usize = 12;
const TESTS_WITH_WORDS: usize = 4;

/// The first tests that failed with what they said of it, then the last lines.
fn words(output: &str) -> Vec<&str> {
    let lines: Vec<_> = output.lines().map(str::trim_end).collect();
    let end = lines.len().saturating_sub(LAST_WORDS);
    let failed = (0..end).filter(|&at| lines[at].starts_with("not ok")).take(TESTS_WITH_WORDS);
    let mut words: Vec<_> = failed
        .flat_map(|at| {
            let said = lines[at + 1..end].iter().take_while(|line| line.starts_with('#')).take(WORDS_OF_A_TEST);
            std::iter::once(&lines[at]).chain(said).copied()
        })
        .collect();
    words.extend(&lines[end..]);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_failed_long_ago_is_repeated_with_what_it_said() {
        let mut output = String::from("ok 1 first\nnot ok 2 second\n# dmesg: nothing\n# watch: nothing\nok 3 third\r\n");
        let last: Vec<_> = (0..LAST_WORDS).map(|line| format!("ok {}", line + 4)).collect();
        output += &last.join("\n");
        let words = words(&output);
        assert_eq!(words[..3], ["not ok 2 second", "# dmesg: nothing", "# watch: nothing"]);
        assert_eq!(words[3..], last);
    }

    #[test]
    fn words_are_few_however_much_is_said() {
        let failure = "not ok\n".to_owned() + &"# word\n".repeat(100);
        let all = words(&failure.repeat(100)).len();
        assert_eq!(all, TESTS_WITH_WORDS * (1 + WORDS_OF_A_TEST) + LAST_WORDS);
        assert_eq!(words("").len(), 0);
    }
}
