// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pcieipc inject`: errors, removal, rescan and reset, done to one function on purpose.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::Serialize;
use serde_json::json;

use crate::{
    bus::{DRIVER, Function, Injector, Severity, Sysfs, address_of},
    failure::Failure,
};

/// How long the kernel may take to count an error that was injected.
const COUNTED: Duration = Duration::from_secs(5);

/// Cause an error, a removal, a rescan or a reset on purpose, to see what follows
#[derive(Debug, clap::Args)]
#[command(
    after_help = "As root. correctable, non-fatal and fatal need the kernel's injector (modprobe aer_inject; CONFIG_PCIEAER_INJECT).\n\
                  A fatal error resets the link: every function on it loses what it was doing."
)]
pub struct Inject {
    /// What to cause
    #[arg(value_enum)]
    fault: Fault,
    /// PCI address, or the id that `pcieipc info` shows; rescan needs none
    #[arg(required_if_eq_any([("fault", "correctable"), ("fault", "non-fatal"), ("fault", "fatal"), ("fault", "remove"), ("fault", "reset")]))]
    endpoint: Option<String>,
    /// How many errors, one after the other
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    count: u32,
    /// Also where another driver than pcieipc would be hit
    #[arg(long)]
    force: bool,
    /// Say what it needs and would do; do nothing
    #[arg(long)]
    dry_run: bool,
    /// One JSON object on standard output instead of text
    #[arg(long)]
    pub json: bool,
    /// The host's /sys and /dev stand below this folder
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Fault {
    /// An error that the hardware has repaired (bad TLP)
    Correctable,
    /// A lost transaction (completion timeout); the link stays
    NonFatal,
    /// A broken link (malformed TLP); the kernel resets it
    Fatal,
    /// The function leaves the bus
    Remove,
    /// The kernel looks for functions that came back
    Rescan,
    /// The kernel resets the function
    Reset,
}

impl Fault {
    fn severity(self) -> Option<Severity> {
        match self {
            Fault::Correctable => Some(Severity::Correctable),
            Fault::NonFatal => Some(Severity::NonFatal),
            Fault::Fatal => Some(Severity::Fatal),
            Fault::Remove | Fault::Rescan | Fault::Reset => None,
        }
    }
}

/// One thing that it takes.
#[derive(Debug, Serialize)]
struct Need {
    what: String,
    met: bool,
    /// What to do when it is not met.
    remedy: String,
}

impl Inject {
    pub fn run(self) -> Result<(), Failure> {
        let sysfs = Sysfs::at(&self.root);
        let function = match &self.endpoint {
            Some(text) => Some(sysfs.function(address_of(text)?)),
            None => None,
        };
        let needs = self.needs(&sysfs, function.as_ref());
        let foreign = function.as_ref().map_or_else(Vec::new, |function| self.foreign(function));
        let lacking: Vec<&Need> = needs.iter().filter(|need| !need.met).collect();
        if self.dry_run {
            self.tell_plan(&needs, &foreign);
        }
        if let Some(need) = lacking.first() {
            return self.fail(&needs, Failure::Run(format!("{} is missing; {}", need.what, need.remedy)));
        }
        if let (Some((address, driver)), false) = (foreign.first(), self.force) {
            let why = format!("{address} belongs to the driver {driver} and would be hit; stop what uses it, or take --force");
            return self.fail(&needs, Failure::Use(why));
        }
        if self.dry_run {
            return Ok(());
        }
        let begun = Instant::now();
        let before = function.as_ref().and_then(|function| self.counted(function));
        self.act(&sysfs, function.as_ref()).map_err(|error| Failure::Run(error.to_string()))?;
        let after = function.as_ref().and_then(|function| self.counted_since(function, before));
        self.tell(before.zip(after), begun.elapsed());
        Ok(())
    }

    fn fail(&self, needs: &[Need], failure: Failure) -> Result<(), Failure> {
        if !self.json {
            return Err(failure);
        }
        if !self.dry_run {
            println!("{}", json!({ "ok": false, "error": failure.to_string(), "needs": needs }));
        }
        Err(match failure {
            Failure::Use(text) => Failure::ToldUse(text),
            other => Failure::Told(other.to_string()),
        })
    }

