// SPDX-License-Identifier: MIT OR Apache-2.0
//! Predicts how long a plan takes on a machine that is described in a file.
//!
//! The plans run as they are, step by step, on a model: a rank takes time for each step and for each byte that it loads or
//! stores; ranks may share processors; a record takes each link of its route for as long as its bytes need there, waits
//! until that is free, and arrives after all latencies; a link between ranks holds [`crate::plan::Plan::depth`] records. What is not modelled: caches
//! that get colder, other users of the machine, and protocol overhead beyond the rates in the file.

mod machine;
mod occupancy;

pub use machine::{BUILT_IN, Machine, MachineError, Processes, built_in};

use std::collections::{HashMap, VecDeque};

use occupancy::Occupancy;

use crate::{
    error::Rank,
    plan::{self, Algorithm, Collective, Move, Plan, Shape, Source, Target},
};

/// What a run on the model took.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// Microseconds until the last rank was done.
    pub us: f64,
    /// The link that was busy for longest, and the part of the time that it was.
    pub busiest: Option<(String, f64)>,
    /// What each rank did when: for timelines.
    pub steps: Vec<Span>,
}

/// One step of one rank on the model's clock.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// Whose.
    pub rank: Rank,
    /// In which phase.
    pub phase: usize,
    /// In which window.
    pub window: usize,
    /// When it began, in microseconds.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// The windows into which a message is cut at most: what more would change is below the model's error.
const MOST_WINDOWS: usize = 24;

/// Predicts a collective of `bytes` (of `element` bytes each) with an algorithm, or `None` where there is no such plan. As in nccl-tests and
/// `pcieipc bench` these are the bytes of a rank's larger buffer, of which a reduce-scatter, all-gather or all-to-all makes a block for each rank. Plans
/// for more ranks than executors serve are made too.
///
/// ```
/// use pcieipc::{plan::{Algorithm, Collective}, sim};
///
/// let machine = sim::built_in("eight-on-a-switch")?;
/// let us = |algorithm| sim::predict(&machine, Collective::AllReduce, algorithm, 1024, 4).unwrap().us;
/// assert!(us(Algorithm::OneShot) < us(Algorithm::Ring));
/// # Ok::<(), sim::MachineError>(())
/// ```
pub fn predict(
    machine: &Machine,
    collective: Collective,
    algorithm: Algorithm,
    bytes: usize,
    element: usize,
) -> Option<Prediction> {
    let ranks = machine.ranks();
    let whole = bytes / element.max(1);
    // A plan counts the elements of one rank's block where it has blocks.
    let blocks = match collective {
        Collective::ReduceScatter | Collective::AllGather | Collective::AllToAll => ranks.max(1),
        _ => 1,
    };
    let count = whole / blocks;
    let shard = if algorithm == Algorithm::OneShot { count } else { count.div_ceil(ranks) };
    let chunk = (machine.chunk / element.max(1)).max(1).max(shard.div_ceil(MOST_WINDOWS));
    let shape = Shape { align: (64 / element.max(1)).max(1), ..Shape::new(ranks, count, chunk) };
    let tree = machine.tree();
    let plans: Option<Vec<Plan>> = (0..ranks).map(|rank| plan::build(collective, algorithm, shape, rank, &tree)).collect();
    run(machine, &plans?, element)
}

