// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a process may and can do here: locked memory, shared memory, namespaces, the module and its node, virtual machines.

use super::{
    case::{Look, file},
    finding::{Finding, Report, Severity},
    memory_space::size,
};
use crate::topology::{Kind, Origin, PortType};

/// A group of eight ranks with 4 MiB rings each way locks about half of this in each process.
const MEMLOCK: u64 = 512 << 20;
/// Container engines give 64 MiB; a group of eight ranks uses about as much, and PyTorch's loaders more.
const SHM: u64 = 1 << 30;

pub(super) fn check(case: &Look<'_>, report: &mut Report) {
    // Another tool's file says nothing about all this.
    if matches!(case.tree().origin, Origin::Live | Origin::Snapshot) {
        memlock(case, report);
        shared_memory(case, report);
        namespaces(case, report);
        module(case, report);
    }
    virtual_machine(case, report);
}

fn memlock(case: &Look<'_>, report: &mut Report) {
    let Some((soft, hard)) = case.now.host.memlock else { return };
    // root is not bound by the limit, but the ranks rarely are root.
    if soft >= MEMLOCK {
        return;
    }
    let limit = |l: u64| if l == u64::MAX { "unlimited".to_owned() } else { size(l) };
    report.add(
        Finding::new("memlock-low", Severity::Warning, format!("a process may lock only {}", limit(soft)))
            .seen("/proc/self/limits Max locked memory", format!("soft {}, hard {}", limit(soft), limit(hard)))
            .so("Rings and buffers that devices write into must be locked. Beyond the limit the module and RDMA answer ENOMEM, and registering memory fails.")
            .mend("Raise the limit: `* - memlock unlimited` in /etc/security/limits.d/, LimitMEMLOCK=infinity in a service, `--ulimit memlock=-1` for a container.")
            .fix("For all users from their next login on.", ["echo '* - memlock unlimited' > /etc/security/limits.d/90-pcieipc.conf".to_owned()]),
    );
}

fn shared_memory(case: &Look<'_>, report: &mut Report) {
    let facts = case.now.host.facts.as_ref();
    let Some(total) = facts.and_then(|f| f.shm_bytes) else { return };
    let free = facts.and_then(|f| f.shm_free).unwrap_or(total);
    if total >= SHM && free >= 64 << 20 {
        return;
    }
    report.add(
        Finding::new("shm-small", Severity::Warning, format!("/dev/shm has {} of which {} are free", size(total), if free == 0 { "none".into() } else { size(free) }))
            .seen("statvfs /dev/shm", format!("{total} bytes, {free} free"))
            .so("Data loaders and collectives that exchange through shared memory die of SIGBUS or hang when it is full. (pcieipc itself uses memfd and is not bound by it.)")
            .mend("`--shm-size=16g` or `--ipc=host` for a container; on a host, remount it larger.")
            .fix("Until the next start.", ["mount -o remount,size=50% /dev/shm".to_owned()]),
    );
}

fn namespaces(case: &Look<'_>, report: &mut Report) {
    let host = &case.now.host;
    if host.initial_pid_namespace == Some(false) {
        report.add(
            Finding::new("pid-namespace", Severity::Info, "this process is in a PID namespace of its own (a container)")
                .seen("/proc/self/ns/pid", "not the host's")
                .so("Ranks in different containers do not see each other's processes: CUDA IPC handles and liveness by pidfd fail between them.")
                .mend("Run all ranks of a host in one container, or start the containers with `--pid=host`."),
        );
    }
    if host.initial_ipc_namespace == Some(false) {
        report.add(
            Finding::new("ipc-namespace", Severity::Info, "this process is in an IPC namespace of its own (a container)")
                .seen("/proc/self/ns/ipc", "not the host's")
                .so("Ranks in different containers do not share /dev/shm; libraries that exchange through it (NCCL's host path) do not find each other.")
                .mend("Run all ranks of a host in one container, or start the containers with `--ipc=host`."),
        );
    }
}

