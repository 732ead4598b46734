// SPDX-License-Identifier: MIT OR Apache-2.0
//! The hardware of a virtual machine, and the QEMU arguments that make it.

use std::path::Path;

use serde::Deserialize;
use serde_json::json;

/// The hardware of a virtual machine. Endpoints are numbered from 0: first those behind switches, then those on root
/// ports, then the functions of cards.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Machine {
    /// Processors.
    pub cpus: u32,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Memory nodes that processors and memory are divided among; with more than one, each is a socket, and root port `n` belongs to
    /// node `n` modulo their number.
    pub nodes: u32,
    /// How many soft endpoints sit behind each switch, one switch an entry.
    pub switches: Vec<u32>,
    /// How many soft endpoints sit directly on root ports.
    pub ports: u32,
    /// Empty root ports for hot-plug, named `spare0`, `spare1`, …
    pub spare_ports: u32,
    /// How many functions each card on a root port of its own has, one card an entry; each function is a soft endpoint.
    pub cards: Vec<u32>,
    /// Speed and width of the links of those root ports, as QEMU's properties.
    pub port_link: String,
    /// Whether an Intel IOMMU translates.
    pub iommu: bool,
    /// Whether hot-plug is native PCIe hot-plug instead of ACPI's.
    pub native_hotplug: bool,
    /// How many QEMU `ivshmem-doorbell` devices share a memory and ring each other, named `iv0`, `iv1`, …
    pub ivshmem: u32,
    /// Further `-device` arguments, such as `edu,id=edu0`.
    pub devices: Vec<String>,
    /// Further QEMU arguments.
    pub qemu: Vec<String>,
    /// Further arguments of the soft endpoints' server.
    pub softdev: Vec<String>,
    /// Further words of the kernel's command line.
    pub append: String,
}

impl Default for Machine {
    fn default() -> Self {
        Machine {
            cpus: 2,
            memory_mib: 2048,
            nodes: 1,
            switches: Vec::new(),
            ports: 0,
            cards: Vec::new(),
            spare_ports: 0,
            port_link: "x-speed=2_5,x-width=1".into(),
            iommu: false,
            native_hotplug: false,
            ivshmem: 0,
            devices: Vec::new(),
            qemu: Vec::new(),
            softdev: Vec::new(),
            append: String::new(),
        }
    }
}

impl Machine {
    /// How many soft endpoints it has.
    #[must_use]
    pub fn endpoints(&self) -> u32 {
        self.switches.iter().sum::<u32>() + self.ports + self.cards.iter().sum::<u32>()
    }

    /// The kernel's command line. Warnings and worse go to the console as they come; the whole log is fetched at the end.
    #[must_use]
    pub fn command_line(&self) -> String {
        // On a busy host the translated guest's timer is late, and the kernel would give up on it.
        let mut line = String::from("console=ttyS0 panic=-1 loglevel=5 log_buf_len=4M printk.time=1 no_timer_check");
        if self.iommu {
            line.push_str(" intel_iommu=on");
        }
        if !self.append.is_empty() {
            line.push(' ');
            line.push_str(&self.append);
        }
        line
    }

