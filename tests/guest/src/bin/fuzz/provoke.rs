// SPDX-License-Identifier: MIT OR Apache-2.0
//! Answers that chance does not give, or not soon: the situation for each is made on purpose.

use std::{
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use guest::{
    abi::*,
    call::{Record, number, raw, request},
    forms::{Fence, forms},
    injection::Injection,
    mapping::{Mapping, PAGE, READ_WRITE},
    session::{Node, Session, played, softdev},
    tally::{Call, Tally},
    wait,
};
use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    sys::{
        mman::ProtFlags,
        resource::{Resource, setrlimit},
        stat::Mode,
        wait::waitpid,
    },
    unistd::{ForkResult, fork, setuid},
};
use serde_json::json;

/// What hangs is told, not waited for.
pub const LIMIT: Duration = Duration::from_secs(120);

/// A counted ioctl.
pub fn ask<T: Record>(tally: &Tally, fd: impl AsFd, call: Call, record: &mut T) -> Result<(), Errno> {
    let number = call.number().unwrap_or_else(|| panic!("{} is no ioctl", call.name()));
    tally.add(call, guest::call::call(fd, number, record))
}

/// A counted mapping.
pub fn map(tally: &Tally, fd: impl AsFd, offset: u64, len: usize, protection: ProtFlags) -> Result<Mapping, Errno> {
    tally.add(Call::MMAP, Mapping::new(fd, offset, len, protection))
}

/// A counted read of one byte more or less than a record.
pub fn read(tally: &Tally, node: &Node, buffer: *mut libc::c_void, len: usize) -> Result<(), Errno> {
    // SAFETY: the caller passes memory of its own, or an address where nothing is.
    let done = unsafe { libc::read(node.as_fd().as_raw_fd(), buffer, len) };
    tally.add(Call::READ, Errno::result(done).map(drop))
}

/// A counted open.
pub fn open_node(tally: &Tally, path: &str) -> Result<Node, Errno> {
    let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    tally.add(Call::OPEN, open(path, flags, Mode::empty())).map(Node::from)
}

/// Runs in a child, which must not fail.
fn child(what: &str, run: impl FnOnce()) {
    // SAFETY: no other thread runs here, and the child leaves without unwinding into the parent's state.
    match unsafe { fork() }.unwrap_or_else(|error| panic!("fork: {error}")) {
        ForkResult::Child => {
            let code = i32::from(std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err());
            // SAFETY: leaves at once.
            unsafe { libc::_exit(code) }
        }
        ForkResult::Parent { child } => {
            let status = waitpid(child, None);
            assert!(matches!(status, Ok(nix::sys::wait::WaitStatus::Exited(_, 0))), "{what}: {status:?}");
        }
    }
}

/// Bad structures of every call, and every call of a session from another process.
pub fn bad_structures(tally: &Tally) {
    let session = Session::nth(0);
    let channel = session.create(PAGE as u64, 0).unwrap_or_else(|error| panic!("{error}"));
    let export = channel.export().unwrap_or_else(|error| panic!("{error}"));
    let fence = Fence::new();
    let forms = forms(session.endpoint, channel.id());
    for form in &forms {
        let fd = if form.export { export.as_fd() } else { session.node.as_fd() };
        let call = Call::numbered(form.number);
        let answer = |bytes: &[u8]| {
            // SAFETY: the size in the bytes is theirs.
            tally.add(call, unsafe { raw(fd, request(form.number), fence.end(bytes)) })
        };
        let mut flags = form.bytes.clone();
        flags[7] |= 0x80;
        assert_eq!(answer(&flags), Err(Errno::EINVAL), "{}", form.name);
        let mut longer = form.bytes.clone();
        longer[..4].copy_from_slice(&(form.bytes.len() as u32 + 1).to_ne_bytes());
        longer.push(1);
        assert_eq!(answer(&longer), Err(Errno::E2BIG), "{}", form.name);
        // SAFETY: nothing is there.
        let nowhere = unsafe { raw(fd, request(form.number), std::ptr::null_mut()) };
        assert_eq!(tally.add(call, nowhere), Err(Errno::EFAULT), "{}", form.name);
    }
    for fd in [session.node.as_fd(), export.as_fd()] {
        for unknown in [0x7f, 0x44] {
            // SAFETY: nothing is there.
            let answer = unsafe { raw(fd, request(unknown), std::ptr::null_mut()) };
            assert_eq!(tally.add(Call::UNKNOWN, answer), Err(Errno::ENOTTY));
        }
    }
    child("calls on a session of another process", || {
        for form in forms.iter().filter(|form| !form.export) {
            // SAFETY: the size in the bytes is theirs.
            let answer = unsafe { raw(&session.node, request(form.number), fence.end(&form.bytes)) };
            assert_eq!(tally.add(Call::numbered(form.number), answer), Err(Errno::EPERM), "{}", form.name);
        }
        let mut record = [0u8; 64];
        assert_eq!(read(tally, &session.node, record.as_mut_ptr().cast(), 64), Err(Errno::EPERM));
        let mapped = map(tally, &session.node, session.attached.status_offset, PAGE, ProtFlags::PROT_READ);
        assert_eq!(mapped.map(drop), Err(Errno::EPERM));
        setuid(65534.into()).unwrap_or_else(|error| panic!("{error}"));
    });
    ask(tally, &session.node, Call::QUERY, &mut pcieipc_query { user_version: 9, user_oldest: 9, ..Record::new() }).unwrap_err();
}

