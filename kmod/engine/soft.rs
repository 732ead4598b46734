// SPDX-License-Identifier: GPL-2.0

//! The soft endpoint's engine, `docs/soft-endpoint.md`, in BAR 0.

use super::{Order, Outcome};
use crate::endpoint::Endpoint;
use kernel::{
    prelude::*,
    time::{delay::fsleep, Delta},
};

const BAR: u32 = 0;
const STATUS: usize = 0x00c;
const STATUS_BUSY: u32 = 1 << 1;
const CONTROL: usize = 0x010;
const CONTROL_ENGINE: u32 = 1 << 0;
const CONTROL_RESET: u32 = 1 << 1;
const SRC: usize = 0x100;
const DST: usize = 0x108;
const LEN: usize = 0x110;
const FLAGS: usize = 0x114;
const FLAGS_SRC_OWN: u32 = 1 << 0;
const FLAGS_DST_OWN: u32 = 1 << 1;
const FLAGS_RAISE: u32 = 1 << 2;
const FLAGS_BELL: u32 = 1 << 3;
const VECTOR: usize = 0x118;
const START: usize = 0x11c;
const RESULT: usize = 0x120;
const RESULT_DONE: u32 = 2;
const RESULT_ERROR: u32 = 3;
const ERROR: usize = 0x124;
const BELL: usize = 0x128;
const BELL_VALUE: usize = 0x130;
const STOP: usize = 0x134;

/// Most bytes of one order.
pub(super) const LARGEST: u64 = 0x40_0000;

/// How long a stopped engine may take before it is reset.
const STOP_MS: u32 = 20;

/// Gives it an order.
///
/// # Errors
///
/// `ENODEV` after unbind.
pub(super) fn start(endpoint: &Endpoint, order: &Order<'_>) -> Result {
    let registers = &endpoint.registers;
    registers.write64(BAR, SRC, order.source.address)?;
    registers.write64(BAR, DST, order.target.address)?;
    registers.write32(BAR, LEN, order.bytes as u32)?;
    let mut flags = 0;
    if order.from.own_memory {
        flags |= FLAGS_SRC_OWN;
    }
    if order.to.own_memory {
        flags |= FLAGS_DST_OWN;
    }
    if let Some(vector) = endpoint.profile.engine_vector {
        registers.write32(BAR, VECTOR, vector)?;
        flags |= FLAGS_RAISE;
    }
    if let Some(bell) = &order.bell {
        registers.write64(BAR, BELL, bell.address)?;
        registers.write32(BAR, BELL_VALUE, bell.value)?;
        flags |= FLAGS_BELL;
    }
    registers.write32(BAR, FLAGS, flags)?;
    registers.write32(BAR, START, 1)
}

/// What has become of the order.
///
/// # Errors
///
/// `ENODEV` after unbind.
pub(super) fn outcome(endpoint: &Endpoint) -> Result<Outcome> {
    Ok(match endpoint.registers.read32(BAR, RESULT)? {
        RESULT_DONE => Outcome::Done,
        RESULT_ERROR => Outcome::Failed(endpoint.registers.read32(BAR, ERROR)?),
        u32::MAX => Outcome::Silent,
        _ => Outcome::Busy,
    })
}

/// Stops it; false when it does not stop.
pub(super) fn stop(endpoint: &Endpoint) -> bool {
    if endpoint.registers.write32(BAR, STOP, 1).is_err() {
        return true;
    }
    for _ in 0..STOP_MS {
        match endpoint.registers.read32(BAR, STATUS) {
            Ok(status) if status & STATUS_BUSY != 0 => fsleep(Delta::from_millis(1)),
            _ => return true,
        }
    }
    false
}

/// Resets it, and waits until it has forgotten.
///
/// # Errors
///
/// `ENODEV` after unbind, `EIO` when it does not forget, or does not answer, which reads as busy.
pub(super) fn restart(endpoint: &Endpoint) -> Result {
    endpoint.registers.write32(BAR, CONTROL, CONTROL_RESET)?;
    for _ in 0..STOP_MS {
        match endpoint.registers.read32(BAR, STATUS)? {
            status if status & STATUS_BUSY != 0 => fsleep(Delta::from_millis(1)),
            _ => return endpoint.registers.write32(BAR, CONTROL, CONTROL_ENGINE),
        }
    }
    Err(EIO)
}
