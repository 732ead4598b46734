// SPDX-License-Identifier: MIT OR Apache-2.0
//! A group after a loss: with those that are left, or with all that came back.
//!
//! Those that have stayed decide on their board who is left, meet those that return, and make links in a new turn. When all have
//! voted that their links stand, the group has a new life, with new memory and a new board; otherwise they try again
//! without those that were lost meanwhile. Packets of earlier turns are dropped. What a rank that was left out can still write
//! (its rings, the old board) is not used again: the kernel frees such memory when the last process that has it mapped has ended.

use std::time::{Duration, Instant};

use super::{
    Ground, Group, GroupOptions,
    council::{Ballot, Council, excluded},
    directory::Directory,
    join::{self, Joined, Links},
    mesh::{Contact, Meeting, Mesh, Place},
    message::{Message, Silence},
};
use crate::{
    error::{Error, Rank, Result},
    executor::Executor,
    transport::board::{Question, Ranks},
};

/// How long the end of a process may come after that of its sockets.
const DYING: Duration = Duration::from_millis(500);
/// How long a rank that returns waits before it calls again.
const CALL_AGAIN: Duration = Duration::from_millis(20);
/// How long those that have stayed wait before they make links again.
const TRY_AGAIN: Duration = Duration::from_millis(5);
/// What every step has at least, so that a late rank is not lost to a passed deadline at once.
const LEAST: Duration = Duration::from_millis(20);

/// With whom the group goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Want {
    Survivors,
    All,
}

/// When so many twelfths of the time that is left have passed.
fn part(deadline: Instant, twelfths: u32) -> Instant {
    let now = Instant::now();
    now + (deadline.saturating_duration_since(now) / 12 * twelfths).max(LEAST)
}

pub fn shrink(group: &mut Group, deadline: Instant) -> Result<()> {
    if group.council.is_excluded() {
        return Err(excluded());
    }
    suspect_idle(group);
    let me = group.mesh.rank;
    if group.not_live().contains(&me) {
        // The others need not wait.
        let lost = Ranks::of([me]);
        group.council.resign(Ballot { question: Question::Survivors, flags: 0, lost, seen: Ranks::default() });
        // Says which endpoint, and what to do.
        group.engine.get().links().confirm()?;
        return Err(Error::Meeting("this rank's own endpoint is not live".into()));
    }
    regroup(group, Want::Survivors, deadline)
}

/// The links that know it do not outlive this.
fn suspect_idle(group: &mut Group) {
    if group.engine.get().links().is_idle() {
        group.ground.suspect();
    }
}

pub fn recover(group: &mut Group, deadline: Instant) -> Result<()> {
    suspect_idle(group);
    if group.council.is_excluded() {
        return come_back(group, deadline);
    }
    match regroup(group, Want::All, deadline) {
        Err(_) if group.council.is_excluded() && Instant::now() < deadline => come_back(group, deadline),
        result => result,
    }
}

/// After the others went on.
fn come_back(group: &mut Group, deadline: Instant) -> Result<()> {
    // What this rank still holds of the old life is of no use to anybody.
    group.engine.get().links().leave();
    let returned = return_to(&group.options, &mut group.ground, deadline)?;
    (group.mesh, group.turn) = (returned.mesh, returned.turn);
    install(group, returned.links, returned.members, deadline)
}

