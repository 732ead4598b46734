// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the ABI refuses, and with which errno.

use std::{
    fs::OpenOptions,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    process::ExitCode,
};

use guest::{
    abi::*,
    call::{Record, call, number, raw, request},
    forms::{Fence, Form, forms},
    ktap, machine,
    mapping::{Mapping, PAGE, READ_WRITE},
    promises,
    session::{Export, Node, Session, export},
};
use nix::{
    errno::Errno,
    fcntl::OFlag,
    sys::{
        mman::{MRemapFlags, MapFlags, MmapAdvise, ProtFlags, madvise, mremap},
        resource::{Resource, setrlimit},
        signal::Signal,
        wait::{WaitStatus, waitpid},
    },
    unistd::{ForkResult, fork, setuid},
};

/// Calls with a copy of the bytes that lies before an unmapped page, so that one byte read too many is EFAULT.
fn answer(session: &Session, export: &Export, form: &Form, bytes: &[u8]) -> Result<(), Errno> {
    let fd = if form.export { export.as_fd() } else { session.node.as_fd() };
    let fence = Fence::new();
    let address = fence.end(bytes);
    // SAFETY: the size in the bytes is at most theirs, except in tests that want EFAULT, where the fence keeps all else safe.
    unsafe { raw(fd, request(form.number), address) }
}

fn each(test: impl Fn(&Session, &Export, &Form)) {
    let session = Session::nth(0);
    let channel = session.create(PAGE as u64, 0).unwrap();
    let export = channel.export().unwrap();
    for form in forms(session.endpoint, channel.id()) {
        test(&session, &export, &form);
    }
}

fn with_size(bytes: &[u8], size: u32) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[..4].copy_from_slice(&size.to_ne_bytes());
    bytes
}

fn unknown_flags_are_einval() {
    each(|session, export, form| {
        let known = match form.number {
            number::VECTOR_EVENTFD => PCIEIPC_VECTOR_MASK,
            number::CHANNEL_CREATE => PCIEIPC_CHANNEL_DEVICE_MEMORY,
            number::COPY => PCIEIPC_COPY_RING,
            _ => 0,
        };
        for bit in (0..32).filter(|bit| 1 << bit & known == 0) {
            let mut bytes = form.bytes.clone();
            bytes[4..8].copy_from_slice(&(1u32 << bit).to_ne_bytes());
            assert_eq!(answer(session, export, form, &bytes), Err(Errno::EINVAL), "{} with flag bit {bit}", form.name);
        }
    });
}

fn padding_that_is_not_zero_is_einval() {
    each(|session, export, form| {
        for &offset in &form.reserved {
            for byte in [0, 3] {
                let mut bytes = form.bytes.clone();
                bytes[offset + byte] = 1;
                assert_eq!(answer(session, export, form, &bytes), Err(Errno::EINVAL), "{} byte {}", form.name, offset + byte);
            }
        }
    });
}

fn an_unknown_tail_is_e2big_unless_it_is_zero() {
    each(|session, export, form| {
        let plain = answer(session, export, form, &form.bytes);
        assert_ne!(plain, Err(Errno::EINVAL), "{}: the form itself is good", form.name);
        assert_ne!(plain, Err(Errno::E2BIG), "{}: the form itself is good", form.name);
        for tail in [1, 8, 100] {
            let mut bytes = with_size(&form.bytes, (form.bytes.len() + tail) as u32);
            bytes.resize(form.bytes.len() + tail, 0);
            assert_eq!(answer(session, export, form, &bytes), plain, "{} with {tail} zero bytes more", form.name);
            *bytes.last_mut().unwrap() = 1;
            assert_eq!(answer(session, export, form, &bytes), Err(Errno::E2BIG), "{} with a tail of {tail} bytes", form.name);
        }
    });
}