/// Without an endpoint, with ids that are not there, with what is taken, with descriptors of the wrong kind.
pub fn wrong_ids(tally: &Tally) {
    let session = Session::nth(0);
    let node = &session.node;
    let channel = session.create(PAGE as u64, 0).unwrap_or_else(|error| panic!("{error}"));
    let export = channel.export().unwrap_or_else(|error| panic!("{error}"));
    let free = Node::open(OFlag::O_NONBLOCK);
    use Errno::{EACCES, EBADF, EBUSY, EINVAL, ENOENT, ENOSPC, ENOTCONN, EOPNOTSUPP, ESTALE};
    let none = u32::MAX;
    assert_eq!(ask(tally, &free, Call::RECOVER, &mut pcieipc_recover::new()), Err(ENOTCONN));
    assert_eq!(ask(tally, &free, Call::STATE, &mut pcieipc_session_state::new()), Err(ENOTCONN));
    let create = pcieipc_channel_create { data_bytes: PAGE as u64, ..Record::new() };
    assert_eq!(ask(tally, &free, Call::CHANNEL_CREATE, &mut { create }), Err(ENOTCONN));
    let missing = pcieipc_channel { channel: none, ..Record::new() };
    assert_eq!(ask(tally, &free, Call::CHANNEL_DESTROY, &mut { missing }), Err(ENOTCONN));
    assert_eq!(ask(tally, node, Call::CHANNEL_DESTROY, &mut { missing }), Err(ENOENT));
    assert_eq!(ask(tally, &free, Call::CHANNEL_FREED, &mut { missing }), Err(ENOTCONN));
    assert_eq!(ask(tally, node, Call::CHANNEL_FREED, &mut { missing }), Err(ENOENT));
    let to_export = pcieipc_channel_fd { channel: none, ..Record::new() };
    assert_eq!(ask(tally, &free, Call::CHANNEL_EXPORT, &mut { to_export }), Err(ENOTCONN));
    assert_eq!(ask(tally, node, Call::CHANNEL_EXPORT, &mut { to_export }), Err(ENOENT));
    let again = pcieipc_channel_fd { channel: channel.id(), ..Record::new() };
    assert_eq!(ask(tally, node, Call::CHANNEL_EXPORT, &mut { again }), Err(EBUSY));
    assert_eq!(ask(tally, &free, Call::CHANNEL_DMABUF, &mut { to_export }), Err(ENOTCONN));
    assert_eq!(ask(tally, node, Call::CHANNEL_DMABUF, &mut { to_export }), Err(ENOENT));
    assert_eq!(ask(tally, node, Call::CHANNEL_DMABUF, &mut { again }), Err(EOPNOTSUPP));
    let in_device = pcieipc_channel_create { flags: PCIEIPC_CHANNEL_DEVICE_MEMORY, ..create };
    let mut shared = pcieipc_channel_fd { channel: node.get(number::CHANNEL_CREATE, in_device).channel, ..Record::new() };
    ask(tally, node, Call::CHANNEL_DMABUF, &mut shared).unwrap_or_else(|error| panic!("dma-buf: {error}"));
    assert_eq!(ask(tally, node, Call::CHANNEL_DMABUF, &mut { shared }), Err(EBUSY));
    // SAFETY: the kernel has just made this descriptor for us.
    drop(unsafe { OwnedFd::from_raw_fd(shared.fd) });
    let import = pcieipc_channel_fd { fd: -1, ..Record::new() };
    assert_eq!(ask(tally, &free, Call::CHANNEL_IMPORT, &mut { import }), Err(ENOTCONN));
    assert_eq!(ask(tally, node, Call::CHANNEL_IMPORT, &mut { import }), Err(EBADF));
    let wrong = pcieipc_channel_fd { fd: node.as_fd().as_raw_fd(), ..Record::new() };
    assert_eq!(ask(tally, node, Call::CHANNEL_IMPORT, &mut { wrong }), Err(EINVAL));
    let copy = pcieipc_copy { from: channel.id(), to: none, bytes: 8, timeout_ms: 100, ..Record::new() };
    assert_eq!(ask(tally, &free, Call::COPY, &mut { copy }), Err(ENOTCONN));
    assert_eq!(ask(tally, node, Call::COPY, &mut { copy }), Err(ENOENT));
    let eventfd = pcieipc_vector_eventfd { fd: 9999, ..Record::new() };
    assert_eq!(ask(tally, &free, Call::VECTOR_EVENTFD, &mut { eventfd }), Err(ENOTCONN));
    assert_eq!(ask(tally, node, Call::VECTOR_EVENTFD, &mut { eventfd }), Err(EBADF));
    let eventfd = pcieipc_export_eventfd { fd: 9999, ..Record::new() };
    assert_eq!(ask(tally, &export, Call::EXPORT_EVENTFD, &mut { eventfd }), Err(EBADF));
    assert_eq!(ask(tally, &free, Call::RING, &mut pcieipc_ring::new()), Err(ENOTCONN));
    assert_eq!(ask(tally, &free, Call::DOORBELL_MAP, &mut pcieipc_doorbell::new()), Err(ENOTCONN));
    let info = pcieipc_endpoint_info { endpoint: none, ..Record::new() };
    assert_eq!(ask(tally, node, Call::ENDPOINT_INFO, &mut { info }), Err(ENOENT));
    let far = pcieipc_distance { from: session.endpoint, to: none, ..Record::new() };
    assert_eq!(ask(tally, node, Call::DISTANCE, &mut { far }), Err(ENOENT));
    for (endpoint, generation, error) in [(none, 0, ENOENT), (session.endpoint, u64::MAX, ESTALE), (session.endpoint, 0, EBUSY)] {
        let attach = pcieipc_attach { endpoint, generation, ..Record::new() };
        assert_eq!(ask(tally, &free, Call::ATTACH, &mut { attach }), Err(error));
    }
    let admin = pcieipc_admin { action: PCIEIPC_ADMIN_RESET, endpoint: none, ..Record::new() };
    assert_eq!(ask(tally, node, Call::ADMIN, &mut { admin }), Err(ENOENT));

    let mapped = |node: &Node, offset, protection| map(tally, node, offset, PAGE, protection).map(drop);
    assert_eq!(mapped(&free, session.attached.status_offset, ProtFlags::PROT_READ), Err(ENOTCONN));
    assert_eq!(mapped(node, u64::from(none >> 12) << 40, ProtFlags::PROT_READ), Err(ENOENT));
    assert_eq!(mapped(node, 0xf << 36, ProtFlags::PROT_READ), Err(EINVAL));
    assert_eq!(mapped(node, channel.made.data_offset, READ_WRITE), Err(EACCES));
    let huge = map(tally, node, channel.made.data_offset, 1 << 47, ProtFlags::PROT_READ);
    assert_eq!(huge.map(drop), Err(Errno::ENOMEM));

    // One channel is imported so often, and the module's limit on channels, which counts imports too, is low here.
    let import = pcieipc_channel_fd { fd: export.as_fd().as_raw_fd(), ..Record::new() };
    let full = (0..100).find_map(|_| ask(tally, node, Call::CHANNEL_IMPORT, &mut { import }).err());
    assert_eq!(full, Some(ENOSPC));
    let full = (0..5000).find_map(|_| ask(tally, node, Call::CHANNEL_CREATE, &mut { create }).err());
    assert_eq!(full, Some(ENOSPC));
}

