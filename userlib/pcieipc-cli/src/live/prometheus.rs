// SPDX-License-Identifier: MIT OR Apache-2.0
//! Metrics for the text collector of Prometheus's node exporter.

use std::{
    fmt::Write as _,
    io::{self, Write as _},
    path::Path,
};

use pcieipc::topology::{LinkState, Reach, aer::Severity};

use super::Observer;

/// Writes the file whole or not at all: the exporter may read at any moment.
pub fn write(path: &Path, observer: &Observer, shown: &[bool]) -> io::Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new().prefix(".pcieipc-").suffix(".tmp").tempfile_in(folder)?;
    file.write_all(text(observer, shown).as_bytes())?;
    // The exporter runs as another user.
    std::fs::set_permissions(file.path(), std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
    file.persist(path).map_err(|e| e.error)?;
    Ok(())
}

/// One family of metrics.
struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: Vec<(String, f64)>,
}

impl Family {
    fn new(name: &'static str, kind: &'static str, help: &'static str) -> Self {
        Self { name, kind, help, samples: Vec::new() }
    }
    fn add(&mut self, labels: &[(&str, &str)], value: f64) {
        let labels: Vec<String> = labels.iter().map(|(key, value)| format!("{key}=\"{}\"", escape(value))).collect();
        self.samples.push((labels.join(","), value));
    }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// The metrics as text.
pub fn text(observer: &Observer, shown: &[bool]) -> String {
    let tree = observer.follower.tree();
    let mut info = Family::new("pcieipc_function_info", "gauge", "A PCI function; the value is always 1.");
    let mut reachable =
        Family::new("pcieipc_function_reachable", "gauge", "Whether the function answers: 0 when it fell off the bus.");
    let mut generation =
        Family::new("pcieipc_function_generation", "gauge", "The life of the function since the watcher started.");
    let mut speed = Family::new(
        "pcieipc_link_speed_transfers_per_second",
        "gauge",
        "Transfers per second and lane of the link above the function.",
    );
    let mut width = Family::new("pcieipc_link_width_lanes", "gauge", "Lanes in use by the link above the function.");
    let mut best_speed = Family::new(
        "pcieipc_link_best_speed_transfers_per_second",
        "gauge",
        "Transfers per second and lane that both ends can do.",
    );
    let mut best_width = Family::new("pcieipc_link_best_width_lanes", "gauge", "Lanes that both ends have.");
    let mut errors = Family::new("pcieipc_aer_errors_total", "counter", "Errors that the function reported since it appeared.");
    for (index, function) in tree.functions.iter().enumerate().filter(|(i, _)| shown.get(*i).copied().unwrap_or(false)) {
        let address = function.address.to_string();
        let node = function.numa_node.map_or(String::new(), |n| n.to_string());
        let labels = [
            ("address", address.as_str()),
            ("kind", function.kind.word()),
            ("name", &function.name),
            ("driver", function.driver.as_deref().unwrap_or("")),
            ("numa_node", &node),
        ];
        info.add(&labels, 1.0);
        let address = [("address", address.as_str())];
        reachable.add(&address, if function.reach == Reach::AllOnes { 0.0 } else { 1.0 });
        generation.add(&address, observer.follower.generation(function.address).unwrap_or(0) as f64);
        if let Some(hop) = tree.hop(index) {
            let put = |state: Option<LinkState>, speed: &mut Family, width: &mut Family| {
                if let Some(state) = state {
                    speed.add(&address, state.speed.gigatransfers() * 1e9);
                    width.add(&address, f64::from(state.width));
                }
            };
            put(hop.now, &mut speed, &mut width);
            put(hop.best, &mut best_speed, &mut best_width);
        }
        if let Some(counters) = &function.aer {
            for (severity, _) in Severity::FILES {
                // A series that exists from the start lets the first error be seen as an increase.
                let counts = counters.of(severity);
                errors.add(&[address[0], ("severity", severity.name()), ("kind", "all")], counters.total(severity) as f64);
                for (kind, count) in counts {
                    errors.add(&[address[0], ("severity", severity.name()), ("kind", kind)], *count as f64);
                }
            }
        }
    }
    let mut changes = Family::new("pcieipc_tree_changes_total", "counter", "Changes of the tree since the watcher started.");
    for event in ["appeared", "removed", "returned", "fell-off", "answers", "link", "errors", "driver"] {
        changes.add(&[("event", event)], observer.counts.get(event).copied().unwrap_or(0) as f64);
    }
    let mut state = Family::new("pcieipc_endpoint_state", "gauge", "State of an endpoint of the module; the value is always 1.");
    let mut life = Family::new("pcieipc_endpoint_generation", "gauge", "Generation of an endpoint of the module.");
    let mut doorbells = Family::new("pcieipc_endpoint_doorbells_total", "counter", "Doorbells rung through the module.");
    let mut interrupts = Family::new("pcieipc_endpoint_interrupts_total", "counter", "Interrupts taken.");
    let mut dma = Family::new("pcieipc_endpoint_dma_bytes_total", "counter", "Bytes that the endpoint's engine moved.");
    let mut lost = Family::new("pcieipc_endpoint_events_lost_total", "counter", "Events that full queues lost.");
    let mut channels = Family::new("pcieipc_endpoint_channels", "gauge", "Channels that processes hold on the endpoint.");
    for endpoint in &observer.endpoints {
        let address = [("address", endpoint.address_text.as_str())];
        state.add(&[address[0], ("state", &endpoint.state)], 1.0);
        life.add(&address, endpoint.generation as f64);
        doorbells.add(&address, endpoint.doorbells as f64);
        interrupts.add(&address, endpoint.interrupts as f64);
        dma.add(&address, endpoint.dma_bytes as f64);
        lost.add(&address, endpoint.events_lost as f64);
        channels.add(&address, endpoint.channels as f64);
    }
    let mut out = String::new();
    for family in [
        info, reachable, generation, speed, width, best_speed, best_width, errors, changes, state, life, doorbells, interrupts,
        dma, lost, channels,
    ] {
        if family.samples.is_empty() {
            continue;
        }
        let _ = writeln!(out, "# HELP {} {}\n# TYPE {} {}", family.name, family.help, family.name, family.kind);
        for (labels, value) in &family.samples {
            let _ = writeln!(out, "{}{{{labels}}} {value}", family.name);
        }
    }
    out
}
