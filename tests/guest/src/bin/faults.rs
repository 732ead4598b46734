// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every allocation, and every copy to and from user memory, of every call fails once. Each time the answer is an error that says so
//! or the call did without, everything is as it was before, and when nothing fails any more the call works.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Read},
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    process::ExitCode,
};

use guest::{
    abi::*,
    call::{Record, number},
    injection::{self, Injection},
    ktap, machine,
    mapping::{Mapping, PAGE, READ_WRITE},
    pci::Function,
    promises,
    session::{Export, Node, SOON, Session},
    wait,
};
use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    poll::PollFlags,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags},
        eventfd::EventFd,
        mman::{MmapAdvise, ProtFlags, madvise},
        stat::Mode,
    },
};

/// No call has so many chances to fail.
const MOST: u32 = 5000;

/// What must be the same again: what the module holds, and what the process has open.
fn held() -> String {
    let state = match fs::read_to_string("/sys/kernel/debug/pcieipc/state") {
        Err(_) if !machine::loaded() => String::new(),
        state => state.unwrap_or_else(|error| panic!("debugfs: {error}")),
    };
    let counted = ["pages", "channel bytes", "endpoint", "attached", "channels", "mappings", "ring slots", "copying", "state"];
    let lines = state.lines().map(str::trim).filter(|line| counted.iter().any(|name| line.starts_with(name)));
    // An endpoint that was bound again has a new id.
    let lines = lines.map(|line| line.rsplit_once(" at ").map_or(line, |(_, address)| address));
    let files = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    lines.collect::<Vec<_>>().join(", ") + &format!(", {files} files")
}

fn errno<T>(outcome: io::Result<T>) -> Result<T, Errno> {
    outcome.map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(0)))
}

/// Sweeps one call: `prepare` makes what it needs, `call` is what fails. What it gives, and what it needed, is dropped afterwards.
fn sweep<C, T>(what: &str, prepare: impl Fn() -> C, call: impl Fn(&C) -> Result<T, Errno>) {
    sweep_each(1, what, prepare, call);
}

/// As [`sweep`], but of the places that can fail it takes only each `step`th.
fn sweep_each<C, T>(step: u32, what: &str, prepare: impl Fn() -> C, call: impl Fn(&C) -> Result<T, Errno>) {
    let injection = Injection::of_this_thread();
    // Once without faults, for what is allocated once and stays, in the kernel and here.
    let context = prepare();
    drop(call(&context).unwrap_or_else(|error| panic!("{what}: {error}")));
    drop(context);
    let before = held();
    let mut errors = BTreeSet::new();
    for nth in (1..MOST).step_by(step as usize) {
        let context = prepare();
        let ready = held();
        let (outcome, injected) = injection.run(nth, || call(&context));
        match &outcome {
            Ok(_) => {}
            Err(error) => {
                assert!(injected, "{what}: {error} although nothing failed, at fault {nth}");
                assert!([Errno::ENOMEM, Errno::EFAULT].contains(error), "{what}: {error} at fault {nth}");
                errors.insert(format!("{error:?}"));
                let now = &mut String::new();
                let intact = wait::until(SOON, || {
                    *now = held();
                    *now == ready
                });
                assert!(intact, "{what}: fault {nth} left [{now}], not [{ready}]");
            }
        }
        drop(outcome);
        drop(context);
        let now = &mut String::new();
        let given_back = wait::until(SOON, || {
            *now = held();
            *now == before
        });
        assert!(given_back, "{what}: after fault {nth} there is [{now}], not [{before}]");
        if !injected {
            assert!(nth > 1, "{what}: nothing in it can fail, so this proves nothing");
            let which = if step == 1 { format!("{} faults", nth - 1) } else { format!("each {step}th of about {nth} faults") };
            println!("# {what}: {which}, errors {errors:?}");
            return;
        }
    }
    panic!("{what}: {MOST} faults and no end");
}

fn node() -> Node {
    Node::open(OFlag::O_NONBLOCK)
}

fn session() -> Session {
    Session::nth(0)
}

/// A session that nothing else uses, with a channel on it: its structure, and its writer's descriptor.
struct Ready {
    session: Session,
    channel: pcieipc_channel_create,
    export: Export,
}

fn with_channel(flags: u32) -> Ready {
    with_channel_of(4 * PAGE, flags)
}