/// Empty and short reads, bad buffers, a signal in the middle.
pub fn reads(tally: &Tally) {
    let node = Node::open(OFlag::O_NONBLOCK);
    let mut record = [0u8; 64];
    assert_eq!(read(tally, &node, record.as_mut_ptr().cast(), 64), Err(Errno::EAGAIN));
    assert_eq!(read(tally, &node, record.as_mut_ptr().cast(), 63), Err(Errno::EINVAL));
    let session = Session::nth(0);
    session.function().reset().unwrap_or_else(|error| panic!("{error}"));
    assert!(wait::polled(&node, nix::poll::PollFlags::POLLIN, LIMIT).contains(nix::poll::PollFlags::POLLIN));
    assert_eq!(read(tally, &node, std::ptr::null_mut(), 64), Err(Errno::EFAULT));
    assert_eq!(read(tally, &node, record.as_mut_ptr().cast(), 64), Ok(()));
    drop(session);

    extern "C" fn nothing(_signal: i32) {}
    // SAFETY: the handler does nothing; without SA_RESTART it interrupts calls.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(i32) as usize;
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
    }
    let blocked = Node::open(OFlag::empty());
    // SAFETY: asks for the calling thread's own name.
    let reader = unsafe { libc::pthread_self() } as usize;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // Until it is told: a signal may come before the read begins.
            while !over.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(10));
                // SAFETY: the thread waits for this scope, so it exists.
                unsafe { libc::pthread_kill(reader as libc::pthread_t, libc::SIGUSR1) };
            }
        });
        let interrupted = read(tally, &blocked, record.as_mut_ptr().cast(), 64);
        over.store(true, Ordering::Relaxed);
        assert_eq!(interrupted, Err(Errno::EINTR));
    });
}

