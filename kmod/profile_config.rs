// SPDX-License-Identifier: GPL-2.0

//! Profiles that an administrator fills in through configfs, so that a device that no code knows is driven by a description:
//!
//! ```text
//! mkdir /sys/kernel/config/pcieipc/my-fpga
//! echo 0x10ee > …/vendor; echo 0x9038 > …/device; echo 0x4000 > …/doorbell_offset; …; echo 1 > …/enable
//! echo pcieipc > /sys/bus/pci/devices/…/driver_override; echo … > /sys/bus/pci/drivers_probe
//! ```
//!
//! Every attribute is a number, decimal or with 0x; `none` where the device has no such thing. While a profile is enabled it does
//! not change; a device that is bound keeps the profile with which it was bound.

use crate::profile::{self, Acknowledge, BellValue, Doorbell, Engine, Profile, RingTable};
use core::str::from_utf8;
use kernel::{configfs, new_mutex, page::PAGE_SIZE, prelude::*, str::CString, sync::Mutex};

/// What `none` is stored as.
const NONE: u64 = u64::MAX;

kernel::sync::global_lock! {
    // SAFETY: The module's `init` calls `init` before anything else of the module can run.
    unsafe(uninit) static ENABLED: Mutex<KVec<Entry>> = KVec::new();
}

/// An enabled profile.
struct Entry {
    vendor: u16,
    device: u16,
    profile: Profile,
}

/// Prepares the list of enabled profiles.
///
/// # Safety
///
/// Called once, before any other function here.
pub(crate) unsafe fn init() {
    // SAFETY: By the requirements of this function.
    unsafe { ENABLED.init() };
}

/// What the list holds; dropping this frees it, because a static is never dropped.
pub(crate) struct Contents;

impl Drop for Contents {
    fn drop(&mut self) {
        let old = core::mem::replace(&mut *ENABLED.lock(), KVec::new());
        drop(old);
    }
}

/// The enabled profile of a device.
pub(crate) fn find(vendor: u16, device: u16) -> Option<Profile> {
    let enabled = ENABLED.lock();
    let entry = enabled.iter().find(|entry| entry.vendor == vendor && entry.device == device)?;
    Some(entry.profile)
}

/// Declares the attributes: name, index, value at first. A place of the array in [`Draft`] for each.
macro_rules! attributes {
    ($($name:ident: $index:literal = $initial:expr),* $(,)?) => {
        const COUNT: usize = [$($index),*].len();
        const NAMES: [&str; COUNT] = [$(stringify!($name)),*];
        const INITIAL: [u64; COUNT] = [$($initial),*];

        #[allow(non_upper_case_globals)]
        mod at {
            $(pub(super) const $name: usize = $index;)*
        }

        $(
            #[vtable]
            impl configfs::AttributeOperations<$index> for Draft {
                type Data = Draft;

                fn show(draft: &Draft, page: &mut [u8; PAGE_SIZE]) -> Result<usize> {
                    draft.show($index, page)
                }

                fn store(draft: &Draft, page: &[u8]) -> Result {
                    draft.store($index, page)
                }
            }
        )*

        fn item_type() -> &'static configfs::ItemType<configfs::Group<Draft>, Draft> {
            kernel::configfs_attrs! {
                container: configfs::Group<Draft>,
                data: Draft,
                attributes: [$($name: $index),*],
            }
        }
    };
}

attributes! {
    vendor: 0 = NONE,
    device: 1 = NONE,
    vectors: 2 = 1,
    dma_bits: 3 = 64,
    // 1: its user can aim its DMA at any address. The safe answer about a device that no code knows.
    user_dma: 4 = 1,
    memory_bar: 5 = NONE,
    doorbell_bar: 6 = 0,
    doorbell_offset: 7 = NONE,
    doorbell_stride: 8 = 0,
    doorbell_width: 9 = 4,
    doorbell_value: 10 = 1,
    // 1: the number of the vector is added to the value.
    doorbell_add_vector: 11 = 0,
    // 1: nothing but doorbells is on their pages.
    doorbell_page: 12 = 0,
    ring_bar: 13 = NONE,
    ring_offset: 14 = 0,
    ring_stride: 15 = 32,
    ring_slots: 16 = 1,
    ring_address: 17 = 0,
    ring_length: 18 = 8,
    ring_tag: 19 = NONE,
    ring_valid: 20 = NONE,
    ack_bar: 21 = NONE,
    ack_status: 22 = 0,
    ack_clear: 23 = 0,
    // 1: the engine and the control registers of the soft endpoint, in BAR 0.
    soft_engine: 24 = 0,
    engine_vector: 25 = NONE,
    // 1: its peers see its memory, so what is in it is not cleared for a new channel.
    memory_shared: 26 = 0,
    enable: 27 = 0,
}

/// A profile that is being filled in.
#[pin_data(PinnedDrop)]
pub(crate) struct Draft {
    name: CString,
    #[pin]
    values: Mutex<[u64; COUNT]>,
}

