// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ranks' processes, as the conductor holds them.

use std::{
    io::{self, BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::Instant,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::words::{Order, Said};

/// One process in a rank's place.
#[derive(Debug)]
struct Process {
    child: Child,
    input: ChildStdin,
    /// Tells the words of this process from those of the one before it in its place.
    life: u64,
}

/// All ranks.
#[derive(Debug)]
pub struct Crew {
    places: Vec<Option<Process>>,
    lives: u64,
    sender: Sender<(usize, u64, Said)>,
    heard: Receiver<(usize, u64, Said)>,
}

impl Crew {
    /// `ranks` empty places.
    pub fn new(ranks: usize) -> Self {
        let (sender, heard) = mpsc::channel();
        Self { places: (0..ranks).map(|_| None).collect(), lives: 0, sender, heard }
    }

    /// Starts a process in each empty place.
    ///
    /// # Errors
    /// No process can be started.
    pub fn fill(&mut self) -> io::Result<()> {
        for rank in 0..self.places.len() {
            if self.places[rank].is_none() {
                self.start(rank)?;
            }
        }
        Ok(())
    }

    fn start(&mut self, rank: usize) -> io::Result<()> {
        let program = std::env::current_exe()?;
        let mut child =
            Command::new(program).args(["rank", &rank.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        self.lives += 1;
        let (life, sender) = (self.lives, self.sender.clone());
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                match serde_json::from_str(&line) {
                    Ok(said) => {
                        if sender.send((rank, life, said)).is_err() {
                            return;
                        }
                    }
                    // The library's or the runtime's own words, for whoever reads the log.
                    Err(_) => println!("# rank {rank}: {line}"),
                }
            }
            let _ = sender.send((rank, life, Said::Ended));
        });
        self.places[rank] = Some(Process { child, input, life });
        Ok(())
    }

    /// How many places there are.
    pub fn ranks(&self) -> usize {
        self.places.len()
    }

    /// The ranks that have a process.
    pub fn present(&self) -> Vec<usize> {
        (0..self.places.len()).filter(|rank| self.places[*rank].is_some()).collect()
    }

    /// Gives an order. A process that has just ended does not hear it; its end is heard instead.
    pub fn order(&mut self, rank: usize, order: &Order) {
        let Some(Some(process)) = self.places.get_mut(rank) else { return };
        let mut line = serde_json::to_vec(order).unwrap_or_default();
        line.push(b'\n');
        let _ = process.input.write_all(&line).and_then(|()| process.input.flush());
    }

    /// The next word of anybody; none by the deadline.
    pub fn hear(&mut self, by: Instant) -> Option<(usize, Said)> {
        loop {
            let left = by.saturating_duration_since(Instant::now());
            match self.heard.recv_timeout(left) {
                Ok((rank, life, said)) => {
                    if self.places[rank].as_ref().is_some_and(|process| process.life == life) {
                        return Some((rank, said));
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// Sends a signal.
    pub fn signal(&self, rank: usize, signal: Signal) {
        if let Some(Some(process)) = self.places.get(rank) {
            let _ = kill(Pid::from_raw(process.child.id() as i32), signal);
        }
    }

    /// Kills the process in a place, and waits for its end.
    pub fn remove(&mut self, rank: usize) {
        if let Some(mut process) = self.places.get_mut(rank).and_then(Option::take) {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }

    /// What the kernel says that a process is doing; for whoever looks at a hang.
    pub fn whereabouts(&self, rank: usize) -> String {
        let Some(Some(process)) = self.places.get(rank) else { return "no process".into() };
        let read = |file: &str| {
            let text = std::fs::read_to_string(format!("/proc/{}/{file}", process.child.id())).unwrap_or_default();
            text.lines().map(str::trim).collect::<Vec<_>>().join(" < ")
        };
        format!("wchan {}; stack {}", read("wchan"), read("stack"))
    }
}

impl Crew {
    /// The processor time that each thread of a rank has taken, for whoever wonders where it went.
    pub fn times(&self, rank: usize) -> String {
        let Some(Some(process)) = self.places.get(rank) else { return "no process".into() };
        let tasks = std::fs::read_dir(format!("/proc/{}/task", process.child.id())).into_iter().flatten().flatten();
        let time = |task: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
            let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
            // utime and stime, in hundredths of a second.
            let mut ticks = rest.split_whitespace().skip(11).map_while(|field| field.parse::<u64>().ok());
            Some(format!("{name} {} + {} ms", ticks.next()? * 10, ticks.next()? * 10))
        };
        tasks.filter_map(time).collect::<Vec<_>>().join(", ")
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for rank in 0..self.places.len() {
            self.remove(rank);
        }
    }
}
