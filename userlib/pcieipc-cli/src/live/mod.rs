// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tree and the module's endpoints while they change.

pub mod module_view;
pub mod prometheus;
pub mod screen;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use pcieipc::topology::{Address, Change, Follower, Source, aer::Severity};

use module_view::{EndpointView, ModuleView};

/// Events that are kept for the screen.
const KEPT: usize = 500;

/// Something that happened, with the time in seconds since 1970.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Event {
    pub time: f64,
    #[serde(flatten)]
    pub change: Change,
}

/// Errors a second of one function, by severity.
pub type Rates = HashMap<Address, [f64; 3]>;

/// Everything that is watched.
pub struct Observer {
    pub follower: Follower,
    pub events: VecDeque<Event>,
    /// How often each kind of event occurred.
    pub counts: BTreeMap<&'static str, u64>,
    pub rates: Rates,
    pub endpoints: Vec<EndpointView>,
    module: ModuleView,
    last: Instant,
}

impl Observer {
    pub fn new(source: Box<dyn Source>, live: bool) -> Self {
        let mut module = ModuleView::new(live);
        Self {
            follower: Follower::new(source),
            events: VecDeque::new(),
            counts: BTreeMap::new(),
            rates: Rates::new(),
            endpoints: module.look(),
            module,
            last: Instant::now(),
        }
    }

    /// Waits for the kernel's word or the end of the time, and gives what changed.
    pub fn step(&mut self, at_most: Duration) -> std::io::Result<Vec<Event>> {
        let changes = self.follower.wait(at_most)?;
        Ok(self.took(changes))
    }

    fn took(&mut self, changes: Vec<Change>) -> Vec<Event> {
        let seconds = self.last.elapsed().as_secs_f64().max(1e-3);
        self.last = Instant::now();
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        self.rates.clear();
        for change in &changes {
            *self.counts.entry(name(change)).or_default() += 1;
            if let Change::Errors { address, added, .. } = change {
                let rate = |s| added.total(s) as f64 / seconds;
                self.rates.insert(*address, [rate(Severity::Correctable), rate(Severity::NonFatal), rate(Severity::Fatal)]);
            }
        }
        self.endpoints = self.module.look();
        let events: Vec<Event> = changes.into_iter().map(|change| Event { time, change }).collect();
        self.events.extend(events.iter().cloned());
        while self.events.len() > KEPT {
            self.events.pop_front();
        }
        events
    }

    /// What the module says about the endpoint at an address.
    pub fn endpoint(&self, address: Address) -> Option<&EndpointView> {
        self.endpoints.iter().find(|e| e.address == Some(address))
    }
}

/// The event's name, as the log writes it.
pub fn name(change: &Change) -> &'static str {
    match change {
        Change::Appeared { .. } => "appeared",
        Change::Removed { .. } => "removed",
        Change::Returned { .. } => "returned",
        Change::FellOff { .. } => "fell-off",
        Change::Answers { .. } => "answers",
        Change::Link { .. } => "link",
        Change::Errors { .. } => "errors",
        Change::Driver { .. } => "driver",
        _ => "other",
    }
}

/// One line for a person.
pub fn describe(change: &Change) -> String {
    let state = |s: &Option<pcieipc::topology::LinkState>| s.map_or("down".to_owned(), |s| s.to_string());
    match change {
        Change::Appeared { generation, name, .. } => format!("{name} appeared, generation {generation}"),
        Change::Removed { generation, name, .. } => format!("{name} was removed, generation {generation} ended"),
        Change::Returned { generation, name, .. } => format!("{name} returned, generation {generation}"),
        Change::FellOff { address, .. } => format!("{address} fell off the bus: it answers all ones"),
        Change::Answers { address, .. } => format!("{address} answers again"),
        Change::Link { address, was, is, .. } => format!("link of {address}: {} (was {})", state(is), state(was)),
        Change::Errors { address, added, worst, .. } => {
            let parts: Vec<String> = Severity::FILES
                .iter()
                .filter(|(s, _)| added.total(*s) > 0)
                .map(|(s, _)| format!("{} {}", s.name(), pcieipc::topology::aer::describe(added.of(*s))))
                .collect();
            format!("{} errors of {address}: {}", worst.name(), parts.join("; "))
        }
        Change::Driver { address, was, is, .. } => {
            format!("driver of {address}: {} (was {})", is.as_deref().unwrap_or("none"), was.as_deref().unwrap_or("none"))
        }
        _ => String::new(),
    }
}
