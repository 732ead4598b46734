// SPDX-License-Identifier: GPL-2.0

//! What makes one kind of endpoint differ from another: where its doorbells, its ring table and its engine are.
//!
//! The soft endpoint of `docs/soft-endpoint.md` is the reference; other devices are described, not programmed.

use kernel::{page::PAGE_SIZE, prelude::*};

/// Most vectors that a function can have.
const VECTORS: u32 = 2048;

/// Most bytes that mapped doorbells of one endpoint take.
pub(crate) const BELL_BYTES: usize = 1 << 20;

/// Where the registers of every engine that is known are: this BAR's first bytes.
pub(crate) const ENGINE_BAR: u32 = 0;
/// So many.
pub(crate) const ENGINE_BYTES: usize = PAGE_SIZE;

/// What is stored to ring doorbell `vector`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BellValue {
    /// The same number for all.
    Constant(u32),
    /// The number of the vector plus a constant.
    Vector(u32),
    /// `ivshmem`: the device's own id, read from a register, in the upper half, the vector in the lower.
    OwnId {
        /// Where in the doorbell's BAR the id is.
        register: usize,
    },
}

/// Where the doorbells are.
#[derive(Clone, Copy)]
pub(crate) struct Doorbell {
    /// BAR number.
    pub(crate) bar: u32,
    /// Offset of doorbell 0.
    pub(crate) offset: usize,
    /// Distance between doorbells, 0 when there is one register for all.
    pub(crate) stride: usize,
    /// Bytes of the store, 4 or 8.
    pub(crate) width: u32,
    /// What to store.
    pub(crate) value: BellValue,
    /// Nothing but doorbells is on their pages, so these may be mapped.
    pub(crate) isolated: bool,
}

impl Doorbell {
    /// Offset of the doorbell of `vector` in the BAR.
    pub(crate) fn offset_of(&self, vector: usize) -> usize {
        self.offset + self.stride * vector
    }
}

/// Where the kernel tells the endpoint about its rings; offsets within a slot, `None` where the device has no such field.
#[derive(Clone, Copy)]
pub(crate) struct RingTable {
    /// BAR number.
    pub(crate) bar: u32,
    /// Offset of slot 0.
    pub(crate) offset: usize,
    /// Distance between slots.
    pub(crate) stride: usize,
    /// How many slots.
    pub(crate) slots: u32,
    /// 8 bytes: bus address.
    pub(crate) address: usize,
    /// 4 bytes: length.
    pub(crate) length: usize,
    /// 4 bytes: channel and piece.
    pub(crate) tag: Option<usize>,
    /// 4 bytes: 1 valid, 0 not. Without it a length of 0 means not valid.
    pub(crate) valid: Option<usize>,
}

/// How the endpoint's DMA engine is driven.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    /// None, or none that the kernel knows.
    None,
    /// That of the soft endpoint, in BAR 0.
    Soft,
    /// That of `edu`, in BAR 0.
    Edu,
}

/// An interrupt has to be acknowledged at the device.
#[derive(Clone, Copy)]
pub(crate) struct Acknowledge {
    /// BAR number.
    pub(crate) bar: u32,
    /// 4 bytes: read what is pending.
    pub(crate) status: usize,
    /// 4 bytes: write it back here.
    pub(crate) clear: usize,
    /// Bits that say that the engine has finished.
    pub(crate) engine: u32,
}

/// How the module recognises that the device is the one that the profile means.
#[derive(Clone, Copy)]
pub(crate) struct Signature {
    /// BAR number.
    pub(crate) bar: u32,
    /// 4 bytes at this offset
    pub(crate) offset: usize,
    /// under this mask
    pub(crate) mask: u32,
    /// read this.
    pub(crate) value: u32,
}

/// One kind of endpoint.
#[derive(Clone, Copy)]
pub(crate) struct Profile {
    /// Its name, padded with zeros.
    pub(crate) name: [u8; 32],
    /// Checked in probe.
    pub(crate) signature: Option<Signature>,
    /// The doorbells.
    pub(crate) doorbell: Doorbell,
    /// Vectors for users, counted from 0.
    pub(crate) vectors: u32,
    /// Vector that the engine raises when it is finished.
    pub(crate) engine_vector: Option<u32>,
    /// The ring table.
    pub(crate) rings: Option<RingTable>,
    /// The engine.
    pub(crate) engine: Engine,
    /// Interrupts have to be acknowledged.
    pub(crate) acknowledge: Option<Acknowledge>,
    /// BAR of the endpoint's own memory.
    pub(crate) memory_bar: Option<u32>,
    /// Peers see the endpoint's memory too, by intent, so it is not cleared for a user.
    pub(crate) memory_shared: bool,
    /// The user can aim the endpoint's DMA at any address that the endpoint can reach.
    pub(crate) user_dma: bool,
    /// Bits of a bus address that the device can drive.
    pub(crate) dma_bits: u32,
}

/// A name in the form that a profile holds it.
pub(crate) const fn name(text: &str) -> [u8; 32] {
    let mut name = [0; 32];
    let bytes = text.as_bytes();
    let mut index = 0;
    while index < bytes.len() && index < 31 {
        name[index] = bytes[index];
        index += 1;
    }
    name
}

