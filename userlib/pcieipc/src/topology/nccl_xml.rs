// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tree in the form of NCCL's topology file (`NCCL_TOPO_FILE`).
//!
//! NCCL keeps one entry for a whole switch (its upstream port) and none for root ports, and it reads what links can do at
//! best. Here a link's width is the one it has now, because lanes that are gone stay gone, and its speed the best of both ends, because an
//! idle card's slow link is no lasting state. What only the vendor's library knows (compute capability, NVLinks, GUIDs) is left
//! out: NCCL adds it for the devices that it finds.

use std::collections::{BTreeMap, HashMap, HashSet};

use quick_xml::events::{BytesEnd, BytesStart, Event};

use super::{
    function::{Function, Kind},
    host::Host,
    link::LinkState,
    tree::Topology,
};

type Writer = quick_xml::Writer<Vec<u8>>;

/// Writes the topology file.
///
/// # Errors
/// None in practice: it writes to memory.
pub fn nccl_xml(tree: &Topology, host: &Host) -> std::io::Result<String> {
    let mut writer = Writer::new_with_indent(Vec::new(), b' ', 2);
    open(&mut writer, "system", &[("version", "1".into())])?;
    let mut nodes = BTreeMap::<Option<u32>, Vec<usize>>::new();
    for (index, function) in tree.functions.iter().enumerate().filter(|(_, f)| exported(f)) {
        nodes.entry(function.numa_node).or_default().push(index);
    }
    // NCCL numbers GPUs in the order of their addresses.
    let gpus: HashMap<usize, usize> =
        (0..tree.functions.len()).filter(|i| tree.functions[*i].kind == Kind::Gpu).enumerate().map(|(dev, i)| (i, dev)).collect();
    for (node, members) in nodes {
        let leads = leading(tree, &members);
        let mut tops: Vec<usize> = leads.iter().copied().filter(|i| tree.functions[*i].parent.is_none()).collect();
        tops.sort_by_key(|i| (&tree.functions[*i].root, *i));
        let mut attributes = vec![("numaid", node.map_or("-1".into(), |n| n.to_string()))];
        if let Some(cpus) = node.and_then(|n| tree.numa_nodes.iter().find(|m| m.id == n)) {
            attributes.push(("affinity", cpu_mask(&cpus.cpus)));
        }
        attributes.push(("arch", std::env::consts::ARCH.into()));
        attributes.push(("vendor", host.cpu_vendor.clone()));
        attributes.push(("familyid", host.cpu_model.0.to_string()));
        attributes.push(("modelid", host.cpu_model.1.to_string()));
        open(&mut writer, "cpu", &attributes)?;
        for top in tops {
            below(&mut writer, tree, top, &leads, &gpus)?;
        }
        close(&mut writer, "cpu")?;
    }
    close(&mut writer, "system")?;
    String::from_utf8(writer.into_inner()).map_err(std::io::Error::other)
}

fn open(writer: &mut Writer, name: &str, attributes: &[(&str, String)]) -> std::io::Result<()> {
    let mut tag = BytesStart::new(name);
    for (key, value) in attributes {
        tag.push_attribute((*key, value.as_str()));
    }
    writer.write_event(Event::Start(tag))
}

fn close(writer: &mut Writer, name: &str) -> std::io::Result<()> {
    writer.write_event(Event::End(BytesEnd::new(name)))
}

/// What NCCL cares for: GPUs, adapters, and NVSwitches.
fn exported(function: &Function) -> bool {
    matches!(function.kind, Kind::Gpu | Kind::Nic | Kind::Fabric | Kind::Accelerator | Kind::Fpga)
}

/// Some functions, and all that is above them.
fn leading(tree: &Topology, members: &[usize]) -> HashSet<usize> {
    let mut leads = HashSet::new();
    for index in members {
        let mut at = Some(*index);
        while let Some(up) = at.filter(|i| leads.insert(*i)) {
            at = tree.functions[up].parent;
        }
    }
    leads
}

fn below(
    writer: &mut Writer,
    tree: &Topology,
    index: usize,
    leads: &HashSet<usize>,
    gpus: &HashMap<usize, usize>,
) -> std::io::Result<()> {
    let function = &tree.functions[index];
    // One entry stands for a whole switch, none for root ports.
    let own = matches!(function.kind, Kind::SwitchUp) || exported(function);
    if own {
        open(writer, "pci", &attributes(tree, index))?;
    }
    match function.kind {
        Kind::Gpu => {
            let dev = gpus.get(&index).copied().unwrap_or(0);
            open(writer, "gpu", &[("dev", dev.to_string())])?;
            close(writer, "gpu")?;
        }
        Kind::Nic => {
            open(writer, "nic", &[])?;
            let names = |prefix: &str| {
                function.interfaces.iter().filter_map(|i| i.strip_prefix(prefix)).map(str::to_owned).collect::<Vec<_>>()
            };
            let mut interfaces = names("infiniband/");
            if interfaces.is_empty() {
                interfaces = names("net/");
            }
            for (dev, name) in interfaces.into_iter().enumerate() {
                open(writer, "net", &[("name", name), ("dev", dev.to_string())])?;
                close(writer, "net")?;
            }
            close(writer, "nic")?;
        }
        _ => {}
    }
    for child in function.children.iter().filter(|c| leads.contains(c)) {
        below(writer, tree, *child, leads, gpus)?;
    }
    if own {
        close(writer, "pci")?;
    }
    Ok(())
}

fn attributes(tree: &Topology, index: usize) -> Vec<(&'static str, String)> {
    let function = &tree.functions[index];
    let id = &function.identity;
    let mut attributes = vec![
        ("busid", function.address.to_string()),
        ("class", format!("{:#08x}", id.class)),
        ("vendor", format!("{:#06x}", id.vendor)),
        ("device", format!("{:#06x}", id.device)),
        ("subsystem_vendor", format!("{:#06x}", id.subsystem_vendor)),
        ("subsystem_device", format!("{:#06x}", id.subsystem_device)),
    ];
    let hop = tree.hop(index);
    let lasting = hop.and_then(|h| match (h.now, h.best) {
        (Some(now), Some(best)) => Some(LinkState { speed: best.speed, width: now.width }),
        (now, best) => best.or(now),
    });
    // NCCL takes an empty speed for "unknown".
    attributes.push(("link_speed", lasting.map_or(String::new(), |l| format!("{:.1} GT/s PCIe", l.speed.gigatransfers()))));
    attributes.push(("link_width", lasting.map_or("0".into(), |l| l.width.to_string())));
    attributes
}

/// A list such as `0-2,8` as the kernel's mask in words of 32 bits, highest first.
fn cpu_mask(list: &str) -> String {
    let mut words: Vec<u32> = vec![0];
    for range in list.split(',').filter(|r| !r.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else { continue };
        // No host has more processors; a bound keeps nonsense small.
        for cpu in first..=last.min(65_535) {
            if words.len() <= cpu / 32 {
                words.resize(cpu / 32 + 1, 0);
            }
            words[cpu / 32] |= 1 << (cpu % 32);
        }
    }
    words.iter().rev().map(|w| format!("{w:08x}")).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::cpu_mask;

    #[test]
    fn processor_masks_are_written_as_the_kernel_does() {
        assert_eq!(cpu_mask("0-3"), "0000000f");
        assert_eq!(cpu_mask("0,32-63"), "ffffffff,00000001");
        assert_eq!(cpu_mask("x-y,,5-2"), "00000000");
    }
}