fn with_channel_of(data_bytes: usize, flags: u32) -> Ready {
    let session = session();
    let create = pcieipc_channel_create { data_bytes: data_bytes as u64, flags, ..Record::new() };
    let channel = session.node.get(number::CHANNEL_CREATE, create);
    let export = guest::session::export(&session.node, channel.channel).unwrap_or_else(|error| panic!("export: {error}"));
    Ready { session, channel, export }
}

fn ready() -> Ready {
    with_channel(0)
}

fn ask<T: Record>(fd: impl AsFd, number: u8, record: T) -> Result<T, Errno> {
    let mut record = record;
    guest::call::call(fd, number, &mut record).map(|()| record)
}

fn open_survives_every_fault() {
    let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC;
    sweep("open", || (), |()| open("/dev/pcieipc", flags, Mode::empty()));
    let own = format!("/dev/pcieipc{}", node().endpoints()[0]);
    sweep("open one endpoint's node", || (), |()| open(own.as_str(), flags, Mode::empty()));
}

fn queries_survive_every_fault() {
    let mut ids = [0u32; 8];
    let list = pcieipc_enumerate { ids: ids.as_mut_ptr() as u64, count: 8, ..Record::new() };
    let all = node().endpoints();
    let query = pcieipc_query { user_version: 1, user_oldest: 1, ..Record::new() };
    sweep("QUERY", node, |node| ask(node, number::QUERY, query));
    sweep("ENUMERATE", node, |node| ask(node, number::ENUMERATE, list));
    let info = pcieipc_endpoint_info { endpoint: all[0], ..Record::new() };
    sweep("ENDPOINT_INFO", node, |node| ask(node, number::ENDPOINT_INFO, info));
    let far = pcieipc_distance { from: all[0], to: all[1], ..Record::new() };
    sweep("DISTANCE", node, |node| ask(node, number::DISTANCE, far));
    sweep("STATE", session, |session| ask(&session.node, number::STATE, pcieipc_session_state::new()));
}

fn attach_and_recover_survive_every_fault() {
    let endpoint = node().endpoints()[0];
    let attach = pcieipc_attach { endpoint, ..Record::new() };
    sweep("ATTACH", node, |node| ask(node, number::ATTACH, attach));
    for (what, flags) in [("RECOVER", 0), ("RECOVER of device memory", PCIEIPC_CHANNEL_DEVICE_MEMORY)] {
        let stale = || {
            let ready = with_channel(flags);
            ready.session.function().reset().unwrap_or_else(|error| panic!("reset: {error}"));
            ready
        };
        sweep(what, stale, |ready| ask(&ready.session.node, number::RECOVER, pcieipc_recover::new()));
    }
}

/// What was made ends with the call that made it, so that each is made afresh.
fn making_a_channel_survives_every_fault() {
    let make = |session: &Session, data_bytes: u64, flags: u32| {
        let create = pcieipc_channel_create { data_bytes, flags, ..Record::new() };
        let made = ask(&session.node, number::CHANNEL_CREATE, create)?;
        Ok(made)
    };
    sweep("CHANNEL_CREATE of a page", session, |session| make(session, PAGE as u64, 0));
    sweep("CHANNEL_CREATE of 8 MiB", session, |session| make(session, 8 << 20, 0));
    sweep("CHANNEL_CREATE in device memory", session, |session| make(session, 1 << 16, PCIEIPC_CHANNEL_DEVICE_MEMORY));
}

fn calls_on_a_channel_survive_every_fault() {
    let id = |ready: &Ready| ready.channel.channel;
    let of = |ready: &Ready| pcieipc_channel { channel: id(ready), ..Record::new() };
    sweep("CHANNEL_FREED", ready, |ready| ask(&ready.session.node, number::CHANNEL_FREED, of(ready)));
    sweep("CHANNEL_DESTROY", ready, |ready| ask(&ready.session.node, number::CHANNEL_DESTROY, of(ready)));
    let unexported = || {
        let Ready { session, channel, export } = ready();
        drop(export);
        (session, channel.channel)
    };
    sweep("CHANNEL_EXPORT", unexported, |(session, channel)| guest::session::export(&session.node, *channel));
    sweep("CHANNEL_IMPORT", ready, |ready| {
        let import = pcieipc_channel_fd { fd: ready.export.as_fd().as_raw_fd(), ..Record::new() };
        ask(&ready.session.node, number::CHANNEL_IMPORT, import)
    });
    let in_device = || with_channel(PCIEIPC_CHANNEL_DEVICE_MEMORY);
    sweep("CHANNEL_DMABUF", in_device, |ready| {
        let shared = pcieipc_channel_fd { channel: id(ready), ..Record::new() };
        let shared = ask(&ready.session.node, number::CHANNEL_DMABUF, shared)?;
        // SAFETY: the kernel has just made this descriptor for us.
        Ok(unsafe { OwnedFd::from_raw_fd(shared.fd) })
    });
    for (what, flags) in [("COPY", 0), ("COPY that rings", PCIEIPC_COPY_RING)] {
        sweep(what, ready, |ready| {
            let (id, to_offset) = (id(ready), PAGE as u64);
            let copy = pcieipc_copy { flags, from: id, to: id, to_offset, bytes: 64, timeout_ms: 10_000, ..Record::new() };
            ask(&ready.session.node, number::COPY, copy)
        });
    }
}