impl Profile {
    /// The soft endpoint, `docs/soft-endpoint.md`.
    pub(crate) const SOFT: Self = Self {
        name: name("soft"),
        signature: Some(Signature { bar: 0, offset: 0, mask: !0, value: 0x4350_4950 }),
        doorbell: Doorbell { bar: 0, offset: 0x3000, stride: 4, width: 4, value: BellValue::Vector(1), isolated: true },
        vectors: 7,
        engine_vector: Some(7),
        rings: Some(RingTable {
            bar: 0,
            offset: 0x1000,
            stride: 32,
            slots: 64,
            address: 0x00,
            length: 0x08,
            tag: Some(0x0c),
            valid: Some(0x10),
        }),
        engine: Engine::Soft,
        acknowledge: None,
        memory_bar: Some(2),
        memory_shared: false,
        user_dma: false,
        dma_bits: 64,
    };

    /// QEMU's `ivshmem-doorbell`: the interrupts of a shared-memory device, without DMA.
    pub(crate) const IVSHMEM: Self = Self {
        name: name("ivshmem-doorbell"),
        signature: None,
        doorbell: Doorbell { bar: 0, offset: 12, stride: 0, width: 4, value: BellValue::OwnId { register: 8 }, isolated: false },
        vectors: 8,
        engine_vector: None,
        rings: None,
        engine: Engine::None,
        acknowledge: None,
        memory_bar: Some(2),
        memory_shared: true,
        user_dma: false,
        dma_bits: 64,
    };

    /// QEMU's `edu`: one interrupt, which has to be acknowledged, raised by a register or by the
    /// engine.
    pub(crate) const EDU: Self = Self {
        name: name("edu"),
        signature: Some(Signature { bar: 0, offset: 0, mask: 0xffff, value: 0x00ed }),
        doorbell: Doorbell { bar: 0, offset: 0x60, stride: 0, width: 4, value: BellValue::Constant(1), isolated: false },
        vectors: 1,
        engine_vector: None,
        rings: None,
        engine: Engine::Edu,
        acknowledge: Some(Acknowledge { bar: 0, status: 0x24, clear: 0x64, engine: 0x100 }),
        memory_bar: None,
        memory_shared: false,
        user_dma: false,
        dma_bits: 28,
    };

    /// What is wrong with it: nothing that users map or ring may be anything else, no field lies outside of its slot, and stores are aligned.
    pub(crate) fn flaw(&self) -> Option<&'static str> {
        let bell = &self.doorbell;
        let width = bell.width as usize;
        let last = bell.offset_of(self.vectors.saturating_sub(1) as usize) + width;
        let pages = bell.offset..last.next_multiple_of(PAGE_SIZE);
        let aligned = |offset: usize, bytes: usize| offset % bytes == 0;
        // Interrupts of a vector are either a user's or the engine's.
        let mut flaw = self.engine_vector.and_then(|vector| {
            let apart = (self.vectors..VECTORS).contains(&vector);
            (!apart).then_some("engine_vector must be behind the vectors of users")
        });
        let mut refuse = |wrong: bool, why: &'static str| {
            if wrong {
                flaw = flaw.or(Some(why));
            }
        };
        refuse(
            !aligned(bell.offset, width) || !aligned(bell.stride, width),
            "doorbell_offset and doorbell_stride must be multiples of doorbell_width",
        );
        if bell.isolated {
            refuse(!aligned(bell.offset, PAGE_SIZE), "doorbell_page: doorbell_offset must be that of a page");
            // Offsets of mapped pages, which are zapped together, have so much room for one endpoint.
            refuse(last - bell.offset > BELL_BYTES, "doorbell_page: the doorbells take more than 1 MiB");
        }
        refuse(self.memory_bar == Some(bell.bar), "memory_bar holds the doorbells");
        let mut registers = [None; 4];
        if let Some(rings) = &self.rings {
            let inside = |field: usize, bytes: usize| aligned(field, bytes) && field + bytes <= rings.stride;
            refuse(!aligned(rings.offset, 8) || !aligned(rings.stride, 8), "ring_offset and ring_stride must be multiples of 8");
            refuse(!inside(rings.address, 8), "ring_address is not aligned or outside of its slot");
            refuse(!inside(rings.length, 4), "ring_length is not aligned or outside of its slot");
            refuse(!rings.tag.is_none_or(|tag| inside(tag, 4)), "ring_tag is not aligned or outside of its slot");
            refuse(!rings.valid.is_none_or(|valid| inside(valid, 4)), "ring_valid is not aligned or outside of its slot");
            let end = rings.offset + rings.stride * rings.slots as usize;
            // A ring of a doorbell would store into the table.
            let rung = bell.bar == rings.bar && bell.offset < end && last > rings.offset;
            refuse(rung, "doorbells lie on the ring table");
            registers[0] = Some((rings.bar, rings.offset, end));
        }
        if let Some(acknowledge) = &self.acknowledge {
            let several = self.vectors > 1 || self.engine_vector.is_some();
            refuse(several, "ack_bar needs vectors=1 and no engine_vector: one register does not tell which vector fired");
            registers[1] = Some((acknowledge.bar, acknowledge.status, acknowledge.status + 4));
            registers[2] = Some((acknowledge.bar, acknowledge.clear, acknowledge.clear + 4));
        }
        if self.engine != Engine::None {
            // What rings edu is beside its engine; a profile that is filled in can have the soft endpoint's alone.
            let rung = self.engine == Engine::Soft && bell.bar == ENGINE_BAR && bell.offset < ENGINE_BYTES;
            refuse(rung, "doorbells lie on the registers of the soft endpoint's engine");
            registers[3] = Some((ENGINE_BAR, 0, ENGINE_BYTES));
        }
        for (bar, start, end) in registers.into_iter().flatten() {
            refuse(self.memory_bar == Some(bar), "memory_bar holds registers");
            let shared = bell.isolated && bar == bell.bar && end > pages.start && start < pages.end;
            refuse(shared, "doorbell_page: other registers lie on the pages of the doorbells");
        }
        flaw
    }

    /// The built-in profile of a device that an administrator bound by driver_override.
    pub(crate) fn built_in(vendor: u16, device: u16) -> Option<&'static Self> {
        match (vendor, device) {
            (0x1234, 0x7069) => Some(&Self::SOFT),
            (0x1af4, 0x1110) => Some(&Self::IVSHMEM),
            (0x1234, 0x11e8) => Some(&Self::EDU),
            _ => None,
        }
    }
}

