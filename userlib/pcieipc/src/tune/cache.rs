// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calibrations of this machine, one small file each below `$XDG_CACHE_HOME/pcieipc`.

use std::{
    fs::{self, DirBuilder, File},
    io::{ErrorKind, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use serde::{Deserialize, Serialize};

use super::{Calibration, RECORDS};
use crate::{
    error::{Error, Result},
    sys::failed,
    topology::{Address, Host, Source, Topology},
};

/// No calibration is longer.
const LONGEST: u64 = 64 << 10;
/// How long another process may measure.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Serialize, Deserialize)]
struct Stored {
    key: String,
    calibration: Calibration,
}

/// What a calibration is filed under: processors, memory nodes, the version of the library, and the tree's key for these endpoints
/// ([`Topology::machine_key`]; ids, links, nodes).
///
/// ```
/// use pcieipc::{topology::Live, tune};
/// println!("{}", tune::key(&Live::default(), &[]));
/// ```
pub fn key(source: &dyn Source, endpoints: &[Address]) -> String {
    // Without endpoints the tree takes no part.
    let tree = if endpoints.is_empty() { "none".into() } else { Topology::read(source).machine_key(endpoints) };
    filed_under(source, &tree)
}

/// The same where the tree was read already.
pub(crate) fn key_in(source: &dyn Source, topology: &Topology, endpoints: &[Address]) -> String {
    filed_under(source, &topology.machine_key(endpoints))
}

fn filed_under(source: &dyn Source, tree: &str) -> String {
    let (vendor, model) = Host::processor(source);
    let nodes = source.text("sys/devices/system/node/online").unwrap_or_default();
    format!(
        "pcieipc {};records {RECORDS:?};{} {:?};{} processors;nodes {nodes};{tree}",
        env!("CARGO_PKG_VERSION"),
        vendor,
        model,
        super::measure::processors(),
    )
}

/// The calibration that is stored for a key; `None` when there is none, or the file is not one.
///
/// ```
/// use pcieipc::{topology::Live, tune};
/// assert_eq!(tune::stored("no machine's"), None);
/// let here = tune::stored(&tune::key(&Live::default(), &[]));
/// ```
pub fn stored(key: &str) -> Option<Calibration> {
    stored_in(&directory().ok()?, key)
}

/// Stores a calibration for a key and gives the file. Whoever reads meanwhile finds the old one or the new one.
///
/// ```no_run
/// # fn main() -> pcieipc::Result<()> {
/// use pcieipc::{topology::Live, tune::{self, Calibration}};
///
/// let found = Calibration::measure(&std::env::temp_dir().join("my-measurement"))?;
/// println!("stored in {}", tune::store(&tune::key(&Live::default(), &[]), &found)?.display());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// `Argument` without a home directory; `System`.
pub fn store(key: &str, calibration: &Calibration) -> Result<PathBuf> {
    store_in(&directory()?, key, calibration)
}

/// The calibration that is stored for a key; where there is none, this machine is measured first, which takes about two seconds, and what was
/// found is stored. Processes that come at once measure once: one does, the others wait for it, and all give what was stored.
///
/// ```no_run
/// # fn main() -> pcieipc::Result<()> {
/// use pcieipc::{topology::Live, tune};
///
/// let found = tune::stored_or_measured(&tune::key(&Live::default(), &[]))?;
/// println!("a step takes {} ns", found.step_ns);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As for [`Calibration::measure`] and [`store`]; `Argument` where another process measures for more than 30 s.
pub fn stored_or_measured(key: &str) -> Result<Calibration> {
    stored_or(&directory()?, key, PATIENCE, Calibration::measure)
}

/// What a group of so many ranks takes on first use; `None` where there is nothing, and nothing to be had.
pub(crate) fn on_first_use(source: &dyn Source, endpoints: &[Address], ranks: usize) -> Option<Calibration> {
    let key = key(source, endpoints);
    if ranks > super::measure::processors() { stored(&key) } else { stored_or_measured(&key).ok() }
}

/// [`stored_or_measured`] with anything that measures, in a directory that it may make and must delete.
pub(super) fn stored_or(
    directory: &Path,
    key: &str,
    patience: Duration,
    measure: impl FnOnce(&Path) -> Result<Calibration>,
) -> Result<Calibration> {
    if let Some(found) = stored_in(directory, key) {
        return Ok(found);
    }
    // The kernel lets go of it when this process ends, however that is.
    let _alone = alone(directory, key, patience)?;
    if let Some(found) = stored_in(directory, key) {
        return Ok(found);
    }
    let meeting = directory.join(name(key)).with_extension("measuring");
    // Of a process that was killed while it measured.
    let _ = fs::remove_dir_all(&meeting);
    store_in(directory, key, &measure(&meeting)?)?;
    // What is stored is what all others get.
    stored_in(directory, key).ok_or_else(|| Error::Argument(format!("what was stored in {} is gone", directory.display())))
}

/// Waits until no other process measures for this key.
fn alone(directory: &Path, key: &str, patience: Duration) -> Result<Flock<File>> {
    make(directory)?;
    let path = directory.join(name(key)).with_extension("lock");
    let open = || File::options().create(true).truncate(false).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(&path);
    let mut file = open().map_err(failed("open", hint(directory)))?;
    let begun = Instant::now();
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((again, Errno::EWOULDBLOCK)) if begun.elapsed() < patience => file = again,
            Err((_, Errno::EWOULDBLOCK)) => {
                return Err(Error::Argument(format!(
                    "another process has measured for {patience:?}; see who holds {}",
                    path.display()
                )));
            }
            Err((_, error)) => return Err(failed("flock", hint(directory))(error.into())),
        }
        // Asleep, so that what is measured is not this wait.
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn make(directory: &Path) -> Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed("mkdir", hint(directory)))
}

fn hint(directory: &Path) -> String {
    format!("give a directory that you can write to in XDG_CACHE_HOME, instead of {}", directory.display())
}

pub(super) fn stored_in(directory: &Path, key: &str) -> Option<Calibration> {
    let mut bytes = Vec::new();
    // Not a pipe that somebody left there: that would be waited for.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(directory.join(name(key))).ok()?;
    file.take(LONGEST).read_to_end(&mut bytes).ok()?;
    let found: Stored = serde_json::from_slice(&bytes).ok()?;
    (found.key == key && found.calibration.is_plausible()).then_some(found.calibration)
}

pub(super) fn store_in(directory: &Path, key: &str, calibration: &Calibration) -> Result<PathBuf> {
    make(directory)?;
    let path = directory.join(name(key));
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let text = serde_json::to_vec_pretty(&Stored { key: key.to_owned(), calibration: *calibration })
        .map_err(|e| failed("write", hint(directory))(e.into()))?;
    match fs::remove_file(&partial) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed("unlink", hint(directory))(error)),
        _ => {}
    }
    let write = || {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&partial)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&partial, &path)
    };
    write().map_err(|error| {
        let _ = fs::remove_file(&partial);
        failed("write", hint(directory))(error)
    })?;
    Ok(path)
}

/// A short name; the whole key is in the file.
fn name(key: &str) -> String {
    // FNV-1a, which stays the same from version to version.
    let hash = key.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    format!("calibration-{hash:016x}.json")
}

fn directory() -> Result<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    let base = base.ok_or_else(|| Error::Argument("no place for the calibration: set HOME or XDG_CACHE_HOME".into()))?;
    Ok(base.join("pcieipc"))
}
