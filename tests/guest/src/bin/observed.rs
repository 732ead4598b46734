// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an administrator sees from outside: fdinfo, debugfs, tracepoints, and how far endpoints are from each other, each compared with
//! what the program did itself or with what sysfs tells of the tree.

use std::{
    collections::HashMap,
    fs,
    os::fd::{AsFd, AsRawFd},
    path::Path,
    process::ExitCode,
};

use guest::{
    abi::*,
    call::{Record, number},
    ktap, machine,
    mapping::PAGE,
    pci::Function,
    promises,
    session::{Channel, Export, Node, SOON, Session, played, signals},
    wait,
};
use nix::{errno::Errno, fcntl::OFlag};

const MIB: u64 = 1 << 20;

/// The keys that a descriptor's fdinfo has of ours.
fn fdinfo(fd: impl AsFd) -> HashMap<String, String> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd())).unwrap();
    let pairs = text.lines().filter_map(|line| line.split_once(":\t"));
    pairs.filter(|(key, _)| key.starts_with("pcieipc-")).map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn assert_keys(found: &HashMap<String, String>, expected: &[(&str, String)]) {
    for (key, value) in expected {
        assert_eq!(found.get(&format!("pcieipc-{key}")), Some(value), "{key} in {found:?}");
    }
    assert_eq!(found.len(), expected.len(), "keys that nobody expects: {found:?}");
}

fn import(session: &Session, export: &Export) -> Result<u32, Errno> {
    let mut import = pcieipc_channel_fd { fd: export.as_fd().as_raw_fd(), ..Record::new() };
    session.node.call(number::CHANNEL_IMPORT, &mut import).map(|()| import.channel)
}

fn device_memory(session: &Session) -> Result<u32, Errno> {
    let mut made = pcieipc_channel_create { data_bytes: PAGE as u64, flags: PCIEIPC_CHANNEL_DEVICE_MEMORY, ..Record::new() };
    session.node.call(number::CHANNEL_CREATE, &mut made).map(|()| made.channel)
}

fn address_of(session: &Session) -> String {
    session.function().address().to_owned()
}

fn fdinfo_tells_what_a_session_and_a_descriptor_hold() {
    let [session, other] = [0, 1].map(Session::nth);
    let bare = Node::open(OFlag::empty());
    assert_keys(&fdinfo(&bare), &[("abi", "1".into())]);
    let channels: Vec<Channel<'_>> = [MIB, 64 << 10].iter().map(|bytes| session.create(*bytes, 2).unwrap()).collect();
    let foreign = other.create(64 << 10, 0).unwrap().export().unwrap();
    import(&session, &foreign).unwrap();
    let export = channels[0].export().unwrap();
    let bell = session.eventfd(2);
    (0..3).for_each(|_| session.ring(2).unwrap());
    export.ring().unwrap();
    assert!(signals(&bell, SOON) > 0);

    let endpoint = |session: &Session| {
        vec![
            ("abi", "1".into()),
            ("endpoint", session.endpoint.to_string()),
            ("pdev", address_of(session)),
            ("state", "live".into()),
            ("generation", session.attached.generation.to_string()),
            ("attached-generation", session.attached.generation.to_string()),
        ]
    };
    let waiting = session.session_state().unwrap().events;
    let of_session = [
        ("channels", "2".to_owned()),
        ("imports", "1".to_owned()),
        // Data, head and tail of both.
        ("memory-locked", format!("{} KiB", 1024 + 64 + 4 * 4)),
        ("doorbells", "3".to_owned()),
        ("events-waiting", waiting.to_string()),
        ("events-lost", "0".to_owned()),
    ];
    assert_keys(&fdinfo(&session.node), &[endpoint(&session), of_session.to_vec()].concat());
    let of_export = |closed: &str| {
        [
            ("channel", format!("{}{closed}", channels[0].id())),
            ("vector", "2".to_owned()),
            ("channel-data", "1024 KiB".to_owned()),
        ]
    };
    assert_keys(&fdinfo(&export), &[endpoint(&session), of_export("").to_vec()].concat());
    channels[0].destroy().unwrap();
    assert_keys(&fdinfo(&export), &[endpoint(&session), of_export(" (closed)").to_vec()].concat());
}

