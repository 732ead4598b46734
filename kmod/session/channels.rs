// SPDX-License-Identifier: GPL-2.0

//! A session's channels: made, destroyed, exported, imported, and copied between.

use super::{Entry, Session};
use crate::{
    channel::{Channel, Data},
    distance, dmabuf,
    endpoint::Endpoint,
    engine,
    export::{self, Export},
    inline::checked_index,
    limits,
    mmap::Area,
    profile::Engine,
    uapi,
    window::Window,
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::{atomic::Acquire, Arc},
};

impl Session {
    /// Reserves an id and room for a channel of `bytes`.
    fn reserve(&self, bytes: u64) -> Result<u32> {
        let mut table = self.table.lock();
        if table.entries.len() as u32 + table.pending >= limits::channels() {
            limits::say(|| pr_info!("refused a channel: over max_channels={}\n", limits::channels()));
            return Err(ENOSPC);
        }
        if bytes > limits::session_bytes().saturating_sub(table.bytes) {
            limits::say(|| pr_info!("refused {bytes} bytes: over max_session_bytes={}\n", limits::session_bytes()));
            return Err(ENOSPC);
        }
        let id = table.next_id;
        if id >= 1 << 20 {
            return Err(ENOSPC);
        }
        let room = 1 + table.pending as usize;
        table.entries.reserve(room, GFP_KERNEL_ACCOUNT)?;
        table.next_id += 1;
        table.bytes += bytes;
        table.pending += 1;
        Ok(id)
    }

    /// Enters a channel for which room was reserved, or gives the room back.
    fn settle(&self, bytes: u64, entry: Option<Entry>) {
        let mut table = self.table.lock();
        table.pending -= 1;
        match entry {
            Some(entry) => {
                // The session may have recovered meanwhile, and did not find the channel in the table.
                let generation = self.generation.load(Acquire);
                if entry.own && entry.channel.generation() != generation {
                    entry.channel.recover(generation);
                }
                // Room was reserved for all that are pending, so this does not allocate.
                let _ = table.entries.push(entry, GFP_KERNEL);
            }
            None => table.bytes -= bytes,
        }
    }

    /// CHANNEL_CREATE.
    pub(crate) fn create(&self, call: &mut uapi::pcieipc_channel_create) -> Result {
        if call.flags & !uapi::PCIEIPC_CHANNEL_DEVICE_MEMORY != 0 {
            return Err(EINVAL);
        }
        let device_memory = call.flags & uapi::PCIEIPC_CHANNEL_DEVICE_MEMORY != 0;
        let bytes = call.data_bytes;
        if !bytes.is_power_of_two() || bytes < PAGE_SIZE as u64 {
            return Err(EINVAL);
        }
        let (endpoint, generation) = self.usable()?;
        let vector = checked_index(call.vector, endpoint.vectors.len())? as u32;
        if bytes > limits::channel_bytes() {
            limits::say(|| pr_info!("refused {bytes} bytes: over max_channel_bytes={}\n", limits::channel_bytes()));
            return Err(ENOSPC);
        }
        let id = self.reserve(bytes)?;
        let made = Channel::new(endpoint, generation, id, vector, bytes, device_memory);
        let channel = match made {
            Ok(channel) => channel,
            Err(error) => {
                self.settle(bytes, None);
                return Err(error);
            }
        };
        call.channel = id;
        call.data_offset = match &channel.data {
            Data::Host(_) => Area::Data.offset(id),
            Data::Device(window) => window.offset(),
        };
        call.tail_offset = Area::Tail.offset(id);
        call.head_offset = Area::Head.offset(id);
        call.segments = channel.segments;
        let entry = Entry { id, key: channel.key, channel, own: true };
        self.settle(bytes, Some(entry));
        Ok(())
    }

    /// CHANNEL_DESTROY.
    pub(crate) fn destroy(&self, id: u32) -> Result {
        let endpoint = self.endpoint()?;
        let entry = {
            let mut table = self.table.lock();
            let index = table.entries.iter().position(|entry| entry.id == id).ok_or(ENOENT)?;
            let entry = table.entries.remove(index).map_err(|_| ENOENT)?;
            if entry.own {
                table.bytes -= entry.channel.data.bytes();
            }
            entry
        };
        entry.end(endpoint);
        Ok(())
    }

    fn find(&self, id: u32) -> Result<(Arc<Channel>, u64, bool)> {
        let table = self.table.lock();
        let entry = table.entries.iter().find(|entry| entry.id == id).ok_or(ENOENT)?;
        Ok((entry.channel.clone(), entry.key, entry.own))
    }

    /// The own channel's data area that holds a byte of the endpoint's memory.
    pub(super) fn find_window(&self, at: u64) -> Result<Arc<Window>> {
        let table = self.table.lock();
        let mut own = table.entries.iter().filter(|entry| entry.own);
        own.find_map(|entry| match &entry.channel.data {
            Data::Device(window) if (window.start..window.start + window.bytes).contains(&at) => Some(window.clone()),
            _ => None,
        })
        .ok_or(ENOENT)
    }

