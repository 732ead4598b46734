// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether an endpoint does what it is for: it is rung, it interrupts, it reads and writes rings.

use std::{
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Channel, DeviceError, Export, Session};
use crate::{
    link::{RecordHeader, Shared, SharedMut},
    ring::{MIN_DATA_BYTES, RECORD_HEADER_BYTES, Reader, Stop, Writer},
    sys::{Bell, wait_readable},
};

const BYTES: usize = 1024;
const VECTOR: u32 = 0;

/// What an endpoint did in [`Session::self_test`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SelfTest {
    /// From the doorbell's store to the process that its interrupt woke.
    pub interrupt: Duration,
    /// A copy from ring to ring by its engine; `None` when it has none.
    pub copy: Option<Duration>,
}

/// What an endpoint did not do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelfTestError {
    /// The module refused a call.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A doorbell was rung and raised nothing.
    #[error("no interrupt within {0:?} after a doorbell; the endpoint answers, and its interrupts do not arrive")]
    NoInterrupt(Duration),
    /// A ring holds something else than what was put there.
    #[error("{0} does not hold what was put there; the endpoint's memory accesses must not be trusted")]
    WrongData(&'static str),
    /// A system call failed.
    #[error("{0}")]
    System(#[from] std::io::Error),
}

impl Session {
    /// Rings the endpoint and waits for its interrupt, sends itself a record through a ring, and has the engine copy it into another
    /// ring. Everything is given back. `limit` bounds each wait.
    ///
    /// ```no_run
    /// # use pcieipc::device::Node;
    /// # use std::time::Duration;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::open()?;
    /// # let first = node.endpoints()?[0];
    /// # let session = node.attach(first, 1)?;
    /// println!("{:?}", session.self_test(Duration::from_secs(1))?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// What it did not do.
    pub fn self_test(&self, limit: Duration) -> Result<SelfTest, SelfTestError> {
        let bell = Bell::new()?;
        self.set_bell(VECTOR, &bell)?;
        let (from, mut writer, mut reader) = self.ring_to_itself()?;
        fill(writer.try_reserve(BYTES).map_err(|_| SelfTestError::WrongData("a new ring"))?)?;
        let _ = writer.commit(header(), BYTES);
        let rung = Instant::now();
        writer.memory().ring()?;
        if wait_readable(&[bell.as_fd()], limit)? == 0 {
            // What a change of the endpoint's state did to the wait is told by the state.
            self.info()?;
            return Err(SelfTestError::NoInterrupt(limit));
        }
        let interrupt = rung.elapsed();
        bell.drain();
        compare("a ring", reader.try_receive())?;
        let copy = match self.info()?.has_engine {
            true => Some(self.copied(from, limit)?),
            false => None,
        };
        Ok(SelfTest { interrupt, copy })
    }

    /// Has the engine copy the record at the start of channel `from` into another ring.
    fn copied(&self, from: u32, limit: Duration) -> Result<Duration, SelfTestError> {
        let (to, mut writer, mut reader) = self.ring_to_itself()?;
        let reserved = writer.try_reserve(BYTES).map_err(|_| SelfTestError::WrongData("a new ring"))?;
        if reserved.is_none() {
            return Err(SelfTestError::WrongData("a new ring"));
        }
        let begun = Instant::now();
        // Both rings are new, so the record is at home in either.
        self.copy((from, 0), (to, 0), (RECORD_HEADER_BYTES + BYTES) as u32, limit)?;
        let took = begun.elapsed();
        let _ = writer.publish(BYTES);
        compare("a ring that the engine wrote", reader.try_receive())?;
        Ok(took)
    }

    fn ring_to_itself(&self) -> Result<(u32, Writer<Export>, Reader<Channel>), SelfTestError> {
        let channel = self.channel(MIN_DATA_BYTES, VECTOR)?;
        let export = Export::with(Arc::clone(&self.node().kernel), channel.export()?)?;
        let (id, mut writer) = (channel.id(), Writer::new(export));
        // What the engine is to copy has to be in the ring, where the engine reaches it, however short it is.
        writer.without_slots();
        Ok((id, writer, Reader::new(channel)))
    }
}

fn header() -> RecordHeader {
    RecordHeader { epoch: 0x5e1f, step: 7, shard: 3, call: 0x7e57, crc: 0 }
}

fn pattern(at: usize) -> u8 {
    (at * 167 + (at >> 8) * 31 + 41) as u8
}

fn fill(room: Option<SharedMut<'_>>) -> Result<(), SelfTestError> {
    let mut room = room.ok_or(SelfTestError::WrongData("a new ring"))?;
    for at in 0..room.len() {
        // SAFETY: inside the room, which is mapped and this process's own until it is committed.
        unsafe { room.as_mut_ptr().add(at).write_volatile(pattern(at)) };
    }
    Ok(())
}

fn compare(what: &'static str, got: Result<Option<(RecordHeader, Shared<'_>)>, Stop>) -> Result<(), SelfTestError> {
    let Ok(Some((got, payload))) = got else { return Err(SelfTestError::WrongData(what)) };
    // SAFETY: inside the record, which stays mapped until it is released.
    let holds = |at: usize| unsafe { payload.as_ptr().add(at).read_volatile() } == pattern(at);
    let good = got == header() && payload.len() == BYTES && (0..BYTES).all(holds);
    if good { Ok(()) } else { Err(SelfTestError::WrongData(what)) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::device::{EndpointId, Node, fake::FakeKernel};

    fn session(kernel: &Arc<FakeKernel>) -> Session {
        Node::open_with(kernel.clone(), Path::new("/dev/pcieipc")).unwrap().attach(EndpointId(1), 1).unwrap()
    }

    #[test]
    fn an_endpoint_that_works_passes_and_gives_everything_back() {
        let kernel = FakeKernel::new(1);
        let passed = session(&kernel).self_test(Duration::from_secs(5)).unwrap();
        assert!(passed.copy.is_some());
        let world = kernel.world();
        assert_eq!(world.calls["PCIEIPC_IOCTL_CHANNEL_CREATE"], world.calls["PCIEIPC_IOCTL_CHANNEL_DESTROY"]);
    }

    #[test]
    fn an_endpoint_whose_interrupts_do_not_arrive_fails() {
        let kernel = FakeKernel::new(1);
        kernel.world().deaf = true;
        let failed = session(&kernel).self_test(Duration::from_millis(20)).unwrap_err();
        assert!(matches!(failed, SelfTestError::NoInterrupt(_)), "{failed}");
    }

    #[test]
    fn an_engine_that_writes_something_else_fails() {
        let kernel = FakeKernel::new(1);
        kernel.world().flips = true;
        let failed = session(&kernel).self_test(Duration::from_secs(5)).unwrap_err();
        assert!(matches!(failed, SelfTestError::WrongData("a ring that the engine wrote")), "{failed}");
    }

    #[test]
    fn a_dead_endpoint_says_so() {
        let kernel = FakeKernel::new(1);
        let session = session(&kernel);
        kernel.set_state(0, crate::device::fake::GONE);
        assert!(matches!(session.self_test(Duration::from_secs(5)), Err(SelfTestError::Device(DeviceError::Gone))));
    }
}
