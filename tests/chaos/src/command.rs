// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line: `chaos run` plays faults here, `chaos report` sums up what several machines came to.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Parser, Subcommand, ValueEnum};
use serde::Deserialize;

use crate::{
    figure,
    machine::Machine,
    play, rank,
    report::{self, LEFT, Left, RECORD, Report},
    run::{Conductor, Options},
    schedule::{self, Kind},
};

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    work: Work,
}

#[derive(Subcommand)]
enum Work {
    /// Play faults here, and judge
    Run {
        /// How many
        #[arg(long, default_value_t = 40)]
        faults: usize,
        /// Which
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// How many ranks
        #[arg(long, default_value_t = 4)]
        ranks: usize,
        /// Over shared memory instead of endpoints
        #[arg(long)]
        shm: bool,
        /// Endpoints move the records
        #[arg(long)]
        engine: bool,
        /// Only these kinds
        #[arg(long, value_delimiter = ',', value_parser = kind)]
        only: Vec<Kind>,
        /// None of these kinds
        #[arg(long, value_delimiter = ',', value_parser = kind)]
        without: Vec<Kind>,
        /// Two shares for these kinds
        #[arg(long, value_delimiter = ',', value_parser = kind)]
        twice: Vec<Kind>,
        /// How many failed recoveries, of a minute each
        #[arg(long, default_value_t = 0)]
        failed_recoveries: usize,
        /// Multiplies all bounds
        #[arg(long, default_value_t = 1)]
        patience: u32,
        /// Seconds after which a rank that does not answer hangs
        #[arg(long, default_value_t = 60)]
        bound: u64,
        /// The library lacks a defence (PCIEIPC_WITHOUT says which): succeed only if the run fails in this way
        #[arg(long)]
        control: Option<Control>,
    },
    /// Sum up what machines wrote into their folders
    Report {
        #[arg(long, default_value_t = 1)]
        seed: u64,
        #[arg(long, default_value = "stock")]
        kernel: String,
        /// Where report.json and report.svg go
        #[arg(long)]
        out: PathBuf,
        /// Folders with output.log and verdict.json
        folders: Vec<PathBuf>,
    },
    /// One rank; started by run
    #[command(hide = true)]
    Rank { member: usize },
    /// Does nothing for so many milliseconds; started by ranks
    #[command(hide = true)]
    Idle { ms: u64 },
    /// Takes memory for so many milliseconds; started by run
    #[command(hide = true)]
    Hog { ms: u64 },
}

/// How a run without a defence must fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Control {
    /// A rank does not answer.
    Hangs,
    /// A sum is wrong.
    Wrong,
    /// A fault ends otherwise than its kind must.
    Otherwise,
}

fn kind(name: &str) -> Result<Kind, String> {
    Kind::from_name(name).ok_or_else(|| {
        let names: Vec<&str> = Kind::ALL.into_iter().map(Kind::name).collect();
        format!("no such fault; there are {}", names.join(", "))
    })
}

/// Does what the arguments say.
pub fn main() -> ExitCode {
    match Arguments::parse().work {
        Work::Rank { member } => rank::serve(member),
        Work::Idle { ms } => std::thread::sleep(Duration::from_millis(ms)),
        Work::Hog { ms } => play::take_memory(Duration::from_millis(ms)),
        Work::Report { seed, kernel, out, folders } => return sum_up(seed, &kernel, &out, &folders),
        Work::Run { faults, seed, ranks, shm, engine, only, without, twice, failed_recoveries, patience, bound, control } => {
            let possible = |kind: &Kind| !shm || !kind.needs_endpoints();
            let wanted = |kind: &Kind| (only.is_empty() || only.contains(kind)) && !without.contains(kind);
            let mut kinds: Vec<Kind> = Kind::ALL.into_iter().filter(|kind| possible(kind) && wanted(kind)).collect();
            kinds.extend(twice.iter().filter(|kind| possible(kind)));
            let plan = schedule::plan(seed, faults, ranks, &kinds, failed_recoveries);
            let directory = std::env::temp_dir().join(format!("chaos-{}", std::process::id()));
            let options = Options { ranks, patience, engine, directory, bound: Duration::from_secs(bound) };
            return match conduct(seed, &plan, &kinds, shm, options) {
                Ok(report) if judged(&report, control) => ExitCode::SUCCESS,
                Ok(_) => ExitCode::FAILURE,
                Err(error) => {
                    println!("Bail out! {error}");
                    ExitCode::FAILURE
                }
            };
        }
    }
    ExitCode::SUCCESS
}