/// As one that has stayed.
fn regroup(group: &mut Group, want: Want, deadline: Instant) -> Result<()> {
    // Whoever still waits for this rank, or is not in the next group, learns it now.
    group.engine.get().links().abort(match want {
        Want::Survivors => "the group shrinks",
        Want::All => "the group recovers",
    });
    let everyone = Ranks::of(0..group.options.ranks);
    loop {
        if Instant::now() >= deadline {
            return Err(Error::Meeting("no agreement within the given time; call again with more, or shrink".into()));
        }
        let lost = if want == Want::Survivors { gone(group) } else { Ranks::default() };
        let question = if want == Want::Survivors { Question::Survivors } else { Question::Returned };
        let ballot = Ballot { question, flags: 0, lost, seen: Ranks::default() };
        let mut present = present(group.council.decide(&group.mesh, ballot, part(deadline, 6))?.lost, &group.members);
        if want == Want::All {
            match await_all(group, everyone, present, deadline)? {
                Some(all) => present = all,
                None => continue,
            }
        }
        // A member that was lost in this life and came back is as new as one that never was in it.
        let stayed = group.council.present();
        let members = present.list();
        group.turn = group.turn.wrapping_add(1);
        for newcomer in present.without(stayed).list() {
            if let Some(contact) = &group.mesh.contacts[newcomer] {
                let _ = contact.send(&Message::Members { turn: group.turn, members: members.clone() }, &[]);
            }
        }
        // Whoever is ready first waits for the votes of those that use all of their time.
        let (by, decided_by) = (part(deadline, 6), part(deadline, 9));
        let ring_bytes = group.options.ring_bytes;
        let (links, lost) = match attempt(&group.mesh, &group.ground, ring_bytes, group.turn, &members, by) {
            Ok(Joined::Links(links)) => (Some(links), Ranks::default()),
            Ok(Joined::Again { lost, .. }) => (None, dead(&group.mesh, &lost).and(stayed)),
            // Of the own endpoint, or of a descriptor that could not be had: tried again, until the deadline.
            Err(_) => (None, Ranks::default()),
        };
        let ballot = Ballot { question: Question::Commit, flags: u16::from(links.is_some()), lost, seen: Ranks::default() };
        let decision = group.council.decide(&group.mesh, ballot, decided_by)?;
        match links {
            Some(links) if decision.flags & 1 != 0 && decision.lost.and(stayed).is_empty() => {
                for newcomer in present.without(stayed).list() {
                    if let Some(contact) = &group.mesh.contacts[newcomer] {
                        let _ = contact.send(&Message::Committed { turn: group.turn }, &[]);
                    }
                }
                return install(group, links, members, deadline);
            }
            // Those that return call again.
            _ => {
                present.without(stayed).list().iter().for_each(|r| group.mesh.contacts[*r] = None);
                std::thread::sleep(TRY_AGAIN);
            }
        }
    }
}

/// The members that are not lost.
fn present(lost: Ranks, members: &[Rank]) -> Ranks {
    Ranks::of(members.iter().copied()).without(lost)
}

/// Members that can not be in a smaller group.
fn gone(group: &mut Group) -> Ranks {
    let members = group.members.clone();
    Ranks::of(group.engine.get().links().lost().iter().filter_map(|new| members.get(*new).copied()))
}

/// Those of `ranks` whose process has ended, or that have left.
fn dead(mesh: &Mesh, ranks: &[Rank]) -> Ranks {
    let gone = |contact: &Contact| contact.has_ended(DYING) || contact.is_closed();
    Ranks::of(ranks.iter().copied().filter(|r| mesh.contacts[*r].as_ref().is_none_or(gone)))
}

/// Waits for the own endpoint and for those that are missing; gives all ranks, or nothing when one was lost meanwhile and there is time to wait
/// for it, or an error. All that have stayed come to the same.
fn await_all(group: &mut Group, everyone: Ranks, present: Ranks, deadline: Instant) -> Result<Option<Ranks>> {
    let (me, by, decided_by) = (group.mesh.rank, part(deadline, 6), part(deadline, 8));
    for rank in everyone.without(present).list() {
        group.mesh.contacts[rank] = None;
    }
    let own = group.ground.restore(me, by);
    let directory = Directory::open(&group.options.directory)?;
    let configuration = group.options.agreed();
    let missing = group.mesh.gather(Place { directory: &directory, configuration: &configuration }, Meeting::Stayed, by)?;
    let seen = everyone.without(present).without(Ranks::of(missing));
    let lost = if own.is_ok() { Ranks::default() } else { Ranks::of([me]) };
    let time_is_left = own.is_ok() && Instant::now() < by;
    let ballot = Ballot { question: Question::Newcomers, flags: u16::from(time_is_left), lost, seen };
    let decision = group.council.decide(&group.mesh, ballot, decided_by);
    own?;
    let decision = decision?;
    let together = present.without(decision.lost).or(decision.seen.and(everyone.without(present)));
    if together == everyone {
        return Ok(Some(together));
    }
    if decision.flags & 1 != 0 {
        return Ok(None);
    }
    let missing: Vec<String> = everyone.without(together).list().iter().map(|r| r.to_string()).collect();
    Err(Error::Meeting(format!(
        "rank {} did not come back in time; call recover again to wait longer, or shrink to go on without it",
        missing.join(", ")
    )))
}