/// Calls that need a usable endpoint, once each, such that nothing is left of those that succeed.
fn each_usable(tally: &Tally, session: &Session, channel: u32, export: &guest::session::Export, bell: u64) {
    let node = &session.node;
    let mut create = pcieipc_channel_create { data_bytes: PAGE as u64, ..Record::new() };
    if ask(tally, node, Call::CHANNEL_CREATE, &mut create).is_ok() {
        let made = pcieipc_channel { channel: create.channel, ..Record::new() };
        ask(tally, node, Call::CHANNEL_DESTROY, &mut { made }).unwrap_or_else(|error| panic!("destroy: {error}"));
    }
    let mut import = pcieipc_channel_fd { fd: export.as_fd().as_raw_fd(), ..Record::new() };
    if ask(tally, node, Call::CHANNEL_IMPORT, &mut import).is_ok() {
        let made = pcieipc_channel { channel: import.channel, ..Record::new() };
        ask(tally, node, Call::CHANNEL_DESTROY, &mut { made }).unwrap_or_else(|error| panic!("destroy: {error}"));
    }
    // The answers that matter here are those of the endpoint's state; which it is at a moment is not decided here.
    let copy = pcieipc_copy { from: channel, to: channel, to_offset: 64, bytes: 8, timeout_ms: 100, ..Record::new() };
    let _ = ask(tally, node, Call::COPY, &mut { copy });
    let _ = ask(tally, node, Call::CHANNEL_EXPORT, &mut pcieipc_channel_fd { channel, ..Record::new() });
    let _ = ask(tally, node, Call::CHANNEL_DMABUF, &mut pcieipc_channel_fd { channel, ..Record::new() });
    let _ = ask(tally, node, Call::CHANNEL_FREED, &mut pcieipc_channel { channel, ..Record::new() });
    let _ = ask(tally, node, Call::RING, &mut pcieipc_ring::new());
    let _ = ask(tally, node, Call::DOORBELL_MAP, &mut pcieipc_doorbell::new());
    let _ = ask(tally, export, Call::EXPORT_RING, &mut pcieipc_ring::new());
    let _ = ask(tally, export, Call::EXPORT_DOORBELL, &mut pcieipc_doorbell::new());
    let _ = map(tally, node, bell, PAGE, READ_WRITE);
}