fn sizes_that_no_structure_has_are_refused() {
    each(|session, export, form| {
        let between = if form.number == number::QUERY { [87, 89, 92] } else { [5; 3] };
        for size in [0, 1, 3, 4, 7, form.bytes.len() as u32 - 1].into_iter().chain(between) {
            let bytes = with_size(&form.bytes, size);
            assert_eq!(answer(session, export, form, &bytes), Err(Errno::EINVAL), "{} of {size} bytes", form.name);
        }
        let bytes = with_size(&form.bytes, u32::MAX);
        let huge = answer(session, export, form, &bytes);
        assert!(matches!(huge, Err(Errno::E2BIG | Errno::EFAULT | Errno::EINVAL)), "{} of 4 GiB: {huge:?}", form.name);
    });
}

fn bad_pointers_are_efault_and_nothing_is_read_past_the_structure() {
    each(|session, export, form| {
        let fd = if form.export { export.as_fd() } else { session.node.as_fd() };
        for address in
            [std::ptr::null_mut(), std::ptr::without_provenance_mut(usize::MAX - 7), std::ptr::without_provenance_mut(1 << 63)]
        {
            // SAFETY: nothing is there.
            let outcome = unsafe { raw(fd, request(form.number), address) };
            assert_eq!(outcome, Err(Errno::EFAULT), "{} at {address:?}", form.name);
        }
        let longer = with_size(&form.bytes, form.bytes.len() as u32 + 8);
        assert_eq!(answer(session, export, form, &longer), Err(Errno::EFAULT), "{} over the end of memory", form.name);
        assert_ne!(answer(session, export, form, &form.bytes), Err(Errno::EFAULT), "{} to the end of memory", form.name);
    });
}

fn answers_write_no_more_than_the_structure_that_both_know() {
    let session = Session::nth(0);
    let (full, known) = (session.node.query(), size_of::<pcieipc_query>());
    // The first version's, ours, and a longer one.
    for size in [88, known, known + 64] {
        let fence = Fence::new();
        let mut bytes = vec![0u8; known + 128];
        bytes[..4].copy_from_slice(&(size as u32).to_ne_bytes());
        bytes[8..12].copy_from_slice(&1u32.to_ne_bytes());
        bytes[12..16].copy_from_slice(&1u32.to_ne_bytes());
        bytes[size..].fill(0xaa);
        let address = fence.end(&bytes);
        // SAFETY: the size is at most that of the bytes.
        unsafe { raw(&session.node, request(number::QUERY), address) }.unwrap();
        let mut after = vec![0u8; bytes.len()];
        // SAFETY: the bytes lie in the fence's first page.
        unsafe { address.cast::<u8>().copy_to_nonoverlapping(after.as_mut_ptr(), after.len()) };
        assert_eq!(after[size.min(known)..], bytes[size.min(known)..], "written past the end");
        assert_eq!(after[16..20], full.version.to_ne_bytes(), "but answered");
    }
}

fn unknown_calls_are_enotty() {
    let session = Session::nth(0);
    let channel = session.create(PAGE as u64, 0).unwrap();
    let export = channel.export().unwrap();
    let forms = forms(session.endpoint, channel.id());
    let mut memory = [0u8; 256];
    memory[0] = 64;
    let unknown = |fd: &dyn AsFd, request: u32, memory: &mut [u8; 256]| {
        // SAFETY: the size in the memory is less than its own.
        let outcome = unsafe { raw(fd.as_fd(), request, memory.as_mut_ptr().cast()) };
        assert_eq!(outcome, Err(Errno::ENOTTY), "request {request:#x}");
    };
    for number in 0..=255 {
        let known = |export| forms.iter().any(|form| form.number == number && form.export == export);
        if !known(false) {
            unknown(&session.node, request(number), &mut memory);
        }
        if !known(true) {
            unknown(&export, request(number), &mut memory);
        }
    }
    // The same number with a direction, a size or another magic is another call.
    for other in [2 << 30 | request(number::QUERY), 1 << 16 | request(number::QUERY), 0xEA << 8, 0xffff_ffff] {
        unknown(&session.node, other, &mut memory);
    }
}

