// SPDX-License-Identifier: MIT OR Apache-2.0
//! Address space: BARs without a place, BARs that are too small, nothing above 4 GiB, virtual functions that eat it up.

use std::collections::HashMap;

use super::{
    case::{Look, file, register},
    finding::{Finding, Report, Severity},
};
use crate::topology::{Address, Function, Kind, Resizable};

const FOUR_GIB: u64 = 1 << 32;

pub(super) fn check(case: &Look<'_>, report: &mut Report) {
    unassigned(case, report);
    small(case, report);
    above_4g(case, report);
    virtual_functions(case, report);
}

/// A size in the unit that fits.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0 => "unknown size".into(),
        b if b >= 1 << 30 && b % (1 << 30) == 0 => format!("{} GiB", b >> 30),
        b if b >= 1 << 20 => format!("{} MiB", b >> 20),
        b => format!("{} KiB", b >> 10),
    }
}

/// Lines of the kernel log about address space that could not be had, by the first function that each names.
fn refusals<'a>(case: &Look<'a>) -> HashMap<Address, Vec<&'a str>> {
    let words = ["can't assign", "failed to assign", "no space", "not claimed"];
    let mut found = HashMap::<Address, Vec<&str>>::new();
    for line in case.now.host.log.iter().flatten().filter(|l| words.iter().any(|w| l.text.contains(w))) {
        let address = line.text.split_whitespace().find_map(|w| w.trim_end_matches(':').parse().ok());
        if let Some(address) = address {
            found.entry(address).or_default().push(&line.text);
        }
    }
    found
}

fn unassigned(case: &Look<'_>, report: &mut Report) {
    let refusals = refusals(case);
    for function in &case.tree().functions {
        let lost: Vec<_> = function.bars.iter().filter(|b| b.unassigned && !b.io).collect();
        if lost.is_empty() {
            continue;
        }
        let severity = if case.matters(function) { Severity::Error } else { Severity::Info };
        let list = lost.iter().map(|b| format!("BAR {} ({})", b.index, size(b.size))).collect::<Vec<_>>().join(", ");
        let mut finding =
            Finding::new("bar-unassigned", severity, format!("{}: {list} has no address", function.label())).at(function.address);
        for bar in &lost {
            finding = finding.seen(file(function, &format!("resource line {}", bar.index + 1)), "no address");
        }
        for line in refusals.get(&function.address).into_iter().flatten().take(2) {
            finding = finding.seen("kernel log", line);
        }
        report.add(
            finding
                .so("The driver can not reach that part of the card: it does not bind, or works without peer-to-peer access.")
                .mend("Switch \"above 4G decoding\" on in the firmware's setup; if it is on, let the kernel place bridges anew with `pci=realloc` on its command line; switch SR-IOV off for cards that do not need it.")
                .fix("Lets the kernel place windows and BARs anew at the next start (Debian).", [
                    r#"sed -i 's/^GRUB_CMDLINE_LINUX="/&pci=realloc /' /etc/default/grub"#.to_owned(),
                    "update-grub".to_owned(),
                ]),
        );
    }
}

fn small(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    for function in &tree.functions {
        if !matches!(function.kind, Kind::Gpu | Kind::Fpga | Kind::Accelerator) {
            continue;
        }
        let small: Option<&Resizable> =
            function.capabilities.resizable.iter().filter(|r| r.size < r.largest).max_by_key(|r| r.largest);
        let Some(bar) = small else { continue };
        report.add(
            Finding::new("bar-small", Severity::Warning, format!("{}: BAR {} shows {} of up to {}", function.label(), bar.bar, size(bar.size), size(bar.largest)))
                .at(function.address)
                .seen(register(function, "ReBAR control"), size(bar.size))
                .seen(register(function, "ReBAR capability"), format!("up to {}", size(bar.largest)))
                .so("Other cards can reach only this part of its memory, so peer-to-peer access is off or goes through a moving window.")
                .mend("Switch \"resizable BAR\" and \"above 4G decoding\" on in the firmware's setup. Where the driver is not bound, the kernel can resize it, too.")
                .fix("Resizes the BAR; the driver must be unbound before, and the bridges above must have room.", [
                    format!("echo {} > /sys/bus/pci/devices/{}/driver/unbind", function.address, function.address),
                    format!("echo {} > /{}/resource{}_resize", bar.largest.ilog2() - 20, function.path, bar.bar),
                    format!("echo {} > /sys/bus/pci/drivers_probe", function.address),
                ]),
        );
    }
}

