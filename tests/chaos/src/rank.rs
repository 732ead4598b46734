// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank: does what it is told, compares every sum, and says what happened when.

use std::{
    io::{self, BufRead, Write},
    os::unix::fs::FileExt,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use pcieipc::{
    Error,
    device::{EndpointId, Node, State},
    group::{Group, GroupOptions, KmodOptions, Transport},
    reduce::Op,
    transport::kmod::Mover,
};

use crate::{
    inputs::{self, Call},
    now_ns,
    schedule::Random,
    words::{Failure, Holdings, Order, Said, Setup},
};

/// Data area of each ring: small enough that large calls go around it several times.
const RING_BYTES: usize = 128 << 10;
/// How often a rank says how far it is.
const TELL: Duration = Duration::from_millis(20);

/// Runs rank `member` until standard input ends.
pub fn serve(member: usize) {
    // A rank never outlives its conductor.
    let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
    let (sender, orders) = mpsc::channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            match serde_json::from_str(&line) {
                Ok(Order::Fork { ms }) => fork_and_exec(ms),
                Ok(Order::Scribble { ms, seed }) => drop(thread::spawn(move || scribble(Duration::from_millis(ms), seed))),
                Ok(order) => {
                    if sender.send(order).is_err() {
                        break;
                    }
                }
                Err(_) => break,
            }
        }
    });
    let mut seat = Seat { member, group: None, epoch: 0, round: 0 };
    while let Ok(order) = orders.recv() {
        seat.obey(order);
    }
}

fn say(said: &Said) {
    let mut line = serde_json::to_vec(said).unwrap_or_default();
    line.push(b'\n');
    let mut out = io::stdout().lock();
    // A conductor that does not listen any more has ended, and this process with it.
    let _ = out.write_all(&line).and_then(|()| out.flush());
}

struct Seat {
    member: usize,
    group: Option<Group>,
    epoch: u32,
    round: u32,
}

impl Seat {
    fn obey(&mut self, order: Order) {
        match order {
            Order::Meet { directory, ranks, serial, setup, timeout_ms, epoch } => {
                self.group = None;
                let started_ns = now_ns();
                let group = options(self.member, ranks, &directory, serial, setup, Duration::from_millis(timeout_ms));
                self.came_together(group.and_then(Group::meet), epoch, started_ns, timeout_ms);
            }
            Order::Rejoin { directory, ranks, serial, setup, timeout_ms, epoch } => {
                let started_ns = now_ns();
                let group = options(self.member, ranks, &directory, serial, setup, Duration::from_millis(timeout_ms));
                self.came_together(group.and_then(Group::rejoin), epoch, started_ns, timeout_ms);
            }
            Order::Recover { timeout_ms, epoch } => {
                let started_ns = now_ns();
                let recovered = match self.group.take() {
                    Some(mut group) => match group.recover(Duration::from_millis(timeout_ms)) {
                        Ok(()) => Ok(group),
                        Err(error) => {
                            // It may recover again.
                            self.group = Some(group);
                            return say(&Said::Refused(self.failure(&error, started_ns, timeout_ms)));
                        }
                    },
                    None => Err(Error::Meeting("this rank is in no group".into())),
                };
                self.came_together(recovered, epoch, started_ns, timeout_ms);
            }
            Order::Run { until, deadline_ms } => self.run(until, deadline_ms),
            Order::Agree { ok, timeout_ms } => {
                let started_ns = now_ns();
                let agreed = match &mut self.group {
                    Some(group) => group.agree(ok, Duration::from_millis(timeout_ms)),
                    None => Err(Error::Meeting("this rank is in no group".into())),
                };
                match agreed {
                    Ok(agreed) => say(&Said::Agreed { ok: agreed.ok, failed: agreed.failed }),
                    Err(error) => say(&Said::Refused(self.failure(&error, started_ns, timeout_ms))),
                }
            }
            Order::Shrink { timeout_ms, epoch } => {
                let started_ns = now_ns();
                let shrunk = match &mut self.group {
                    Some(group) => group.shrink(Duration::from_millis(timeout_ms)),
                    None => Err(Error::Meeting("this rank is in no group".into())),
                };
                match shrunk {
                    Ok(()) => {
                        (self.epoch, self.round) = (epoch, 0);
                        say(&Said::Shrunk { members: self.members(), at_ns: now_ns() });
                    }
                    Err(error) => say(&Said::Refused(self.failure(&error, started_ns, timeout_ms))),
                }
            }
            Order::Count => say(&Said::Counted(holdings())),
            Order::Leave => {
                self.group = None;
                say(&Said::Left);
            }
            Order::Fork { .. } | Order::Scribble { .. } => {}
        }
    }