fn doorbells_and_eventfds_survive_every_fault() {
    let eventfd = EventFd::new().unwrap_or_else(|error| panic!("eventfd: {error}"));
    let fd = eventfd.as_fd().as_raw_fd();
    sweep("VECTOR_EVENTFD", ready, |ready| {
        ask(&ready.session.node, number::VECTOR_EVENTFD, pcieipc_vector_eventfd { fd, ..Record::new() })
    });
    sweep("RING", ready, |ready| ask(&ready.session.node, number::RING, pcieipc_ring::new()));
    sweep("DOORBELL_MAP", ready, |ready| ask(&ready.session.node, number::DOORBELL_MAP, pcieipc_doorbell::new()));
    sweep("EXPORT_INFO", ready, |ready| ask(&ready.export, number::EXPORT_INFO, pcieipc_export_info::new()));
    sweep("EXPORT_RING", ready, |ready| ask(&ready.export, number::EXPORT_RING, pcieipc_ring::new()));
    sweep("EXPORT_EVENTFD", ready, |ready| {
        ask(&ready.export, number::EXPORT_EVENTFD, pcieipc_export_eventfd { fd, ..Record::new() })
    });
    sweep("EXPORT_DOORBELL", ready, |ready| ask(&ready.export, number::EXPORT_DOORBELL, pcieipc_doorbell::new()));
}

fn an_administrators_call_survives_every_fault() {
    let endpoint = node().endpoints()[0];
    let scan = pcieipc_admin { action: PCIEIPC_ADMIN_RESCAN, endpoint, ..Record::new() };
    sweep("ADMIN", node, |node| {
        // The action before may not have ended yet; that is no fault.
        let mut outcome = Err(Errno::EBUSY);
        wait::until(SOON, || {
            outcome = ask(node, number::ADMIN, scan);
            !matches!(outcome, Err(Errno::EBUSY))
        });
        outcome
    });
}

fn events_stay_when_their_reader_cannot_be_served() {
    let with_event = || {
        let node = node();
        let function = session().function();
        function.reset().unwrap_or_else(|error| panic!("reset: {error}"));
        let polled = wait::polled(&node, PollFlags::POLLIN, SOON);
        assert!(polled.contains(PollFlags::POLLIN), "a reset is told");
        node
    };
    sweep("read", with_event, |node| {
        let mut record = [0; size_of::<pcieipc_event>()];
        let read = nix::unistd::read(node, &mut record);
        if read.is_err() {
            // It must be there still; whether the faults are used up by now does not matter.
            let polled = wait::polled(node, PollFlags::POLLIN, SOON);
            assert!(polled.contains(PollFlags::POLLIN), "the event is lost");
        }
        read
    });
}

fn poll_and_epoll_survive_every_fault() {
    // More files than the kernel has room for on its stack.
    let many = || (0..64).map(|_| node()).collect::<Vec<_>>();
    sweep("poll", many, |nodes| {
        let mut fds: Vec<libc::pollfd> =
            nodes.iter().map(|node| libc::pollfd { fd: node.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 }).collect();
        // SAFETY: the array has that many entries.
        Errno::result(unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, 1) })
    });
    let epoll = || (Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap_or_else(|error| panic!("epoll: {error}")), ready());
    sweep("epoll", epoll, |(epoll, ready)| {
        epoll.add(&ready.session.node, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        epoll.add(&ready.export, EpollEvent::new(EpollFlags::EPOLLOUT, 1))
    });
}

