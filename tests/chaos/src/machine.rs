// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine's endpoints: where they are, how they fare, what is done to them, and how they are put right again.

use std::{cell::RefCell, collections::HashMap, fs, time::Duration};

use guest::{pci::Function, wait::until};
use pcieipc::device::{EndpointId, EventKind, Node, State};
use rig::guest::Host;
use serde_json::{Value, json};

/// What goes wrong with the machine itself, and not with what is tested.
pub type Result<T> = std::result::Result<T, String>;

/// How long the machine may take to put an endpoint right.
const RIGHT: Duration = Duration::from_secs(60);

/// The endpoint of a rank.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Its serial number, which it keeps over all its lives.
    pub serial: u64,
    /// Its number at the server that plays it.
    pub played: usize,
    /// Where it was last.
    pub address: String,
}

/// All endpoints, in the order of ranks; none for a group over shared memory.
#[derive(Debug)]
pub struct Machine {
    /// By rank.
    pub endpoints: Vec<Endpoint>,
    node: Option<Node>,
    /// Serial numbers of all endpoints that there have been.
    serials: RefCell<HashMap<EndpointId, u64>>,
    patience: u32,
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Asks the server that plays the endpoints.
///
/// # Errors
/// Its words.
pub fn softdev(request: &Value) -> Result<Value> {
    Host::connect().map_err(text)?.softdev(request).map_err(text)
}

/// Executes a command of QEMU's monitor.
///
/// # Errors
/// Its words.
pub fn qmp(command: &Value) -> Result<Value> {
    Host::connect().map_err(text)?.qmp(command).map_err(text)
}

impl Machine {
    /// A machine of which only processes and memory are used.
    pub fn without_endpoints() -> Self {
        Self { endpoints: Vec::new(), node: None, serials: RefCell::default(), patience: 1 }
    }

    /// The first `ranks` endpoints that live, by serial number.
    ///
    /// # Errors
    /// There are fewer, or module or server do not answer.
    pub fn with_endpoints(ranks: usize, patience: u32) -> Result<Self> {
        let node = Node::open().map_err(text)?;
        let played = softdev(&json!({"cmd": "list"}))?;
        let number = |serial: u64| {
            let all = played["endpoints"].as_array()?;
            let one = all.iter().find(|one| one["serial"] == serial)?;
            one["endpoint"].as_u64().map(|number| number as usize)
        };
        let (mut endpoints, mut serials) = (Vec::new(), HashMap::new());
        for id in node.endpoints().map_err(text)? {
            let info = node.endpoint(id).map_err(text)?;
            serials.extend(info.serial.map(|serial| (id, serial)));
            if let Some((serial, played)) = info.serial.and_then(|serial| Some((serial, number(serial)?))) {
                endpoints.push(Endpoint { serial, played, address: info.address });
            }
        }
        endpoints.sort_by_key(|endpoint| endpoint.serial);
        if endpoints.len() < ranks {
            return Err(format!("{ranks} ranks need as many soft endpoints, there are {}", endpoints.len()));
        }
        endpoints.truncate(ranks);
        let machine = Self { endpoints, node: Some(node), serials: RefCell::new(serials), patience };
        machine.drain(|_, _| {});
        Ok(machine)
    }

    /// Whether ranks have endpoints.
    pub fn has_endpoints(&self) -> bool {
        !self.endpoints.is_empty()
    }

    /// State, generation and number of correctable errors of a rank's endpoint in its present binding; none while it is not bound.
    pub fn state(&self, rank: usize) -> Option<(State, u64, u64)> {
        let (node, endpoint) = (self.node.as_ref()?, self.endpoints.get(rank)?);
        let ids = node.endpoints().ok()?;
        let infos = ids.into_iter().filter_map(|id| node.endpoint(id).ok());
        let newest = infos.filter(|info| info.serial == Some(endpoint.serial)).max_by_key(|info| info.id)?;
        Some((newest.state, newest.generation, newest.correctable))
    }

    /// The function of a rank's endpoint. Its slot stays the same.
    ///
    /// # Errors
    /// No such endpoint.
    pub fn function(&self, rank: usize) -> Result<Function> {
        self.endpoints
            .get(rank)
            .map(|endpoint| Function::named(&endpoint.address))
            .ok_or_else(|| format!("rank {rank} has no endpoint"))
    }

    /// Asks the server for something about a rank's endpoint.
    ///
    /// # Errors
    /// Its words.
    pub fn play(&self, rank: usize, mut request: Value) -> Result<Value> {
        let endpoint = self.endpoints.get(rank).ok_or_else(|| format!("rank {rank} has no endpoint"))?;
        request["endpoint"] = json!(endpoint.played);
        softdev(&request)
    }