fn ids_that_do_not_exist_are_enoent() {
    let session = Session::nth(0);
    let channel = session.create(PAGE as u64, 0).unwrap();
    for bad in [0, u32::MAX, channel.id() + 1] {
        let node = &session.node;
        let channel = pcieipc_channel { channel: bad, ..Record::new() };
        assert_eq!(node.call(number::CHANNEL_DESTROY, &mut channel.clone()), Err(Errno::ENOENT));
        assert_eq!(node.call(number::CHANNEL_FREED, &mut channel.clone()), Err(Errno::ENOENT));
        assert_eq!(
            node.call(number::CHANNEL_EXPORT, &mut pcieipc_channel_fd { channel: bad, ..Record::new() }),
            Err(Errno::ENOENT)
        );
    }
    for bad in [0, u32::MAX] {
        assert_eq!(session.node.info(bad).map(drop), Err(Errno::ENOENT));
        assert_eq!(Node::open(OFlag::empty()).attach(bad, 0).map(drop), Err(Errno::ENOENT));
        let mut distance = pcieipc_distance { from: session.endpoint, to: bad, ..Record::new() };
        assert_eq!(session.node.call(number::DISTANCE, &mut distance), Err(Errno::ENOENT));
    }
    channel.destroy().unwrap();
    assert_eq!(channel.destroy(), Err(Errno::ENOENT), "an id is not used again");
    let again = session.create(PAGE as u64, 0).unwrap();
    assert!(again.id() > channel.id());
}

fn calls_that_need_an_endpoint_are_enotconn_without_one() {
    let node = Node::open(OFlag::empty());
    let enotconn = Err(Errno::ENOTCONN);
    let mut create = pcieipc_channel_create { data_bytes: PAGE as u64, ..Record::new() };
    assert_eq!(node.call(number::CHANNEL_CREATE, &mut create), enotconn);
    assert_eq!(node.call(number::RING, &mut pcieipc_ring::new()), enotconn);
    assert_eq!(node.call(number::RECOVER, &mut pcieipc_recover::new()), enotconn);
    assert_eq!(node.call(number::VECTOR_EVENTFD, &mut pcieipc_vector_eventfd { fd: -1, ..Record::new() }), enotconn);
    assert_eq!(node.call(number::DOORBELL_MAP, &mut pcieipc_doorbell::new()), enotconn);
}

fn an_endpoint_has_one_session_and_a_session_one_endpoint() {
    let session = Session::nth(0);
    let other = Node::open(OFlag::empty());
    assert_eq!(other.attach(session.endpoint, 0).map(drop), Err(Errno::EBUSY));
    let free = other.endpoints().into_iter().find(|&id| id != session.endpoint).unwrap();
    assert_eq!(session.node.attach(free, 0).map(drop), Err(Errno::EBUSY));
    assert_eq!(other.attach(free, u64::MAX).map(drop), Err(Errno::ESTALE), "a generation that is not this life's");
    let generation = other.info(free).unwrap().generation;
    assert_eq!(other.attach(free, generation).unwrap().generation, generation);
    let endpoint = session.endpoint;
    drop(session);
    Node::open(OFlag::empty()).attach(endpoint, 0).unwrap();
}

fn channels_of_impossible_sizes_and_vectors_are_refused() {
    let session = Session::nth(0);
    let limits = session.node.query();
    for bytes in [0, 1, 2048, 4095, 3 * 4096, (1 << 20) + 1] {
        assert_eq!(session.create(bytes, 0).map(drop), Err(Errno::EINVAL), "{bytes} bytes");
    }
    for bytes in [limits.max_channel_bytes.next_power_of_two() * 2, 1 << 40, 1 << 63] {
        let refused = session.create(bytes, 0).map(drop);
        assert!(matches!(refused, Err(Errno::ENOSPC | Errno::EINVAL)), "{bytes} bytes: {refused:?}");
    }
    for vector in [session.attached.vectors, 255, u32::MAX] {
        assert_eq!(session.create(PAGE as u64, vector).map(drop), Err(Errno::EINVAL), "vector {vector}");
        assert_eq!(session.ring(vector), Err(Errno::EINVAL), "vector {vector}");
        assert_eq!(session.set_eventfd(vector, -1, 0), Err(Errno::EINVAL), "vector {vector}");
    }
}

