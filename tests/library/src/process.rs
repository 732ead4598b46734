// SPDX-License-Identifier: MIT OR Apache-2.0
//! This program once more, in another role.

use std::{
    fmt::Display,
    io::{BufRead, BufReader, Lines, Write},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
};

const MARK: &str = "## ";

/// A running role.
#[derive(Debug)]
pub struct Role {
    /// Its process.
    pub child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Role {
    /// Starts this program with these arguments.
    ///
    /// # Panics
    /// When it can not be started.
    pub fn start(arguments: &[String]) -> Self {
        let program = std::env::current_exe().expect("own path");
        let mut child = Command::new(program).args(arguments).stdout(Stdio::piped()).spawn().expect("start a role");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Self { child, lines }
    }

    /// The next line that the role says, or `None` when it ended.
    pub fn hear(&mut self) -> Option<String> {
        self.lines.by_ref().map_while(|l| l.ok()).find_map(|l| Some(l.strip_prefix(MARK)?.to_owned()))
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it was waited for already.
    pub fn end(&mut self) -> ExitStatus {
        self.child.wait().expect("wait for a role")
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One line to whoever started this role.
pub fn say(text: impl Display) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{MARK}{text}");
    let _ = out.flush();
}
