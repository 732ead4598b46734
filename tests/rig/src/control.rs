// SPDX-License-Identifier: MIT OR Apache-2.0
//! Line protocols of the host's side: the endpoints' server and QEMU's monitor. One JSON object a line, both ways.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::at;
use crate::process::Process;
use crate::{Error, Result};

/// How long either side may take for one answer; a link reset inside QEMU is the slowest.
const ANSWER: Duration = Duration::from_secs(30);

/// A connection that answers each line with a line.
#[derive(Debug)]
pub struct Connection {
    what: &'static str,
    lines: BufReader<UnixStream>,
}

impl Connection {
    /// Speaks over an accepted or connected socket.
    ///
    /// # Errors
    /// [`Error::Protocol`] if its time limit cannot be set.
    pub fn new(what: &'static str, stream: UnixStream) -> Result<Connection> {
        stream
            .set_read_timeout(Some(ANSWER))
            .and_then(|()| stream.set_write_timeout(Some(ANSWER)))
            .map_err(|error| Error::Protocol { what: what.into(), why: error.to_string() })?;
        Ok(Connection { what, lines: BufReader::new(stream) })
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        let read = self.lines.read_line(&mut line);
        match read {
            Ok(0) => Err(self.wrong("closed the connection")),
            Ok(_) => serde_json::from_str(&line).map_err(|error| self.wrong(error)),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                Err(Error::Silent { what: self.what.into(), limit: ANSWER })
            }
            Err(error) => Err(self.wrong(error)),
        }
    }

    fn ask(&mut self, request: &Value) -> Result<Value> {
        let line = format!("{request}\n");
        self.lines.get_mut().write_all(line.as_bytes()).map_err(|error| self.wrong(error))?;
        self.read()
    }

    fn wrong(&self, why: impl std::fmt::Display) -> Error {
        Error::Protocol { what: self.what.into(), why: why.to_string() }
    }
}

/// QEMU's monitor.
#[derive(Debug)]
pub struct Monitor(Connection);

impl Monitor {
    /// Greets QEMU, which has just connected.
    ///
    /// # Errors
    /// [`Error::Protocol`] if what answers is no QEMU monitor.
    pub fn greet(stream: UnixStream) -> Result<Monitor> {
        let mut connection = Connection::new("QEMU's monitor", stream)?;
        connection.read()?;
        let mut monitor = Monitor(connection);
        monitor.execute(&json!({ "execute": "qmp_capabilities" }))?;
        Ok(monitor)
    }

    /// Executes a command and gives its `return`; events that come first are passed over.
    ///
    /// # Errors
    /// [`Error::Protocol`] with QEMU's own words if it refuses.
    pub fn execute(&mut self, command: &Value) -> Result<Value> {
        let mut answer = self.0.ask(command)?;
        loop {
            if let Some(result) = answer.get("return") {
                return Ok(result.clone());
            }
            if let Some(error) = answer.get("error") {
                return Err(self.0.wrong(error.get("desc").unwrap_or(error)));
            }
            answer = self.0.read()?;
        }
    }
}

/// The endpoints' server, started for one machine.
#[derive(Debug)]
pub struct Endpoints {
    _server: Process,
    control: Connection,
}

impl Endpoints {
    /// Starts the server `program` for `count` endpoints with its sockets in `sockets`, and waits until it listens.
    ///
    /// # Errors
    /// [`Error::Silent`] if it does not listen in time, [`Error::Program`] if it ends at once.
    pub fn start(program: &Path, count: u32, sockets: &Path, arguments: &[String], log: &Path) -> Result<Endpoints> {
        if !program.exists() {
            return Err(Error::Missing { path: program.to_owned(), remedy: "build the tests first ('make test' does)" });
        }
        let log_file = File::create(log).map_err(at(log))?;
        let mut command = Command::new(program);
        command.arg("--dir").arg(sockets).arg("--endpoints").arg(count.to_string()).args(arguments);
        // Its end of standard input is how it learns that we are gone.
        command.stdin(Stdio::piped()).stdout(log_file.try_clone().map_err(at(log))?).stderr(log_file);
        let mut server = Process::start("softdev", command)?;
        let limit = Duration::from_secs(10);
        let deadline = Instant::now() + limit;
        let socket = sockets.join("control.sock");
        loop {
            if let Some(status) = server.ended()? {
                let said = std::fs::read_to_string(log).unwrap_or_default();
                let why = format!("ended at once with {status}: {}", said.trim());
                return Err(Error::Program { program: "softdev".into(), why });
            }
            if let Ok(stream) = UnixStream::connect(&socket) {
                let control = Connection::new("the endpoints' server", stream)?;
                return Ok(Endpoints { _server: server, control });
            }
            if Instant::now() > deadline {
                return Err(Error::Silent { what: "the endpoints' server".into(), limit });
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends a request of `docs/soft-endpoint.md` and gives the answer.
    ///
    /// # Errors
    /// [`Error::Protocol`] with the server's own words if it refuses.
    pub fn request(&mut self, request: &Value) -> Result<Value> {
        let answer = self.control.ask(request)?;
        if answer.get("ok") == Some(&Value::Bool(true)) {
            return Ok(answer);
        }
        Err(self.control.wrong(answer.get("error").and_then(Value::as_str).unwrap_or("an answer without ok and error")))
    }
}
