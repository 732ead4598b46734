// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc info`: the module, its ABI, the endpoints and their states.

use comfy_table::{Table, presets};
use pcieipc::{
    abi,
    device::{EndpointInfo, Iommu, Limits, NODE},
    topology::{Function, Host, LinkState, Topology},
};
use serde_json::{Value, json};

use crate::{failure::Failure, host_source::HostSource, module};

/// Show the module, its ABI version and limits, and the endpoints with their states
#[derive(Debug, clap::Args)]
pub struct Info {
    #[command(flatten)]
    source: HostSource,
    /// One JSON object on standard output instead of text
    #[arg(long)]
    pub json: bool,
}

const CAPABILITIES: [(u32, &str); 8] = [
    (abi::PCIEIPC_CAP_COPY, "copy"),
    (abi::PCIEIPC_CAP_DOORBELL_MAP, "doorbell-map"),
    (abi::PCIEIPC_CAP_UNSAFE_NOIOMMU, "unsafe-noiommu"),
    (abi::PCIEIPC_CAP_PROFILES, "profiles"),
    (abi::PCIEIPC_CAP_ERROR_RECOVERY, "error-recovery"),
    (abi::PCIEIPC_CAP_ADMIN, "admin"),
    (abi::PCIEIPC_CAP_DEVICE_MEMORY, "device-memory"),
    (abi::PCIEIPC_CAP_DMABUF, "dma-buf"),
];

impl Info {
    pub fn run(self) -> Result<(), Failure> {
        if !self.source.is_live() {
            return self.saved();
        }
        let node = module::open().map_err(|obstacle| Failure::Run(obstacle.to_string()))?;
        let endpoints = module::endpoints(&node).map_err(|error| Failure::Run(error.to_string()))?;
        let (limits, version) = (node.limits(), module::version());
        if self.json {
            let endpoints: Vec<Value> = endpoints.iter().map(endpoint_json).collect();
            println!("{}", json!({ "ok": true, "node": NODE, "module": module_json(limits, version), "endpoints": endpoints }));
        } else {
            print!("{}", text(limits, version, &endpoints));
        }
        Ok(())
    }
}

/// What only the running module could say.
const UNSAVED: &str = "states, lives, sessions, counts and limits: only the running module knows them";

impl Info {
    /// What a saved host says of the module and of the functions that it drives.
    fn saved(&self) -> Result<(), Failure> {
        let source = self.source.open()?;
        let (tree, host) = (Topology::read(source.as_ref()), Host::read(source.as_ref()));
        let answer = host.facts.as_ref().and_then(|f| f.module.clone());
        let endpoints: Vec<(usize, &Function)> =
            tree.functions.iter().enumerate().filter(|(_, f)| f.driver.as_deref() == Some("pcieipc")).collect();
        let link = |index: usize| tree.hop(index).map_or((None, None), |hop| (hop.now, hop.best));
        if self.json {
            let state = |s: Option<LinkState>| s.map(|s| json!({ "speed": s.speed.generation(), "width": s.width }));
            let endpoints: Vec<Value> = endpoints
                .iter()
                .map(|(index, f)| {
                    let (now, best) = link(*index);
                    json!({
                        "address": f.address, "vendor": f.identity.vendor, "device": f.identity.device, "numa_node": f.numa_node,
                        "iommu": tree.iommu_mode(f), "iommu_group": f.iommu_group, "vectors": f.capabilities.msix_vectors,
                        "link": state(now), "link_max": state(best),
                    })
                })
                .collect();
            let module = json!({
                "loaded": host.module.loaded, "version": host.module.version, "abi": answer.as_ref().map(|a| a.abi),
                "abi_oldest": answer.as_ref().map(|a| a.abi_oldest), "library_abi": abi::PCIEIPC_ABI_VERSION,
            });
            println!("{}", json!({ "ok": true, "module": module, "endpoints": endpoints, "missing": [UNSAVED] }));
            return Ok(());
        }
        match (host.module.loaded, &answer) {
            (false, _) => println!("module not loaded when the snapshot was taken"),
            (true, None) => {
                println!("module {}, its ABI was not asked", host.module.version.as_deref().unwrap_or("of unknown version"))
            }
            (true, Some(a)) => println!(
                "module {}, ABI {} (accepts {} and newer; this command speaks {})",
                host.module.version.as_deref().unwrap_or("of unknown version"),
                a.abi,
                a.abi_oldest,
                abi::PCIEIPC_ABI_VERSION
            ),
        }
        if endpoints.is_empty() {
            println!("no endpoint: no function was bound to the driver pcieipc");
        }
        for (index, function) in endpoints {
            let (now, best) = link(index);
            let state = |s: Option<LinkState>| s.map_or("unknown".to_owned(), |s| s.to_string());
            println!(
                "{}, link {} of {}, IOMMU {}",
                function.label(),
                state(now),
                state(best),
                tree.iommu_mode(function).unwrap_or("none")
            );
        }
        eprintln!("not known from this source: {UNSAVED}");
        Ok(())
    }
}

fn capabilities(limits: &Limits) -> Vec<&'static str> {
    CAPABILITIES.into_iter().filter(|(bit, _)| limits.caps & u64::from(*bit) != 0).map(|(_, name)| name).collect()
}