/// Runs plans on the model; `None` where they wait for each other for ever, which checked plans do not.
///
/// ```
/// use pcieipc::{plan::{self, Algorithm, Collective, Shape}, sim};
///
/// let machine = sim::built_in("four-on-a-switch")?;
/// let plan = |rank| plan::build(Collective::Broadcast, Algorithm::Star, Shape::new(4, 1000, 100), rank, &machine.tree()).unwrap();
/// let prediction = sim::run(&machine, &(0..4).map(plan).collect::<Vec<_>>(), 4).unwrap();
/// println!("{} us, {:?}", prediction.us, prediction.busiest);
/// # Ok::<(), sim::MachineError>(())
/// ```
pub fn run(machine: &Machine, plans: &[Plan], element: usize) -> Option<Prediction> {
    let n = plans.len();
    let programs: Vec<Vec<Move<'_>>> = plans.iter().map(|p| p.program().collect()).collect();
    let mut state = State {
        machine,
        element,
        next: vec![0; n],
        clock: vec![0.0; n],
        processors: vec![0.0; machine.processors.unwrap_or(n).max(1)],
        records: HashMap::new(),
        rooms: HashMap::new(),
        links: vec![Occupancy::default(); machine.directed()],
        steps: Vec::new(),
    };
    // Always the step that can begin first: so records take links in the order in which they come to them.
    loop {
        let candidate = (0..n)
            .filter_map(|rank| Some((state.ready(rank, &plans[rank], programs[rank].get(state.next[rank])?)?, rank)))
            .min_by(|a, b| a.0.total_cmp(&b.0));
        let Some((start, rank)) = candidate else { break };
        let step = programs[rank][state.next[rank]];
        state.fire(rank, step, start);
        state.next[rank] += 1;
    }
    if state.next.iter().zip(&programs).any(|(next, program)| *next < program.len()) {
        return None;
    }
    let us = state.clock.iter().copied().fold(0.0, f64::max);
    let busiest =
        state.links.iter().map(Occupancy::busy).enumerate().max_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, b)| *b > 0.0);
    let busiest = busiest.map(|(link, busy)| (machine.name_of(link), busy / us));
    Some(Prediction { us, busiest, steps: state.steps })
}

struct State<'a> {
    machine: &'a Machine,
    element: usize,
    next: Vec<usize>,
    clock: Vec<f64>,
    processors: Vec<f64>,
    /// When records on their way arrive, by link.
    records: HashMap<(Rank, Rank), VecDeque<f64>>,
    /// When room came free again, by link: a list of all releases, and how many records were sent.
    rooms: HashMap<(Rank, Rank), (Vec<f64>, usize)>,
    /// When each directed link is taken.
    links: Vec<Occupancy>,
    steps: Vec<Span>,
}

