// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc cuda probe`: the devices, what the driver claims about their paths, what they do, and how fast.

use std::{process::ExitCode, sync::Arc};

use comfy_table::{Table, presets::NOTHING};
use pcieipc::topology::{LinkState, Speed};
use pcieipc_cuda::{
    driver::{Cuda, Device, Driver, PeerClaim, Stream, present},
    proof::{PATTERN_BYTES, Probe as Kernels},
};
use serde_json::{Value, json};

use super::nvml::Nvml;
use crate::failure::Failure;

/// Show the CUDA devices, and prove and measure the paths between them
#[derive(clap::Args)]
pub struct Probe {
    /// One JSON object on standard output instead of text
    #[arg(long)]
    pub json: bool,
    /// Only what the driver claims: no kernel is run
    #[arg(long)]
    pub claims: bool,
}

/// One ordered pair.
struct Pair {
    from: usize,
    to: usize,
    claim: PeerClaim,
    proof: Option<Result<Measured, String>>,
}

struct Measured {
    push: f64,
    pull: f64,
    engine: f64,
    latency_us: f64,
}

impl Probe {
    pub fn run(self) -> Result<ExitCode, Failure> {
        let none = |why: String| {
            if self.json {
                println!("{}", json!({ "devices": [], "pairs": [], "why": why }));
            } else {
                println!("no CUDA device: {why}");
            }
            Ok(ExitCode::SUCCESS)
        };
        if let Err(why) = present() {
            return none(format!("no driver ({why})"));
        }
        let cuda = match Cuda::start() {
            Ok(cuda) => cuda,
            Err(error) => return none(error.to_string()),
        };
        let facts = cuda.devices()?;
        if facts.is_empty() {
            return none("the driver sees none".into());
        }
        let nvml = Nvml::start();
        let nvlinks = |pci: &str| nvml.as_ref().and_then(|nvml| nvml.links_up(pci));
        let mut pairs = Vec::new();
        let mut host = Vec::new();
        let mut open: Vec<Arc<dyn Device>> = Vec::new();
        if !self.claims {
            for device in &facts {
                open.push(cuda.open(device.ordinal)?);
            }
            for device in &open {
                host.push(through_host(device).map_err(|e| e.to_string()));
            }
        }
        for from in 0..facts.len() {
            for to in 0..facts.len() {
                if from == to {
                    continue;
                }
                let claim = cuda.claim(facts[from].ordinal, facts[to].ordinal)?;
                let proof = (!self.claims && claim.access).then(|| prove(&open[from], &open[to], from, to));
                pairs.push(Pair { from, to, claim, proof });
            }
        }
        if self.json {
            let devices: Vec<Value> = facts
                .iter()
                .map(|d| {
                    json!({ "ordinal": d.ordinal, "name": d.name, "pci": d.pci, "capability": format!("{}.{}", d.capability.0, d.capability.1),
                        "multiprocessors": d.multiprocessors, "l2_bytes": d.l2_bytes, "memory_bytes": d.memory_bytes, "mig": d.mig,
                        "numa_node": numa_node(&d.pci), "host_register": d.host_register,
                        "link": link(&d.pci, "current").map(link_json), "best_link": link(&d.pci, "max").map(link_json), "nvlinks_up": nvlinks(&d.pci) })
                })
                .collect();
            let host: Vec<Value> = host
                .iter()
                .map(|h| match h {
                    Ok((down, up)) => json!({ "to_host_gbps": down, "from_host_gbps": up }),
                    Err(why) => json!({ "why": why }),
                })
                .collect();
            let pairs: Vec<Value> = pairs.iter().map(Pair::json).collect();
            println!("{}", json!({ "devices": devices, "host": host, "pairs": pairs }));
            return Ok(ExitCode::SUCCESS);
        }
        let mut table = Table::new();
        table.load_preset(NOTHING).set_header([
            "device",
            "name",
            "address",
            "capability",
            "SMs",
            "node",
            "link",
            "NVLinks",
            "to host",
            "from host",
        ]);
        for (i, d) in facts.iter().enumerate() {
            let (down, up) = match host.get(i) {
                Some(Ok((down, up))) => (format!("{down:.1} GB/s"), format!("{up:.1} GB/s")),
                Some(Err(why)) => (why.clone(), String::new()),
                None => (String::new(), String::new()),
            };
            let node = numa_node(&d.pci).map_or_else(|| "-".into(), |n| n.to_string());
            table.add_row([
                i.to_string(),
                d.name.clone(),
                d.pci.clone(),
                format!("{}.{}", d.capability.0, d.capability.1),
                d.multiprocessors.to_string(),
                node,
                link_shown(&d.pci),
                nvlinks(&d.pci).map_or_else(|| "-".into(), |n| n.to_string()),
                down,
                up,
            ]);
        }
        println!("{table}");
        let mut table = Table::new();
        table.load_preset(NOTHING).set_header(["pair", "claimed", "proved", "stores", "loads", "copy engine", "one way"]);
        for pair in &pairs {
            let claimed = match pair.claim {
                PeerClaim { access: false, .. } => "no access",
                PeerClaim { native_atomics: true, .. } => "access, atomics",
                _ => "access",
            };
            let mut cells = vec![format!("{} -> {}", pair.from, pair.to), claimed.to_owned()];
            match &pair.proof {
                None => cells.extend(["-".to_owned()]),
                Some(Err(why)) => cells.extend([format!("no: {why}")]),
                Some(Ok(m)) => cells.extend([
                    "yes".to_owned(),
                    format!("{:.0} GB/s", m.push),
                    format!("{:.0} GB/s", m.pull),
                    format!("{:.0} GB/s", m.engine),
                    format!("{:.2} us", m.latency_us),
                ]),
            }
            table.add_row(cells);
        }
        println!("{table}");
        Ok(ExitCode::SUCCESS)
    }
}

