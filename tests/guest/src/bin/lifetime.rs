// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long the module stays: while anything of it is open or mapped, and not a moment longer.

use std::{
    fs,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use guest::{
    abi::{pcieipc_channel, pcieipc_channel_create},
    aer,
    call::{Record, number},
    ktap, machine,
    mapping::PAGE,
    promises,
    random::Random,
    session::{self, Node, SOON, Session, signals},
    wait,
};
use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    kmod::{DeleteModuleFlags, ModuleInitFlags, delete_module, finit_module},
    sys::{mman::ProtFlags, stat::Mode, wait::waitpid},
    unistd::{ForkResult, Uid, fork, pipe, setuid},
};

fn rmmod() -> Result<(), Errno> {
    delete_module(c"pcieipc", DeleteModuleFlags::O_NONBLOCK)
}

fn insmod() {
    let file = fs::File::open("/modules/pcieipc.ko").unwrap();
    finit_module(&file, c"", ModuleInitFlags::empty()).unwrap();
    assert!(wait::until(SOON, || fs::exists("/dev/pcieipc").unwrap()));
}

fn refused(why: &str) {
    let outcome = rmmod();
    assert!(matches!(outcome, Err(Errno::EWOULDBLOCK | Errno::EBUSY)), "{why}: {outcome:?}");
}

fn rmmod_is_refused_while_anything_is_open_and_succeeds_after() {
    {
        let _node = Node::open(OFlag::empty());
        refused("an open node");
    }
    let session = Session::nth(0);
    refused("a session");
    let channel = session.create(4 * PAGE as u64, 0).unwrap();
    let export = channel.export().unwrap();
    let [writer, ..] = export.maps();
    let reader = channel.data();
    drop(session);
    refused("a mapping and an exported descriptor of a closed session");
    drop(export);
    refused("mappings alone");
    writer.fill(4);
    assert_eq!(reader.differences(4), 0);
    drop(writer);
    refused("the reader's mapping alone");
    drop(reader);
    assert!(wait::until(SOON, || rmmod().is_ok()), "nothing holds it any more");
    assert!(!fs::exists("/dev/pcieipc").unwrap(), "the node is gone");
    assert!(!fs::exists("/sys/bus/pci/drivers/pcieipc").unwrap(), "the driver is gone");
    insmod();
}

fn the_module_loads_and_unloads_again_and_again_and_works_each_time() {
    for _ in 0..10 {
        let session = Session::nth(0);
        let eventfd = session.eventfd(0);
        let channel = session.create(1 << 20, 0).unwrap();
        channel.export().unwrap().maps()[0].fill(1);
        assert_eq!(channel.data().differences(1), 0);
        session.ring(0).unwrap();
        assert_eq!(signals(&eventfd, SOON), 1);
        drop(session);
        assert!(wait::until(SOON, || rmmod().is_ok()));
        insmod();
    }
}

/// The nodes of single endpoints that are there now.
fn endpoint_nodes() -> Vec<PathBuf> {
    let names = fs::read_dir("/dev").unwrap().flatten().map(|entry| entry.path());
    let digits = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str())?.strip_prefix("pcieipc")?.to_owned();
        (!name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit())).then_some(())
    };
    names.filter(|path| digits(path).is_some()).collect()
}