impl State<'_> {
    /// When the rank's next step can begin, if that is known already.
    fn ready(&self, rank: Rank, plan: &Plan, next: &Move<'_>) -> Option<f64> {
        let mut start = self.clock[rank].max(self.processors[rank % self.processors.len()]);
        for source in &next.step.sources {
            if let Source::Link { from, .. } | Source::Signal(from) = *source {
                start = start.max(*self.records.get(&(from, rank))?.front()?);
            }
        }
        for target in &next.step.targets {
            if let Target::Link { to, .. } | Target::Signal(to) = *target {
                let Some((released, sent)) = self.rooms.get(&(rank, to)) else { continue };
                if let Some(needed) = sent.checked_sub(plan.depth) {
                    start = start.max(*released.get(needed)?);
                }
            }
        }
        Some(start)
    }

    fn fire(&mut self, rank: Rank, Move { window, phase, step, len, .. }: Move<'_>, start: f64) {
        let bytes = (len * self.element) as f64;
        let mut loads = 0.0;
        let mut fetched = start;
        for source in &step.sources {
            match *source {
                Source::Signal(_) => {}
                Source::PeerInput { of, .. } | Source::PeerOutput { of, .. } => {
                    loads += bytes;
                    fetched = fetched.max(self.carry(of, rank, bytes, start));
                }
                _ => loads += bytes,
            }
        }
        let data = step.targets.iter().filter(|t| !matches!(t, Target::Signal(_))).count() as f64;
        let combines = step.sources.iter().filter(|s| !matches!(s, Source::Signal(_))).count() > 1;
        let stores = match (self.machine.engines, combines) {
            (false, _) => bytes * data,
            (true, true) => bytes,
            // Engines move what is only copied.
            (true, false) => {
                loads = 0.0;
                0.0
            }
        };
        let work = self.machine.step_us + loads / self.machine.load_gbps / 1e3 + stores / self.machine.store_gbps / 1e3;
        let end = (start + work).max(fetched);
        self.clock[rank] = end;
        let processors = self.processors.len();
        self.processors[rank % processors] = end;
        for source in &step.sources {
            if let Source::Link { from, .. } | Source::Signal(from) = *source {
                if let Some(queue) = self.records.get_mut(&(from, rank)) {
                    queue.pop_front();
                }
                self.rooms.entry((from, rank)).or_default().0.push(end);
            }
        }
        for target in &step.targets {
            let (to, carried) = match *target {
                Target::Link { to, .. } => (to, bytes),
                Target::Signal(to) => (to, 0.0),
                _ => continue,
            };
            let arrival = self.carry(rank, to, carried, end);
            self.records.entry((rank, to)).or_default().push_back(arrival);
            self.rooms.entry((rank, to)).or_default().1 += 1;
        }
        self.steps.push(Span { rank, phase, window, start, end });
    }

    /// Takes the route between two ranks from `start` on; when the last byte arrives.
    fn carry(&mut self, from: Rank, to: Rank, bytes: f64, start: f64) -> f64 {
        let machine = self.machine;
        let (mut begin, mut arrival) = (start, start);
        for &link in machine.route(from, to) {
            // A link passes the first bytes on before the last have come.
            let (time, latency) = (bytes / machine.rate(link) / 1e3, machine.latency(link));
            let taken = self.links[link].take(begin, time);
            begin = taken + latency;
            arrival = (arrival + latency).max(taken + time + latency);
        }
        arrival
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Shares;

    fn time(machine: &Machine, algorithm: Algorithm, bytes: usize) -> f64 {
        predict(machine, Collective::AllReduce, algorithm, bytes, 4).unwrap().us
    }

    #[test]
    fn a_large_two_shot_and_ring_come_near_the_bound_of_the_links() {
        let machine = built_in("eight-on-a-switch").unwrap();
        let bytes = 256 << 20;
        // 2 (n - 1) / n · S / B for n = 8.
        let bound = 2.0 * 7.0 / 8.0 * bytes as f64 / machine.rate(0) / 1e3;
        for algorithm in [Algorithm::TwoShot, Algorithm::Ring] {
            let us = time(&machine, algorithm, bytes);
            assert!(us >= bound * 0.99 && us < bound * 1.6, "{algorithm}: {us} against a bound of {bound}");
        }
    }

    #[test]
    fn small_messages_want_few_hops_and_large_ones_little_traffic() {
        let machine = built_in("eight-on-a-switch").unwrap();
        assert!(time(&machine, Algorithm::OneShot, 1024) < time(&machine, Algorithm::Ring, 1024));
        assert!(time(&machine, Algorithm::OneShot, 64 << 20) > time(&machine, Algorithm::TwoShot, 64 << 20));
    }

    #[test]
    fn across_sockets_hierarchical_beats_two_shot() {
        let machine = built_in("two-sockets-of-four").unwrap();
        assert!(time(&machine, Algorithm::Hierarchical, 64 << 20) < time(&machine, Algorithm::TwoShot, 64 << 20));
    }

    #[test]
    fn a_contended_link_is_named_and_no_link_is_busier_than_the_time() {
        let machine = built_in("two-sockets-of-four").unwrap();
        let prediction = predict(&machine, Collective::AllReduce, Algorithm::TwoShot, 64 << 20, 4).unwrap();
        let (link, busy) = prediction.busiest.unwrap();
        assert!(link.contains("socket") && busy > 0.5 && busy <= 1.0 + 1e-9, "{link} {busy}");
    }

    #[test]
    fn ranks_that_share_a_processor_take_turns() {
        let machine = built_in("two-processors").unwrap();
        let shared = machine.with_ranks(4);
        assert!(time(&shared, Algorithm::TwoShot, 16 << 20) > 1.5 * time(&machine, Algorithm::TwoShot, 16 << 20));
    }

    #[test]
    fn after_a_downgrade_shares_by_the_links_come_near_the_bound_of_the_degraded_tree() {
        for (n, slow) in [(4, 6.25), (4, 12.5), (8, 6.25), (8, 12.5)] {
            let rates: Vec<f64> = (0..n).map(|r| if r == 1 { slow } else { 25.0 }).collect();
            let cards: Vec<String> = (0..n).map(|r| format!("\"card{r}\"")).collect();
            let parts: Vec<String> = rates
                .iter()
                .enumerate()
                .map(|(r, rate)| format!("\"card{r}\": {{ \"ranks\": 1, \"down_gbps\": {rate}, \"down_us\": 0.5 }}"))
                .collect();
            let text = format!(
                "{{ \"description\": \"one slow link\", \"top\": \"switch\", \"parts\": {{ {}, \"switch\": {{ \"parts\": [{}], \
                 \"down_gbps\": 25, \"down_us\": 0.1 }} }}, \"step_us\": 0.7, \"load_gbps\": 1000, \"store_gbps\": 1000, \
                 \"engines\": true }}",
                parts.join(", "),
                cards.join(", ")
            );
            let machine = Machine::parse(&text).unwrap();
            let (bytes, element) = (256 << 20, 4);
            let time = |shares: Shares| {
                let shape = Shape { align: 16, shares, ..Shape::new(n, bytes / element, 128 << 10) };
                let plans: Vec<Plan> = (0..n)
                    .map(|r| plan::build(Collective::AllReduce, Algorithm::TwoShot, shape, r, &machine.tree()).unwrap())
                    .collect();
                run(&machine, &plans, element).unwrap().us
            };
            let shares = Shares::for_rates(&rates);
            let bound = shares.time(&rates) * bytes as f64 / 1e3;
            let (before, after) = (time(Shares::default()), time(shares));
            assert!(
                after <= 1.15 * bound,
                "{n} ranks, {slow} GB/s: {after} against a bound of {bound}, {before} with equal shares"
            );
            assert!(after < before, "{after} {before}");
        }
    }

    /// An all-reduce is a reduce-scatter and then an all-gather of a buffer of the same size.
    #[test]
    fn sizes_are_those_of_the_larger_buffer_so_two_halves_take_as_long_as_the_whole() {
        for name in ["four-on-a-switch", "eight-on-a-switch", "sixteen"] {
            let machine = built_in(name).unwrap();
            let us = |collective| {
                let through_rings = Algorithm::ALL.into_iter().filter(|a| *a != Algorithm::Direct);
                let all = through_rings.filter_map(|a| Some(predict(&machine, collective, a, 64 << 20, 4)?.us));
                all.fold(f64::INFINITY, f64::min)
            };
            let [scatter, gather, whole] = [Collective::ReduceScatter, Collective::AllGather, Collective::AllReduce].map(us);
            assert!((0.7..1.3).contains(&((scatter + gather) / whole)), "{name}: {scatter} and {gather} us, {whole} us");
        }
    }

    #[test]
    fn sixty_four_endpoints_are_planned_and_predicted() {
        let machine = built_in("sixty-four").unwrap();
        assert_eq!(machine.ranks(), 64);
        let hierarchical = time(&machine, Algorithm::Hierarchical, 16 << 20);
        assert!(hierarchical.is_finite() && hierarchical > 0.0);
    }

    #[test]
    fn plans_that_wait_for_each_other_have_no_prediction() {
        let machine = built_in("two-processors").unwrap();
        let build =
            |rank| plan::build(Collective::AllReduce, Algorithm::TwoShot, Shape::new(2, 64, 32), rank, &machine.tree()).unwrap();
        let good: Vec<Plan> = (0..2).map(build).collect();
        assert!(run(&machine, &good, 4).is_some());
        // Rank 1 sends nothing.
        let mut bad = good;
        for phase in &mut bad[1].phases {
            phase.iter_mut().for_each(|step| step.targets.retain(|target| !matches!(target, Target::Link { .. })));
        }
        assert_eq!(run(&machine, &bad, 4), None);
    }

    /// One record each way between two ranks; what it takes is worked out by hand, not by the model.
    #[test]
    fn the_time_of_an_all_reduce_is_what_paper_and_pencil_give() {
        let us = |through: &str| {
            let text = format!(
                r#"{{ "description": "on paper", "top": "root", "parts": {{ "root": {{ "ranks": 2, "down_gbps": 1, "down_us": 0.5 {through} }} }},
                    "chunk": 1000000, "step_us": 1, "load_gbps": 10, "store_gbps": 5 }}"#
            );
            time(&Machine::parse(&text).unwrap(), Algorithm::OneShot, 10_000)
        };
        // To copy 10 000 bytes out: 1 for the step, 1 to load, 2 to store. On the way: 10 at 1 GB/s and twice 0.5, since the second link passes
        // on what has come. To add: 1 for the step, 2 to load both, 2 to store. All in microseconds.
        assert!((us("") - (4.0 + 11.0 + 5.0)).abs() < 1e-9, "{}", us(""));
        // Where both directions pass one memory at 1 GB/s, the second record waits until the first one's 10 microseconds are over.
        let contended = us(r#", "through_gbps": 1"#);
        assert!((contended - (4.0 + 21.0 + 5.0)).abs() < 1e-9, "{contended}");
    }
}
