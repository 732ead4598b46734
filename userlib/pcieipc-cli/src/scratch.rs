// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a run keeps on disk while it runs, and its removal however the run ends, SIGKILL included.
//!
//! A process that is killed removes nothing. So a second one, in a process group of its own, is told every path and holds the reading
//! end of a pipe whose writing end only the run has: when the kernel closes that, whatever is still there is removed. It is told a
//! path before anything is there, because the run can be killed between any two steps; so names are long enough to be nobody else's.

use std::{
    ffi::OsStr,
    fs,
    io::{self, ErrorKind, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, OpenOptionsExt},
        process::CommandExt,
    },
    path::{Path, PathBuf, absolute},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use tempfile::NamedTempFile;

use crate::{
    commands::sweep,
    failure::{Failure, with_remedy},
};

/// How long ranks that die with the run may still put something into the directory.
const LAST_BREATH: Duration = Duration::from_secs(2);
/// How long the sweeper may take to end when there is nothing to sweep.
const PATIENCE: Duration = Duration::from_secs(2);

/// A private directory in which the ranks meet, and the run's unfinished output.
#[derive(Debug)]
pub struct Scratch {
    directory: Directory,
    // Dropped after the directory, so that it finds nothing.
    sweeper: Sweeper,
}

/// A directory that is removed with everything in it.
#[derive(Debug)]
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        // What stays is the sweeper's.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[derive(Debug)]
struct Sweeper(Child);

/// Random characters in a name.
const NAME_LENGTH: usize = 16;

impl Scratch {
    /// Makes the directory, 0700.
    ///
    /// # Errors
    /// Run when it, or the process that watches over it, can not be made.
    pub fn new() -> Result<Self, Failure> {
        let mut sweeper = Sweeper::start()
            .map_err(|error| Failure::Run(format!("starting the process that cleans up: {}", with_remedy(&error))))?;
        let parent = absolute(std::env::temp_dir()).unwrap_or_else(|_| std::env::temp_dir());
        let directory = tempfile::Builder::new()
            .prefix("pcieipc-")
            .rand_bytes(NAME_LENGTH)
            .make_in(&parent, |path| {
                sweeper.watch(path)?;
                fs::DirBuilder::new().mode(0o700).create(path)?;
                Ok(Directory(path.to_owned()))
            })
            .and_then(|made| Ok(made.keep()?.0))
            .map_err(|error| {
                Failure::Run(format!("a private directory in {}: {}; or set TMPDIR", parent.display(), with_remedy(&error)))
            })?;
        Ok(Self { directory, sweeper })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.directory.0
    }

    /// A file beside `output` that is to take its place, with the rights that the output has or a new file would get.
    ///
    /// # Errors
    /// When `output`'s directory can not be written.
    pub fn beside(&mut self, output: &Path) -> io::Result<NamedTempFile> {
        let directory = match output.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let file = tempfile::Builder::new().prefix(".pcieipc-").suffix(".partial").rand_bytes(NAME_LENGTH).make_in(
            absolute(directory)?,
            |path| {
                self.sweeper.watch(path)?;
                // As File::create would: the umask takes away what it should.
                fs::OpenOptions::new().read(true).write(true).create_new(true).mode(0o666).open(path)
            },
        )?;
        if let Ok(about) = fs::metadata(output) {
            file.as_file().set_permissions(about.permissions())?;
        }
        Ok(file)
    }
}

impl Sweeper {
    fn start() -> io::Result<Self> {
        let child = Command::new(std::env::current_exe()?)
            .arg(sweep::NAME)
            // Nobody who reads this command's output should wait for that process; no terminal should end it.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self(child))
    }

    fn watch(&mut self, path: &Path) -> io::Result<()> {
        let pipe = self.0.stdin.as_mut().ok_or(ErrorKind::BrokenPipe)?;
        pipe.write_all(&[path.as_os_str().as_bytes(), b"\0"].concat())
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // Somebody stops it.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Removes a file or a directory with everything in it; not to find it is good.
///
/// # Errors
/// When it can not be removed, or is filled again all the time.
pub fn remove(path: &[u8]) -> io::Result<()> {
    let path = Path::new(OsStr::from_bytes(path));
    let deadline = Instant::now() + LAST_BREATH;
    loop {
        let removed = match fs::symlink_metadata(path) {
            Ok(about) if about.is_dir() => fs::remove_dir_all(path),
            Ok(_) => fs::remove_file(path),
            Err(error) => Err(error),
        };
        match removed {
            Err(error) if error.kind() == ErrorKind::NotFound && !path.exists() => return Ok(()),
            Err(error) if Instant::now() >= deadline => return Err(error),
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
