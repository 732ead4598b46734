// SPDX-License-Identifier: MIT OR Apache-2.0
//! How ranks find their paths, share their memory and load their kernels.

use std::{collections::HashMap, sync::Arc, time::Duration};

use pcieipc::{Error, Result, group::Group, reduce::Kind};

use super::{Communicator, Options, PathChoice, digests::Digests, engine::Engine, recorder::Recorder};
use crate::{
    abi::{Args, Layout, MAX_RANKS, State},
    choice::{BLOCKS, LEAST_CHUNK, Path, limits},
    control::{CONTROL_BYTES, Shared, Words},
    driver::{Device, Function, PeerClaim, Stream, refused},
    kernels,
    mailbox::{DeviceMailbox, Remote, host_mailbox},
    proof::{PATTERN_BYTES, Probe},
    registration::Cache,
    watchdog::Watchdog,
};

/// What each rank tells first: its process, its device, and random bytes.
struct Facts {
    process: u32,
    ordinal: i32,
    mig: bool,
    multiprocessors: u32,
    /// Bytes that it has for staging.
    staging: u64,
    random: [u32; 4],
    pci: String,
}

impl Facts {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.process.to_le_bytes());
        bytes.extend(self.ordinal.to_le_bytes());
        bytes.push(u8::from(self.mig));
        bytes.extend(self.multiprocessors.to_le_bytes());
        bytes.extend(self.staging.to_le_bytes());
        self.random.iter().for_each(|w| bytes.extend(w.to_le_bytes()));
        bytes.extend(self.pci.as_bytes());
        bytes
    }
    fn from_bytes(rank: usize, peer: usize, bytes: &[u8]) -> Result<Self> {
        let word = |at: usize| bytes.get(at..at + 4).and_then(|b| Some(u32::from_le_bytes(b.try_into().ok()?)));
        let parse = || {
            let (mig, multiprocessors) = (*bytes.get(8)? != 0, word(9)?);
            let staging = u64::from(word(13)?) | u64::from(word(17)?) << 32;
            let random = [word(21)?, word(25)?, word(29)?, word(33)?];
            let pci = String::from_utf8(bytes.get(37..)?.to_vec()).ok()?;
            Some(Self { process: word(0)?, ordinal: word(4)? as i32, mig, multiprocessors, staging, random, pci })
        };
        parse().ok_or_else(|| Error::Corrupt { rank, peer, what: "the facts about its device".into(), endpoint: None })
    }
}

fn random() -> Result<[u32; 4]> {
    let mut bytes = [0u8; 16];
    // SAFETY: writes within the array.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != 16 {
        return Err(refused("getrandom", "too few bytes", "this should not happen"));
    }
    let word = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]) | 1;
    Ok([word(0), word(4), word(8), word(12)])
}

/// A rank's view of each peer, and why not.
type Claims = Vec<std::result::Result<Path, String>>;

/// What this rank's driver claims about each peer's device.
fn claims(options: &Options, device: &Arc<dyn Device>, rank: usize, all: &[Facts]) -> Claims {
    let own = &all[rank];
    let claim = |peer: usize| -> std::result::Result<Path, String> {
        let other = &all[peer];
        if options.path == PathChoice::Host {
            return Err("the host path was asked for".into());
        }
        if own.mig || other.mig {
            return Err("instances of a partitioned device share no memory between processes".into());
        }
        if own.pci == other.pci {
            return Ok(Path::PeerWide);
        }
        if options.path == PathChoice::Device {
            return Err("peer memory was asked for within a device only".into());
        }
        match device.claim(&other.pci) {
            Ok(PeerClaim { access: true, native_atomics, .. }) => Ok(if native_atomics { Path::PeerWide } else { Path::Peer }),
            Ok(_) => Err("the driver says that the devices can not reach each other".into()),
            Err(error) => Err(error.to_string()),
        }
    };
    (0..all.len()).map(|peer| if peer == rank { Ok(Path::PeerWide) } else { claim(peer) }).collect()
}

