// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc cuda bench`: all-reduce of device memory, beside NCCL and others, interleaved.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Duration,
};

use comfy_table::{Table, presets::NOTHING};
use serde::Serialize;

use super::{
    crew::Crew,
    order::{Order, Shape},
    team::{Making, Team},
};
use crate::failure::Failure;

/// Measure all-reduce of device memory beside NCCL and others, one process a device
#[derive(clap::Args)]
pub struct Bench {
    /// How many ranks
    #[arg(long, default_value_t = 2)]
    pub ranks: usize,
    /// peer, host, auto (what there is, beside the peers of the peer path), or both one after the other
    #[arg(long, default_value = "both", value_parser = ["peer", "host", "auto", "both"])]
    pub path: String,
    #[command(flatten)]
    pub making: Making,
    /// Sizes in bytes, separated by commas; KiB, MiB and GiB as suffixes
    #[arg(long, default_value = "1KiB,4KiB,8KiB,16KiB,64KiB,256KiB,512KiB,1MiB,2MiB,4MiB,16MiB,64MiB,256MiB,1GiB")]
    pub sizes: String,
    /// Element type
    #[arg(long, default_value = "bf16")]
    pub kind: String,
    /// Rounds in which the sides take turns; the median counts
    #[arg(long, default_value_t = 7)]
    pub rounds: usize,
    /// Beside ours: nccl, nccl-ring-ll, symm, flashinfer on the peer path; nccl-no-p2p, nccl-no-p2p-ll and nccl-copy-1 to -3 on the host path
    #[arg(long, default_value = "")]
    pub compare: String,
    /// Replays of a CUDA graph; otherwise eager calls
    #[arg(long)]
    pub graph: bool,
    /// Results into the inputs
    #[arg(long)]
    pub in_place: bool,
    /// The script that runs torch's symmetric memory and FlashInfer
    #[arg(long, default_value = "scripts/gpu-peers.py")]
    pub script: PathBuf,
    /// FlashInfer's sources
    #[arg(long)]
    pub flashinfer: Option<PathBuf>,
    /// Writes everything here
    #[arg(long)]
    pub json: Option<PathBuf>,
}

#[derive(Serialize)]
struct Row {
    path: &'static str,
    bytes: u64,
    graph: bool,
    in_place: bool,
    /// Median over the rounds of the slowest rank, microseconds.
    us: BTreeMap<String, f64>,
    /// All rounds.
    rounds: BTreeMap<String, Vec<f64>>,
    /// What was timed otherwise than the row says.
    notes: BTreeMap<String, String>,
    best_peer: Option<String>,
    ratio: Option<f64>,
    /// By what NCCL's sides went.
    transports: BTreeMap<String, String>,
}

struct Running {
    name: String,
    crew: Option<Crew>,
    /// Its graphs do not finish at this size and above.
    eager_from: u64,
    /// Where NCCL tells what it does.
    log: Option<PathBuf>,
}

/// The transports that NCCL names in what it tells of its channels, as `P2P/CUMEM/read` or `SHM/direct/direct`.
fn transports(log: &str) -> BTreeSet<String> {
    let of_channel = |line: &str| {
        let (_, channel) = line.split_once("NCCL INFO Channel ")?;
        let (pair, by) = channel.split_once(" via ")?;
        pair.contains(" -> ").then(|| by.trim().to_owned())
    };
    log.lines().filter_map(of_channel).collect()
}

impl Running {
    /// The transports of all its processes; none where it is not NCCL, or told nothing.
    fn transports(&self) -> Option<String> {
        let files =
            std::fs::read_dir(self.log.as_ref()?).ok()?.filter_map(|file| std::fs::read_to_string(file.ok()?.path()).ok());
        let all: BTreeSet<String> = files.flat_map(|text| transports(&text)).collect();
        (!all.is_empty()).then(|| all.into_iter().collect::<Vec<_>>().join(", "))
    }
}

pub fn size(text: &str) -> Result<u64, Failure> {
    let bad = || Failure::Use(format!("{text} is not a size"));
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..split].parse().map_err(|_| bad())?;
    let unit = match &text[split..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err(bad()),
    };
    number.checked_mul(unit).ok_or_else(bad)
}

