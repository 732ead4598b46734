// SPDX-License-Identifier: MIT OR Apache-2.0
//! Links below their best, and who limits them.

use std::collections::BTreeMap;

use super::{
    case::{Look, register},
    finding::{Finding, Report, Severity},
};
use crate::topology::{Function, Hop, Kind, LinkState, Speed, aer::Severity as Errors};

pub(super) fn check(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    for index in 0..tree.functions.len() {
        let Some(hop) = tree.hop(index) else { continue };
        if !case.leads_to_one(index) {
            continue;
        }
        // What is not known is told under what was not checked.
        let (Some(now), Some(best)) = (hop.now, hop.best) else { continue };
        if now.speed < best.speed {
            report.add(slow(case, &hop, now, best));
        }
        if now.width < best.width {
            report.add(narrow(case, &hop, now, best));
        }
        limited_by_port(case, &hop, report);
    }
    uplinks(case, report);
}

/// Who is to blame that a link is slow, and how one knows.
struct Limiter {
    who: String,
    remedy: String,
    harmless: bool,
}

fn slow(case: &Look<'_>, hop: &Hop, now: LinkState, best: LinkState) -> Finding {
    let tree = case.tree();
    let card = &tree.functions[hop.card];
    let limiter = who_slows(case, hop, now, best);
    let severity = if limiter.harmless { Severity::Info } else { Severity::Warning };
    let mut finding = Finding::new("link-speed-reduced", severity, format!("{} runs at {now}, {best} is possible", card.label()))
        .at(card.address)
        .seen(register(card, "LnkSta"), now)
        .so(format!(
            "The link carries {:.1} GB/s in place of {:.1} GB/s; every collective in which this card takes part waits for it. Limited by {}.",
            now.raw_gbps(),
            best.raw_gbps(),
            limiter.who
        ))
        .mend(limiter.remedy);
    finding = ends(finding, case, hop);
    if let Some(port) = hop.port.map(|p| &tree.functions[p]) {
        finding = finding.seen(register(port, "LnkCtl2 target speed"), target(port));
        if !limiter.harmless {
            finding = finding.fix(
                "Trains the link again at its best speed. Stop everything that uses the card first; the link is down for some milliseconds.",
                [
                    format!("setpci -s {} CAP_EXP+30.w={:x}:f", port.address, best.speed.generation()),
                    format!("setpci -s {} CAP_EXP+10.w=20:20", port.address),
                ],
            );
        }
    }
    finding
}

fn target(function: &Function) -> String {
    let target = function.capabilities.link.as_ref().and_then(|l| l.target);
    target.map_or("unknown".into(), |t| t.to_string())
}

fn ends(mut finding: Finding, case: &Look<'_>, hop: &Hop) -> Finding {
    let functions = &case.tree().functions;
    for (end, best) in [(Some(hop.card), hop.card_best), (hop.port, hop.port_best)] {
        if let (Some(end), Some(best)) = (end, best) {
            finding = finding.seen(register(&functions[end], "LnkCap"), best);
        }
    }
    finding
}

fn who_slows(case: &Look<'_>, hop: &Hop, now: LinkState, best: LinkState) -> Limiter {
    let functions = &case.tree().functions;
    let card = &functions[hop.card];
    let link = |index: Option<usize>| index.and_then(|i| functions[i].capabilities.link.as_ref());
    let held = |speed: Option<Speed>| speed.is_some_and(|s| s < best.speed);
    if let Some(port) = hop.port.filter(|p| held(link(Some(*p)).and_then(|l| l.target))) {
        let port = &functions[port];
        return Limiter {
            who: format!("the port {} above it, whose target speed software or firmware set to {}", port.address, target(port)),
            remedy: "Look for a link-speed setting of this slot in the firmware's setup and set it to automatic or to the highest generation; then train the link again.".into(),
            harmless: false,
        };
    }
    if held(link(Some(hop.card)).and_then(|l| l.target)) {
        return Limiter {
            who: format!("the card itself, whose target speed is {}", target(card)),
            remedy: "Update the card's firmware, or reset the card: its own target speed holds the link back.".into(),
            harmless: false,
        };
    }
    if let Some(signal) = bad_signal(case, hop) {
        return Limiter {
            who: format!("a bad signal ({signal})"),
            remedy: "Reseat the card and its riser or cable, clean the contacts, try another slot; a retimer or a long riser may need a firmware update.".into(),
            harmless: false,
        };
    }
    let idles = matches!(card.kind, Kind::Gpu) && card.driver.is_some() && now.width == best.width;
    if idles {
        return Limiter {
            who: "the card's power management, most likely: GPUs lower the speed of their link when they idle".into(),
            remedy: "Look again while the card works. If it stays slow under load, treat it as a bad signal: reseat the card, try another slot.".into(),
            harmless: true,
        };
    }
    if card.power_state.as_deref().is_some_and(|s| s.starts_with("D3")) {
        return Limiter {
            who: format!("power management: the card is in {}", card.power_state.as_deref().unwrap_or_default()),
            remedy: "Look again while the card works, or write `on` to its power/control file.".into(),
            harmless: true,
        };
    }
    let aspm = link(hop.port).is_some_and(|l| l.aspm_enabled.any());
    let hint = if aspm { " ASPM is on: switch it off (`pcie_aspm=off`) and look again." } else { "" };
    Limiter {
        who: "the slot, the card or what lies between (neither end holds the speed back by a setting)".into(),
        remedy: format!(
            "Reseat the card and its riser or cable; set the slot's speed in the firmware's setup by hand; update both firmwares.{hint}"
        ),
        harmless: false,
    }
}

