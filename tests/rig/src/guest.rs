// SPDX-License-Identifier: MIT OR Apache-2.0
//! The guest's side of [`crate::host_link`]: asks the host from inside the virtual machine.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

use crate::error::at;
use crate::host_link::PORT;
use crate::{Error, Result};

/// How long another process of the guest may hold the port.
const PORT_FREE: Duration = Duration::from_secs(60);

/// A connection to the host. The port serves one process at a time; others wait for it.
#[derive(Debug)]
pub struct Host {
    lines: BufReader<File>,
}

impl Host {
    /// Opens the port.
    ///
    /// # Errors
    /// [`Error::Missing`] outside a machine that the rig booted, [`Error::Silent`] if the port does not become free.
    pub fn connect() -> Result<Host> {
        let port = port(PORT)?;
        let deadline = Instant::now() + PORT_FREE;
        loop {
            match OpenOptions::new().read(true).write(true).open(&port) {
                Ok(file) => return Ok(Host { lines: BufReader::new(file) }),
                Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                    return Err(Error::Silent { what: "the port to the host".into(), limit: PORT_FREE });
                }
                Err(source) => return Err(Error::File { path: port, source }),
            }
        }
    }

    /// Executes a QEMU monitor command, such as `{"execute": "device_del", "arguments": {"id": "edu0"}}`.
    ///
    /// # Errors
    /// [`Error::Protocol`] with the host's words if it fails.
    pub fn qmp(&mut self, command: &Value) -> Result<Value> {
        self.ask(&json!({ "qmp": command }))
    }

    /// Asks the endpoints' server, for example `{"cmd": "die", "endpoint": 0}`.
    ///
    /// # Errors
    /// [`Error::Protocol`] with the host's words if it fails.
    pub fn softdev(&mut self, request: &Value) -> Result<Value> {
        self.ask(&json!({ "softdev": request }))
    }

    /// Keeps a file on the host, beside the logs.
    ///
    /// # Errors
    /// [`Error::Protocol`] with the host's words if it fails.
    pub fn put(&mut self, name: &str, data: &[u8]) -> Result<()> {
        self.ask(&json!({ "put": name, "base64": BASE64.encode(data) })).map(drop)
    }

    /// Says that the command ended.
    ///
    /// # Errors
    /// [`Error::Protocol`] with the host's words if it fails.
    pub fn done(&mut self, code: i32) -> Result<()> {
        self.ask(&json!({ "done": code })).map(drop)
    }

    fn ask(&mut self, request: &Value) -> Result<Value> {
        let wrong = |why: String| Error::Protocol { what: "the host".into(), why };
        let line = format!("{request}\n");
        self.lines.get_mut().write_all(line.as_bytes()).map_err(|error| wrong(error.to_string()))?;
        let mut line = String::new();
        self.lines.read_line(&mut line).map_err(|error| wrong(error.to_string()))?;
        let mut answer: Value = serde_json::from_str(&line).map_err(|error| wrong(error.to_string()))?;
        match answer.get("error") {
            Some(why) => Err(wrong(why.as_str().map_or_else(|| why.to_string(), str::to_owned))),
            None => Ok(answer["ok"].take()),
        }
    }
}

/// The device node of a named virtio port.
fn port(name: &str) -> Result<PathBuf> {
    let ports = "/sys/class/virtio-ports";
    let missing = Error::Missing { path: format!("virtio port {name}").into(), remedy: "this runs inside the rig's machine" };
    let Ok(entries) = fs::read_dir(ports) else { return Err(missing) };
    for entry in entries {
        let entry = entry.map_err(at(ports))?;
        if fs::read_to_string(entry.path().join("name")).is_ok_and(|found| found.trim() == name) {
            return Ok(PathBuf::from("/dev").join(entry.file_name()));
        }
    }
    Err(missing)
}
