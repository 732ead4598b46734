// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc demo`: reduce, lose a rank in the middle of the next reduce, go on without it, and report.

use std::{fs, io, path::Path, path::PathBuf, time::Duration};

use pcieipc::device::EndpointInfo;

use crate::{
    demo::{EndpointCount, Fault, Report, Story, draw, tree_of},
    failure::{Failure, with_remedy},
    group::{Group, GroupArguments},
    module,
    ranks::{Counters, Crew, Mover, Rehearsal, Report as Heard, now_ns},
    scratch::Scratch,
    supervisor::{Interruption, Supervisor},
    tally,
};

/// How long the ranks go on reducing when the loss does not come.
const PATIENCE: Duration = Duration::from_secs(60);

/// Rehearse a loss: reduce, lose one rank in the middle of the next reduce, go on without it; writes report.json and report.svg
#[derive(Debug, clap::Args)]
pub struct Demo {
    #[command(flatten)]
    group: GroupArguments,
    /// The rank that is lost: its endpoint is removed through sysfs (kmod; needs root), or its process is killed (shm)
    #[arg(long, value_name = "RANK", default_value_t = 2)]
    victim: usize,
    /// Where report.json and report.svg go
    #[arg(long, value_name = "DIRECTORY", default_value = "target/demo")]
    out: PathBuf,
    /// The report on standard output instead of the tables
    #[arg(long)]
    pub json: bool,
}

impl Demo {
    pub fn run(self) -> Result<(), Failure> {
        let group = self.group.prepare()?;
        if group.ranks() < 3 || self.victim >= group.ranks() {
            return Err(Failure::Use("a rehearsal needs three ranks or more, and --victim is one of them".into()));
        }
        let say = |line: String| {
            if !self.json {
                println!("{line}")
            }
        };
        say(format!("transport: {} ({})", group.choice.name, group.choice.why));
        let addresses: Vec<String> = group.choice.endpoints.iter().map(|endpoint| endpoint.address.clone()).collect();
        let fault =
            addresses.get(self.victim).map_or(Fault::KillProcess, |address| Fault::RemoveEndpoint { address: address.clone() });
        fault.permitted().map_err(|error| Failure::Run(format!("{}: {error}; run as root", fault.name())))?;
        let tree = tree_of(Path::new("/sys/bus/pci/devices"), &addresses)
            .map_err(|error| Failure::Run(format!("reading the PCIe tree: {error}")))?;

        let (story, supervisor, struck) = self.lose(&group, &fault)?;
        let at_ns = struck.unwrap_or_else(now_ns);
        let loss = story.loss(fault.name(), addresses.get(self.victim).cloned(), at_ns, group.timeout().as_secs_f64());
        let mut complaints: Vec<String> =
            supervisor.verdict(Some(self.victim)).err().map(|failure| failure.to_string()).into_iter().collect();
        if struck.is_none() {
            complaints.push("the ranks ended before anything was taken away".into());
        } else {
            complaints.extend(story.complaints(&loss, at_ns));
        }

        let endpoints = self.counted(&group, &supervisor)?;
        for endpoint in endpoints.iter().filter(|endpoint| endpoint.dma_bytes != endpoint.asked_bytes) {
            let EndpointCount { rank, dma_bytes, asked_bytes, .. } = endpoint;
            complaints
                .push(format!("the engine of rank {rank} moved {dma_bytes} bytes, not the {asked_bytes} that it was asked for"));
        }
        if self.group.mover == Mover::Engine && endpoints.iter().any(|endpoint| endpoint.dma_bytes == 0) {
            complaints.push("an engine moved nothing".into());
        }

        let (before, after) = (story.before.rows(), story.after.rows());
        let (total_before, total_after) = (tally::total(&before), tally::total(&after));
        let counters = supervisor.counters.iter().fold(Default::default(), |sum: Counters, one| sum.plus(*one));
        let survivors = loss.errors.len();
        let report = Report {
            ranks: group.ranks(),
            bytes: group.bytes(),
            wrong: total_before.wrong.unwrap_or(0) + total_after.wrong.unwrap_or(0),
            doorbells: counters.doorbells,
            interrupts: counters.interrupts,
            wakeups: counters.wakeups,
            transport: group.choice.name,
            why: group.choice.why.clone(),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().into(),
            fault: loss,
            survivors,
            dma_bytes: counters.dma_bytes,
            seconds: story.seconds(),
            tensors: before,
            after,
            timeline: story.timeline(),
            endpoints,
            tree,
        };
        self.write(&report).map_err(|error| Failure::Run(format!("{}: {error}", self.out.display())))?;

        say(format!("\n{} ranks:\n{}", report.ranks, tally::table(&report.tensors, &total_before, story.before.seconds())));
        for EndpointCount { rank, address, dma_bytes, interrupts, .. } in &report.endpoints {
            say(format!(
                "rank {rank}: endpoint {address} moved {dma_bytes} bytes with its engine and raised {interrupts} interrupts"
            ));
        }
        say(format!("\n{} of rank {} in the middle of a further reduce:", report.fault.kind, self.victim));
        for error in &report.fault.errors {
            say(format!("  rank {} after {}: {}", error.rank, tally::time(error.after), error.text));
        }
        say(format!("\n{} survivors:\n{}", report.survivors, tally::table(&report.after, &total_after, story.after.seconds())));
        if self.json {
            println!("{}", serde_json::to_string(&report).unwrap_or_default());
        }
        if complaints.is_empty() { Ok(()) } else { Err(Failure::Told(complaints.join("\n"))) }
    }