    pub(super) fn find_own(&self, id: u32) -> Result<Arc<Channel>> {
        match self.find(id)? {
            (channel, _, true) => Ok(channel),
            _ => Err(ENOENT),
        }
    }

    /// CHANNEL_EXPORT: a new descriptor, not yet visible to the process.
    pub(crate) fn export(&self, id: u32) -> Result<export::Descriptor> {
        self.usable()?;
        Export::descriptor(self.find_own(id)?)
    }

    /// CHANNEL_DMABUF: a new descriptor, not yet visible to the process.
    pub(crate) fn share(&self, id: u32) -> Result<export::Descriptor> {
        self.usable()?;
        match &self.find_own(id)?.data {
            Data::Device(window) => dmabuf::descriptor(window),
            Data::Host(_) => Err(EOPNOTSUPP),
        }
    }

    /// CHANNEL_IMPORT.
    pub(crate) fn import(&self, call: &mut uapi::pcieipc_channel_fd) -> Result {
        let (endpoint, generation) = self.usable()?;
        if endpoint.profile.engine == Engine::None {
            return Err(EOPNOTSUPP);
        }
        let channel = Export::channel_of(call.fd)?;
        let id = self.reserve(0)?;
        match channel.import(endpoint, generation, id) {
            Ok(key) => {
                call.channel = id;
                let entry = Entry { id, channel, key, own: false };
                self.settle(0, Some(entry));
                Ok(())
            }
            Err(error) => {
                self.settle(0, None);
                Err(error)
            }
        }
    }

    /// CHANNEL_FREED.
    pub(crate) fn freed(&self, id: u32) -> Result {
        self.usable()?;
        self.find_own(id)?.give_room();
        Ok(())
    }

    /// COPY.
    pub(crate) fn copy(&self, call: &uapi::pcieipc_copy) -> Result {
        if call.flags & !uapi::PCIEIPC_COPY_RING != 0 {
            return Err(EINVAL);
        }
        let (endpoint, generation) = self.usable()?;
        if endpoint.profile.engine == Engine::None {
            return Err(EOPNOTSUPP);
        }
        let bytes = u64::from(call.bytes);
        if bytes == 0 || call.bytes > limits::COPY_BYTES || call.timeout_ms == 0 || call.timeout_ms > limits::COPY_MS {
            return Err(EINVAL);
        }
        let (from, from_key, _) = self.find(call.from)?;
        let (to, to_key, _) = self.find(call.to)?;
        check_range(from.data.bytes(), call.from_offset, bytes)?;
        check_range(to.data.bytes(), call.to_offset, bytes)?;
        let apart = call.from_offset.abs_diff(call.to_offset) >= bytes;
        if Arc::ptr_eq(&from, &to) && !apart {
            return Err(EINVAL);
        }
        let request = engine::Request {
            from: engine::Place { channel: &from, key: from_key, offset: call.from_offset },
            to: engine::Place { channel: &to, key: to_key, offset: call.to_offset },
            bytes,
            timeout_ms: call.timeout_ms,
            generation,
            bell: self.bell_of(call, endpoint, &to)?,
        };
        engine::copy(endpoint, &request)
    }

    /// The doorbell that the engine is to ring after a copy.
    fn bell_of<'a>(&self, call: &uapi::pcieipc_copy, endpoint: &Endpoint, to: &'a Channel) -> Result<Option<engine::Bell<'a>>> {
        if call.flags == 0 {
            return Ok(None);
        }
        if endpoint.profile.engine != Engine::Soft {
            return Err(EOPNOTSUPP);
        }
        to.check()?;
        distance::check_direct(endpoint, &to.endpoint)?;
        let (address, value) = to.endpoint.bell_address(to.vector)?;
        to.take_ring()?;
        Ok(Some(engine::Bell { address, value, channel: to }))
    }
}

fn check_range(area: u64, offset: u64, bytes: u64) -> Result {
    let end = offset.checked_add(bytes).ok_or(EINVAL)?;
    if end > area {
        return Err(EINVAL);
    }
    Ok(())
}

#[kunit_tests(pcieipc_channels)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_a_copy_lies_inside_its_area() {
        assert!(check_range(4096, 0, 4096).is_ok() && check_range(4096, 4095, 1).is_ok() && check_range(4096, 4096, 0).is_ok());
        assert!(check_range(4096, 1, 4096).is_err() && check_range(4096, 4096, 1).is_err() && check_range(0, 0, 1).is_err());
    }

    #[test]
    fn a_range_that_wraps_is_refused() {
        assert!(check_range(u64::MAX, u64::MAX, 1).is_err());
        assert!(check_range(4096, u64::MAX - 3, 8).is_err());
        assert!(check_range(4096, 8, u64::MAX - 3).is_err());
    }
}
