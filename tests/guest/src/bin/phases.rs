// SPDX-License-Identifier: MIT OR Apache-2.0
//! A driver is taken away and given again while the kernel recovers the device from an error: between two of the phases in which it
//! calls the driver. On a card of two functions, because the kernel recovers all functions of a card together.

use std::{
    fs::{File, OpenOptions},
    io::{ErrorKind, Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    process::ExitCode,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::Duration,
};

use guest::{
    abi::*,
    aer,
    call::{Record, number},
    ktap, machine,
    pci::Function,
    promises,
    session::{Node, SOON, Session, living, played, signals, softdev},
    wait,
};
use nix::{errno::Errno, fcntl::OFlag};
use serde_json::json;

/// How long after its beginning the driver is taken away. Most phases are over in a moment, the reset of a link takes a second.
const AFTER_MS: [u64; 12] = [0, 0, 0, 0, 2, 5, 20, 50, 150, 400, 800, 1200];

/// What the kernel says from now on.
struct Log(File);

impl Log {
    fn from_now() -> Self {
        let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg").unwrap();
        file.seek(SeekFrom::End(0)).unwrap();
        Self(file)
    }

    /// Waits for a line with one of these, and tells which.
    fn wait_for(&mut self, limit: Duration, wanted: &[&str]) -> usize {
        let mut found = None;
        wait::until(limit, || {
            let mut record = [0; 8192];
            while found.is_none() {
                match self.0.read(&mut record) {
                    Ok(length) => {
                        let line = String::from_utf8_lossy(&record[..length]).into_owned();
                        found = wanted.iter().position(|wanted| line.contains(wanted));
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    // Some were overwritten before they were read.
                    Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                    Err(error) => panic!("/dev/kmsg: {error}"),
                }
            }
            found.is_some()
        });
        found.unwrap_or_else(|| panic!("the kernel does not say any of {wanted:?}"))
    }
}

/// How an error is recovered from.
struct Course {
    error: u32,
    /// The other function does not answer when it is asked after the error, so the kernel resets the card.
    other_is_mute: bool,
}

/// Ids and serial numbers of the card's functions, the first one first.
fn functions(node: &Node) -> Vec<pcieipc_endpoint_info> {
    let mut all: Vec<_> = node.endpoints().into_iter().map(|id| node.info(id).unwrap()).collect();
    all.sort_by_key(|info| info.address);
    all
}

/// Everything that an endpoint is for.
fn works(serial: u64) {
    let session = Session::on(Node::open(OFlag::empty()), living(serial));
    let eventfd = session.eventfd(1);
    let [from, to] = [0; 2].map(|_| session.create(1 << 16, 1).unwrap());
    let export = from.export().unwrap();
    export.maps()[0].fill(serial);
    export.ring().unwrap();
    assert_eq!(signals(&eventfd, SOON), 1, "it interrupts");
    let copy = pcieipc_copy { from: from.id(), to: to.id(), bytes: 1 << 16, timeout_ms: 5000, ..Record::new() };
    session.node.get(number::COPY, copy);
    assert_eq!(to.data().differences(serial), 0, "its engine reaches memory");
    assert_eq!(played(serial)["rings"], u64::from(from.made.segments + to.made.segments), "it knows these rings and no others");
    assert_eq!(session.state(), (PCIEIPC_STATE_LIVE, session.attached.generation), "and nothing happens to it any more");
}

fn bind(function: &Function) -> Result<(), Errno> {
    function.bind().map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(0)))
}