fn module(case: &Look<'_>, report: &mut Report) {
    let host = &case.now.host;
    let state = &host.module;
    let secure = host.secure_boot == Some(true);
    let locked = host.lockdown.as_deref().is_some_and(|l| l != "none");
    if !state.loaded {
        let mut finding = Finding::new("module-missing", Severity::Info, "the module pcieipc is not loaded")
            .seen("/sys/module/pcieipc", "not there");
        let mut remedy = "`modprobe pcieipc`; install its package first if it is not there.".to_owned();
        if secure || locked {
            finding = finding.seen("lockdown", host.lockdown.as_deref().unwrap_or("unknown"));
            remedy.push_str(" Secure boot or lockdown is on: the module must be signed with a key that the firmware knows (`mokutil --import`).");
        }
        report.add(
            finding
                .so("Ranks exchange over plain shared memory. What only the module gives is off: doorbells by interrupt, rings that endpoints reach, ordered events of errors and removal.")
                .mend(remedy)
                .fix("Loads it.", ["modprobe pcieipc".to_owned()]),
        );
    }
    let ours = env!("CARGO_PKG_VERSION");
    let answer = host.facts.as_ref().and_then(|f| f.module.as_ref());
    let other = state.version.as_deref().filter(|v| *v != ours && state.loaded);
    let excluded = answer.is_some_and(|a| a.excluded);
    if other.is_some() || excluded {
        let severity = if excluded { Severity::Error } else { Severity::Warning };
        let theirs = other.map_or("another ABI".to_owned(), |v| format!("version {v}"));
        let mut finding =
            Finding::new("module-version", severity, format!("the loaded module is of {theirs}, this command is {ours}"));
        if let Some(version) = other {
            finding = finding.seen("/sys/module/pcieipc/version", version);
        }
        if let Some(answer) = answer {
            finding = finding.seen("/dev/pcieipc", format!("ABI {}, accepts {} and newer", answer.abi, answer.abi_oldest));
        }
        report.add(
            finding
                .so(if excluded {
                    "Neither accepts the other: every call is refused, and ranks exchange over plain shared memory."
                } else {
                    "Calls that one side does not know are refused; the command falls back to what both know."
                })
                .mend("Install both from the same release, unload the old module and load the new one.")
                .fix(
                    "Loads the installed version. All ranks must have ended.",
                    ["modprobe -r pcieipc".to_owned(), "modprobe pcieipc".to_owned()],
                ),
        );
    }
    if state.loaded && state.taint.contains('E') {
        let severity = if secure { Severity::Warning } else { Severity::Info };
        report.add(
            Finding::new("module-unsigned", severity, "the loaded module carries no signature that the kernel knows")
                .seen("/sys/module/pcieipc/taint", &state.taint)
                .seen("secure boot", host.secure_boot.map_or("unknown", |s| if s { "on" } else { "off" }))
                .so("It works now. Under secure boot with lockdown the kernel will refuse it at the next start, and the host marks itself as tainted.")
                .mend("Sign it and enrol the key (`mokutil --import`), or take a signed package."),
        );
    }
    if state.loaded && host.facts.as_ref().is_some_and(|f| f.node.is_none()) {
        report.add(
            Finding::new("node-unreadable", Severity::Warning, "the module is loaded, but /dev/pcieipc is not there")
                .seen("/dev/pcieipc", "not there")
                .so("Ranks exchange over plain shared memory and see no events of endpoints.")
                .mend("Mount devtmpfs on /dev; in a container, pass `--device /dev/pcieipc`."),
        );
    }
    if let Some(refused) = host.facts.as_ref().and_then(|f| f.node.as_ref()).and_then(|n| Some((n, n.refused.as_ref()?))) {
        let (node, why) = refused;
        report.add(
            Finding::new("node-unreadable", Severity::Warning, format!("/dev/pcieipc can not be opened: {why}"))
                .seen("/dev/pcieipc", format!("mode {:04o}, owner {}, group {}", node.mode, node.uid, node.gid))
                .so("Ranks of this user exchange over plain shared memory and see no events of endpoints.")
                .mend("Add the user to the group pcieipc and log in again; in a container, pass `--device /dev/pcieipc`.")
                .fix(
                    "For the user who runs this; effective at the next login.",
                    ["usermod -aG pcieipc \"$SUDO_USER\"".to_owned()],
                ),
        );
    }
}

/// Cards that hang flat from a virtual host bridge.
fn virtual_machine(case: &Look<'_>, report: &mut Report) {
    let tree = case.tree();
    let host = &case.now.host;
    let Some(name) = &host.hypervisor else { return };
    let flat: Vec<_> = case
        .peers()
        .iter()
        .filter(|i| {
            let function = &tree.functions[**i];
            let port = function.parent.map(|p| tree.functions[p].kind);
            // A card with a link that hangs from nothing with one.
            let linkless = !matches!(port, Some(Kind::RootPort | Kind::SwitchDown));
            let integrated = function.capabilities.port == Some(PortType::IntegratedEndpoint);
            linkless && (!integrated || function.kind == Kind::Gpu)
        })
        .map(|i| &tree.functions[*i])
        .collect();
    if flat.is_empty() {
        return;
    }
    let mut finding =
        Finding::new("vm-hides-tree", Severity::Warning, format!("this virtual machine ({name}) hides the PCIe tree"))
            .at_all(flat.iter().map(|f| f.address));
    for function in flat.iter().take(4) {
        finding = finding.seen(file(function, ""), format!("directly below {}", function.root));
    }
    report.add(
        finding
            .seen("hypervisor", name)
            .so("Distances, links and error counters here are those of the virtual machine. Two cards may share a switch or sit in different sockets: nobody inside can tell, and NCCL and others guess wrong.")
            .mend("Trust measurements, not the tree; ask the provider for the topology file of this machine type (NCCL_TOPO_FILE), or run `pcieipc doctor` on the host."),
    );
}