    fn came_together(&mut self, group: pcieipc::Result<Group>, epoch: u32, started_ns: u64, timeout_ms: u64) {
        match group {
            Ok(group) => {
                (self.epoch, self.round, self.group) = (epoch, 0, Some(group));
                say(&Said::Met { at_ns: now_ns() });
            }
            Err(error) => say(&Said::Refused(self.failure(&error, started_ns, timeout_ms))),
        }
    }

    fn members(&self) -> Vec<usize> {
        self.group.as_ref().map_or_else(Vec::new, |group| group.members().to_vec())
    }

    fn run(&mut self, until: u32, deadline_ms: u64) {
        let members = self.members();
        let mut buffer = Vec::new();
        let (mut first_ns, mut longest_ns) = (0, 0);
        let mut told = Instant::now();
        while self.round < until {
            let call = Call { epoch: self.epoch, round: self.round };
            inputs::fill(call, self.member, &mut buffer);
            let started_ns = now_ns();
            let Some(group) = &mut self.group else {
                let error = Error::Meeting("this rank is in no group".into());
                return say(&Said::Failed(self.failure(&error, started_ns, deadline_ms)));
            };
            match group.all_reduce(&mut buffer, Op::Sum, Duration::from_millis(deadline_ms)) {
                Ok(()) => {
                    longest_ns = longest_ns.max(now_ns() - started_ns);
                    let (elements, first) = inputs::wrong(call, &members, &buffer);
                    if elements > 0 {
                        say(&Said::Wrong { round: self.round, elements, first });
                    }
                    self.round += 1;
                    if first_ns == 0 {
                        first_ns = now_ns();
                    }
                    if told.elapsed() >= TELL {
                        told = Instant::now();
                        say(&Said::Rounds { done: self.round });
                    }
                }
                Err(error) => return say(&Said::Failed(self.failure(&error, started_ns, deadline_ms))),
            }
        }
        say(&Said::Held { done: self.round, first_ns, at_ns: now_ns(), longest_ns });
    }

    fn failure(&self, error: &Error, started_ns: u64, deadline_ms: u64) -> Failure {
        let kind = format!("{error:?}").chars().take_while(char::is_ascii_alphanumeric).collect();
        let peer = match error {
            Error::Timeout { peer, .. }
            | Error::PeerDied { peer, .. }
            | Error::EndpointRecovering { peer, .. }
            | Error::EndpointGone { peer, .. }
            | Error::Corrupt { peer, .. } => Some(*peer),
            Error::Aborted { by, .. } => Some(*by),
            _ => None,
        };
        let members = self.members();
        let peer = peer.map(|now| members.get(now).copied().unwrap_or(now));
        Failure { kind, text: error.to_string(), peer, round: self.round, started_ns, at_ns: now_ns(), deadline_ms }
    }
}

fn options(
    member: usize,
    ranks: usize,
    directory: &str,
    serial: Option<u64>,
    setup: Setup,
    timeout: Duration,
) -> pcieipc::Result<GroupOptions> {
    let mut options = GroupOptions::new(member, ranks, directory);
    options.ring_bytes = RING_BYTES;
    options.meeting_timeout = timeout;
    options.executor.checked = setup.checked;
    if let Some(serial) = serial {
        let mover = if setup.engine { Mover::Engine } else { Mover::Processor };
        options.transport = Transport::Kmod(KmodOptions { endpoint: Some(living(serial)?), mover, ..KmodOptions::default() });
    }
    Ok(options)
}

/// The endpoint with this serial number, which has another id each time it returns.
fn living(serial: u64) -> pcieipc::Result<EndpointId> {
    let node = Node::open()?;
    let lives = |id: &EndpointId| node.endpoint(*id).is_ok_and(|info| info.serial == Some(serial) && info.state == State::Live);
    let found = node.endpoints()?.into_iter().find(lives);
    found.ok_or_else(|| Error::Argument(format!("no endpoint with serial number {serial:#x} lives")))
}