/// One recovery, in which the first function's driver is taken away and given again. Tells how many lives that began in it also ended in
/// it: of drivers that had not seen the error and were told of the reset.
fn unbound_and_bound_after(course: &Course, after: Duration) -> usize {
    let session = {
        let node = Node::open(OFlag::empty());
        let first = functions(&node)[0].endpoint;
        Session::on(node, first)
    };
    let watcher = Node::open(OFlag::empty());
    let [first, other] = functions(&watcher)[..] else { panic!("not two functions") };
    let function = session.function();
    let mut log = Log::from_now();
    if course.other_is_mute {
        // When it is taken off the bus it is asked three times, and as often when the kernel asks how it is.
        softdev(&json!({"cmd": "misread", "endpoint": played(other.serial)["endpoint"], "count": 6}));
    }
    watcher.events();
    aer::inject(first.address, course.error, 0);
    assert!(wait::until(SOON, || session.state().0 == PCIEIPC_STATE_RECOVERING), "{:?}", session.state());
    thread::sleep(after);
    let (unbound, over, refusals) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU32::new(0));
    let bound = thread::scope(|scope| {
        let recovery = wait::Over(&over);
        // It waits for the device as unbind does, so that it follows at once.
        let binding = scope.spawn(|| {
            loop {
                let (last, expected) = (over.load(Ordering::Acquire), unbound.load(Ordering::Acquire));
                match bind(&function) {
                    Ok(()) => return true,
                    // The driver is still there.
                    Err(Errno::EBUSY) if !expected => {}
                    // The kernel lets nobody at the device before it has recovered it.
                    Err(Errno::EIO) => {
                        refusals.fetch_add(1, Ordering::Relaxed);
                        thread::sleep(Duration::from_millis(5));
                    }
                    Err(error) => panic!("bind: {error}"),
                }
                if last {
                    return false;
                }
            }
        });
        function.unbind().unwrap();
        unbound.store(true, Ordering::Release);
        assert_eq!(session.state().0, PCIEIPC_STATE_GONE, "the old life is over");
        assert_eq!(session.ring(0), Err(Errno::ENODEV));
        let outcome = log.wait_for(4 * SOON, &["device recovery successful", "device recovery failed"]);
        drop(recovery);
        assert_eq!(outcome, 0, "the kernel recovers the card");
        binding.join().unwrap()
    });
    // Even if no driver was there to give the device its configuration back after the reset.
    assert!(bound, "the driver is refused when the recovery is over");
    softdev(&json!({"cmd": "misread", "endpoint": played(other.serial)["endpoint"], "count": 0}));
    works(first.serial);
    works(other.serial);
    let ended = |event: &&pcieipc_event| {
        event.kind == PCIEIPC_EVENT_STATE
            && ![first.endpoint, other.endpoint].contains(&event.endpoint)
            && event.detail[1] == u64::from(PCIEIPC_STATE_RECOVERING)
    };
    let ended = watcher.events().iter().filter(ended).count();
    println!("# after {} ms: refused {} times; {ended} lives ended in it", after.as_millis(), refusals.into_inner());
    ended
}

fn each_moment(course: &Course) -> usize {
    AFTER_MS.into_iter().map(|after| unbound_and_bound_after(course, Duration::from_millis(after))).sum()
}

fn a_driver_that_goes_and_comes_in_a_recovery_without_a_reset_finds_a_working_device() {
    each_moment(&Course { error: aer::COMPLETION_TIMEOUT, other_is_mute: false });
}

fn a_driver_that_goes_and_comes_in_a_recovery_with_a_reset_finds_a_working_device() {
    let ended = each_moment(&Course { error: aer::COMPLETION_TIMEOUT, other_is_mute: true });
    // Else nothing is shown of a driver that comes before the reset.
    assert!(ended > 0, "no driver came in time");
}

fn a_driver_that_goes_and_comes_in_a_recovery_from_a_fatal_error_finds_a_working_device() {
    each_moment(&Course { error: aer::MALFORMED_TLP, other_is_mute: false });
}

/// Nobody tells the kernel that the other function survived its error, so it gives the whole card up.
fn a_function_without_a_driver_vetoes_the_recovery_and_its_neighbour_is_dead_and_off_the_bus() {
    let node = Node::open(OFlag::empty());
    let [first, other] = functions(&node)[..] else { panic!("not two functions") };
    let session = Session::on(Node::open(OFlag::empty()), first.endpoint);
    Function::at(other.address).unbind().unwrap();
    session.node.events();
    let mut log = Log::from_now();
    aer::inject(first.address, aer::COMPLETION_TIMEOUT, 0);
    assert_eq!(log.wait_for(4 * SOON, &["device recovery failed", "device recovery successful"]), 0, "nobody vetoes it");
    assert!(wait::until(SOON, || session.state().0 == PCIEIPC_STATE_DEAD), "{:?}", session.state());
    assert_eq!((&played(first.serial)["mastering"], session.ring(0)), (&json!(false), Err(Errno::ENODEV)));
    let errors = session.node.events().into_iter().filter(|event| event.kind == PCIEIPC_EVENT_ERROR);
    assert_eq!(errors.map(|event| event.detail[0]).collect::<Vec<_>>(), [1, 3], "an error, and that it is not recovered from");
    drop(session);
    machine::repair();
    works(first.serial);
    works(other.serial);
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            a_driver_that_goes_and_comes_in_a_recovery_without_a_reset_finds_a_working_device,
            a_driver_that_goes_and_comes_in_a_recovery_with_a_reset_finds_a_working_device,
            a_driver_that_goes_and_comes_in_a_recovery_from_a_fatal_error_finds_a_working_device,
            a_function_without_a_driver_vetoes_the_recovery_and_its_neighbour_is_dead_and_off_the_bus,
        ],
        machine::repair,
    )
}
