// SPDX-License-Identifier: MIT OR Apache-2.0
//! What differs from before: links that changed, cards that came and went.

use super::{
    case::{Look, leading, register},
    finding::{Finding, Report, Severity},
};
use crate::topology::{Function, Kind, LinkState, Topology};

pub(super) fn check(case: &Look<'_>, report: &mut Report) {
    let now = case.tree();
    if let Some(since) = case.since {
        compare(case, &since.tree, now, "in the earlier snapshot", report);
    }
    if let Some((later, seconds)) = case.later {
        compare(case, now, later, &format!("{seconds:.0} s before"), report);
    }
    by_itself(case, report);
}

fn compare(case: &Look<'_>, before: &Topology, after: &Topology, when: &str, report: &mut Report) {
    let leads = leading(case, after);
    for (index, function) in after.functions.iter().enumerate() {
        let Some(old) = before.position(function.address) else {
            if !function.kind.is_bridge() {
                appeared(function, when, report);
            }
            continue;
        };
        if before.functions[old].identity != function.identity
            && function.identity.vendor != 0
            && before.functions[old].identity.vendor != 0
        {
            appeared(function, when, report);
            continue;
        }
        let (Some(was), Some(is)) = (before.hop(old).and_then(|h| h.now), after.hop(index).and_then(|h| h.now)) else { continue };
        if was != is && leads[index] {
            link_changed(function, was, is, when, report);
        }
    }
    for function in &before.functions {
        if after.position(function.address).is_none() && !matches!(function.kind, Kind::Other | Kind::HostBridge) {
            report.add(
                Finding::new("function-missing", Severity::Error, format!("{} was there {when} and is gone", function.label()))
                    .at(function.address)
                    .seen(format!("/sys/bus/pci/devices/{}", function.address), "not there")
                    .so("Jobs that used it have lost a rank. Its address may be taken by another card later.")
                    .mend("If nobody removed it: rescan, look in the kernel log for its port, check power and seat.")
                    .fix("Looks for it again.", ["echo 1 > /sys/bus/pci/rescan".to_owned()]),
            );
        }
    }
}

fn appeared(function: &Function, when: &str, report: &mut Report) {
    report.add(
        Finding::new("function-new", Severity::Info, format!("{} was not there {when}", function.label()))
            .at(function.address)
            .seen(format!("/{}", function.path), "new")
            .so("A card was added, returned or exchanged. Memory that was registered with its former life is void.")
            .mend("Nothing to do if that was meant; jobs that ran must recover or start again to use it."),
    );
}

fn link_changed(function: &Function, was: LinkState, is: LinkState, when: &str, report: &mut Report) {
    let worse = is.raw_gbps() < was.raw_gbps();
    let severity = if worse { Severity::Warning } else { Severity::Info };
    report.add(
        Finding::new("link-changed", severity, format!("the link above {} is {is}, it was {was} {when}", function.label()))
            .at(function.address)
            .seen(register(function, "LnkSta"), format!("{is} (was {was})"))
            .so(if worse {
                "The way to this card became slower; plans that were made for the old link are out of balance until they are made anew."
            } else {
                "The way to this card became faster; plans that were made for the old link leave some of it unused."
            })
            .mend(if worse {
                "See the finding about the link's present state. If it goes up and down, suspect the signal (seat, riser, power) or the card's idle behaviour."
            } else {
                "Nothing to do: groups are told, and plan anew at their next `replan_if_changed`."
            }),
    );
}

/// Ports remember that their link changed by itself. By the PCI Express specification (Link Status, bit 15) that is a change for other
/// reasons than an unreliable link, such as a card that saves power while idle: a remark, which explains a slow link, and no fault.
fn by_itself(case: &Look<'_>, report: &mut Report) {
    for (index, function) in case.tree().functions.iter().enumerate() {
        let Some(link) = function.capabilities.link.as_ref().filter(|l| l.bandwidth_autonomous) else { continue };
        if !function.kind.is_bridge() || !case.leads_to_one(index) {
            continue;
        }
        report.add(
            Finding::new("link-changed", Severity::Info, format!("the link below {} changed speed or width by itself", function.label()))
                .at(function.address)
                .seen(register(function, "LnkSta"), "LABS set (autonomous bandwidth change)")
                .seen(register(function, "LnkSta"), link.now.map_or("down".to_owned(), |n| n.to_string()))
                .so("Hardware changed the link, not to mend a bad signal: most often a card that saves power while it is idle. A transfer that begins then waits for the link.")
                .mend("Look again while the card works: the link should be at its best. The bit stays until it is cleared.")
                .fix("Clears the memory of past changes, so that the next one is seen.", [format!("setpci -s {} CAP_EXP+12.w=c000:c000", function.address)]),
        );
    }
}
