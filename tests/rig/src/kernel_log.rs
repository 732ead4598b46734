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

/// A report of several lines that the stock kernel's own faults make, found in its source. One that names a function of the module is
/// none of these, unless it `calls` what complains.
struct Known {
    /// In its first line.
    begins: &'static str,
    /// All of these in the rest.
    names: &'static [&'static str],
    /// Somewhere in the log, because the fault needs it; empty where the report says enough.
    needs: &'static str,
    /// Whether functions of the module may be on its stack.
    calls: bool,
}

/// What the test that lets allocations fail says when it begins.
const FAILING: &str = "faults: each allocation fails once";

const KNOWN: &[Known] = &[
    // pciehp takes two locks in both orders when a card is plugged in (pciehp_configure_device).
    Known {
        begins: "possible circular locking dependency detected",
        names: &["pciehp_configure_device", "ctrl->reset_lock", "pci_rescan_remove_lock"],
        needs: "",
        calls: false,
    },
    // And when one is pulled out (pciehp_unconfigure_device).
    Known {
        begins: "possible circular locking dependency detected",
        names: &["pciehp_unconfigure_device", "ctrl->reset_lock", "pci_rescan_remove_lock"],
        needs: "",
        calls: false,
    },
    // What vmalloc and trace events say when memory is short while a module is read and laid out, before its own code runs.
    Known { begins: " vmalloc error: size ", names: &["warn_alloc", "finit_module"], needs: FAILING, calls: false },
    Known { begins: " at event_define_fields+", names: &["trace_module_notify", "load_module"], needs: FAILING, calls: false },
    // aer_process_err_devices keeps its reference to a device whose error status was cleared meanwhile, so one that is removed stays. A
    // reference of ours would look the same, so in a machine without errors that are injected it is an alarm.
    Known {
        begins: "unreferenced object 0x",
        names: &["pci_scan_single_device"],
        needs: "aer_inject: Injecting errors",
        calls: false,
    },
    // register_irq_proc goes on when there is no memory for one of its files, and unregister_irq_proc then misses it. Whoever frees the
    // interrupt is on the stack.
    Known { begins: " at remove_proc_entry+", names: &["unregister_irq_proc", "irq_free_descs"], needs: FAILING, calls: true },
];

/// How many lines the report takes that begins with the first of `lines`: to the end of its stack, or while they are indented.
fn length(lines: &[&str]) -> usize {
    let end = match lines.first() {
        Some(first) if first.starts_with("unreferenced object") => {
            lines.iter().skip(1).position(|line| !line.starts_with("  ")).map(|rest| rest + 1)
        }
        _ => lines.iter().position(|line| line.contains("</TASK>")).map(|rest| rest + 1),
    };
    end.unwrap_or(lines.len())
}

