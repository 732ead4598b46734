// SPDX-License-Identifier: MIT OR Apache-2.0
//! What each kind of fault must look like, and whether it did.

use crate::{record::Record, schedule::Kind};

/// How the ranks must come through a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nobody has an error.
    Unnoticed,
    /// Every rank has an error of one of these kinds, and all ranks come back.
    Told(&'static [&'static str]),
    /// Every rank but the victim has an error of one of these kinds, and exactly those go on; then all come back.
    Bereft(&'static [&'static str]),
    /// Nobody has an error, or every rank has one of these; all come back. The fault need not meet anything.
    Perhaps(&'static [&'static str]),
}

/// What must happen. `engine`: endpoints move the records.
pub fn outcome(kind: Kind, engine: bool) -> Outcome {
    match kind {
        Kind::Correctable
        | Kind::HotUnplug
        | Kind::DoorbellDrop
        | Kind::DoorbellDelay
        | Kind::DoorbellRepeat
        | Kind::LinkDowngrade
        | Kind::ShortStop
        | Kind::ForkExec
        | Kind::MemoryPressure => Outcome::Unnoticed,
        Kind::NonFatal | Kind::Fatal | Kind::FunctionReset => Outcome::Told(&["EndpointRecovering"]),
        Kind::RemoveRescan | Kind::UnbindBind => Outcome::Told(&["EndpointGone"]),
        // It might come back, until its time is over.
        Kind::Death => Outcome::Told(&["EndpointRecovering", "EndpointGone"]),
        // A processor's records need no interrupt: sleepers look again by themselves. An engine that does not start does.
        Kind::Silence if engine => Outcome::Told(&["Timeout", "Device", "EndpointGone"]),
        Kind::Silence => Outcome::Unnoticed,
        Kind::Corruption => Outcome::Perhaps(&["Corrupt"]),
        Kind::Kill => Outcome::Bereft(&["PeerDied"]),
        Kind::Stop => Outcome::Bereft(&["Timeout"]),
        Kind::FailedRecovery => Outcome::Bereft(&["EndpointRecovering", "EndpointGone"]),
    }
}