/// What a program may do at any time: a child that shares everything that a fork shares, and one that becomes another program.
fn fork_and_exec(ms: u64) {
    // SAFETY: the child makes system calls only, which is all that a child of a process with threads may do.
    unsafe {
        if libc::fork() == 0 {
            // The conductor hears the rank's end by these; everything else stays open, rings included.
            libc::close(0);
            libc::close(1);
            libc::close(2);
            libc::usleep((ms * 1000) as libc::useconds_t);
            libc::_exit(0);
        }
    }
    if let Ok(program) = std::env::current_exe() {
        let child = Command::new(program).args(["idle", &ms.to_string()]).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        // Reaped beside, with the forked one.
        thread::spawn(move || {
            if let Ok(mut child) = child {
                let _ = child.wait();
            }
            while nix::sys::wait::waitpid(None, Some(nix::sys::wait::WaitPidFlag::WNOHANG))
                .is_ok_and(|status| status == nix::sys::wait::WaitStatus::StillAlive)
            {
                thread::sleep(Duration::from_millis(10));
            }
        });
    }
}

/// Flips bits of what this rank has put into its rings, as failing memory would. By the process's own memory file, which answers with an
/// error where a ring is no longer mapped.
fn scribble(time: Duration, seed: u64) {
    let end = Instant::now() + time;
    let mut random = Random::new(seed);
    let Ok(memory) = std::fs::File::options().read(true).write(true).open("/proc/self/mem") else { return };
    while Instant::now() < end {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        for (start, bytes) in maps.lines().filter_map(own_ring) {
            for _ in 0..64 {
                let at = start + DATA_OFFSET + random.draw() % (bytes - DATA_OFFSET);
                let mut byte = [0];
                if memory.read_exact_at(&mut byte, at).is_ok() && byte[0] != 0 {
                    byte[0] ^= 1 << (random.draw() % 8);
                    let _ = memory.write_at(&byte, at);
                }
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Where in its file a ring's data begins (docs/ring.md); what is before it are the index pages.
const DATA_OFFSET: u64 = 4096;

/// Start and length of a mapping that is a ring in shared memory which this process writes.
fn own_ring(line: &str) -> Option<(u64, u64)> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let ours = rest.starts_with("rw-s") && rest.contains("memfd:pcieipc-ring") && end - start > DATA_OFFSET;
    ours.then_some((start, end - start))
}

/// What this process holds now.
pub fn holdings() -> Holdings {
    // What a thread reads of the system at this moment is closed by the next.
    let passing = |name: &String| name.starts_with("/proc/") || name.starts_with("/sys/");
    let opened = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let names = opened.filter_map(|entry| Some(std::fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned()));
    // "socket:[1234]" and "pipe:[1234]" are other numbers each time.
    let kind = |name: String| name.split(":[").next().unwrap_or_default().to_owned();
    let mut descriptors: Vec<String> = names.filter(|name| !passing(name)).map(kind).collect();
    descriptors.sort();
    let mappings = std::fs::read_to_string("/proc/self/maps").map_or(0, |maps| ours(&maps));
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| -> u64 {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    Holdings { descriptors, locked_kib: field("VmLck:") + field("VmPin:"), mappings }
}

/// Mappings of rings and of shared memory; those of allocator and stacks come and go.
fn ours(maps: &str) -> usize {
    maps.lines().filter(|line| ["pcieipc", "/memfd:", "anon_inode:"].iter().any(|name| line.contains(name))).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holdings_see_a_descriptor() {
        let before = holdings();
        let file = std::fs::File::open("/dev/null").unwrap();
        let words = holdings().beside(&before).unwrap();
        assert!(words.starts_with(r#"descriptors ["/dev/null"] more and [] less"#), "{words}");
        drop(file);
        assert_eq!(holdings().beside(&before), None);
    }

    #[test]
    fn only_rings_that_this_process_writes_are_scribbled_on() {
        let ring = "7f00-9f00 rw-s 00000000 00:01 9 /memfd:pcieipc-ring (deleted)";
        assert_eq!(own_ring(ring), Some((0x7f00, 0x2000)));
        assert_eq!(own_ring(&ring.replace("rw-s", "r--s")), None);
        assert_eq!(own_ring("7f00-9f00 rw-p 00000000 00:00 0 [heap]"), None);
    }

    #[test]
    fn only_mappings_of_rings_are_counted() {
        let maps = "7f0-7f1 rw-s 0 00:0f 1 /dev/pcieipc\n7f1-7f2 rw-p 0 00:00 0 [stack]\n7f2-7f3 rw-s 0 00:01 9 /memfd:pcieipc-ring (deleted)\n";
        assert_eq!(ours(maps), 2);
    }
}
