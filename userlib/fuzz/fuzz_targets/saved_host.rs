// SPDX-License-Identifier: MIT OR Apache-2.0
//! Any file given to `--snapshot`: archives, NCCL and hwloc XML, lspci's text. `scripts/fuzz`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pcieipc::{
    doctor::{Case, Moment, examine, script},
    topology::{Topology, import, nccl_xml},
};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(host) = import::open(bytes) {
        let moment = Moment::read(&host);
        let later = host.second_look().map(|(host, seconds)| (Topology::read(&host), seconds));
        let case = Case { later: later.as_ref().map(|(tree, seconds)| (tree, *seconds)), since: Some(&moment), ..Case::new(&moment) };
        let _ = script(&examine(&case));
        nccl_xml(&moment.tree, &moment.host).expect("writing into memory");
        let all: Vec<_> = moment.tree.functions.iter().map(|f| f.address).take(16).collect();
        let _ = (moment.tree.machine_key(&all), moment.tree.rank_tree(&all));
        assert!(moment.tree.ways(&all).is_some_and(|w| w.is_sound(all.len())));
        // A second reading finds the same, whatever it is.
        assert_eq!(Topology::read(&host), moment.tree);
    }
});