#[kunit_tests(pcieipc_profile_sound)]
mod tests {
    use super::*;

    fn changed(change: impl FnOnce(&mut Profile)) -> Profile {
        let mut profile = Profile::SOFT;
        change(&mut profile);
        profile
    }

    fn with_rings(change: impl FnOnce(&mut RingTable)) -> Profile {
        changed(|profile| {
            if let Some(rings) = &mut profile.rings {
                change(rings);
            }
        })
    }

    #[test]
    fn built_in_profiles_are_sound() {
        assert!(Profile::SOFT.flaw().is_none() && Profile::IVSHMEM.flaw().is_none() && Profile::EDU.flaw().is_none());
    }

    #[test]
    fn memory_and_doorbell_pages_hold_no_registers() {
        assert!(changed(|profile| profile.memory_bar = Some(0)).flaw().is_some());
        assert!(changed(|profile| profile.doorbell.offset = 0x1000).flaw().is_some());
        assert!(changed(|profile| profile.doorbell.offset = 0).flaw().is_some());
        assert!(changed(|profile| profile.doorbell.stride = 1 << 20).flaw().is_some());
    }

    #[test]
    fn fields_lie_inside_their_slot_and_are_aligned() {
        assert!(with_rings(|rings| rings.address = 4).flaw().is_some());
        assert!(with_rings(|rings| rings.address = 32).flaw().is_some());
        assert!(with_rings(|rings| rings.length = 32).flaw().is_some());
        assert!(with_rings(|rings| rings.valid = Some(64)).flaw().is_some());
        assert!(changed(|profile| profile.doorbell.width = 8).flaw().is_some());
        assert!(changed(|profile| profile.engine_vector = Some(u32::MAX)).flaw().is_some());
    }

    #[test]
    fn a_vector_is_a_users_or_the_engines() {
        assert!(changed(|profile| profile.engine_vector = Some(0)).flaw().is_some());
        assert!(changed(|profile| profile.engine_vector = Some(6)).flaw().is_some());
        assert!(changed(|profile| profile.engine_vector = Some(VECTORS - 1)).flaw().is_none());
        assert!(changed(|profile| profile.vectors = 8).flaw().is_some());
    }

    #[test]
    fn one_register_acknowledges_one_vector() {
        let acknowledged = |vectors, engine_vector| {
            changed(|profile| {
                profile.acknowledge = Profile::EDU.acknowledge;
                (profile.vectors, profile.engine_vector) = (vectors, engine_vector);
            })
        };
        assert!(acknowledged(1, None).flaw().is_none());
        assert!(acknowledged(2, None).flaw().is_some() && acknowledged(1, Some(1)).flaw().is_some());
    }

    #[test]
    fn a_doorbell_is_no_register_even_where_it_is_not_mapped() {
        for (offset, good) in [(0, false), (0xff0, false), (0x1000, false), (0x17fc, false), (0x1800, true), (0xfe4, false)] {
            let profile = changed(|profile| (profile.doorbell.isolated, profile.doorbell.offset) = (false, offset));
            assert_eq!(profile.flaw().is_none(), good);
        }
        // The last of seven, 24 bytes behind the first, would be the first byte of the table.
        let before = |offset| {
            changed(|profile| {
                (profile.doorbell.isolated, profile.doorbell.offset, profile.engine, profile.engine_vector) =
                    (false, offset, Engine::None, None);
            })
        };
        assert!(before(0xfe4).flaw().is_none() && before(0xfe8).flaw().is_some());
    }
}
