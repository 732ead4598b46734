// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc doctor`: findings with evidence, consequence and remedy.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use pcieipc::{
    doctor::{self, Case, Finding, Moment, Report, Severity},
    topology::{Address, Note, Topology},
};

use crate::{
    failure::Failure,
    host_source::{HostSource, load},
};

/// Notes that are listed in the text.
const SHOWN_NOTES: usize = 10;

/// Look for what makes this host's PCIe tree slow or unreliable, and say what to do
#[derive(clap::Args)]
#[command(
    after_help = "Exit codes: 0 nothing worse than information; 3 warnings; 4 errors; 1 the run failed; 2 bad use or bad input.\nEvery finding is explained in docs/doctor.md."
)]
pub struct Doctor {
    #[command(flatten)]
    source: HostSource,
    /// One JSON object on standard output
    #[arg(long)]
    pub json: bool,
    /// Print a shell script with the remedies, all commented out; nothing is run
    #[arg(long, conflicts_with = "json")]
    fix_script: bool,
    /// Compare with an earlier snapshot of this host
    #[arg(long, value_name = "FILE")]
    since: Option<PathBuf>,
    /// Watch counters and links for this long, in seconds; 0 looks once
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    sample: f64,
    /// Functions that exchange data with each other; all accelerators if not given
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    peers: Vec<Address>,
    /// Show only findings of this severity and worse: info, warning or error. The exit code goes by all of them
    #[arg(long, value_name = "SEVERITY", default_value = "info", value_parser = severity)]
    at_least: Severity,
}

fn severity(text: &str) -> Result<Severity, String> {
    let all = [Severity::Info, Severity::Warning, Severity::Error];
    all.into_iter().find(|s| s.name() == text).ok_or_else(|| "it is info, warning or error".to_owned())
}

impl Doctor {
    pub fn run(self) -> Result<ExitCode, Failure> {
        if !(0.0..=3600.0).contains(&self.sample) {
            return Err(Failure::Use("--sample takes 0 to 3600 seconds".into()));
        }
        let source = self.source.open()?;
        let now = Moment::read(source.as_ref());
        if let Some(lost) = self.peers.iter().find(|a| now.tree.position(**a).is_none()) {
            return Err(Failure::Use(format!("there is no function {lost}; `pcieipc topo` shows those that are there")));
        }
        let since = self.since.as_deref().map(load).transpose()?.map(|archive| Moment::read(&archive));
        let later = match self.source.later(self.sample)? {
            Some((later, seconds)) => {
                if self.source.is_live() {
                    std::thread::sleep(Duration::from_secs_f64(seconds));
                }
                Some((Topology::read(later.as_ref()), seconds))
            }
            None => None,
        };
        let case = Case {
            now: &now,
            later: later.as_ref().map(|(tree, seconds)| (tree, *seconds)),
            since: since.as_ref(),
            peers: &self.peers,
        };
        let mut report = doctor::examine(&case);
        let worst = report.worst();
        report.findings.retain(|f| f.severity >= self.at_least);
        for missing in now.tree.missing.iter().filter(|_| !self.json) {
            eprintln!("not known from this source, so not checked: {missing}");
        }
        if self.json {
            let value = serde_json::json!({
                "ok": worst.is_none_or(|w| w < Severity::Warning),
                "worst": worst,
                "findings": report.findings,
                "unchecked": report.unchecked,
                "missing": now.tree.missing,
                "notes": notes(&now).collect::<Vec<_>>(),
            });
            println!("{}", serde_json::to_string_pretty(&value).map_err(|e| Failure::Run(e.to_string()))?);
        } else if self.fix_script {
            print!("{}", doctor::script(&report));
        } else {
            print!("{}", text(&report, &now));
        }
        Ok(ExitCode::from(match worst {
            None | Some(Severity::Info) => 0,
            Some(Severity::Warning) => 3,
            Some(Severity::Error) => 4,
        }))
    }
}

fn text(report: &Report, now: &Moment) -> String {
    let mut out = String::new();
    for finding in &report.findings {
        out.push_str(&one(finding));
        out.push('\n');
    }
    if !report.unchecked.is_empty() {
        out.push_str("Not checked:\n");
        let mut reasons = std::collections::BTreeMap::<&str, Vec<&str>>::new();
        for unchecked in &report.unchecked {
            reasons.entry(&unchecked.why).or_default().push(unchecked.id);
        }
        for (why, ids) in reasons {
            out.push_str(&format!("  {}: {why}\n", ids.join(", ")));
        }
        out.push('\n');
    }
    let count = |severity| report.findings.iter().filter(|f| f.severity == severity).count();
    let (errors, warnings, infos) = (count(Severity::Error), count(Severity::Warning), count(Severity::Info));
    let functions = now.tree.functions.len();
    let notes: Vec<&Note> = notes(now).collect();
    if !notes.is_empty() {
        out.push_str("Notes about what could not be read or made no sense:\n");
        for note in notes.iter().take(SHOWN_NOTES) {
            out.push_str(&format!("  /{}: {}\n", note.path, note.problem));
        }
        if notes.len() > SHOWN_NOTES {
            out.push_str(&format!("  … and {} more (--json shows all)\n", notes.len() - SHOWN_NOTES));
        }
        out.push('\n');
    }
    let count_of_notes = if notes.is_empty() { String::new() } else { format!(", {} notes", notes.len()) };
    out.push_str(&format!(
        "{functions} functions looked at: {errors} errors, {warnings} warnings, {infos} remarks{count_of_notes}.\n"
    ));
    out
}

fn notes(now: &Moment) -> impl Iterator<Item = &Note> {
    now.tree.notes.iter().chain(&now.host.notes)
}

fn one(finding: &Finding) -> String {
    let mut out = format!("{} [{}] {}\n", finding.severity.name().to_uppercase(), finding.id, finding.title);
    for evidence in &finding.evidence {
        out.push_str(&format!("    seen   {}: {}\n", evidence.file, evidence.value));
    }
    out.push_str(&format!("    so     {}\n", finding.consequence));
    out.push_str(&format!("    do     {}\n", finding.remedy));
    out
}