/// The log without those reports.
fn without_known(log: &str) -> Vec<&str> {
    let lines: Vec<&str> = log.lines().collect();
    let (mut kept, mut at) = (Vec::new(), 0);
    while let Some(line) = lines.get(at) {
        let candidates = KNOWN.iter().filter(|known| line.contains(known.begins) && log.contains(known.needs));
        let report = &lines[at..at + length(&lines[at..])];
        let has = |words: &str| report.iter().any(|line| line.contains(words));
        let mut known = candidates.filter(|known| known.names.iter().all(|name| has(name)) && (known.calls || !has("[pcieipc]")));
        if known.next().is_some() {
            at += report.len();
        } else {
            kept.push(*line);
            at += 1;
        }
    }
    kept
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
    fn what_lockdep_says_of_the_kernel_alone_is_known_and_what_it_says_of_the_module_is_an_alarm() {
        let after = "[    5.1] BUG: KASAN: slab-use-after-free in pcieipc";
        assert_eq!(alarms(&circular("pciehp_ist+0x1cc/0x5f0"), &[]).unwrap(), [after]);
        assert_eq!(alarms(&circular("pcieipc_remove+0x1cc/0x5f0 [pcieipc]"), &[]).unwrap().len(), 3);
        let pulled = circular("pciehp_ist+0x1cc/0x5f0").replace("pciehp_configure_device", "pciehp_unconfigure_device");
        assert_eq!(alarms(&pulled, &[]).unwrap(), [after]);
        // Cut off before its end, it is no other.
        let cut = "WARNING: possible circular locking dependency detected\nCall Trace:";
        assert_eq!(alarms(cut, &[]).unwrap().len(), 2);
    }

    #[test]
    fn a_device_that_the_kernel_keeps_is_known_and_memory_that_the_module_keeps_is_an_alarm() {
        let leak = |frame: &str| {
            format!(
                "unreferenced object 0xff11 (size 64):\n  comm \"x\"\n  backtrace (crc 1):\n    {frame}\n    pci_scan_slot+0xea/0x330\n"
            )
        };
        let (of_kernel, of_module) = (leak("pci_scan_single_device+0x54/0x160"), leak("pcieipc_probe+0x1/0x2 [pcieipc]"));
        let both = leak("pci_scan_single_device+0x1/0x2\n    pcieipc_x+0x1/0x2 [pcieipc]");
        let injected =
            "[    7.4] pcieport 0000:00:01.0: aer_inject: Injecting errors 00000000/00040000 into device 0000:04:00.0\n";
        let log = format!("{injected}{of_kernel}{of_module}{of_kernel}");
        assert_eq!(alarms(&log, &[]).unwrap(), ["unreferenced object 0xff11 (size 64):"]);
        assert_eq!(alarms(&format!("{injected}{both}"), &[]).unwrap().len(), 1);
        assert_eq!(alarms(&of_kernel, &[]).unwrap().len(), 1, "nothing was injected, so the reference is ours");
    }

    #[test]
    fn an_interrupts_file_that_could_not_be_made_is_known_where_memory_was_short() {
        let report = "[  346.6] WARNING: fs/proc/generic.c:742 at remove_proc_entry+0x1fd/0x370, CPU#1: faults/170\n\
                      [  346.6] Call Trace:\n[  346.6]  <TASK>\n[  346.6]  unregister_irq_proc+0x78/0x170\n[  346.6]  irq_free_descs+0x42/0x60\n\
                      [  346.6]  pcieipc_drop+0x1/0x2 [pcieipc]\n[  346.7]  </TASK>\n";
        let short = format!("[  60.0] {FAILING}\n");
        assert_eq!(alarms(&format!("{short}{report}"), &[]).unwrap(), [""; 0]);
        assert_eq!(alarms(report, &[]).unwrap().len(), 2);
        let other = report.replace("unregister_irq_proc", "pcieipc_remove_proc");
        assert_eq!(alarms(&format!("{short}{other}"), &[]).unwrap().len(), 2);
    }

    #[test]
    fn a_module_that_cannot_be_read_or_laid_out_is_known_where_allocations_fail() {
        let read = "[  65.5] faults: vmalloc error: size 61440, vm_struct allocation failed\n[  65.5] Call Trace:\n[  65.5]  <TASK>\n\
                    [  65.5]  warn_alloc+0x120/0x130\n[  65.5]  __se_sys_finit_module+0x321/0x540\n[  65.5]  </TASK>\n";
        let events = "[ 192.3] WARNING: kernel/trace/trace_events.c:3147 at event_define_fields+0x3a8/0x3c0\n[ 192.3] Call Trace:\n\
                      [ 192.3]  <TASK>\n[ 192.3]  trace_module_notify+0x146/0x560\n[ 192.3]  load_module+0x21b0/0x2d20\n[ 192.3]  </TASK>\n";
        let begin = "[  60.0] faults: each allocation fails once\n";
        assert_eq!(alarms(&format!("{begin}{read}{events}"), &[]).unwrap(), [""; 0]);
        assert_eq!(alarms(&format!("{read}{events}"), &[]).unwrap().len(), 3, "memory was short for no reason");
        let ours = read.replace("__se_sys_finit_module", "x [pcieipc]\n__se_sys_finit_module");
        assert_eq!(alarms(&format!("{begin}{ours}"), &[]).unwrap().len(), 1);
    }

    #[test]
    fn ordinary_messages_are_none_and_allowed_ones_neither() {
        let log = "[    0.1] clocksource: Marking clocksource 'tsc' as unstable\n[    1.0] pcieipc: loading out-of-tree module\n\
                   [    2.0] pcieport 0000:00:01.0: AER: Correctable error\n[    2.0] DMA-API: this one was provoked\n\
                   DMA-API: preallocated 65536 debug entries\nDMA-API: debugging enabled by kernel config";
        assert_eq!(alarms(log, &["this one was provoked".into()]).unwrap(), [""; 0]);
    }
}
