// SPDX-License-Identifier: MIT OR Apache-2.0
//! A hand at a card's slot: the card is out before anybody was told.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use guest::{
    abi::*,
    call::{Record, number},
    ktap, machine,
    mapping::PAGE,
    pci::Function,
    promises,
    session::{Node, SOON, Session, signals},
    wait,
};
use nix::{errno::Errno, fcntl::OFlag, poll::PollFlags};

/// Far less than an endpoint that does not answer may take to come back here, as `slot.toml` says: a minute.
const AT_ONCE: Duration = Duration::from_secs(5);

fn a_card_that_is_pulled_out_is_gone_at_once() {
    let function = Function::with_device("0x11e8").pop().expect("the machine has an edu");
    function.bind_by_override().unwrap();
    let node = Node::open(OFlag::empty());
    let of_the_card = |&id: &u32| node.info(id).is_ok_and(|info| Function::at(info.address) == function);
    let id = node.endpoints().into_iter().find(of_the_card).expect("the module drives it");
    let session = Session::on(node, id);
    let channel = session.create(PAGE as u64, 0).unwrap();
    let (export, eventfd) = (channel.export().unwrap(), session.eventfd(0));
    let [writer, ..] = export.maps();
    let reader = channel.data();
    session.node.events();

    Function::at(function.port().unwrap()).pull().unwrap();
    let begin = Instant::now();
    assert!(wait::until(AT_ONCE, || session.state().0 == PCIEIPC_STATE_GONE), "{:?}", session.state());
    println!("# gone after {} ms", begin.elapsed().as_millis());
    assert!(signals(&eventfd, SOON) > 0);
    let events = session.node.events();
    let last = events.iter().rfind(|event| event.kind == PCIEIPC_EVENT_STATE).unwrap_or_else(|| panic!("{events:?}"));
    assert_eq!(last.detail[1], u64::from(PCIEIPC_STATE_GONE), "{events:?}");
    assert!(wait::until(SOON, || !function.exists()), "hot-plug has taken it from the bus");
    assert!(wait::polled(&export, PollFlags::empty(), SOON).contains(PollFlags::POLLHUP));
    let enodev = Err(Errno::ENODEV);
    let recover = session.node.call(number::RECOVER, &mut pcieipc_recover::new());
    assert_eq!((session.ring(0), export.ring(), recover), (enodev, enodev, enodev));
    writer.fill(9);
    assert_eq!(reader.differences(9), 0, "the ring stays memory");
}

fn main() -> ExitCode {
    ktap::main(promises![a_card_that_is_pulled_out_is_gone_at_once], machine::repair)
}
