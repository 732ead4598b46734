// SPDX-License-Identifier: MIT OR Apache-2.0
//! Boots a machine for a test, and watches it until it ends.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::accelerator::{Accelerator, QEMU};
use crate::control::{Endpoints, Monitor};
use crate::error::at;
use crate::host_link::{self, HostLink};
use crate::initramfs::Initramfs;
use crate::kernel::Kernel;
use crate::process::Process;
use crate::spec::Spec;
use crate::verdict::Verdict;
use crate::{Error, Result, ivshmem, kernel_log, results};

/// How long QEMU may take to connect to the rig's sockets; it does so before it runs anything.
const CONNECT: Duration = Duration::from_secs(60);

/// How long the kernel may take until it runs its first program. Stock kernels take seconds; the processors of a translated machine
/// sometimes do not find together as they start, and then never get there.
const BOOT: Duration = Duration::from_secs(90);
/// So many kernels that do not come up are given up; the last one has all of its test's time.
const BOOTS: usize = 3;
/// What the guest's first program says first.
const UP: &str = "init: up";

/// Where a run finds things and leaves its logs.
#[derive(Clone, Debug)]
pub struct Place {
    /// The checkout.
    pub checkout: PathBuf,
    /// Where cargo put the programs for the guest.
    pub programs: PathBuf,
    /// The kernel.
    pub kernel: Kernel,
    /// What executes the guest.
    pub accelerator: Accelerator,
    /// Multiplies every test's time limit.
    pub patience: u32,
    /// What is also printed as it comes: 1 the command's output, 2 the kernel's console too.
    pub verbose: u8,
    /// Variables of the command's environment.
    pub environment: Vec<(String, String)>,
}

impl Place {
    /// The folder with one test's logs.
    #[must_use]
    pub fn folder(&self, name: &str) -> PathBuf {
        self.checkout.join(self.kernel.logs).join(name)
    }
}

/// Boots the machine of `spec`, runs its command, and judges. A kernel that does not come up, or that complains before its first program
/// runs, is started again: nothing of what is tested is in the machine by then, and after a complaint lockdep looks no more.
///
/// # Errors
/// Any [`Error`] that kept the machine from being run; a test that ran and failed is a [`Verdict`].
pub fn run(spec: &Spec, place: &Place) -> Result<Verdict> {
    let folder = place.folder(&spec.name);
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(at(&folder))?;
    }
    fs::create_dir_all(&folder).map_err(at(&folder))?;
    let archive = folder.join("initramfs.cpio");
    initramfs(spec, place, &folder)?.write(&archive)?;
    let (limit, boot) = (Duration::from_secs(spec.guest.timeout) * place.patience, BOOT * place.patience);
    let mut left = BOOTS;
    loop {
        left -= 1;
        match try_once(spec, place, &archive, limit, (left > 0).then_some(boot.min(limit)))? {
            Tried::Judged(verdict) => return Ok(verdict),
            Tried::NotUp(why) => {
                // What that kernel said is kept beside the log of the one that comes up.
                let log = format!("console-not-up-{}.log", BOOTS - left);
                fs::rename(folder.join("console.log"), folder.join(&log)).map_err(at(&folder))?;
                eprintln!("vm {}: {why} ({log}); once more", spec.name);
            }
        }
    }
}

/// What came of a machine.
enum Tried {
    Judged(Verdict),
    /// Its kernel did not come up, or not in order.
    NotUp(String),
}

