// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups over the module know the tree from their meeting on, and learn when it changes.

#[path = "../../tests/support/changing.rs"]
mod changing;

use std::{
    path::PathBuf,
    sync::{Arc, Barrier},
    time::{Duration, Instant},
};

use changing::Changing;

use super::{Group, GroupOptions, Host, KmodOptions, Transport};
use crate::{
    device::fake::{FakeKernel, GONE},
    error::{Error, Rank},
    reduce::Op,
    topology::{Archive, import},
    transport::kmod::Mover,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// Two switches with two endpoints each, the first of which has so many lanes.
fn host(lanes: u32) -> Archive {
    let card = |bus: u32, lanes: u32| {
        format!("<pci busid=\"0000:{bus:02x}:00.0\" class=\"0x120000\" link_speed=\"16.0 GT/s PCIe\" link_width=\"{lanes}\"/>")
    };
    let switch = |bus: u32, cards: String| {
        format!(
            "<pci busid=\"0000:{bus:02x}:00.0\" class=\"0x060400\" link_speed=\"16.0 GT/s PCIe\" link_width=\"16\">{cards}</pci>"
        )
    };
    let text = format!(
        "<system version=\"1\"><cpu numaid=\"0\" affinity=\"ff\">{}{}</cpu></system>",
        switch(1, card(2, lanes) + &card(3, 16)),
        switch(4, card(5, 16) + &card(6, 16))
    );
    import::from_text(&text).unwrap()
}

/// Four ranks on the endpoints of that host, in an order that no switch has.
fn ranks<R: Send>(kernel: &Arc<FakeKernel>, host: &Changing, mover: Mover, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    for (id, bus) in [(1u32, 2u32), (2, 5), (3, 3), (4, 6)] {
        kernel.world().addresses.insert(id, bus << 8);
    }
    let folder = tempfile::tempdir().unwrap();
    let directory: PathBuf = folder.path().join("meeting");
    let meet = |rank: Rank| {
        let mut options = GroupOptions::new(rank, 4, &directory);
        let host = Some(Host::of(host.clone()));
        options.transport = Transport::Kmod(KmodOptions { mover, kernel: kernel.clone(), host, ..Default::default() });
        options.ring_bytes = 1 << 16;
        options.meeting_timeout = PATIENCE;
        Group::meet(options).unwrap()
    };
    std::thread::scope(|scope| {
        let (meet, body) = (&meet, &body);
        let running: Vec<_> = (0..4).map(|rank| scope.spawn(move || body(meet(rank)))).collect();
        running.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn reduces(group: &mut Group) -> Result<(), Error> {
    let mut buffer = vec![1.0f32; 5000];
    group.all_reduce(&mut buffer, Op::Sum, PATIENCE)?;
    assert!(buffer.iter().all(|b| *b == group.ranks() as f32));
    Ok(())
}

#[test]
fn ranks_over_the_module_plan_for_one_and_the_same_tree_from_their_meeting_on() {
    for mover in [Mover::Processor, Mover::Engine] {
        let views = ranks(&FakeKernel::new(4), &Changing::new(host(16)), mover, |mut group| {
            assert!(!group.tree_changed());
            assert_eq!(group.engine.get().tree().to_string(), "((0 2) (1 3))");
            reduces(&mut group).unwrap();
            group.view.clone().unwrap()
        });
        assert!(views.iter().all(|view| *view == views[0]), "{views:?}");
        // Only what engines carry goes over the endpoints' links.
        assert_eq!(serde_json::to_value(&views[0]).unwrap()["ways"].is_null(), mover == Mover::Processor);
    }
}

#[test]
fn a_link_that_loses_lanes_is_a_warning_and_changes_what_all_plan_for() {
    let changing = Changing::new(host(16));
    let gate = Barrier::new(4);
    ranks(&FakeKernel::new(4), &changing, Mover::Engine, |mut group| {
        let before = group.view.clone().unwrap();
        assert!(group.degraded_ways().is_empty());
        gate.wait();
        if group.rank() == 0 {
            changing.change(host(4));
        }
        let begun = Instant::now();
        while !group.tree_changed() && begun.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(10));
        }
        let warnings = group.degraded_ways();
        assert!(
            matches!(&warnings[..], [Error::LinkDegraded { peer: 0, before, now, .. }] if before == "16 GT/s x16" && now.starts_with("16 GT/s x4 above 0000:02:00.0")),
            "{warnings:?}"
        );
        // Calls go on with the old plans until all plan anew.
        reduces(&mut group).unwrap();
        assert_eq!(group.replan(PATIENCE).unwrap().unwrap().to_string(), "((0 2) (1 3))");
        assert!(!group.tree_changed() && group.degraded_ways().is_empty());
        assert_ne!(group.view.clone().unwrap(), before);
        reduces(&mut group).unwrap();
    });
}

#[test]
fn ranks_plan_anew_together_although_each_sees_the_change_at_a_moment_of_its_own() {
    let changing = Changing::new(host(16));
    let gate = Barrier::new(4);
    ranks(&FakeKernel::new(4), &changing, Mover::Engine, |mut group| {
        assert!(!group.replan_if_changed(PATIENCE).unwrap());
        let before = group.view.clone().unwrap();
        gate.wait();
        if group.rank() == 0 {
            changing.change(host(4));
        }
        // Nobody waits for a change: the ranks work on, and all turn in the same round.
        let begun = Instant::now();
        let mut rounds = 0;
        while !group.replan_if_changed(PATIENCE).unwrap() {
            assert!(begun.elapsed() < PATIENCE, "rank 0 never saw it");
            assert_eq!(group.view.as_ref(), Some(&before));
            reduces(&mut group).unwrap();
            rounds += 1;
        }
        assert_ne!(group.view.as_ref(), Some(&before));
        reduces(&mut group).unwrap();
        rounds
    })
    .windows(2)
    .for_each(|pair| assert_eq!(pair[0], pair[1]));
}

#[test]
fn survivors_keep_what_they_know_of_the_tree() {
    let kernel = FakeKernel::new(4);
    let gate = Barrier::new(4);
    ranks(&kernel, &Changing::new(host(16)), Mover::Engine, |mut group| {
        let rank = group.rank();
        reduces(&mut group).unwrap();
        gate.wait();
        if rank == 0 {
            kernel.set_state(1, GONE);
        }
        while reduces(&mut group).is_ok() {}
        if rank == 1 {
            assert!(group.shrink(PATIENCE).is_err());
            return;
        }
        group.shrink(PATIENCE).unwrap();
        assert_eq!(group.engine.get().tree().to_string(), "((0 1) 2)");
        reduces(&mut group).unwrap();
    });
}

#[test]
fn a_group_that_was_given_a_tree_or_shall_look_at_none_keeps_to_that() {
    let folder = tempfile::tempdir().unwrap();
    let kernel = FakeKernel::new(2);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (kernel, directory) = (kernel.clone(), folder.path().join("meeting"));
            scope.spawn(move || {
                let mut options = GroupOptions::new(rank, 2, directory);
                options.transport = Transport::Kmod(KmodOptions { kernel, host: None, ..Default::default() });
                options.ring_bytes = 1 << 16;
                let mut group = Group::meet(options).unwrap();
                assert!(group.near.is_none() && group.view.is_none() && !group.tree_changed());
                reduces(&mut group).unwrap();
            });
        }
    });
}
