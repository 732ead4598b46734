// SPDX-License-Identifier: MIT OR Apache-2.0
//! The processes of one side, one a device, which do what they are told at the same time.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};

use super::order::{Answer, Order};
use crate::failure::Failure;

/// All workers of one side. Dropping it ends them.
pub struct Crew {
    workers: Vec<Member>,
}

struct Member {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Crew {
    /// Starts one process for each command.
    pub fn start(commands: Vec<Command>) -> Result<Self, Failure> {
        let mut crew = Self { workers: Vec::new() };
        for mut command in commands {
            let mut child = command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .map_err(|e| Failure::Run(format!("can not start {}: {e}", command.get_program().to_string_lossy())))?;
            let (input, output) = (child.stdin.take(), child.stdout.take());
            let (send, lines) = channel();
            if let Some(output) = output {
                std::thread::spawn(move || {
                    for line in BufReader::new(output).lines().map_while(Result::ok) {
                        if send.send(line).is_err() {
                            break;
                        }
                    }
                });
            }
            crew.workers.push(Member { child, input, lines });
        }
        Ok(crew)
    }

    /// Tells all and waits for all answers. A worker that ended or does not answer in time answers with an error.
    pub fn ask(&mut self, order: &Order, wait: Duration) -> Vec<Answer> {
        let line = serde_json::to_string(order).unwrap_or_default();
        for member in &mut self.workers {
            if let Some(input) = &mut member.input {
                // One that has ended is seen by its answer.
                let _ = writeln!(input, "{line}").and_then(|()| input.flush());
            }
        }
        let until = Instant::now() + wait;
        self.workers.iter().map(|member| answer(&member.lines, until)).collect()
    }

    /// Ends them in order, as far as they follow.
    pub fn quit(mut self) {
        self.ask(&Order::Quit, Duration::from_secs(10));
    }
}

fn answer(lines: &Receiver<String>, until: Instant) -> Answer {
    let error = |error: String| Answer { error: Some(error), ..Answer::default() };
    loop {
        return match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            // Other output of a worker is not an answer.
            Ok(line) => match serde_json::from_str(&line) {
                Ok(answer) => answer,
                Err(_) => continue,
            },
            Err(RecvTimeoutError::Timeout) => error("no answer in time".into()),
            Err(RecvTimeoutError::Disconnected) => error("its process ended".into()),
        };
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for member in &mut self.workers {
            member.input = None;
        }
        let until = Instant::now() + Duration::from_secs(3);
        for member in &mut self.workers {
            while Instant::now() < until && matches!(member.child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = member.child.kill();
            let _ = member.child.wait();
        }
    }
}
