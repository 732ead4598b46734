// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the module says about its endpoints, and what processes hold of them.

use std::{collections::HashMap, fs, time::Instant};

use pcieipc::{device::Node, topology::Address};

/// One endpoint of the module.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct EndpointView {
    pub id: u32,
    #[serde(skip)]
    pub address: Option<Address>,
    #[serde(rename = "address")]
    pub address_text: String,
    pub state: String,
    pub generation: u64,
    pub attached: bool,
    pub doorbells: u64,
    pub interrupts: u64,
    pub dma_bytes: u64,
    pub events_lost: u64,
    /// Channels that sessions made on it; known for the processes that we may look into.
    pub channels: u64,
    pub doorbells_per_second: f64,
    pub dma_bytes_per_second: f64,
}

impl EndpointView {
    /// Whether it rang or moved bytes since the look before.
    pub fn is_busy(&self) -> bool {
        self.doorbells_per_second > 0.0 || self.dma_bytes_per_second > 0.0
    }
}

/// The module, asked again and again.
pub struct ModuleView {
    live: bool,
    node: Option<Node>,
    before: HashMap<u32, (u64, u64)>,
    last: Instant,
}

impl ModuleView {
    pub fn new(live: bool) -> Self {
        Self { live, node: None, before: HashMap::new(), last: Instant::now() }
    }

    /// All endpoints now; none where the module is not there.
    pub fn look(&mut self) -> Vec<EndpointView> {
        if !self.live {
            return Vec::new();
        }
        // The module may come later, and go: a node that answers errors is opened anew next time.
        if self.node.is_none() {
            self.node = Node::open().ok();
        }
        let Some(node) = &self.node else { return Vec::new() };
        let Ok(ids) = node.endpoints() else {
            self.node = None;
            return Vec::new();
        };
        let seconds = self.last.elapsed().as_secs_f64().max(1e-3);
        self.last = Instant::now();
        let channels = if ids.is_empty() { HashMap::new() } else { channels() };
        let mut views = Vec::new();
        let mut now = HashMap::new();
        for id in ids {
            let Ok(info) = node.endpoint(id) else { continue };
            let (doorbells, bytes) = self.before.get(&id.0).copied().unwrap_or((info.doorbells, info.dma_bytes));
            now.insert(id.0, (info.doorbells, info.dma_bytes));
            let rate = |new: u64, old: u64| new.saturating_sub(old) as f64 / seconds;
            views.push(EndpointView {
                id: id.0,
                address: info.address.parse().ok(),
                channels: channels.get(&info.address).copied().unwrap_or(0),
                address_text: info.address,
                state: info.state.to_string(),
                generation: info.generation,
                attached: info.attached,
                doorbells: info.doorbells,
                interrupts: info.interrupts,
                dma_bytes: info.dma_bytes,
                events_lost: info.events_lost,
                doorbells_per_second: rate(info.doorbells, doorbells),
                dma_bytes_per_second: rate(info.dma_bytes, bytes),
            });
        }
        self.before = now;
        views
    }
}

/// Channels by endpoint, from the fdinfo of every process that we may look into.
fn channels() -> HashMap<String, u64> {
    let mut found = HashMap::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    for process in processes.filter(|p| p.file_name().to_string_lossy().bytes().all(|b| b.is_ascii_digit())) {
        for fd in fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten() {
            let ours = fs::read_link(fd.path()).is_ok_and(|target| target.to_string_lossy().starts_with("/dev/pcieipc"));
            if !ours {
                continue;
            }
            let text = fs::read_to_string(process.path().join("fdinfo").join(fd.file_name())).unwrap_or_default();
            let field = |key: &str| text.lines().find_map(|l| l.strip_prefix(key)).map(str::trim);
            if let (Some(address), Some(count)) =
                (field("pcieipc-pdev:"), field("pcieipc-channels:").and_then(|c| c.parse::<u64>().ok()))
            {
                *found.entry(address.to_owned()).or_default() += count;
            }
        }
    }
    found
}