impl Draft {
    fn new(name: CString) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            name,
            values <- new_mutex!(INITIAL, "pcieipc_profile"),
        })
    }

    fn show(&self, index: usize, page: &mut [u8; PAGE_SIZE]) -> Result<usize> {
        let value = self.values.lock().get(index).copied().ok_or(EINVAL)?;
        let text =
            if value == NONE { CString::try_from_fmt(fmt!("none\n"))? } else { CString::try_from_fmt(fmt!("{value:#x}\n"))? };
        let bytes = text.to_bytes();
        page.get_mut(..bytes.len()).ok_or(EINVAL)?.copy_from_slice(bytes);
        Ok(bytes.len())
    }

    fn store(&self, index: usize, text: &[u8]) -> Result {
        let value = parse(text)?;
        let mut values = self.values.lock();
        let enabled = values[at::enable] != 0;
        if index == at::enable {
            match (value, enabled) {
                (1, false) => self.publish(&values)?,
                (0, true) => self.withdraw(&values),
                (0, false) | (1, true) => {}
                _ => return Err(EINVAL),
            }
        } else if enabled {
            return Err(EBUSY);
        }
        *values.get_mut(index).ok_or(EINVAL)? = value;
        Ok(())
    }

    /// Says why it is not enabled, which only an administrator can cause.
    fn refuse<T>(&self, why: &str) -> Result<T> {
        pr_info!("profile {} is not enabled: {why}\n", self.name.to_str().unwrap_or_default());
        Err(EINVAL)
    }

    /// What an attribute means.
    fn field<T>(&self, values: &[u64; COUNT], index: usize, convert: impl FnOnce(u64) -> Result<T>) -> Result<T> {
        let (value, attribute) = (values.get(index).copied().ok_or(EINVAL)?, NAMES.get(index).copied().ok_or(EINVAL)?);
        convert(value).map_err(|_| {
            pr_info!("profile {} is not enabled: its {attribute} is not possible\n", self.name.to_str().unwrap_or_default());
            EINVAL
        })
    }

    fn publish(&self, values: &[u64; COUNT]) -> Result {
        let entry = Entry {
            vendor: self.field(values, at::vendor, narrow)?,
            device: self.field(values, at::device, narrow)?,
            profile: self.profile(values)?,
        };
        let mut enabled = ENABLED.lock();
        if enabled.iter().any(|other| other.vendor == entry.vendor && other.device == entry.device) {
            pr_info!("profile {} is not enabled: another is, for these devices\n", self.name.to_str().unwrap_or_default());
            return Err(EEXIST);
        }
        Ok(enabled.push(entry, GFP_KERNEL)?)
    }

    fn withdraw(&self, values: &[u64; COUNT]) {
        let ids = (values[at::vendor], values[at::device]);
        ENABLED.lock().retain(|entry| (u64::from(entry.vendor), u64::from(entry.device)) != ids);
    }

    fn profile(&self, values: &[u64; COUNT]) -> Result<Profile> {
        let value = self.field(values, at::doorbell_value, narrow)?;
        let adds_vector = self.field(values, at::doorbell_add_vector, flag)?;
        let bell = Doorbell {
            bar: self.field(values, at::doorbell_bar, bar)?,
            offset: self.field(values, at::doorbell_offset, offset)?,
            stride: self.field(values, at::doorbell_stride, offset)?,
            width: self.field(
                values,
                at::doorbell_width,
                |width| if width == 4 || width == 8 { narrow(width) } else { Err(EINVAL) },
            )?,
            value: if adds_vector { BellValue::Vector(value) } else { BellValue::Constant(value) },
            isolated: self.field(values, at::doorbell_page, flag)?,
        };
        let soft_engine = self.field(values, at::soft_engine, flag)?;
        let profile = Profile {
            name: profile::name(self.name.to_str().map_err(|_| EINVAL)?),
            signature: None,
            doorbell: bell,
            vectors: self.field(values, at::vectors, |vectors| between(vectors, 1, 64))?,
            engine_vector: self.field(values, at::engine_vector, |vector| optional(vector).map(narrow).transpose())?,
            rings: self.rings(values)?,
            engine: if soft_engine { Engine::Soft } else { Engine::None },
            acknowledge: self.acknowledge(values)?,
            memory_bar: self.field(values, at::memory_bar, |number| optional(number).map(bar).transpose())?,
            memory_shared: self.field(values, at::memory_shared, flag)?,
            user_dma: self.field(values, at::user_dma, flag)?,
            dma_bits: self.field(values, at::dma_bits, |bits| between(bits, 24, 64))?,
        };
        match profile.flaw() {
            None => Ok(profile),
            Some(flaw) => self.refuse(flaw),
        }
    }

    fn rings(&self, values: &[u64; COUNT]) -> Result<Option<RingTable>> {
        let Some(bar) = self.field(values, at::ring_bar, |number| optional(number).map(bar).transpose())? else {
            return Ok(None);
        };
        Ok(Some(RingTable {
            bar,
            offset: self.field(values, at::ring_offset, offset)?,
            stride: self.field(values, at::ring_stride, offset)?,
            slots: self.field(values, at::ring_slots, |slots| between(slots, 1, 4096))?,
            address: self.field(values, at::ring_address, offset)?,
            length: self.field(values, at::ring_length, offset)?,
            tag: self.field(values, at::ring_tag, |tag| optional(tag).map(offset).transpose())?,
            valid: self.field(values, at::ring_valid, |valid| optional(valid).map(offset).transpose())?,
        }))
    }

    fn acknowledge(&self, values: &[u64; COUNT]) -> Result<Option<Acknowledge>> {
        let Some(bar) = self.field(values, at::ack_bar, |number| optional(number).map(bar).transpose())? else {
            return Ok(None);
        };
        Ok(Some(Acknowledge {
            bar,
            status: self.field(values, at::ack_status, offset)?,
            clear: self.field(values, at::ack_clear, offset)?,
            engine: 0,
        }))
    }
}