    /// QEMU's arguments for this hardware; `sockets` is the folder with the endpoints' sockets `ep0.sock`, `ep1.sock`, …
    #[must_use]
    pub fn qemu_arguments(&self, sockets: &Path) -> Vec<String> {
        let mut arguments = Arguments::default();
        // The endpoints' server maps the guest's memory, so it must be a shared file.
        let split = if self.iommu { ",kernel-irqchip=split" } else { "" };
        let memory = |id: &str, mib: u32| format!("memory-backend-memfd,id={id},size={mib}M,share=on");
        arguments.pair("-m", format!("{}M", self.memory_mib));
        if self.nodes > 1 {
            arguments.pair("-machine", format!("q35{split}"));
            arguments.pair("-smp", format!("{},sockets={}", self.cpus, self.nodes));
            for node in 0..self.nodes {
                arguments.pair("-object", memory(&format!("mem{node}"), self.memory_mib / self.nodes));
                arguments.pair("-numa", format!("node,nodeid={node},memdev=mem{node}"));
                arguments.pair("-numa", format!("cpu,node-id={node},socket-id={node}"));
            }
            // The machine's own host bridge belongs to no node.
            for node in 0..self.nodes {
                let first_bus = 256 / (self.nodes + 1) * (node + 1);
                arguments.device(&format!("pxb-pcie,id=host{node},bus=pcie.0,bus_nr={first_bus},numa_node={node}"));
            }
        } else {
            arguments.pair("-smp", self.cpus.to_string());
            // A machine with nodes of its own making brings its own memory, and QEMU takes it from one place only.
            if self.qemu.iter().any(|argument| argument == "-numa") {
                arguments.pair("-machine", format!("q35{split}"));
            } else {
                arguments.pair("-machine", format!("q35,memory-backend=mem{split}"));
                arguments.pair("-object", memory("mem", self.memory_mib));
            }
        }
        if self.native_hotplug {
            arguments.pair("-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off");
        }
        if self.iommu {
            arguments.device("intel-iommu,intremap=on,caching-mode=on,device-iotlb=on");
        }
        let mut ports = PortNumbers::default();
        let mut endpoint = 0;
        for (switch, &count) in self.switches.iter().enumerate() {
            arguments.device(&format!("pcie-root-port,id=swrp{switch},bus=pcie.0,{}", ports.next()));
            arguments.device(&format!("x3130-upstream,id=up{switch},bus=swrp{switch}"));
            for _ in 0..count {
                arguments.device(&format!("xio3130-downstream,id=port{endpoint},bus=up{switch},{}", ports.next()));
                arguments.endpoint(endpoint, sockets);
                endpoint += 1;
            }
        }
        for port in 0..self.ports {
            let bus = if self.nodes > 1 { format!("host{}", port % self.nodes) } else { "pcie.0".into() };
            // Without an explicit link a bare root port never reports an active link, and recovery from a fatal error fails.
            arguments.device(&format!("pcie-root-port,id=port{endpoint},bus={bus},{},{}", ports.next(), self.port_link));
            arguments.endpoint(endpoint, sockets);
            endpoint += 1;
        }
        for (card, &functions) in self.cards.iter().enumerate() {
            arguments.device(&format!("pcie-root-port,id=card{card},bus=pcie.0,{},{}", ports.next(), self.port_link));
            for function in 0..functions {
                arguments.function(endpoint, card, function, sockets);
                endpoint += 1;
            }
        }
        for spare in 0..self.spare_ports {
            arguments.device(&format!("pcie-root-port,id=spare{spare},bus=pcie.0,{},x-speed=2_5,x-width=1", ports.next()));
        }
        for device in 0..self.ivshmem {
            let socket = sockets.join(crate::ivshmem::SOCKET);
            arguments.pair("-chardev", format!("socket,id=ivshmem{device},path={}", socket.display()));
            let vectors = crate::ivshmem::VECTORS;
            arguments.device(&format!("ivshmem-doorbell,id=iv{device},chardev=ivshmem{device},vectors={vectors}"));
        }
        for device in &self.devices {
            arguments.device(device);
        }
        arguments.0.extend(self.qemu.iter().cloned());
        arguments.0
    }
}

#[derive(Default)]
struct Arguments(Vec<String>);

impl Arguments {
    fn pair(&mut self, option: &str, value: impl Into<String>) {
        self.0.push(option.to_owned());
        self.0.push(value.into());
    }

    fn device(&mut self, device: &str) {
        self.pair("-device", device);
    }

    fn endpoint(&mut self, number: u32, sockets: &Path) {
        self.vfio_user(number, sockets, json!({ "bus": format!("port{number}") }));
    }

    fn function(&mut self, number: u32, card: usize, function: u32, sockets: &Path) {
        self.vfio_user(
            number,
            sockets,
            json!({ "bus": format!("card{card}"), "addr": format!("0.{function}"), "multifunction": true }),
        );
    }

    fn vfio_user(&mut self, number: u32, sockets: &Path, mut device: serde_json::Value) {
        device["driver"] = json!("vfio-user-pci");
        device["id"] = json!(format!("ep{number}"));
        // A server that a busy host does not let run for QEMU's five seconds would be an endpoint that does not answer.
        device["x-msg-timeout"] = json!(60_000);
        device["socket"] = json!({ "type": "unix", "path": sockets.join(format!("ep{number}.sock")) });
        self.pair("-device", device.to_string());
    }
}

/// Slot numbers must differ between the ports of one chassis.
#[derive(Default)]
struct PortNumbers(u32);

impl PortNumbers {
    fn next(&mut self) -> String {
        self.0 += 1;
        format!("chassis={},slot={}", 1 + self.0 / 200, self.0 % 200)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_numbered_through_switches_and_ports() {
        let machine = Machine { switches: vec![2, 1], ports: 2, ..Machine::default() };
        let arguments = machine.qemu_arguments(Path::new("/s"));
        for number in 0..5 {
            assert!(arguments.iter().any(|argument| argument.contains(&format!("/s/ep{number}.sock"))));
        }
        assert!(!arguments.iter().any(|argument| argument.contains("ep5")));
        assert!(arguments.iter().any(|argument| argument.starts_with("xio3130-downstream,id=port2,bus=up1")));
    }

    #[test]
    fn nodes_divide_memory_processors_and_root_ports() {
        let machine = Machine { nodes: 2, ports: 3, memory_mib: 1024, ..Machine::default() };
        let arguments = machine.qemu_arguments(Path::new("/s"));
        let has = |start: &str| arguments.iter().any(|argument| argument.starts_with(start));
        assert!(has("2,sockets=2") && has("memory-backend-memfd,id=mem1,size=512M") && !has("q35,memory-backend"));
        assert!(has("node,nodeid=1,memdev=mem1") && has("cpu,node-id=1,socket-id=1"));
        assert!(has("pxb-pcie,id=host0,bus=pcie.0,bus_nr=85,numa_node=0") && has("pxb-pcie,id=host1,bus=pcie.0,bus_nr=170"));
        assert!(has("pcie-root-port,id=port1,bus=host1") && has("pcie-root-port,id=port2,bus=host0"));
    }
}
