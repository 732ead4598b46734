// SPDX-License-Identifier: MIT OR Apache-2.0
//! The control socket: faults on demand, one JSON object a line.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    config::{LINK_SPEED, LINK_WIDTH},
    endpoint::Endpoint,
    interrupts::DoorbellFault,
    registers::VECTORS,
};

/// Longest request in bytes.
const MAX_LINE: u64 = 4096;
/// What is heard of a longer line before the connection ends.
const MAX_HEARD: u64 = 1 << 20;
const MAX_CONNECTIONS: usize = 32;
const MAX_COUNT: u32 = 100_000;
const MAX_DELAY_MS: u64 = 60_000;
const MAX_TIMES: u32 = 10_000;
const MAX_PAUSE_US: u64 = 1_000_000;
const MAX_SCRIBBLE: usize = 1 << 20;

#[derive(Debug, Deserialize)]
#[serde(tag = "cmd", rename_all = "lowercase", deny_unknown_fields)]
enum Request {
    List {},
    Drop { endpoint: usize, count: u32 },
    Delay { endpoint: usize, count: u32, ms: u64 },
    Repeat { endpoint: usize, count: u32, times: u32 },
    Flood { endpoint: usize, vector: usize, count: u32, us: u64 },
    Corrupt { endpoint: usize, count: u32 },
    Misread { endpoint: usize, count: u32 },
    Stick { endpoint: usize, at_reset: Option<bool>, until_reset: Option<bool> },
    Scribble { endpoint: usize, slot: usize, offset: u64, bytes: usize, seed: u64 },
    Die { endpoint: usize },
    Silence { endpoint: usize },
    Revive { endpoint: usize },
    Pending { endpoint: usize, on: bool },
    Link { endpoint: usize, speed: u8, width: u8 },
    Slow { endpoint: usize, bytes_per_s: u64 },
    Haunt { endpoint: usize, on: bool },
    Poke { endpoint: usize, address: u64, bytes: usize, seed: u64 },
}

/// Answers one request.
///
/// # Errors
/// What is wrong with it.
fn answer(endpoints: &[Arc<Endpoint>], line: &str) -> Result<Value, String> {
    let request: Request = serde_json::from_str(line).map_err(|error| format!("bad request: {error}"))?;
    let find = |endpoint: usize| {
        endpoints.get(endpoint).ok_or_else(|| format!("no endpoint {endpoint}; there are {}, counted from 0", endpoints.len()))
    };
    let doorbells = |endpoint, fault, count| {
        at_most("count", count, MAX_COUNT)?;
        find(endpoint)?.interrupts().add_fault(fault, count).map_err(|error| error.to_string())
    };
    match request {
        Request::List {} => {
            let list: Vec<_> = endpoints.iter().map(|endpoint| endpoint.report()).collect();
            return Ok(json!({ "ok": true, "endpoints": list }));
        }
        Request::Drop { endpoint, count } => doorbells(endpoint, DoorbellFault::Drop, count)?,
        Request::Delay { endpoint, count, ms } => {
            at_most("ms", ms, MAX_DELAY_MS)?;
            doorbells(endpoint, DoorbellFault::Delay(Duration::from_millis(ms)), count)?;
        }
        Request::Repeat { endpoint, count, times } => {
            at_most("times", times, MAX_TIMES)?;
            doorbells(endpoint, DoorbellFault::Repeat(times), count)?;
        }
        Request::Flood { endpoint, vector, count, us } => {
            at_most("vector", vector, VECTORS - 1)?;
            at_most("count", count, MAX_COUNT)?;
            at_most("us", us, MAX_PAUSE_US)?;
            let flood = find(endpoint)?.interrupts().flood(vector, count, Duration::from_micros(us));
            flood.map_err(|error| format!("no thread: {error}"))?;
        }
        Request::Corrupt { endpoint, count } => find(endpoint)?.engine().corrupt(count),
        Request::Misread { endpoint, count } => find(endpoint)?.misread(count),
        Request::Stick { endpoint, at_reset, until_reset } => {
            find(endpoint)?.engine().stick(at_reset == Some(true), until_reset == Some(true));
        }
        Request::Scribble { endpoint, slot, offset, bytes, seed } => {
            at_most("bytes", bytes, MAX_SCRIBBLE)?;
            find(endpoint)?.scribble(slot, offset, &noise(seed, bytes))?;
        }
        Request::Die { endpoint } => find(endpoint)?.die(),
        Request::Silence { endpoint } => find(endpoint)?.silence(),
        Request::Revive { endpoint } => find(endpoint)?.power_cycle(),
        Request::Pending { endpoint, on } => find(endpoint)?.set_pending(on),
        Request::Link { endpoint, speed, width } => {
            if !(1..=LINK_SPEED).contains(&speed) {
                return Err(format!("speed {speed}: the code is 1 to {LINK_SPEED}"));
            }
            if !width.is_power_of_two() || width > LINK_WIDTH {
                return Err(format!("width {width}: 1, 2, 4, 8 or {LINK_WIDTH} lanes"));
            }
            find(endpoint)?.set_link(speed, width);
        }
        Request::Slow { endpoint, bytes_per_s } => find(endpoint)?.engine().set_speed(bytes_per_s),
        Request::Haunt { endpoint, on } => find(endpoint)?.haunt(on),
        Request::Poke { endpoint, address, bytes, seed } => {
            at_most("bytes", bytes, MAX_SCRIBBLE)?;
            find(endpoint)?.poke(address, &noise(seed, bytes))?;
        }
    }
    Ok(json!({ "ok": true }))
}

fn at_most<T: PartialOrd + std::fmt::Display>(name: &str, value: T, most: T) -> Result<(), String> {
    if value > most { Err(format!("{name} {value}: at most {most}")) } else { Ok(()) }
}

/// Bytes that repeat with the seed (splitmix64), so that a run with faults can be repeated.
fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let words = (1..).map(|step: u64| {
        let mut word = seed.wrapping_add(step.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    });
    words.flat_map(u64::to_le_bytes).take(bytes).collect()
}

fn serve(endpoints: &[Arc<Endpoint>], mut stream: UnixStream) -> io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let mut line = String::new();
        if reader.by_ref().take(MAX_LINE).read_line(&mut line)? == 0 {
            return Ok(());
        }
        let complete = line.ends_with('\n');
        let outcome =
            if complete { answer(endpoints, &line) } else { Err(format!("a request is one line of at most {MAX_LINE} bytes")) };
        let reply = outcome.unwrap_or_else(|error| json!({ "ok": false, "error": error }));
        writeln!(stream, "{reply}")?;
        if !complete {
            // Who still writes is heard out, or a broken pipe would come before the reason.
            reader.by_ref().take(MAX_HEARD).skip_until(b'\n')?;
            return Ok(());
        }
    }
}

/// Serves connections, each on a thread. Does not return.
pub fn listen(listener: &UnixListener, endpoints: &[Arc<Endpoint>]) {
    let open = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else {
            // Out of descriptors, most likely; do not spin on it.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        if open.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
            open.fetch_sub(1, Ordering::Relaxed);
            // Whoever does not read this has hung up.
            let _ = writeln!(
                stream,
                "{}",
                json!({ "ok": false, "error": format!("{MAX_CONNECTIONS} connections are open already") })
            );
            continue;
        }
        let (endpoints, still_open) = (endpoints.to_vec(), open.clone());
        let spawned = thread::Builder::new().name("control".into()).spawn(move || {
            // A broken connection concerns only its other end.
            let _ = serve(&endpoints, stream);
            still_open.fetch_sub(1, Ordering::Relaxed);
        });
        if spawned.is_err() {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