/// What [`each_usable`] calls and the endpoint's state may refuse.
const USABLE: &[Call] = &[
    Call::CHANNEL_CREATE,
    Call::CHANNEL_EXPORT,
    Call::CHANNEL_IMPORT,
    Call::CHANNEL_FREED,
    Call::CHANNEL_DMABUF,
    Call::COPY,
    Call::RING,
    Call::DOORBELL_MAP,
    Call::EXPORT_RING,
    Call::EXPORT_DOORBELL,
    Call::MMAP,
];

/// An endpoint that is being reset, lives in a new generation, and is gone.
pub fn states(tally: &Tally) {
    let session = Session::nth(0);
    let function = session.function();
    let channel = session.create(PAGE as u64, 0).unwrap_or_else(|error| panic!("{error}"));
    let export = channel.export().unwrap_or_else(|error| panic!("{error}"));
    let bell = session.node.get(number::DOORBELL_MAP, pcieipc_doorbell::new()).map_offset;
    let other = Node::open(OFlag::empty());
    let all = |error: Errno, calls: &[Call]| calls.iter().all(|&call| tally.times(call, error) > 0);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                function.reset().unwrap_or_else(|error| panic!("{error}"));
                thread::sleep(Duration::from_millis(20));
            }
        });
        let end = Instant::now() + wait::patiently(LIMIT);
        let told = || {
            let recovering = all(Errno::EIO, USABLE) && all(Errno::EIO, &[Call::RECOVER, Call::ATTACH]);
            recovering && all(Errno::ESTALE, USABLE)
        };
        while !told() && Instant::now() < end {
            each_usable(tally, &session, channel.id(), &export, bell);
            let _ = ask(tally, &session.node, Call::RECOVER, &mut pcieipc_recover::new());
            let _ = ask(tally, &other, Call::ATTACH, &mut pcieipc_attach { endpoint: session.endpoint, ..Record::new() });
        }
        over.store(true, Ordering::Relaxed);
    });

    let id = session.endpoint;
    let path = format!("/dev/pcieipc{id}");
    let device = nix::sys::stat::stat(path.as_str()).unwrap_or_else(|error| panic!("{path}: {error}")).st_rdev;
    function.unbind().unwrap_or_else(|error| panic!("{error}"));
    each_usable(tally, &session, channel.id(), &export, bell);
    assert_eq!(ask(tally, &session.node, Call::RECOVER, &mut pcieipc_recover::new()), Err(Errno::ENODEV));
    let eventfd = pcieipc_vector_eventfd { fd: -1, ..Record::new() };
    assert_eq!(ask(tally, &session.node, Call::VECTOR_EVENTFD, &mut { eventfd }), Err(Errno::ENODEV));
    nix::sys::stat::mknod("/tmp/gone", nix::sys::stat::SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, device)
        .unwrap_or_else(|error| panic!("mknod: {error}"));
    assert_eq!(open_node(tally, "/tmp/gone").map(drop), Err(Errno::ENODEV));
    function.bind().unwrap_or_else(|error| panic!("{error}"));
}

/// An engine that is slow, fails, and is taken off the bus; a device that died.
pub fn bad_devices(tally: &Tally) {
    let session = Session::nth(0);
    let node = &session.node;
    let serial = session.info().serial;
    let endpoint = played(serial)["endpoint"].clone();
    let slow = |bytes: u64| drop(softdev(&json!({"cmd": "slow", "endpoint": endpoint, "bytes_per_s": bytes})));
    let [from, to] = [0; 2].map(|_| session.create(1 << 16, 0).unwrap_or_else(|error| panic!("{error}")).id());
    let copy = pcieipc_copy { from, to, bytes: 1 << 16, timeout_ms: 10_000, ..Record::new() };

    slow(100_000);
    let short = pcieipc_copy { timeout_ms: 20, ..copy };
    assert_eq!(ask(tally, node, Call::COPY, &mut { short }), Err(Errno::ETIMEDOUT));
    thread::scope(|scope| {
        let first = scope.spawn(|| ask(tally, node, Call::COPY, &mut { copy }));
        // Whichever of the two is first, the other meets it.
        let busy = wait::until(LIMIT, || {
            ask(tally, node, Call::COPY, &mut pcieipc_copy { bytes: 64, ..copy }) == Err(Errno::EBUSY) || first.is_finished()
        });
        slow(0);
        let first = first.join();
        assert!(busy && matches!(first, Ok(Ok(()) | Err(Errno::EBUSY))), "{first:?}");
    });
    assert!(tally.times(Call::COPY, Errno::EBUSY) > 0);

    let function = session.function();
    let command = function.command().unwrap_or_else(|error| panic!("{error}"));
    function.set_command(command & !4).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(ask(tally, node, Call::COPY, &mut { copy }), Err(Errno::EREMOTEIO));
    function.set_command(command).unwrap_or_else(|error| panic!("{error}"));
    ask(tally, node, Call::COPY, &mut { copy }).unwrap_or_else(|error| panic!("a copy after all that: {error}"));

    let id = session.endpoint;
    drop(session);
    softdev(&json!({"cmd": "die", "endpoint": endpoint}));
    let free = Node::open(OFlag::empty());
    let noticed = wait::until(LIMIT, || free.info(id).is_ok_and(|info| info.state == PCIEIPC_STATE_GONE));
    assert!(noticed, "a dead device is noticed");
    let attach = pcieipc_attach { endpoint: id, ..Record::new() };
    assert_eq!(ask(tally, &free, Call::ATTACH, &mut { attach }), Err(Errno::ENODEV));
    guest::machine::repair();
}

