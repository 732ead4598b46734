// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counts what calls answered, over threads and processes, and compares it with the table in `uapi/pcieipc.h`.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{AsRawFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use nix::{
    errno::Errno,
    sys::memfd::{MFdFlags, memfd_create},
    unistd::ftruncate,
};

use crate::{
    call::number,
    mapping::{Mapping, PAGE, READ_WRITE},
};

/// Something that can be called: its name in the table, and its number if it is an ioctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call(usize);

macro_rules! calls {
    ($($name:ident)*; $($other:ident $text:literal)*) => {
        const NAMES: &[&str] = &[$(stringify!($name),)* $($text),*];
        const NUMBERS: &[u8] = &[$(number::$name),*];

        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        enum Order { $($name,)* $($other),* }

        #[allow(missing_docs)]
        impl Call {
            $(pub const $name: Self = Self(Order::$name as usize);)*
            $(pub const $other: Self = Self(Order::$other as usize);)*
        }
    };
}

calls! {
    QUERY ENUMERATE ENDPOINT_INFO DISTANCE ATTACH RECOVER STATE CHANNEL_CREATE CHANNEL_DESTROY CHANNEL_EXPORT CHANNEL_IMPORT
    CHANNEL_FREED COPY CHANNEL_DMABUF VECTOR_EVENTFD RING DOORBELL_MAP ADMIN EXPORT_INFO EXPORT_RING EXPORT_EVENTFD EXPORT_DOORBELL;
    OPEN "open" READ "read" MMAP "mmap" POLL "poll" UNKNOWN "an unknown call"
}

impl Call {
    /// The ioctl with this number, or what stands for all unknown ones.
    pub fn numbered(number: u8) -> Self {
        NUMBERS.iter().position(|&known| known == number).map_or(Self::UNKNOWN, Self)
    }

    /// Its number, if it is an ioctl.
    pub fn number(self) -> Option<u8> {
        NUMBERS.get(self.0).copied()
    }

    /// Its name in the table.
    pub fn name(self) -> &'static str {
        NAMES[self.0]
    }

    fn named(name: &str) -> Option<Self> {
        NAMES.iter().position(|&known| known == name).map(Self)
    }

    /// Whether it is an ioctl on an exported descriptor.
    pub fn is_export(self) -> bool {
        self.number().is_some_and(|number| (number::EXPORT_INFO..=number::EXPORT_DOORBELL).contains(&number))
    }
}