fn a_channel_has_one_writer_at_a_time() {
    let session = Session::nth(0);
    let channel = session.create(PAGE as u64, 0).unwrap();
    let export = channel.export().unwrap();
    assert_eq!(channel.export().map(drop), Err(Errno::EBUSY));
    drop(export);
    channel.export().unwrap();
}

fn a_channel_is_imported_seven_times_and_no_more() {
    const MOST: usize = 7;
    let [reader, writer] = [0, 1].map(Session::nth);
    let channel = reader.create(PAGE as u64, 0).unwrap();
    let export = channel.export().unwrap();
    let import = || {
        let mut import = pcieipc_channel_fd { fd: export.as_fd().as_raw_fd(), ..Record::new() };
        writer.node.call(number::CHANNEL_IMPORT, &mut import).map(|()| import.channel)
    };
    let end = |channel| {
        writer.node.get(number::CHANNEL_DESTROY, pcieipc_channel { channel, ..Record::new() });
    };
    let mut ids: Vec<u32> = (0..MOST).map(|_| import().unwrap()).collect();
    assert_eq!(import(), Err(Errno::ENOSPC));
    assert_eq!(writer.session_state().unwrap().channels as usize, MOST);
    end(ids.remove(3));
    ids.push(import().expect("one ended"));
    assert_eq!(import(), Err(Errno::ENOSPC));
    ids.into_iter().for_each(end);
    import().expect("all ended");
}

fn descriptors_of_the_wrong_kind_are_refused() {
    let session = Session::nth(0);
    let pipe = nix::unistd::pipe().unwrap();
    for fd in [pipe.0.as_raw_fd(), session.node.as_fd().as_raw_fd(), 9999] {
        let refused = session.set_eventfd(0, fd, 0);
        assert!(matches!(refused, Err(Errno::EINVAL | Errno::EBADF)), "eventfd {fd}: {refused:?}");
        let refused = session.node.call(number::CHANNEL_IMPORT, &mut pcieipc_channel_fd { fd, ..Record::new() });
        assert!(matches!(refused, Err(Errno::EINVAL | Errno::EBADF)), "import {fd}: {refused:?}");
    }
}

fn copies_outside_their_channels_are_refused() {
    let session = Session::nth(0);
    let [from, to] = [0; 2].map(|_| session.create(2 * PAGE as u64, 0).unwrap());
    let good = pcieipc_copy { from: from.id(), to: to.id(), bytes: 8, timeout_ms: 1000, ..Record::new() };
    let einval = |why: &str, copy: pcieipc_copy| {
        assert_eq!(session.node.call(number::COPY, &mut { copy }), Err(Errno::EINVAL), "{why}");
    };
    einval("no bytes", pcieipc_copy { bytes: 0, ..good });
    einval("too many bytes", pcieipc_copy { bytes: u32::MAX, ..good });
    einval("past the source", pcieipc_copy { from_offset: 2 * PAGE as u64 - 4, ..good });
    einval("past the target", pcieipc_copy { to_offset: 2 * PAGE as u64 - 4, ..good });
    einval("overflowing offset", pcieipc_copy { from_offset: u64::MAX - 3, ..good });
    einval("overflowing offset", pcieipc_copy { to_offset: u64::MAX - 3, ..good });
    einval("no time", pcieipc_copy { timeout_ms: 0, ..good });
    einval("too much time", pcieipc_copy { timeout_ms: 10_001, ..good });
    einval("overlap", pcieipc_copy { to: from.id(), to_offset: 4, ..good });
    session.node.get(number::COPY, good);
}

/// Something that can be mapped.
struct Kind<'a> {
    name: &'static str,
    fd: BorrowedFd<'a>,
    offset: u64,
    len: usize,
    writable: bool,
}