fn attempt(mesh: &Mesh, ground: &Ground, ring_bytes: usize, turn: u32, members: &[Rank], by: Instant) -> Result<Joined> {
    let rank = members.iter().position(|&r| r == mesh.rank).ok_or_else(excluded)?;
    join::join(mesh, members, turn, ground.join(rank, members.len(), ring_bytes), by)
}

/// The new life begins.
fn install(group: &mut Group, links: Links, members: Vec<Rank>, deadline: Instant) -> Result<()> {
    let mut options = group.options.executor.clone();
    // The tree that was asked for is of the ranks of the meeting.
    options.tree = options.tree.map(|tree| tree.among(&members));
    // The old links are dropped here; those left out read there that the group went on.
    group.engine.replace(Executor::new(links.links, options)?);
    for (old, contact) in group.mesh.contacts.iter_mut().enumerate() {
        if !members.contains(&old) {
            *contact = None;
        }
    }
    group.registered = 0;
    group.seat(Council::new(links.board, group.mesh.rank, &members));
    group.members = members;
    if group.members.len() < group.options.ranks {
        return group.keep_view();
    }
    // One that returned has seen nothing yet, and an endpoint may hang elsewhere now.
    group.learn_tree(deadline.max(Instant::now() + LEAST))
}

/// What one that returned holds.
pub struct Returned {
    pub mesh: Mesh,
    pub links: Links,
    pub members: Vec<Rank>,
    pub turn: u32,
}

/// As one that was left out, or a new process in its place.
pub fn return_to(options: &GroupOptions, ground: &mut Ground, deadline: Instant) -> Result<Returned> {
    let directory = Directory::open(&options.directory)?;
    let configuration = options.agreed();
    loop {
        // It may have been lost again meanwhile.
        ground.restore(options.rank, deadline)?;
        let mut mesh = Mesh::alone(options.rank, options.ranks);
        mesh.gather(Place { directory: &directory, configuration: &configuration }, Meeting::Returning, deadline)?;
        if let Some((links, members, turn)) = join_again(&mesh, ground, options.ring_bytes, deadline) {
            return Ok(Returned { mesh, links, members, turn });
        }
        if Instant::now() >= deadline {
            return Err(Error::Meeting(
                "nobody of the group took this rank back within the given time; the others must call recover".into(),
            ));
        }
        std::thread::sleep(CALL_AGAIN);
    }
}

/// One try of a rank that returns; nothing when those that have stayed try again.
fn join_again(mesh: &Mesh, ground: &Ground, ring_bytes: usize, deadline: Instant) -> Option<(Links, Vec<Rank>, u32)> {
    let (turn, members) = hear(mesh, deadline, |message| match message {
        Message::Members { turn, members } => Some((turn, members)),
        _ => None,
    })?;
    let known = |r: &Rank| *r == mesh.rank || mesh.contacts.get(*r).is_some_and(Option::is_some);
    if !members.contains(&mesh.rank) || !members.iter().all(known) || !members.is_sorted() {
        return None;
    }
    // Those that have stayed decide how long this may take: when they give up, they close.
    let Ok(Joined::Links(links)) = attempt(mesh, ground, ring_bytes, turn, &members, deadline) else { return None };
    let committed = |message| matches!(message, Message::Committed { turn: its } if its == turn).then_some(());
    hear(mesh, deadline, committed).map(|()| (links, members, turn))
}

/// Waits for a packet of any contact; nothing when none can come any more.
fn hear<T>(mesh: &Mesh, deadline: Instant, wanted: impl Fn(Message) -> Option<T>) -> Option<T> {
    loop {
        let mut open = false;
        for contact in mesh.contacts.iter().flatten() {
            match contact.peek() {
                Ok(Some(message)) => {
                    open = true;
                    // Left for `join` if it is not what is wanted.
                    if let Some(found) = wanted(message) {
                        let _ = contact.receive(Instant::now());
                        return Some(found);
                    }
                }
                Ok(None) => open |= !contact.has_ended(Duration::ZERO),
                Err(Silence::Nonsense(_) | Silence::Late | Silence::Closed | Silence::Full(_)) => {}
            }
        }
        if !open || Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
