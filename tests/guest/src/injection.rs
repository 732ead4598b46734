// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's fault injection: the n-th allocation, or copy to or from user memory, of one call of one thread fails.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::Path,
};

const DEBUG: &str = "/sys/kernel/debug";

/// Whether the kernel can inject faults, and prepares it: in all allocations that may wait, of every size, without words.
///
/// # Panics
/// When the kernel has fault injection and it cannot be set up.
pub fn prepare() -> bool {
    if !Path::new("/proc/thread-self/fail-nth").exists() {
        return false;
    }
    let settings = [
        ("failslab/ignore-gfp-wait", "N"),
        ("failslab/verbose", "0"),
        ("fail_page_alloc/ignore-gfp-wait", "N"),
        ("fail_page_alloc/ignore-gfp-highmem", "N"),
        ("fail_page_alloc/min-order", "0"),
        ("fail_page_alloc/verbose", "0"),
        ("fail_usercopy/verbose", "0"),
    ];
    for (file, value) in settings {
        let path = format!("{DEBUG}/{file}");
        fs::write(&path, value).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    // Who judges the kernel's log sees by it that memory is short on purpose.
    fs::write("/dev/kmsg", "faults: each allocation fails once\n").unwrap_or_else(|error| panic!("kmsg: {error}"));
    true
}

/// The calling thread's injection.
#[derive(Debug)]
pub struct Injection(File);

impl Injection {
    /// Of this thread; not to be used from another.
    ///
    /// # Panics
    /// When it cannot be opened.
    pub fn of_this_thread() -> Self {
        let path = "/proc/thread-self/fail-nth";
        Self(OpenOptions::new().read(true).write(true).open(path).unwrap_or_else(|error| panic!("{path}: {error}")))
    }

    /// Runs `call` with its `nth` chance to fail taken, counted from 1; whether there were so many chances.
    ///
    /// # Panics
    /// When the kernel does not take the number.
    pub fn run<T>(&self, nth: u32, call: impl FnOnce() -> T) -> (T, bool) {
        let text = nth.to_string();
        self.0.write_at(text.as_bytes(), 0).unwrap_or_else(|error| panic!("fail-nth: {error}"));
        let outcome = call();
        // What is left of the count; reading it has a chance to fail too, and if it takes that the call did not.
        let mut left = [0; 16];
        let injected = self.0.read_at(&mut left, 0).is_ok_and(|length| left[..length].trim_ascii_end() == b"0");
        // So has this, once.
        if self.0.write_at(b"0", 0).is_err() {
            self.0.write_at(b"0", 0).unwrap_or_else(|error| panic!("fail-nth: {error}"));
        }
        (outcome, injected)
    }
}