impl Kind<'_> {
    fn map(&self, protection: ProtFlags) -> Mapping {
        Mapping::new(self.fd, self.offset, self.len, protection).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// All that its side may do.
    fn allowed(&self) -> ProtFlags {
        if self.writable { READ_WRITE } else { ProtFlags::PROT_READ }
    }
}

/// Everything that a session and the descriptors of its channels, in host memory and in device memory, let be mapped.
fn each_kind(test: impl Fn(&Kind<'_>)) {
    let session = Session::nth(0);
    let make = |flags| {
        session.node.get(number::CHANNEL_CREATE, pcieipc_channel_create { flags, data_bytes: 2 * PAGE as u64, ..Record::new() })
    };
    let (host, device) = (make(0), make(PCIEIPC_CHANNEL_DEVICE_MEMORY));
    let [host_export, device_export] = [&host, &device].map(|made| export(&session.node, made.channel).unwrap());
    let [host_info, device_info] = [&host_export, &device_export].map(|export| export.info().unwrap());
    let bell = |fd: BorrowedFd<'_>, number| {
        let mut bell = pcieipc_doorbell::new();
        call(fd, number, &mut bell).map(|()| bell.map_offset).unwrap_or_else(|error| panic!("doorbell {number:#x}: {error}"))
    };
    let (reader, writer, device_writer) = (session.node.as_fd(), host_export.as_fd(), device_export.as_fd());
    let kind = |name, fd, offset, len, writable| Kind { name, fd, offset, len, writable };
    let kinds = [
        kind("the reader's data", reader, host.data_offset, 2 * PAGE, false),
        kind("the reader's tail", reader, host.tail_offset, PAGE, false),
        kind("the reader's head", reader, host.head_offset, PAGE, true),
        kind("the reader's status", reader, session.attached.status_offset, PAGE, false),
        kind("the reader's data in device memory", reader, device.data_offset, 2 * PAGE, false),
        kind("the reader's doorbell", reader, bell(reader, number::DOORBELL_MAP), PAGE, true),
        kind("the writer's data", writer, host_info.data_offset, 2 * PAGE, true),
        kind("the writer's tail", writer, host_info.tail_offset, PAGE, true),
        kind("the writer's head", writer, host_info.head_offset, PAGE, false),
        kind("the writer's status", writer, host_info.status_offset, PAGE, false),
        kind("the writer's data in device memory", device_writer, device_info.data_offset, 2 * PAGE, true),
        kind("the writer's doorbell", writer, bell(writer, number::EXPORT_DOORBELL), PAGE, true),
    ];
    kinds.iter().for_each(test);
}

