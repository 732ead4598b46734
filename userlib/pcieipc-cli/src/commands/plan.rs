// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc plan`: what each rank does in a collective, and the proof that it is right.

use pcieipc::{
    plan::{self, Algorithm, Collective, Plan as RankPlan, Shape, Source, Target, Tree},
    reduce::Kind,
    topology::Address,
};

use crate::{
    bench::steps,
    commands::bench::bytes,
    failure::Failure,
    host_source::{HostSource, place},
};

/// Print the plan of a collective, rank by rank, and check it
#[derive(Debug, clap::Args)]
pub struct Plan {
    /// How many ranks (1 to 16)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    ranks: u8,
    /// all-reduce, reduce-scatter, all-gather, reduce, broadcast, all-to-all, send-receive or barrier
    #[arg(long, default_value_t = Collective::AllReduce)]
    collective: Collective,
    /// Bytes of the buffer (of a block, where the collective has one for each rank), such as 64K or 1M
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = bytes)]
    bytes: usize,
    /// one-shot, two-shot, star, ring, recursive-doubling, hierarchical or direct
    #[arg(long, default_value_t = Algorithm::TwoShot)]
    algorithm: Algorithm,
    /// f64 f32 f16 bf16 i8 i16 i32 i64 u8 u16 u32 u64
    #[arg(long = "type", value_name = "TYPE", default_value_t = Kind::F32)]
    kind: Kind,
    /// Bytes of one record
    #[arg(long, value_name = "SIZE", default_value = "128K", value_parser = bytes)]
    chunk: usize,
    /// Which ranks are near each other, such as '((0 1 2) (3 4 5))'; two halves if left out
    #[arg(long)]
    tree: Option<Tree>,
    /// In place of --tree: the PCI address of each rank's endpoint; its place in the host's tree is looked up. With --snapshot and without
    /// this, the host's first accelerators
    #[arg(long, value_name = "ADDRESS,...", value_delimiter = ',', conflicts_with = "tree")]
    endpoints: Vec<Address>,
    #[command(flatten)]
    source: HostSource,
    /// The root of a reduce or broadcast
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    root: u8,
    /// Also draw the steps of its first windows
    #[arg(long, value_name = "FILE.svg")]
    svg: Option<std::path::PathBuf>,
    /// One JSON object on standard output: the proof
    #[arg(long)]
    pub json: bool,
}

