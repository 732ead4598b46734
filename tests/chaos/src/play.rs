// SPDX-License-Identifier: MIT OR Apache-2.0
//! Does a fault to the machine or to a rank, and undoes what has to be undone.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use guest::pci::Function;
use guest::wait::until;
use nix::sys::signal::Signal;
use pcieipc::device::State;
use serde_json::json;

use crate::{
    crew::Crew,
    machine::{self, Machine, Result},
    schedule::{Fault, Kind},
    words::Order,
};

const BAD_TLP: u32 = 0x40;
const COMPLETION_TIMEOUT: u32 = 0x4000;
const MALFORMED_TLP: u32 = 0x4_0000;

/// A fault that has begun.
#[derive(Debug)]
pub struct Playing {
    fault: Fault,
    correctable_before: u64,
    hog: Option<Child>,
}

/// How long a rank is stopped that comes back before the deadline.
pub fn short_stop(fault: &Fault) -> Duration {
    Duration::from_millis(20 + u64::from(fault.amount) / 4)
}

fn io(what: &str) -> impl Fn(std::io::Error) -> String + '_ {
    move |error| format!("{what}: {error}")
}

/// Begins it.
///
/// # Errors
/// It could not be played; that is the fault of this program or of the machine, not of what is tested.
pub fn begin(fault: Fault, machine: &Machine, crew: &mut Crew) -> Result<Playing> {
    let (rank, amount) = (fault.victim, fault.amount);
    let before = machine.state(rank).map_or(0, |(.., correctable)| correctable);
    let mut playing = Playing { fault, correctable_before: before, hog: None };
    match fault.kind {
        Kind::Correctable => {
            for _ in 0..=amount % 5 {
                machine.inject(rank, 0, BAD_TLP)?;
            }
        }
        Kind::NonFatal => machine.inject(rank, COMPLETION_TIMEOUT, 0)?,
        Kind::Fatal => machine.inject(rank, MALFORMED_TLP, 0)?,
        Kind::FailedRecovery => {
            machine.inject(rank, MALFORMED_TLP, 0)?;
            let resets = || machine.state(rank).is_some_and(|(state, ..)| state == State::Recovering);
            if !until(Duration::from_secs(10), resets) {
                return Err("the reset that the endpoint was to die in did not begin".into());
            }
            machine.play(rank, json!({"cmd": "die"}))?;
        }
        Kind::RemoveRescan => machine.function(rank)?.remove().map_err(io("remove"))?,
        Kind::UnbindBind => machine.function(rank)?.unbind().map_err(io("unbind"))?,
        Kind::FunctionReset => machine.function(rank)?.reset().map_err(io("reset"))?,
        Kind::Death => drop(machine.play(rank, json!({"cmd": "die"}))?),
        Kind::Silence => drop(machine.play(rank, json!({"cmd": "silence"}))?),
        Kind::HotUnplug => unplug()?,
        Kind::DoorbellDrop => drop(machine.play(rank, json!({"cmd": "drop", "count": 1 + amount % 8}))?),
        Kind::DoorbellDelay => {
            drop(machine.play(rank, json!({"cmd": "delay", "count": 1 + amount % 8, "ms": 5 + amount / 8}))?);
        }
        Kind::DoorbellRepeat => {
            drop(machine.play(rank, json!({"cmd": "repeat", "count": 1 + amount % 8, "times": 2 + amount / 50}))?);
        }
        Kind::Corruption if !machine.has_endpoints() => {
            crew.order(rank, &Order::Scribble { ms: 20 + u64::from(amount) / 10, seed: u64::from(amount) });
        }
        Kind::Corruption => drop(machine.play(rank, json!({"cmd": "corrupt", "count": 1}))?),
        Kind::LinkDowngrade => drop(machine.play(rank, json!({"cmd": "link", "speed": 1, "width": 1}))?),
        Kind::Kill => crew.signal(rank, Signal::SIGKILL),
        Kind::Stop | Kind::ShortStop => crew.signal(rank, Signal::SIGSTOP),
        Kind::ForkExec => crew.order(rank, &Order::Fork { ms: 50 + u64::from(amount) }),
        Kind::MemoryPressure => playing.hog = Some(hog(Duration::from_millis(200 + u64::from(amount)))?),
    }
    Ok(playing)
}

