// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the module knows of a function, and whether it works.

use std::time::Duration;

use pcieipc::{
    device::{DeviceError, EndpointInfo, State},
    topology::Address,
};

use super::{DRIVER, Function};
use crate::{failure::Failure, module};

/// How long the endpoint may take for each answer of its self-test.
const ANSWER: Duration = Duration::from_secs(5);

/// The address that a user means: a PCI address, or an id that `pcieipc info` shows.
///
/// # Errors
/// Use when it is neither.
pub fn address_of(text: &str) -> Result<Address, Failure> {
    let Ok(id) = text.parse::<u32>() else {
        return text
            .parse::<Address>()
            .map_err(|error| Failure::Use(format!("{error}, or an endpoint by the id that `pcieipc info` shows")));
    };
    let endpoints = module::open()
        .map_err(|obstacle| Failure::Run(obstacle.to_string()))
        .and_then(|node| module::endpoints(&node).map_err(|error| Failure::Run(error.to_string())))?;
    let found = endpoints.iter().find(|endpoint| endpoint.id.0 == id);
    let found = found.ok_or_else(|| Failure::Use(format!("there is no endpoint {id}; `pcieipc info` lists them")))?;
    found.address.parse().map_err(|error| Failure::Run(format!("the module calls endpoint {id} {:?}: {error}", found.address)))
}

/// The module's endpoint of a function.
pub fn endpoint(function: &Function) -> Option<EndpointInfo> {
    let node = module::open().ok()?;
    // One that has gone may still be remembered beside the one that took its slot.
    let of_it = module::endpoints(&node).ok()?.into_iter().filter(|info| info.address.parse() == Ok(function.address));
    of_it.max_by_key(|info| info.id)
}

/// Whether a function works, as far as can be seen from here; the text says what was seen.
///
/// # Errors
/// What it does not do.
pub fn tested(function: &Function) -> Result<String, String> {
    if !function.exists() {
        return Err("the bus does not have it".into());
    }
    if !function.answers() {
        return Err("its configuration space reads all-ones".into());
    }
    match function.driver().as_deref() {
        None => Err("no driver has it".into()),
        Some(DRIVER) => rung(function),
        Some(other) => Ok(format!("it answers, and the driver {other} has it; more than that only {other} can test")),
    }
}

fn rung(function: &Function) -> Result<String, String> {
    let Some(info) = endpoint(function) else { return Err("the driver has it, and the module does not list it".into()) };
    if info.state != State::Live {
        return Err(format!("the module says it is {}", info.state));
    }
    let node = module::open().map_err(|obstacle| obstacle.to_string())?;
    let session = match node.attach(info.id, 1) {
        Ok(session) => session,
        Err(DeviceError::Busy { .. }) => return Ok("it is live, and a session uses it, so it was not rung".into()),
        Err(error) => return Err(error.to_string()),
    };
    let passed = session.self_test(ANSWER).map_err(|error| error.to_string())?;
    let copy = passed.copy.map_or_else(String::new, |took| format!(", its engine copied from ring to ring in {took:.1?}"));
    Ok(format!("its interrupt came {:.1?} after its doorbell{copy}", passed.interrupt))
}