impl Plan {
    pub fn run(self) -> Result<(), Failure> {
        let (ranks, size) = (usize::from(self.ranks), self.kind.size());
        if self.tree.is_some() && !self.source.is_live() {
            return Err(Failure::Use("--tree and --snapshot both say which ranks are near each other; give one of them".into()));
        }
        if !self.endpoints.is_empty() && self.endpoints.len() != ranks {
            return Err(Failure::Use(format!("{} endpoints for {ranks} ranks; name one a rank", self.endpoints.len())));
        }
        let tree = match &self.tree {
            Some(tree) => tree.clone(),
            None if !self.endpoints.is_empty() || !self.source.is_live() => {
                place(self.source.open()?.as_ref(), &self.endpoints, ranks)?.tree
            }
            None if ranks > 2 => Tree::groups(&[ranks.div_ceil(2), ranks / 2]),
            None => Tree::flat(ranks),
        };
        if !tree.covers(ranks) {
            return Err(Failure::Use(format!("the tree {tree} does not hold each of {ranks} ranks once")));
        }
        if usize::from(self.root) >= ranks {
            return Err(Failure::Use(format!("there is no rank {} among {ranks}", self.root)));
        }
        let (count, chunk) = (self.bytes / size, (self.chunk / size).max(1));
        let shape = Shape { align: 64 / size, root: self.root.into(), peer: ranks - 1, ..Shape::new(ranks, count, chunk) };
        let plans: Option<Vec<RankPlan>> =
            (0..ranks).map(|rank| plan::build(self.collective, self.algorithm, shape, rank, &tree)).collect();
        let plans = plans.ok_or_else(|| Failure::Use(format!("{} has no {} algorithm", self.collective, self.algorithm)))?;
        let proof = plan::check(&plans).map_err(|flaw| Failure::Run(format!("the plan is wrong: {flaw}")))?;
        let carried: usize = proof.carried.iter().sum();
        let busiest = proof.carried.iter().max().copied().unwrap_or(0);
        if let Some(file) = &self.svg {
            let title = format!("{} of {count} {}, {ranks} ranks, {}", self.collective, self.kind, self.algorithm);
            std::fs::write(file, steps::draw(&title, &plans)).map_err(|e| Failure::Run(format!("{}: {e}", file.display())))?;
        }
        if self.json {
            println!(
                "{}",
                serde_json::json!({
                    "ok": true, "collective": self.collective.name(), "algorithm": self.algorithm.name(), "ranks": ranks, "count": count,
                    "chunk": chunk, "steps": proof.steps, "depth": plans[0].depth, "most_records_on_a_link": proof.depth,
                    "rank_order": proof.rank_order, "in_place": proof.in_place, "carried_bytes": carried * size, "busiest_link_bytes": busiest * size,
                })
            );
            return Ok(());
        }
        println!(
            "{} of {} {}, {} ranks, {}, records of {} elements",
            self.collective, count, self.kind, ranks, self.algorithm, chunk
        );
        if self.algorithm == Algorithm::Hierarchical {
            println!("tree {tree}");
        }
        for plan in &plans {
            println!("\nrank {}: {} windows, {} scratch places a window", plan.rank, plan.windows(), plan.scratch);
            for (phase, steps) in plan.phases.iter().enumerate() {
                for step in steps {
                    let from: Vec<String> = step.sources.iter().map(source).collect();
                    let to: Vec<String> = step.targets.iter().map(target).collect();
                    let what =
                        if step.len == 0 { String::new() } else { format!("shard {} of {} elements: ", step.shard, step.len) };
                    let arrow = if step.finish { "=>" } else { "->" };
                    println!("  phase {phase}: {what}{} {arrow} {}", from.join(" + "), to.join(", "));
                }
            }
        }
        println!("\n{}", matrix(&proof.carried, ranks, size));
        println!(
            "proved: ends, every output element is right{}, {}; {} steps, at most {} records on a link (room for {})",
            if proof.in_place { " also in place" } else { "" },
            if proof.rank_order { "added in rank order" } else { "not added in rank order" },
            proof.steps,
            proof.depth,
            plans[0].depth
        );
        Ok(())
    }
}

fn source(source: &Source) -> String {
    match source {
        Source::Input(at) => format!("input[{at}]"),
        Source::Output(at) => format!("output[{at}]"),
        Source::Scratch(number) => format!("scratch {number}"),
        Source::Link { from, form } => format!("from {from}{}", if *form == plan::Form::Partial { " (partial)" } else { "" }),
        Source::Signal(from) => format!("signal from {from}"),
        Source::PeerInput { of, start } => format!("input of {of}[{start}]"),
        Source::PeerOutput { of, start } => format!("output of {of}[{start}]"),
    }
}

fn target(target: &Target) -> String {
    match target {
        Target::Output(at) => format!("output[{at}]"),
        Target::Scratch(number) => format!("scratch {number}"),
        Target::Link { to, form } => format!("to {to}{}", if *form == plan::Form::Partial { " (partial)" } else { "" }),
        Target::Signal(to) => format!("signal to {to}"),
    }
}

/// Bytes that each rank sends to each.
fn matrix(carried: &[usize], ranks: usize, size: usize) -> String {
    let mut out = format!("{:>12}", "bytes to");
    (0..ranks).for_each(|to| out.push_str(&format!("{to:>12}")));
    for from in 0..ranks {
        out.push_str(&format!("\n{:>12}", format!("from {from}")));
        (0..ranks).for_each(|to| out.push_str(&format!("{:>12}", carried[from * ranks + to] * size)));
    }
    out
}