    /// Has the kernel find an error in AER registers.
    ///
    /// # Errors
    /// `aer_inject` does not take it.
    pub fn inject(&self, rank: usize, uncorrectable: u32, correctable: u32) -> Result<()> {
        let endpoint = self.endpoints.get(rank).ok_or_else(|| format!("rank {rank} has no endpoint"))?;
        let address: pcieipc::topology::Address = endpoint.address.parse().map_err(text)?;
        let mut request = vec![address.bus, address.device, address.function, 0];
        for word in [uncorrectable, correctable, 0, 1, 2, 3, address.domain] {
            request.extend(word.to_ne_bytes());
        }
        let mut last = String::new();
        // Busy until the kernel has looked at the one before.
        let taken = until(Duration::from_secs(10) * self.patience, || match fs::write("/dev/aer_inject", &request) {
            Ok(()) => true,
            Err(error) => {
                last = error.to_string();
                false
            }
        });
        if taken { Ok(()) } else { Err(format!("/dev/aer_inject: {last}")) }
    }

    /// What the kernel said since the last time: calls `each` with the endpoint's serial number (0 when unknown) and the event.
    fn drain(&self, mut each: impl FnMut(u64, &pcieipc::device::Event)) {
        let Some(node) = &self.node else { return };
        loop {
            let events = node.events().unwrap_or_default();
            if events.is_empty() {
                return;
            }
            for event in &events {
                let mut serials = self.serials.borrow_mut();
                if let (EventKind::Added { serial, .. }, Some(id)) = (event.kind, event.endpoint) {
                    serials.insert(id, serial);
                }
                let serial = event.endpoint.and_then(|id| serials.get(&id).copied()).unwrap_or(0);
                drop(serials);
                each(serial, event);
            }
        }
    }

    /// When the kernel first said that a rank's endpoint does not live any more, and when it last said that it lives again; forgets
    /// everything that was said until now.
    pub fn left_and_returned(&self, rank: usize) -> (Option<u64>, Option<u64>) {
        let Some(serial) = self.endpoints.get(rank).map(|endpoint| endpoint.serial) else { return (None, None) };
        let (mut left, mut returned) = (None, None);
        self.drain(|of, event| {
            let at = event.time.as_nanos() as u64;
            match event.kind {
                _ if of != serial => {}
                EventKind::State { to: State::Live, .. } | EventKind::Added { .. } => returned = Some(at),
                EventKind::State { .. } => left = left.or(Some(at)),
                _ => {}
            }
        });
        (left, returned)
    }

    /// Waits until a rank's endpoint lives, and helps it where nobody else would: binds it, and when that is not enough, removes it,
    /// turns it off and on, and finds it again.
    ///
    /// # Errors
    /// It does not live within a minute.
    pub fn restore(&self, rank: usize) -> Result<()> {
        if !self.has_endpoints() {
            return Ok(());
        }
        let lives = || self.state(rank).is_some_and(|(state, ..)| state == State::Live);
        let limit = RIGHT * self.patience;
        let recovering = || self.state(rank).is_some_and(|(state, ..)| state == State::Recovering);
        if lives() || (recovering() && until(limit, || !recovering()) && lives()) {
            return Ok(());
        }
        let function = self.function(rank)?;
        if function.exists()
            && !function.bound()
            && function.bind().is_ok()
            && until(Duration::from_secs(1) * self.patience, lives)
        {
            return Ok(());
        }
        self.power_cycle(rank)?;
        if until(limit, lives) {
            Ok(())
        } else {
            Err(format!("the endpoint of rank {rank} does not live again: {:?}", self.state(rank)))
        }
    }

    /// Removes a rank's endpoint, turns it off and on, and has the kernel find it again.
    ///
    /// # Errors
    /// What sysfs or the server says.
    pub fn power_cycle(&self, rank: usize) -> Result<()> {
        let function = self.function(rank)?;
        if function.exists() {
            function.remove().map_err(text)?;
        }
        self.play(rank, json!({"cmd": "revive"}))?;
        Function::rescan().map_err(text)
    }

    /// Pages and bytes of channels that the module holds.
    pub fn held(&self) -> Option<(u64, u64)> {
        self.node.as_ref()?;
        held(&fs::read_to_string("/sys/kernel/debug/pcieipc/state").ok()?)
    }
}

fn held(state: &str) -> Option<(u64, u64)> {
    let field = |name: &str| state.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    Some((field("pages ")?, field("channel bytes ")?))
}

/// Memory that could be had without swapping, in KiB.
pub fn available_kib() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_modules_state_is_read() {
        assert_eq!(held("pages 12\nchannel bytes 4096\nendpoint 3 ...\n"), Some((12, 4096)));
        assert_eq!(held("nothing"), None);
    }
}
