// SPDX-License-Identifier: MIT OR Apache-2.0
//! From a doorbell to a user thread that wakes, and interrupts a second to eventfds: this module beside vfio-pci, on two soft
//! endpoints of one machine, turn by turn. Prints JSON; needs two endpoints that are alone in their IOMMU groups.

use std::{
    collections::HashMap,
    fs,
    time::{Duration, Instant},
};

use guest::{
    abi::*,
    call::{Record, number},
    mapping::{Mapping, PAGE, READ_WRITE},
    pci::Function,
    session::{Export, Node, Session, played},
    vfio, wait,
};
use nix::{
    fcntl::OFlag,
    sched::{CpuSet, sched_setaffinity},
    sys::eventfd::EventFd,
    unistd::Pid,
};
use serde_json::{Value, json};

/// Runs in each arrangement of the two devices.
const RUNS: usize = 6;
/// Doorbells of one run and side.
const RINGS: usize = 400;
/// Rounds of one run and side, each with all vectors.
const ROUNDS: usize = 100;
const VECTORS: usize = 7;
const DOORBELLS: usize = 0x3000;
/// A bound for hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// How a side rings.
enum Bell<'a> {
    Store { page: &'a Mapping, at: usize },
    Call(&'a Export),
}

impl Bell<'_> {
    fn ring(&self, vector: usize) {
        match self {
            Bell::Store { page, at } => page.store32(at + 4 * vector, 1),
            Bell::Call(export) => export.ring().expect("ring"),
        }
    }
}

fn take(eventfd: &EventFd) {
    loop {
        assert!(!wait::polled(eventfd, nix::poll::PollFlags::POLLIN, PATIENCE).is_empty(), "an interrupt is lost");
        if eventfd.read().is_ok() {
            return;
        }
    }
}

