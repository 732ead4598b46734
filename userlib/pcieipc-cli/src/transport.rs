// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which transport a run takes, over which endpoints, and why.

use pcieipc::device::{EndpointInfo, NODE};

use crate::{
    failure::Failure,
    module::{self, is_free},
    ranks::Asked,
};

/// A transport, chosen.
#[derive(Debug, Clone)]
pub struct Choice {
    /// `kmod` or `shm`.
    pub name: &'static str,
    /// Why this one, for the user.
    pub why: String,
    /// The endpoint of each rank; empty for shared memory.
    pub endpoints: Vec<EndpointInfo>,
}

/// Chooses the transport of a group; `wanted` names the endpoints of ranks 0, 1, ... by address or id.
///
/// # Errors
/// Run when the module was asked for, or endpoints were named, and they can not be used; Auto never fails otherwise.
pub fn choose(asked: Asked, ranks: usize, wanted: &[String]) -> Result<Choice, Failure> {
    let shm = |why: String| Choice { name: "shm", why, endpoints: Vec::new() };
    let kmod = |why: String, endpoints| Choice { name: "kmod", why, endpoints };
    match (asked, endpoints(ranks, wanted)) {
        (Asked::Shm, _) if !wanted.is_empty() => Err(Failure::Use("--endpoints has no meaning with --transport shm".into())),
        (Asked::Shm, _) => Ok(shm("asked for".into())),
        (Asked::Kmod, Ok(endpoints)) => Ok(kmod("asked for".into(), endpoints)),
        (Asked::Auto, Ok(endpoints)) => Ok(kmod(format!("{NODE} has a free endpoint for every rank"), endpoints)),
        (Asked::Auto, Err(why)) if wanted.is_empty() => Ok(shm(why)),
        (_, Err(why)) => Err(Failure::Run(why)),
    }
}

/// The endpoint of each rank, or what is missing.
fn endpoints(ranks: usize, wanted: &[String]) -> Result<Vec<EndpointInfo>, String> {
    let node = module::open().map_err(|obstacle| obstacle.to_string())?;
    let all = module::endpoints(&node).map_err(|error| error.to_string())?;
    pick(all, ranks, wanted)
}

fn pick(all: Vec<EndpointInfo>, ranks: usize, wanted: &[String]) -> Result<Vec<EndpointInfo>, String> {
    if wanted.is_empty() {
        let free = all.iter().filter(|endpoint| is_free(endpoint)).count();
        if free < ranks {
            return Err(format!(
                "{ranks} ranks need {ranks} free live endpoints, there are {free}{}; bind more to the driver pcieipc, start fewer \
                 ranks, or use --transport shm",
                whereabouts(&all)
            ));
        }
        return Ok(all.into_iter().filter(is_free).take(ranks).collect());
    }
    if wanted.len() != ranks {
        return Err(format!("--endpoints names {} endpoints for {ranks} ranks; name one a rank", wanted.len()));
    }
    let find = |name: &String| {
        let found = all.iter().find(|endpoint| endpoint.address == *name || endpoint.id.0.to_string() == *name);
        found.cloned().ok_or_else(|| format!("there is no endpoint {name}{}; `pcieipc info` lists them", whereabouts(&all)))
    };
    // Whether it is free is for the module to say, when the rank attaches: another process may be faster than this one.
    wanted.iter().map(find).collect()
}

/// What the endpoints that are there are doing, in brackets.
fn whereabouts(all: &[EndpointInfo]) -> String {
    if all.is_empty() {
        return " (no endpoint is bound at all)".into();
    }
    let each = all.iter().map(|endpoint| {
        let taken = if endpoint.attached { ", taken by a session" } else { "" };
        format!("{} {}{taken}", endpoint.address, endpoint.state)
    });
    format!(" ({})", each.collect::<Vec<_>>().join("; "))
}