impl Pair {
    fn json(&self) -> Value {
        let claim = json!({ "access": self.claim.access, "native_atomics": self.claim.native_atomics, "rank": self.claim.rank });
        let proof = match &self.proof {
            None => Value::Null,
            Some(Err(why)) => json!({ "ok": false, "why": why }),
            Some(Ok(m)) => {
                json!({ "ok": true, "stores_gbps": m.push, "loads_gbps": m.pull, "copy_engine_gbps": m.engine, "one_way_us": m.latency_us })
            }
        };
        json!({ "from": self.from, "to": self.to, "claim": claim, "proof": proof })
    }
}

/// As the kernel says; none where it does not know.
fn numa_node(pci: &str) -> Option<u32> {
    std::fs::read_to_string(format!("/sys/bus/pci/devices/{pci}/numa_node")).ok()?.trim().parse().ok()
}

/// The PCIe link now (`current`) or at best (`max`); none where the kernel does not know, as in many virtual machines.
fn link(pci: &str, which: &str) -> Option<LinkState> {
    let read = |what| std::fs::read_to_string(format!("/sys/bus/pci/devices/{pci}/{which}_link_{what}")).ok();
    let width = read("width")?.trim().parse().ok().filter(|width| (1..=32).contains(width))?;
    Some(LinkState { speed: Speed::from_text(read("speed")?.trim())?, width })
}

fn link_json(link: LinkState) -> Value {
    json!({ "gigatransfers": link.speed.gigatransfers(), "width": link.width })
}

/// As `32 GT/s x16`, and the best where that is more.
fn link_shown(pci: &str) -> String {
    let text = |link: LinkState| format!("{} GT/s x{}", link.speed.gigatransfers(), link.width);
    match (link(pci, "current"), link(pci, "max")) {
        (Some(now), Some(best)) if now.below(best) => format!("{} of {}", text(now), text(best)),
        (Some(now), _) => text(now),
        _ => "-".into(),
    }
}

/// Runs `work` once to warm up and once between events; gives microseconds.
fn timed(device: &Arc<dyn Device>, stream: Stream, work: impl Fn() -> pcieipc::Result<()>) -> pcieipc::Result<f64> {
    let events = [device.event(true)?, device.event(true)?];
    work()?;
    device.record(events[0], stream)?;
    work()?;
    device.record(events[1], stream)?;
    device.synchronize(stream)?;
    device.between(events[0], events[1])
}

const BYTES: u64 = 256 << 20;

/// Copy-engine bandwidth to and from a small piece of host memory that stays in the processor's cache.
fn through_host(device: &Arc<dyn Device>) -> pcieipc::Result<(f64, f64)> {
    const RING: u64 = 4 << 20;
    let memory = pcieipc_cuda::HostMemory::new(device, RING)?;
    let (own, stream) = (device.alloc(RING)?, device.stream()?);
    let rate = |down: bool| {
        let us = timed(device, stream, || {
            (0..BYTES / RING).try_for_each(|_| {
                let (to, from) = if down { (memory.address(), own) } else { (own, memory.address()) };
                device.copy(to, from, RING, stream)
            })
        })?;
        Ok::<f64, pcieipc::Error>(BYTES as f64 / us / 1e3)
    };
    let rates = (rate(true)?, rate(false)?);
    device.free(own)?;
    Ok(rates)
}

fn prove(from: &Arc<dyn Device>, to: &Arc<dyn Device>, a: usize, b: usize) -> Result<Measured, String> {
    let run = || -> pcieipc::Result<Result<Measured, String>> {
        from.reach(to.facts().ordinal)?;
        to.reach(from.facts().ordinal)?;
        let (near, far) = (from.alloc(64 << 20)?, to.alloc(64 << 20)?);
        let (kernels, there) = (Kernels::new(from)?, Kernels::new(to)?);
        let (stream, other) = (from.stream()?, to.stream()?);
        to.fill(far, 0, PATTERN_BYTES / 2, Stream(0))?;
        to.synchronize(Stream(0))?;
        kernels.write(far, a, b)?;
        let wrong = there.wrong(far, a, b)?;
        let done = if wrong > 0 {
            Err(format!("{wrong} words did not arrive as they were written"))
        } else {
            let ring = 64 << 20;
            let rate = |us: f64| BYTES as f64 / us / 1e3;
            let push = rate(timed(from, stream, || kernels.stream(far, false, ring, BYTES, near, stream))?);
            let pull = rate(timed(from, stream, || kernels.stream(far, true, ring, BYTES, near, stream))?);
            let engine = rate(timed(from, stream, || (0..4).try_for_each(|_| from.copy(far, near, 64 << 20, stream)))?);
            from.fill(near, 0, 1024, Stream(0))?;
            to.fill(far, 0, 1024, Stream(0))?;
            from.synchronize(Stream(0))?;
            to.synchronize(Stream(0))?;
            kernels.pingpong(true, far, near, 1032, near + 1024, stream)?;
            there.pingpong(false, near, far, 1032, far + 1024, other)?;
            from.synchronize(stream)?;
            to.synchronize(other)?;
            let mut round = [0; 4];
            from.read(&mut round, near + 1024)?;
            match u32::from_le_bytes(round) {
                u32::MAX => Err("a flag did not come back".to_owned()),
                ns => Ok(Measured { push, pull, engine, latency_us: f64::from(ns) / 2e3 }),
            }
        };
        from.free(near)?;
        to.free(far)?;
        Ok(done)
    };
    run().unwrap_or_else(|error| Err(error.to_string()))
}
