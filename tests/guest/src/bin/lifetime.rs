// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long the module stays: while anything of it is open or mapped, and not a moment longer.

use std::{fs, os::fd::OwnedFd, process::ExitCode, thread, time::Duration};

use guest::{
    abi::pcieipc_channel,
    call::{Record, number},
    ktap, machine,
    mapping::PAGE,
    promises,
    session::{Node, SOON, Session, signals},
    wait,
};
use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    kmod::{DeleteModuleFlags, ModuleInitFlags, delete_module, finit_module},
    sys::{stat::Mode, wait::waitpid},
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
        assert_eq!((told.correctable_per_second, told.link_sample_ms, told.max_sessions, told.storm_interrupts), (3, 50, 4, 4321));
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

fn main() -> ExitCode {
    ktap::main(
        promises![
            channels_give_all_their_memory_back,
            rmmod_is_refused_while_anything_is_open_and_succeeds_after,
            the_module_loads_and_unloads_again_and_again_and_works_each_time,
            limits_are_what_the_parameters_say_in_query_and_in_fact,
        ],
        machine::repair,
    )
}
