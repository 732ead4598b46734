// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which transport a run takes, and why.

use crate::{failure::Failure, module, ranks::Asked};

/// A transport, chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// `kmod` or `shm`.
    pub name: &'static str,
    /// Why this one, for the user.
    pub why: String,
    /// The endpoint of each rank; empty for shared memory.
    pub endpoints: Vec<u32>,
    /// Their PCI addresses.
    pub addresses: Vec<String>,
}

/// Chooses the transport of a group.
///
/// # Errors
/// Run when the module was asked for and can not be used; Auto never fails.
pub fn choose(asked: Asked, ranks: usize) -> Result<Choice, Failure> {
    let shm = |why: String| Choice { name: "shm", why, endpoints: Vec::new(), addresses: Vec::new() };
    let kmod = |why, free: Vec<(u32, String)>| {
        let (endpoints, addresses) = free.into_iter().unzip();
        Choice { name: "kmod", why, endpoints, addresses }
    };
    match asked {
        Asked::Shm => Ok(shm("asked for".into())),
        Asked::Kmod => match free_endpoints(ranks) {
            Ok(free) => Ok(kmod("asked for".into(), free)),
            Err(why) => Err(Failure::Run(why)),
        },
        Asked::Auto => Ok(match free_endpoints(ranks) {
            Ok(free) => kmod(format!("{} has a free endpoint for every rank", module::NODE), free),
            Err(why) => shm(why),
        }),
    }
}

/// One live endpoint without a session for each rank, or what is missing.
fn free_endpoints(_ranks: usize) -> Result<Vec<(u32, String)>, String> {
    module::reachable().map_err(|obstacle| obstacle.to_string())?;
    Err(format!("{} can be opened, but this version does not drive it yet; use --transport shm", module::NODE))
}
