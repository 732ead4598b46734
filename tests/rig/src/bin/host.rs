// SPDX-License-Identifier: MIT OR Apache-2.0
//! Asks the host from a shell inside the virtual machine.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rig::guest::Host;
use rig::{Error, Result};
use serde_json::Value;

/// Asks the host that runs this virtual machine.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    request: Request,
}

#[derive(Subcommand)]
enum Request {
    /// Execute a QEMU monitor command, given as JSON
    Qmp {
        #[arg(value_parser = json)]
        command: Value,
    },
    /// Ask the endpoints' server, given as JSON (docs/soft-endpoint.md)
    Softdev {
        #[arg(value_parser = json)]
        request: Value,
    },
    /// Keep a file on the host, beside the logs
    Put { file: PathBuf, name: Option<String> },
    /// Say that the command ended with this exit code
    Done { code: i32 },
}

fn json(text: &str) -> serde_json::Result<Value> {
    serde_json::from_str(text)
}

fn main() -> ExitCode {
    match ask(Arguments::parse().request) {
        Ok(answer) => {
            if !answer.is_null() {
                println!("{answer}");
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("host: {error}");
            ExitCode::FAILURE
        }
    }
}

fn ask(request: Request) -> Result<Value> {
    let mut host = Host::connect()?;
    match request {
        Request::Qmp { command } => host.qmp(&command),
        Request::Softdev { request } => host.softdev(&request),
        Request::Put { file, name } => {
            let data = std::fs::read(&file).map_err(|source| Error::File { path: file.clone(), source })?;
            let name = name.unwrap_or_else(|| Path::new(&file).file_name().unwrap_or_default().to_string_lossy().into_owned());
            host.put(&name, &data).map(|()| Value::Null)
        }
        Request::Done { code } => host.done(code).map(|()| Value::Null),
    }
}
