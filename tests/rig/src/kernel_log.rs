// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a healthy kernel never says.

use std::sync::LazyLock;

use regex::{Regex, RegexSet};

use crate::{Error, Result};

/// Each fails a run, whatever the test itself printed.
const ALARMS: &[&str] = &[
    r"\bBUG: ",
    r"\bWARNING: ",
    r"\bOops\b",
    r"\bKASAN: ",
    r"\bUBSAN: ",
    r"\bKernel panic\b",
    r"\bgeneral protection fault\b",
    r"\bunable to handle\b",
    r"\bkernel BUG at\b",
    r"possible (circular|recursive) locking",
    r"\binconsistent lock state\b",
    r"\bINFO: task .* blocked for more than\b",
    r"\bINFO: trying to register non-static key\b",
    r"\bself-detected stall\b|\bdetected stalls\b",
    r"\bscheduling while atomic\b",
    r"\bsleeping function called from invalid context\b",
    r"\bsuspicious RCU usage\b",
    r"\bDMA-API: ",
    r"\bunreferenced object 0x",
    r"\bBad page (state|map)\b",
    r"\brefcount_t: ",
    r"\blist_(add|del) corruption\b",
    r"\bDMAR: .*fault\b",
    r"\bCall Trace:",
    // A KUnit suite, of the module or of the kernel.
    r"^(\[[^\]]*\])?\s*not ok \d+ ",
];

/// What looks like an alarm and is said by every kernel with that check.
const HARMLESS: &[&str] = &[r"\bDMA-API: (preallocated \d+ debug entries|debugging enabled by kernel config)$"];

static NO_ALARM: LazyLock<RegexSet> =
    LazyLock::new(|| RegexSet::new(HARMLESS).unwrap_or_else(|error| unreachable!("what is harmless is constant: {error}")));

static ALARM: LazyLock<RegexSet> =
    LazyLock::new(|| RegexSet::new(ALARMS).unwrap_or_else(|error| unreachable!("the alarms are constants: {error}")));

/// Where lockdep's report begins, and where its last stack ends.
const CIRCULAR: &str = "possible circular locking dependency detected";
const STACK_END: &str = "</TASK>";

/// Whether lockdep tells here of pciehp, which takes `reset_lock` and `pci_rescan_remove_lock` in both orders when a card is plugged in. The
/// kernel's own, and without any of our module in it.
fn is_of_pciehp_alone(report: &[&str]) -> bool {
    let has = |words: &str| report.iter().any(|line| line.contains(words));
    has("pciehp_configure_device") && has("ctrl->reset_lock") && has("pci_rescan_remove_lock") && !has("[pcieipc]")
}

/// The log without that report.
fn without_known(log: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = log.lines().collect();
    let mut at = 0;
    while let Some(begin) = lines.iter().skip(at).position(|line| line.contains(CIRCULAR)).map(|skipped| at + skipped) {
        let end = lines.iter().skip(begin).position(|line| line.contains(STACK_END)).map_or(lines.len(), |rest| begin + rest + 1);
        if is_of_pciehp_alone(&lines[begin..end]) {
            lines.drain(begin..end);
            at = begin;
        } else {
            at = end;
        }
    }
    lines
}

/// The lines of `log` that a healthy kernel never says, less those that a pattern in `allow` matches.
///
/// # Errors
/// [`Error::Protocol`] if a pattern in `allow` is no regular expression.
pub fn alarms(log: &str, allow: &[String]) -> Result<Vec<String>> {
    let allow = allow
        .iter()
        .map(|pattern| Regex::new(pattern))
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|error| Error::Protocol { what: "allow".into(), why: error.to_string() })?;
    Ok(without_known(log)
        .into_iter()
        .filter(|line| ALARM.is_match(line) && !NO_ALARM.is_match(line))
        .filter(|line| !allow.iter().any(|pattern| pattern.is_match(line)))
        .map(str::to_owned)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_oops_a_lock_inversion_and_a_hung_task_are_alarms() {
        for line in [
            "[    3.1] BUG: KASAN: slab-use-after-free in pcieipc",
            "[    3.1] WARNING: possible circular locking dependency detected",
            "[  240.0] INFO: task guest:77 blocked for more than 120 seconds.",
            "[    3.1] Oops: 0000 [#1] SMP",
            "[    3.1]     not ok 2 an_offset_means_what_it_was_made_from",
            "[    3.1] DMAR: [DMA Write NO_PASID] Request device [01:00.0] fault addr 0x0",
        ] {
            assert_eq!(alarms(line, &[]).unwrap(), [line]);
        }
    }

    /// As lockdep words it, shortened.
    fn circular(frame: &str) -> String {
        format!(
            "[    5.0] WARNING: possible circular locking dependency detected\n\
             [    5.0] irq/26-pciehp/49 is trying to acquire lock:\n\
             [    5.0] ff11000009d9bad8 (&ctrl->reset_lock){{.+.+}}-{{4:4}}, at: pciehp_configure_device+0x171/0x230\n\
             [    5.0] ffffffff832418c0 (pci_rescan_remove_lock){{+.+.}}-{{4:4}}, at: {frame}\n\
             [    5.0] Call Trace:\n[    5.0]  <TASK>\n[    5.0]  {frame}\n[    5.0]  </TASK>\n\
             [    5.1] BUG: KASAN: slab-use-after-free in pcieipc"
        )
    }

    #[test]
    fn what_lockdep_says_of_pciehp_alone_is_known_and_what_it_says_of_the_module_is_an_alarm() {
        let after = "[    5.1] BUG: KASAN: slab-use-after-free in pcieipc";
        assert_eq!(alarms(&circular("pciehp_ist+0x1cc/0x5f0"), &[]).unwrap(), [after]);
        assert_eq!(alarms(&circular("pcieipc_remove+0x1cc/0x5f0 [pcieipc]"), &[]).unwrap().len(), 3);
        // Cut off before its end, it is no other.
        let cut = "WARNING: possible circular locking dependency detected\nCall Trace:";
        assert_eq!(alarms(cut, &[]).unwrap().len(), 2);
    }

    #[test]
    fn ordinary_messages_are_none_and_allowed_ones_neither() {
        let log = "[    0.1] clocksource: Marking clocksource 'tsc' as unstable\n[    1.0] pcieipc: loading out-of-tree module\n\
                   [    2.0] pcieport 0000:00:01.0: AER: Correctable error\n[    2.0] DMA-API: this one was provoked\n\
                   DMA-API: preallocated 65536 debug entries\nDMA-API: debugging enabled by kernel config";
        assert_eq!(alarms(log, &["this one was provoked".into()]).unwrap(), [""; 0]);
    }
}
