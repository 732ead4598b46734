// SPDX-License-Identifier: MIT OR Apache-2.0
//! `println!` and its kin for a command: a stream that can not be written ends in an exit code, never in a panic.
//!
//! The macros take the place of the standard library's in every module that is declared after this one.

use std::{
    fmt::Arguments,
    io::{self, ErrorKind, Write},
    sync::OnceLock,
};

use crate::failure::Failure;

/// The first error of standard output.
static BROKEN: OnceLock<io::Error> = OnceLock::new();

/// Writes to standard output; an error is kept for [`finish`].
pub fn write_out(text: Arguments<'_>) {
    if BROKEN.get().is_some() {
        return;
    }
    if let Err(error) = io::stdout().lock().write_fmt(text) {
        let _ = BROKEN.set(error);
    }
}

/// Writes to standard error. Nobody could be told of an error.
pub fn write_err(text: Arguments<'_>) {
    let _ = io::stderr().lock().write_fmt(text);
}

/// Writes out what is still held back.
///
/// # Errors
/// Run when something of the standard output was lost, except that its reader has closed it: that one has what it wanted.
pub fn finish() -> Result<(), Failure> {
    if let Err(error) = io::stdout().lock().flush() {
        let _ = BROKEN.set(error);
    }
    match BROKEN.get() {
        Some(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::Told(format!("standard output: {error}; what was to be read there is lost")))
        }
        _ => Ok(()),
    }
}

/// Whether standard output is a pipe or socket whose other end is closed. A command that seldom writes would not notice.
pub fn reader_left() -> bool {
    use std::os::fd::AsFd;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let stdout = io::stdout();
    let mut set = [PollFd::new(stdout.as_fd(), PollFlags::empty())];
    let gone = PollFlags::POLLERR | PollFlags::POLLHUP | PollFlags::POLLNVAL;
    matches!(poll(&mut set, PollTimeout::ZERO), Ok(1)) && set[0].revents().is_some_and(|r| r.intersects(gone))
}

macro_rules! print {
    ($($arguments:tt)*) => { $crate::standard_streams::write_out(format_args!($($arguments)*)) };
}

macro_rules! println {
    () => { $crate::standard_streams::write_out(format_args!("\n")) };
    ($($arguments:tt)*) => { $crate::standard_streams::write_out(format_args!("{}\n", format_args!($($arguments)*))) };
}

macro_rules! eprintln {
    ($($arguments:tt)*) => { $crate::standard_streams::write_err(format_args!("{}\n", format_args!($($arguments)*))) };
}