/// Tells all ranks this rank's view and takes theirs: a pair has the worse of its two views.
fn agree(group: &mut Group, what: &'static str, mine: &Claims, wait: Duration) -> Result<Vec<Vec<Path>>> {
    let rank = group.rank();
    let bytes: Vec<u8> = mine.iter().map(|c| c.as_ref().map_or(0, |p| *p as u8)).collect();
    let mut views: Vec<Vec<u8>> = group.exchange(what, &bytes, &[], wait)?.into_iter().map(|(bytes, _)| bytes).collect();
    views[rank] = bytes;
    let ranks = views.len();
    if let Some(peer) = views.iter().position(|v| v.len() != ranks) {
        return Err(Error::Corrupt { rank, peer, what: "its view of the paths".into(), endpoint: None });
    }
    let path = |code: u8| [Path::Host, Path::Peer, Path::PeerWide][usize::from(code.min(2))];
    Ok((0..ranks).map(|a| (0..ranks).map(|b| path(views[a][b].min(views[b][a]))).collect()).collect())
}

fn slowest(paths: &[Vec<Path>]) -> Path {
    let pairs = paths.iter().enumerate().flat_map(|(a, row)| row.iter().enumerate().filter(move |(b, _)| *b != a));
    pairs.map(|(_, path)| *path).min().unwrap_or(Path::PeerWide)
}

/// Options that decide what ranks choose must be the same.
fn agree_on_options(group: &mut Group, options: &Options, wait: Duration) -> Result<()> {
    let kinds: Vec<&str> = options.kinds.iter().map(|k| k.name()).collect();
    let (blocks, staging, checked) = (options.blocks, options.staging, options.checked);
    let ours =
        format!("path {:?}, types {}, blocks {blocks}, staging {staging}, checked {checked}", options.path, kinds.join(" "));
    let rank = group.rank();
    for (peer, (theirs, _)) in group.exchange("options", ours.as_bytes(), &[], wait)?.into_iter().enumerate() {
        if peer != rank && theirs != ours.as_bytes() {
            let theirs = String::from_utf8_lossy(&theirs).into_owned();
            return Err(Error::Mismatch { rank, peer, what: "the options of a communicator", ours, theirs, endpoint: None });
        }
    }
    Ok(())
}

/// Most blocks of a call with which all blocks of all ranks' kernels are resident at once. Of ranks that share a device each may have one
/// kernel that runs and one that waits for it, and neither makes room for the other ranks before these have answered.
fn resident_blocks(all: &[Facts]) -> u32 {
    let of = |rank: &Facts| {
        let sharers = all.iter().filter(|other| other.pci == rank.pci).count() as u32;
        rank.multiprocessors / if sharers > 1 { 2 * sharers } else { 1 }
    };
    all.iter().map(of).min().unwrap_or(1).max(1)
}