/// A call and an errno that it may give.
pub type Pair = (&'static str, Errno);

/// All that `uapi/pcieipc.h` says a call may answer.
///
/// # Panics
/// When the table there is not as this reads it.
pub fn documented() -> Vec<(Call, Errno)> {
    let header = include_str!("../../../uapi/pcieipc.h");
    let (_, rest) = header.split_once("DOC: Errors of each call").unwrap_or_else(|| panic!("the table is not in the header"));
    let (table, _) = rest.split_once("*/").unwrap_or_else(|| panic!("the table has no end"));
    let mut pairs = vec![(Call::UNKNOWN, Errno::ENOTTY)];
    let mut seen = BTreeSet::new();
    for line in table.lines().filter_map(|line| line.strip_prefix(" *   ")) {
        let mut words = line.split_whitespace();
        let name = words.next().unwrap_or_default();
        let call = Call::named(name).unwrap_or_else(|| panic!("the table names {name:?}, which is no call"));
        seen.insert(call.0);
        let mut errors: Vec<Errno> = words.map(errno).collect();
        if call.number().is_some() {
            errors.extend([Errno::EFAULT, Errno::EINVAL, Errno::E2BIG]);
        }
        let of_session = call.number().is_some() && !call.is_export() || [Call::READ, Call::MMAP].contains(&call);
        if of_session && !errors.contains(&Errno::EPERM) {
            errors.push(Errno::EPERM);
        }
        pairs.extend(errors.into_iter().map(|error| (call, error)));
    }
    assert_eq!(seen.len(), NAMES.len() - 1, "the table has every call");
    pairs
}

fn errno(name: &str) -> Errno {
    let mut all = (1..ERRORS as i32).map(Errno::from_raw).filter(|&error| error != UNKNOWN);
    let known = all.find(|error| format!("{error:?}") == name);
    known.unwrap_or_else(|| panic!("the table names {name:?}, which is no errno"))
}

const CALLS: usize = 32;
/// One more than the largest errno; the last place counts numbers that are none, which the kernel keeps to itself.
const ERRORS: usize = 135;
const BYTES: usize = size_of::<[[AtomicU64; ERRORS]; CALLS]>().next_multiple_of(PAGE);

const UNKNOWN: Errno = Errno::UnknownErrno;

/// Counters in memory that processes share.
#[derive(Debug)]
pub struct Tally {
    counts: NonNull<[[AtomicU64; ERRORS]; CALLS]>,
    /// Never unmapped while the tally lives.
    _memory: Mapping,
    file: OwnedFd,
}

// SAFETY: the counters are atomic and the memory belongs to the process.
unsafe impl Send for Tally {}
// SAFETY: as above.
unsafe impl Sync for Tally {}

impl Tally {
    /// All zero.
    ///
    /// # Panics
    /// Without memory.
    pub fn new() -> Self {
        // Not closed when another program is executed, which counts here too.
        let file = memfd_create(c"tally", MFdFlags::empty()).unwrap_or_else(|error| panic!("memfd: {error}"));
        ftruncate(&file, BYTES as i64).unwrap_or_else(|error| panic!("memfd: {error}"));
        Self::shared(file)
    }

    /// That of another process, which has it open as `fd`.
    ///
    /// # Panics
    /// When it is none.
    pub fn shared(file: OwnedFd) -> Self {
        const { assert!(NAMES.len() <= CALLS) };
        let memory = Mapping::new(&file, 0, BYTES, READ_WRITE).unwrap_or_else(|error| panic!("{error}"));
        Self { counts: memory.address().cast(), _memory: memory, file }
    }

    /// The descriptor by which another process shares it.
    pub fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    fn count(&self, call: Call, error: usize) -> &AtomicU64 {
        // SAFETY: the memory is zeroed, large enough, page-aligned and lives as long as `self`; zeroes are counters.
        unsafe { &self.counts.as_ref()[call.0][error.min(ERRORS - 1)] }
    }

    /// Counts an answer, and hands it on.
    pub fn add<T>(&self, call: Call, outcome: Result<T, Errno>) -> Result<T, Errno> {
        let error = outcome.as_ref().map_or_else(|error| if *error == UNKNOWN { ERRORS - 1 } else { *error as usize }, |_| 0);
        self.count(call, error).fetch_add(1, Relaxed);
        outcome
    }

    /// How often a call gave an errno.
    pub fn times(&self, call: Call, error: Errno) -> u64 {
        self.count(call, if error == UNKNOWN { ERRORS - 1 } else { error as usize }).load(Relaxed)
    }

    /// How often a call succeeded.
    pub fn successes_of(&self, call: Call) -> u64 {
        self.count(call, 0).load(Relaxed)
    }

    /// All answers counted, and how many of them were successes.
    pub fn totals(&self) -> (u64, u64) {
        let all = |error: usize| (0..NAMES.len()).map(|call| self.count(Call(call), error).load(Relaxed)).sum::<u64>();
        let good = all(0);
        (good + (1..ERRORS).map(all).sum::<u64>(), good)
    }

    /// What the header documents and nobody got.
    pub fn missing(&self) -> Vec<Pair> {
        let documented = documented().into_iter();
        documented.filter(|&(call, error)| self.times(call, error) == 0).map(|(call, error)| (call.name(), error)).collect()
    }

    /// What somebody got and the header does not document.
    pub fn undocumented(&self) -> Vec<Pair> {
        let documented = documented();
        let errors = (1..ERRORS as i32).map(Errno::from_raw).filter(|&error| error != UNKNOWN).chain([UNKNOWN]);
        (0..NAMES.len())
            .flat_map(|call| errors.clone().map(move |error| (Call(call), error)))
            .filter(|pair| self.times(pair.0, pair.1) > 0 && !documented.contains(pair))
            .map(|(call, error)| (call.name(), error))
            .collect()
    }

    /// A line for each call: how often it succeeded and how often it gave which errno.
    pub fn lines(&self) -> Vec<String> {
        let line = |call: Call| {
            let errors: BTreeMap<String, u64> = (1..ERRORS)
                .map(|error| (format!("{:?}", Errno::from_raw(error as i32)), self.count(call, error).load(Relaxed)))
                .filter(|(_, times)| *times > 0)
                .collect();
            let errors: Vec<String> = errors.iter().map(|(error, times)| format!(" {error} {times}")).collect();
            format!("{} {}{}", call.name(), self.successes_of(call), errors.concat())
        };
        (0..NAMES.len()).map(|call| line(Call(call))).collect()
    }
}

impl Default for Tally {
    fn default() -> Self {
        Self::new()
    }
}
