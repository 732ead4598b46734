// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a command ends: 0 done, 1 the run failed, 2 bad use or bad input.

use std::{io, process::ExitCode};

use crate::standard_streams;

/// Why a command did not do what it was asked; the text says what, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The arguments or the files can not be served; trying again as it is can not help.
    #[error("{0}")]
    Use(String),
    /// The arguments were good, the run failed.
    #[error("{0}")]
    Run(String),
    /// As Run, and the command has already told it in its JSON.
    #[error("{0}")]
    Told(String),
    /// As Use, and the command has already told it in its JSON.
    #[error("{0}")]
    ToldUse(String),
}

impl Failure {
    fn code(&self) -> u8 {
        match self {
            Failure::Use(_) | Failure::ToldUse(_) => 2,
            Failure::Run(_) | Failure::Told(_) => 1,
        }
    }
}

impl From<pcieipc::Error> for Failure {
    fn from(error: pcieipc::Error) -> Self {
        match error {
            pcieipc::Error::Argument(_) => Failure::Use(error.to_string()),
            other => Failure::Run(other.to_string()),
        }
    }
}

/// What to do when it is a limit or the machine that says no, and not the arguments; `None` for every other error.
pub fn remedy(error: &io::Error) -> Option<&'static str> {
    use nix::errno::Errno;
    // An error that was given a path has lost its number and kept its kind.
    let kind = || match error.kind() {
        io::ErrorKind::FileTooLarge => Some(Errno::EFBIG as i32),
        io::ErrorKind::StorageFull => Some(Errno::ENOSPC as i32),
        io::ErrorKind::QuotaExceeded => Some(Errno::EDQUOT as i32),
        io::ErrorKind::OutOfMemory => Some(Errno::ENOMEM as i32),
        _ => None,
    };
    match Errno::from_raw(error.raw_os_error().or_else(kind)?) {
        Errno::EMFILE | Errno::ENFILE => Some("raise the limit of open files (ulimit -n)"),
        Errno::EAGAIN => Some("raise the limit of processes (ulimit -u)"),
        Errno::ENOMEM => Some("free some memory"),
        Errno::ENOSPC | Errno::EDQUOT => Some("make room there"),
        Errno::EFBIG => Some("raise the limit of file sizes (ulimit -f)"),
        _ => None,
    }
}

/// An error with its remedy, where there is one.
pub fn with_remedy(error: &io::Error) -> String {
    remedy(error).map_or_else(|| error.to_string(), |remedy| format!("{error}; {remedy}"))
}

/// Tells a failure on standard error, with `json` on standard output too, and gives the exit code.
pub fn exit_code(outcome: Result<ExitCode, Failure>, json: bool) -> ExitCode {
    let code = told(outcome, json);
    match standard_streams::finish() {
        Ok(()) => code,
        Err(failure) => told(Err(failure), json),
    }
}

fn told(outcome: Result<ExitCode, Failure>, json: bool) -> ExitCode {
    match outcome {
        Ok(code) => code,
        Err(failure) => {
            if json && !matches!(failure, Failure::Told(_) | Failure::ToldUse(_)) {
                println!("{}", serde_json::json!({ "ok": false, "error": failure.to_string(), "exit": failure.code() }));
            }
            eprintln!("pcieipc: {failure}");
            ExitCode::from(failure.code())
        }
    }
}