fn conduct(seed: u64, plan: &[schedule::Fault], kinds: &[Kind], shm: bool, options: Options) -> Result<Report, String> {
    println!("KTAP version 1\n# seed {seed}, {} faults, {} ranks", plan.len(), options.ranks);
    let (ranks, patience, directory) = (options.ranks, options.patience, options.directory.clone());
    let machine = if shm { Machine::without_endpoints() } else { Machine::with_endpoints(ranks, patience)? };
    if kinds.contains(&Kind::HotUnplug) {
        play::plug()?;
    }
    fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    let begun = std::time::Instant::now();
    let mut conductor = Conductor::new(options, machine).map_err(|error| format!("no ranks: {error}"))?;
    let mut lines = Vec::new();
    for fault in plan {
        let record = conductor.fault(*fault);
        let how = if record.is_good() { "" } else { ", NOT GOOD" };
        println!(
            "# fault {} {} of rank {}{}: told after {:?} ms, back after {:?} ms, one group {:?} ms after the return{how}",
            fault.number,
            fault.kind.name(),
            fault.victim,
            if fault.in_flight { ", in flight" } else { "" },
            record.detected_ns().map(|ns| ns / 1_000_000),
            record.recovered_ns().map(|ns| ns / 1_000_000),
            record.met_within_ns().map(|ns| ns / 1_000_000),
        );
        for what in record.hangs.iter().chain(&record.leaks).chain(&record.complaints) {
            println!("#   {what}");
        }
        let line = format!("{RECORD}{}", serde_json::to_string(&record).map_err(|error| error.to_string())?);
        println!("{line}");
        lines.push(line);
    }
    let left = Left { planned: plan.len(), leaks: conductor.finish() };
    let _ = fs::remove_dir_all(&directory);
    lines.push(format!("{LEFT}{}", serde_json::to_string(&left).map_err(|error| error.to_string())?));
    println!("{}", lines.last().map_or("", String::as_str));
    let mut of_this = report::read("here", &lines.join("\n"));
    of_this.seconds = begun.elapsed().as_secs_f64();
    let report = report::sum_up(seed, &kernel(), vec![of_this]);
    report.table().lines().for_each(|line| println!("# {line}"));
    Ok(report)
}

/// The release of the running kernel.
fn kernel() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").map_or_else(|_| "unknown".into(), |text| text.trim().to_owned())
}

/// Says what was kept; with a control, whether the run failed as it must.
fn judged(report: &Report, control: Option<Control>) -> bool {
    let without = std::env::var("PCIEIPC_WITHOUT").unwrap_or_default();
    let failed = |what: &str, count: u64| vec![(format!("a_run_without_{without}_has_{what}"), count > 0)];
    let kept = match control {
        None => promises(report),
        Some(Control::Hangs) => failed("hangs", report.hangs as u64),
        Some(Control::Wrong) => failed("wrong_sums", report.wrong),
        Some(Control::Otherwise) => failed("faults_that_end_otherwise", report.otherwise as u64),
    };
    println!("1..{}", kept.len());
    for (number, (name, good)) in (1..).zip(&kept) {
        println!("{} {number} {name}", if *good { "ok" } else { "not ok" });
    }
    kept.iter().all(|(_, good)| *good)
}

fn promises(report: &Report) -> Vec<(String, bool)> {
    let all = [
        ("every_result_of_every_rank_was_the_sum", report.wrong == 0 && report.compared > 0),
        ("nobody_hung", report.hangs == 0),
        ("pages_descriptors_and_locked_memory_were_given_back", report.leaks == 0),
        ("each_fault_ended_as_its_kind_must", report.otherwise == 0),
        ("all_faults_were_played", report.machines.iter().all(|machine| machine.played == machine.planned)),
    ];
    all.map(|(name, good)| (name.to_owned(), good)).to_vec()
}

/// What the rig says of a machine.
#[derive(Deserialize)]
struct Verdict {
    alarms: Vec<String>,
    complaints: Vec<String>,
    seconds: f64,
}

fn sum_up(seed: u64, kernel: &str, out: &Path, folders: &[PathBuf]) -> ExitCode {
    let mut machines = Vec::new();
    for folder in folders {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let output = fs::read_to_string(folder.join("output.log")).unwrap_or_default();
        let mut machine = report::read(&name, &output);
        let verdict = fs::read_to_string(folder.join("verdict.json")).ok().and_then(|text| serde_json::from_str(&text).ok());
        match verdict {
            Some(Verdict { alarms, complaints, seconds }) => {
                machine.kernel_reports = alarms;
                machine.complaints.extend(complaints);
                machine.seconds = seconds;
            }
            None => machine.complaints.push("the machine could not be run".into()),
        }
        machines.push(machine);
    }
    let report = report::sum_up(seed, kernel, machines);
    print!("{}", report.table());
    report.problems.iter().for_each(|problem| println!("{problem}"));
    let write = |name: &str, text: String| fs::write(out.join(name), text).map_err(|error| format!("{}: {error}", out.display()));
    let json = serde_json::to_string_pretty(&report).map_err(|error| error.to_string());
    let written = fs::create_dir_all(out)
        .map_err(|error| format!("{}: {error}", out.display()))
        .and(json)
        .and_then(|json| write("report.json", json))
        .and_then(|()| write("report.svg", figure::draw(&report)));
    if let Err(why) = written {
        eprintln!("chaos: {why}");
        return ExitCode::FAILURE;
    }
    if report.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
