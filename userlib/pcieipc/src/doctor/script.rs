// SPDX-License-Identifier: MIT OR Apache-2.0
//! The remedies as a shell script: printed, never run.

use std::fmt::Write;

use super::finding::Report;

/// A script with every command that a finding offers, all of them commented out: a person chooses.
pub fn script(report: &Report) -> String {
    let mut out = String::from(
        "#!/bin/sh\n# Remedies that `pcieipc doctor` offers. Nothing here runs as it stands: read, then remove the '#' in front\n# of the commands that you want. Run it as root, while no job uses the cards.\nset -eu\n",
    );
    let mut any = false;
    for finding in &report.findings {
        let Some(fix) = &finding.fix else { continue };
        any = true;
        let _ = writeln!(out, "\n# {} ({}): {}", finding.id, finding.severity.name(), comment(&finding.title));
        let _ = writeln!(out, "# {}", comment(&fix.note));
        for command in &fix.commands {
            let _ = writeln!(out, "#{}", comment(command));
        }
    }
    if !any {
        out.push_str("\n# No finding has a remedy that commands could apply.\n");
    }
    out
}

/// One line, whatever a device or a log wrote into it.
fn comment(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