    /// Runs the ranks, strikes when all are reducing; gives what was heard and when the fault was.
    fn lose(&self, group: &Group, fault: &Fault) -> Result<(Story, Supervisor, Option<u64>), Failure> {
        let interruption = Interruption::catch()?;
        let meeting = Scratch::new()?;
        let mut jobs = group.jobs(meeting.path(), true);
        for job in &mut jobs {
            job.rehearsal = Some(Rehearsal { victim: self.victim, patience: PATIENCE });
        }
        let crew = Crew::start(&jobs).map_err(|error| Failure::Run(format!("starting the ranks: {}", with_remedy(&error))))?;
        let tensors = group.files.first().map_or(&[][..], |file| file.tensors());
        let mut story = Story::new(group.ranks(), self.victim, tensors);
        let mut supervisor = Supervisor::new(crew, group, interruption);
        let mut struck = None;
        let mut removal = None;
        while let Some((rank, report)) = supervisor.next()? {
            if let Heard::Failed { text, .. } = &report {
                eprintln!("rank {rank}: {text}");
            }
            story.add(rank, report);
            if struck.is_none() && story.ripe() {
                struck = Some(now_ns());
                let fault = fault.clone();
                match fault {
                    Fault::KillProcess => supervisor.kill(self.victim),
                    // Removal waits for the driver's unbind; the reports must be heard meanwhile.
                    Fault::RemoveEndpoint { .. } => removal = Some(std::thread::spawn(move || fault.remove())),
                }
            }
        }
        if let Some(removal) = removal {
            let outcome = removal.join().unwrap_or_else(|_| Err(io::Error::other("the removing thread panicked")));
            outcome.map_err(|error| Failure::Run(format!("removing the endpoint: {error}")))?;
        }
        Ok((story, supervisor, struck))
    }

    /// What the module counted at the endpoints that are left since the transport was chosen.
    fn counted(&self, group: &Group, supervisor: &Supervisor) -> Result<Vec<EndpointCount>, Failure> {
        if group.choice.endpoints.is_empty() {
            return Ok(Vec::new());
        }
        let node = module::open().map_err(|obstacle| Failure::Run(obstacle.to_string()))?;
        let now = module::endpoints(&node).map_err(|error| Failure::Run(error.to_string()))?;
        let ranks = group.choice.endpoints.iter().zip(&supervisor.counters).enumerate().filter(|(rank, _)| *rank != self.victim);
        let count = |(rank, (before, counters)): (usize, (&EndpointInfo, &Counters))| {
            let after = now.iter().find(|endpoint| endpoint.id == before.id)?;
            Some(EndpointCount {
                rank,
                address: before.address.clone(),
                dma_bytes: after.dma_bytes - before.dma_bytes,
                asked_bytes: counters.dma_bytes,
                interrupts: after.interrupts - before.interrupts,
            })
        };
        ranks
            .map(|rank| count(rank).ok_or_else(|| Failure::Run(format!("the endpoint of rank {} is gone too", rank.0))))
            .collect()
    }

    fn write(&self, report: &Report) -> io::Result<()> {
        fs::create_dir_all(&self.out)?;
        for (name, text) in [("report.json", serde_json::to_string_pretty(report)?), ("report.svg", draw(report))] {
            let mut file = tempfile::NamedTempFile::new_in(&self.out)?;
            io::Write::write_all(&mut file, text.as_bytes())?;
            fs::set_permissions(file.path(), std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
            file.persist(self.out.join(name)).map_err(|error| error.error)?;
        }
        Ok(())
    }
}