/// What was otherwise than it must be. Wrong sums, hangs and leaks are counted apart.
pub fn complaints(record: &Record, engine: bool) -> Vec<String> {
    let Some(fault) = record.fault else { return vec!["no fault was played".into()] };
    let victim = fault.victim;
    let mut complaints = Vec::new();
    let errors = record.seen.iter().filter(|seen| seen.failure.is_some()).count();
    let (kinds, all, bereft) = match outcome(fault.kind, engine) {
        Outcome::Unnoticed => (&[][..], false, false),
        Outcome::Told(kinds) => (kinds, true, false),
        Outcome::Bereft(kinds) => (kinds, true, true),
        Outcome::Perhaps(kinds) => (kinds, errors > 0, false),
    };
    let mut first_hand = false;
    for (rank, seen) in record.seen.iter().enumerate() {
        if bereft && rank == victim {
            continue;
        }
        match &seen.failure {
            None if all => complaints.push(format!("rank {rank} was not told")),
            None => {}
            Some(failure) if kinds.contains(&failure.kind.as_str()) => {
                first_hand = true;
                // Whom a rank waited for is not who is to blame, and neither is who passed a bad record on.
                let blames = !matches!(failure.kind.as_str(), "Timeout" | "Device" | "Corrupt");
                if blames && failure.peer != Some(victim) {
                    complaints.push(format!("rank {rank} was told of rank {:?}, not {victim}: {}", failure.peer, failure.text));
                }
            }
            // Told by a peer, which has to be one that knows.
            Some(failure) if all && failure.kind == "Aborted" => {}
            Some(failure) => complaints.push(format!("rank {rank} was told {}: {}", failure.kind, failure.text)),
        }
        if seen.ended {
            complaints.push(format!("the process of rank {rank} ended"));
        }
    }
    if all && errors > 0 && !first_hand {
        complaints.push("all ranks were told by others, and nobody knows what it was".into());
    }
    let mut agreed = record.seen.iter().enumerate().filter_map(|(rank, seen)| Some((rank, seen.agreed.as_ref()?)));
    if let Some((first, verdict)) = agreed.next() {
        for (rank, other) in agreed.filter(|(_, other)| *other != verdict) {
            complaints.push(format!("rank {rank} agreed on {other:?}, rank {first} on {verdict:?}"));
        }
        if verdict.0 || (bereft && verdict.1 != [victim]) {
            complaints.push(format!("the ranks agreed on {verdict:?}, and rank {victim} was hit"));
        }
    }
    if bereft {
        let survivors: Vec<usize> = (0..record.seen.len()).filter(|rank| *rank != victim).collect();
        for &rank in &survivors {
            let seen = &record.seen[rank];
            if seen.members.as_ref() != Some(&survivors) {
                let why = seen.refused.as_ref().map_or_else(String::new, |failure| format!(" ({})", failure.text));
                complaints.push(format!("rank {rank} went on with {:?}, not {survivors:?}{why}", seen.members));
            }
        }
        if record.shrunk_ns.is_none() {
            complaints.push("the survivors did not work again".into());
        }
    }
    if record.back_ns.is_none() {
        complaints.push("not all ranks are back".into());
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{record::Seen, schedule::Fault, words::Failure};

    fn failed(kind: &str, peer: usize) -> Seen {
        let failure = Failure {
            kind: kind.into(),
            text: String::new(),
            peer: Some(peer),
            round: 0,
            started_ns: 0,
            at_ns: 0,
            deadline_ms: 0,
        };
        Seen { failure: Some(failure), ..Seen::default() }
    }

    fn record(kind: Kind, seen: Vec<Seen>) -> Record {
        let fault = Fault { number: 0, kind, victim: 1, in_flight: true, amount: 0 };
        Record { fault: Some(fault), seen, back_ns: Some(1), ..Record::default() }
    }

    #[test]
    fn an_error_where_none_may_be_is_a_complaint() {
        let calm = || Seen { held: true, ..Seen::default() };
        assert!(complaints(&record(Kind::DoorbellDrop, vec![calm(), calm()]), false).is_empty());
        let told = complaints(&record(Kind::DoorbellDrop, vec![calm(), failed("Timeout", 0)]), false);
        assert!(told[0].contains("Timeout"), "{told:?}");
    }

    #[test]
    fn a_rank_that_was_not_told_or_was_told_of_another_is_a_complaint() {
        let good = vec![failed("EndpointGone", 1), failed("EndpointGone", 1)];
        assert!(complaints(&record(Kind::Death, good), false).is_empty());
        let silent = vec![failed("EndpointGone", 1), Seen { held: true, ..Seen::default() }];
        assert_eq!(complaints(&record(Kind::Death, silent), false), ["rank 1 was not told"]);
        let other = vec![failed("EndpointGone", 0), failed("EndpointGone", 1)];
        assert!(complaints(&record(Kind::Death, other), false)[0].contains("rank 0 was told of rank Some(0)"));
        let hearsay = vec![failed("Aborted", 1), failed("Aborted", 0)];
        assert!(complaints(&record(Kind::Death, hearsay), false)[0].contains("by others"));
    }

    #[test]
    fn survivors_that_disagree_or_take_the_dead_along_are_a_complaint() {
        let with = |members: &[usize]| Seen { members: Some(members.to_vec()), ..failed("PeerDied", 1) };
        let mut good = record(Kind::Kill, vec![with(&[0, 2]), Seen { ended: true, ..Seen::default() }, with(&[0, 2])]);
        assert!(complaints(&good, false)[0].contains("did not work again"));
        good.shrunk_ns = Some(1);
        assert!(complaints(&good, false).is_empty());
        good.seen[2] = with(&[0, 1, 2]);
        assert!(complaints(&good, false)[0].contains("rank 2 went on with Some([0, 1, 2])"));
    }

    #[test]
    fn ranks_that_agree_on_different_things_or_on_the_wrong_one_are_a_complaint() {
        let with = |failed: &[usize]| Seen { agreed: Some((false, failed.to_vec())), ..failed_by_death() };
        let mut record = record(Kind::Death, vec![with(&[1]), with(&[1])]);
        assert!(complaints(&record, false).is_empty());
        record.seen[1] = with(&[]);
        assert!(complaints(&record, false)[0].contains("rank 1 agreed on (false, [])"));
        record.seen = vec![Seen { agreed: Some((true, vec![])), ..failed_by_death() }, failed_by_death()];
        assert!(complaints(&record, false)[0].contains("agreed on (true, [])"));
    }

    fn failed_by_death() -> Seen {
        failed("EndpointGone", 1)
    }

    #[test]
    fn ranks_that_do_not_come_back_are_a_complaint() {
        let mut record = record(Kind::NonFatal, vec![failed("EndpointRecovering", 1), failed("EndpointRecovering", 1)]);
        record.back_ns = None;
        assert_eq!(complaints(&record, false), ["not all ranks are back"]);
    }
}