/// From open to the last unmap, as often as the module is there, and everything works while anything is open. Counts lives.
fn live_again_and_again(seed: u64, over: &AtomicBool, lives: &AtomicU64) {
    let mut random = Random(seed);
    while !over.load(Ordering::Relaxed) {
        // So that there are moments in which nobody has it open.
        thread::sleep(Duration::from_micros(random.below(80_000)));
        let own_nodes = if random.bits() % 2 == 0 { endpoint_nodes() } else { Vec::new() };
        let path = own_nodes.first().map_or(Path::new("/dev/pcieipc"), PathBuf::as_path);
        let node = match open(path, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty()) {
            Ok(fd) => Node::from(fd),
            // The node is not there, or what was behind it is not any more.
            Err(Errno::ENOENT | Errno::ENXIO | Errno::ENODEV) => continue,
            Err(error) => panic!("{}: {error}", path.display()),
        };
        node.query();
        let endpoints = node.endpoints();
        let Some(&endpoint) = endpoints.get(random.bits() as usize % endpoints.len().max(1)) else { continue };
        match node.attach(endpoint, 0) {
            Ok(_) => {}
            Err(Errno::EBUSY) => continue,
            Err(error) => panic!("attach: {error}"),
        }
        // From here on the module cannot go, so nothing may fail.
        let create = pcieipc_channel_create { data_bytes: 4 * PAGE as u64, ..Record::new() };
        let made = node.get(number::CHANNEL_CREATE, create);
        let export = session::export(&node, made.channel).unwrap();
        let [writer, ..] = export.maps();
        let reader = node.map(made.data_offset, 4 * PAGE, ProtFlags::PROT_READ).unwrap();
        export.ring().unwrap();
        match random.bits() % 3 {
            0 => drop(node),
            1 => drop(export),
            _ => drop((export, node)),
        }
        writer.fill(seed);
        assert_eq!(reader.differences(seed), 0);
        lives.fetch_add(1, Ordering::Relaxed);
    }
}

fn calls_that_race_rmmod_find_the_whole_module_or_none() {
    // As many as a minute and a half has room for; on a slow kernel the least that is a race, however long that takes.
    const UNLOADS: std::ops::RangeInclusive<u32> = 20..=100;
    let functions: Vec<u32> = {
        let node = Node::open(OFlag::empty());
        node.endpoints().into_iter().map(|id| node.info(id).unwrap().address).collect()
    };
    let (over, lives) = (AtomicBool::new(false), AtomicU64::new(0));
    let (mut unloads, mut refusals, mut errors) = (0, 0, 0);
    thread::scope(|scope| {
        let _race = wait::Over(&over);
        let players = [1, 2, 3].map(|seed| {
            scope.spawn({
                let (over, lives) = (&over, &lives);
                move || live_again_and_again(seed, over, lives)
            })
        });
        let begun = Instant::now();
        let enough = |unloads| {
            let least = Duration::from_secs(90);
            unloads >= *UNLOADS.end()
                || begun.elapsed() > if unloads >= *UNLOADS.start() { least } else { wait::patiently(least) }
        };
        while !enough(unloads) && players.iter().all(|player| !player.is_finished()) {
            // A correctable error is told to the driver without any lock that would keep it there.
            if unloads == 4 * errors {
                aer::inject(functions[errors as usize % functions.len()], 0, aer::BAD_TLP);
                errors += 1;
            }
            match rmmod() {
                Ok(()) => {
                    unloads += 1;
                    let file = fs::File::open("/modules/pcieipc.ko").unwrap();
                    finit_module(&file, c"", ModuleInitFlags::empty()).unwrap();
                }
                Err(Errno::EWOULDBLOCK | Errno::EBUSY) => {
                    refusals += 1;
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) => panic!("rmmod: {error}"),
            }
        }
    });
    println!("# {unloads} times unloaded, {refusals} times refused, {} lives", lives.into_inner());
    assert!(unloads >= *UNLOADS.start() && refusals >= *UNLOADS.start(), "too little of a race");
    assert!(wait::until(SOON, || Node::open(OFlag::empty()).endpoints().len() == functions.len()));
}