#[pinned_drop]
impl PinnedDrop for Draft {
    fn drop(self: Pin<&mut Self>) {
        let values = self.values.lock();
        if values[at::enable] != 0 {
            self.withdraw(&values);
        }
    }
}

fn parse(text: &[u8]) -> Result<u64> {
    let text = from_utf8(text).map_err(|_| EINVAL)?.trim();
    if text == "none" {
        return Ok(NONE);
    }
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| EINVAL)
}

fn optional(value: u64) -> Option<u64> {
    (value != NONE).then_some(value)
}

fn narrow<T: TryFrom<u64>>(value: u64) -> Result<T> {
    T::try_from(value).map_err(|_| EINVAL)
}

fn between(value: u64, least: u64, most: u64) -> Result<u32> {
    if (least..=most).contains(&value) {
        narrow(value)
    } else {
        Err(EINVAL)
    }
}

fn flag(value: u64) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(EINVAL),
    }
}

fn bar(value: u64) -> Result<u32> {
    if value < crate::registers::BARS as u64 {
        Ok(value as u32)
    } else {
        Err(EINVAL)
    }
}

/// An offset into a BAR; larger ones are refused here so that sums of them do not overflow.
fn offset(value: u64) -> Result<usize> {
    if value < 1 << 40 && value % 4 == 0 {
        Ok(value as usize)
    } else {
        Err(EINVAL)
    }
}

/// The directory of all profiles.
#[pin_data]
pub(crate) struct Profiles {}

impl Profiles {
    /// The subsystem `pcieipc`.
    pub(crate) fn subsystem() -> impl PinInit<configfs::Subsystem<Self>, Error> {
        let item_type = kernel::configfs_attrs! {
            container: configfs::Subsystem<Profiles>,
            data: Profiles,
            child: Draft,
            attributes: [built_in: 0],
        };
        configfs::Subsystem::new(c"pcieipc", item_type, try_pin_init!(Self {}))
    }
}

#[vtable]
impl configfs::GroupOperations for Profiles {
    type Child = Draft;

    fn make_group(&self, name: &CStr) -> Result<impl PinInit<configfs::Group<Draft>, Error>> {
        if name.to_bytes().len() > 31 {
            return Err(ENAMETOOLONG);
        }
        let own: CString = name.try_into()?;
        Ok(configfs::Group::new(name.try_into()?, item_type(), Draft::new(own)))
    }
}

/// The names of the built-in profiles.
#[vtable]
impl configfs::AttributeOperations<0> for Profiles {
    type Data = Profiles;

    fn show(_profiles: &Profiles, page: &mut [u8; PAGE_SIZE]) -> Result<usize> {
        let text = b"soft\nivshmem-doorbell\nedu\n";
        page.get_mut(..text.len()).ok_or(EINVAL)?.copy_from_slice(text);
        Ok(text.len())
    }
}

#[kunit_tests(pcieipc_profile)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_decimal_or_hexadecimal_or_none() {
        assert!(parse(b"12\n").is_ok_and(|value| value == 12));
        assert!(parse(b" 0x1F ").is_ok_and(|value| value == 31));
        assert!(parse(b"none\n").is_ok_and(|value| value == NONE));
        for bad in [&b""[..], b"0x", b"1 2", b"-1", b"x", b"\xff\xfe", b"99999999999999999999999"] {
            assert!(parse(bad).is_err());
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(bar(5).is_ok() && bar(6).is_err());
        assert!(offset(8).is_ok() && offset(6).is_err() && offset(1 << 40).is_err() && offset(NONE).is_err());
        assert!(flag(1).is_ok_and(|flag| flag) && flag(2).is_err());
        assert!(narrow::<u16>(0x1_0000).is_err());
        assert!(
            between(1, 1, 64).is_ok() && between(64, 1, 64).is_ok() && between(0, 1, 64).is_err() && between(65, 1, 64).is_err()
        );
    }
}