fn mappings_allow_what_the_side_may_do_and_no_more() {
    const READ: ProtFlags = ProtFlags::PROT_READ;
    const EXECUTE: ProtFlags = READ.union(ProtFlags::PROT_EXEC);
    each_kind(|kind| {
        let Kind { name, fd, offset, len, .. } = *kind;
        let refused = |offset, len, protection, flags| Mapping::with_flags(fd, offset, len, protection, flags).map(drop);
        let (shared, einval) = (MapFlags::MAP_SHARED, Err(Errno::EINVAL));
        let mapping = kind.map(READ);
        if kind.writable {
            kind.map(READ_WRITE);
        } else {
            assert_eq!(refused(offset, len, READ_WRITE, shared), Err(Errno::EACCES), "{name} for writing");
            assert_eq!(mapping.protect(READ_WRITE), Err(Errno::EACCES), "{name} made writable");
        }
        assert_eq!(refused(offset, len, READ, MapFlags::MAP_PRIVATE), einval, "{name} private");
        assert_eq!(refused(offset, len, READ_WRITE, MapFlags::MAP_PRIVATE), einval, "{name} private for writing");
        // Nothing of a descriptor without a file system may be executed, says the kernel before the module is asked.
        let refusal = if name.starts_with("the writer's") { Errno::EPERM } else { Errno::EINVAL };
        assert_eq!(refused(offset, len, EXECUTE, shared), Err(refusal), "{name} executable");
        assert_eq!(mapping.protect(EXECUTE), Err(Errno::EACCES), "{name} made executable");
        assert_eq!(refused(offset, len + PAGE, READ, shared), einval, "{name} longer than it is");
        assert_eq!(refused(offset + PAGE as u64, len, READ, shared), einval, "{name} from behind its beginning");
        // SAFETY: on success the old range is gone, but the mapping's drop then fails the test, as it should.
        let grown = unsafe { mremap(mapping.address(), len, len + PAGE, MRemapFlags::MREMAP_MAYMOVE, None) };
        assert_eq!(grown.map(drop), Err(Errno::EFAULT), "{name} grown");
        // SAFETY: as above; from nothing to its length means a second mapping of the same.
        let doubled = unsafe { mremap(mapping.address(), 0, len, MRemapFlags::MREMAP_MAYMOVE, None) };
        assert_eq!(doubled.map(drop), Err(Errno::EFAULT), "{name} doubled");
    });
    let session = Session::nth(0);
    for offset in [0x7000_0000_0000u64, u64::MAX - 4095] {
        assert!(Mapping::new(&session.node, offset, PAGE, READ).is_err(), "offset {offset:#x}");
    }
    let channel = session.create(2 * PAGE as u64, 0).unwrap();
    let [data, ..] = channel.export().unwrap().maps();
    data.fill(1);
    // SAFETY: the range is this mapping; nothing refers into it.
    unsafe { madvise(data.address(), data.len(), MmapAdvise::MADV_DONTNEED) }.unwrap();
    assert_eq!(data.differences(1), 0, "pages come back after MADV_DONTNEED");
}

/// Runs in a child: what it was killed by, or its exit code.
fn child(run: impl FnOnce() -> i32) -> WaitStatus {
    // SAFETY: the child only makes system calls and touches memory, then leaves without unwinding.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let code = run();
            // SAFETY: leaves at once.
            unsafe { libc::_exit(code) }
        }
        ForkResult::Parent { child } => waitpid(child, None).unwrap(),
    }
}

fn a_forked_child_has_no_mapping_and_may_not_use_the_session() {
    each_kind(|kind| {
        let mapping = kind.map(kind.allowed());
        // Its pages are there, so that a copy of the mapping would have them.
        mapping.load(0);
        let touched = child(|| mapping.load(0) as i32);
        assert!(matches!(touched, WaitStatus::Signaled(_, Signal::SIGSEGV, _)), "{}: {touched:?}", kind.name);
    });
    let session = Session::nth(0);
    let refused = child(|| session.create(PAGE as u64, 0).map_or_else(|error| error as i32, |_| 0));
    assert!(matches!(refused, WaitStatus::Exited(_, code) if code == Errno::EPERM as i32), "{refused:?}");
}

fn too_little_memlock_is_enomem_and_charges_nothing() {
    let session = Session::nth(0);
    let before = session.session_state().unwrap().locked_bytes;
    let endpoint = session.endpoint;
    drop(session);
    let refused = child(|| {
        // A new session belongs to the child; without privilege, its limit counts.
        let session = Session::on(Node::open(OFlag::empty()), endpoint);
        setrlimit(Resource::RLIMIT_MEMLOCK, 64 << 10, 64 << 10).unwrap();
        setuid(65534.into()).unwrap();
        let small = session.create(PAGE as u64, 0).map(drop);
        let large = session.create(1 << 20, 0).map(drop);
        let charged = session.session_state().unwrap().locked_bytes;
        match (small, large) {
            (Ok(()), Err(Errno::ENOMEM)) if (PAGE as u64..=64 << 10).contains(&charged) => 0,
            (Ok(()), Err(Errno::ENOMEM)) => 1,
            (Err(_), _) => 2,
            _ => 3,
        }
    });
    assert!(matches!(refused, WaitStatus::Exited(_, 0)), "{refused:?}");
    assert_eq!(before, 0);
}