/// Lines `key value` of one endpoint in the module's state.
fn state_of(endpoint: u32) -> HashMap<String, String> {
    let text = fs::read_to_string("/sys/kernel/debug/pcieipc/state").unwrap();
    let block = text.split("endpoint ").find(|block| block.starts_with(&format!("{endpoint} at "))).expect("the endpoint");
    let pairs = block.lines().skip(1).filter_map(|line| line.trim().rsplit_once(' '));
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn debugfs_tells_what_the_module_holds() {
    let all = Node::open(OFlag::empty());
    let endpoint = all.endpoints()[0];
    let number = |key: &str| -> u64 { state_of(endpoint)[key].parse().unwrap() };
    assert_eq!(state_of(endpoint)["attached"], "false");
    let (pages, bytes) = (machine::module_state("pages"), machine::module_state("channel bytes"));
    let (doorbells, vector) = (number("doorbells"), number("vector 1"));
    let session = Session::on(Node::open(OFlag::empty()), endpoint);
    let channels: Vec<Channel<'_>> = (0..3).map(|_| session.create(4 * PAGE as u64, 1).unwrap()).collect();
    let bell = session.eventfd(1);
    session.ring(1).unwrap();
    assert_eq!(signals(&bell, SOON), 1);
    let state = state_of(endpoint);
    assert_eq!((state["state"].as_str(), state["attached"].as_str(), state["copying"].as_str()), ("live", "true", "false"));
    assert_eq!(state["generation"], session.attached.generation.to_string());
    let pieces: u64 = channels.iter().map(|channel| u64::from(channel.made.segments)).sum();
    assert_eq!((number("channels"), number("mappings"), number("ring slots")), (3, 3, pieces));
    assert_eq!((number("doorbells"), number("vector 1")), (doorbells + 1, vector + 1));
    // Each with head and tail.
    assert_eq!(machine::module_state("pages"), pages + 3 * 6);
    assert_eq!(machine::module_state("channel bytes"), bytes + 3 * 6 * PAGE as u64);
    drop(session);
    assert_eq!((number("channels"), number("mappings"), number("ring slots")), (0, 0, 0));
    assert_eq!((machine::module_state("pages"), machine::module_state("channel bytes")), (pages, bytes));
}

fn trace(file: &str) -> String {
    format!("/sys/kernel/tracing/{file}")
}

fn tracepoints_tell_doorbells_interrupts_events_and_changes_of_state_in_their_order() {
    let session = Session::nth(0);
    let (endpoint, before) = (session.endpoint, session.attached.generation);
    let bell = session.eventfd(3);
    fs::write(trace("events/pcieipc/enable"), "1").unwrap();
    fs::write(trace("trace"), "").unwrap();
    session.ring(3).unwrap();
    assert_eq!(signals(&bell, SOON), 1);
    session.function().reset().unwrap();
    let lives = || session.state().0 == PCIEIPC_STATE_LIVE;
    assert!(wait::until(SOON, || lives() && session.state().1 > before), "{:?}", session.state());
    let after = session.state().1;
    fs::write(trace("events/pcieipc/enable"), "0").unwrap();
    let text = fs::read_to_string(trace("trace")).unwrap();
    // The interrupt may come before the call that rang tells of it, so these two have no order.
    let told = |what: &str| text.find(what).unwrap_or_else(|| panic!("no {what:?} in\n{text}"));
    told(&format!("pcieipc_doorbell: endpoint={endpoint} vector=3\n"));
    told(&format!("pcieipc_interrupt: endpoint={endpoint} vector=3\n"));
    let places = [
        format!("pcieipc_state: endpoint={endpoint} from=live to=recovering generation={before}\n"),
        format!("pcieipc_event: endpoint={endpoint} kind=state generation={before} detail=1,2\n"),
        format!("pcieipc_state: endpoint={endpoint} from=recovering to=live generation={after}\n"),
        format!("pcieipc_event: endpoint={endpoint} kind=state generation={after} detail=2,1\n"),
    ]
    .map(|what| told(&what));
    assert!(places.is_sorted(), "{text}");
}

/// The ports above a function, the lowest first, as sysfs has them.
fn ports(address: &str) -> Vec<String> {
    let path = fs::canonicalize(format!("/sys/bus/pci/devices/{address}")).unwrap();
    let parts: Vec<String> = path.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    let is_function = |part: &String| part.len() == 12 && part.matches(':').count() == 2;
    let mut ports: Vec<String> = parts.into_iter().filter(is_function).rev().collect();
    assert_eq!(ports.remove(0), address);
    ports
}

/// Whether a port sends peers' requests, completions or its own egress control up to the root, as its configuration space says.
fn redirects(port: &str) -> bool {
    const ACS: u32 = 0x0d;
    let space = fs::read(Path::new("/sys/bus/pci/devices").join(port).join("config")).unwrap();
    let word = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
    let mut at = 0x100;
    while at + 8 <= space.len() && at >= 0x100 {
        if word(at) & 0xffff == ACS {
            // The control register is the upper half; request redirect, completion redirect, egress control.
            return word(at + 4) >> 16 & 0x2c != 0;
        }
        at = (word(at) >> 20) as usize;
    }
    false
}

struct Expected {
    hops: u32,
    reasons: u32,
}

/// What the tree in sysfs says of two different functions.
fn expected(from: &pcieipc_endpoint_info, to: &pcieipc_endpoint_info) -> Expected {
    let [up, down] = [from, to].map(|info| ports(Function::at(info.address).address()));
    let common = up.iter().find(|port| down.contains(port));
    let below = |ports: &[String]| ports.iter().position(|port| Some(port) == common).unwrap_or(ports.len());
    let (rise, fall) = (below(&up), below(&down));
    // The port where they meet sends up what comes from a function of a card for another, too.
    let redirected = up.iter().take(rise + 1).chain(&down[..fall]).any(|port| redirects(port));
    let whole = up.len() + down.len();
    let far = common.is_none() || redirected;
    let translated = [from, to].iter().any(|info| info.iommu == PCIEIPC_IOMMU_TRANSLATING);
    let sockets = from.numa_node >= 0 && to.numa_node >= 0 && from.numa_node != to.numa_node;
    let reasons = [
        (from.address >> 3 == to.address >> 3, PCIEIPC_FAR_SAME_FUNCTION_CARD),
        (common.is_some() && !redirected, PCIEIPC_FAR_SAME_SWITCH),
        (common.is_none(), PCIEIPC_FAR_HOST_BRIDGE),
        (redirected, PCIEIPC_FAR_ACS_REDIRECT),
        (sockets, PCIEIPC_FAR_SOCKETS),
        (far && translated, PCIEIPC_FAR_IOMMU),
    ];
    let reasons = reasons.iter().filter(|(holds, _)| *holds).map(|(_, reason)| reason).sum();
    Expected { hops: 2 + if redirected { whole } else { rise + fall } as u32, reasons }
}

fn distances_and_their_reasons_are_those_of_the_tree() {
    let node = Node::open(OFlag::empty());
    let infos: Vec<pcieipc_endpoint_info> = node.endpoints().into_iter().map(|id| node.info(id).unwrap()).collect();
    let mut seen = 0;
    for from in &infos {
        for to in &infos {
            let ids = pcieipc_distance { from: from.endpoint, to: to.endpoint, ..Record::new() };
            let far = node.get(number::DISTANCE, ids);
            if from.endpoint == to.endpoint {
                assert_eq!((far.hops, far.reasons, far.p2p), (0, 0, 1), "{far:?}");
                continue;
            }
            let expected = expected(from, to);
            assert_eq!((far.hops, far.reasons), (expected.hops, expected.reasons), "{far:?}");
            // No host bridge that QEMU plays is one that the kernel trusts with peer traffic.
            assert_eq!(far.p2p != 0, far.reasons & PCIEIPC_FAR_SAME_SWITCH != 0, "{far:?}");
            seen |= far.reasons;
        }
    }
    println!("# reasons seen: {seen:#x}");
    let meant = std::env::var("PCIEIPC_REASONS").unwrap();
    assert_eq!(format!("{seen:#x}"), meant, "what this machine was made for");
}

fn memory_of_an_endpoint_too_far_away_is_refused_with_the_reason() {
    let node = Node::open(OFlag::empty());
    let ids = node.endpoints();
    let far = |from: u32, to: u32| node.get(number::DISTANCE, pcieipc_distance { from, to, ..Record::new() });
    let pairs = ids.iter().flat_map(|from| ids.iter().map(move |to| (*from, *to)));
    let (from, to) = pairs.into_iter().find(|&(from, to)| far(from, to).reasons & PCIEIPC_FAR_HOST_BRIDGE != 0).unwrap();
    let [writer, reader] = [from, to].map(|id| Session::on(Node::open(OFlag::empty()), id));
    let export = guest::session::export(&reader.node, device_memory(&reader).unwrap()).unwrap();
    assert_eq!(import(&writer, &export), Err(Errno::EOPNOTSUPP));
    let why =
        format!("{}: does not reach {} directly: the host bridge is between them", address_of(&writer), address_of(&reader));
    assert!(kernel_log().iter().any(|line| line.contains(&why)), "the kernel's log does not say: {why}");
}

/// All of it, without waiting for more.
fn kernel_log() -> Vec<String> {
    let log = fs::OpenOptions::new().read(true).open("/dev/kmsg").unwrap();
    nix::fcntl::fcntl(&log, nix::fcntl::FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    let mut record = [0; 8192];
    let told = std::iter::from_fn(|| nix::unistd::read(&log, &mut record).ok().map(|n| record[..n].to_vec()));
    told.map(|line| String::from_utf8_lossy(&line).into_owned()).collect()
}

/// Whoever could aim a device's DMA would have to know where. What the device was told is asked of the device.
fn nothing_that_is_told_says_where_a_device_finds_a_ring() {
    let watcher = Node::open(OFlag::O_NONBLOCK);
    let session = Session::nth(0);
    fs::write(trace("trace"), "").unwrap();
    fs::write(trace("events/pcieipc/enable"), "1").unwrap();
    let mut made = pcieipc_channel_create { data_bytes: MIB, vector: 2, ..Record::new() };
    session.node.call(number::CHANNEL_CREATE, &mut made).unwrap();
    let export = guest::session::export(&session.node, made.channel).unwrap();
    let addresses: Vec<u64> = serde_json::from_value(played(session.info().serial)["ring_addresses"].clone()).unwrap();
    assert!(!addresses.is_empty() && !addresses.contains(&0), "the device was told: {addresses:?}");
    let id = made.channel;
    let copy = pcieipc_copy {
        from: id,
        to: id,
        to_offset: 64,
        bytes: 64,
        timeout_ms: 10_000,
        flags: PCIEIPC_COPY_RING,
        ..Record::new()
    };
    session.node.get(number::COPY, copy);
    export.ring().unwrap();
    assert_eq!(import(&session, &export).map(drop), Ok(()));
    session.function().reset().unwrap();
    assert!(wait::until(SOON, || session.state().0 == PCIEIPC_STATE_LIVE));
    session.node.get(number::RECOVER, pcieipc_recover::new());
    fs::write(trace("events/pcieipc/enable"), "0").unwrap();

    let file = |path: &str| fs::read_to_string(path).unwrap();
    let infos = [session.node.as_fd().as_raw_fd(), export.as_fd().as_raw_fd()].map(|fd| file(&format!("/proc/self/fdinfo/{fd}")));
    let ours = kernel_log().into_iter().filter(|line| line.contains("pcieipc")).collect::<Vec<_>>().join("\n");
    let text = infos.join("\n") + &file("/sys/kernel/debug/pcieipc/state") + &file(&trace("trace")) + &ours;
    let told = [
        format!("{:?}", session.info()),
        format!("{:?}", export.info().unwrap()),
        format!("{made:?}"),
        format!("{:?}", session.session_state().unwrap()),
        format!("{:?}", session.node.query()),
        format!("{:?}", watcher.events()),
    ];
    let text = text + &told.join("\n");
    assert!(
        text.contains("pcieipc_doorbell") && text.contains("pcieipc-channels"),
        "there was something to look through: {text}"
    );
    for address in addresses {
        for form in [format!("{address:x}"), address.to_string()] {
            assert!(!text.contains(&form), "{form} is told in\n{text}");
        }
    }
}

fn the_kernel_lists_its_bars_as_taken_by_the_module() {
    let session = Session::nth(0);
    let resources = session.function().resources().unwrap();
    let taken = fs::read_to_string("/proc/iomem").unwrap();
    // Registers, which the kernel maps, and the memory, which only users do.
    for bar in [0, 2] {
        let (start, end) = resources[bar];
        assert!(end > start, "{resources:x?}");
        let line = format!("{start:08x}-{end:08x} : pcieipc");
        assert!(taken.lines().any(|taken| taken.trim() == line), "no {line} in {taken}");
    }
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            fdinfo_tells_what_a_session_and_a_descriptor_hold,
            debugfs_tells_what_the_module_holds,
            tracepoints_tell_doorbells_interrupts_events_and_changes_of_state_in_their_order,
            distances_and_their_reasons_are_those_of_the_tree,
            memory_of_an_endpoint_too_far_away_is_refused_with_the_reason,
            nothing_that_is_told_says_where_a_device_finds_a_ring,
            the_kernel_lists_its_bars_as_taken_by_the_module,
        ],
        machine::repair,
    )
}
