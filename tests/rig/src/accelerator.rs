// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether KVM really runs a guest here. On some hosts `/dev/kvm` opens and the guest then hangs, so one is booted.

use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::at;
use crate::initramfs::Initramfs;
use crate::kernel::{self, Kernel};
use crate::process::Process;
use crate::{Error, Result};

/// The emulator that all machines run in.
pub const QEMU: &str = "qemu-system-x86_64";

/// A host with working KVM boots the probe in about a second.
const PROBE: Duration = Duration::from_secs(20);

/// What executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor.
    Kvm,
    /// QEMU's translator: several times slower, works everywhere.
    Tcg,
}

impl Accelerator {
    /// QEMU's arguments for it. Pages have four levels: with five, a kernel with KASAN calls a good address wild when an interrupt comes while
    /// it finds out what its first processor can, because for a moment it then knows of no fifth level (`identify_cpu` clears the flags that
    /// `pgtable_l5_enabled` reads). Seen in one boot of seven.
    #[must_use]
    pub fn arguments(self) -> [&'static str; 4] {
        match self {
            Accelerator::Kvm => ["-accel", "kvm", "-cpu", "host,la57=off"],
            Accelerator::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max,la57=off"],
        }
    }

    /// What the guest's kernel is told about it: words of its command line, each after a space.
    #[must_use]
    pub fn command_line(self) -> String {
        match self {
            Accelerator::Kvm => String::new(),
            Accelerator::Tcg => crate::clock::kilohertz().map_or_else(String::new, |rate| format!(" tsc_early_khz={rate}")),
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        }
    }

    fn named(name: &str) -> Option<Accelerator> {
        [Accelerator::Kvm, Accelerator::Tcg].into_iter().find(|accelerator| accelerator.name() == name)
    }

    /// The one to use: what `PCIEIPC_ACCEL` says, else what an earlier probe on this host found, else what a probe finds.
    ///
    /// # Errors
    /// [`Error::Program`] for an unknown name or if QEMU cannot be asked for its version.
    pub fn choose(kernel: &Kernel) -> Result<Accelerator> {
        if let Ok(name) = std::env::var("PCIEIPC_ACCEL") {
            return Accelerator::named(&name).ok_or_else(|| Error::Program {
                program: "PCIEIPC_ACCEL".into(),
                why: format!("{name:?} is neither kvm nor tcg"),
            });
        }
        if OpenOptions::new().read(true).write(true).open("/dev/kvm").is_err() {
            return Ok(Accelerator::Tcg);
        }
        let found = kernel::cache()?.join(format!("accelerator-{}", host()?));
        if let Some(accelerator) = fs::read_to_string(&found).ok().and_then(|name| Accelerator::named(name.trim())) {
            return Ok(accelerator);
        }
        eprintln!("rig: /dev/kvm is here; trying for up to {} s whether it runs a guest ...", PROBE.as_secs());
        let accelerator = if probe(kernel)? { Accelerator::Kvm } else { Accelerator::Tcg };
        eprintln!("rig: using {}", accelerator.name());
        // Another run may have written the same; a reader sees one or the other.
        fs::write(&found, accelerator.name()).map_err(at(&found))?;
        Ok(accelerator)
    }
}

/// What the outcome of a probe depends on.
fn host() -> Result<String> {
    let release = "/proc/sys/kernel/osrelease";
    let release = fs::read_to_string(release).map_err(at(release))?;
    let version = Command::new(QEMU).arg("--version").output();
    let version = version.map_err(|error| Error::Program { program: QEMU.into(), why: error.to_string() })?;
    let version = String::from_utf8_lossy(&version.stdout).lines().next().unwrap_or_default().to_owned();
    let name = format!("{}-{version}", release.trim());
    Ok(name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' || c == '-' { c } else { '_' }).collect())
}

fn probe(kernel: &Kernel) -> Result<bool> {
    let folder = tempfile::tempdir().map_err(at("a temporary folder"))?;
    let archive = folder.path().join("initramfs.cpio");
    let console = folder.path().join("console.log");
    let mut files = Initramfs::with_busybox()?;
    files.text("/init", "#!/bin/busybox sh\necho the probe booted\n/bin/busybox poweroff -f\n", 0o755);
    files.write(&archive)?;
    let mut qemu = Command::new(QEMU);
    qemu.args(["-machine", "q35", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-m", "512M", "-serial"])
        .arg(format!("file:{}", console.display()))
        .args(Accelerator::Kvm.arguments())
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(&archive)
        .args(["-append", "console=ttyS0 panic=-1"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(folder.path().join("qemu.log")).map_err(at(Path::new("qemu.log")))?);
    let mut qemu = Process::start(QEMU, qemu)?;
    let ended = qemu.wait_until(Instant::now() + PROBE)?;
    let said = fs::read_to_string(&console).unwrap_or_default();
    Ok(ended.is_some_and(|status| status.success()) && said.contains("the probe booted"))
}