/// Loading fails behind the endpoints' nodes, which somebody tries to open all the time: what he got would lose its code.
fn a_load_that_fails_opens_nothing_before() {
    machine::unload();
    let namesake = fs::File::open("/modules/namesake.ko").unwrap();
    finit_module(&namesake, c"", ModuleInitFlags::empty()).unwrap();
    let over = AtomicBool::new(false);
    let (opened, refused) = thread::scope(|scope| {
        let _race = wait::Over(&over);
        let opener = scope.spawn(|| {
            let (mut opened, mut refused) = (Vec::new(), 0);
            // One is enough to know it.
            while !over.load(Ordering::Relaxed) && opened.is_empty() {
                for id in 1..=2 {
                    match open(format!("/dev/pcieipc{id}").as_str(), OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty()) {
                        Ok(fd) => opened.push(fd),
                        Err(Errno::ENODEV) => refused += 1,
                        Err(Errno::ENOENT | Errno::ENXIO) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            (opened, refused)
        });
        for _ in 0..10 {
            // What the kernel makes of the EEXIST of the folder.
            assert_eq!(machine::try_insert(&machine::module_file(), c""), Err(Errno::EBUSY));
        }
        over.store(true, Ordering::Relaxed);
        opener.join().unwrap()
    });
    println!("# {} opened, {refused} refused", opened.len());
    let count = opened.len();
    // Closing one would be a call into memory that is somebody else's by now.
    std::mem::forget(opened);
    assert_eq!(count, 0, "open files of a module that is not there");
    assert!(refused > 0, "nobody was there in time");
    delete_module(c"namesake", DeleteModuleFlags::O_NONBLOCK).unwrap();
    insmod();
    Session::nth(0).ring(0).unwrap();
}

/// Bytes of memory that the kernel could hand out.
fn available() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("MemAvailable:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn channels_give_all_their_memory_back() {
    let round = || {
        let session = Session::nth(0);
        for _ in 0..8 {
            let channel = session.create(4 << 20, 0).unwrap();
            let export = channel.export().unwrap();
            export.maps()[0].store(0, 1);
            if channel.id() % 2 == 0 {
                channel.destroy().unwrap();
            }
        }
    };
    round();
    thread::sleep(Duration::from_millis(300));
    let before = available();
    for _ in 0..20 {
        round();
    }
    // 20 rounds made 640 MiB; a leak of one channel a round would be 80 MiB.
    let returned = wait::until(SOON, || available() + (40 << 20) > before);
    assert!(returned, "{} MiB less than before", (before - available()) >> 20);
}

fn open_node() -> Result<OwnedFd, Errno> {
    open("/dev/pcieipc", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())
}

/// How many sessions another user can open, looking for one more than `expected`, and why no more.
fn open_as_another_user(expected: u8) -> (u8, Errno) {
    let (answer, tell) = pipe().unwrap();
    // SAFETY: the child makes system calls only and leaves at once.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let mut bytes = [0, 0];
            // The group stays root's, which may open the node.
            if setuid(Uid::from_raw(65534)).is_ok() {
                let mut open = Vec::with_capacity(usize::from(expected) + 1);
                for _ in 0..=expected {
                    match open_node() {
                        Ok(fd) => open.push(fd),
                        Err(error) => {
                            bytes[1] = error as u8;
                            break;
                        }
                    }
                }
                bytes[0] = open.len() as u8;
            }
            let _ = nix::unistd::write(&tell, &bytes);
            // SAFETY: leaves at once.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            drop(tell);
            let mut bytes = [0; 2];
            assert_eq!(nix::unistd::read(&answer, &mut bytes), Ok(2));
            waitpid(child, None).unwrap();
            (bytes[0], Errno::from_raw(bytes[1].into()))
        }
    }
}

fn limits_are_what_the_parameters_say_in_query_and_in_fact() {
    machine::reload(
        c"max_channel_bytes=65536 max_session_bytes=163840 max_total_bytes=327680 max_channels=3 event_queue=32 \
          doorbells_per_second=77 correctable_per_second=3 link_sample_ms=50 max_sessions=4 storm_interrupts=4321",
    );
    {
        let [one, two] = [0, 1].map(Session::nth);
        let told = one.node.query();
        assert_eq!((told.max_channel_bytes, told.max_session_bytes, told.max_total_bytes), (64 << 10, 160 << 10, 320 << 10));
        assert_eq!((told.max_channels, told.event_queue, told.doorbells_per_second), (3, 32, 77));
        assert_eq!(
            (told.correctable_per_second, told.link_sample_ms, told.max_sessions, told.storm_interrupts),
            (3, 50, 4, 4321)
        );
        let make = |session: &Session, kib: u64| session.create(kib << 10, 0).map(|channel| channel.id());
        let end = |session: &Session, channel| {
            let mut ended = pcieipc_channel { channel, ..Record::new() };
            session.node.call(number::CHANNEL_DESTROY, &mut ended).unwrap();
        };
        assert_eq!(make(&one, 128), Err(Errno::ENOSPC), "a channel over its limit");
        make(&one, 64).unwrap();
        make(&one, 64).unwrap();
        assert_eq!(make(&one, 64), Err(Errno::ENOSPC), "a session over its limit");
        end(&one, make(&one, 32).unwrap());
        make(&one, 4).unwrap();
        assert_eq!(make(&one, 4), Err(Errno::ENOSPC), "a fourth channel");
        // What counts for all is data, head and tail: 156 KiB so far.
        make(&two, 64).unwrap();
        make(&two, 64).unwrap();
        assert_eq!(make(&two, 16), Err(Errno::ENOSPC), "all over their limit");
        assert_eq!(machine::module_state("channel bytes"), 300 << 10, "a refusal charges nothing");
        make(&two, 8).unwrap();
        // Two more sessions of this user, and none beyond; another user has as many.
        let more = [0; 2].map(|_| Node::open(OFlag::empty()));
        assert_eq!(open_node().map(drop), Err(Errno::ENOSPC), "a fifth session");
        assert_eq!(open_as_another_user(4), (4, Errno::ENOSPC));
        drop(more);
        assert_eq!(open_node().map(drop), Ok(()), "closed ones do not count");
    }
    machine::reload(c"");
}

/// The soft endpoint described by hand, so that it has a doorbell less than the module's own profile says.
fn a_profile_of_an_administrator_goes_before_the_modules_own() {
    const PROFILE: &str = "/sys/kernel/config/pcieipc/by-hand";
    let fields =
        [("vendor", "0x1234"), ("device", "0x7069"), ("vectors", "6"), ("doorbell_offset", "0x3000"), ("doorbell_stride", "4")];
    let driven_by = |session: &Session| {
        let info = session.info();
        let name: String = info.profile.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8 as char).collect();
        (name, info.vectors)
    };
    let session = Session::nth(0);
    let (function, serial) = (session.function(), session.info().serial);
    assert_eq!(driven_by(&session), ("soft".to_owned(), 7));
    fs::create_dir(PROFILE).unwrap();
    for (field, value) in fields.into_iter().chain([("user_dma", "0"), ("enable", "1")]) {
        fs::write(format!("{PROFILE}/{field}"), value).unwrap_or_else(|error| panic!("{field}: {error}"));
    }
    assert_eq!(driven_by(&session).0, "soft", "what is bound keeps the profile with which it was bound");
    drop(session);
    for expected in [("by-hand".to_owned(), 6), ("soft".to_owned(), 7)] {
        function.unbind().unwrap();
        function.bind().unwrap();
        let session = Session::on(Node::open(OFlag::empty()), session::living(serial));
        assert_eq!(driven_by(&session), expected);
        let eventfd = session.eventfd(5);
        session.ring(5).unwrap();
        assert_eq!(signals(&eventfd, SOON), 1);
        drop(session);
        let _ = fs::remove_dir(PROFILE);
    }
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            a_profile_of_an_administrator_goes_before_the_modules_own,
            channels_give_all_their_memory_back,
            rmmod_is_refused_while_anything_is_open_and_succeeds_after,
            the_module_loads_and_unloads_again_and_again_and_works_each_time,
            calls_that_race_rmmod_find_the_whole_module_or_none,
            a_load_that_fails_opens_nothing_before,
            limits_are_what_the_parameters_say_in_query_and_in_fact,
        ],
        machine::repair,
    )
}
