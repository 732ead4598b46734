// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a command ends: 0 done, 1 the run failed, 2 bad use or bad input.

use std::process::ExitCode;

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
}

impl Failure {
    fn code(&self) -> u8 {
        match self {
            Failure::Use(_) => 2,
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

/// Tells a failure on standard error, with `json` on standard output too, and gives the exit code.
pub fn exit_code(outcome: Result<ExitCode, Failure>, json: bool) -> ExitCode {
    match outcome {
        Ok(code) => code,
        Err(failure) => {
            if json && !matches!(failure, Failure::Told(_)) {
                println!("{}", serde_json::json!({ "ok": false, "error": failure.to_string(), "exit": failure.code() }));
            }
            eprintln!("pcieipc: {failure}");
            ExitCode::from(failure.code())
        }
    }
}