/// Compiles and loads the kernels of a type; answers the one that holds copy engines back.
pub(super) fn load(device: &dyn Device, kind: Kind, kernels: &mut HashMap<(Kind, &'static str), Function>) -> Result<Function> {
    let module = device.kernels(Some(kind))?;
    for name in kernels::NAMES {
        kernels.insert((kind, name), device.function(module, name)?);
    }
    device.function(module, kernels::GATE)
}

pub(super) fn make(mut group: Group, device: Arc<dyn Device>, mut options: Options) -> Result<Communicator> {
    let (rank, ranks, wait) = (group.rank(), group.ranks(), options.setup);
    if ranks > MAX_RANKS {
        return Err(Error::Argument(format!("{ranks} ranks; a communicator has at most {MAX_RANKS}")));
    }
    if options.blocks == 0 {
        return Err(Error::Argument("a call of no blocks; give it at least one".into()));
    }
    let facts = device.facts();
    let own = Facts {
        process: device.process(),
        ordinal: facts.ordinal,
        mig: facts.mig,
        multiprocessors: facts.multiprocessors,
        // A small device has better uses for its memory.
        staging: options.staging.min(facts.memory_bytes / 256),
        random: random()?,
        pci: facts.pci.clone(),
    };
    agree_on_options(&mut group, &options, wait)?;
    let given = group.exchange("devices", &own.to_bytes(), &[], wait)?;
    let mut all = Vec::new();
    for (peer, (bytes, _)) in given.iter().enumerate() {
        let bytes = if peer == rank { own.to_bytes() } else { bytes.clone() };
        all.push(Facts::from_bytes(rank, peer, &bytes)?);
    }
    let empty = all[0].random;
    options.blocks = options.blocks.min(resident_blocks(&all));
    let alone = all.iter().filter(|other| other.pci == facts.pci).count() == 1;

    let mut kernels = HashMap::new();
    // Numbers of results are compared as such.
    if options.checked && !options.kinds.contains(&Kind::U64) {
        options.kinds.push(Kind::U64);
    }
    let mut gate = None;
    for kind in &options.kinds {
        gate = Some(load(&*device, *kind, &mut kernels)?);
    }

    let mut views = claims(&options, &device, rank, &all);
    let claimed = agree(&mut group, "claims of peer access", &views, wait)?;
    // The layout must be known before the proof, and the proof can only make paths slower: host limits then fit too.
    let make_layout = |path: Path| {
        let limits = limits(path, ranks);
        // Two chunks; a whole number of tiles each.
        let chunk = all.iter().map(|f| f.staging / 2).min().unwrap_or(0) & !(LEAST_CHUNK - 1);
        let chunk = if path == Path::PeerWide && ranks == 2 { chunk } else { 0 };
        Layout::new(ranks, limits.lines, limits.tile, BLOCKS[usize::from(path != Path::Host)].into(), chunk)
    };
    let layout = make_layout(slowest(&claimed).max(if claimed.iter().flatten().any(|p| *p != Path::Host) {
        Path::Peer
    } else {
        Path::Host
    }));
    let reachable: Vec<bool> = (0..ranks).map(|peer| peer != rank && claimed[rank][peer] != Path::Host).collect();
    let mut remotes: Vec<Option<Remote>> = (0..ranks).map(|_| None).collect();
    let any_peer = claimed.iter().enumerate().any(|(a, row)| row.iter().enumerate().any(|(b, p)| a != b && *p != Path::Host));
    let device_mailbox = any_peer.then(|| DeviceMailbox::new(&device, &layout, ranks, empty)).transpose()?;
    let mut paths = claimed;
    if let Some(mailbox) = &device_mailbox {
        let mut handle = mailbox.export().map_or_else(|_| vec![0; 64], |h| h.to_vec());
        handle.extend(mailbox.base().to_le_bytes());
        let handles = group.exchange("handles of mailboxes", &handle, &[], wait)?;
        for peer in (0..ranks).filter(|p| reachable[*p]) {
            match open(&device, &all, rank, peer, &handles[peer].0) {
                Ok(remote) => remotes[peer] = Some(remote),
                Err(error) => views[peer] = Err(format!("its mailbox can not be opened: {error}")),
            }
        }
        // The proof: what this rank writes to each peer, and what each peer finds.
        let probe = Probe::new(&device)?;
        let part = |reader: usize, sender: usize| Layout::place(reader, sender) * layout.sender + layout.slots;
        debug_assert!(layout.sender - layout.slots >= 2 * PATTERN_BYTES);
        for peer in 0..ranks {
            if let Some(remote) = &remotes[peer] {
                if let Err(error) = probe.write(remote.address() + part(peer, rank), rank, peer) {
                    views[peer] = Err(format!("writing to it failed: {error}"));
                }
            }
        }
        group.exchange("the proof of the paths", &[], &[], wait)?;
        for peer in (0..ranks).filter(|p| reachable[*p]) {
            if views[peer].is_ok() {
                match probe.wrong(mailbox.base() + part(rank, peer), peer, rank) {
                    Ok(0) => {}
                    Ok(wrong) => views[peer] = Err(format!("{wrong} words that it wrote did not arrive as they were written")),
                    Err(error) => views[peer] = Err(format!("reading what it wrote failed: {error}")),
                }
            }
        }
        paths = agree(&mut group, "what the proof found", &views, wait)?;
        mailbox.clear(&layout, ranks, empty)?;
        group.exchange("clearing the mailboxes", &[], &[], wait)?;
    }
    let slowest = slowest(&paths);
    if options.path == PathChoice::Peer && ranks > 1 && slowest == Path::Host {
        let why: Vec<String> =
            views.iter().enumerate().filter_map(|(p, v)| Some(format!("rank {p}: {}", v.as_ref().err()?))).collect();
        return Err(Error::Argument(format!("the peer path is not there ({}); use the host path", why.join("; "))));
    }

    let any_host = ranks > 1 && slowest == Path::Host;
    let host_box = any_host.then(|| host_mailbox(&device, &layout, ranks, empty)).transpose()?;
    let control_file = if rank == 0 { Some(Shared::new(&device, CONTROL_BYTES)?) } else { None };
    let files: Vec<_> = host_box.iter().chain(control_file.iter()).map(Shared::file).collect();
    let given = group.exchange("memory", &[], &files, wait)?;
    drop(files);
    let mut control = control_file;
    for (peer, (_, mut files)) in given.into_iter().enumerate() {
        if peer == 0 && rank != 0 {
            let file =
                files.pop().ok_or_else(|| Error::Corrupt { rank, peer, what: "no control memory".into(), endpoint: None })?;
            control = Some(Shared::of(&device, file, CONTROL_BYTES)?);
        }
        if peer != rank && paths[rank][peer] == Path::Host {
            remotes[peer] = Some(Remote::host(&device, files, &layout)?);
        }
    }
    let control = control.ok_or_else(|| refused("sharing memory", "no control memory", "this should not happen"))?;
    let words = Arc::new(Words::new(control));
    words.set_deadline(rank, options.deadline);

    let state = device.alloc(size_of::<State>() as u64)?;
    device.fill(state, 0, (size_of::<State>() / 4) as u64, Stream(0))?;
    device.synchronize(Stream(0))?;
    // Epochs begin at 1: 0 is what new memory holds.
    device.write(state, &[1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0])?;
    let trace = if kernels::traces() { Some(Recorder::new(&*device)?) } else { None };
    if let Some(trace) = &trace {
        device.write(state + std::mem::offset_of!(State, trace) as u64, &trace.address().to_le_bytes())?;
    }
    let mut args = Args {
        state,
        control: words.memory().address(),
        input: 0,
        output: 0,
        bytes: 0,
        rank: rank as u32,
        ranks: ranks as u32,
        header: [0; 4],
        push_warps: 0,
        piece: 0,
        op: 0,
        flags: 0,
        empty,
        prefix: 0,
        input_of: 0,
        output_of: 0,
        layout,
        tx: [0; MAX_RANKS],
        rx: [0; MAX_RANKS],
    };
    for (peer, remote) in remotes.iter().enumerate() {
        if let Some(remote) = remote {
            args.tx[peer] = remote.address();
            args.rx[peer] = match (paths[rank][peer], &host_box, &device_mailbox) {
                (Path::Host, Some(shared), _) => shared.address(),
                (_, _, Some(mailbox)) => mailbox.base(),
                _ => return Err(refused("sharing memory", "a path without a mailbox", "this should not happen")),
            };
        }
    }
    let digests = options.checked.then(|| Digests::new(&device, ranks)).transpose()?;
    let lives = group.lives();
    let watchdog = Watchdog::start(words.clone(), rank, lives);
    let communicator = Communicator {
        watchdog: Some(watchdog),
        kernels,
        remotes,
        device_mailbox,
        _host_mailbox: host_box,
        words,
        state,
        order: device.event(false)?,
        trace,
        ranges: Vec::new(),
        opened: Cache::default(),
        registered: 0,
        engine: match (gate, layout.chunk > 0 && slowest == Path::PeerWide) {
            (Some(gate), true) => Some(Engine::new(&device, gate)?),
            _ => None,
        },
        group,
        args,
        paths: paths[rank].iter().enumerate().map(|(peer, path)| (peer != rank).then_some(*path)).collect(),
        reasons: views.into_iter().map(|v| v.err()).collect(),
        slowest,
        options,
        digests,
        alone,
        early: 0,
        behind_copy: false,
        last: None,
        captured: false,
        failed: false,
        device,
    };
    communicator.warm_up()?;
    let mut communicator = communicator;
    communicator.group.exchange("the start", &[], &[], wait)?;
    Ok(communicator)
}

fn open(device: &Arc<dyn Device>, all: &[Facts], rank: usize, peer: usize, given: &[u8]) -> Result<Remote> {
    let corrupt = || Error::Corrupt { rank, peer, what: "the handle of its mailbox".into(), endpoint: None };
    let (handle, base) = given.split_at_checked(64).ok_or_else(corrupt)?;
    let base = u64::from_le_bytes(base.try_into().map_err(|_| corrupt())?);
    if all[peer].process == all[rank].process {
        if all[peer].pci != all[rank].pci {
            device.reach(all[peer].ordinal)?;
        }
        return Ok(Remote::Direct(base));
    }
    Remote::import(device, &handle.try_into().map_err(|_| corrupt())?)
}