fn locked_bytes_come_back_when_channels_go() {
    let session = Session::nth(0);
    let locked = || session.session_state().unwrap().locked_bytes;
    assert_eq!(locked(), 0);
    let channel = session.create(1 << 20, 0).unwrap();
    assert!(locked() >= 1 << 20);
    channel.destroy().unwrap();
    assert_eq!(locked(), 0);
}

fn administration_needs_privilege() {
    let session = Session::nth(0);
    let endpoint = session.endpoint;
    let refused = child(|| {
        setuid(65534.into()).unwrap();
        let mut admin = pcieipc_admin { action: PCIEIPC_ADMIN_RESET, endpoint, ..Record::new() };
        session.node.call(number::ADMIN, &mut admin).map_or_else(|error| error as i32, |()| 0)
    });
    assert!(matches!(refused, WaitStatus::Exited(_, code) if code == Errno::EPERM as i32), "{refused:?}");
    for action in [0, 4, u32::MAX] {
        let mut admin = pcieipc_admin { action, endpoint, ..Record::new() };
        assert_eq!(session.node.call(number::ADMIN, &mut admin), Err(Errno::EINVAL), "action {action}");
    }
}

fn reading_less_than_a_record_is_einval() {
    let session = Session::nth(0);
    let mut short = [0; size_of::<pcieipc_event>() - 1];
    assert_eq!(nix::unistd::read(&session.node, &mut short), Err(Errno::EINVAL));
    let unblocked = Node::open(OFlag::O_NONBLOCK);
    let mut record = [0; size_of::<pcieipc_event>()];
    assert_eq!(nix::unistd::read(&unblocked, &mut record), Err(Errno::EAGAIN));
}

fn versions_that_exclude_each_other_are_eproto() {
    let node = Node::open(OFlag::empty());
    let mut old = pcieipc_query { user_version: 0, user_oldest: 0, ..Record::new() };
    assert_eq!(node.call(number::QUERY, &mut old), Err(Errno::EPROTO));
    assert_eq!(old.version, PCIEIPC_ABI_VERSION, "the structure is filled in all the same");
    let mut new = pcieipc_query { user_version: 99, user_oldest: 98, ..Record::new() };
    assert_eq!(node.call(number::QUERY, &mut new), Err(Errno::EPROTO));
    let mut newer = pcieipc_query { user_version: 99, user_oldest: 1, ..Record::new() };
    node.call(number::QUERY, &mut newer).unwrap();
}

fn an_exported_descriptor_cannot_be_reopened() {
    let session = Session::nth(0);
    let channel = session.create(PAGE as u64, 0).unwrap();
    let export = channel.export().unwrap();
    let path = format!("/proc/self/fd/{}", export.0.as_raw_fd());
    assert!(OpenOptions::new().read(true).write(true).open(path).is_err());
}

fn main() -> ExitCode {
    ktap::main(
        promises![
            unknown_flags_are_einval,
            padding_that_is_not_zero_is_einval,
            an_unknown_tail_is_e2big_unless_it_is_zero,
            sizes_that_no_structure_has_are_refused,
            bad_pointers_are_efault_and_nothing_is_read_past_the_structure,
            answers_write_no_more_than_the_structure_that_both_know,
            unknown_calls_are_enotty,
            ids_that_do_not_exist_are_enoent,
            calls_that_need_an_endpoint_are_enotconn_without_one,
            an_endpoint_has_one_session_and_a_session_one_endpoint,
            channels_of_impossible_sizes_and_vectors_are_refused,
            a_channel_has_one_writer_at_a_time,
            a_channel_is_imported_seven_times_and_no_more,
            descriptors_of_the_wrong_kind_are_refused,
            copies_outside_their_channels_are_refused,
            mappings_allow_what_the_side_may_do_and_no_more,
            a_forked_child_has_no_mapping_and_may_not_use_the_session,
            too_little_memlock_is_enomem_and_charges_nothing,
            locked_bytes_come_back_when_channels_go,
            administration_needs_privilege,
            reading_less_than_a_record_is_einval,
            versions_that_exclude_each_other_are_eproto,
            an_exported_descriptor_cannot_be_reopened,
        ],
        machine::repair,
    )
}