fn mmap_survives_every_fault() {
    let read = ProtFlags::PROT_READ;
    let map = |fd: &dyn Fn(&Ready) -> (i32, u64), what: &str, len: usize, protection: ProtFlags| {
        sweep(what, ready, |ready| {
            let (fd, offset) = fd(ready);
            // SAFETY: the descriptor belongs to `ready`, which outlives this.
            Mapping::new(unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }, offset, len, protection)
        });
    };
    let session = |ready: &Ready| ready.session.node.as_fd().as_raw_fd();
    let export = |ready: &Ready| ready.export.as_fd().as_raw_fd();
    map(&|ready| (session(ready), ready.session.attached.status_offset), "mmap of the status", PAGE, read);
    map(&|ready| (session(ready), ready.channel.data_offset), "mmap of the reader's data", 4 * PAGE, read);
    sweep("mmap of the reader's data where no page tables are", ready, |ready| {
        Mapping::apart(&ready.session.node, ready.channel.data_offset, 4 * PAGE, read)
    });
    map(&|ready| (session(ready), ready.channel.head_offset), "mmap of the reader's head", PAGE, READ_WRITE);
    let info = |ready: &Ready| ready.export.info().unwrap_or_else(|error| panic!("{error}"));
    map(&|ready| (export(ready), 0), "mmap of the writer's data", 4 * PAGE, READ_WRITE);
    let tail = info(&ready()).tail_offset;
    map(&|ready| (export(ready), tail), "mmap of the writer's tail", PAGE, READ_WRITE);
    let bell = |ready: &Ready| ready.session.node.get(number::DOORBELL_MAP, pcieipc_doorbell::new()).map_offset;
    let offset = bell(&ready());
    map(&|ready| (session(ready), offset), "mmap of a doorbell page", PAGE, READ_WRITE);
    let in_device = || with_channel(PCIEIPC_CHANNEL_DEVICE_MEMORY);
    sweep("mmap of device memory", in_device, |ready| {
        ready.session.node.map(ready.channel.data_offset, ready.channel.data_bytes as usize, read)
    });
}

fn page_faults_and_split_mappings_survive_every_fault() {
    // A fault allocates page tables or nothing. Where a mapping lies apart there are none at first, and when one that fills a whole table
    // is emptied, the table goes with what was in it. Device memory is mapped empty, and cannot be emptied.
    const TABLE: usize = 2 << 20;
    let apart = |data_bytes: usize, flags: u32| {
        move || {
            let ready = with_channel_of(data_bytes, flags);
            let data = Mapping::apart(&ready.session.node, ready.channel.data_offset, data_bytes, ProtFlags::PROT_READ);
            (data.unwrap_or_else(|error| panic!("map: {error}")), ready)
        }
    };
    sweep("a fault in ring memory", apart(TABLE, 0), |(data, _)| {
        // SAFETY: the range is the mapping; nothing refers into it.
        unsafe { madvise(data.address(), data.len(), MmapAdvise::MADV_DONTNEED) }?;
        // Without memory the access is tried again.
        data.load(PAGE);
        Ok(())
    });
    sweep("a fault in device memory", apart(4 * PAGE, PCIEIPC_CHANNEL_DEVICE_MEMORY), |(data, _)| {
        data.load(PAGE);
        Ok(())
    });
    for flags in [0, PCIEIPC_CHANNEL_DEVICE_MEMORY] {
        sweep("a mapping in three parts", apart(4 * PAGE, flags), |(data, _)| {
            // SAFETY: inside the mapping; nothing refers into it.
            let middle = unsafe { data.address().byte_add(PAGE) };
            // SAFETY: as above; a mapping with a hole is given back as a whole.
            unsafe { nix::sys::mman::munmap(middle, PAGE) }
        });
    }
}

fn fdinfo_and_debugfs_survive_every_fault() {
    sweep("fdinfo", ready, |ready| {
        let mut text = String::new();
        for fd in [ready.session.node.as_fd().as_raw_fd(), ready.export.as_fd().as_raw_fd()] {
            errno(fs::File::open(format!("/proc/self/fdinfo/{fd}")).and_then(|mut file| file.read_to_string(&mut text)))?;
        }
        Ok(())
    });
    sweep("state in debugfs", ready, |_| errno(fs::read_to_string("/sys/kernel/debug/pcieipc/state")));
}

