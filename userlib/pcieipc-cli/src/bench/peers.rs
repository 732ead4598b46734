// SPDX-License-Identifier: MIT OR Apache-2.0
//! The others: Open MPI and Gloo, where they are installed, measured by small programs of ours.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

use super::Job;
use crate::{failure::Failure, scratch::Scratch};

const OSU_LOOP: &str = include_str!("osu_loop.c");
const GLOO_LOOP: &str = include_str!("gloo_loop.py");

/// How long another library may take to start, or for one size, beyond what it is given: its largest sizes take half a minute on four ranks.
const LIMIT: Duration = Duration::from_secs(180);
/// How often it is looked whether the user wants no more.
const LOOK: Duration = Duration::from_millis(100);
/// How long it may take to end when it is told to.
const PATIENCE: Duration = Duration::from_secs(5);

/// Another library, ready to run.
#[derive(Debug)]
pub struct Peer {
    /// As reports call it.
    pub name: &'static str,
    /// Its version.
    pub version: String,
    program: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(&'static str, &'static str)>,
    running: Option<Running>,
}

/// Those that are installed; their programs live in `folder`. What is missing is said on standard error.
///
/// # Errors
/// Run when a program can not be written to the folder.
pub fn find(job: &Job, folder: &Scratch) -> Result<Vec<Peer>, Failure> {
    let mut peers = Vec::new();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).map_err(|e| Failure::Run(format!("{}: {e}", path.display())))?;
        Ok::<PathBuf, Failure>(path)
    };
    let (source, program) = (write("osu_loop.c", OSU_LOOP)?, folder.path().join("osu_loop"));
    let compiled = Command::new("mpicc").arg("-O2").arg("-o").arg(&program).arg(&source).stderr(Stdio::null()).status();
    match (version("mpirun", &["--version"]), compiled) {
        (Some(version), Ok(status)) if status.success() => {
            let text = |p: &Path| p.to_string_lossy().into_owned();
            let mut arguments = vec!["-n".to_owned(), job.ranks.to_string(), "--oversubscribe".into()];
            let environment = vec![("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")];
            let peer = |name, arguments: &[String]| Peer {
                name,
                version: version.clone(),
                program: "mpirun".into(),
                arguments: arguments.iter().cloned().chain([text(&program)]).collect(),
                environment: environment.clone(),
                running: None,
            };
            peers.push(peer("Open MPI", &arguments));
            arguments.extend(["--mca", "coll_xhc_priority", "90"].map(str::to_owned));
            peers.push(peer("Open MPI xhc", &arguments));
        }
        _ => eprintln!("Open MPI is not here (mpirun and mpicc): left out"),
    }
    let script = write("gloo_loop.py", GLOO_LOOP)?;
    match version(
        "python3",
        &["-c", "import torch.distributed as d; assert d.is_gloo_available(); import torch; print(torch.__version__)"],
    ) {
        Some(version) => peers.push(Peer {
            name: "Gloo",
            version: format!("torch {version}"),
            program: "python3".into(),
            arguments: vec![script.to_string_lossy().into_owned(), job.ranks.to_string()],
            environment: vec![("USE_LIBUV", "0"), ("GLOO_SOCKET_IFNAME", "lo"), ("OMP_NUM_THREADS", "1")],
            running: None,
        }),
        None => eprintln!("Gloo is not here (python3 with torch): left out"),
    }
    Ok(peers)
}

fn version(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stderr(Stdio::null()).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or("").trim().to_owned())
}

impl Peer {
    /// Microseconds of one size. Its program starts with the first size and sleeps between them.
    ///
    /// # Errors
    /// Run when its program fails, or does not answer in time, or the user interrupts it.
    pub fn measure(
        &mut self,
        size: usize,
        time: Duration,
        folder: &Path,
        interrupted: impl Fn() -> bool,
    ) -> Result<f64, Failure> {
        let name = self.name;
        let running = match &mut self.running {
            Some(running) => running,
            none => {
                // A name for its turns alone.
                let turns = folder.join(name.replace(' ', "-"));
                fs::create_dir(&turns).map_err(|e| Failure::Run(format!("{}: {e}", turns.display())))?;
                let mut command = Command::new(&self.program);
                command.args(&self.arguments).arg(time.as_secs_f64().to_string()).arg(&turns);
                command.envs(self.environment.iter().copied());
                none.insert(Running::start(command, turns).map_err(|e| Failure::Run(format!("{name}: {e}")))?)
            }
        };
        let answer = running.turn(size, LIMIT + 10 * time, interrupted);
        if answer.is_err() {
            self.running = None;
        }
        answer.map_err(|why| Failure::Run(format!("{name} at {size} bytes: {why}")))
    }
}

/// A program of ours that measures another library, in a process group of its own; ended when this is dropped.
#[derive(Debug)]
struct Running {
    child: Child,
    lines: Receiver<String>,
    /// What it says on standard error.
    words: Option<thread::JoinHandle<String>>,
    turns: PathBuf,
    turn: usize,
}

