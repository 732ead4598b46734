// SPDX-License-Identifier: MIT OR Apache-2.0
//! AER: errors that were counted, errors that rise, and hosts that do not count.

use super::{
    case::{Look, file, register},
    finding::{Finding, Report, Severity},
};
use crate::topology::{
    Function, Kind, Reach, Topology,
    aer::{self, Counters, Layer, Severity as Errors},
};

/// Correctable errors a second from which on a link loses visible time to repeats.
const STORM: f64 = 100.0;

pub(super) fn check(case: &Look<'_>, report: &mut Report) {
    for (index, function) in case.tree().functions.iter().enumerate() {
        if function.aer.is_some() && case.leads_to_one(index) {
            counters(case, function, report);
        }
    }
    reporting(case, report);
}

/// Errors of one function with the time in which they came.
struct Rise {
    added: Counters,
    seconds: Option<f64>,
    how: String,
}

fn rise(case: &Look<'_>, function: &Function, now: &Counters) -> Option<Rise> {
    let of = |tree: &Topology| tree.find(function.address).and_then(|f| f.aer.clone());
    if let Some((later, seconds)) = case.later {
        let added = of(later)?.since(now);
        if added != Counters::default() {
            return Some(Rise { added, seconds: Some(seconds), how: format!("within {seconds:.0} s") });
        }
    }
    let before = case.since?;
    let seconds = match (before.time(), case.now.time()) {
        (Some(a), Some(b)) if b > a => Some((b - a) as f64),
        _ => None,
    };
    // A function that was not there before starts from zero.
    let added = now.since(&of(&before.tree).unwrap_or_default());
    (added != Counters::default()).then(|| Rise { added, seconds, how: "since the earlier snapshot".into() })
}

fn counters(case: &Look<'_>, function: &Function, report: &mut Report) {
    let Some(now) = &function.aer else { return };
    let rise = rise(case, function, now);
    for (severity, name) in Errors::FILES {
        let total = now.of(severity);
        let added = rise.as_ref().map(|r| r.added.of(severity)).filter(|a| !a.is_empty());
        // With an earlier snapshot at hand, old errors are old news.
        if total.is_empty() && added.is_none() || added.is_none() && case.since.is_some() {
            continue;
        }
        let counts = added.unwrap_or(total);
        let layer = aer::likely_layer(counts);
        let sum = counts.values().fold(0u64, |s, c| s.saturating_add(*c));
        let rate = added.and(rise.as_ref()).and_then(|r| Some(sum as f64 / r.seconds.filter(|s| *s > 0.0)?));
        let rising = added.is_some();
        let (id, grade) = match severity {
            Errors::Correctable if rate.is_some_and(|r| r >= STORM) => ("aer-correctable", Severity::Error),
            Errors::Correctable if rising => ("aer-correctable", Severity::Warning),
            Errors::Correctable => ("aer-correctable", Severity::Info),
            Errors::NonFatal if rising => ("aer-nonfatal", Severity::Error),
            Errors::NonFatal => ("aer-nonfatal", Severity::Warning),
            Errors::Fatal => ("aer-fatal", Severity::Error),
        };
        let when = match (&rise, rising, case.now.host.uptime) {
            (Some(rise), true, _) => format!("{}{}", rise.how, rate.map_or(String::new(), |r| format!(" ({r:.2} a second)"))),
            (_, _, Some(uptime)) => format!("since the device appeared, at most {:.1} hours ago", uptime / 3600.0),
            _ => "since the device appeared".into(),
        };
        report.add(
            Finding::new(
                id,
                grade,
                format!("{}: {sum} {} errors {when}, likely {}", function.label(), severity.name(), layer.name()),
            )
            .at(function.address)
            .seen(file(function, name), aer::describe(counts))
            .so(consequence(severity, layer))
            .mend(remedy(severity, layer)),
        );
    }
}

fn consequence(severity: Errors, layer: Layer) -> String {
    match severity {
        Errors::Correctable => "The hardware repeated what was damaged, so no data is wrong; each repeat takes time, and a rate that grows is how failing contacts announce themselves.".into(),
        Errors::NonFatal if layer == Layer::Transaction => "Requests were lost or refused. The card's driver may have dropped work, and an all-reduce that used the card must not be trusted without its own checks.".into(),
        Errors::NonFatal => "Transactions were lost while the link kept working.".into(),
        Errors::Fatal => "The link could not be trusted any more and was reset; everything in flight was lost.".into(),
    }
}

