// SPDX-License-Identifier: MIT OR Apache-2.0
//! AER counters, as the kernel keeps them in sysfs since the device appeared.

use std::collections::BTreeMap;

use serde::Serialize;

/// How bad an error is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The hardware repaired it.
    Correctable,
    /// A transaction was lost, the link works.
    NonFatal,
    /// The link can not be trusted any more.
    Fatal,
}

impl Severity {
    /// All of them with the name of the counter file.
    pub const FILES: [(Self, &'static str); 3] =
        [(Self::Correctable, "aer_dev_correctable"), (Self::NonFatal, "aer_dev_nonfatal"), (Self::Fatal, "aer_dev_fatal")];

    /// The name of its counter file in sysfs.
    pub fn file(self) -> &'static str {
        Self::FILES[self as usize].1
    }

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Correctable => "correctable",
            Self::NonFatal => "non-fatal",
            Self::Fatal => "fatal",
        }
    }
}

/// The layer of PCI Express in which an error kind arises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layer {
    /// Signals: contacts, cables, retimers, power.
    Physical,
    /// Packets between two ends of a link: checksums, acknowledgements.
    DataLink,
    /// Requests and completions: drivers, firmware, address translation.
    Transaction,
    /// Not said by the kind.
    Unknown,
}

impl Layer {
    /// The layer of a kind as sysfs names it.
    pub fn of(kind: &str) -> Self {
        match kind {
            "RxErr" | "SDES" => Self::Physical,
            "BadTLP" | "BadDLLP" | "Rollover" | "Timeout" | "DLP" => Self::DataLink,
            "TLP" | "FCP" | "CmpltTO" | "CmpltAbrt" | "UnxCmplt" | "RxOF" | "MalfTLP" | "ECRC" | "UnsupReq" | "ACSViol"
            | "BlockedTLP" | "AtomicOpBlocked" | "TLPBlockedErr" | "PoisonTLPBlocked" | "NonFatalErr" | "HeaderOF"
            | "DMWrReqBlocked" | "IDECheck" | "MisIDETLP" | "PCRC_CHECK" | "TLPXlatBlocked" => Self::Transaction,
            _ => Self::Unknown,
        }
    }

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Physical => "physical layer",
            Self::DataLink => "data link layer",
            Self::Transaction => "transaction layer",
            Self::Unknown => "unknown layer",
        }
    }
}

/// Counts by kind for each severity.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Repaired errors by kind; only kinds that occurred.
    pub correctable: BTreeMap<String, u64>,
    /// Lost transactions by kind.
    pub non_fatal: BTreeMap<String, u64>,
    /// Broken links by kind.
    pub fatal: BTreeMap<String, u64>,
}

impl Counters {
    /// The counts of one severity.
    pub fn of(&self, severity: Severity) -> &BTreeMap<String, u64> {
        match severity {
            Severity::Correctable => &self.correctable,
            Severity::NonFatal => &self.non_fatal,
            Severity::Fatal => &self.fatal,
        }
    }

    /// Replaces the counts of one severity.
    pub fn set(&mut self, severity: Severity, counts: BTreeMap<String, u64>) {
        match severity {
            Severity::Correctable => self.correctable = counts,
            Severity::NonFatal => self.non_fatal = counts,
            Severity::Fatal => self.fatal = counts,
        }
    }

    /// Sum of one severity.
    pub fn total(&self, severity: Severity) -> u64 {
        self.of(severity).values().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// What was added since `earlier`. A counter that went down belongs to a device that was re-created, and counts anew.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut added = Self::default();
        for (severity, _) in Severity::FILES {
            let before = earlier.of(severity);
            let less =
                |(kind, count): (&String, &u64)| kind != UNKNOWN && self.of(severity).get(kind).copied().unwrap_or(0) < *count;
            let restarted = before.iter().any(less);
            let counts = self.of(severity).iter().filter_map(|(kind, count)| {
                let base = if restarted { 0 } else { before.get(kind).copied().unwrap_or(0) };
                (*count > base).then(|| (kind.clone(), count - base))
            });
            added.set(severity, counts.collect());
        }
        added
    }
}