/// Median of what `one` takes on each side, in nanoseconds, turn by turn.
fn by_turns(sides: &[(&Bell<'_>, &[EventFd])], rounds: usize, one: impl Fn(&Bell<'_>, &[EventFd])) -> Vec<f64> {
    let mut times = vec![Vec::with_capacity(rounds); sides.len()];
    for round in 0..rounds {
        for turn in 0..sides.len() {
            // Who is first changes, so that nobody always finds what another left.
            let side = (turn + round) % sides.len();
            let (bell, vectors) = sides[side];
            let begin = Instant::now();
            one(bell, vectors);
            times[side].push(begin.elapsed().as_nanos() as f64);
        }
    }
    times.iter_mut().map(|times| median(times)).collect()
}

/// From the store to the return of poll and read.
fn wakeups(sides: &[(&Bell<'_>, &[EventFd])], vector: usize) -> Vec<f64> {
    by_turns(sides, RINGS, |bell, vectors| {
        bell.ring(vector);
        take(&vectors[vector]);
    })
}

/// For each interrupt when all vectors are rung at once, so that none is merged with another.
fn rates(sides: &[(&Bell<'_>, &[EventFd])]) -> Vec<f64> {
    let all = by_turns(sides, ROUNDS, |bell, vectors| {
        (0..VECTORS).for_each(|vector| bell.ring(vector));
        vectors[..VECTORS].iter().for_each(take);
    });
    all.into_iter().map(|time| time / VECTORS as f64).collect()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Processor 0 for this thread and for a device's interrupts.
fn pin(address: &str) {
    let mut processor = CpuSet::new();
    processor.set(0).expect("processor 0");
    sched_setaffinity(Pid::from_raw(0), &processor).expect("affinity");
    for entry in fs::read_dir(format!("/sys/bus/pci/devices/{address}/msi_irqs")).expect("interrupts").flatten() {
        let irq = entry.file_name();
        // One that nobody has requested cannot be moved, and does not matter.
        let _ = fs::write(format!("/proc/irq/{}/smp_affinity_list", irq.to_string_lossy()), "0");
    }
}

fn give_to(address: &str, driver: &str) {
    let device = format!("/sys/bus/pci/devices/{address}");
    if fs::exists(format!("{device}/driver")).expect("sysfs") {
        fs::write(format!("{device}/driver/unbind"), address).expect("unbind");
    }
    fs::write(format!("{device}/driver_override"), driver).expect("override");
    fs::write("/sys/bus/pci/drivers_probe", address).expect("probe");
    assert!(fs::exists(format!("{device}/driver")).expect("sysfs"), "{driver} does not take {address}");
}

/// Locks taken between the interrupt's flow handler and the eventfd, for each interrupt, as the function graph tracer sees it.
fn locks(ring: impl Fn()) -> Option<(f64, Vec<String>)> {
    const TRACING: &str = "/sys/kernel/tracing";
    let set = |file: &str, text: &str| fs::write(format!("{TRACING}/{file}"), text);
    let result = (|| {
        set("current_tracer", "nop").ok()?;
        set("set_ftrace_filter", "_raw_spin_lock* _raw_read_lock* eventfd_signal_mask handle_edge_irq").ok()?;
        set("set_graph_function", "handle_edge_irq").ok()?;
        set("current_tracer", "function_graph").ok()?;
        set("trace", "").ok()?;
        set("tracing_on", "1").ok()?;
        (0..20).for_each(|_| ring());
        set("tracing_on", "0").ok()?;
        fs::read_to_string(format!("{TRACING}/trace")).ok()
    })();
    for (file, text) in [("current_tracer", "nop"), ("set_graph_function", ""), ("set_ftrace_filter", ""), ("tracing_on", "1")] {
        let _ = set(file, text);
    }
    let mut blocks: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut counts = Vec::new();
    let mut last = Vec::new();
    for (processor, what) in
        result.as_deref()?.lines().filter_map(|line| Some((line.split(')').next()?, line.split_once('|')?.1)))
    {
        let name = what.trim().split('(').next().unwrap_or("");
        let block = blocks.entry(processor).or_default();
        if name == "handle_edge_irq" {
            block.clear();
        }
        block.push(name);
        // The end of the outermost function. Interrupts without an eventfd are other devices'.
        if what.starts_with("  }") && block.contains(&"eventfd_signal_mask") {
            last = block.iter().filter(|name| name.starts_with("_raw")).map(|name| (*name).to_owned()).collect();
            counts.push(last.len() as f64);
            block.clear();
        }
    }
    (!counts.is_empty()).then(|| (median(&mut counts), last))
}

/// Register reads and writes that the endpoint saw for each doorbell.
fn accesses(serial: u64, ring: impl Fn()) -> f64 {
    let seen = || played(serial)["accesses"].as_u64().expect("a count");
    let before = seen();
    (0..20).for_each(|_| ring());
    (seen() - before) as f64 / 20.0
}

/// Of one arrangement of the two devices.
struct Measured {
    /// Nanoseconds, by side: stored doorbell, rung by call, vfio.
    wakeups: Vec<Vec<f64>>,
    rates: Vec<Vec<f64>>,
    on_the_way: Value,
}

fn measure(ours: &str, theirs: &str) -> Measured {
    give_to(ours, "pcieipc");
    give_to(theirs, "vfio-pci");
    let node = Node::open(OFlag::empty());
    let at = |id: &u32| Function::at(node.info(*id).expect("info").address).address() == ours;
    let endpoint = node.endpoints().into_iter().find(at).expect("the endpoint");
    let session = Session::on(node, endpoint);
    let eventfds: Vec<EventFd> = (0..VECTORS as u32).map(|vector| session.eventfd(vector)).collect();
    let bell = session.node.get(number::DOORBELL_MAP, pcieipc_doorbell { vector: 0, ..Record::new() });
    let page = session.node.map(bell.map_offset, PAGE, READ_WRITE).expect("the doorbells' page");
    let channel = session.create(64 << 10, 0).expect("a channel");
    let export = channel.export().expect("an export");
    let device = vfio::Device::open(theirs, VECTORS);
    pin(ours);
    pin(theirs);

    let stored = Bell::Store { page: &page, at: bell.page_offset as usize };
    let called = Bell::Call(&export);
    let vfio = Bell::Store { page: &device.bar0, at: DOORBELLS };
    let three: [(&Bell<'_>, &[EventFd]); 3] = [(&stored, &eventfds), (&called, &eventfds), (&vfio, &device.vectors)];
    let two: [(&Bell<'_>, &[EventFd]); 2] = [(&stored, &eventfds), (&vfio, &device.vectors)];
    // The first run warms up and does not count.
    wakeups(&three, 0);
    let (mut wakes, mut rate) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        wakes.push(wakeups(&three, 0));
        rate.push(rates(&two));
    }
    let once = |bell: &Bell<'_>, vectors: &[EventFd]| {
        bell.ring(0);
        take(&vectors[0]);
    };
    let serial = session.info().serial;
    // vfio-pci's device is the other one.
    let other = serials().into_iter().find(|other| *other != serial).expect("two endpoints");
    let on_the_way = json!({
        "register_accesses_ours": accesses(serial, || once(&stored, &eventfds)),
        "register_accesses_vfio": accesses(other, || once(&vfio, &device.vectors)),
        "locks_ours": locks(|| once(&stored, &eventfds)).map(|(count, names)| json!({"count": count, "names": names})),
        "locks_vfio": locks(|| once(&vfio, &device.vectors)).map(|(count, names)| json!({"count": count, "names": names})),
    });
    Measured { wakeups: wakes, rates: rate, on_the_way }
}

fn serials() -> Vec<u64> {
    let list = guest::session::softdev(&json!({"cmd": "list"}));
    list["endpoints"].as_array().expect("a list").iter().map(|one| one["serial"].as_u64().expect("a serial")).collect()
}

/// Medians over all runs: of ours, of vfio's, and of the ratios run by run.
fn row(case: &str, unit: &str, runs: &[Vec<f64>], ours: usize, peer: usize) -> Value {
    let pick = |side: usize| median(&mut runs.iter().map(|run| run[side]).collect::<Vec<f64>>());
    let mut ratios: Vec<f64> = runs.iter().map(|run| run[ours] / run[peer]).collect();
    let ratio = median(&mut ratios);
    json!({
        "case": case, "bytes": 4, "unit": unit, "ours": pick(ours), "peer_name": "vfio-pci", "peer": pick(peer), "ratio": ratio,
        "runs": runs.len(), "ratio_lowest": ratios.first(), "ratio_highest": ratios.last(), "bar": 1.15,
    })
}

fn main() {
    let addresses: Vec<String> = Function::soft_endpoints().iter().map(|function| function.address().to_owned()).collect();
    assert_eq!(addresses.len(), 2, "{addresses:?}");
    let one = measure(&addresses[0], &addresses[1]);
    let two = measure(&addresses[1], &addresses[0]);
    let wakes: Vec<Vec<f64>> = one.wakeups.into_iter().chain(two.wakeups).collect();
    let rates: Vec<Vec<f64>> = one.rates.into_iter().chain(two.rates).collect();
    let rows = [
        row("doorbell by a store into a mapped page, to a thread that sleeps in poll", "ns", &wakes, 0, 2),
        row("doorbell by a call, to a thread that sleeps in poll; vfio-pci by a store", "ns", &wakes, 1, 2),
        row("an interrupt to its eventfd, seven vectors at once", "ns", &rates, 0, 1),
    ];
    println!("{}", json!({ "rows": rows, "on_the_way": [one.on_the_way, two.on_the_way] }));
}
