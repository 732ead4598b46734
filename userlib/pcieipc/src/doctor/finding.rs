// SPDX-License-Identifier: MIT OR Apache-2.0
//! A finding and the report that collects them.

use serde::Serialize;

use super::catalog;
use crate::topology::Address;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Good to know; nothing is wrong.
    Info,
    /// It costs speed, or will cause trouble.
    Warning,
    /// Something does not work, or data is at risk.
    Error,
}

impl Severity {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// A file and what it says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// The file, or the register inside it.
    pub file: String,
    /// The value found.
    pub value: String,
}

impl Evidence {
    /// A file and what it says.
    pub fn new(file: impl Into<String>, value: impl ToString) -> Self {
        Self { file: file.into(), value: value.to_string() }
    }
}

/// Commands that mend a finding, for a person to read and run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fix {
    /// What they do and what one must know before.
    pub note: String,
    /// Shell commands, run as root.
    pub commands: Vec<String>,
}

/// Something about the host that a person should know.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// Stable name, explained in `docs/doctor.md`.
    pub id: &'static str,
    /// How bad.
    pub severity: Severity,
    /// One line.
    pub title: String,
    /// The functions that it is about.
    pub at: Vec<Address>,
    /// How one knows.
    pub evidence: Vec<Evidence>,
    /// What it does, in plain words.
    pub consequence: String,
    /// What to do.
    pub remedy: String,
    /// Commands that do it, where commands can.
    pub fix: Option<Fix>,
}

impl Finding {
    /// A finding of the catalogue, to be filled in.
    pub fn new(id: &'static str, severity: Severity, title: impl Into<String>) -> Self {
        debug_assert!(catalog::entry(id).is_some(), "{id} is not in the catalogue");
        Self {
            id,
            severity,
            title: title.into(),
            at: Vec::new(),
            evidence: Vec::new(),
            consequence: String::new(),
            remedy: String::new(),
            fix: None,
        }
    }
    /// Adds a function that it is about.
    pub fn at(mut self, address: Address) -> Self {
        self.at.push(address);
        self
    }
    /// Adds functions that it is about.
    pub fn at_all(mut self, addresses: impl IntoIterator<Item = Address>) -> Self {
        self.at.extend(addresses);
        self
    }
    /// Adds evidence.
    pub fn seen(mut self, file: impl Into<String>, value: impl ToString) -> Self {
        self.evidence.push(Evidence::new(file, value));
        self
    }
    /// Says what it does.
    pub fn so(mut self, consequence: impl Into<String>) -> Self {
        self.consequence = consequence.into();
        self
    }
    /// Says what to do.
    pub fn mend(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }
    /// Adds commands that do it.
    pub fn fix(mut self, note: impl Into<String>, commands: impl IntoIterator<Item = String>) -> Self {
        self.fix = Some(Fix { note: note.into(), commands: commands.into_iter().collect() });
        self
    }
}

/// A rule that could not be applied.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Unchecked {
    /// The finding that might have been.
    pub id: &'static str,
    /// Why nobody knows.
    pub why: String,
}

/// All findings about a host.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// Worst first.
    pub findings: Vec<Finding>,
    /// What could not be looked at.
    pub unchecked: Vec<Unchecked>,
}

impl Report {
    /// Adds a finding.
    pub fn add(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    /// Says that a rule could not be applied.
    pub fn unchecked(&mut self, id: &'static str, why: impl Into<String>) {
        self.unchecked.push(Unchecked { id, why: why.into() });
    }

    /// The worst severity, if there is any finding.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|f| f.severity).max()
    }

    pub(super) fn finish(&mut self) {
        self.findings.sort_by(|a, b| b.severity.cmp(&a.severity).then(a.id.cmp(b.id)).then(a.at.cmp(&b.at)));
        self.unchecked.sort();
        self.unchecked.dedup();
    }
}