impl Playing {
    /// Ends what was begun, as an operator or time would. What kind of end an endpoint needs is the fault's.
    ///
    /// # Errors
    /// The machine did not do it, or what had to be seen from the kernel's side was not.
    pub fn end(&mut self, machine: &Machine, crew: &mut Crew) -> Result<()> {
        let rank = self.fault.victim;
        match self.fault.kind {
            Kind::Correctable => {
                let counted = || machine.state(rank).is_some_and(|(.., now)| now > self.correctable_before);
                if !until(Duration::from_secs(10), counted) {
                    return Err("the module did not count the correctable errors".into());
                }
            }
            Kind::RemoveRescan => Function::rescan().map_err(io("rescan"))?,
            Kind::UnbindBind => machine.function(rank)?.bind().map_err(io("bind"))?,
            Kind::Death | Kind::Silence | Kind::FailedRecovery => machine.power_cycle(rank)?,
            Kind::HotUnplug => plug()?,
            Kind::LinkDowngrade => drop(machine.play(rank, json!({"cmd": "link", "speed": 4, "width": 16}))?),
            Kind::Stop | Kind::ShortStop => crew.signal(rank, Signal::SIGCONT),
            Kind::MemoryPressure => {
                if let Some(mut hog) = self.hog.take() {
                    let status = hog.wait().map_err(io("the memory hog"))?;
                    if !status.success() {
                        return Err(format!("the memory hog ended with {status}"));
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }
}

impl Drop for Playing {
    fn drop(&mut self) {
        if let Some(mut hog) = self.hog.take() {
            let _ = hog.kill();
            let _ = hog.wait();
        }
    }
}

/// The slot of the card that is unplugged and plugged, as QEMU calls its port.
const SLOT: &str = "spare0";
const CARD: &str = "edu0";

/// The card as the bus has it.
fn card() -> Option<String> {
    let entries = fs::read_dir("/sys/bus/pci/devices").ok()?;
    let mut names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.find(|name| {
        let read = |file: &str| fs::read_to_string(Path::new("/sys/bus/pci/devices").join(name).join(file)).unwrap_or_default();
        read("vendor").trim() == "0x1234" && read("device").trim() == "0x11e8"
    })
}

/// The button of the slot takes pciehp five seconds; a busy host more.
const BUTTON: Duration = Duration::from_secs(60);

/// Plugs the card in, and gives it to the module.
///
/// # Errors
/// QEMU, the bus or the driver did not take it.
pub fn plug() -> Result<()> {
    let device = json!({"execute": "device_add", "arguments": {"driver": "edu", "id": CARD, "bus": SLOT}});
    let mut last = String::new();
    let taken = until(BUTTON, || match machine::qmp(&device) {
        Ok(_) => true,
        // The slot is still busy with the card before.
        Err(error) => {
            last = error;
            std::thread::sleep(Duration::from_millis(200));
            false
        }
    });
    if !taken {
        return Err(format!("device_add: {last}"));
    }
    if !until(BUTTON, || card().is_some()) {
        return Err("the kernel did not find the card that was plugged in".into());
    }
    let name = card().ok_or("the card is gone again")?;
    let file = |file: &str| Path::new("/sys/bus/pci/devices").join(&name).join(file);
    fs::write(file("driver_override"), "pcieipc").map_err(io("driver_override"))?;
    // While the kernel has not finished adding the card, a probe does nothing.
    let bound = || file("driver").exists() || fs::write("/sys/bus/pci/drivers_probe", &name).is_ok() && file("driver").exists();
    if until(BUTTON, bound) { Ok(()) } else { Err("the module did not take the card".into()) }
}

/// Presses the button of the card's slot, and waits until the card is gone.
fn unplug() -> Result<()> {
    machine::qmp(&json!({"execute": "device_del", "arguments": {"id": CARD}}))?;
    if until(BUTTON, || card().is_none()) { Ok(()) } else { Err("pciehp did not let go of the card".into()) }
}

/// A process that takes memory until little is left, for so long.
fn hog(time: Duration) -> Result<Child> {
    let program = std::env::current_exe().map_err(io("own path"))?;
    let mut command = Command::new(program);
    command.args(["hog", &time.as_millis().to_string()]).stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().map_err(io("the memory hog"))
}

/// What the hog leaves to others: enough that the kernel kills nobody.
const LEFT_KIB: u64 = 160 << 10;

/// The hog's own work.
pub fn take_memory(time: Duration) {
    // If the kernel must kill somebody all the same, then this.
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
    let end = std::time::Instant::now() + time;
    let mut taken: Vec<Vec<u8>> = Vec::new();
    while std::time::Instant::now() < end {
        if machine::available_kib() > LEFT_KIB && taken.len() < 4096 {
            taken.push(vec![1; 4 << 20]);
        } else {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
