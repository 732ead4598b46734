// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cards that are not where they should be: fallen off, contained, or never come up.

use std::collections::HashMap;

use super::{
    case::{Look, file, register},
    finding::{Finding, Report, Severity},
};
use crate::topology::{Address, Function, LogLine, Reach, Slot, Topology};

pub(super) fn check(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let slots: HashMap<&str, &Slot> = tree.slots.iter().map(|s| (s.address.as_str(), s)).collect();
    for function in &tree.functions {
        if function.reach == Reach::AllOnes {
            report.add(fallen_off(tree, function));
        }
        if let Some(dpc) = function.capabilities.dpc.filter(|d| d.triggered) {
            let reason = [
                "an uncorrectable error of its own",
                "a non-fatal error message from below",
                "a fatal error message from below",
                "a reason given elsewhere",
            ];
            report.add(
                Finding::new("dpc-triggered", Severity::Error, format!("{} has cut off what is below it (DPC)", function.label()))
                    .at(function.address)
                    .seen(register(function, "DpcSta"), format!("triggered by {}", reason[usize::from(dpc.reason & 3)]))
                    .so("The port has shut its link to contain an error: no card below answers until the port is released.")
                    .mend("The kernel releases the port by itself when it owns DPC; if the state stays, look for the cause in the kernel log, then remove and rescan what is below.")
                    .fix("Removes what is below the port and looks again.", remove_and_rescan(function)),
            );
        }
        empty_slot(&slots, function, report);
    }
    if let Some(log) = &case.now.host.log {
        driver_errors(tree, log, report);
    }
}

fn fallen_off(tree: &Topology, function: &Function) -> Finding {
    let mut finding = Finding::new("device-fallen-off", Severity::Error, format!("{} does not answer: it fell off the bus", function.label()))
        .at(function.address)
        .seen(file(function, "config"), "ids and class read ff")
        .so("Every access to the card returns ones. Jobs that use it hang or fail, its driver can not help it, and error recovery of its neighbours may be vetoed.")
        .mend("Look for power and heat first (a card that resets under load), then reset the slot by removing and rescanning; if it does not come back, switch the host off and on, and reseat the card.")
        .fix("Takes the card out of the kernel's list and looks for it again. Stop what uses it first.", remove_and_rescan(function));
    if let Some(parent) = function.parent.map(|p| &tree.functions[p]) {
        if let Some(link) = &parent.capabilities.link {
            let state = match (link.active, link.now) {
                (Some(false), _) => "down".to_owned(),
                (_, Some(now)) => format!("up, {now}"),
                _ => "unknown".to_owned(),
            };
            finding = finding.seen(register(parent, "LnkSta"), format!("link {state}"));
        }
    }
    finding
}

fn remove_and_rescan(function: &Function) -> Vec<String> {
    vec![format!("echo 1 > /{}/remove", function.path), "sleep 1".into(), "echo 1 > /sys/bus/pci/rescan".into()]
}

/// A card sits in the slot, but there is no function.
fn empty_slot(slots: &HashMap<&str, &Slot>, port: &Function, report: &mut Report) {
    if !port.children.is_empty() {
        return;
    }
    let below = port.buses.map(|(bus, _)| Address { bus, device: 0, function: 0, ..port.address });
    let by_kernel = below.and_then(|a| {
        let slot = a.to_string();
        slots.get(slot.strip_suffix(".0")?).copied()
    });
    let present =
        port.capabilities.slot.as_ref().is_some_and(|s| s.present) || by_kernel.is_some_and(|s| s.present == Some(true));
    if !present || port.capabilities.dpc.is_some_and(|d| d.triggered) {
        return;
    }
    let number = port.capabilities.slot.as_ref().map_or(0, |s| s.number);
    let powered = by_kernel.and_then(|s| s.powered);
    let active = port.capabilities.link.as_ref().and_then(|l| l.active);
    let severity = if powered == Some(false) { Severity::Info } else { Severity::Error };
    let why = match (powered, active) {
        (Some(false), _) => "its slot is switched off",
        (_, Some(true)) => "the link is up, but no function answered when the kernel looked",
        (_, Some(false)) => "the link does not come up",
        _ => "no function answered",
    };
    let mut finding = Finding::new("slot-without-function", severity, format!("a card sits in slot {number} below {}, but {why}", port.address))
        .at(port.address)
        .so("The card is not usable and takes part in nothing; a job that expects it starts with one rank less or not at all.")
        .mend("Rescan first. If that does not help: reseat the card, check its power cables, look in the kernel log for this port, try another slot.")
        .fix("Looks for new cards.", [match (by_kernel, powered) {
            (Some(slot), Some(false)) => format!("echo 1 > /sys/bus/pci/slots/{}/power", slot.name),
            _ => "echo 1 > /sys/bus/pci/rescan".into(),
        }]);
    if port.capabilities.slot.as_ref().is_some_and(|s| s.present) {
        finding = finding.seen(register(port, "SltSta"), "presence detected");
    }
    if let Some(slot) = by_kernel {
        finding = finding.seen(format!("/sys/bus/pci/slots/{}/adapter", slot.name), u8::from(slot.present == Some(true)));
    }
    if let Some(active) = active {
        finding = finding.seen(register(port, "LnkSta"), if active { "link active" } else { "link down" });
    }
    report.add(finding);
}