/// Signs that the firmware gives no addresses above 4 GiB.
fn above_4g(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let windows = &case.now.host.windows;
    let placed = |f: &&Function| f.bars.iter().any(|b| b.start >= FOUR_GIB);
    if tree.functions.iter().any(|f| placed(&f)) || windows.iter().any(|(_, end)| *end >= FOUR_GIB) {
        return;
    }
    // Only cards that want much address space care.
    let hungry: Vec<&Function> = case
        .peers()
        .iter()
        .map(|i| &tree.functions[*i])
        .filter(|f| {
            let wide = f.bars.iter().any(|b| b.wide && b.prefetchable && (b.unassigned || b.size >= 64 << 20));
            wide || f.capabilities.resizable.iter().any(|r| r.largest > 256 << 20)
        })
        .collect();
    let Some(first) = hungry.first() else { return };
    let mut finding =
        Finding::new("above-4g-off", Severity::Warning, "no card has memory above 4 GiB: \"above 4G decoding\" is off")
            .at_all(hungry.iter().map(|f| f.address));
    for bar in first.bars.iter().filter(|b| b.wide) {
        let value = if bar.unassigned { "no address".to_owned() } else { format!("{:#x}, {}", bar.start, size(bar.size)) };
        finding = finding.seen(file(first, &format!("resource line {}", bar.index + 1)), value);
    }
    if let Some((start, end)) = windows.iter().max_by_key(|(_, end)| *end) {
        finding = finding.seen("/proc/iomem", format!("highest window {start:#x}-{end:#x}"));
    }
    report.add(
        finding
            .so("All cards together have to fit below 4 GiB: large BARs stay small or get no address, and peer-to-peer access is off.")
            .mend("Switch \"above 4G decoding\" (\"64-bit BARs\", \"memory mapped I/O above 4 GB\") on in the firmware's setup; it needs UEFI boot on most boards."),
    );
}

fn virtual_functions(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let mut starved = HashMap::<&str, Vec<&Function>>::new();
    for function in tree.functions.iter().filter(|f| case.matters(f) && f.bars.iter().any(|b| b.unassigned && !b.io)) {
        let hurt = starved.entry(&function.root).or_default();
        // A few stand for all.
        if hurt.len() < 8 {
            hurt.push(function);
        }
    }
    for function in &tree.functions {
        let Some(sriov) = function.capabilities.sriov.filter(|s| s.total > 0) else { continue };
        let hurt = starved.get(function.root.as_str()).map_or(&[][..], Vec::as_slice);
        if let Some(victim) = hurt.first() {
            report.add(
                Finding::new("sriov-resources", Severity::Warning, format!("{} reserves room for {} virtual functions while {} has none", function.label(), sriov.total, victim.address))
                    .at(function.address)
                    .at_all(hurt.iter().map(|f| f.address))
                    .seen(file(function, "sriov_totalvfs"), sriov.total)
                    .seen(file(victim, "resource"), "a BAR without an address")
                    .so("Firmware and kernel keep address space and bus numbers for virtual functions that may never be used; a card below the same host bridge went without.")
                    .mend("Switch SR-IOV off for this card (in the firmware's setup or the card's own configuration tool) if nobody uses its virtual functions; otherwise switch \"above 4G decoding\" on."),
            );
        } else if sriov.active > 0 && case.matters(function) {
            report.add(
                Finding::new(
                    "sriov-resources",
                    Severity::Info,
                    format!("{} runs {} of {} virtual functions", function.label(), sriov.active, sriov.total),
                )
                .at(function.address)
                .seen(file(function, "sriov_numvfs"), sriov.active)
                .so("They all share the card's one link: what one function moves, the others lack.")
                .mend("Nothing to do if that is meant. Count them as one card when you place ranks."),
            );
        }
    }
}