/// Errors that the kernel counted without their kind. When a fatal error has broken the link to an endpoint, the registers that hold the kind
/// can not be read, so all fatal errors of endpoints are such.
const UNKNOWN: &str = "Unknown";

/// Reads one counter file: lines of a kind and a number. Zeros and lines that are neither are left out. By how much the sum (`TOTAL_…`) is more
/// than all kinds together is what was counted without a kind; it can be less than that, since one error may be of several kinds.
pub fn parse(text: &str) -> BTreeMap<String, u64> {
    let (mut counts, mut total) = (BTreeMap::new(), 0u64);
    for line in text.lines() {
        let Some((kind, count)) = line.trim().rsplit_once(' ') else { continue };
        let Some(count) = count.parse::<u64>().ok().filter(|count| *count > 0 && plain(kind)) else { continue };
        if kind.starts_with("TOTAL_") {
            total = total.max(count);
        } else {
            counts.insert(kind.to_owned(), count);
        }
    }
    let known = counts.values().fold(0u64, |sum, count| sum.saturating_add(*count));
    if total > known {
        counts.insert(UNKNOWN.to_owned(), total - known);
    }
    counts
}

/// The first line that is neither a kind and a number nor empty.
pub(super) fn odd_line(text: &str) -> Option<&str> {
    text.lines().find(|line| {
        let counted = line.trim().rsplit_once(' ').is_some_and(|(kind, count)| plain(kind) && count.parse::<u64>().is_ok());
        !counted && !line.trim().is_empty()
    })
}

fn plain(kind: &str) -> bool {
    !kind.is_empty() && kind.len() <= 40 && kind.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Short text of counts, most first: `BadTLP 12, RxErr 3`.
pub fn describe(counts: &BTreeMap<String, u64>) -> String {
    let mut sorted: Vec<_> = counts.iter().collect();
    sorted.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
    sorted.iter().map(|(kind, count)| format!("{kind} {count}")).collect::<Vec<_>>().join(", ")
}

/// The layer in which most of the errors arose.
pub fn likely_layer(counts: &BTreeMap<String, u64>) -> Layer {
    let mut layers = BTreeMap::<Layer, u64>::new();
    for (kind, count) in counts {
        let sum = layers.entry(Layer::of(kind)).or_default();
        *sum = sum.saturating_add(*count);
    }
    layers.into_iter().max_by_key(|(layer, count)| (*count, *layer != Layer::Unknown)).map_or(Layer::Unknown, |(layer, _)| layer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_kept_by_kind_and_sums_are_not_counted_twice() {
        let counts = parse("RxErr 3\nBadTLP 12\nBadDLLP 0\nTOTAL_ERR_COR 15\n");
        assert_eq!(describe(&counts), "BadTLP 12, RxErr 3");
        assert_eq!(likely_layer(&counts), Layer::DataLink);
        assert!(parse("garbage\n\u{0}\u{0} 4\n 5\nRxErr -1\nRxErr 99999999999999999999").is_empty());
    }

    #[test]
    fn what_was_counted_without_a_kind_is_of_an_unknown_one() {
        // As the kernel has it after a fatal error of an endpoint.
        let counts = parse("Undefined 0\nDLP 0\nMalfTLP 0\nTOTAL_ERR_FATAL 2\n");
        assert_eq!(describe(&counts), "Unknown 2");
        let counters = |text| {
            let mut counters = Counters::default();
            counters.set(Severity::Fatal, parse(text));
            counters
        };
        // One error of two kinds hides one of none; that is no other device.
        let (before, now) = (counters("DLP 1\nTOTAL_ERR_FATAL 2\n"), counters("DLP 2\nMalfTLP 1\nTOTAL_ERR_FATAL 3\n"));
        assert_eq!(describe(&now.since(&before).fatal), "DLP 1, MalfTLP 1");
    }

    #[test]
    fn a_counter_that_went_down_counts_anew() {
        let counters = |n| {
            let mut c = Counters::default();
            c.set(Severity::Fatal, [("DLP".to_owned(), n)].into());
            c
        };
        assert_eq!(counters(9).since(&counters(4)).total(Severity::Fatal), 5);
        assert_eq!(counters(3).since(&counters(4)).total(Severity::Fatal), 3);
        assert_eq!(counters(4).since(&counters(4)), Counters::default());
    }
}