/// [`run`], once. With `boot` the kernel has to come up in this time, and without a complaint; without it any machine is judged.
fn try_once(spec: &Spec, place: &Place, archive: &Path, limit: Duration, boot: Option<Duration>) -> Result<Tried> {
    let folder = place.folder(&spec.name);
    // Paths of Unix sockets are short, the checkout's may be long.
    let sockets = tempfile::Builder::new().prefix("pcieipc-rig-").tempdir().map_err(at("a temporary folder"))?;
    let sockets = sockets.path();

    let endpoints = match spec.machine.endpoints() {
        0 => None,
        count => {
            let program = place.programs.join("softdev");
            Some(Endpoints::start(&program, count, sockets, &spec.machine.softdev, &folder.join("softdev.log"))?)
        }
    };

    let _ivshmem = match spec.machine.ivshmem {
        0 => None,
        _ => Some(ivshmem::Server::start(sockets)?),
    };

    let mut qemu = Command::new(QEMU);
    qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args(place.accelerator.arguments())
        .args(spec.machine.qemu_arguments(sockets))
        .arg("-kernel")
        .arg(&place.kernel.image)
        .arg("-initrd")
        .arg(archive)
        .arg("-append")
        .arg(spec.machine.command_line() + &place.accelerator.command_line());
    let console = Socket::listen(&mut qemu, sockets, "console")?;
    qemu.args(["-serial", "chardev:console"]);
    let monitor = Socket::listen(&mut qemu, sockets, "monitor")?;
    qemu.args(["-mon", "chardev=monitor,mode=control", "-device", "virtio-serial-pci,id=ports,bus=pcie.0"]);
    let mut port = |id: &'static str, name: &str| -> Result<Socket> {
        let socket = Socket::listen(&mut qemu, sockets, id)?;
        qemu.arg("-device").arg(format!("virtserialport,chardev={id},name={name}"));
        Ok(socket)
    };
    let results_port = port("results", "pcieipc.results")?;
    let kernel_port = port("kernel", "pcieipc.kernel")?;
    let host_port = port("host", host_link::PORT)?;

    let qemu_log = folder.join("qemu.log");
    let log = File::create(&qemu_log).map_err(at(&qemu_log))?;
    qemu.stdin(Stdio::null()).stdout(log.try_clone().map_err(at(&qemu_log))?).stderr(log);
    let started = Instant::now();
    let mut qemu = Process::start(QEMU, qemu)?;
    let mut accept = |socket: Socket| socket.accept(&mut qemu, &qemu_log);
    // QEMU waits for nobody here, but connects in the order in which it was told.
    let (comes_up, up) = mpsc::channel();
    let mut before = Some(String::new());
    let console = keep(accept(console)?, folder.join("console.log"), place.verbose > 1, move |line| {
        if line.contains(UP) {
            // Nobody listens any more when the machine has had all its time.
            before.take().map(|said| comes_up.send(said));
        } else if let Some(before) = &mut before {
            before.push_str(line);
        }
    })?;
    let monitor = accept(monitor)?;
    let results_port = keep(accept(results_port)?, folder.join("output.log"), place.verbose > 0, |_| {})?;
    let kernel_port = keep(accept(kernel_port)?, folder.join("kernel.log"), false, |_| {})?;
    let host_port = accept(host_port)?;
    let link = HostLink { monitor: Monitor::greet(monitor)?, endpoints, folder: folder.clone() };
    let link = thread::spawn(move || link.serve(host_port));

    let not_up = match boot.map(|boot| (boot, up.recv_timeout(boot))) {
        // A machine that ends before is judged by how it ended.
        None | Some((_, Err(RecvTimeoutError::Disconnected))) => None,
        Some((boot, Err(RecvTimeoutError::Timeout))) => Some(format!("the kernel did not come up in {} s", boot.as_secs())),
        Some((_, Ok(said))) => {
            let first = kernel_log::alarms(&said, &spec.allow)?.into_iter().next();
            first.map(|alarm| format!("the kernel complained before anything of ours was in it: {alarm}"))
        }
    };
    let ended = if not_up.is_some() { None } else { qemu.wait_until(started + limit)? };
    drop(qemu);
    let took = started.elapsed();
    let (code, mut endpoints) = link.join().map_or((None, None), |ended| (ended.code, ended.endpoints));
    if let Some(why) = not_up {
        return Ok(Tried::NotUp(why));
    }
    let after = spec.after.complaints(endpoints.as_mut())?;
    drop(endpoints);
    let output = joined(results_port);
    let log = format!("{}\n{}", joined(console), joined(kernel_port));
    let mut alarms = kernel_log::alarms(&log, &spec.allow)?;
    alarms.dedup();
    Ok(Tried::Judged(Verdict {
        name: spec.name.clone(),
        results: results::read(&output),
        code,
        timed_out: ended.is_none(),
        alarms,
        after,
        took,
        folder,
    }))
}

/// A socket that QEMU connects to.
struct Socket {
    id: &'static str,
    listener: UnixListener,
}

impl Socket {
    fn listen(qemu: &mut Command, sockets: &Path, id: &'static str) -> Result<Socket> {
        let path = sockets.join(format!("{id}.sock"));
        let listener = UnixListener::bind(&path).map_err(at(&path))?;
        listener.set_nonblocking(true).map_err(at(&path))?;
        qemu.arg("-chardev").arg(format!("socket,id={id},path={}", path.display()));
        Ok(Socket { id, listener })
    }