/// Limits of the process and the user, privilege, the rate of doorbells, an administrator in a hurry.
pub fn limits(tally: &Tally) {
    let endpoint = Node::open(OFlag::empty()).endpoints()[0];
    child("a process with little memory and few descriptors", || {
        let session = Session::on(Node::open(OFlag::empty()), endpoint);
        let channel = session.create(PAGE as u64, 0).unwrap_or_else(|error| panic!("{error}"));
        let in_device = pcieipc_channel_create { data_bytes: PAGE as u64, flags: PCIEIPC_CHANNEL_DEVICE_MEMORY, ..Record::new() };
        let in_device = session.node.get(number::CHANNEL_CREATE, in_device).channel;
        setrlimit(Resource::RLIMIT_NOFILE, 3, 3).unwrap_or_else(|error| panic!("{error}"));
        let export = pcieipc_channel_fd { channel: channel.id(), ..Record::new() };
        assert_eq!(ask(tally, &session.node, Call::CHANNEL_EXPORT, &mut { export }), Err(Errno::EMFILE));
        let share = pcieipc_channel_fd { channel: in_device, ..Record::new() };
        assert_eq!(ask(tally, &session.node, Call::CHANNEL_DMABUF, &mut { share }), Err(Errno::EMFILE));
        setrlimit(Resource::RLIMIT_MEMLOCK, 64 << 10, 64 << 10).unwrap_or_else(|error| panic!("{error}"));
        setuid(65534.into()).unwrap_or_else(|error| panic!("{error}"));
        let create = pcieipc_channel_create { data_bytes: 1 << 20, ..Record::new() };
        assert_eq!(ask(tally, &session.node, Call::CHANNEL_CREATE, &mut { create }), Err(Errno::ENOMEM));
        let admin = pcieipc_admin { action: PCIEIPC_ADMIN_RESET, endpoint, ..Record::new() };
        assert_eq!(ask(tally, &session.node, Call::ADMIN, &mut { admin }), Err(Errno::EPERM));
    });
    child("a user with too many sessions", || {
        let most = Node::open(OFlag::empty()).query().max_sessions;
        let descriptors = u64::from(most) + 64;
        setrlimit(Resource::RLIMIT_NOFILE, descriptors, descriptors).unwrap_or_else(|error| panic!("{error}"));
        // The group stays root's, which may open the node; nobody else here is this user.
        setuid(65534.into()).unwrap_or_else(|error| panic!("{error}"));
        let mut open = Vec::new();
        let refused = loop {
            match open_node(tally, "/dev/pcieipc") {
                Ok(node) => open.push(node),
                Err(error) => break error,
            }
        };
        assert_eq!((open.len(), refused), (most as usize, Errno::ENOSPC));
    });

    let session = Session::nth(0);
    let channel = session.create(PAGE as u64, 0).unwrap_or_else(|error| panic!("{error}"));
    let export = channel.export().unwrap_or_else(|error| panic!("{error}"));
    let end = Instant::now() + wait::patiently(LIMIT);
    let ring = || ask(tally, &session.node, Call::RING, &mut pcieipc_ring::new());
    while ring() != Err(Errno::EAGAIN) && Instant::now() < end {}
    let by_copy = pcieipc_copy {
        flags: PCIEIPC_COPY_RING,
        from: channel.id(),
        to: channel.id(),
        to_offset: 64,
        bytes: 8,
        timeout_ms: 1000,
        ..Record::new()
    };
    // A copy takes its time, in which the limit lets some more go, so the writers' rings are used up before each.
    loop {
        while ask(tally, &export, Call::EXPORT_RING, &mut pcieipc_ring::new()) != Err(Errno::EAGAIN) && Instant::now() < end {}
        if ask(tally, &session.node, Call::COPY, &mut { by_copy }) == Err(Errno::EAGAIN) || Instant::now() > end {
            break;
        }
    }

    // A reset takes a tenth of a second at least. Each that began is told of at its end; until then the next is refused.
    let watcher = Node::open(OFlag::O_NONBLOCK);
    let ended = || watcher.events().iter().filter(|event| event.kind == PCIEIPC_EVENT_ADMIN).count();
    let reset = pcieipc_admin { action: PCIEIPC_ADMIN_RESET, endpoint: session.endpoint, ..Record::new() };
    let mut under_way = 0;
    let busy = wait::until(LIMIT, || match ask(tally, &session.node, Call::ADMIN, &mut { reset }) {
        Ok(()) => {
            under_way += 1;
            under_way -= ended();
            false
        }
        Err(error) => error == Errno::EBUSY,
    });
    assert!(busy, "an administrator's second action at once");
    let quiet = wait::until(LIMIT, || {
        under_way -= ended();
        under_way == 0 && session.session_state().is_ok_and(|state| state.state == PCIEIPC_STATE_LIVE)
    });
    assert!(quiet, "the reset ends");
}