impl Running {
    fn start(mut command: Command, turns: PathBuf) -> std::io::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn()?;
        let (sender, lines) = channel();
        if let Some(output) = child.stdout.take() {
            thread::spawn(move || BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        }
        let words = child.stderr.take().map(|mut output| {
            thread::spawn(move || {
                let mut words = Vec::new();
                // What cannot be read is not shown.
                let _ = output.read_to_end(&mut words);
                String::from_utf8_lossy(&words).into_owned()
            })
        });
        Ok(Self { child, lines, words, turns, turn: 0 })
    }

    /// The next size, or 0 for none, appears whole.
    fn tell(&mut self, size: usize) -> std::io::Result<()> {
        let hidden = self.turns.join("next");
        fs::write(&hidden, size.to_string())?;
        fs::rename(hidden, self.turns.join(format!("turn-{}", self.turn)))?;
        self.turn += 1;
        Ok(())
    }

    fn turn(&mut self, size: usize, limit: Duration, interrupted: impl Fn() -> bool) -> Result<f64, String> {
        self.tell(size).map_err(|error| error.to_string())?;
        let end = Instant::now() + limit;
        let row = |line: &str| {
            let (bytes, us) = line.trim().split_once(' ')?;
            (bytes.parse() == Ok(size)).then(|| us.parse::<f64>().ok())?
        };
        // A library may say other things, too.
        while Instant::now() < end && !interrupted() {
            match self.lines.recv_timeout(LOOK).as_deref().map(row) {
                Ok(Some(us)) => return Ok(us),
                Ok(None) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    self.kill();
                    let words = self.words.take().and_then(|words| words.join().ok()).unwrap_or_default();
                    let last: Vec<&str> = words.lines().rev().take(8).collect();
                    return Err(format!("it ended:\n{}", last.into_iter().rev().collect::<Vec<_>>().join("\n")));
                }
            }
        }
        Err(if interrupted() { "interrupted".into() } else { format!("no answer within {} s", limit.as_secs()) })
    }

    fn has_ended(&mut self, within: Duration) -> bool {
        let end = Instant::now() + within;
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(20)),
                Ok(None) => return false,
                // An error says that it is no child of ours any more.
                _ => return true,
            }
        }
    }

    /// All of its processes; mpirun ends its ranks itself when it is asked to.
    fn kill(&mut self) {
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            let Ok(group) = i32::try_from(self.child.id()) else { return };
            // A group that has ended needs no signal.
            let _ = killpg(Pid::from_raw(group), signal);
            if self.has_ended(PATIENCE) {
                return;
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let told = self.tell(0).is_ok();
        if !told || !self.has_ended(PATIENCE) {
            self.kill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that answers each turn by what `answer` does with it.
    fn peer(folder: &Path, answer: &str) -> Peer {
        let script = folder.join("peer.sh");
        let text = format!(
            "n=0\nwhile :; do\n  while [ ! -e $2/turn-$n ]; do sleep 0.01; done\n  size=$(cat $2/turn-$n); n=$((n + 1))\n  \
             [ $size != 0 ] || exit 0\n  {answer}\ndone\n"
        );
        fs::write(&script, text).unwrap();
        let arguments = vec![script.to_string_lossy().into_owned()];
        Peer { name: "a peer", version: String::new(), program: "sh".into(), arguments, environment: vec![], running: None }
    }

    fn measured(peer: &mut Peer, size: usize, folder: &Path) -> Result<f64, Failure> {
        peer.measure(size, Duration::ZERO, folder, || false)
    }

    #[test]
    fn one_process_answers_all_sizes_and_what_else_it_says_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let mut peer = peer(folder.path(), "echo hello; echo $size $$");
        let process = measured(&mut peer, 64, folder.path()).unwrap();
        assert_eq!(measured(&mut peer, 128, folder.path()).unwrap().to_bits(), process.to_bits());
        drop(peer);
        let gone = nix::sys::signal::kill(Pid::from_raw(process as i32), None);
        assert_eq!(gone, Err(nix::errno::Errno::ESRCH));
    }

    #[test]
    fn one_that_ends_is_an_error_with_its_last_words() {
        let folder = tempfile::tempdir().unwrap();
        let failure = measured(&mut peer(folder.path(), "echo lost its way >&2; exit 3"), 64, folder.path()).unwrap_err();
        assert!(failure.to_string().contains("64 bytes: it ended:\nlost its way"), "{failure}");
    }

    #[test]
    fn one_that_hangs_is_ended_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let turns = folder.path().join("turns");
        fs::create_dir(&turns).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & echo $!; wait"]);
        let mut running = Running::start(command, turns).unwrap();
        let child = running.lines.recv_timeout(LIMIT).unwrap().trim().parse().unwrap();
        assert_eq!(running.turn(64, Duration::from_millis(50), || false), Err("no answer within 0 s".into()));
        let begun = Instant::now();
        drop(running);
        assert!(begun.elapsed() < 3 * PATIENCE);
        // Whoever inherits it takes a moment to take it off the list.
        let gone = || nix::sys::signal::kill(Pid::from_raw(child), None) == Err(nix::errno::Errno::ESRCH);
        assert!((0..500).any(|_| gone() || {
            thread::sleep(Duration::from_millis(10));
            false
        }));
    }
}
