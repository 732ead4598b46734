// SPDX-License-Identifier: MIT OR Apache-2.0
//! How the ranks that are left agree on who that is.
//!
//! In a turn, each rank says to all that it takes to be left whom it takes to be left, and hears the same from them. When all
//! say the same, they make links; when those stand too, the group goes on. Whatever differs, or does not answer, is left out
//! of the next turn. A rank that hears of a later turn joins it; packets of earlier turns are dropped. So all members of a
//! new group were in one and the same turn, and each has links to each.

use std::time::{Duration, Instant};

use super::{
    Group,
    join::{self, Joined, OfTurn},
    message::{Message, Silence},
};
use crate::{
    error::{Error, Rank, Result},
    executor::Executor,
};

/// How long the end of a process may come after that of its sockets.
const DYING: Duration = Duration::from_millis(500);

pub fn shrink(group: &mut Group, deadline: Instant) -> Result<()> {
    let me = group.mesh.rank;
    let lost: Vec<Rank> = group.engine.get().links().lost().iter().map(|&new| group.members[new]).collect();
    if lost.contains(&me) {
        // Says which endpoint, and what to do.
        group.engine.get().links().confirm()?;
        return Err(Error::Meeting("this rank's own endpoint is not live".into()));
    }
    // Whoever still waits for this rank, or is not in the next group, learns it now.
    group.engine.get().links().abort("the group shrinks");
    let mut members: Vec<Rank> = group.members.iter().copied().filter(|r| !lost.contains(r)).collect();
    let mut turn = group.turn + 1;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::Meeting("no agreement on who is left within the given time; call shrink again with more".into()));
        }
        group.turn = turn;
        // One that does not answer must leave time for a turn without it.
        let by = Instant::now() + left / 3;
        match ask(group, &members, turn, by)? {
            Answer::Unanimous => {}
            Answer::Fewer(fewer) => {
                (members, turn) = (fewer, turn + 1);
                continue;
            }
            Answer::Later(later) => {
                turn = later;
                continue;
            }
        }
        let rank = members.iter().position(|&r| r == me).ok_or_else(excluded)?;
        let transport = group.ground.join(rank, members.len(), group.options.ring_bytes)?;
        match join::join(&group.mesh, &members, turn, transport, by)? {
            Joined::Links(links) => {
                // The old links are dropped here; those left out read there that the group went on.
                let mut options = group.options.executor.clone();
                // The tree that was asked for is of the ranks of the meeting.
                options.tree = options.tree.map(|tree| tree.among(&members));
                group.engine.replace(Executor::new(links, options)?);
                for (old, contact) in group.mesh.contacts.iter_mut().enumerate() {
                    if !members.contains(&old) {
                        *contact = None;
                    }
                }
                group.members = members;
                return group.keep_view();
            }
            Joined::Again { lost, turn: later, .. } => {
                members.retain(|r| !lost.contains(r));
                turn = later;
            }
        }
    }
}

enum Answer {
    Unanimous,
    Fewer(Vec<Rank>),
    Later(u32),
}

fn excluded() -> Error {
    Error::Meeting("the others went on without this rank; start it again and let them recover it".into())
}

/// One turn of asking.
fn ask(group: &Group, members: &[Rank], turn: u32, by: Instant) -> Result<Answer> {
    let me = group.mesh.rank;
    let question = Message::Survivors { turn, members: members.to_vec() };
    let contacts = || members.iter().filter_map(|&r| Some((r, group.mesh.contacts[r].as_ref()?)));
    let mut left = members.to_vec();
    let mut same = true;
    for (peer, contact) in contacts() {
        if contact.send(&question, &[]).is_err() && contact.has_ended(DYING) {
            left.retain(|&r| r != peer);
        }
    }
    for (peer, contact) in contacts() {
        if !left.contains(&peer) {
            continue;
        }
        match contact.receive_of_turn(turn, by) {
            Ok(OfTurn::Now(Message::Survivors { members: theirs, .. }, _)) => {
                if !theirs.contains(&me) {
                    return Err(excluded());
                }
                same &= theirs == members;
                left.retain(|r| theirs.contains(r));
            }
            Ok(OfTurn::Now(..)) => left.retain(|&r| r != peer),
            Ok(OfTurn::Later(later)) => return Ok(Answer::Later(later)),
            Err(Silence::Closed) => {
                // A live process that has closed its socket went on without us; a thread of this process may just be gone.
                if contact.life.is_some() && !contact.has_ended(DYING) {
                    return Err(excluded());
                }
                left.retain(|&r| r != peer);
            }
            Err(Silence::Late | Silence::Nonsense(_)) => left.retain(|&r| r != peer),
        }
    }
    Ok(if same && left == members { Answer::Unanimous } else { Answer::Fewer(left) })
}