    fn needs(&self, sysfs: &Sysfs, function: Option<&Function>) -> Vec<Need> {
        let mut needs = Vec::new();
        let mut need = |what: String, met: bool, remedy: &str| needs.push(Need { what, met, remedy: remedy.into() });
        let Some(function) = function else {
            let file = sysfs.rescan_file();
            need(format!("permission to write {}", file.display()), writable(&file).is_ok(), "run as root");
            return needs;
        };
        need(format!("function {}", function.address), function.exists(), "`pcieipc topo --all` lists those that are there");
        if !function.exists() {
            return needs;
        }
        match self.fault {
            Fault::Correctable | Fault::NonFatal | Fault::Fatal => {
                let injector = Injector::of(sysfs);
                let there = injector.node().exists();
                let node = injector.node().display().to_string();
                need(
                    format!("the kernel's error injector, {node},"),
                    there,
                    "`modprobe aer_inject`; a kernel without CONFIG_PCIEAER_INJECT has none",
                );
                if there {
                    need(format!("permission to write {node}"), injector.permitted().is_ok(), "run as root");
                }
                need(
                    format!("error reporting (AER) of {}", function.address),
                    function.file("aer_dev_correctable").exists(),
                    "the function has no such capability, or the firmware owns it (pci=noaer, or _OSC in dmesg)",
                );
                need(
                    format!("{} awake and answering", function.address),
                    function.answers(),
                    "it reads all-ones; `pcieipc heal` may bring it back",
                );
            }
            Fault::Reset => {
                need(
                    format!("a way to reset {}", function.address),
                    !function.reset_methods().is_empty(),
                    "the kernel knows none (reset_method is empty); remove and rescan instead",
                );
                let file = function.file("reset");
                need(format!("permission to write {}", file.display()), writable(&file).is_ok(), "run as root");
            }
            Fault::Remove | Fault::Rescan => {
                let file = function.file("remove");
                need(format!("permission to write {}", file.display()), writable(&file).is_ok(), "run as root");
            }
        }
        needs
    }

    /// Functions of other drivers that would be hit.
    fn foreign(&self, function: &Function) -> Vec<(String, String)> {
        let hit = match self.fault {
            // The kernel stops and asks the drivers of all that hang from the port.
            Fault::NonFatal | Fault::Fatal => function.on_its_link(),
            Fault::Remove => function.with_what_is_below(),
            Fault::Rescan => Vec::new(),
            Fault::Correctable | Fault::Reset => vec![function.clone()],
        };
        let driven = hit.into_iter().filter_map(|one| Some((one.address.to_string(), one.driver()?)));
        // A port is hit with whatever hangs from it, which is listed itself.
        driven.filter(|(_, driver)| driver != DRIVER && driver != "pcieport").collect()
    }

    fn act(&self, sysfs: &Sysfs, function: Option<&Function>) -> io::Result<()> {
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        if self.fault == Fault::Rescan {
            return sysfs.rescan();
        }
        let function = function.ok_or_else(missing)?;
        match self.fault.severity() {
            Some(severity) => {
                let injector = Injector::of(sysfs);
                (0..self.count)
                    .try_for_each(|_| injector.inject(function, severity, COUNTED))
                    .map_err(|error| injector_error(&error))
            }
            None if self.fault == Fault::Remove => function.remove(),
            None => function.reset(),
        }
    }

    fn counted(&self, function: &Function) -> Option<u64> {
        function.counted(self.fault.severity()?.counter())
    }

    /// The counter, as soon as it has moved; errors that come fast are counted as one.
    fn counted_since(&self, function: &Function, before: Option<u64>) -> Option<u64> {
        let begun = Instant::now();
        loop {
            let now = self.counted(function)?;
            if Some(now) != before || begun.elapsed() > COUNTED {
                return Some(now);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn name(&self) -> String {
        clap::ValueEnum::to_possible_value(&self.fault).map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn tell_plan(&self, needs: &[Need], foreign: &[(String, String)]) {
        if self.json {
            let hit: Vec<_> = foreign.iter().map(|(address, driver)| json!({ "address": address, "driver": driver })).collect();
            let ok = needs.iter().all(|need| need.met) && (hit.is_empty() || self.force);
            let plan = json!({
                "ok": ok, "fault": self.fault, "endpoint": self.endpoint, "dry_run": true, "needs": needs, "would_hit": hit,
            });
            println!("{plan}");
            return;
        }
        for need in needs {
            if need.met {
                println!("there:   {}", need.what.trim_end_matches(','));
            } else {
                println!("MISSING: {} {}", need.what, need.remedy);
            }
        }
        for (address, driver) in foreign {
            println!("would hit {address} of the driver {driver}");
        }
        println!("would cause: {} {}", self.name(), self.endpoint.as_deref().unwrap_or_default());
    }

    fn tell(&self, counted: Option<(u64, u64)>, took: Duration) {
        if self.json {
            let done = json!({
                "ok": true, "fault": self.fault, "endpoint": self.endpoint, "count": self.count,
                "counted": counted.map(|(before, after)| json!({ "before": before, "after": after })), "seconds": took.as_secs_f64(),
            });
            println!("{done}");
            return;
        }
        let name = self.name();
        match counted {
            Some((before, after)) if after > before => {
                println!("{name}: injected {}, the kernel counts {after}, was {before}", self.count)
            }
            Some((_, after)) => println!(
                "{name}: injected {}, and the kernel still counts {after} after {COUNTED:?}; a port above may not report errors (dmesg)",
                self.count
            ),
            None => println!("{name}: done in {took:.1?}"),
        }
    }
}

fn writable(file: &Path) -> io::Result<()> {
    fs::OpenOptions::new().write(true).open(file).map(drop)
}

fn injector_error(error: &io::Error) -> io::Error {
    let hint = match error.kind() {
        io::ErrorKind::NotFound => "the function, or a root port above it that reports errors, is not there",
        io::ErrorKind::PermissionDenied => "error reporting is masked in the function or its root port",
        _ => "see dmesg",
    };
    io::Error::new(error.kind(), format!("aer_inject: {error}; {hint}"))
}
