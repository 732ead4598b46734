// SPDX-License-Identifier: MIT OR Apache-2.0
//! A child process that never outlives the rig.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::prctl;
use nix::sys::signal::Signal;

use crate::{Error, Result};

/// A started program. Dropping it kills it; if the rig itself is killed, the kernel kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
}

impl Process {
    /// Starts `command`.
    ///
    /// # Errors
    /// [`Error::Program`] if it cannot be started.
    pub fn start(name: &str, mut command: Command) -> Result<Process> {
        // SAFETY: prctl is a plain system call and so allowed between fork and exec; it touches no memory of ours.
        unsafe {
            command.pre_exec(|| prctl::set_pdeathsig(Signal::SIGKILL).map_err(Into::into));
        }
        let child = command
            .spawn()
            .map_err(|error| Error::Program { program: name.to_owned(), why: format!("cannot be started: {error}") })?;
        Ok(Process { name: name.to_owned(), child })
    }

    /// Its exit status, if it has ended.
    ///
    /// # Errors
    /// [`Error::Program`] if the system cannot say.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().map_err(|error| Error::Program { program: self.name.clone(), why: error.to_string() })
    }

    /// Waits until it ends, at most until `deadline`; `None` if it still runs then.
    ///
    /// # Errors
    /// As [`Process::ended`].
    pub fn wait_until(&mut self, deadline: Instant) -> Result<Option<ExitStatus>> {
        loop {
            if let Some(status) = self.ended()? {
                return Ok(Some(status));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only for a process that has ended, and that is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
