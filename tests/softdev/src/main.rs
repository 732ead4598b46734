// SPDX-License-Identifier: MIT OR Apache-2.0
//! `softdev`: a server process that hosts soft endpoints.

use std::{
    error::Error,
    io::{Read, Write},
    os::{fd::AsFd, unix::net::UnixListener},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    thread,
};

use clap::{Parser, ValueEnum};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        prctl,
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use softdev::{control, endpoint, server::Listener};

/// Serves PCIe endpoints in software to QEMU's vfio-user-pci.
///
/// Prints `ready` when all sockets listen. Ends on SIGTERM or SIGINT, when standard input closes, and with the thread
/// that started it.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Folder for ep0.sock, ep1.sock, ... and control.sock; made when missing
    #[arg(long)]
    dir: PathBuf,
    /// How many endpoints
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    endpoints: u16,
    /// Device serial number of the first endpoint; the others count up
    #[arg(long, value_parser = parse_serial, default_value = "0x7069000000000001")]
    serial_base: u64,
    /// Whose word the engine takes for an address: the ring table's, or anybody's (DMA_FLAGS bit 4)
    #[arg(long, value_enum, default_value_t = UserDma::Rings)]
    user_dma: UserDma,
    /// Trap each access to BAR 2, so that a dead endpoint's memory reads all-ones and drops writes
    #[arg(long)]
    no_mmap_memory: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum UserDma {
    Rings,
    Arbitrary,
}

fn parse_serial(text: &str) -> Result<u64, std::num::ParseIntError> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    }
}

/// Sockets that are removed at the end.
#[derive(Default)]
struct Sockets(Vec<PathBuf>);

impl Sockets {
    /// A path where one can listen; a socket that an earlier server left is removed, one that is served is not.
    fn claim(&mut self, path: PathBuf) -> Result<PathBuf, String> {
        if path.exists() {
            if std::os::unix::net::UnixStream::connect(&path).is_ok() {
                return Err(format!("{} is served by another process", path.display()));
            }
            std::fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        self.0.push(path.clone());
        Ok(path)
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for path in &self.0 {
            // Gone already is as good.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn serve(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    prctl::set_pdeathsig(Signal::SIGTERM)?;
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    // Before any thread starts, so that all of them leave the signals to us.
    signals.thread_block()?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC)?;

    let in_dir = |path: &Path, error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    std::fs::create_dir_all(&arguments.dir).map_err(|error| in_dir(&arguments.dir, &error))?;
    let options =
        endpoint::Options { serial_base: arguments.serial_base, arbitrary_dma: arguments.user_dma == UserDma::Arbitrary };
    let endpoints: Arc<[_]> = endpoint::endpoints(arguments.endpoints.into(), options)?.into();
    let mut sockets = Sockets::default();
    for endpoint in endpoints.iter() {
        let path = sockets.claim(arguments.dir.join(format!("ep{}.sock", endpoint.index())))?;
        let listener =
            Listener::bind(&path, endpoint.clone(), !arguments.no_mmap_memory).map_err(|error| in_dir(&path, &error))?;
        thread::Builder::new().name(format!("endpoint{}", endpoint.index())).spawn(move || listener.serve())?;
    }
    let path = sockets.claim(arguments.dir.join("control.sock"))?;
    let listener = UnixListener::bind(&path).map_err(|error| in_dir(&path, &error))?;
    thread::Builder::new().name("control".into()).spawn(move || control::listen(&listener, &endpoints))?;

    println!("ready");
    std::io::stdout().flush()?;
    wait(&signals)?;
    Ok(())
}

/// Until a signal comes or standard input closes.
fn wait(signals: &SignalFd) -> Result<(), Box<dyn Error>> {
    let mut stdin = std::io::stdin();
    loop {
        let mut fds = [PollFd::new(signals.as_fd(), PollFlags::POLLIN), PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            other => other?,
        };
        let ready = |fd: &PollFd| fd.any().unwrap_or(true);
        let (signalled, input) = (ready(&fds[0]), ready(&fds[1]));
        if signalled || input && stdin.read(&mut [0; 256])? == 0 {
            return Ok(());
        }
    }
}

fn main() -> ExitCode {
    match serve(&Arguments::parse()) {
        // Threads that wait for QEMU are not waited for.
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("softdev: {error}");
            ExitCode::FAILURE
        }
    }
}