fn module_json(limits: &Limits, version: Option<String>) -> Value {
    json!({
        "version": version, "abi": limits.version, "abi_oldest": limits.oldest, "library_abi": abi::PCIEIPC_ABI_VERSION,
        "capabilities": capabilities(limits), "max_channel_bytes": limits.max_channel_bytes,
        "max_session_bytes": limits.max_session_bytes, "max_total_bytes": limits.max_total_bytes,
        "max_channels": limits.max_channels, "max_copy_bytes": limits.max_copy_bytes, "max_endpoints": limits.max_endpoints,
        "event_queue": limits.event_queue, "doorbells_per_second": limits.doorbells_per_second, "page_size": limits.page_size,
        "max_sessions": limits.max_sessions, "correctable_per_second": limits.correctable_per_second,
        "link_sample_ms": limits.link_sample_ms, "storm_interrupts": limits.storm_interrupts,
    })
}

fn endpoint_json(endpoint: &EndpointInfo) -> Value {
    json!({
        "id": endpoint.id.0, "address": endpoint.address, "state": endpoint.state.to_string(), "generation": endpoint.generation,
        "attached": endpoint.attached, "vendor": endpoint.vendor, "device": endpoint.device, "serial": endpoint.serial,
        "numa_node": endpoint.numa_node, "iommu": iommu(endpoint.iommu), "iommu_group": endpoint.iommu_group,
        "vectors": endpoint.vectors, "engine": endpoint.has_engine, "ring_registers": endpoint.has_ring_registers,
        "doorbell_page": endpoint.has_doorbell_page, "memory_bytes": endpoint.memory_bytes,
        "link": { "speed": endpoint.link.0, "width": endpoint.link.1 },
        "link_max": { "speed": endpoint.link_max.0, "width": endpoint.link_max.1 },
        "doorbells": endpoint.doorbells, "interrupts": endpoint.interrupts, "events_lost": endpoint.events_lost,
        "dma_bytes": endpoint.dma_bytes, "correctable": endpoint.correctable, "profile": endpoint.profile,
    })
}

fn text(limits: &Limits, version: Option<String>, endpoints: &[EndpointInfo]) -> String {
    let version = version.map_or_else(String::new, |version| format!(" {version}"));
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let mut text = format!(
        "module{version}, ABI {} (accepts {} and newer; this command speaks {})\ncan: {}\nlimits: channel {}, session {}, all {}; {} \
         channels a session, {} sessions a user, {} endpoints, {} events, {} doorbells and {} correctable errors a second; a storm is over {} \
         interrupts in 0.1 s; links are looked at each {} ms\n\n",
        limits.version,
        limits.oldest,
        abi::PCIEIPC_ABI_VERSION,
        capabilities(limits).join(", "),
        mib(limits.max_channel_bytes),
        mib(limits.max_session_bytes),
        mib(limits.max_total_bytes),
        limits.max_channels,
        limits.max_sessions,
        limits.max_endpoints,
        limits.event_queue,
        if limits.doorbells_per_second == 0 { "any number of".into() } else { limits.doorbells_per_second.to_string() },
        limits.correctable_per_second,
        limits.storm_interrupts,
        limits.link_sample_ms,
    );
    if endpoints.is_empty() {
        text += "no endpoint: none is bound to the driver pcieipc. Soft endpoints bind by themselves; others by driver_override:\n  \
                 echo pcieipc > /sys/bus/pci/devices/ADDRESS/driver_override; echo ADDRESS > /sys/bus/pci/drivers_probe\n";
        return text;
    }
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header([
        "id",
        "address",
        "state",
        "life",
        "session",
        "link",
        "IOMMU",
        "vectors",
        "doorbells",
        "interrupts",
        "DMA bytes",
        "profile",
    ]);
    for endpoint in endpoints {
        table.add_row([
            endpoint.id.0.to_string(),
            endpoint.address.clone(),
            endpoint.state.to_string(),
            endpoint.generation.to_string(),
            if endpoint.attached { "attached" } else { "free" }.into(),
            link(endpoint.link, endpoint.link_max),
            iommu(endpoint.iommu).into(),
            endpoint.vectors.to_string(),
            endpoint.doorbells.to_string(),
            endpoint.interrupts.to_string(),
            endpoint.dma_bytes.to_string(),
            endpoint.profile.clone(),
        ]);
    }
    text + &table.to_string() + "\n"
}

fn iommu(iommu: Iommu) -> &'static str {
    match iommu {
        Iommu::Translating => "translating",
        Iommu::Identity => "identity",
        _ => "none",
    }
}

/// The link as lspci writes it, with the best after a slash where it is better.
fn link(now: (u8, u8), best: (u8, u8)) -> String {
    let one = |(speed, width): (u8, u8)| {
        let speed =
            ["?", "2.5GT/s", "5GT/s", "8GT/s", "16GT/s", "32GT/s", "64GT/s"].get(usize::from(speed)).copied().unwrap_or("?");
        format!("{speed} x{width}")
    };
    if now == (0, 0) {
        return "unknown".into();
    }
    if best.0 > now.0 || best.1 > now.1 { format!("{} / {}", one(now), one(best)) } else { one(now) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_below_its_best_shows_both() {
        assert_eq!(link((1, 1), (1, 1)), "2.5GT/s x1");
        assert_eq!(link((3, 8), (4, 16)), "8GT/s x8 / 16GT/s x16");
        assert_eq!(link((0, 0), (4, 16)), "unknown");
        assert_eq!(link((9, 1), (9, 1)), "? x1");
    }
}