fn remedy(severity: Errors, layer: Layer) -> String {
    let first = match layer {
        Layer::Physical => {
            "Physical layer: reseat card, riser and cables, clean the contacts, check the power supply, try a lower generation in the firmware's setup to see whether it stops."
        }
        Layer::DataLink => {
            "Data link layer: the same causes as in the physical layer at high speed; also update the firmware of the card and of retimers, and switch ASPM off (`pcie_aspm=off`)."
        }
        Layer::Transaction => {
            "Transaction layer: look for the driver's messages at the same time; UnsupReq and CmpltTO point at a card that stopped answering, ACSViol and blocked packets at ACS or IOMMU settings, poisoned packets (TLP) at failing memory."
        }
        Layer::Unknown => "Look into the kernel log for the lines of AER at the same time; they name the packet.",
    };
    if severity == Errors::Correctable {
        first.into()
    } else {
        format!(
            "{first} Run `pcieipc doctor` again after the next training step; errors that go on mean that the card must leave the job."
        )
    }
}

/// Whether errors would be seen at all.
fn reporting(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let host = &case.now.host;
    let cards = case.peers();
    let root_of = |index: usize| tree.ancestors(index).last().filter(|i| tree.functions[*i].kind == Kind::RootPort);
    let readable = |i: usize| tree.functions[i].reach == Reach::Full;
    // Counters are shown to everybody, the capability to root alone.
    let has_aer = |f: &Function| f.capabilities.aer.is_some() || f.aer.is_some();
    let blind: Vec<&Function> = cards
        .iter()
        .flat_map(|i| [Some(*i), root_of(*i)])
        .flatten()
        .filter(|i| readable(*i))
        .map(|i| &tree.functions[i])
        .filter(|f| f.capabilities.express.is_some() && f.capabilities.aer.is_none() && f.physical_function.is_none())
        .collect();
    if !blind.is_empty() {
        let mut addresses: Vec<_> = blind.iter().map(|f| f.address).collect();
        addresses.sort_unstable();
        addresses.dedup();
        let names = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        report.add(
            Finding::new("aer-absent", Severity::Info, format!("{names} can not report errors (no AER)"))
                .at_all(addresses)
                .seen(register(blind[0], "extended capability 0001"), "absent")
                .so("Damaged or lost packets of these functions are neither counted nor reported; a failing link shows only as slowness.")
                .mend("Nothing to set: the hardware or the virtual machine does not offer it. Rely on link speed, width and checked mode."),
        );
    }
    let roots: Vec<usize> = cards.iter().filter_map(|i| root_of(*i)).filter(|i| has_aer(&tree.functions[*i])).collect();
    if roots.is_empty() {
        return;
    }
    let refused = host.log.iter().flatten().find(|l| {
        l.text.contains("_OSC")
            && l.text.contains("AER")
            && !l.text.contains("OS supports")
            && (l.text.contains("not support") || l.text.contains("platform does not") || l.text.contains("disabl"))
    });
    let off = host
        .command_line
        .split_whitespace()
        .find(|p| matches!(*p, "pcie_ports=compat") || p.starts_with("pci=") && p.split(['=', ',']).any(|o| o == "noaer"));
    let known = !host.services.is_empty() || refused.is_some() || off.is_some();
    if !known {
        report.unchecked("aer-not-native", "the kernel's list of port services is not there");
        return;
    }
    if host.has_service("aer") && off.is_none() {
        return;
    }
    let mut finding = Finding::new("aer-not-native", Severity::Warning, "the kernel does not own error reporting (AER); the firmware may, or nobody")
        .at_all(roots.iter().map(|i| tree.functions[*i].address).collect::<std::collections::BTreeSet<_>>())
        .seen("/sys/bus/pci_express/devices/*:pcie002/driver", "no port has the driver aer")
        .so("Errors are not counted in sysfs and no driver is asked to recover its card: the first fatal error takes the card away, or the host with it.")
        .mend("Set error handling to operating system (\"native\" or \"OS first\") in the firmware's setup, and remove `pci=noaer` and `pcie_ports=compat` from the kernel's command line.");
    if let Some(line) = refused {
        finding = finding.seen("kernel log", &line.text);
    }
    if let Some(parameter) = off {
        finding = finding.seen("/proc/cmdline", parameter);
    }
    report.add(finding);
}