/// Signs that the electrical side is to blame.
fn bad_signal(case: &Look<'_>, hop: &Hop) -> Option<String> {
    let functions = &case.tree().functions;
    for end in [Some(hop.card), hop.port].into_iter().flatten() {
        let function = &functions[end];
        if let Some(link) = &function.capabilities.link {
            if link.lane_errors != 0 {
                return Some(format!("{} reports errors on lanes {:#x}", function.address, link.lane_errors));
            }
        }
        let counts = function.aer.as_ref().map(|a| a.of(Errors::Correctable).clone()).unwrap_or_default();
        let received: u64 =
            ["RxErr", "BadTLP", "BadDLLP"].iter().filter_map(|k| counts.get(*k)).fold(0, |s, c| s.saturating_add(*c));
        if received >= 10 {
            return Some(format!("{} counted {received} damaged packets or symbols", function.address));
        }
    }
    None
}

fn narrow(case: &Look<'_>, hop: &Hop, now: LinkState, best: LinkState) -> Finding {
    let card = &case.tree().functions[hop.card];
    let severity = if now.width * 4 <= best.width { Severity::Error } else { Severity::Warning };
    let signal = bad_signal(case, hop)
        .map_or("the slot's contacts, the riser or the card (lanes did not come up)".to_owned(), |s| {
            format!("a bad signal ({s})")
        });
    let finding = Finding::new("link-width-reduced", severity, format!("{} uses {} of {} lanes", card.label(), now.width, best.width))
        .at(card.address)
        .seen(register(card, "LnkSta"), now)
        .so(format!(
            "The link carries {:.1} GB/s in place of {:.1} GB/s. Limited by {signal}; power management never takes lanes away from a link on servers.",
            now.raw_gbps(),
            best.raw_gbps()
        ))
        .mend("Reseat the card, clean its contacts, check the riser and its cables; look in the firmware's setup whether the slot is split (bifurcation) into narrower ones; swap cards to see whether the fault stays with the slot.");
    ends(finding, case, hop)
}

/// The card could do more than its slot: nothing is broken, but somebody may have chosen the wrong slot.
fn limited_by_port(case: &Look<'_>, hop: &Hop, report: &mut Report) {
    let (Some(card_best), Some(port_best), Some(port)) = (hop.card_best, hop.port_best, hop.port) else { return };
    let card = &case.tree().functions[hop.card];
    if !port_best.below(card_best) || !case.matters(card) {
        return;
    }
    let port = &case.tree().functions[port];
    let shared = port_best.common(card_best);
    let severity = if shared.raw_gbps() * 2.0 < card_best.raw_gbps() { Severity::Warning } else { Severity::Info };
    let finding = Finding::new("link-limited-by-slot", severity, format!("{} can do {card_best}, its slot only {port_best}", card.label()))
        .at(card.address)
        .so(format!(
            "The link can never carry more than {:.1} GB/s, of the {:.1} GB/s that the card could use. Limited by the slot (port {}).",
            shared.raw_gbps(),
            card_best.raw_gbps(),
            port.address
        ))
        .mend("Move the card to a slot with more lanes or a newer generation, best one that is wired to the processor; check whether the slot is split (bifurcation) in the firmware's setup.");
    report.add(ends(finding, case, hop));
}

/// Links above cards that are slower than the cards' own, each once with all cards that suffer.
fn uplinks(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let mut found = BTreeMap::<usize, (Hop, f64, Vec<usize>)>::new();
    for (index, card) in tree.functions.iter().enumerate() {
        if !case.matters(card) || card.physical_function.is_some() {
            continue;
        }
        let hops = tree.hops(index);
        let Some((own, above)) = hops.split_first() else { continue };
        let Some(own_rate) = own.gbps() else { continue };
        let slower = above.iter().filter_map(|hop| Some((hop, hop.gbps()?))).filter(|(_, rate)| *rate < own_rate * 0.99);
        if let Some((hop, rate)) = slower.min_by(|a, b| a.1.total_cmp(&b.1)) {
            found.entry(hop.card).or_insert((*hop, rate, Vec::new())).2.push(index);
        }
    }
    for (narrow, (hop, rate, cards)) in found {
        let narrow = &tree.functions[narrow];
        let now = hop.now.map_or("unknown".to_owned(), |n| n.to_string());
        let names = cards.iter().map(|i| tree.functions[*i].address.to_string()).collect::<Vec<_>>().join(", ");
        let mut finding = Finding::new(
            "uplink-narrow",
            Severity::Warning,
            format!("the link above {} ({now}) is slower than those of the cards below it: {names}", narrow.label()),
        )
        .at(narrow.address)
        .at_all(cards.iter().map(|i| tree.functions[*i].address))
        .seen(register(narrow, "LnkSta"), &now);
        for card in cards.iter().map(|i| &tree.functions[*i]).take(4) {
            finding = finding.seen(register(card, "LnkSta"), card.link_now().map_or("unknown".to_owned(), |n| n.to_string()));
        }
        report.add(
            finding
                .so(format!(
                    "The cards' own links look well, but everything to and from the processor passes a link of {rate:.1} GB/s{}.",
                    if hop.degraded() { ", which is itself below its best" } else { "" }
                ))
                .mend(if hop.degraded() {
                    "Mend this link first (see the finding about it); the cards are not to blame."
                } else {
                    "Move the cards to a slot of a wider switch or of the processor; keep traffic between cards below this switch."
                }),
        );
    }
}