/// Allocations that fail, where the kernel can make them.
pub fn no_memory(tally: &Tally) {
    let session = Session::nth(0);
    let node = &session.node;
    let channel = session.create(PAGE as u64, 0).unwrap_or_else(|error| panic!("{error}"));
    let export = channel.export().unwrap_or_else(|error| panic!("{error}"));
    let unexported = session.create(PAGE as u64, 0).unwrap_or_else(|error| panic!("{error}")).id();
    let injection = Injection::of_this_thread();
    let until_enomem = |call: Call, run: &dyn Fn()| {
        (1..200).take_while(|&nth| injection.run(nth, run).1).take_while(|_| tally.times(call, Errno::ENOMEM) == 0).count();
        assert!(tally.times(call, Errno::ENOMEM) > 0, "{} without memory", call.name());
    };
    let mut ids = [0u32; 8];
    let list = pcieipc_enumerate { ids: ids.as_mut_ptr() as u64, count: 8, ..Record::new() };
    until_enomem(Call::ENUMERATE, &|| {
        let _ = ask(tally, node, Call::ENUMERATE, &mut { list });
    });
    let out = pcieipc_channel_fd { channel: unexported, ..Record::new() };
    until_enomem(Call::CHANNEL_EXPORT, &|| {
        let _ = ask(tally, node, Call::CHANNEL_EXPORT, &mut { out });
    });
    let in_device = pcieipc_channel_create { data_bytes: PAGE as u64, flags: PCIEIPC_CHANNEL_DEVICE_MEMORY, ..Record::new() };
    let share = pcieipc_channel_fd { channel: node.get(number::CHANNEL_CREATE, in_device).channel, ..Record::new() };
    until_enomem(Call::CHANNEL_DMABUF, &|| {
        let _ = ask(tally, node, Call::CHANNEL_DMABUF, &mut { share });
    });
    let import = pcieipc_channel_fd { fd: export.as_fd().as_raw_fd(), ..Record::new() };
    until_enomem(Call::CHANNEL_IMPORT, &|| {
        let _ = ask(tally, node, Call::CHANNEL_IMPORT, &mut { import });
    });
    let admin = pcieipc_admin { action: PCIEIPC_ADMIN_RESET, endpoint: session.endpoint, ..Record::new() };
    until_enomem(Call::ADMIN, &|| {
        let _ = ask(tally, node, Call::ADMIN, &mut { admin });
    });
    until_enomem(Call::OPEN, &|| drop(open_node(tally, "/dev/pcieipc")));
}