/// The whole probe of a device.
fn binding_a_device_survives_every_fault() {
    let unbound = || {
        let function = Function::soft_endpoints().swap_remove(0);
        if function.bound() {
            function.unbind().unwrap_or_else(|error| panic!("unbind: {error}"));
        }
        function
    };
    let nothing_left = |function: &Function| {
        let outcome = errno(function.bind());
        // The driver core turns some errors of a probe into others, and the PCI core says EBUSY where it cannot note down a BAR.
        let others = [Errno::ENODEV, Errno::ENOSPC, Errno::EINVAL, Errno::EBUSY];
        let outcome = outcome.map_err(|error| if others.contains(&error) { Errno::ENOMEM } else { error });
        outcome.map(|()| Unbind(function.clone()))
    };
    // There are hundreds, and each takes half a second on a kernel that checks everything.
    let step = if std::env::var_os("SHORT").is_some() { 25 } else { 1 };
    sweep_each(step, "bind", unbound, nothing_left);
    unbound().bind().unwrap_or_else(|error| panic!("bind: {error}"));
}

struct Unbind(Function);

impl Drop for Unbind {
    fn drop(&mut self) {
        if let Err(error) = self.0.unbind() {
            println!("# unbind: {error}");
        }
    }
}

/// All of the module's own: its work queue, numbers of devices, nodes, files in debugfs and configfs. No device is there to be bound.
fn loading_the_module_survives_every_fault() {
    for function in Function::soft_endpoints() {
        function.remove().unwrap_or_else(|error| panic!("{function:?}: {error}"));
    }
    machine::unload();
    let step = if std::env::var_os("SHORT").is_some() { 25 } else { 1 };
    sweep_each(step, "loading", machine::module_file, |file| match machine::try_insert(file, c"doorbell_map=1") {
        Ok(()) => Ok(Unload),
        // Reading the file, the kernel counts short reads as a module that it does not understand; so it does a string that it could not copy.
        Err(Errno::ENOEXEC | Errno::EINVAL) => Err(Errno::ENOMEM),
        Err(error) => Err(error),
    });
    machine::repair();
}

struct Unload;

impl Drop for Unload {
    fn drop(&mut self) {
        machine::unload();
    }
}

fn a_profile_survives_every_fault() {
    const PROFILE: &str = "/sys/kernel/config/pcieipc/fault";
    let fields = [("vendor", "0x1d0f"), ("device", "0x9999"), ("doorbell_offset", "0x3000"), ("user_dma", "0"), ("enable", "1")];
    sweep("making a profile", || (), |()| errno(fs::create_dir(PROFILE)).map(|()| Profile(PROFILE)));
    let made = || {
        fs::create_dir(PROFILE).unwrap_or_else(|error| panic!("{PROFILE}: {error}"));
        Profile(PROFILE)
    };
    sweep("filling a profile in", made, |_| {
        fields.iter().try_for_each(|(field, value)| errno(fs::write(format!("{PROFILE}/{field}"), value)))
    });
}

struct Profile(&'static str);

impl Drop for Profile {
    fn drop(&mut self) {
        // A file system keeps what it could not write until it is asked again.
        let outcome = fs::write(format!("{}/enable", self.0), "0").and_then(|()| fs::remove_dir(self.0));
        if let Err(error) = outcome {
            println!("# {}: {error}", self.0);
        }
    }
}

fn main() -> ExitCode {
    if !injection::prepare() {
        println!("KTAP version 1\n1..1\nok 1 every_fault_in_every_call_is_survived # SKIP this kernel injects no faults");
        return ExitCode::SUCCESS;
    }
    if std::env::var_os("REST").is_some() {
        return ktap::main(promises![a_profile_survives_every_fault, loading_the_module_survives_every_fault,], machine::repair);
    }
    ktap::main(
        promises![
            open_survives_every_fault,
            queries_survive_every_fault,
            attach_and_recover_survive_every_fault,
            making_a_channel_survives_every_fault,
            calls_on_a_channel_survive_every_fault,
            doorbells_and_eventfds_survive_every_fault,
            an_administrators_call_survives_every_fault,
            events_stay_when_their_reader_cannot_be_served,
            poll_and_epoll_survive_every_fault,
            mmap_survives_every_fault,
            page_faults_and_split_mappings_survive_every_fault,
            fdinfo_and_debugfs_survive_every_fault,
            binding_a_device_survives_every_fault,
        ],
        machine::repair,
    )
}