    fn accept(self, qemu: &mut Process, log: &Path) -> Result<UnixStream> {
        let deadline = Instant::now() + CONNECT;
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).map_err(at(self.id))?;
                    return Ok(stream);
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(at(self.id)(error)),
            }
            if let Some(status) = qemu.ended()? {
                let said = fs::read_to_string(log).unwrap_or_default();
                return Err(Error::Program {
                    program: QEMU.into(),
                    why: format!("ended at once with {status}: {}", said.trim()),
                });
            }
            if Instant::now() > deadline {
                return Err(Error::Silent { what: format!("{QEMU} ({})", self.id), limit: CONNECT });
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Copies what comes from `stream` into `log`, shows `each` line, and gives all of it in the end.
fn keep(
    stream: UnixStream,
    log: PathBuf,
    print: bool,
    mut each: impl FnMut(&str) + Send + 'static,
) -> Result<JoinHandle<String>> {
    let mut file = File::create(&log).map_err(at(&log))?;
    Ok(thread::spawn(move || {
        let mut all = String::new();
        let mut lines = BufReader::new(stream);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
            let text = String::from_utf8_lossy(&line).replace('\r', "");
            // A full disk must not end the run: the text is still judged.
            let _ = file.write_all(text.as_bytes());
            if print {
                print!("{text}");
            }
            each(&text);
            all.push_str(&text);
            line.clear();
        }
        all
    }))
}

fn joined(text: JoinHandle<String>) -> String {
    text.join().unwrap_or_default()
}

fn initramfs(spec: &Spec, place: &Place, folder: &Path) -> Result<Initramfs> {
    let guest = &spec.guest;
    let mut files = Initramfs::with_busybox()?;
    files.text("/init", include_str!("guest-init.sh"), 0o755);
    let exports: String = place.environment.iter().flat_map(|(name, value)| ["export ", name, "='", value, "'\n"]).collect();
    // By how much what programs wait for may take longer.
    let patience = format!("export PATIENCE={}\n", place.patience);
    files.text("/rig/command", &format!("{patience}{exports}{}\n", guest.command), 0o755);
    files.text("/rig/parameters", &format!("{}\n", guest.parameters), 0o644);
    let mut wanted = guest.stock_modules.clone();
    if guest.module && place.kernel.module.exists() {
        wanted.extend(crate::initramfs::needs(&place.kernel.module)?);
    }
    let order = files.modules(&place.kernel.modules, &wanted)?;
    files.text("/rig/stock-modules", &order.iter().flat_map(|path| [path.as_str(), "\n"]).collect::<String>(), 0o644);
    if guest.module {
        let module = &place.kernel.module;
        if !module.exists() {
            return Err(Error::Missing { path: module.clone(), remedy: "run 'make module'" });
        }
        files.file(module, Path::new("/modules/pcieipc.ko"))?;
    }
    for name in &guest.test_modules {
        let module = place.kernel.test_module(name);
        if !module.exists() {
            return Err(Error::Missing { path: module, remedy: "run 'make module'" });
        }
        files.file(&module, &Path::new("/modules").join(format!("{name}.ko")))?;
    }
    for name in guest.programs.iter().map(String::as_str).chain(["host"]) {
        let program = place.programs.join(name);
        if !program.exists() {
            return Err(Error::Missing { path: program, remedy: "build the programs first ('make test' does)" });
        }
        files.program(&program, &Path::new("/bin").join(name))?;
    }
    for program in &guest.system {
        let name = program.file_name().unwrap_or_default();
        files.program(program, &Path::new("/bin").join(name))?;
    }
    if guest.udev {
        let udev = crate::kernel::cache()?.join("current/udev");
        if !udev.exists() {
            return Err(Error::Missing { path: udev, remedy: "run 'make vm-env'" });
        }
        files.tree(&udev, Path::new("/udev"))?;
    }
    for (sources, width, ending) in [(&guest.c_programs, "-m64", ""), (&guest.c_programs_32, "-m32", "-32")] {
        for source in sources {
            let name = format!("{}{ending}", source.file_stem().unwrap_or_default().to_string_lossy());
            let program = folder.join(&name);
            compile(&place.checkout, source, width, &guest.c_libraries, &program)?;
            files.program(&program, &Path::new("/bin").join(name))?;
        }
    }
    for pair in &guest.files {
        let (host, inside) = pair.split_once(':').ok_or_else(|| Error::Spec {
            path: spec.name.clone().into(),
            why: format!("guest.files: {pair:?} is not HOST-PATH:GUEST-PATH"),
        })?;
        files.tree(&place.checkout.join(host), Path::new(inside))?;
    }
    Ok(files)
}

/// Compiles a C program against the ABI header alone.
fn compile(checkout: &Path, source: &Path, width: &str, libraries: &[String], program: &Path) -> Result<()> {
    let done = Command::new("gcc")
        .current_dir(checkout)
        .args([width, "-static", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-Iuapi", "-o"])
        .arg(program)
        .arg(source)
        .args(libraries.iter().map(|library| format!("-l{library}")))
        .output();
    match done {
        Ok(done) if done.status.success() => Ok(()),
        Ok(done) => Err(Error::Program {
            program: format!("gcc {}", source.display()),
            why: String::from_utf8_lossy(&done.stderr).trim().to_owned(),
        }),
        Err(error) => Err(Error::Program { program: "gcc".into(), why: error.to_string() }),
    }
}
