// SPDX-License-Identifier: MIT OR Apache-2.0
//! Neighbours that would refuse the recovery of an endpoint.

use std::collections::BTreeMap;

use super::{
    case::{Look, file},
    finding::{Finding, Report, Severity},
};
use crate::topology::{Address, Function, Topology};

/// The driver whose endpoints recover with their neighbours' consent.
const OURS: &str = "pcieipc";

pub(super) fn check(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    // The kernel asks every function below the port that it resets.
    let mut ports = BTreeMap::<usize, Vec<Address>>::new();
    for function in tree.functions.iter().filter(|f| f.driver.as_deref() == Some(OURS)) {
        if let Some(port) = function.parent {
            ports.entry(port).or_default().push(function.address);
        }
    }
    for (port, endpoints) in ports {
        let silent = without_driver(tree, port);
        if silent.is_empty() {
            continue;
        }
        let names = silent.iter().map(|f| f.address.to_string()).collect::<Vec<_>>().join(", ");
        let ours = endpoints.iter().map(Address::to_string).collect::<Vec<_>>().join(", ");
        let (noun, verb) = if silent.len() == 1 { ("it", "has") } else { ("they", "have") };
        let mut finding = Finding::new(
            "recovery-vetoed",
            Severity::Warning,
            format!("{names} below port {} {verb} no driver and would veto the recovery of {ours}", tree.functions[port].address),
        )
        .at_all(endpoints);
        for function in silent.iter().take(8) {
            finding = finding.seen(file(function, "driver"), "absent");
        }
        let commands = silent.iter().map(|f| format!("echo 1 > /sys/bus/pci/devices/{}/remove", f.address)).collect::<Vec<_>>();
        report.add(
            finding
                .so("After an error the kernel asks the drivers of all functions below the port. One that can not answer vetoes: the endpoint ends dead instead of recovering.")
                .mend(format!("Bind a driver with error handlers, or take {noun} off the bus if nobody needs {noun}."))
                .fix("Removes them until the next rescan or start.", commands),
        );
    }
}

/// Functions below a port that have no driver; bridges have no vote.
fn without_driver(tree: &Topology, port: usize) -> Vec<&Function> {
    let mut found = Vec::new();
    let mut below = tree.functions[port].children.clone();
    while let Some(index) = below.pop() {
        let function = &tree.functions[index];
        if function.kind.is_bridge() {
            below.extend(&function.children);
        } else if function.driver.is_none() {
            found.push(function);
        }
    }
    found.sort_by_key(|f| f.address);
    found
}
