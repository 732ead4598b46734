// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the guest may ask of the host while it runs: one JSON request a line on a virtio port, one JSON answer a line.
//!
//! | request | answer |
//! |---|---|
//! | `{"qmp": COMMAND}` | `{"ok": what QEMU returned}` |
//! | `{"softdev": REQUEST}` | `{"ok": the server's answer}` |
//! | `{"put": NAME, "base64": DATA}` | `{"ok": null}`, and the file is kept beside the logs |
//! | `{"done": CODE}` | `{"ok": null}`: the command ended with this exit code |
//!
//! Anything that fails is answered with `{"error": "why"}`.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::control::{Endpoints, Monitor};

/// The longest request: a file of 16 MiB in base64.
const LONGEST: u64 = 24 << 20;

/// The name of the guest's port.
pub const PORT: &str = "pcieipc.host";

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Request {
    Qmp { qmp: Value },
    Softdev { softdev: Value },
    Put { put: String, base64: String },
    Done { done: i32 },
}

/// What is left when the guest's side has closed.
#[derive(Debug)]
pub struct Ended {
    /// The command's exit code, if the guest came to tell it.
    pub code: Option<i32>,
    /// The endpoints' server.
    pub endpoints: Option<Endpoints>,
}

/// The host's side of the link.
#[derive(Debug)]
pub struct HostLink {
    /// QEMU's monitor.
    pub monitor: Monitor,
    /// The endpoints' server, if the machine has endpoints.
    pub endpoints: Option<Endpoints>,
    /// Where files from the guest are kept.
    pub folder: PathBuf,
}

impl HostLink {
    /// Serves until the guest's side closes.
    pub fn serve(mut self, stream: UnixStream) -> Ended {
        let code = self.serve_all(stream);
        Ended { code, endpoints: self.endpoints }
    }

    fn serve_all(&mut self, stream: UnixStream) -> Option<i32> {
        let mut code = None;
        let mut lines = BufReader::new(stream);
        loop {
            let mut line = Vec::new();
            match (&mut lines).take(LONGEST).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return code,
                Ok(_) => {}
            }
            let answer = match serde_json::from_slice(&line) {
                Ok(Request::Done { done }) => {
                    code = Some(done);
                    Ok(Value::Null)
                }
                Ok(request) => self.answer(request),
                Err(error) => Err(format!("no request that the host knows: {error}")),
            };
            let answer = match answer {
                Ok(value) => json!({ "ok": value }),
                Err(why) => json!({ "error": why }),
            };
            if lines.get_mut().write_all(format!("{answer}\n").as_bytes()).is_err() {
                return code;
            }
        }
    }

    fn answer(&mut self, request: Request) -> Result<Value, String> {
        match request {
            Request::Qmp { qmp } => self.monitor.execute(&qmp).map_err(|error| error.to_string()),
            Request::Softdev { softdev } => match &mut self.endpoints {
                Some(endpoints) => endpoints.request(&softdev).map_err(|error| error.to_string()),
                None => Err("this machine has no soft endpoints".into()),
            },
            Request::Put { put, base64 } => {
                let path = self.folder.join(file_name(&put)?);
                let data = BASE64.decode(base64).map_err(|error| error.to_string())?;
                std::fs::write(&path, data).map_err(|error| format!("{}: {error}", path.display()))?;
                Ok(Value::Null)
            }
            Request::Done { .. } => Ok(Value::Null),
        }
    }
}

/// A guest names files, never paths.
fn file_name(name: &str) -> Result<&Path, String> {
    let path = Path::new(name);
    match path.file_name() {
        Some(file) if file == path.as_os_str() && name != ".." => Ok(path),
        _ => Err(format!("{name:?} is no plain file name")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_cannot_write_outside_its_folder() {
        for name in ["../x", "/etc/x", "a/b", "..", ".", ""] {
            assert!(file_name(name).is_err(), "{name:?}");
        }
        assert!(file_name("report.json").is_ok());
    }
}