/// Words of drivers and of the PCI core that speak of a card in trouble, with what they mean.
const TROUBLE: &[(&str, &str)] = &[
    ("has fallen off the bus", "the vendor's driver lost the GPU"),
    ("NVRM: Xid", "the GPU's driver reported an error"),
    ("device inaccessible", "the kernel could not wake or reach the card"),
    ("ring gfx timeout", "the GPU's command queue hung"),
    ("GPU reset begin", "the GPU's driver had to reset it"),
    ("controller is down", "the drive stopped answering"),
    ("health compromised", "the network adapter's firmware failed"),
    ("device's health compromised", "the network adapter's firmware failed"),
    ("containment event", "a port cut off what is below it"),
    ("Link Down", "a slot lost its link"),
    ("can't recover", "error recovery was refused by a driver"),
    ("recovery failed", "error recovery failed"),
    ("AER: device recovery failed", "error recovery failed"),
    ("; giving up", "a card did not come back after a reset"),
    ("broken device, retraining", "a link did not train and was tried again at a low speed"),
    ("retraining failed", "a link did not train"),
];

fn driver_errors(tree: &Topology, log: &[LogLine], report: &mut Report) {
    let mut seen = std::collections::BTreeMap::<Option<Address>, Vec<(&LogLine, &str)>>::new();
    for line in log {
        let Some((_, meaning)) = TROUBLE.iter().find(|(words, _)| line.text.contains(words)) else { continue };
        seen.entry(address_in(&line.text, tree)).or_default().push((line, meaning));
    }
    for (address, lines) in seen {
        let Some((_, meaning)) = lines.last() else { continue };
        let whom =
            address.map_or("the log names no function".to_owned(), |a| tree.find(a).map_or(a.to_string(), Function::label));
        let mut finding = Finding::new("driver-errors", Severity::Warning, format!("kernel log, {} times: {meaning} ({whom})", lines.len()))
            .so("The card or its driver failed since the host started; it may work again by now, or be half alive.")
            .mend("Compare the time with that of the job's failure. For an Xid, look its number up in the GPU vendor's list: 79 is a card that fell off the bus, 48, 63, 64, 94 and 95 are memory, 31 and 13 are the program. Errors that come back mean that the card must be exchanged.");
        for (line, _) in lines.iter().rev().take(3) {
            finding = finding.seen(format!("kernel log at {:.3} s", line.seconds), &line.text);
        }
        report.add(if let Some(address) = address { finding.at(address) } else { finding });
    }
}

/// The first address in a line. NVIDIA's driver leaves the function out: `PCI:0000:41:00`.
fn address_in(text: &str, tree: &Topology) -> Option<Address> {
    let words = text.split(|c: char| !(c.is_ascii_hexdigit() || c == ':' || c == '.'));
    words
        .map(|w| w.trim_matches([':', '.']))
        .filter(|w| w.matches(':').count() == 2)
        .find_map(|w| w.parse().ok().or_else(|| format!("{w}.0").parse::<Address>().ok().filter(|a| tree.position(*a).is_some())))
}