pub fn shown(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 && b % (1 << 30) == 0 => format!("{} GiB", b >> 30),
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Calls of about two milliseconds in all, through buffers that are not used twice in a row.
pub fn shape(bytes: u64, kind: &str, graph: bool, in_place: bool) -> Shape {
    let guess_us = 3.0 + bytes as f64 / 30e3;
    let calls = if bytes <= 4 << 20 {
        40
    } else if bytes <= 64 << 20 {
        6
    } else {
        2
    };
    let replays = ((2500.0 / (guess_us * f64::from(calls))).ceil() as u32).clamp(1, 20);
    Shape { bytes, kind: kind.to_owned(), graph, in_place, calls, replays, candidate: None }
}

impl Bench {
    fn start(&self, name: &str, path: &str, largest: u64, place: &Path) -> Result<Running, Failure> {
        let directory = place.join(format!("{path}-{name}"));
        std::fs::create_dir_all(&directory).map_err(|e| Failure::Run(e.to_string()))?;
        let (ranks, kinds, making) = (self.ranks, self.kind.as_str(), self.making);
        let ours = |side: &str| Team { side, ranks, path, kinds, largest, making }.workers(&directory);
        let with = |settings: &[(&str, &str)]| -> Result<Vec<Command>, Failure> {
            let mut commands = ours("nccl")?;
            for command in &mut commands {
                command.envs(settings.iter().copied());
            }
            Ok(commands)
        };
        let mut eager_from = u64::MAX;
        let mut commands = match name {
            "pcieipc" => ours("ours")?,
            "unchecked" => {
                let mut commands = ours("ours")?;
                for command in &mut commands {
                    command.env("PCIEIPC_KERNEL_DEFINES", "PCIEIPC_UNCHECKED");
                }
                commands
            }
            "nccl" => with(&[])?,
            "nccl-ring-ll" => with(&[("NCCL_PROTO", "LL"), ("NCCL_ALGO", "Ring")])?,
            "nccl-no-p2p" => with(&[("NCCL_P2P_DISABLE", "1")])?,
            "nccl-no-p2p-ll" => with(&[("NCCL_P2P_DISABLE", "1"), ("NCCL_PROTO", "LL"), ("NCCL_ALGO", "Ring")])?,
            "nccl-copy-1" | "nccl-copy-2" | "nccl-copy-3" => {
                eager_from = 1 << 20;
                with(&[("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_USE_CUDA_MEMCPY", "1"), ("NCCL_SHM_MEMCPY_MODE", &name[10..])])?
            }
            "symm" | "flashinfer" => {
                let make = |rank: usize| {
                    let mut command = Command::new("python3");
                    command.arg(&self.script).args([name, &rank.to_string(), &self.ranks.to_string()]).arg(&directory);
                    command.arg(largest.to_string());
                    if let Some(folder) = &self.flashinfer {
                        command.arg(folder);
                    }
                    command
                };
                (0..self.ranks).map(make).collect()
            }
            other => return Err(Failure::Use(format!("there is no side {other}"))),
        };
        // What it tells of its channels goes into a folder of the run.
        let log = if name.starts_with("nccl") {
            let log = directory.join("nccl");
            std::fs::create_dir_all(&log).map_err(|e| Failure::Run(e.to_string()))?;
            for command in &mut commands {
                command.env("NCCL_DEBUG", "INFO").env("NCCL_DEBUG_FILE", log.join("%p"));
            }
            Some(log)
        } else {
            None
        };
        for command in &mut commands {
            // A program that uses NVLink's multicast can put the devices of the host out of service.
            command.envs([("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1")]);
        }
        Ok(Running { name: name.to_owned(), crew: Some(Crew::start(commands)?), eager_from, log })
    }

    fn shape(&self, bytes: u64, graph: bool) -> Shape {
        shape(bytes, &self.kind, graph, self.in_place)
    }

    fn row(&self, path: &'static str, bytes: u64, sides: &mut [Running]) -> Row {
        let mut row = Row {
            path,
            bytes,
            graph: self.graph,
            in_place: self.in_place,
            us: BTreeMap::new(),
            rounds: BTreeMap::new(),
            notes: BTreeMap::new(),
            best_peer: None,
            ratio: None,
            transports: BTreeMap::new(),
        };
        for side in sides.iter_mut() {
            let graph = self.graph && bytes < side.eager_from;
            let Some(crew) = &mut side.crew else { continue };
            let wait = Duration::from_secs(if side.name == "flashinfer" { 240 } else { 60 });
            let answers = crew.ask(&Order::Prepare(self.shape(bytes, graph)), wait);
            if let Some(error) = answers.into_iter().find_map(|a| a.error) {
                row.notes.insert(side.name.clone(), error.clone());
                if error.starts_with("no answer") || error.starts_with("its process") {
                    side.crew = None;
                }
                continue;
            }
            row.rounds.insert(side.name.clone(), Vec::new());
            if self.graph && !graph {
                row.notes.insert(side.name.clone(), "eager: its graph does not finish".into());
            }
        }
        for _ in 0..self.rounds {
            for side in sides.iter_mut() {
                let (Some(crew), Some(rounds)) = (&mut side.crew, row.rounds.get_mut(&side.name)) else { continue };
                let answers = crew.ask(&Order::Measure, Duration::from_secs(30));
                match answers.iter().map(|a| a.us).collect::<Option<Vec<f64>>>() {
                    Some(times) => rounds.push(times.into_iter().fold(0.0, f64::max)),
                    None => {
                        let error = answers.into_iter().find_map(|a| a.error).unwrap_or_default();
                        row.notes.insert(side.name.clone(), error);
                        row.rounds.remove(&side.name);
                        side.crew = None;
                    }
                }
            }
        }
        row.transports = sides.iter().filter_map(|side| Some((side.name.clone(), side.transports()?))).collect();
        row.us = row.rounds.iter().map(|(name, rounds)| (name.clone(), median(rounds))).collect();
        let peers =
            row.us.iter().filter(|(name, _)| !["pcieipc", "unchecked"].contains(&name.as_str()) && !name.ends_with("-ll"));
        let best = peers.min_by(|a, b| a.1.total_cmp(b.1)).map(|(name, us)| (name.clone(), *us));
        if let (Some((name, us)), Some(ours)) = (best, row.us.get("pcieipc")) {
            row.ratio = Some(ours / us);
            row.best_peer = Some(name);
        }
        row
    }

    pub fn run(self) -> Result<ExitCode, Failure> {
        let sizes = self.sizes.split(',').map(size).collect::<Result<Vec<_>, _>>()?;
        let largest = sizes.iter().copied().max().unwrap_or(0);
        let place = tempfile::tempdir().map_err(|e| Failure::Run(format!("can not make a directory: {e}")))?;
        let mut rows = Vec::new();
        for path in ["peer", "host", "auto"] {
            if self.path != path && (self.path != "both" || path == "auto") {
                continue;
            }
            let fits = |name: &&str| {
                !name.is_empty() && (path == "host") == (name.contains("no-p2p") || name.contains("copy")) || *name == "unchecked"
            };
            let names: Vec<&str> = std::iter::once("pcieipc").chain(self.compare.split(',').filter(fits)).collect();
            let mut sides =
                names.iter().map(|name| self.start(name, path, largest, place.path())).collect::<Result<Vec<_>, _>>()?;
            let mut table = Table::new();
            table.load_preset(NOTHING);
            let head = ["bytes".to_owned()].into_iter().chain(names.iter().map(|n| format!("{n} us")));
            table.set_header(head.chain(["GB/s".to_owned(), "best peer".to_owned(), "ratio".to_owned()]));
            for &bytes in &sizes {
                let row = self.row(path, bytes, &mut sides);
                let cell = |name: &&str| row.us.get(*name).map_or_else(|| "-".to_owned(), |us| format!("{us:.2}"));
                let ours = row.us.get("pcieipc").map_or_else(|| "-".to_owned(), |us| format!("{:.1}", bytes as f64 / us / 1e3));
                let cells = [shown(bytes)].into_iter().chain(names.iter().map(cell));
                table.add_row(cells.chain([
                    ours,
                    row.best_peer.clone().unwrap_or_default(),
                    row.ratio.map_or_else(String::new, |r| format!("{r:.3}")),
                ]));
                for (name, note) in &row.notes {
                    eprintln!("{path} {} {name}: {note}", shown(bytes));
                }
                rows.push(row);
            }
            println!(
                "{path} path, {} ranks, {} sum, {}, {}",
                self.ranks,
                self.kind,
                if self.graph { "graph replays" } else { "eager calls" },
                if self.in_place { "in place" } else { "out of place" }
            );
            println!("{table}");
            for side in sides.iter().filter(|side| side.log.is_some()) {
                println!("{} goes by {}", side.name, side.transports().unwrap_or_else(|| "what it does not say".into()));
            }
            for side in sides {
                if let Some(crew) = side.crew {
                    crew.quit();
                }
            }
        }
        if let Some(file) = &self.json {
            let text = serde_json::to_string_pretty(&rows).map_err(|e| Failure::Run(e.to_string()))?;
            std::fs::write(file, text).map_err(|e| Failure::Run(format!("can not write {}: {e}", file.display())))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(size("12").unwrap(), 12);
        assert_eq!(size("64KiB").unwrap(), 65536);
        assert_eq!(size("1GiB").unwrap(), 1 << 30);
        for bad in ["", "x", "1kb", "99999999999GiB"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_transports_of_nccl_are_those_that_its_channels_name() {
        let log = "host:7:9 [0] NCCL INFO NET/Plugin: could not find libnccl-net.so\n\
                   host:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n\
                   host:8:8 [1] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/CUMEM/read\n\
                   host:8:8 [1] NCCL INFO Channel 02 : 1[1] -> 0[0] [receive] via SHM/direct/direct\n\
                   host:8:8 [1] NCCL INFO Connected all rings, via nothing\n\
                   host:8:8 [1] NCCL INFO Channel 00/02 : 0 1\n";
        let told: Vec<String> = transports(log).into_iter().collect();
        assert_eq!(told, ["P2P/CUMEM/read", "SHM/direct/direct"]);
        assert!(transports("").is_empty());
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert!(median(&[]).is_nan());
    }
}
