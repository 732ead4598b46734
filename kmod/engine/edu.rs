// SPDX-License-Identifier: GPL-2.0

//! The engine of QEMU's `edu`, in BAR 0: it moves bytes between memory and its own buffer, so a copy takes two steps. An order
//! that it was given cannot be taken back, only be kept off memory until it has run out, a tenth of a second later.

use super::{Order, Outcome};
use crate::{clock::now_ms, endpoint::Endpoint, hardware::QUIET, uapi::state};
use kernel::{
    prelude::*,
    sync::atomic::Relaxed,
    time::{delay::fsleep, Delta},
};

const BAR: u32 = 0;
const SOURCE: usize = 0x80;
const TARGET: usize = 0x88;
const COUNT: usize = 0x90;
const COMMAND: usize = 0x98;
const COMMAND_RUN: u32 = 1 << 0;
const COMMAND_TO_MEMORY: u32 = 1 << 1;
const COMMAND_RAISE: u32 = 1 << 2;
/// Where its buffer is, as it counts.
const BUFFER: u64 = 0x4_0000;

/// Most bytes of one order: its buffer.
pub(super) const LARGEST: u64 = 4096;

/// From memory to the buffer, and from the buffer to memory.
pub(super) const STEPS: u32 = 2;

/// How long an order may take to run out.
const STOP_MS: u64 = 2000;

/// Gives it an order.
///
/// # Errors
///
/// `ENODEV` after unbind, `EOPNOTSUPP` for a doorbell, which it cannot ring.
pub(super) fn start(endpoint: &Endpoint, order: &Order<'_>, step: u32) -> Result {
    if order.bell.is_some() {
        return Err(EOPNOTSUPP);
    }
    let (source, target, direction) = match step {
        0 => (order.source.address, BUFFER, 0),
        _ => (BUFFER, order.target.address, COMMAND_TO_MEMORY),
    };
    let registers = &endpoint.registers;
    registers.write64(BAR, SOURCE, source)?;
    registers.write64(BAR, TARGET, target)?;
    registers.write64(BAR, COUNT, order.bytes)?;
    registers.write32(BAR, COMMAND, COMMAND_RUN | COMMAND_RAISE | direction)
}

/// What has become of the order. It reports no errors: one that does not reach memory ends like any other.
///
/// # Errors
///
/// `ENODEV` after unbind.
pub(super) fn outcome(endpoint: &Endpoint) -> Result<Outcome> {
    Ok(match endpoint.registers.read32(BAR, COMMAND)? {
        u32::MAX => Outcome::Silent,
        command if command & COMMAND_RUN == 0 => Outcome::Done,
        _ => Outcome::Busy,
    })
}

/// Keeps a running order off memory until it has run out; false when it does not.
pub(super) fn stop(endpoint: &Endpoint) -> bool {
    if !is_running(endpoint) {
        return true;
    }
    endpoint.silence();
    // A new life has to begin before it may write again, when its order is over and what it wrote is still on its way.
    let ended = runs_out(endpoint) && endpoint.restless.load(Relaxed) == QUIET;
    // One that died has lost the bus for good.
    if ended && endpoint.status.state() == state::LIVE {
        endpoint.unsilence();
    }
    ended
}

/// Waits until it has no order; it is off the bus.
///
/// # Errors
///
/// `EIO` when an order does not run out, or the device does not answer.
pub(super) fn restart(endpoint: &Endpoint) -> Result {
    if runs_out(endpoint) {
        Ok(())
    } else {
        Err(EIO)
    }
}

/// False at once when it does not answer: nobody knows what it does then.
fn runs_out(endpoint: &Endpoint) -> bool {
    let deadline = now_ms() + STOP_MS;
    while is_running(endpoint) {
        if now_ms() > deadline || !endpoint.answers() {
            return false;
        }
        fsleep(Delta::from_millis(1));
    }
    true
}

/// One that does not answer counts as running.
fn is_running(endpoint: &Endpoint) -> bool {
    matches!(endpoint.registers.read32(BAR, COMMAND), Ok(command) if command & COMMAND_RUN != 0)
}
